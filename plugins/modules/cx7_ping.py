# SPDX-License-Identifier: Apache-2.0
"""Ask whether the rails carry full-size frames to the peers."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cx7_ping
short_description: Pings the peers over each rail with full, unfragmented frames
description:
  - A plain ping warms ARP first; then frames of MTU size with the don't-fragment bit follow.
  - Where the node's rails have subnets of their own, the answer has to come back on the same interface. Linux answers
    for its addresses on every interface, so that a peer whose rails are crossed answers otherwise, and RoCE does not.
  - A rail that is wrong is returned as a sentence, not as a failure, since addresses are also tried before they are
    adopted.
options:
  rails:
    description: The rails of this node, as the filter cx7_plan gives them.
    type: list
    elements: dict
    required: true
  adopted: {description: "Whether the addresses are somebody else's; part of the advice.", type: bool, default: false}
  attempts: {description: Plain pings before the peer counts as silent., type: int, default: 10}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Try the rails
  cx7_ping:
    rails: "{{ plan[inventory_hostname].rails }}"
"""

RETURN = r"""
rails:
  description: "Per rail and peer: netdev, peer, bytes (payload of the large ping), rtt_ms (null when unknown)."
  type: list
  elements: dict
  returned: always
against: {description: "One sentence a rail that is wrong.", type: list, elements: str, returned: always}
"""

import ipaddress
import re
from collections.abc import Callable
from typing import Any

from ansible.module_utils.basic import AnsibleModule

HEADERS = 28  # IPv4 and ICMP
RTT = re.compile(r"= [\d.]+/([\d.]+)/")
Ping = Callable[[list[str]], "tuple[int, str]"]


def sources(rails: list[dict[str, Any]]) -> list[list[str]]:
    """Options of ping for each rail: its address, and its interface too unless another rail shares the subnet.

    In a shared subnet the peer answers by whichever interface its route names.
    """
    nets = [ipaddress.IPv4Interface(f"{rail['address']}/{rail['prefix']}").network for rail in rails]
    return [
        [
            "-I",
            rail["address"],
            *([] if any(net.overlaps(other) for other in nets[:at] + nets[at + 1 :]) else ["-I", rail["netdev"]]),
        ]
        for at, (rail, net) in enumerate(zip(rails, nets, strict=True))
    ]


def probe(
    rail: dict[str, Any], peer: str, adopted: bool, attempts: int, ping: Ping, source: list[str]
) -> tuple[dict[str, Any], str]:
    """Ask one peer over one rail; returns the result and a sentence, empty when the rail is right."""
    where = f"{rail['netdev']} ({rail['address']} to {peer})"
    size = int(rail["mtu"]) - HEADERS
    result = {"netdev": rail["netdev"], "peer": peer, "bytes": size, "rtt_ms": None}
    if not any(ping(["-c1", "-W1", *source, peer])[0] == 0 for _ in range(attempts)):
        advice = (
            "these addresses were found here: mend or remove them, then run again"
            if adopted
            else "check that the QSFP cable sits in both machines and that the peer's interface is up"
        )
        return result, f"{where}: the peer does not answer; {advice}."
    code, out = ping(["-c3", "-i0.2", "-W1", "-Mdo", f"-s{size}", *source, peer])
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
            "rails": {"type": "list", "elements": "dict", "required": True},
            "adopted": {"type": "bool", "default": False},
            "attempts": {"type": "int", "default": 10},
        },
        supports_check_mode=True,
    )
    params = module.params

    def ping(args: list[str]) -> tuple[int, str]:
        code, out, _ = module.run_command(["ping", "-n", *args])
        return code, out

    probes = [
        probe(rail, peer, params["adopted"], params["attempts"], ping, source)
        for rail, source in zip(params["rails"], sources(params["rails"]), strict=True)
        for peer in rail["peers"].values()
    ]
    against = [sentence for _, sentence in probes if sentence]
    module.exit_json(changed=False, rails=[result for result, _ in probes], against=against)


if __name__ == "__main__":
    main()
