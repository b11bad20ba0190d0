# SPDX-License-Identifier: Apache-2.0
"""Turn swap off now and for every later boot, or say why that cannot be done."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: swap
short_description: Turn swap off for good
description:
  - Swap areas in use are turned off; lines of type swap in fstab become comments; the unit of an area that fstab does
    not name is masked, and services that make swap are disabled.
  - Nothing is written when an area cannot be turned off.
  - Record RV(units) and the fstab with M(footprint) before; C(playbooks/uninstall.yml) puts them back.
options:
  state:
    description: V(listed) changes nothing and returns what V(off) would do.
    type: str
    choices: [listed, "off"]
    default: listed
author: The project's authors
"""

RETURN = r"""
active:
  description: Swap areas in use before, C({device, size_kib, used_kib}).
  returned: always
  type: list
  elements: dict
fstab:
  description: Whether fstab holds lines of type swap.
  returned: always
  type: bool
units:
  description: Units that have to be masked or disabled.
  returned: always
  type: list
  elements: str
problems:
  description: Why swap cannot be turned off, one sentence each.
  returned: always
  type: list
  elements: str
"""

FSTAB, SWAPS, MEMINFO = Path("/etc/fstab"), Path("/proc/swaps"), Path("/proc/meminfo")
MARK = "#glm-vllm# "
# These run swapon themselves, so masking the unit of the area is not enough.
SERVICES = ("zramswap.service", "dphys-swapfile.service")
WAY_OUT = (
    "free memory or turn it off by hand, or set cuda_sm121_swap: keep "
    "(the GPU shares this memory, and swapping stalls both nodes)."
)

Run = Callable[[Sequence[str]], tuple[int, str]]


def run(command: Sequence[str]) -> tuple[int, str]:
    """Exit status and the two outputs together, stripped; 127 when the program is not there."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False
        )
    except OSError as error:
        return 127, str(error)
    except subprocess.TimeoutExpired:
        return 124, "no answer after 600 s"
    return done.returncode, done.stdout.strip()


def active(text: str) -> list[dict[str, Any]]:
    """`/proc/swaps` as [{device, size_kib, used_kib}]; spaces in a name are octal there."""
    areas = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 5:
            name = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[0])
            areas.append({"device": name, "size_kib": int(fields[2]), "used_kib": int(fields[3])})
    return areas


def is_swap_line(line: str) -> bool:
    fields = line.split()
    return len(fields) >= 3 and not fields[0].startswith("#") and fields[2] == "swap"


def without_swap(fstab: str) -> str:
    """The same text with lines of type swap as comments."""
    return "".join(MARK + line if is_swap_line(line) else line for line in fstab.splitlines(keepends=True))


def units(run: Run, areas: list[dict[str, Any]], fstab: str) -> list[str]:
    """Units that would bring swap back and that no line of fstab makes."""
    in_fstab = {line.split()[0] for line in fstab.splitlines() if is_swap_line(line)}
    names = [
        run(["systemd-escape", "--path", "--suffix=swap", area["device"]])[1]
        for area in areas
        if area["device"] not in in_fstab
    ]
    found = [name for name in names if run(["systemctl", "show", "-P", "SourcePath", name])[1] != "/etc/fstab"]
    _, files = run(["systemctl", "list-unit-files", "--type=swap", "--no-legend", "--plain"])
    found += [fields[0] for fields in map(str.split, files.splitlines()) if len(fields) > 1 and fields[1] == "enabled"]
    found += [name for name in SERVICES if run(["systemctl", "is-enabled", name])[1] == "enabled"]
    return sorted(
        name for name in set(found) if run(["systemctl", "is-enabled", name])[1] not in ("masked", "disabled")
    )


def problems(areas: list[dict[str, Any]], meminfo: str) -> list[str]:
    """Areas whose content doesn't fit into the memory that is available."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.M)
    available, used = int(match[1]) if match else 0, sum(area["used_kib"] for area in areas)
    if not used or used < available:
        return []
    names = ", ".join(area["device"] for area in areas)
    return [
        f"Swap on {names} holds {used / 2**20:.1f} GiB and only {available / 2**20:.1f} GiB of memory are available: "
        + WAY_OUT
    ]


def turn_off(run: Run, areas: list[dict[str, Any]]) -> str:
    """Turn the areas off. :returns: a sentence about the first that stays on, else an empty string."""
    for area in areas:
        status, out = run(["swapoff", area["device"]])
        if status != 0:
            reason = out.splitlines()[-1] if out else f"exit status {status}"
            return f"Swap on {area['device']} cannot be turned off ({reason}): {WAY_OUT}"
    return ""


def main() -> None:
    module = AnsibleModule(
        argument_spec={"state": {"type": "str", "choices": ["listed", "off"], "default": "listed"}},
        supports_check_mode=True,
    )
    fstab = FSTAB.read_text(encoding="utf-8") if FSTAB.exists() else ""
    areas = active(SWAPS.read_text(encoding="utf-8")) if SWAPS.exists() else []
    wanted = without_swap(fstab)
    disabled = units(run, areas, fstab)
    result = {
        "active": areas,
        "fstab": wanted != fstab,
        "units": disabled,
        "problems": problems(areas, MEMINFO.read_text(encoding="utf-8")),
    }
    if module.params["state"] == "listed":
        module.exit_json(changed=False, **result)
    result["diff"] = [
        {"before": fstab, "after": wanted, "before_header": str(FSTAB), "after_header": str(FSTAB)},
        {
            "before": "".join(f"{area['device']}\n" for area in areas),
            "after": "",
            "before_header": "swap",
            "after_header": "swap",
        },
    ]
    if not module.check_mode:
        sentence = turn_off(run, areas)
        if sentence:
            module.fail_json(msg=sentence, **result)
        for name in disabled:
            run(["systemctl", "disable" if name in SERVICES else "mask", "--now", name])
        if wanted != fstab:
            new = FSTAB.with_name(".fstab.glm-vllm")
            new.write_text(wanted, encoding="utf-8")
            status = FSTAB.stat()
            os.chmod(new, status.st_mode & 0o7777)
            os.chown(new, status.st_uid, status.st_gid)
            os.replace(new, FSTAB)
            run(["systemctl", "daemon-reload"])
    module.exit_json(changed=bool(areas or disabled or wanted != fstab), **result)


if __name__ == "__main__":
    main()
