# SPDX-License-Identifier: Apache-2.0
"""Measure the rails: each alone, then all together."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: cx7_bandwidth
short_description: Measures the bandwidth of the rails to the nodes that stand before this one
description:
  - With O(state=serving) starts a server for each rail as a transient unit that ends by itself. With O(state=measured)
    runs two seconds of client on each rail, then on all at the same time.
  - C(ib_write_bw) finds RDMA devices and GIDs by the addresses (C(rdma_cm)); it ends with 0 when it measured nothing,
    so a row with numbers is required. C(iperf3) measures TCP, where there is no RDMA.
  - A rail that is slow is returned as a sentence, not as a failure, since addresses are also tried before they are
    adopted.
options:
  state: {description: Which side of the measurement., type: str, choices: [serving, measured], required: true}
  tool: {description: Program., type: str, choices: [ib_write_bw, iperf3], required: true}
  rails:
    description: The rails of this node, as the filter cx7_plan gives them.
    type: list
    elements: dict
    required: true
  to: {description: "Nodes to measure to, which serve.", type: list, elements: str, default: []}
  min_gbps: {description: Least average of one rail in Gb/s., type: int, default: 80}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Measure
  cx7_bandwidth: {state: measured, tool: ib_write_bw, rails: "{{ plan[inventory_hostname].rails }}", to: [spark-a]}
"""

RETURN = r"""
rails:
  description: "With O(state=measured), per rail and node: netdev, peer, gbps alone and together (null: no number)."
  type: list
  elements: dict
  returned: always
against: {description: One sentence a rail below the floor., type: list, elements: str, returned: always}
warnings_found: {description: What is worth a look., type: list, elements: str, returned: always}
"""

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule

ROW = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", re.MULTILINE)
TRAP = 30  # Gb/s; a wedged port gives 8 to 25, a healthy one more than 90
SHARED = 0.8  # of the sum of the rails alone: below it, the rails hinder each other
PORT = 18515
SERVER_SECONDS = 60
ATTEMPTS = 5
PAUSE = 0.5
Run = Callable[[list[str]], "tuple[int, str, str]"]


def average(tool: str, output: str) -> float | None:
    """Average in Gb/s from what the program printed; None without a number."""
    if tool == "ib_write_bw":
        rows = ROW.findall(output)
        return float(rows[-1]) if rows else None
    try:
        return float(json.loads(output)["end"]["sum_received"]["bits_per_second"]) / 1e9
    except (ValueError, KeyError, TypeError):
        return None


def verdict(where: str, tool: str, gbps: float | None, floor: int, said: str) -> str:
    """One sentence against the rail, empty when it is good."""
    if gbps is None:
        last = (said.strip().splitlines() or ["no output"])[-1]
        return f"{where}: {tool} measured nothing ({last})."
    if gbps >= floor:
        return ""
    remedy = (
        "the port is wedged, as when a cable was plugged into a running machine: reboot both Sparks with the cable in, "
        "and if that fails unplug power and cable of both for a minute"
        if gbps < TRAP and tool == "ib_write_bw"
        else "seat the cable anew, or lower cx7_network_min_gbps if this is what the cable carries"
    )
    return f"{where}: {gbps:.1f} Gb/s, below the floor of {floor}; {remedy}."


def server(tool: str, address: str, port: int) -> list[str]:
    """The command that serves on an address."""
    if tool == "ib_write_bw":
        return [tool, "-R", f"--bind_source_ip={address}", "-D", "2", "-F", "--report_gbits", "-p", str(port)]
    return [tool, "--server", "--one-off", "--bind", address, "--port", str(port)]


def client(tool: str, address: str, peer: str, port: int) -> list[str]:
    """The command that measures from an address to a peer."""
    if tool == "ib_write_bw":
        return [*server(tool, address, port), peer]
    return [tool, "--client", peer, "--bind", address, "--port", str(port), "--time", "2", "--parallel", "4", "--json"]


def measure(tool: str, address: str, peer: str, port: int, run: Run) -> tuple[float | None, str]:
    """Gb/s of one run and what was said; tries again while the server may not listen yet."""
    said = ""
    for _ in range(ATTEMPTS):
        code, out, err = run(client(tool, address, peer, port))
        said = err or out
        gbps = average(tool, out) if code == 0 else None
        if gbps is not None:
            return gbps, said
        time.sleep(PAUSE)
    return None, said


def serve(module: AnsibleModule) -> None:
    """One unit a rail; each serves anew for every client until its time is over."""
    for number, rail in enumerate(module.params["rails"]):
        unit = f"glm-vllm-bandwidth-{number}"
        module.run_command(["systemctl", "stop", unit])  # of a broken run
        again = ["sh", "-c", 'while :; do "$@"; sleep 0.1; done', "serve"]
        module.run_command(
            ["systemd-run", "--quiet", "--collect", f"--unit={unit}", f"--property=RuntimeMaxSec={SERVER_SECONDS}"]
            + [*again, *server(module.params["tool"], rail["address"], PORT + number)],
            check_rc=True,
        )


def measured(params: dict[str, Any], run: Run) -> dict[str, Any]:
    """rails, against and warnings_found, as the module returns them."""
    tool = params["tool"]
    found: list[dict[str, Any]] = []
    against: list[str] = []
    warned: list[str] = []
    for node in params["to"]:
        # The server numbers its ports by its own rails.
        rails = [rail for rail in params["rails"] if node in rail["peers"]]
        ways = [(rail, rail["peers"][node], PORT + int(rail["theirs"][node])) for rail in rails]
        alone = []
        for rail, peer, port in ways:
            gbps, said = measure(tool, rail["address"], peer, port, run)
            where = f"{rail['netdev']} ({rail['address']} to {peer})"
            sentence = verdict(where, tool, gbps, params["min_gbps"], said)
            against += [sentence] if sentence else []
            alone.append({"netdev": rail["netdev"], "peer": peer, "gbps": gbps, "together_gbps": None})
        if len(ways) > 1 and all(way["gbps"] for way in alone):
            with ThreadPoolExecutor(len(ways)) as pool:
                both = list(pool.map(lambda way: measure(tool, way[0]["address"], way[1], way[2], run)[0], ways))
            for way, gbps in zip(alone, both, strict=True):
                way["together_gbps"] = gbps
            total, best = sum(gbps or 0 for gbps in both), sum(way["gbps"] for way in alone)
            if total < SHARED * best:
                warned.append(
                    f"To {node} the rails give {total:.0f} Gb/s together and {best:.0f} one by one; each needs a "
                    "subnet and a PCIe link (width x4) of its own."
                )
        found += alone
    return {"rails": found, "against": against, "warnings_found": warned}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["serving", "measured"], "required": True},
            "tool": {"type": "str", "choices": ["ib_write_bw", "iperf3"], "required": True},
            "rails": {"type": "list", "elements": "dict", "required": True},
            "to": {"type": "list", "elements": "str", "default": []},
            "min_gbps": {"type": "int", "default": 80},
        },
        supports_check_mode=True,
    )
    result: dict[str, Any] = {"rails": [], "against": [], "warnings_found": []}
    if not module.check_mode:
        if module.params["state"] == "serving":
            serve(module)
        else:
            result = measured(module.params, module.run_command)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
