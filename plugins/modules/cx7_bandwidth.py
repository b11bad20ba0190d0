# SPDX-License-Identifier: Apache-2.0
"""Measure one rail with ib_write_bw."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: cx7_bandwidth
short_description: Measures the RDMA bandwidth of one rail
description:
  - With O(state=serving) starts ib_write_bw as a transient unit that ends by itself; with O(state=measured) runs the
    client for two seconds against it and compares the average with O(min_gbps).
  - RDMA devices and GIDs follow from the addresses (C(rdma_cm)).
options:
  state:
    description: Which side of the measurement.
    type: str
    choices: [serving, measured]
    required: true
  netdev:
    description: Interface of the rail, for messages.
    type: str
    required: true
  address:
    description: Own address on the rail.
    type: str
    required: true
  peer:
    description: Peer's address on the rail.
    type: str
    required: true
  port:
    description: TCP port of the exchange.
    type: int
    default: 18515
  min_gbps:
    description: Least average in Gb/s.
    type: int
    default: 80
author: The project's authors
"""

EXAMPLES = r"""
- name: Measure
  cx7_bandwidth: {state: measured, netdev: enp1s0f1np1, address: 192.168.177.12, peer: 192.168.177.11}
"""

RETURN = r"""
gbps: {description: Average bandwidth in Gb/s., type: float, returned: with state measured}
"""

import re
import time

from ansible.module_utils.basic import AnsibleModule

ROW = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", re.MULTILINE)
TRAP = 30  # Gb/s; a wedged port gives 8 to 25, a healthy one more than 90
SERVER_SECONDS = 30
ATTEMPTS = 5


def average(output: str) -> float | None:
    """Average in Gb/s from ib_write_bw --report_gbits; None without a numeric row."""
    rows = ROW.findall(output)
    return float(rows[-1]) if rows else None


def verdict(where: str, gbps: float | None, floor: int, output: str) -> str:
    """One sentence against the rail, empty when it is good."""
    if gbps is None:
        last = (output.strip().splitlines() or ["no output"])[-1]
        return f"{where}: ib_write_bw measured nothing ({last})."
    if gbps >= floor:
        return ""
    remedy = (
        "the port is wedged, as when a cable was plugged into a running machine: reboot both Sparks with the cable in, "
        "and if that fails unplug power and cable of both for a minute"
        if gbps < TRAP
        else "seat the cable anew, or lower cx7_network_min_gbps if this is what the cable carries"
    )
    return f"{where}: {gbps:.1f} Gb/s, below the floor of {floor}; {remedy}."


def command(address: str, port: int) -> list[str]:
    """Arguments that both sides share."""
    return ["ib_write_bw", "-R", f"--bind_source_ip={address}", "-D", "2", "-F", "--report_gbits", "-p", str(port)]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["serving", "measured"], "required": True},
            "netdev": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "peer": {"type": "str", "required": True},
            "port": {"type": "int", "default": 18515},
            "min_gbps": {"type": "int", "default": 80},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, skipped=True)
    params = module.params
    run = command(params["address"], params["port"])
    if params["state"] == "serving":
        limit = f"--property=RuntimeMaxSec={SERVER_SECONDS}"
        module.run_command(["systemctl", "stop", "glm-vllm-bandwidth.service"])  # of a broken run
        module.run_command(
            ["systemd-run", "--quiet", "--collect", "--unit=glm-vllm-bandwidth", limit, *run], check_rc=True
        )
        module.exit_json(changed=False)
    for _ in range(ATTEMPTS):  # the server may not listen yet
        code, out, err = module.run_command([*run, params["peer"]])
        gbps = average(out) if code == 0 else None
        if gbps is not None:
            break
        time.sleep(1)
    where = f"{params['netdev']} ({params['address']} to {params['peer']})"
    sentence = verdict(where, gbps, params["min_gbps"], err or out)
    if sentence:
        module.fail_json(msg=sentence, gbps=gbps)
    module.exit_json(changed=False, gbps=gbps)


if __name__ == "__main__":
    main()
