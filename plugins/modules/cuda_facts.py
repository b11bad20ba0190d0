# SPDX-License-Identifier: Apache-2.0
"""Read what a DGX Spark needs to build and run kernels for sm_121a, and name what is wrong with it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: cuda_facts
short_description: GPU, driver, CUDA toolkit and desktop of a DGX Spark, with problems as sentences
description:
  - Reads only. It never fails because of what it finds; the role decides with O(ignore:problems).
options:
  gpu:
    description: Look at the GPU, its driver and the toolkit. Without it only the desktop is looked at.
    type: bool
    default: true
  cuda_home:
    description: Folder of the CUDA toolkit.
    type: path
    required: true
  driver_branch:
    description: Driver branch that the node has to run.
    type: int
    required: true
  installed:
    description: Also ask for what the role installs by itself, that is Python's headers, g++ and ninja.
    type: bool
    default: false
author: The project's authors
"""

RETURN = r"""
problems:
  description: One sentence each; empty when the node is fit.
  returned: always
  type: list
  elements: str
  sample:
    - >-
      nvcc of /usr/local/cuda-13.0 is 12.9: this needs 13.0 or newer and older than 14; set cuda_sm121_cuda_home to such
      a toolkit.
gpu:
  description: C({name, capability, driver}), or empty.
  returned: always
  type: dict
nvcc:
  description: Release of nvcc, C(13.0), or empty.
  returned: always
  type: str
python:
  description: Version of /usr/bin/python3, C(3.12).
  returned: always
  type: str
driver_packages:
  description: Installed packages of the driver branch, and nvidia-modprobe. What apt must not move.
  returned: always
  type: list
  elements: str
desktop:
  description: C({target, units, gib}); default target, units of graphical sessions, GiB that their processes hold.
  returned: always
  type: dict
"""

GPU_NAME = "NVIDIA GB10"
CAPABILITY = "12.1"
ARCHITECTURE = "sm_121a"
NVCC_FROM, NVCC_BELOW = (13, 0), (14, 0)

# (exit status, standard output and standard error together); status 127 when the program is not there
Run = Callable[[Sequence[str]], tuple[int, str]]


def run(command: Sequence[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        return 127, ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return 126, str(error)
    return done.returncode, done.stdout.strip()


def gpu(run: Run, branch: int) -> tuple[dict[str, str], list[str]]:
    """The GPU as `nvidia-smi` names it, and what is wrong with it or its driver."""
    status, out = run(["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"])
    if status == 127:
        return {}, [
            "nvidia-smi is not on PATH: the NVIDIA driver is missing; a DGX Spark ships with it, "
            "so restore DGX OS, or set cuda_sm121_enabled: false for a machine without a GPU."
        ]
    lines = [line for line in out.splitlines() if line.strip()]
    # "No devices were found" comes with exit status 0 from some drivers and 6 from others
    fields = [field.strip() for field in lines[0].split(",")] if lines else []
    if status != 0 or len(fields) != 3:
        return {}, [
            f"nvidia-smi does not answer ({lines[-1].strip() if lines else status}): reboot the node; "
            "if that does not help, reinstall the driver."
        ]
    found = dict(zip(("name", "capability", "driver"), fields, strict=True))
    problems = []
    if len(lines) > 1 or found["name"] != GPU_NAME:
        names = ", ".join(line.split(",")[0].strip() for line in lines)
        problems.append(
            f"The GPU is {names}, not one {GPU_NAME}: this role is for a DGX Spark; take the host out of group sparks."
        )
    elif found["capability"] != CAPABILITY:
        problems.append(
            f"The GPU has compute capability {found['capability']}, not {CAPABILITY}: "
            f"the kernels are built for {ARCHITECTURE} alone and would not start."
        )
    if found["driver"].split(".")[0] != str(branch):
        problems.append(
            f"The driver is {found['driver']}, not of branch {branch}: install branch {branch} and reboot "
            "(590 deadlocks while graphs are captured), or set cuda_sm121_driver_branch if you tested another."
        )
    return found, problems


def nvcc(run: Run, home: str) -> tuple[str, list[str]]:
    """Release of nvcc in ``home``, and what is wrong with the toolkit."""
    program = f"{home}/bin/nvcc"
    status, out = run([program, "--version"])
    if status == 127:
        return "", [
            f"{program} does not exist: install the CUDA 13.0 toolkit, or set cuda_sm121_cuda_home to its place."
        ]
    match = re.search(r"release (\d+)\.(\d+)", out)
    if status != 0 or not match:
        return "", [
            f"{program} --version does not answer as nvcc does: reinstall the toolkit, or set cuda_sm121_cuda_home."
        ]
    version = (int(match[1]), int(match[2]))
    release = f"{version[0]}.{version[1]}"
    if not NVCC_FROM <= version < NVCC_BELOW:
        return release, [
            f"nvcc of {home} is {release}: this needs 13.0 or newer and older than 14; "
            "set cuda_sm121_cuda_home to such a toolkit."
        ]
    # --list-gpu-code names sm_121 but none of the architecture-specific ones; a dry run refuses what it doesn't know
    status, out = run([program, "--dryrun", "-cubin", f"-arch={ARCHITECTURE}", "-x", "cu", "/dev/null"])
    if status != 0:
        return release, [
            f"nvcc of {home} does not know {ARCHITECTURE} ({out.splitlines()[-1] if out else status}): "
            "set cuda_sm121_cuda_home to a complete CUDA 13.0 toolkit."
        ]
    return release, []


def missing(home: str, python: str, installed: bool, root: Path = Path("/")) -> list[str]:
    """What a build needs and does not find."""
    problems = []
    if not (Path(home) / "include" / "cuda_runtime.h").exists():
        problems.append(
            f"{home}/include/cuda_runtime.h is missing: install the runtime headers (package cuda-cudart-dev-13-0)."
        )
    if not installed:
        return problems
    header = root / "usr" / "include" / f"python{python}" / "Python.h"
    if not header.exists():
        problems.append(f"{header} is missing: reinstall package libpython{python}-dev (apt-get install --reinstall).")
    for program, package in (("g++", "g++"), ("ninja", "ninja-build")):
        if not (root / "usr" / "bin" / program).exists():
            problems.append(f"/usr/bin/{program} is missing: reinstall package {package}.")
    return problems


def system_python(link: Path = Path("/usr/bin/python3")) -> str:
    """`3.12` where /usr/bin/python3 leads to python3.12; the distribution's own, whatever runs this module."""
    return link.resolve().name.removeprefix("python")


def driver_packages(run: Run, branch: int) -> list[str]:
    """Installed packages that carry the branch in their name, and nvidia-modprobe, which its own pin forgets.

    Packages of one kernel version (linux-*) are left out: they follow the kernel, and depend on those here.
    """
    _, out = run(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\\n"])
    names = [line.split()[0] for line in out.splitlines() if line.endswith(" installed")]
    branded = re.compile(rf"nvidia.*-{branch}(-|$)")
    return sorted(
        {
            name
            for name in names
            if name == "nvidia-modprobe" or (branded.search(name) and not name.startswith("linux-"))
        }
    )


def desktop(run: Run, proc: Path = Path("/proc")) -> dict[str, Any]:
    """What the graphical sessions of this node are, and the memory that only they hold (proportional set size, GiB)."""
    _, target = run(["systemctl", "get-default"])
    units = set()
    _, names = run(["systemctl", "list-units", "--plain", "--no-legend", "--state=active", "display-manager.service"])
    if names:
        _, unit = run(["systemctl", "show", "-P", "Id", "display-manager.service"])
        units.add(unit)
    _, sessions = run(["loginctl", "list-sessions", "--no-legend"])
    for line in sessions.splitlines():
        _, out = run(["loginctl", "show-session", line.split()[0], "-p", "Type", "-p", "Scope", "-p", "User"])
        session = dict(pair.split("=", 1) for pair in out.splitlines() if "=" in pair)
        if session.get("Type") in ("x11", "wayland"):
            units |= {session.get("Scope", ""), f"user@{session.get('User')}.service"}
    units.discard("")
    return {"target": target, "units": sorted(units), "gib": round(_pss_kib(units, proc) / 2**20, 1)}


def _pss_kib(units: set[str], proc: Path) -> int:
    total = 0
    for cgroup in proc.glob("[0-9]*/cgroup") if units else ():
        try:
            if units.isdisjoint(re.split(r"[/\n]", cgroup.read_text())):
                continue
            match = re.search(r"^Pss:\s+(\d+) kB", (cgroup.parent / "smaps_rollup").read_text(), re.M)
        except OSError:  # the process has ended meanwhile
            continue
        total += int(match[1]) if match else 0
    return total


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "gpu": {"type": "bool", "default": True},
            "cuda_home": {"type": "path", "required": True},
            "driver_branch": {"type": "int", "required": True},
            "installed": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    home, branch = module.params["cuda_home"], module.params["driver_branch"]
    facts: dict[str, Any] = {"gpu": {}, "nvcc": "", "driver_packages": [], "python": system_python()}
    problems: list[str] = []
    if module.params["gpu"]:
        facts["gpu"], problems = gpu(run, branch)
        facts["nvcc"], of_nvcc = nvcc(run, home)
        problems += of_nvcc + missing(home, facts["python"], module.params["installed"])
        facts["driver_packages"] = driver_packages(run, branch)
    module.exit_json(changed=False, problems=problems, desktop=desktop(run), **facts)


if __name__ == "__main__":
    main()
