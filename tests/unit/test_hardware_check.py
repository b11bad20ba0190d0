"""tests/gpu/hardware_check.py without a GPU: no check hides another, and the page names each."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/gpu/hardware_check.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("hardware_check", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def options(tmp_path) -> argparse.Namespace:
    """As on a node with a device: each check is really tried, and fails here."""
    return argparse.Namespace(work=tmp_path, rank=None, master="", no_device=False)


def test_without_a_device_each_check_says_so(tmp_path):
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path, out, "--only", "device", "nccl"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [(line["id"], line["state"], line["detail"]) for line in found["checks"]] == [
        ("device", "skipped", "no CUDA device"),
        ("nccl", "skipped", "needs both nodes"),
    ]


def test_a_check_that_breaks_is_a_line(program, options):
    line = program.carried_out("backend", options)
    assert (line["state"], line["detail"]) == ("failed", "nothing to look at: `speculators` did not run")


def test_a_check_that_hangs_is_ended(program, options, monkeypatch):
    function, _, pair = program.CHECKS["backend"]
    monkeypatch.setitem(program.CHECKS, "backend", (function, 0.001, pair))
    line = program.carried_out("backend", options)
    assert line["state"] == "failed" and "not within 0.001 s" in line["detail"]


def test_a_check_that_dies_without_a_word_is_a_line(program, options):
    options.work = Path("/dev/null/nowhere")  # argparse refuses the rank, so that the process ends at once
    options.rank, options.master = 7, "192.0.2.1"
    line = program.carried_out("nccl", options)
    assert line["state"] == "failed" and line["detail"].startswith("ended with 2")


def test_the_page_names_each_check(program):
    page = (ROOT / "docs/hardware-check.md").read_text()
    assert [name for name in program.CHECKS if f"`{name}`" not in page] == []


def test_an_engine_that_dies_at_once_lent_nothing(program, tmp_path, monkeypatch):
    """Its exit status says nothing: rank 1 also goes with an error when rank 0 has left."""
    log = tmp_path / "mp.log"
    log.write_text("no such device\n")
    with pytest.raises(program.Failed, match="the engine ended: no such device"):
        program._lent(subprocess.Popen(["true"]), log)
    monkeypatch.setattr(program, "SOONEST", 0.0)
    assert program._lent(subprocess.Popen(["false"]), log).startswith("lent its device for")
