# SPDX-License-Identifier: Apache-2.0
"""List what holds GPU memory or our ports and is not ours; stop it when asked to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: holders
short_description: Foreign processes and containers that hold GPU memory or our ports
description:
  - A container is stopped by its engine, a system service by systemd, any other process by SIGTERM and, 20 seconds
    later, SIGKILL.
  - What serves the desktop is never listed; C(cuda_sm121_headless) is about that.
options:
  ports:
    description: TCP ports that have to be free.
    type: list
    elements: int
    required: true
  gpu:
    description: Ask nvidia-smi for the processes that hold GPU memory.
    type: bool
    default: true
  stop:
    description: Stop what is found.
    type: bool
    default: false
author: The project's authors
"""

RETURN = r"""
holders:
  description: What was found, C({pid, name, unit, container, engine, ports, gpu}); gpu as nvidia-smi gives the memory.
  returned: always
  type: list
  elements: dict
problems:
  description: One sentence for each of them.
  returned: always
  type: list
  elements: str
  sample:
    - >-
      Port 8888 is held by python3 (process 4711, unit old-llm.service): stop it, or set cuda_sm121_takeover: true
      to have it stopped.
"""

OURS = {f"glm-vllm-{name}.service" for name in ("head", "worker", "watch", "guard")} | {
    "ray-head.service",
    "ray-worker.service",
}
# nginx is ours where its configuration is
GATEWAY, GATEWAY_UNIT = Path("/etc/nginx/glm-vllm"), "nginx.service"
DESKTOP = {"Xorg", "Xwayland", "gnome-shell", "gnome-remote-desktop-daemon"}
# Stopping these would stop every container, or the way in.
NEVER = re.compile(r"^(docker|containerd|podman|ssh|sshd|dbus|user@\d+)\.service$")
GRACE_S = 20

Run = Callable[[Sequence[str]], tuple[int, str]]


def run(command: Sequence[str]) -> tuple[int, str]:
    """Exit status and standard output, stripped; 127 when the program is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 127, ""
    return done.returncode, done.stdout.strip()


@dataclass
class Holder:
    """One process; unit, container and engine (docker or podman) are empty where it has none."""

    pid: int
    name: str
    unit: str = ""
    container: str = ""
    engine: str = ""
    ports: list[int] = field(default_factory=list)
    gpu: str = ""

    def sentence(self) -> str:
        what = " and ".join(
            [f"Port {', '.join(map(str, self.ports))}"] * bool(self.ports)
            + ["GPU memory" + f" ({self.gpu})"] * bool(self.gpu)
        )
        where = f", container {self.container}" if self.container else f", unit {self.unit}" if self.unit else ""
        return (
            f"{what} is held by {self.name} (process {self.pid}{where}): stop it, "
            "or set cuda_sm121_takeover: true to have it stopped."
        )


def gpu_processes(csv: str) -> dict[int, tuple[str, str]]:
    """Lines `pid, name, used memory in MiB` as {pid: (name, memory)}; a figure that is not there reads `[N/A]`."""
    found = {}
    for line in csv.splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) >= 3 and fields[0].isdigit():
            memory = f"{fields[-1]} MiB" if fields[-1].isdigit() else fields[-1]
            found[int(fields[0])] = (", ".join(fields[1:-1]), memory)
    return found


def listeners(ss: str, ports: Sequence[int]) -> dict[int, tuple[str, list[int]]]:
    """Lines of `ss -Hltnp` as {pid: (name, ports)}, for these ports only."""
    found: dict[int, tuple[str, list[int]]] = {}
    for line in ss.splitlines():
        fields = line.split()
        port = fields[3].rsplit(":", 1)[-1] if len(fields) > 3 else ""
        if not port.isdigit() or int(port) not in ports:
            continue
        for name, pid in re.findall(r'\("([^"]*)",pid=(\d+),', line):
            held = found.setdefault(int(pid), (name, []))[1]
            if int(port) not in held:
                held.append(int(port))
    return found


def place(cgroup: str) -> tuple[str, str, str]:
    """`/proc/PID/cgroup` as (unit, container, engine)."""
    match = re.search(r"(docker|libpod)[-/]([0-9a-f]{64})", cgroup)
    if match:
        return "", match[2][:12], "docker" if match[1] == "docker" else "podman"
    parts = [part for line in cgroup.splitlines() for part in line.rsplit(":", 1)[-1].split("/")]
    # the outermost service is the one that systemctl of the system knows
    return next((part for part in parts if part.endswith(".service")), ""), "", ""


def collect(
    run: Run, ports: Sequence[int], gpu: bool, proc: Path = Path("/proc"), gateway: bool | None = None
) -> list[Holder]:
    """All holders that are neither ours nor the desktop, by process id."""
    ours = OURS | ({GATEWAY_UNIT} if (GATEWAY.is_dir() if gateway is None else gateway) else set())
    by_pid: dict[int, Holder] = {}
    if gpu:
        _, out = run(["nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv,noheader,nounits"])
        for pid, (name, memory) in gpu_processes(out).items():
            by_pid[pid] = Holder(pid, name, gpu=memory)
    _, out = run(["ss", "-Hltnp"])
    for pid, (name, held) in listeners(out, ports).items():
        by_pid.setdefault(pid, Holder(pid, name)).ports = sorted(held)
    for holder in by_pid.values():
        path = proc / str(holder.pid) / "cgroup"
        if path.exists():
            holder.unit, holder.container, holder.engine = place(path.read_text(encoding="utf-8"))
        if holder.name == "docker-proxy":  # it belongs to docker.service; what publishes the port is a container
            _, out = run(["docker", "ps", "--quiet", "--filter", f"publish={holder.ports[0]}"])
            holder.container, holder.engine = (out.split() or [""])[0], "docker"
    found = (by_pid[pid] for pid in sorted(by_pid))
    return [h for h in found if h.unit not in ours and h.name.rsplit("/", 1)[-1] not in DESKTOP]


def stop(run: Run, holder: Holder) -> None:
    if holder.container:
        run([holder.engine, "stop", "--time", str(GRACE_S), holder.container])
        return
    if holder.unit and not NEVER.match(holder.unit):
        run(["systemctl", "stop", holder.unit])
        return
    for number, seconds in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 5)):
        deadline = time.monotonic() + seconds
        try:
            os.kill(holder.pid, number)
            while time.monotonic() < deadline:
                os.kill(holder.pid, 0)
                time.sleep(0.2)
        except ProcessLookupError:
            return


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "ports": {"type": "list", "elements": "int", "required": True},
            "gpu": {"type": "bool", "default": True},
            "stop": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    ports, gpu = module.params["ports"], module.params["gpu"]
    holders = collect(run, ports, gpu)
    result = {"holders": [vars(h) for h in holders], "problems": [h.sentence() for h in holders]}
    if not module.params["stop"]:
        module.exit_json(changed=False, **result)
    if holders and not module.check_mode:
        for holder in holders:
            stop(run, holder)
        left = collect(run, ports, gpu)
        if left:
            names = ", ".join(f"{h.name} (process {h.pid})" for h in left)
            module.fail_json(
                msg=f"Still running after it was stopped: {names}. Find what restarts it, and disable that.", **result
            )
    lines = "".join(f"{h.name} {h.container or h.unit or h.pid}\n" for h in holders)
    module.exit_json(
        changed=bool(holders),
        diff={"before": lines, "after": "", "before_header": "holders", "after_header": "holders"},
        **result,
    )


if __name__ == "__main__":
    main()
