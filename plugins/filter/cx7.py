# SPDX-License-Identifier: Apache-2.0
"""Plan the fabric: which interface of which node gets which address, and what /etc/hosts says about it."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from ansible.errors import AnsibleFilterError

FIRST_HOST = 11
DIRECT_MTU = 9000
BEGIN, END = "# BEGIN glm-vllm fabric", "# END glm-vllm fabric"


def subnets_of(rails: list[dict[str, str]]) -> list[ipaddress.IPv4Network]:
    """Networks of cx7_network_rails; AnsibleFilterError when one is malformed or two overlap."""
    nets: list[ipaddress.IPv4Network] = []
    for rail in rails:
        try:
            net = ipaddress.IPv4Network(rail["subnet"])
        except ValueError as exc:
            raise AnsibleFilterError(f"cx7_network_rails: {exc}; write a network such as 192.168.177.0/24.") from exc
        clash = next((n for n in nets if n.overlaps(net)), None)
        if clash:
            raise AnsibleFilterError(
                f"cx7_network_rails: {net} overlaps {clash}; every rail needs a subnet of its own, or half the "
                "traffic leaves by the wrong rail."
            )
        nets.append(net)
    return nets


def cx7_subnets(rails: list[dict[str, str]]) -> list[str]:
    """Checked networks of cx7_network_rails as text."""
    return [str(net) for net in subnets_of(rails)]


def cabled(name: str, facts: dict[str, Any], wanted: int, guess: bool) -> list[dict[str, Any]]:
    """The ports of a node that carry the rails; guess (check mode) takes a port of unknown carrier for cabled."""
    ports = facts["ports"]
    if not ports:
        raise AnsibleFilterError(
            f"{name}: no ConnectX-7 port is on the PCI bus; plug the QSFP cable into both Sparks and reboot them."
        )
    rails = [p for p in ports if p["carrier"]]
    if guess and len(rails) < wanted:
        rails += [p for p in ports if p["carrier"] is None]
    if len(rails) < wanted:
        seen = ", ".join(p["netdev"] for p in rails) or "none"
        raise AnsibleFilterError(
            f"{name}: {wanted} cabled rails are needed and {len(rails)} of {', '.join(p['netdev'] for p in ports)} "
            f"has a carrier ({seen}); seat the QSFP cable on both machines."
        )
    return rails[:wanted]


def host_address(net: ipaddress.IPv4Network, index: int) -> str:
    """Address of the node with this index (0 = head) in net."""
    if FIRST_HOST + index >= net.num_addresses - 1:
        raise AnsibleFilterError(f"cx7_network_rails: {net} is too small for node {index + 1}; use a /24.")
    return str(net[FIRST_HOST + index])


def adoptable(ports: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]] | None:
    """Existing addresses as a plan, or None when a rail of a node has none.

    ports: node name to its cabled ports. Returns node name to [{netdev, address, network}], ordered alike on all nodes.
    """
    plan: dict[str, list[dict[str, Any]]] = {}
    for name, rails in ports.items():
        if not all(rail["addresses"] for rail in rails):
            return None
        found = [(rail["netdev"], ipaddress.IPv4Interface(rail["addresses"][0])) for rail in rails]
        plan[name] = [{"netdev": n, "address": str(i.ip), "network": i.network} for n, i in found]
    first = next(iter(plan.values()))
    order = [rail["network"] for rail in first]
    for name, rails in plan.items():
        here = {rail["network"]: rail for rail in rails}
        if len(here) != len(order) or set(here) != set(order):
            addresses = ", ".join(f"{r['netdev']} {r['address']}/{r['network'].prefixlen}" for r in rails)
            raise AnsibleFilterError(
                f"{name}: the rails already carry addresses ({addresses}) that do not lie in the same "
                f"{len(order)} subnets as the other node's; remove them or make both nodes agree, then run again."
            )
        plan[name] = [here[net] for net in order]
    return plan


def refuse_overlap(name: str, facts: dict[str, Any], nets: list[ipaddress.IPv4Network]) -> None:
    """Raise when a rail subnet is also the network of another interface of the node."""
    for netdev, addresses in facts["others"].items():
        for address in addresses:
            net = next((n for n in nets if n.overlaps(ipaddress.IPv4Interface(address).network)), None)
            if net:
                raise AnsibleFilterError(
                    f"cx7_network_rails: {net} is also the network of {netdev} ({address}) on {name}; "
                    "choose another subnet for the rail."
                )


def cx7_plan(
    facts: dict[str, dict[str, Any]],
    rails: list[dict[str, str]],
    mode: str = "auto",
    mtu: str | int = "auto",
    guess: bool = False,
    management: dict[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Plan the rails of a pair.

    facts: node name (head first) to what cx7_facts returned; rails: cx7_network_rails; mode: auto, or own for our
    addresses whatever is there; mtu: auto or bytes;
    guess: count ports of unknown carrier as cabled (check mode); management: node name to inventory address, used
    when it is an IPv4 address. Returns node name to {adopted, management, peer, peer_management,
    rails: [{netdev, address, prefix, subnet, peer, mtu}]}. Rails that carry addresses and are not ours are adopted.
    """
    nets = subnets_of(rails)
    missing = [name for name, found in facts.items() if not found]
    if missing or len(facts) != 2:
        raise AnsibleFilterError(
            f"The fabric is planned for one head and one worker together; {', '.join(missing) or 'a node'} is "
            "missing from this run: run without --limit, and mend what failed on it above."
        )
    ports = {name: cabled(name, found, len(nets), guess) for name, found in facts.items()}
    ours = mode == "own" or any(found["own_file"] for found in facts.values())
    taken = None if ours else adoptable(ports)
    if taken is None:
        for name, found in facts.items():
            refuse_overlap(name, found, nets)
        taken = {
            name: [
                {"netdev": port["netdev"], "address": host_address(net, index), "network": net}
                for port, net in zip(ports[name], nets, strict=True)
            ]
            for index, name in enumerate(facts)
        }
        adopted = False
        size = {name: DIRECT_MTU if mtu == "auto" else int(mtu) for name in facts}
    else:
        adopted = True
        size = {name: min(p["mtu"] for p in ports[name]) for name in facts}
        if len(set(size.values())) > 1:
            raise AnsibleFilterError(
                "The MTU of the rails differs ("
                + ", ".join(f"{n}: {m}" for n, m in size.items())
                + "); set the same MTU on both nodes, best 9000."
            )
    return {name: node_plan(name, facts, taken, size[name], adopted, management or {}) for name in facts}


def node_plan(
    name: str,
    facts: dict[str, dict[str, Any]],
    taken: dict[str, list[dict[str, Any]]],
    mtu: int,
    adopted: bool,
    management: dict[str, str],
) -> dict[str, Any]:
    """One node's part of the plan that cx7_plan returns."""
    peer = next(n for n in facts if n != name)
    return {
        "adopted": adopted,
        "management": management_of(name, facts, management),
        "peer": peer,
        "peer_management": management_of(peer, facts, management),
        "rails": [
            {
                "netdev": mine["netdev"],
                "address": mine["address"],
                "prefix": mine["network"].prefixlen,
                "subnet": str(mine["network"]),
                "peer": theirs["address"],
                "mtu": mtu,
            }
            for mine, theirs in zip(taken[name], taken[peer], strict=True)
        ],
    }


def management_of(name: str, facts: dict[str, dict[str, Any]], management: dict[str, str]) -> str:
    """Inventory address of the node if it is an IPv4 address, else the one found on it."""
    try:
        return str(ipaddress.IPv4Address(management.get(name, "")))
    except ValueError:
        return facts[name]["management"]


def cx7_fabric(mine: dict[str, Any], rdma: str) -> dict[str, Any]:
    """Content of fabric.json from one node's part of the plan: addresses, never interface names."""
    return {
        "schema": 1,
        "rdma": rdma,
        "rails": [{key: rail[key] for key in ("address", "prefix", "peer", "mtu")} for rail in mine["rails"]],
        "peer": mine["peer"],
        "peer_management": mine["peer_management"],
    }


def cx7_hosts(text: str, plan: dict[str, dict[str, Any]], hostname: str, name: str) -> str:
    """New text of /etc/hosts: our block with the fabric names, and no loopback line for the own host name.

    A line "127.0.1.1 <hostname>" makes Gloo and Ray announce a loopback address to the peer; where one is found the
    name moves to the node's first rail.
    """
    kept: list[str] = []
    trapped: list[str] = []
    inside = False
    for line in text.splitlines():
        if line in (BEGIN, END):
            inside = line == BEGIN
            continue
        if inside:
            trapped += [w for w in line.split()[1:] if not re.search(r"\.fabric\d*$", w)]
            continue
        words = line.partition("#")[0].split()
        if len(words) > 1 and words[0].startswith("127.0.1.") and hostname in [w.split(".")[0] for w in words[1:]]:
            trapped += words[1:]
            continue
        kept.append(line)
    block = [BEGIN]
    for node, part in plan.items():
        for number, rail in enumerate(part["rails"]):
            names = [f"{node}.fabric{number or ''}"]
            if node == name and number == 0:
                names += dict.fromkeys(trapped)
            block.append(" ".join([rail["address"], *names]))
    return "\n".join([*kept, *block, END]) + "\n"


class FilterModule:
    """Filters of the fabric plan."""

    def filters(self) -> dict[str, Any]:
        return {
            "cx7_fabric": cx7_fabric,
            "cx7_hosts": cx7_hosts,
            "cx7_plan": cx7_plan,
            "cx7_subnets": cx7_subnets,
        }
