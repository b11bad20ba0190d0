# SPDX-License-Identifier: Apache-2.0
"""What the tests of the cable share: runs of playbooks/network.yml, what the rails carry, other people's files."""

from __future__ import annotations

import json
from typing import Any

import bed
import pair
from pair import Run

NODES = pair.NODES
HOST = {bed.HEAD: 11, bed.WORKER: 12}
PORT1, PORT0 = ("enp1s0f1np1", "enP2p1s0f1np1"), ("enp1s0f0np0", "enP2p1s0f0np0")
OURS = "/etc/netplan/60-glm-vllm-cx7.yaml"
THEIRS = "/etc/netplan/40-cx7.yaml"
PLAIN = {"cx7_network_mode": "auto", "cx7_network_min_gbps": 0}


def network(*arguments: str, **variables: Any) -> Run:
    """Run playbooks/network.yml."""
    return pair.run_playbook("playbooks/network.yml", *arguments, **variables)


def refusals(run: Run) -> list[str]:
    """The different sentences with which a run failed; anything but failures of tasks counts too."""
    return sorted({message for messages in run.failures().values() for message in messages})


def carried(node: str) -> dict[str, list[str]]:
    """Interface to its IPv4 addresses as a.b.c.d/len, management and loopback left out."""
    links = json.loads(bed.on(node, "ip", "-j", "-4", "address", "show"))
    return {
        link["ifname"]: [f"{info['local']}/{info['prefixlen']}" for info in link["addr_info"]]
        for link in links
        if link.get("ifname") not in (None, "lo", "eth0")
    }


def mtu(node: str, netdev: str) -> int:
    return int(bed.on(node, "cat", f"/sys/class/net/{netdev}/mtu"))


def right(node: str, ports: tuple[str, str] = PORT1) -> bool:
    """Whether the rails carry our addresses, and nothing else does, at MTU 9000."""
    wanted = {port: [f"192.168.{net}.{HOST[node]}/24"] for port, net in zip(ports, (177, 178), strict=True)}
    return carried(node) == wanted and all(mtu(node, port) == 9000 for port in ports)


def foreign(node: str, text: str, path: str = THEIRS, *, apply: bool = True) -> None:
    """Write a netplan file and apply it to the rails, as another tool does."""
    bed.on(node, "sh", "-c", 'umask 077; printf %s "$1" > "$2"', "write", text, path)
    if apply:
        bed.on(node, "sh", "-c", f"netplan generate && networkctl reload && networkctl reconfigure {' '.join(PORT1)}")


def netplan(nets: tuple[str, str], hosts: tuple[int, int], size: int = 9000) -> str:
    """A netplan file that addresses the rails of port 1."""
    lines = [
        f"    {port}: {{link-local: [], mtu: {size}, addresses: [{net}.{host}/24]}}\n"
        for port, net, host in zip(PORT1, nets, hosts, strict=True)
    ]
    return "network:\n  version: 2\n  ethernets:\n" + "".join(lines)


def take_over(
    nets: tuple[str, str] = ("192.168.100", "192.168.101"), step: int = 0, sizes: tuple = (9000, 9000)
) -> None:
    """Both nodes as another tool sets them up, without our file; a step between the hosts of one node's rails."""
    for node, size in zip(NODES, sizes, strict=True):
        bed.on(node, "rm", "-f", OURS)
        foreign(node, netplan(nets, (HOST[node], HOST[node] + step), size))
    for node in NODES:
        pair.wait_for(lambda node=node: len([a for a in carried(node).values() if a]) == 2, 20, "their addresses")


def files(node: str) -> str:
    """Mode, owner, checksum and path of every file of a node that says something about its network."""
    etc = "hosts netplan NetworkManager systemd security udev sysctl.d modprobe.d"
    each = 'while read -r file; do stat -c "%a %U" "$file"; sha256sum "$file"; done'
    script = f"cd /etc && find {etc} -type f 2>/dev/null | sort | {each}"
    return bed.on(node, "sh", "-c", script)


def mend() -> bool:
    """Take every break away; True when a run of the role has to put our addresses back."""
    for number in (0, 1):
        bed.twin("mend", f"cable{number}")
    broken = False
    for node in NODES:
        if any(carried(node).get(port) for port in PORT0):
            bed.twin("swap", node)
        if bed.on(node, "sh", "-c", f"ls {THEIRS} 2>/dev/null || :"):
            bed.on(node, "sh", "-c", f"rm -f {THEIRS}; netplan generate; networkctl reload")
            bed.on(node, "sh", "-c", "".join(f"ip address flush dev {port};" for port in PORT1))
        broken = broken or not right(node)
    return broken


def record(node: str) -> dict[str, Any]:
    """The newest measurement on a node."""
    return json.loads(bed.on(node, "sh", "-c", "cat $(ls /var/lib/glm-vllm/fabric/*.json | tail -1)"))
