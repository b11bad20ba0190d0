"""Side by side on the light bed: the copy against rsync over SSH, verification against sha256sum, a copy that is cut.

On a busy machine times say little; processor seconds and bytes do. docs/weights.md has the figures of one run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import bed
import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

PYZ = "/usr/local/lib/glm-vllm/node.pyz"
COPY = Path("/var/tmp/copy")
RAILS = ("enp1s0f1np1", "enP2p1s0f1np1")


def inside(node: str, *command: str) -> str:
    """Run a command as a unit of the node, so that the node's control group counts what it uses; its output."""
    unit = ["systemd-run", "--quiet", "--wait", "--pipe", "--collect"]
    return bed.on(node, *unit, *command, timeout=600)


def cpu() -> float:
    """Processor seconds of both nodes' userspace and kernel so far, by their control groups."""
    total = 0.0
    for node in (bed.HEAD, bed.WORKER):
        text = bed.on(node, "sh", "-c", "cat /sys/fs/cgroup/cpu.stat")
        total += int(dict(line.split() for line in text.splitlines())["usage_usec"]) / 1e6
    return total


def received() -> int:
    """Bytes that the worker has received over the cables so far."""
    paths = [f"/sys/class/net/{rail}/statistics/rx_bytes" for rail in RAILS]
    return sum(int(line) for line in bed.on(bed.WORKER, "cat", *paths).split())


def measured(work: Callable[[], object]) -> tuple[float, float, int]:
    """Seconds, processor seconds and bytes over the cable of some work."""
    began, used, bytes_before = time.monotonic(), cpu(), received()
    work()
    return time.monotonic() - began, cpu() - used, received() - bytes_before


@pytest.fixture
def served(site):
    """The model on the head, and the daemons that model_share starts; yields the job that copies it to COPY."""
    site.run()
    rails = json.loads(bed.on(bed.HEAD, "cat", "/etc/glm-vllm/fabric.json"))["rails"]
    folder = Path("/run/speed")
    bed.on(bed.HEAD, "mkdir", "-p", str(folder))
    text = f"use chroot = no\n[model]\npath = {site.folder}\nread only = yes\n"
    bed.on(bed.HEAD, "sh", "-c", f"printf '{text}' > {folder}/conf")
    for number, rail in enumerate(rails):
        daemon = f"rsync --daemon --no-detach --address={rail['address']} --port=8730 --config={folder}/conf"
        bed.on(bed.HEAD, "systemd-run", "--quiet", "--collect", f"--unit=speed{number}", *daemon.split())
    time.sleep(1)
    manifest = json.loads((site.on_disk(bed.HEAD) / "manifest.json").read_text())
    origins = [{"url": f"rsync://{rail['address']}:8730/model/"} for rail in rails]
    job = {"name": "model", "revision": manifest["revision"], "folder": str(COPY), "files": manifest["files"]}
    yield job | {"origins": origins, "streams": 4, "reserve": 0}
    bed.on(bed.HEAD, "systemctl", "stop", "speed0", "speed1")
    bed.on(bed.WORKER, "rm", "-rf", str(COPY))


def ours(job: dict) -> dict:
    """Copy and prove, as the role does; returns the answer."""
    bed.on(bed.WORKER, "sh", "-c", f"cat > /run/job.json <<'E'\n{json.dumps(job)}\nE")
    return json.loads(inside(bed.WORKER, "python3", PYZ, "fetch", "/run/job.json"))


def ssh_key() -> None:
    """Let root of the worker log in to the head as the bed's user."""
    key = "test -e /root/.ssh/speed || ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/speed"
    bed.on(bed.WORKER, "sh", "-c", f"mkdir -p /root/.ssh; {key}")
    public = bed.on(bed.WORKER, "cat", "/root/.ssh/speed.pub").strip()
    bed.on(
        bed.HEAD,
        "sh",
        "-c",
        f"grep -qF '{public}' /home/ops/.ssh/authorized_keys || echo '{public}' >> /home/ops/.ssh/authorized_keys",
    )


def over_ssh(site) -> None:
    """`rsync -a` over SSH between the nodes, on the fabric address."""
    address = json.loads(bed.on(bed.WORKER, "cat", "/etc/glm-vllm/fabric.json"))["rails"][0]["peer"]
    ssh = "ssh -i /root/.ssh/speed -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    inside(bed.WORKER, "rsync", "-a", "-e", ssh, f"ops@{address}:{site.folder}/", f"{COPY}/")


def report(capsys, text: str) -> None:
    with capsys.disabled():
        print(f"\n{text}")


def test_the_copy_costs_less_than_rsync_over_ssh(site, served, capsys):
    gb = site.bytes / 1e9
    seconds, used, moved = measured(lambda: ours(served))
    bed.on(bed.WORKER, "rm", "-rf", str(COPY))
    ssh_key()
    plain_seconds, plain_used, _ = measured(lambda: over_ssh(site))
    hash_seconds, hash_used, _ = measured(
        lambda: inside(bed.WORKER, "sh", "-c", f"cd {COPY} && sha256sum *.safetensors > /dev/null")
    )
    report(
        capsys,
        f"{gb:.2f} GB  ours, proved: {gb / seconds:.2f} GB/s, {used / gb:.2f} CPU-s/GB, "
        f"{moved / site.bytes:.3f} x the bytes\n"
        f"         rsync -a over SSH: {gb / plain_seconds:.2f} GB/s, {plain_used / gb:.2f} CPU-s/GB; "
        f"sha256sum after it: {gb / hash_seconds:.2f} GB/s, {hash_used / gb:.2f} CPU-s/GB",
    )
    assert used < plain_used + hash_used
    assert moved < 1.1 * site.bytes


def test_a_copy_that_is_cut_in_the_middle_sends_little_twice(site, served, capsys):
    before = received()
    bed.on(bed.WORKER, "sh", "-c", f"cat > /run/job.json <<'E'\n{json.dumps(served)}\nE")
    command = ["systemd-run", "--quiet", "--collect", "--unit=cut", "python3", PYZ, "fetch", "/run/job.json"]
    bed.on(bed.WORKER, *command)
    deadline = time.monotonic() + 120
    while received() - before < site.bytes / 2:
        assert time.monotonic() < deadline
    bed.on(bed.WORKER, "systemctl", "kill", "--signal=KILL", "cut")
    first = received() - before
    answer = ours(served)
    assert answer["verified"]
    second = received() - before - first
    report(capsys, f"cut at {first / site.bytes:.0%}, then {second / site.bytes:.0%} of the bytes")
    assert second / site.bytes < 0.55
    assert (first + second) / site.bytes < 1.1


def test_verification_uses_all_cores(site, capsys):
    site.run()
    shell = f"cd {site.folder} && for file in *.safetensors; do sha256sum $file > /dev/null; done"
    one_seconds, one_used, _ = measured(lambda: inside(bed.HEAD, "sh", "-c", shell))
    verify = ["python3", PYZ, "verify", "--full", "--json", str(site.folder)]
    seconds, used, _ = measured(lambda: inside(bed.HEAD, *verify))
    again, _, _ = measured(lambda: inside(bed.HEAD, *verify[:3], *verify[4:]))
    report(
        capsys,
        f"verify --full {site.bytes / 1e9 / seconds:.2f} GB/s ({used:.2f} CPU-s), sha256sum one by one "
        f"{site.bytes / 1e9 / one_seconds:.2f} GB/s ({one_used:.2f} CPU-s): {one_seconds / seconds:.2f} x; "
        f"unchanged: {again:.2f} s",
    )
    assert used < 1.5 * one_used
