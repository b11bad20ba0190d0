"""playbooks/support.yml on a pair that is well: what it brings and leaves out, and what the doctor says about it."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import bed
import pair
import pytest

SOURCES = bed.ROOT / "files/overlay/src"


@pytest.fixture(scope="module")
def support(tmp_path_factory) -> Path:
    """The unpacked archive."""
    folder = tmp_path_factory.mktemp("support")
    run = pair.run_playbook("playbooks/support.yml", support_dir=str(folder))
    assert run.status == 0, run.failures()
    archives = list(folder.glob("*"))
    assert [path.stat().st_mode & 0o777 for path in archives] == [0o600]
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return archives[0].with_name(archives[0].name.removesuffix(".tar.gz"))


def test_both_nodes_are_in_it(support):
    assert {path.name for path in support.iterdir()} == set(pair.NODES)
    for node in pair.NODES:
        addresses = json.loads((support / node / "ip-addr.json").read_text())
        assert {"enp1s0f1np1", "enP2p1s0f1np1"} <= {entry["ifname"] for entry in addresses}


def test_no_key_is_in_it(support):
    key = bed.api_key()
    assert not [path for path in support.rglob("*") if path.is_file() and key in path.read_text()]


def test_nothing_stays_on_the_nodes():
    for node in pair.NODES:
        assert not bed.on(node, "find", "/tmp", "/root", "-name", "*glm-vllm-support*").strip()


@pytest.mark.full  # seen on a pair with rails and without an engine only
def test_the_doctor_has_nothing_against_the_pair(support):
    command = [sys.executable, "-m", "glm_vllm_overlay", "doctor", "--bundle", str(support), "--json"]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
