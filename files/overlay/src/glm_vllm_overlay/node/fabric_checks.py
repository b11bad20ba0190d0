"""Detectors for the cable: links, addresses, GIDs, MTU, netplan, firewall; of one node and of all together."""

from __future__ import annotations

import fnmatch
import ipaddress
import re
from collections.abc import Iterator
from typing import Any

from glm_vllm_overlay.node import discovery
from glm_vllm_overlay.node.discovery import Address, Port
from glm_vllm_overlay.node.evidence import Evidence
from glm_vllm_overlay.node.hits import LOGS, Hit, matching
from glm_vllm_overlay.node.measurements import FLOOR, measured

ANSWERS = {"REACHABLE", "STALE", "DELAY", "PROBE", "PERMANENT"}
VIRTUAL = re.compile(
    r"^(lo|docker|br-|veth|virbr|cni|flannel|cali|cilium|kube|podman|lxc|lxd|l4tbr|usb|rndis|tailscale|wg|tun|tap)"
)


def entry_of(evidence: Evidence, netdev: str) -> dict:
    """What `ip -j addr` says about an interface; {} when it says nothing."""
    return next((entry for entry in evidence.addresses or [] if entry["ifname"] == netdev), {})


def dark(evidence: Evidence, port: Port) -> bool:
    """Whether a port is known to have no link; one that is administratively down has none."""
    flags = discovery.flags(entry_of(evidence, port.netdev))
    return port.up is False or bool(flags and "LOWER_UP" not in flags)


def lit(evidence: Evidence) -> list[Port]:
    """The ports that have a link."""
    return [port for port in evidence.node.ports if port.up and not dark(evidence, port)]


def no_port(evidence: Evidence) -> Hit | None:
    """F02: the adapter is not there, or none of its RDMA devices is."""
    node = evidence.node
    devices = evidence.sysfs / "class/infiniband" if evidence.rdma and evidence.sysfs else None
    # The kernel's own list counts more than what a program printed, perhaps earlier.
    if node.hcas == {} or (devices and discovery.is_folder(devices) and not discovery.names_in(devices)):
        shown = next(
            (
                name
                for name in ("ibdev2netdev.txt", "rdma-link.txt", "show_gids.txt")
                if evidence.data(name) is not None
            ),
            "sys/class/infiniband",
        )
        what = "names no ConnectX-7 device"
        if node.ports:
            return Hit("The ports are there and their RDMA devices are not: mlx5_ib is not loaded.", f"{shown} {what}")
        return Hit("The ConnectX-7 is off the PCI bus: it appears only once a cable is seen.", f"{shown} {what}")
    if not node.ports and evidence.addresses:
        names = ", ".join(entry["ifname"] for entry in evidence.addresses)
        return Hit("No ConnectX-7 interface is there: it appears only once a cable is seen.", f"ip-addr.json: {names}")
    return None


def no_link(evidence: Evidence) -> Hit | None:
    """F02: ports are there and none has a link."""
    ports = evidence.node.ports
    if not ports or not all(dark(evidence, port) for port in ports):
        return None
    half = [port for port in ports if port.link and port.active is False]
    if half:
        names = ", ".join(port.hca for port in half)
        return Hit(f"The network half of the link is up and the RDMA half is down on {names}.", f"{names}: state DOWN")
    names = ", ".join(port.netdev for port in ports)
    told = [discovery.flags(entry_of(evidence, port.netdev)) for port in ports]
    if all(flags and "UP" not in flags for flags in told):
        return Hit("All ConnectX-7 ports are set down, so that none tells of a cable: set them up.", f"down: {names}")
    return Hit("No ConnectX-7 port has a link: the cable is out, not seated, or the peer is off.", f"down: {names}")


def bonded(evidence: Evidence) -> Hit | None:
    """F03: the twins share one address on a bond."""
    for address in evidence.node.addresses:
        if len(address.ports) > 1:
            names = " and ".join(port.netdev for port in address.ports)
            return Hit(
                f"{address.netdev} joins {names} under one address: each RDMA device needs an address of its own.",
                f"ip-addr.json: {address.netdev} {address.interface}",
            )
    return None


def lone_twin(evidence: Evidence) -> Hit | None:
    """F03: of the two functions behind one cable only one can be used."""
    node, shining = evidence.node, lit(evidence)
    for group in node.groups():
        used = [port for port in group if port in shining]
        if evidence.addresses is not None:
            used = [port for port in used if node.of(port)]
        if any(hca.whole for hca in (node.hcas or {}).values()):
            used = [port for port in used if port.hca]
        if len(used) != 1 or used[0].port is None:
            continue
        others = [port for port in group if port is not used[0]]
        why = "the other function of the port is not there"
        if others:
            twin = others[0]
            why = f"{twin.netdev} has no IPv4 address" if twin in shining else f"{twin.netdev} has no link"
            why = f"{twin.netdev} has no RDMA device" if node.hcas and not twin.hca else why
        return Hit(
            f"Only {used[0].netdev} of the two functions of its port is used: {why}.", f"{used[0].netdev}: {why}"
        )
    return None


# A line that was cut off names too few devices.
USING_IB = re.compile(r"NET/IB\s*: Using (.*?)(?:\[RO\]|;)")


def one_hca_in_log(evidence: Evidence) -> Hit | None:
    """F03: NCCL opened one RDMA device."""
    for name, line, match in matching(evidence, LOGS, "NET/IB", USING_IB):
        devices = set(re.findall(r"\[\d+\](\S+?)[:/]", match[1]))
        if len(devices) == 1:
            return Hit(f"NCCL uses {devices.pop()} alone: half of the cable lies idle.", f"{name}: {line}")
    return None


def views(evidence: Evidence) -> list[list[Port]]:
    """The ports with a link: by all sources together, then by each listing alone."""
    alone = (
        discovery.Sources(ibdev2netdev=evidence.text("ibdev2netdev.txt")),
        discovery.Sources(rdma_link=evidence.text("rdma-link.txt")),
    )
    return [lit(evidence), *([port for port in discovery.discover(one).ports if port.up] for one in alone)]


def two_cables(evidence: Evidence) -> Hit | None:
    """F06: both sockets have a link, by all sources together or by one listing alone."""
    for ports in views(evidence):
        if len({port.port for port in ports if port.port is not None}) > 1:
            return Hit(
                "Both QSFP sockets have a cable: one already fills the chip's PCIe lanes, a second adds nothing.",
                "up: " + ", ".join(port.netdev for port in ports),
            )
    return None


def narrow(evidence: Evidence) -> Hit | None:
    """F07: a function has fewer than four PCIe lanes."""
    for port in evidence.node.ports:
        if port.width in (1, 2):
            return Hit(
                f"{port.netdev} has {port.width} of its 4 PCIe lanes: old firmware wires it so.",
                f"sys/class/net/{port.netdev}/device/current_link_width: {port.width}",
            )
    return None


PLACE = r"000[02]:01:00\.[0-7]"


def rails(evidence: Evidence) -> list[Address]:
    """The IPv4 addresses on ports that have a link, or of which nothing is known."""
    return [held for held in evidence.node.addresses if not any(dark(evidence, port) for port in held.ports)]


def no_gid(evidence: Evidence) -> Hit | None:
    """F10: an address has no RoCE v2 GID on the device below it."""
    node = evidence.node
    for held in rails(evidence):
        hca = discovery.hca_for(node, held)
        known = (node.hcas or {}).get(hca)
        # A port with several addresses works by any that has a GID.
        served = any(discovery.gid_for(node, other) for other in node.addresses if other.ports == held.ports)
        if known and known.whole and known.gids is not None and not served:
            table = ", ".join(f"{gid.index}={gid.ipv4 or gid.address} {gid.version}" for gid in known.gids) or "empty"
            return Hit(
                f"{hca} has no RoCE v2 GID that carries {held.text}, this node's address on {held.netdev}.",
                f"{hca}: {table}",
            )
    if node.addresses or not node.hcas:
        return None
    # No address is known: a device with a link and no IPv4 GID is at fault, unless it belongs to a second, idle cable.
    for group in node.groups():
        known = [node.hcas[port.hca] for port in group if port in lit(evidence) and port.hca in node.hcas]
        known = [hca for hca in known if hca.whole and hca.gids is not None]
        bare = [hca.name for hca in known if not any(gid.ipv4 and gid.version == "v2" for gid in hca.gids or [])]
        idle = len(bare) == len(known) and any(gid.ipv4 for hca in node.hcas.values() for gid in hca.gids or [])
        if bare and not idle:
            return Hit(
                f"{bare[0]} has no RoCE v2 GID with an IPv4 address.", f"{bare[0]}: no IPv4 entry in its GID table"
            )
    return None


def ipv4_gids(evidence: Evidence) -> list[tuple[str, discovery.Gid]]:
    """(RDMA device, GID) of every RoCE v2 GID that carries an IPv4 address, whose ever it is."""
    hcas = sorted((evidence.node.hcas or {}).items())
    return [(name, gid) for name, hca in hcas for gid in hca.gids or [] if gid.version == "v2" and gid.ipv4]


def own_gids(evidence: Evidence) -> list[tuple[str, int]]:
    """(RDMA device, index) of the RoCE v2 GID of each rail; without addresses, of each IPv4 entry."""
    node = evidence.node
    if evidence.addresses is None:
        return [(name, gid.index) for name, gid in ipv4_gids(evidence)]
    found = []
    for held in rails(evidence):
        hca = discovery.hca_for(node, held)
        gid = discovery.gid_for(node, held)
        if gid:
            found.append((hca, gid.index))
    return found


PIN = re.compile(r"NCCL_IB_GID_INDEX(?: set (?:by environment )?to |[\"']?\s*[=:]\s*[\"']?)(\d{1,5})\b")


def pin(evidence: Evidence) -> tuple[int, str] | None:
    """(index, line) of the GID index that NCCL was told to use, when a log tells."""
    found = next(matching(evidence, LOGS, "NCCL_IB_GID_INDEX", PIN), None)
    return (int(found[2][1]), f"{found[0]}: {found[1]}") if found else None


def pinned_empty(evidence: Evidence) -> Hit | None:
    """F10: NCCL was told an index that holds nothing."""
    told = pin(evidence)
    if not told:
        return None
    for name, _ in own_gids(evidence):
        gids = (evidence.node.hcas or {})[name].gids or []
        if all(gid.index != told[0] for gid in gids):
            return Hit(f"NCCL was told to use GID index {told[0]}, which is empty on {name}.", told[1])
    return None


def shifted(evidence: Evidence) -> Hit | None:
    """F11: the index is not the usual 3; at fault only when another is pinned."""
    told, own = pin(evidence), own_gids(evidence)
    for name, index in own:
        if told and told[0] and (name, told[0]) not in own:
            return Hit(
                f"NCCL is pinned to GID index {told[0]}, and {name} has its address at {index}.", told[1], "stop"
            )
    seen = own or [(name, gid.index) for name, gid in ipv4_gids(evidence)]
    for name, index in seen:
        if index != 3:
            return Hit(
                f"The GID of {name} is at index {index}, not at the usual 3: harmless while no index is pinned.",
                f"{name}: index {index}",
                "info",
            )
    return None


EMPTY = re.compile(
    r"NCCL_IB_GID_INDEX(?:=(?:\"\"|''|[\"']?0\b|(?=\s|$))|[\"']?\s*:\s*(?:\"\"|''|null|None|~|$)"
    r"|.*set (?:by environment )?to 0\b)"
)


def in_one_subnet(held: list[tuple[str, ipaddress.IPv4Interface]]) -> tuple[str, str, str] | None:
    """(one, other, evidence) for the first two interfaces whose networks overlap."""
    for index, (one, first_address) in enumerate(held):
        for other, second_address in held[index + 1 :]:
            if one != other and first_address.network.overlaps(second_address.network):
                return one, other, f"{one} {first_address}, {other} {second_address}"
    return None


def both_rails_pass(evidence: Evidence) -> bool:
    """Whether measurements show that both rails carry the floor, and no neighbour on them is silent."""
    results = measured(evidence)
    devices = {result.device for result in results}
    enough = len(devices) > 1 if "" not in devices else len(results) > 1
    return enough and all(result.gbps >= FLOOR for result in results) and not silent_rail(evidence)


def shared_subnet(evidence: Evidence) -> Hit | None:
    """F14: two ports of this node have addresses in one subnet."""
    held = [(address.ports[0].netdev, address.interface) for address in rails(evidence)]
    found, source = in_one_subnet(held), "ip-addr.json"
    if not found:
        planned = [
            (netdev, address)
            for netdev, parts in planned_addresses(evidence).items()
            for _, address in parts
            if isinstance(address, ipaddress.IPv4Interface)
        ]
        found, source = in_one_subnet(planned), "netplan"
    if not found:
        return None
    message = (
        f"{found[0]} and {found[1]} have addresses in one subnet: one route wins, and half the traffic is lost to it"
    )
    if both_rails_pass(evidence):
        return Hit(f"{message}, yet both rails pass the floor.", f"{source}: {found[2]}", "warn")
    return Hit(f"{message}.", f"{source}: {found[2]}")


def held_twice(evidence: Evidence) -> Hit | None:
    """F14: an address of a rail is also on another interface of this node."""
    for held in rails(evidence):
        for netdev, texts in evidence.node.others.items():
            if held.text in [text.partition("/")[0] for text in texts]:
                shown = f"ip-addr.json: {held.netdev} {held.interface}, {netdev} {', '.join(texts)}"
                return Hit(f"{held.text} is on {held.netdev} and on {netdev}.", shown)
    return None


def no_address(evidence: Evidence) -> Hit | None:
    """F15: ports have a link and none of them an IPv4 address."""
    shining = lit(evidence)
    if evidence.addresses is None or not shining or any(evidence.node.of(port) for port in shining):
        return None
    names = ", ".join(port.netdev for port in shining)
    other = {
        str(info.get("local"))
        for port in shining
        for info in discovery.infos(entry_of(evidence, port.netdev))
        if info.get("scope") != "link"
    }
    only = f", only {', '.join(sorted(other))}" if other else ""
    return Hit(f"The cabled ports have no IPv4 address{only}: it was not kept over a reboot.", f"ip-addr.json: {names}")


def documents(evidence: Evidence) -> Iterator[tuple[str, Any]]:
    """(file, parsed text or the error) of each netplan file; nothing where PyYAML is not installed."""
    try:
        import yaml
    except ImportError:
        if evidence.netplan():
            evidence.unusable.append("netplan/ cannot be read without PyYAML (python3-yaml)")
        return
    for name, text in evidence.netplan().items():
        try:
            yield name, yaml.safe_load(text)
        except Exception as error:  # PyYAML lets errors of Python's own kinds through
            yield name, error


def planned_ports(evidence: Evidence, name: str, options: dict) -> list[str]:
    """The ports that an entry of netplan's `ethernets` is about."""
    ports = {port.netdev: port.mac.lower() for port in evidence.node.ports}
    match = options.get("match")
    if not isinstance(match, dict):
        return [name] if name in ports or discovery.SPARK_NETDEV.match(name) else []
    wanted = match.get("name")
    mac = str(match.get("macaddress") or "").lower()
    if wanted is None and not mac:
        return []
    return [
        netdev
        for netdev, address in ports.items()
        if (wanted is None or fnmatch.fnmatchcase(netdev, str(wanted))) and (not mac or mac == address)
    ]


def planned_addresses(evidence: Evidence) -> dict[str, list[tuple[str, Any]]]:
    """Port to [(netplan file, address)], over all files."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for file, document in documents(evidence):
        network = document.get("network") if isinstance(document, dict) else None
        ethernets = network.get("ethernets") if isinstance(network, dict) else None
        for name, options in ethernets.items() if isinstance(ethernets, dict) else ():
            given = options.get("addresses") if isinstance(options, dict) else None
            if not isinstance(given, list):
                continue
            # An address with options is a mapping of itself to them.
            texts = [next(iter(item), "") if isinstance(item, dict) else item for item in given]
            for netdev in planned_ports(evidence, str(name), options):
                for text in texts:
                    try:
                        found.setdefault(netdev, []).append((file, ipaddress.ip_interface(str(text))))
                    except ValueError:
                        continue
    return found


def two_files(evidence: Evidence) -> Hit | None:
    """F16: two netplan files give one port different addresses."""
    for netdev, parts in planned_addresses(evidence).items():
        by_file: dict[str, set] = {}
        for file, address in parts:
            by_file.setdefault(file, set()).add(address)
        files = sorted(by_file)
        if len(files) > 1 and any(by_file[file] != by_file[files[0]] for file in files):
            return Hit(
                f"{' and '.join(files)} both give {netdev} addresses: netplan merges them, and the port gets all.",
                "netplan: " + ", ".join(f"{file} {address}" for file, address in parts),
            )
    return None


def broken_file(evidence: Evidence) -> Hit | None:
    """F17: netplan cannot read one of its files, so it renders none."""
    for name, document in documents(evidence):
        if isinstance(document, Exception):
            return Hit(f"{name} is no YAML: netplan refuses it, and with it all others.", f"netplan/{name}: {document}")
        if document is not None and not isinstance(document, dict):
            return Hit(f"{name} holds no mapping: netplan refuses it, and with it all others.", f"netplan/{name}")
    return None


def wifi_managed(evidence: Evidence) -> Hit | None:
    """F17: the default route leaves by WiFi, which `netplan apply` cuts."""
    for route in evidence.routes:
        device = str(route.get("dev") or "")
        if route.get("dst") == "default" and device.startswith("wl"):
            return Hit(
                f"This node is managed over {device}: `netplan apply` by hand would cut the connection.",
                f"ip-route.json: default dev {device}",
                "info",
            )
    return None


def unequal_twins(evidence: Evidence) -> Hit | None:
    """F18: the rails of one node have different MTUs, or all the small one."""
    sizes = {held.netdev: held.mtu for held in rails(evidence) if held.mtu}
    shown = "ip-addr.json: " + ", ".join(f"{netdev} MTU {mtu}" for netdev, mtu in sizes.items())
    if len(set(sizes.values())) > 1:
        return Hit(f"The rails of one node have different MTUs ({', '.join(map(str, sizes.values()))}).", shown)
    if sizes and max(sizes.values()) <= 1500:
        return Hit("The rails have MTU 1500: equal on both nodes that costs about 3 % of an all-reduce.", shown, "warn")
    return None


def silent_rail(evidence: Evidence) -> Hit | None:
    """F19: the only neighbours on a rail do not answer."""
    held = rails(evidence)
    by_rail: dict[str, list[dict]] = {}
    for entry in evidence.neighbours:
        try:
            destination = ipaddress.ip_address(str(entry.get("dst")))
        except ValueError:
            continue
        device = str(entry.get("dev") or "")
        # iproute2 6.1 leaves the device out when it was part of the question.
        rail = next((a.netdev for a in held if device in ("", a.netdev) and destination in a.interface.network), "")
        if not held and evidence.addresses is None and (not device or discovery.SPARK_NETDEV.match(device)):
            rail = device or "a rail"
        if rail:
            by_rail.setdefault(rail, []).append(entry)
    for rail, entries in by_rail.items():
        silent = [entry for entry in entries if {"FAILED", "INCOMPLETE"} & states_of(entry)]
        if silent and not any(states_of(entry) & ANSWERS for entry in entries):
            peer, state = silent[0].get("dst"), " ".join(sorted(states_of(silent[0])))
            return Hit(f"{peer} does not answer on {rail}.", f"ip-neigh.json: {peer} {state}")
    return None


def states_of(entry: dict) -> set[str]:
    """The states of a neighbour."""
    found = entry.get("state")
    return {str(state) for state in found} if isinstance(found, list) else set()


DROPPED = re.compile(r"\bIN=(\S+)(?=.*\bSRC=(\S+))?.*\bPROTO=(\w+)(?=.*\bDPT=(\d+))")


def firewalled(evidence: Evidence) -> Hit | None:
    """F21: a firewall drops RoCE, or TCP from the peer on a rail."""
    node = evidence.node
    netdevs = {port.netdev for port in node.ports} | {held.netdev for held in node.addresses}
    for name, line, match in matching(evidence, ("journal.txt",), "DPT=", DROPPED):
        if not re.search(r"(?i)block|drop|reject|den(y|ied)", line):
            continue
        device, source, protocol, port = match.groups()
        ours = device in netdevs or bool(discovery.SPARK_NETDEV.match(device))
        try:
            near = any(ipaddress.ip_address(source or "") in held.interface.network for held in node.addresses)
        except ValueError:
            near = False
        if (protocol == "UDP" and port == "4791") or (ours and protocol == "TCP" and (near or not node.addresses)):
            return Hit(
                f"A firewall drops {protocol} port {port} from {source or 'the peer'} on {device}.", f"{name}: {line}"
            )
    return None


def unequal_mtu(nodes: list[Evidence]) -> Hit | None:
    """F18: the ends of one rail have different MTUs."""
    seen: dict[ipaddress.IPv4Network, tuple[Evidence, Address]] = {}
    for node in nodes:
        for held in rails(node):
            if not held.mtu:
                continue
            other, end = seen.setdefault(held.interface.network, (node, held))
            if other is not node and end.mtu != held.mtu:
                network = held.interface.network
                return Hit(
                    f"The ends of {network} have MTU {end.mtu} on {other.name} and {held.mtu} on {node.name}.",
                    f"{other.name}: {end.netdev} {end.mtu}, {node.name}: {held.netdev} {held.mtu}",
                )
    return None


def same_address(nodes: list[Evidence]) -> Hit | None:
    """F14: one address on two nodes."""
    seen: dict[str, tuple[Evidence, str]] = {}
    for node in nodes:
        for netdev, address in reachable(node):
            other, there = seen.setdefault(address, (node, netdev))
            if other is not node:
                return Hit(
                    f"{address} is on {other.name} and on {node.name}.",
                    f"{other.name}: {there}, {node.name}: {netdev}",
                )
    return None


def reachable(node: Evidence) -> Iterator[tuple[str, str]]:
    """(interface, address) of what other machines reach this node by: no loopback, bridges and links of containers."""
    for entry in node.addresses or []:
        if VIRTUAL.match(entry["ifname"]):
            continue
        for info in discovery.infos(entry):
            if info.get("scope", "global") == "global" and info.get("local"):
                yield entry["ifname"], str(info["local"])


def other_ports(nodes: list[Evidence]) -> Hit | None:
    """F04: the cable is in different sockets, by all sources together or by one kind of listing alone."""
    for seen in zip(*(views(node) for node in nodes), strict=True):
        told = {}
        for node, ports in zip(nodes, seen, strict=True):
            sockets = {port.port for port in ports if port.port is not None}
            if len(sockets) == 1:
                told[node.name] = sockets.pop()
        if len(set(told.values())) > 1:
            shown = ", ".join(f"{name}: port {socket}" for name, socket in told.items())
            return Hit("The cable is in different sockets on the nodes, so that interface names differ.", shown)
    return None


def other_indices(nodes: list[Evidence]) -> Hit | None:
    """F12: GID indices differ between nodes; at fault only when one is pinned."""
    indices = {node.name: {index for _, index in own_gids(node)} for node in nodes}
    known = {name: found for name, found in indices.items() if found}
    if len(known) < 2 or len(set().union(*known.values())) < 2:
        return None
    shown = ", ".join(f"{name}: {'/'.join(map(str, sorted(found)))}" for name, found in known.items())
    told = [(node, pinned) for node in nodes if (pinned := pin(node))]
    wrong = [node.name for node, pinned in told if known.get(node.name) and known[node.name] != {pinned[0]}]
    if wrong:
        return Hit(
            f"GID indices differ between the nodes, and {wrong[0]} is pinned to another than its own.", shown, "stop"
        )
    return Hit("GID indices differ between the nodes: harmless while each resolves its own.", shown, "info")
