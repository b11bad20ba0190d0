# SPDX-License-Identifier: Apache-2.0
"""Find the ConnectX-7 ports of a DGX Spark and say which of them are cabled."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cx7_facts
short_description: Finds the ConnectX-7 ports of a node
description:
  - Reads sysfs and C(ip -j address); needs no vendor tool.
  - A port is an interface of a ConnectX-7 function, or one without a PCI device that carries the name DGX OS gives
    these ports. Virtual functions and other cards are ignored.
  - What counts as a port is decided by C(glm_vllm_overlay/node/discovery.py) alone, which travels with this module.
options:
  raise_links:
    description:
      - Sets ports that are administratively down to up, because such a port does not tell whether it has a carrier.
        Ports that turn out to have none are set down again. Done only while fewer than O(wanted) ports have a carrier.
    type: bool
    default: false
  wanted:
    description: Number of cabled rails to look for.
    type: int
    default: 2
  timeout:
    description: Seconds to wait for carriers after links were raised.
    type: int
    default: 10
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Find the cable
  cx7_facts:
    raise_links: true
  register: cable
"""

RETURN = r"""
ports:
  description: Every ConnectX-7 port, ordered by QSFP port and PCI domain.
  type: list
  returned: always
  elements: dict
  contains:
    netdev: {description: interface name, type: str}
    port: {description: "QSFP port, 0 or 1; the twins of one cable have the same", type: int}
    domain: {description: PCI domain of the function, type: int}
    pci: {description: "PCI address, empty where there is no PCI device", type: str}
    driver: {description: "kernel driver, empty where there is no PCI device", type: str}
    hca: {description: "RDMA device, empty where there is none", type: str}
    width: {description: "PCIe lanes in use, null when unknown", type: int}
    carrier: {description: "true, false, or null while the port is administratively down", type: bool}
    speed: {description: "Mb/s, null when unknown", type: int}
    mtu: {description: MTU in bytes, type: int}
    mac: {description: hardware address, type: str}
    addresses: {description: "global IPv4 addresses as a.b.c.d/len", type: list}
others:
  description: "IPv4 addresses of all other interfaces: name to list of a.b.c.d/len; loopback left out."
  type: dict
  returned: always
management:
  description: Address of the interface with the default route, else the first other address; empty when there is none.
  type: str
  returned: always
renderer:
  description: "Who configures interfaces here: NetworkManager where it runs, else networkd."
  type: str
  returned: always
"""

import json
import re
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.node import discovery

VIRTUAL = re.compile(r"^(lo|docker|br-|veth|virbr|cni|flannel|tailscale|wg|tun|tap)")


def ports_of(node: discovery.Node) -> list[dict[str, Any]]:
    """The ports as this module returns them."""
    return [
        {
            "netdev": port.netdev,
            "port": port.port,
            "domain": port.domain,
            "pci": port.pci,
            "driver": port.driver,
            "hca": port.hca,
            "width": port.width,
            "carrier": port.link,
            "speed": port.speed,
            "mtu": port.mtu,
            "mac": port.mac,
            "addresses": [str(held.interface) for held in node.of(port) if held.netdev == port.netdev],
        }
        for port in node.ports
    ]


def management(others: dict[str, list[str]], routes: list[dict[str, Any]]) -> str:
    """Address by which this node is reached outside the fabric; empty when it has none."""
    preferred = [r["dev"] for r in routes if r.get("dst") == "default" and "dev" in r]
    physical = [n for n in others if not VIRTUAL.match(n)]
    for name in [*preferred, *physical]:
        for address in others.get(name, []):
            return address.partition("/")[0]
    return ""


class Node:
    """The live machine behind the pure functions above."""

    def __init__(self, module: AnsibleModule):
        self.module = module

    def ip(self, *args: str) -> list[dict[str, Any]]:
        """Parsed output of C(ip -j ARGS)."""
        _, out, _ = self.module.run_command(["ip", "-j", *args], check_rc=True)
        return [entry for entry in json.loads(out or "[]") if entry]

    def renderer(self) -> str:
        """NetworkManager where it runs, else networkd."""
        code, _, _ = self.module.run_command(["systemctl", "--quiet", "is-active", "NetworkManager.service"])
        return "NetworkManager" if code == 0 else "networkd"

    def discover(self) -> discovery.Node:
        """Everything there is to find now."""
        return discovery.discover(discovery.Sources(sysfs=Path("/sys"), addresses=self.ip("address", "show")))

    def ports(self) -> list[dict[str, Any]]:
        return ports_of(self.discover())

    def set_link(self, netdev: str, state: str) -> None:
        self.module.run_command(["ip", "link", "set", "dev", netdev, state], check_rc=True)

    def raise_links(self, wanted: int, timeout: int) -> list[str]:
        """Raise ports that are down until wanted carriers show; returns the ports that stayed up."""
        ports = self.ports()
        down = [p["netdev"] for p in ports if p["carrier"] is None]
        if sum(bool(p["carrier"]) for p in ports) >= wanted or not down:
            return []
        for netdev in down:
            self.set_link(netdev, "up")
        end = time.monotonic() + timeout
        while sum(bool(p["carrier"]) for p in self.ports()) < wanted and time.monotonic() < end:
            time.sleep(0.2)
        cabled = {p["netdev"] for p in self.ports() if p["carrier"]}
        for netdev in down:
            if netdev not in cabled:
                self.set_link(netdev, "down")
        return [n for n in down if n in cabled]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "raise_links": {"type": "bool", "default": False},
            "wanted": {"type": "int", "default": 2},
            "timeout": {"type": "int", "default": 10},
        },
        supports_check_mode=True,
    )
    node = Node(module)
    raised: list[str] = []
    if module.params["raise_links"] and not module.check_mode:
        raised = node.raise_links(module.params["wanted"], module.params["timeout"])
    found = node.discover()
    module.exit_json(
        changed=bool(raised),
        raised=raised,
        ports=ports_of(found),
        others=found.others,
        management=management(found.others, node.ip("-4", "route", "show")),
        renderer=node.renderer(),
    )


if __name__ == "__main__":
    main()
