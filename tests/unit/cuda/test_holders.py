# SPDX-License-Identifier: Apache-2.0
"""Who holds the GPU or our ports, in whose name, and how each is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from answers import answers, load  # noqa: E402

holders = load("holders")

ID = "0123456789abcdef" * 4
SS = """LISTEN 0 511  0.0.0.0:8888 0.0.0.0:* users:(("nginx",pid=50,fd=6),("nginx",pid=51,fd=6))
LISTEN 0 4096 [::]:8443 [::]:* users:(("docker-proxy",pid=60,fd=4))
LISTEN 0 128  0.0.0.0:22 0.0.0.0:* users:(("sshd",pid=7,fd=3))
LISTEN 0 128  127.0.0.1:18888 0.0.0.0:* users:(("other",pid=8,fd=3))
LISTEN 0 100  *:6379 *:* users:(("redis-server",pid=70,fd=6))
LISTEN 0 100  *:8890 *:*
"""
REMEDY = "stop it, or set cuda_sm121_takeover: true to have it stopped."
PORTS = [8888, 8443, 8890, 29521, 6379]


def cgroup(proc: Path, pid: int, text: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "cgroup").write_text(text)


def test_gpu_processes() -> None:
    csv = "6330, sglang::scheduler, 96073\n77, /opt/a, b/python, [N/A]\n\nNo running processes found\n"
    assert holders.gpu_processes(csv) == {6330: ("sglang::scheduler", "96073 MiB"), 77: ("/opt/a, b/python", "[N/A]")}


def test_listeners_of_our_ports_only() -> None:
    assert holders.listeners(SS, PORTS) == {
        50: ("nginx", [8888]), 51: ("nginx", [8888]), 60: ("docker-proxy", [8443]), 70: ("redis-server", [6379]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/system.slice/old-llm.service\n", ("old-llm.service", "", "")),
        (f"0::/system.slice/docker-{ID}.scope\n", ("", ID[:12], "docker")),
        (f"12:memory:/docker/{ID}\n0::/\n", ("", ID[:12], "docker")),
        (f"0::/machine.slice/libpod-{ID}.scope/container\n", ("", ID[:12], "podman")),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/x.service\n", ("user@1000.service", "", "")),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", ("", "", "")),
    ],
)
def test_place(text: str, expected: tuple[str, str, str]) -> None:
    assert holders.place(text) == expected


def collect(tmp_path: Path, gateway: bool, gpu: str = "") -> list[str]:
    cgroup(tmp_path, 50, "0::/system.slice/nginx.service\n")
    cgroup(tmp_path, 51, "0::/system.slice/nginx.service\n")
    cgroup(tmp_path, 60, "0::/system.slice/docker.service\n")
    cgroup(tmp_path, 70, "0::/system.slice/redis.service\n")
    cgroup(tmp_path, 90, "0::/system.slice/glm-vllm-head.service\n")
    run = answers({"ss": (0, SS), "nvidia-smi": (0, gpu), "docker ps --quiet --filter publish=8443": (0, "feedface")})
    return [h.sentence() for h in holders.collect(run, PORTS, bool(gpu), tmp_path, gateway)]


def test_foreign_web_server_is_named_and_ours_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert sum("nginx" in line for line in collect(tmp_path / "a", gateway=False)) == 2
    sentences = collect(tmp_path / "b", gateway=True)
    assert not any("nginx" in line for line in sentences)
    assert sentences == [
        f"Port 8443 is held by docker-proxy (process 60, container feedface): {REMEDY}",
        f"Port 6379 is held by redis-server (process 70, unit redis.service): {REMEDY}",
    ]


def test_engine_and_desktop_are_not_foreign(tmp_path: Path) -> None:
    gpu = "90, VLLM::Worker, 90000\n91, /usr/bin/gnome-shell, 120\n6330, sglang::scheduler, 96073"
    sentences = collect(tmp_path, gateway=True, gpu=gpu)
    assert "GPU memory (96073 MiB) is held by sglang::scheduler (process 6330)" in sentences[-1]
    assert not any("Worker" in line or "gnome" in line for line in sentences)


def test_one_process_with_port_and_gpu_is_one_sentence() -> None:
    holder = holders.Holder(5, "python3", ports=[8888, 8890], gpu="10 MiB")
    assert holder.sentence().startswith("Port 8888, 8890 and GPU memory (10 MiB) is held by python3 (process 5):")


@pytest.mark.parametrize(
    ("holder", "command"),
    [
        ({"container": "feedface", "engine": "docker", "unit": ""}, "docker stop --time 20 feedface"),
        ({"container": "feedface", "engine": "podman", "unit": ""}, "podman stop --time 20 feedface"),
        ({"unit": "old-llm.service"}, "systemctl stop old-llm.service"),
    ],
)
def test_stop_goes_through_the_owner(holder: dict[str, str], command: str) -> None:
    calls: list[str] = []
    holders.stop(answers({"": (0, "")}, calls), holders.Holder(2**22 + 1, "x", **holder))
    assert calls == [command]


@pytest.mark.parametrize("unit", ["docker.service", "containerd.service", "ssh.service", "user@1000.service"])
def test_stop_never_takes_down_what_carries_others(unit: str) -> None:
    calls: list[str] = []
    holders.stop(answers({"": (0, "")}, calls), holders.Holder(2**22 + 1, "x", unit=unit))
    assert calls == []


def test_plain_process_gets_term_then_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "GRACE_S", 0.3)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"up\n"
    monkeypatch.setattr(holders.time, "sleep", lambda _: child.poll())  # reap it, as its parent would
    holders.stop(answers({}), holders.Holder(child.pid, "stubborn"))
    assert child.wait(5) == -signal.SIGKILL
