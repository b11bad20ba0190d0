"""`glm-vllm guard`: when it ends the engine, whom it signals, and what it leaves. Real processes, swapped files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from glm_vllm_overlay.node import guard, hold, serve
from glm_vllm_overlay.node.errors import Unusable
from glm_vllm_overlay.node.paths import Paths
from glm_vllm_overlay.node.settings import Node

GIB = 1024**3
LIMITS = guard.Limits(reserve=4 * GIB, floor=GIB, pressure=50.0)
CALM = "some avg10=1.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.50 avg60=0.00 avg300=0.00 total=1\n"
OUT_OF_MEMORY = (
    "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from "
    "_memdescAllocInternal(pMemDesc) @ mem_desc.c:1359"
)
# The engine: a main process that notes a TERM, and a rank below it.
MAIN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(sys.argv[1], "asked").write_text("TERM"))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
pathlib.Path(sys.argv[1], "draft").write_text(str(child.pid))
pathlib.Path(sys.argv[1], "draft").rename(pathlib.Path(sys.argv[1], "rank"))
while True:
    time.sleep(100)
"""


@pytest.fixture
def engine(node):
    """A running engine, as systemd shows it; its main process and its rank."""
    shutil.rmtree(node.root / "proc")
    (node.root / "proc").symlink_to("/proc")
    node.env(GLM_MEMINFO=node.root / "meminfo")
    available(node, 100)
    main = subprocess.Popen([sys.executable, "-c", MAIN, str(node.root)])
    while not (node.root / "rank").exists():
        time.sleep(0.01)
    node.unit("glm-vllm-head", MainPID=str(main.pid), InvocationID="this-start")
    yield main, int((node.root / "rank").read_text())
    main.kill()
    main.wait()


def available(node, gib: float) -> None:
    node.put("meminfo", f"MemTotal: {122 * 1024**2} kB\nMemFree: 1024 kB\nMemAvailable: {int(gib * 1024**2)} kB\n")


@pytest.fixture
def watching(node):
    """A guard of this node, with a file for the pressure."""
    node.put("pressure", CALM)
    paths = Paths(node.root)
    return lambda: guard.Guard(paths, Node.load(paths), LIMITS, str(node.root / "pressure"))


def asked(node) -> bool:
    """Whether the engine's main process was asked to end; it may take a moment to say so."""
    return within(10, (node.root / "asked").exists)


def left_alone(node) -> bool:
    """Whether it was not."""
    return not within(0.3, (node.root / "asked").exists)


def within(seconds: float, condition) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def gone(pid: int) -> bool:
    """Whether a process has ended; its death is the kernel's to carry out."""
    return within(10, lambda: not alive(pid))


def kept(node) -> dict:
    return json.loads((node.root / "var/lib/glm-vllm/watch/memory.json").read_text())


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_leaves_a_healthy_node_alone(node, engine, watching):
    watching().look(0.0)
    assert left_alone(node)
    assert not (node.root / "var/lib/glm-vllm/watch/memory.json").exists()


def test_asks_systemd_nothing_while_all_is_well(node, engine, watching, monkeypatch):
    monkeypatch.setattr(guard.units, "show", lambda *_: pytest.fail("systemd was asked"))
    watching().look(0.0)


def test_warns_once_below_the_reserve(node, engine, watching, capsys):
    each = watching()
    for gib in (3.9, 3.5, 4.1, 3.9):
        available(node, gib)
        each.look(0.0)
    available(node, 5)
    each.look(0.0)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("3.9 GiB are available, less than the reserve of 4.0; largest: ")
    assert second == "5.0 GiB are available again"
    assert left_alone(node)


def test_ends_the_start_below_the_floor(node, engine, watching):
    available(node, 0.9)
    watching().look(0.0)
    assert asked(node) and alive(engine[1])
    record = kept(node)
    assert record["invocation_id"] == "this-start"
    assert record["cause"] == "0.90 GiB are available, less than 1.00"
    assert record["what"].startswith(f"the memory guard ended the engine: {record['cause']}; in GiB: ")
    assert record["memory"]["free"] == 1024**2
    assert 3 < len(record["processes"]) <= 10
    sizes = [process["rss"] for process in record["processes"]]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 0
    assert {"pid", "name", "user", "rss"} == set(record["processes"][0])
    assert record["elsewhere"] > 50 * GIB


def test_asks_once_a_start(node, engine, watching):
    each = watching()
    available(node, 0.9)
    each.look(0.0)
    assert asked(node)
    (node.root / "asked").unlink()
    each.look(0.2)
    assert left_alone(node)
    node.unit("glm-vllm-head", MainPID=str(engine[0].pid), InvocationID="next-start")
    each.look(0.4)
    assert asked(node)
    assert kept(node)["invocation_id"] == "next-start"


def test_kills_below_half_the_floor_and_leaves_who_reports(node, engine, watching):
    available(node, 0.4)
    watching().look(0.0)
    assert asked(node)
    assert gone(engine[1])
    assert alive(engine[0].pid)


def test_a_start_that_does_not_end_and_takes_more_is_killed(node, engine, watching):
    each = watching()
    available(node, 0.9)
    each.look(0.0)
    available(node, 0.4)
    each.look(0.2)
    assert gone(engine[1])


def test_ray_s_workers_are_killed_where_ray_holds_the_rank(node, engine, watching):
    node.env(GLM_EXECUTOR="ray")
    node.unit("glm-vllm-head", MainPID="0", InvocationID="this-start")
    node.unit("ray-head", MainPID=str(engine[0].pid), InvocationID="ray-start")
    available(node, 0.4)
    watching().look(0.0)
    assert alive(engine[1]), "no engine runs: nothing is ended"
    with subprocess.Popen(["sleep", "60"]) as holds:
        node.unit("glm-vllm-head", MainPID=str(holds.pid), InvocationID="this-start")
        watching().look(0.0)
        assert holds.wait(5) == -signal.SIGTERM
    assert gone(engine[1])


def test_no_engine_no_end(node, engine, watching):
    node.unit("glm-vllm-head", ActiveState="activating", SubState="start-pre", MainPID="0")
    available(node, 0.1)
    watching().look(0.0)
    assert left_alone(node)


def press(node, share: float) -> None:
    node.put("pressure", CALM.replace("full avg10=0.50", f"full avg10={share:.2f}"))


def test_pressure_that_lasts(node, engine, watching):
    each = watching()
    press(node, 60)
    each.look(0.0)
    each.look(4.9)
    assert left_alone(node)
    press(node, 40)
    each.look(5.0)
    press(node, 60)
    each.look(5.2)
    each.look(10.1)
    assert left_alone(node), "counted anew after it was calm"
    each.look(10.3)
    assert asked(node)
    assert kept(node)["cause"] == "everything waited for memory for 60 % of the last 10 s"


def test_no_pressure_file(node, engine, watching):
    (node.root / "pressure").unlink()
    each = watching()
    each.look(0.0)
    each.look(10.0)
    assert left_alone(node)


def test_the_driver_failed_while_serving(node, engine, watching):
    each = watching()
    each.hear("NVRM: Xid (PCI:000f:01:00): 31, pid=1, name=python")
    each.look(0.0)
    assert left_alone(node)
    each.hear(OUT_OF_MEMORY)
    each.look(0.2)
    assert asked(node)
    assert "the driver cannot allocate (NVRM: nvCheckOkFailedNoLog" in kept(node)["cause"]
    assert len(kept(node)["kernel"]) == 2


def test_pressure_and_driver_while_loading_are_no_reason(node, engine, watching):
    """The loader reads through the page cache, and the driver's line comes in starts that end well."""
    node.unit("glm-vllm-head", ActiveState="activating", SubState="start", MainPID=str(engine[0].pid))
    each = watching()
    each.hear(OUT_OF_MEMORY)
    press(node, 90)
    each.look(0.0)
    each.look(9.0)
    assert left_alone(node)
    node.unit("glm-vllm-head", MainPID=str(engine[0].pid))
    press(node, 1)
    each.look(9.2)
    assert left_alone(node), "a line of the load does not end what serves later"
    available(node, 0.9)
    node.unit("glm-vllm-head", ActiveState="activating", SubState="start", MainPID=str(engine[0].pid))
    each.look(9.4)
    assert asked(node), "the floor holds in every phase"


def test_a_full_disk_does_not_keep_it(node, engine, watching, capsys):
    shutil.rmtree(node.root / "var/lib/glm-vllm/watch")
    available(node, 0.9)
    watching().look(0.0)
    assert asked(node)
    said = capsys.readouterr().out
    assert "memory.json cannot be written" in said and '"processes"' in said


def test_as_a_process_with_the_kernel_s_journal(node, engine, tmp_path):
    """What the unit runs: it tells the manager, hears the journal, and ends when asked."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(10)
        node.program(
            node.root / "bin/journalctl", f'#!/bin/sh\n[ "$1" = --dmesg ] && echo "{OUT_OF_MEMORY}"\nexec sleep 3\n'
        )
        limits = {"GLM_RESERVE_BYTES": str(GIB), "GLM_GUARD_BYTES": str(GIB), "GLM_GUARD_PRESSURE": "50"}
        process = node.start("guard", NOTIFY_SOCKET=path, GLM_PRESSURE="/nowhere", **limits)
        try:
            assert manager.recv(4096).decode().startswith("READY=1\nSTATUS=ends the engine below 1.00 GiB")
            assert manager.recv(4096) == b"WATCHDOG=1"
            assert asked(node)
        finally:
            process.terminate()
            assert process.wait(10) == 0
            os.kill(engine[1], 0)
            out, err = process.communicate()
    assert '"cause": "the driver cannot allocate' in out and err == ""


@pytest.mark.parametrize("missing", ["GLM_RESERVE_BYTES", "GLM_GUARD_BYTES", "GLM_GUARD_PRESSURE"])
def test_limits_are_asked_for_by_name(missing):
    good = {"GLM_RESERVE_BYTES": "2", "GLM_GUARD_BYTES": "1", "GLM_GUARD_PRESSURE": "50"}
    assert guard.Limits.parse(good) == guard.Limits(2, 1, 50.0)
    for environment in ({key: good[key] for key in good if key != missing}, good | {missing: "much"}):
        with pytest.raises(Unusable, match=missing):
            guard.Limits.parse(environment)


def test_meminfo_that_cannot_be_read(node, glm_vllm, monkeypatch):
    for name in ("GLM_RESERVE_BYTES", "GLM_GUARD_BYTES", "GLM_GUARD_PRESSURE"):
        monkeypatch.setenv(name, "1")
    node.env(GLM_MEMINFO=node.root / "nowhere")
    code, _, err = glm_vllm("guard")
    assert code == 2 and "does not tell MemTotal" in err


@pytest.mark.parametrize("module", [serve, hold])
def test_the_start_says_why_it_ended(node, monkeypatch, module):
    """The sentence becomes the unit's status, and so the incident of `glm-vllm status`."""
    paths = Paths(node.root)
    assert module.memory_reason(paths) == ""
    paths.memory_record.write_text(json.dumps({"invocation_id": "this-start", "what": "the memory guard ..."}))
    monkeypatch.setenv("INVOCATION_ID", "another")
    assert module.memory_reason(paths) == ""
    monkeypatch.setenv("INVOCATION_ID", "this-start")
    assert module.memory_reason(paths) == "the memory guard ..."
