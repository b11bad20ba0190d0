# SPDX-License-Identifier: Apache-2.0
"""Plan the fabric: which interface of which node gets which address, what is adopted, and what a measurement means.

A link is one rail of one cable, or of the switch: `{"members": {node: {"netdev", "address", "network"}}}`, nodes in the
order of the inventory (head first). A node's rails are the links that it is a member of.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

FIRST_HOST = 11
DIRECT_MTU = 9000
SMALL_MTU = 1500
HEALTHY_PAIR = 190  # Gb/s of both rails together
# Whose file it is, by its name.
WRITERS = {
    "60-glm-vllm-cx7.yaml": "ours",
    "99-nvidia-sync-cluster.yaml": "NVIDIA Sync's",
    "40-cx7.yaml": "of NVIDIA's playbook, sparkrun or eugr",
}
# What the nodes of a pair should have alike: the slower or older one decides for both.
ALIKE = {
    "gpu_driver": ("GPU driver", "update both to one driver"),
    "firmware": ("ConnectX-7 firmware", "update both with fwupdmgr"),
    "kernel": ("kernel", "update and reboot both"),
    "memory_kb": ("memory in GiB", "the smaller one decides what fits"),
    "sm_clock_mhz": ("highest SM clock in MHz", "set the same limit on both, or the slower one holds the other back"),
}
Facts = Mapping[str, dict[str, Any]]
Link = dict[str, dict[str, Any]]


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


def is_ring(nodes: int, switch: bool) -> bool:
    """Whether the nodes stand in a ring of cables: two are a pair, and a switch has no order."""
    return nodes > 2 and not switch


def cx7_wanted(rails: list[dict[str, str]], nodes: int, switch: bool = False) -> int:
    """Number of cabled interfaces that every node needs; AnsibleFilterError when cx7_network_rails does not fit."""
    nets = subnets_of(rails)
    if not nets:
        raise AnsibleFilterError("cx7_network_rails is empty; name one subnet a rail, such as 192.168.177.0/24.")
    if not is_ring(nodes, switch):
        return len(nets)
    if len(nets) % nodes:
        raise AnsibleFilterError(
            f"cx7_network_rails: a ring of {nodes} nodes has {nodes} cables of two rails each, and {len(nets)} subnets "
            f"are named; name {2 * nodes}, or set cx7_network_switch: true if the nodes meet in a switch."
        )
    return 2 * len(nets) // nodes


def cabled(name: str, facts: dict[str, Any], wanted: int, guess: bool) -> list[dict[str, Any]]:
    """The ports of a node that carry the rails, by QSFP port and PCI domain.

    Where more have a carrier than are wanted, those that carry addresses go first. guess (check mode) takes a port of
    unknown carrier for cabled.
    """
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
    chosen = sorted(rails, key=lambda p: not p["addresses"])[:wanted]
    return [p for p in rails if p in chosen]


def host_address(net: ipaddress.IPv4Network, index: int) -> str:
    """Address of the node with this index (0 = head) in net."""
    if FIRST_HOST + index >= net.num_addresses - 1:
        raise AnsibleFilterError(f"cx7_network_rails: {net} is too small for node {index + 1}; use a /24.")
    return str(net[FIRST_HOST + index])


def own_links(ports: dict[str, list[dict[str, Any]]], nets: list[ipaddress.IPv4Network], ring: bool) -> list[Link]:
    """Our addresses. In a ring the cable from port 1 of a node ends in port 0 of the next one."""
    names = list(ports)

    def member(name: str, port: dict[str, Any], net: ipaddress.IPv4Network) -> dict[str, Any]:
        return {"netdev": port["netdev"], "address": host_address(net, names.index(name)), "network": net}

    if not ring:
        return [{n: member(n, ports[n][i], net) for n in names} for i, net in enumerate(nets)]
    links = []
    rails = len(nets) // len(names)
    for number, net in enumerate(nets):
        cable, rail = divmod(number, rails)
        link: Link = {}
        for name, port in ((names[cable], 1), (names[(cable + 1) % len(names)], 0)):
            there = [p for p in ports[name] if p["port"] == port]
            if len(there) != rails:
                raise AnsibleFilterError(
                    f"{name}: a ring has a cable from port 1 of each node to port 0 of the next one, and "
                    f"{len(there)} of {rails} rails of port {port} have a carrier; seat both QSFP cables."
                )
            link[name] = member(name, there[rail], net)
        links.append({n: link[n] for n in names if n in link})
    return links


def found_links(ports: dict[str, list[dict[str, Any]]]) -> list[Link]:
    """The addresses that the rails carry already, as links; empty when a rail has none or no other node shares its net.

    Rails of one node in one subnet cannot be told apart by it, and are taken in their order.
    """
    members: dict[Any, Link] = {}
    for name, rails in ports.items():
        seen: list[ipaddress.IPv4Network] = []
        for rail in rails:
            if not rail["addresses"]:
                return []
            found = ipaddress.IPv4Interface(rail["addresses"][0])
            key = (found.network, seen.count(found.network))
            seen.append(found.network)
            members.setdefault(key, {})[name] = {
                "netdev": rail["netdev"],
                "address": str(found.ip),
                "network": found.network,
            }
    return [] if any(len(link) < 2 for link in members.values()) else list(members.values())


def refuse_overlap(name: str, facts: dict[str, Any], nets: list[ipaddress.IPv4Network]) -> None:
    """Raise when a rail subnet is also the network of another interface of the node."""
    for netdev, addresses in facts["others"].items():
        for address in addresses:
            net = next((n for n in nets if n.overlaps(ipaddress.IPv4Interface(address).network)), None)
            if net:
                raise AnsibleFilterError(
                    f"cx7_network_rails: {net} is also the network of {netdev} ({address}) on {name}; choose another "
                    "subnet for the rail, or set cx7_network_allow_management: true if you can reach its console."
                )


def refuse_only_way(name: str, facts: dict[str, Any], mine: dict[str, Any], management: str) -> None:
    """Raise when the node is reached by an address that only a rail has, and that the plan (mine) takes away."""
    stay = [rail["address"] for rail in mine["rails"]]
    stay += [address.partition("/")[0] for found in facts["others"].values() for address in found]
    for port in facts["ports"]:
        here = [address.partition("/")[0] for address in port["addresses"]]
        if management in here and management not in stay:
            raise AnsibleFilterError(
                f"{name}: {management}, by which this run reaches it, is on the rail {port['netdev']}; name another "
                "ansible_host, or set cx7_network_allow_management: true if you can reach its console."
            )


def whose(path: str) -> str:
    """A file with the name of who writes such files, for messages and records."""
    base = path.rpartition("/")[2]
    writer = WRITERS.get(base) or ("nmcli's" if base.startswith("90-NM-") or base.endswith(".nmconnection") else "")
    return f"{path} ({writer})" if writer else path


def foreign_files(owners: dict[str, Any], ports: list[dict[str, Any]]) -> list[str]:
    """Paths of files, not ours, that configure one of these ports."""
    return sorted({path for port in ports for path in owners["files"].get(port["netdev"], [])})


def refuse_foreign(owners: Facts, ports: dict[str, list[dict[str, Any]]], why: list[str]) -> None:
    """Raise when somebody else's file configures a rail; why says what does not work (empty: our file is there too)."""
    for name in ports:
        for path in foreign_files(owners[name], ports[name]):
            netdevs = [p["netdev"] for p in ports[name] if path in owners[name]["files"].get(p["netdev"], [])]
            shown = f" It says:\n{owners[name]['texts'].get(path, '').strip()}"
            if owners[name]["ours"]:
                raise AnsibleFilterError(
                    f"{name}: {whose(path)} configures {' and '.join(netdevs)}, as our file does, and both are merged; "
                    "remove it, or remove ours and run again to adopt what it says." + shown
                )
            raise AnsibleFilterError(
                f"{name}: {whose(path)} configures {' and '.join(netdevs)} and does not work ({' '.join(why)}); "
                "mend it, or remove it and run again: then the rails are addressed here." + shown
            )


def checked(facts: Facts, rails: list[dict[str, str]], switch: bool, guess: bool) -> dict[str, list[dict[str, Any]]]:
    """Cabled ports of every node; AnsibleFilterError when a node is missing or has too few."""
    missing = [name for name, found in facts.items() if not found]
    if missing or len(facts) < 2:
        raise AnsibleFilterError(
            f"The fabric is planned for the head and all workers together; {', '.join(missing) or 'a node'} is "
            "missing from this run: run without --limit, and mend what failed on it above."
        )
    wanted = cx7_wanted(rails, len(facts), switch)
    return {name: cabled(name, found, wanted, guess) for name, found in facts.items()}


def equal_mtu(ports: dict[str, list[dict[str, Any]]]) -> int:
    """The MTU that all rails have; AnsibleFilterError when they differ."""
    sizes = {name: sorted({p["mtu"] for p in rails}) for name, rails in ports.items()}
    if len({size for found in sizes.values() for size in found}) > 1:
        raise AnsibleFilterError(
            "The MTU of the rails differs ("
            + ", ".join(f"{n}: {' and '.join(map(str, m))}" for n, m in sizes.items())
            + "); set the same MTU on all nodes, best 9000."
        )
    return next(iter(sizes.values()))[0]


def cx7_candidate(
    facts: Facts,
    owners: Facts,
    rails: list[dict[str, str]],
    mode: str = "auto",
    switch: bool = False,
    guess: bool = False,
    management: dict[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """The plan that adopts what the rails carry, to be tried before it is kept; {} when there is nothing to adopt.

    facts, owners: node name (head first) to what cx7_facts and cx7_owners returned. Other arguments and result: as
    cx7_plan. Raises when the MTUs of rails that carry addresses differ.
    """
    ports = checked(facts, rails, switch, guess)
    if mode == "own" or any(found["ours"] for found in owners.values()):
        return {}
    links = found_links(ports)
    if not links:
        return {}
    size = equal_mtu(ports)
    plan = {name: node_plan(name, facts, links, size, management or {}) for name in facts}
    for name, part in plan.items():
        files = [whose(path) for path in foreign_files(owners[name], ports[name])]
        part |= {"adopted": True, "files": files, "warnings": costs(name, part, files)}
    return plan


def costs(name: str, part: dict[str, Any], files: list[str]) -> list[str]:
    """What is worth mending about adopted rails, one sentence each."""
    said = []
    nets = [rail["subnet"] for rail in part["rails"]]
    if len(set(nets)) < len(nets):
        said.append(
            f"{name}: both rails lie in {nets[0]}, so one route wins and a pair may get 98 Gb/s instead of "
            f"{HEALTHY_PAIR}; give each rail a subnet of its own."
        )
    if part["rails"][0]["mtu"] == SMALL_MTU:
        said.append(f"{name}: the rails have MTU 1500, which costs about 3 % of all-reduce bandwidth; set 9000 on all.")
    if not files:
        said.append(
            f"{name}: no file keeps the addresses of the rails, so a reboot takes them away; write them down, or set "
            "cx7_network_mode: own."
        )
    return said


def cx7_plan(
    facts: Facts,
    owners: Facts,
    rails: list[dict[str, str]],
    mode: str = "auto",
    mtu: str | int = "auto",
    switch: bool = False,
    allow_management: bool = False,
    guess: bool = False,
    management: dict[str, str] | None = None,
    candidate: dict[str, dict[str, Any]] | None = None,
    against: list[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Plan the rails of all nodes together.

    facts, owners: node name (head first) to what cx7_facts and cx7_owners returned; rails: cx7_network_rails; mode:
    auto, own or adopt; mtu: auto or bytes; guess: count ports of unknown carrier as cabled (check mode); management:
    node name to inventory address; candidate: what cx7_candidate returned; against: what its trial found wrong.
    Returns node name to {adopted, files, warnings, management, peer, peer_management, names, trusted,
    rails: [{netdev, address, prefix, subnet, peer, peers: {node: address}, theirs: {node: number of its rail}, mtu,
    set_mtu}]}.
    """
    ports = checked(facts, rails, switch, guess)
    if candidate and not against:
        return candidate
    why = against or ["the rails of all nodes do not carry addresses in shared subnets."]
    refuse_foreign(owners, ports, why)
    if mode == "adopt":
        raise AnsibleFilterError(
            f"cx7_network_mode is adopt and there is nothing to adopt ({' '.join(why)}); configure the rails, or set "
            "auto."
        )
    nets = subnets_of(rails)
    for name, found in facts.items():
        if not allow_management:
            refuse_overlap(name, found, nets)
    untouched = switch and mtu == "auto"
    size = equal_mtu(ports) if untouched else DIRECT_MTU if mtu == "auto" else int(mtu)
    links = own_links(ports, nets, is_ring(len(facts), switch))
    plan = {name: node_plan(name, facts, links, size, management or {}) for name in facts}
    for name, part in plan.items():
        if not allow_management:
            refuse_only_way(name, facts[name], part, (management or {}).get(name, ""))
        part |= {"adopted": False, "files": [], "warnings": []}
        part["rails"] = [rail | {"set_mtu": not untouched} for rail in part["rails"]]
    return plan


def node_plan(name: str, facts: Facts, links: list[Link], mtu: int, management: dict[str, str]) -> dict[str, Any]:
    """One node's part of the plan that cx7_plan returns, without what says where it comes from."""
    others = [n for n in facts if n != name]
    mine = [link for link in links if name in link]
    rails = []
    names = []
    counts: dict[str, int] = {}
    for link in mine:
        peers = {n: link[n]["address"] for n in others if n in link}
        network = link[name]["network"]
        rails.append(
            {
                "netdev": link[name]["netdev"],
                "address": link[name]["address"],
                "prefix": network.prefixlen,
                "subnet": str(network),
                "peer": next(iter(peers.values())),
                "peers": peers,
                "theirs": {n: [other for other in links if n in other].index(link) for n in peers},
                "mtu": mtu,
                "set_mtu": False,
            }
        )
        for node, address in {name: link[name]["address"], **peers}.items():
            names.append(f"{address} {node}.fabric{counts.get(node) or ''}")
            counts[node] = counts.get(node, 0) + 1
    reached = {n: management_of(n, facts, management) for n in others}
    trusted = [address for rail in rails for address in rail["peers"].values()]
    return {
        "management": management_of(name, facts, management),
        "peer": others[0],
        "peer_management": reached[others[0]],
        "names": names,
        "trusted": list(dict.fromkeys(a for a in [*trusted, *reached.values()] if a)),
        "rails": rails,
    }


def management_of(name: str, facts: Facts, management: dict[str, str]) -> str:
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


def cx7_differences(nodes: dict[str, dict[str, Any]]) -> list[str]:
    """What the nodes should have alike and have not, one sentence each; nodes: name to what cx7_parity returned."""
    said = []
    for key, (title, fix) in ALIKE.items():
        values = {name: found.get(key) for name, found in nodes.items()}
        if key == "memory_kb":
            values = {name: kb and round(kb / 1048576) for name, kb in values.items()}
        if len({str(value) for value in values.values()}) > 1:
            held = ", ".join(f"{name}: {'none' if value is None else value}" for name, value in values.items())
            said.append(f"The nodes differ in {title} ({held}); {fix}.")
    return said


def cx7_measurement(
    plan: dict[str, dict[str, Any]],
    pings: dict[str, dict[str, Any]],
    bandwidth: dict[str, dict[str, Any]],
    nodes: dict[str, dict[str, Any]],
    tool: str,
    floor: int,
    when: str,
) -> dict[str, Any]:
    """The record of one measurement; every argument but the last three is node name to what its module returned.

    Returns {schema, when, tool, floor_gbps, adopted, files, nodes, rails: [{node, netdev, peer, rtt_ms, bytes, gbps,
    together_gbps}], against, warnings}; gbps is null where the rail was not measured from that side.
    """
    rails = []
    for name, found in pings.items():
        speed = {(r["netdev"], r["peer"]): r for r in bandwidth.get(name, {}).get("rails", [])}
        for rail in found["rails"]:
            measured = speed.get((rail["netdev"], rail["peer"]), {})
            numbers = {key: measured.get(key) for key in ("gbps", "together_gbps")}
            rails.append({"node": name, **rail, **numbers})
    proofs = [*pings.items(), *bandwidth.items()]
    return {
        "schema": 1,
        "when": when,
        "tool": tool,
        "floor_gbps": floor,
        "adopted": any(part["adopted"] for part in plan.values()),
        "files": {name: part["files"] for name, part in plan.items()},
        "nodes": nodes,
        "rails": rails,
        "against": [f"{name}: {sentence}" for name, found in proofs for sentence in found.get("against", [])],
        "warnings": [
            *(sentence for part in plan.values() for sentence in part["warnings"]),
            *(f"{name}: {s}" for name, found in bandwidth.items() for s in found.get("warnings_found", [])),
            *cx7_differences(nodes),
        ],
    }


def cx7_trusted6(addresses: list[list[str]], management: list[str]) -> list[str]:
    """IPv6 addresses of the other nodes for the firewall: what they carry, and inventory addresses; no link-local."""
    found: list[str] = []
    for text in [*(a for node in addresses for a in node), *management]:
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            continue
        if not (address.is_link_local or address.is_loopback):
            found.append(str(address))
    return list(dict.fromkeys(found))


def cx7_networkd(rails: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Our rails as files of systemd-networkd, for a node without netplan: [{path, content}]."""
    return [
        {
            "path": f"/etc/systemd/network/60-glm-vllm-{rail['netdev']}.network",
            "content": "# Ansible managed\n"
            f"[Match]\nName={rail['netdev']}\n\n"
            + (f"[Link]\nMTUBytes={rail['mtu']}\n\n" if rail["set_mtu"] else "")
            + "[Network]\nDHCP=no\nIPv6AcceptRA=no\nLinkLocalAddressing=no\n"
            + f"Address={rail['address']}/{rail['prefix']}\n",
        }
        for rail in rails
    ]


class FilterModule:
    """Filters of the fabric plan."""

    def filters(self) -> dict[str, Any]:
        return {
            "cx7_fabric": cx7_fabric,
            "cx7_measurement": cx7_measurement,
            "cx7_networkd": cx7_networkd,
            "cx7_trusted6": cx7_trusted6,
            "cx7_wanted": cx7_wanted,
        }
