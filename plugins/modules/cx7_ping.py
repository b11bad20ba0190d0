# SPDX-License-Identifier: Apache-2.0
"""Prove that both rails carry full-size frames to the peer."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cx7_ping
short_description: Pings the peer over each rail with full, unfragmented frames
description:
  - A plain ping warms ARP first; then frames of MTU size with the don't-fragment bit follow.
  - Fails with one sentence a rail that names the interface, both addresses and what to look at.
options:
  rails:
    description: The rails of this node, as the filter cx7_plan gives them.
    type: list
    elements: dict
    required: true
    options:
      netdev: {description: Interface., type: str, required: true}
      address: {description: Own IPv4 address., type: str, required: true}
      prefix: {description: Prefix length., type: int, required: true}
      subnet: {description: Network., type: str, required: true}
      peer: {description: Peer's address., type: str, required: true}
      mtu: {description: MTU in bytes., type: int, required: true}
  adopted: {description: "Whether the addresses are somebody else's; part of the advice.", type: bool, default: false}
  attempts: {description: Plain pings before the peer counts as silent., type: int, default: 10}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Prove the rails
  cx7_ping:
    rails: "{{ plan[inventory_hostname].rails }}"
"""

RETURN = r"""
rails:
  description: "Per rail: netdev, peer, bytes (payload of the large ping), rtt_ms (average, null when unknown)."
  type: list
  elements: dict
  returned: always
"""

import re
from collections.abc import Callable
from typing import Any

from ansible.module_utils.basic import AnsibleModule

RAIL = {
    "netdev": {"type": "str", "required": True},
    "address": {"type": "str", "required": True},
    "prefix": {"type": "int", "required": True},
    "subnet": {"type": "str", "required": True},
    "peer": {"type": "str", "required": True},
    "mtu": {"type": "int", "required": True},
}
HEADERS = 28  # IPv4 and ICMP
RTT = re.compile(r"= [\d.]+/([\d.]+)/")
Ping = Callable[[list[str]], "tuple[int, str]"]


def probe(rail: dict[str, Any], adopted: bool, attempts: int, ping: Ping) -> tuple[dict[str, Any], str]:
    """Measure one rail; returns its result and a sentence, empty when the rail is right."""
    where = f"{rail['netdev']} ({rail['address']} to {rail['peer']})"
    source = ["-I", rail["address"]]
    size = rail["mtu"] - HEADERS
    result = {"netdev": rail["netdev"], "peer": rail["peer"], "bytes": size, "rtt_ms": None}
    if not any(ping(["-c1", "-W1", *source, rail["peer"]])[0] == 0 for _ in range(attempts)):
        advice = (
            "these addresses were found here and adopted: mend or remove them, then run again"
            if adopted
            else "check that the QSFP cable sits in both machines and that the peer's interface is up"
        )
        return result, f"{where}: the peer does not answer; {advice}."
    code, out = ping(["-c3", "-i0.2", "-W1", "-Mdo", f"-s{size}", *source, rail["peer"]])
    if code != 0:
        return result, (
            f"{where}: small pings pass, {size} bytes do not; set MTU {rail['mtu']} on this interface of both nodes."
        )
    match = RTT.search(out)
    result["rtt_ms"] = float(match.group(1)) if match else None
    return result, ""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "rails": {"type": "list", "elements": "dict", "options": RAIL, "required": True},
            "adopted": {"type": "bool", "default": False},
            "attempts": {"type": "int", "default": 10},
        },
        supports_check_mode=True,
    )

    def ping(args: list[str]) -> tuple[int, str]:
        code, out, _ = module.run_command(["ping", "-n", *args])
        return code, out

    probes = [probe(r, module.params["adopted"], module.params["attempts"], ping) for r in module.params["rails"]]
    rails = [result for result, _ in probes]
    failures = [sentence for _, sentence in probes if sentence]
    if failures:
        module.fail_json(msg=" ".join(failures), rails=rails)
    module.exit_json(changed=False, rails=rails)


if __name__ == "__main__":
    main()
