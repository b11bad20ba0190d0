# SPDX-License-Identifier: Apache-2.0
"""Find the ConnectX-7 ports of a DGX Spark and say which of them are cabled."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cx7_facts
short_description: Finds the ConnectX-7 ports of a node
description:
  - Reads sysfs and C(ip -j address); needs no vendor tool.
  - A port is an interface bound to the driver mlx5_core, or one without a PCI device that carries the name DGX OS
    gives these ports. Virtual functions and other vendors' cards are ignored.
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
  own_file:
    description: The netplan file that this project writes; its presence is returned.
    type: path
    default: /etc/netplan/60-glm-vllm-cx7.yaml
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
    port: {description: "QSFP port, 0 or 1", type: int}
    domain: {description: PCI domain of the function, type: int}
    driver: {description: "kernel driver, empty where there is no PCI device", type: str}
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
own_file:
  description: Whether our netplan file is there.
  type: bool
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

PORT_NAME = re.compile(r"^en(?:P(?P<domain>\d+))?p\d+s\d+f\d+np(?P<port>\d+)$")
VIRTUAL = re.compile(r"^(lo|docker|br-|veth|virbr|cni|flannel|tailscale|wg|tun|tap)")


def read(path: Path) -> str | None:
    """Content of a sysfs file, or None: sysfs answers EINVAL for carrier and speed of a port that is down."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def number(text: str | None) -> int | None:
    """Integer in text; None when there is none or when it is negative (sysfs writes -1 for unknown)."""
    try:
        value = int(text or "")
    except ValueError:
        return None
    return value if value >= 0 else None


def driver(net: Path) -> str:
    """Name of the driver bound to the interface's PCI device; empty when there is no device."""
    link = net / "device" / "driver"
    return link.resolve().name if link.exists() else ""


def port_of(net: Path) -> dict[str, Any] | None:
    """Port, domain and driver of one interface (a folder in /sys/class/net), or None when it is no CX7 port."""
    bound = driver(net)
    named = PORT_NAME.match(net.name)
    if bound not in ("", "mlx5_core") or (net / "device" / "physfn").exists():
        return None
    if not bound and not named:
        return None
    hardware = re.match(r"^p(\d+)$", read(net / "phys_port_name") or "")
    pci = re.match(r"^([0-9a-f]{4}):", (net / "device").resolve().name) if bound else None
    if hardware:
        port = int(hardware.group(1))
    elif named:
        port = int(named.group("port"))
    else:
        return None
    if pci:
        domain = int(pci.group(1), 16)
    else:
        domain = int((named and named.group("domain")) or 0)
    return {"netdev": net.name, "port": port, "domain": domain, "driver": bound}


def addresses(entries: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Global IPv4 addresses by interface from C(ip -j address)."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        name = entry.get("ifname")
        if not name:
            continue
        found[name] = [
            f"{info['local']}/{info['prefixlen']}"
            for info in entry.get("addr_info", [])
            if info.get("family") == "inet" and info.get("scope") == "global" and "local" in info
        ]
    return found


def discover(sysfs: Path, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All CX7 ports under sysfs (a folder like /sys), ordered by QSFP port and PCI domain."""
    known = addresses(entries)
    ports = []
    nets = sysfs / "class" / "net"
    for net in sorted(nets.iterdir()) if nets.is_dir() else []:
        found = port_of(net)
        if found is None:
            continue
        carrier = read(net / "carrier")
        ports.append(
            {
                **found,
                "carrier": None if carrier is None else carrier == "1",
                "speed": number(read(net / "speed")),
                "mtu": number(read(net / "mtu")),
                "mac": read(net / "address"),
                "addresses": known.get(net.name, []),
            }
        )
    return sorted(ports, key=lambda p: (p["port"], p["domain"], p["netdev"]))


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
        return [e for e in json.loads(out or "[]") if e]

    def renderer(self) -> str:
        """NetworkManager where it runs, else networkd."""
        code, _, _ = self.module.run_command(["systemctl", "--quiet", "is-active", "NetworkManager.service"])
        return "NetworkManager" if code == 0 else "networkd"

    def ports(self) -> list[dict[str, Any]]:
        return discover(Path("/sys"), self.ip("address", "show"))

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
            "own_file": {"type": "path", "default": "/etc/netplan/60-glm-vllm-cx7.yaml"},
        },
        supports_check_mode=True,
    )
    node = Node(module)
    raised: list[str] = []
    if module.params["raise_links"] and not module.check_mode:
        raised = node.raise_links(module.params["wanted"], module.params["timeout"])
    ports = node.ports()
    names = {p["netdev"] for p in ports}
    others = {n: a for n, a in addresses(node.ip("address", "show")).items() if a and n not in names and n != "lo"}
    module.exit_json(
        changed=bool(raised),
        raised=raised,
        ports=ports,
        others=others,
        management=management(others, node.ip("-4", "route", "show")),
        own_file=Path(module.params["own_file"]).exists(),
        renderer=node.renderer(),
    )


if __name__ == "__main__":
    main()
