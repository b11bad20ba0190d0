# SPDX-License-Identifier: Apache-2.0
"""Read what the nodes of a pair should have alike."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cx7_parity
short_description: Reads driver, firmware, kernel, memory and clock of a node
description:
  - What a program or file does not tell is null. Changes nothing.
options:
  hcas: {description: RDMA devices of the rails., type: list, elements: str, default: []}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Read what both nodes should have alike
  cx7_parity: {hcas: [rocep1s0f1, roceP2p1s0f1]}
"""

RETURN = r"""
node:
  description: What was read.
  type: dict
  returned: always
  contains:
    gpu_driver: {description: version of the GPU driver, type: str}
    firmware: {description: firmware of the ConnectX-7, type: str}
    kernel: {description: kernel release, type: str}
    memory_kb: {description: MemTotal in KiB, type: int}
    sm_clock_mhz: {description: highest SM clock in MHz, type: int}
"""

import os
import re
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule


def query(field: str, code: int, out: str) -> str | None:
    """The one value that nvidia-smi answered for a field; None when it has none, as [N/A]."""
    value = (out.strip().splitlines() or [""])[0].strip()
    return None if code or not value or value.startswith("[") or field in value else value


def number(text: str | None) -> int | None:
    """The first whole number in text."""
    match = re.search(r"\d+", text or "")
    return int(match[0]) if match else None


def firmware(root: Path, hcas: list[str]) -> str | None:
    """The firmware of the devices, all versions when they differ."""
    found = {file.read_text().strip() for hca in hcas if (file := root / hca / "fw_ver").exists()}
    return ", ".join(sorted(found)) or None


def main() -> None:
    module = AnsibleModule(
        argument_spec={"hcas": {"type": "list", "elements": "str", "default": []}}, supports_check_mode=True
    )
    gpu: dict[str, str | None] = dict.fromkeys(("driver_version", "clocks.max.sm"))
    if module.get_bin_path("nvidia-smi"):
        for field in gpu:
            code, out, _ = module.run_command(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"])
            gpu[field] = query(field, code, out)
    total = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    node: dict[str, Any] = {
        "gpu_driver": gpu["driver_version"],
        "firmware": firmware(Path("/sys/class/infiniband"), module.params["hcas"]),
        "kernel": os.uname().release,
        "memory_kb": int(total[1]) if total else None,
        "sm_clock_mhz": number(gpu["clocks.max.sm"]),
    }
    module.exit_json(changed=False, node=node)


if __name__ == "__main__":
    main()
