"""What `glm-vllm doctor` asks of a live node, and the bundle that it saves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bundles import FIXTURES, diagnosed
from glm_vllm_overlay import cli
from glm_vllm_overlay.node.redact import redact

SOURCES = Path(__file__).parents[3] / "files/overlay/src"
KEY = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
ENGINE_LOG = f"NCCL INFO Using network IB\nINFO started with --api-key {KEY}\nAuthorization: Bearer abcdefgh12345678\n"
UNIT = "Id={unit}\nActiveState=active\nSubState=running\nInvocationID=0123456789abcdef0123456789abcdef\nMainPID=4242\n"
PROGRAMS = {
    "ip": 'case "$2" in addr) cat "$GLM_ROOT/ip-addr.json";; *) echo "[]";; esac',
    "rdma": 'cat "$GLM_ROOT/rdma-link.txt"',
    "nvidia-smi": 'if [ $# = 0 ]; then cat "$GLM_ROOT/table"; else cat "$GLM_ROOT/csv"; fi',
    "journalctl": 'case "$*" in *INVOCATION*) cat "$GLM_ROOT/engine.log";; *) echo "kernel: SerialNumber: 77AB";; esac',
    "systemctl": 'cat "$GLM_ROOT/units"',
}


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A node below a folder, with recorded programs first on PATH."""
    root = tmp_path / "root"
    for folder in ("bin", "etc/netplan", "etc/glm-vllm", "proc/4242", "sys/class/net/enp1s0f0np0/device"):
        (root / folder).mkdir(parents=True)
    for name, script in PROGRAMS.items():
        (root / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (root / "bin" / name).chmod(0o755)
    for name, fixture in {
        "ip-addr.json": "ip_j_addr/healthy.json",
        "rdma-link.txt": "rdma_link/port0.txt",
        "table": "nvidia_smi/table_row.txt",
        "csv": "nvidia_smi/query_ok.csv",
        "proc/meminfo": "meminfo/healthy.txt",
        "etc/hosts": "hosts/good.txt",
        "etc/netplan/40-cx7.yaml": "netplan/good/40-cx7.yaml",
    }.items():
        shutil.copy(FIXTURES / fixture, root / name)
    shutil.copytree(FIXTURES / "sysfs_healthy/class/infiniband", root / "sys/class/infiniband")
    (root / "sys/class/infiniband/rocep1s0f0/node_guid").write_text("0000:5eff:fe00:5301\n")
    (root / "sys/class/net/enp1s0f0np0/carrier").write_text("1\n")
    (root / "sys/class/net/enp1s0f0np0/device/uevent").write_text(
        "DRIVER=mlx5_core\nPCI_SLOT_NAME=0000:01:00.0\nSERIAL=1\n"
    )
    (root / "proc/4242/limits").write_text(
        "Max locked memory         unlimited            unlimited            bytes\n"
    )
    (root / "etc/dgx-release").write_text('DGX_SERIAL_NUMBER="1650925012345"\nDGX_OTA_VERSION="7.6.0"\n')
    (root / "etc/netplan/50-wifi.yaml").write_text(
        "network: {version: 2, wifis: {wlP9s9: {access-points: {home: {password: 'hunter22'}}}}}\n"
    )
    (root / "engine.log").write_text(ENGINE_LOG)
    (root / "units").write_text(UNIT.format(unit="glm-vllm-head.service"))
    monkeypatch.setenv("GLM_ROOT", str(root))
    monkeypatch.setenv("PATH", f"{root / 'bin'}:{os.environ['PATH']}")
    return root


def live(capsys) -> set[str]:
    cli.main(["doctor", "--json"])
    return {f"{one['id']} {one['severity']}" for one in json.loads(capsys.readouterr().out)["findings"]}


HEALTHY = {"F33 warn", "F69 info"}


def test_a_live_node(root, capsys):
    assert live(capsys) == HEALTHY | {"F72 info"}


def test_a_live_fault(root, capsys):
    shutil.copy(FIXTURES / "ip_j_addr/lost_after_reboot.json", root / "ip-addr.json")
    (root / "proc/4242/limits").write_text(
        "Max locked memory         8388608              8388608              bytes\n"
    )
    assert live(capsys) == HEALTHY | {"F15 stop", "F26 stop", "F72 info"}


def test_without_rdma_nothing_is_said_about_it(root, capsys):
    (root / "etc/glm-vllm/fabric.json").write_text('{"rdma": "none", "rails": []}')
    shutil.rmtree(root / "sys/class/infiniband")
    (root / "rdma-link.txt").write_text("")
    (root / "engine.log").write_text("NCCL INFO Using network Socket\n")
    assert live(capsys) == HEALTHY | {"F72 info"}


@pytest.mark.parametrize(
    ("rates", "expected"), [((97.28, 92.57), "F14 warn"), ((97.28, 13.23), "F01 stop"), (None, "F14 stop")]
)
def test_the_last_measurement_counts(root, capsys, rates, expected):
    shutil.copy(FIXTURES / "ip_j_addr/same_subnet.json", root / "ip-addr.json")
    if rates:
        rails = [{"node": "spark-a", "netdev": n, "gbps": r} for n, r in zip(("one", "two"), rates, strict=True)]
        rails.append({"node": "spark-b", "netdev": "one", "gbps": None})
        (root / "var/lib/glm-vllm/fabric").mkdir(parents=True)
        record = {"schema": 1, "when": "2026-01-01T00:00:00Z", "tool": "ib_write_bw", "rails": rails}
        (root / "var/lib/glm-vllm/fabric/2026-01-01T000000Z.json").write_text(json.dumps(record))
    assert expected in live(capsys)


def test_a_program_that_hangs_is_not_waited_for(root, capsys):
    (root / "bin/nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    assert cli.main(["doctor"]) == 0
    assert "`nvidia-smi" in capsys.readouterr().err


def test_programs_that_hang_have_one_time_together(root, capsys):
    """Fails when they are waited for one after another, or for longer than the second that a live answer may take."""
    for name in ("ip", "rdma", "nvidia-smi", "journalctl"):
        (root / "bin" / name).write_text("#!/bin/sh\nexec sleep 60\n")
    begun = time.monotonic()
    cli.main(["doctor"])
    assert capsys.readouterr().err.count("gave no answer") == 5  # one line for each program and first word
    assert time.monotonic() - begun < 3  # 0.8 s where nothing else runs; one after another they are 5.6 s


def test_a_live_answer_takes_less_than_a_second(root):
    """Processor time, with that of the programs it asks, and a journal as long as it reads: the machine may be busy."""
    (root / "engine.log").write_text(ENGINE_LOG * 6000)
    (root / "bin/journalctl").write_text('#!/bin/sh\ncat "$GLM_ROOT/engine.log"\n')
    command = [sys.executable, "-m", "glm_vllm_overlay", "doctor", "--json"]

    def seconds() -> float:
        with subprocess.Popen(command, cwd=SOURCES, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert json.loads(process.stdout.read())["findings"]
            usage = os.wait4(process.pid, 0)[2]
            process.returncode = 0
        return usage.ru_utime + usage.ru_stime

    assert min(seconds() for _ in range(3)) < 1


def test_the_saved_bundle_says_the_same_and_holds_no_secret(root, tmp_path, capsys):
    folder = tmp_path / "saved/spark-a"
    assert cli.main(["doctor", "--save", str(folder)]) == 0
    assert diagnosed(folder) == set()
    everything = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
    for secret in (KEY, "abcdefgh12345678", "1650925012345", "hunter22", "77AB", "SERIAL=1"):
        assert not [str(path) for path, text in everything.items() if secret in text], secret
    assert not (folder / "sys/class/infiniband/rocep1s0f0/node_guid").exists()
    assert (folder / "nccl.log").read_text() == "NCCL INFO Using network IB\n"
    assert {path.name for path in folder.iterdir()} == {
        *("ip-addr.json", "ip-route.json", "ip-neigh.json", "rdma-link.txt", "nvidia-smi.csv", "nvidia-smi-table.txt"),
        *("meminfo", "hosts", "dgx-release", "limits", "nccl.log", "engine.log", "journal.txt", "netplan", "sys"),
    }


def test_the_saved_bundle_gives_the_same_fabric(root, tmp_path, capsys):
    folder = tmp_path / "spark-a"
    cli.main(["doctor", "--save", str(folder)])
    capsys.readouterr()
    assert cli.main(["fabric", "--bundle", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["environment"]["NCCL_IB_HCA"] == "rocep1s0f0,roceP2p1s0f0"


def test_a_folder_that_is_there_is_not_overwritten(root, tmp_path, capsys):
    assert cli.main(["doctor", "--save", str(tmp_path)]) == 1
    assert "name a folder that is not there yet" in capsys.readouterr().err


PEM = "OPENSSH " + "PRIVATE KEY"  # in two halves, so that no search for secrets takes this page for one


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("max_tokens: 65536, max_num_batched_tokens=4640", "max_tokens: 65536, max_num_batched_tokens=4640"),
        ("HF_TOKEN=hf_abcdefghijklmnopqrst", "HF_TOKEN=REDACTED"),
        ('{"api_key": "k-1", "n": 1}', '{"api_key": REDACTED, "n": 1}'),
        ("x-api-key: abc", "x-api-key: REDACTED"),
        ("Serial Number : 165012", "Serial Number : REDACTED"),
        ("vllm serve --api-key abc --port 8888", "vllm serve --api-key REDACTED --port 8888"),
        ("https://user:pw@example.org/x", "https://user:REDACTED@example.org/x"),
        (f"-----BEGIN {PEM}-----\nabc\n-----END {PEM}-----\n", "REDACTED\n"),
        ("link rocep1s0f0/1 state ACTIVE", "link rocep1s0f0/1 state ACTIVE"),
    ],
)
def test_redaction(text, left):
    assert redact(text) == left
