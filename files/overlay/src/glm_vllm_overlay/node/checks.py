"""The detectors of `glm-vllm doctor`: each looks for one fault in a node's evidence, or in that of all nodes.

A detector returns a Hit, or None when the fault is not there or the evidence does not tell. What is missing is never
a fault. The ids, default severities and fixes stand in findings.py.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from glm_vllm_overlay.node import discovery
from glm_vllm_overlay.node.discovery import Address, Port
from glm_vllm_overlay.node.evidence import Evidence

GIB = 1024**3
LOGS = ("engine.log", "nccl.log", "nccl-tests.txt", "journal.txt")
# Gb/s a rail, as cx7_network_min_gbps; the trap leaves 8 to 25.
FLOOR, TRAP = 80.0, 30.0
# Below 64 KiB a message is too small to fill a rail.
JUDGED_BYTES = 65536
# GB/s of bus bandwidth at a size that fills both rails: two give about 22, one about 11, TCP less than 1.
JUDGED_COLLECTIVE = 1024**3
TCP_BUSBW, SICK_BUSBW, ONE_RAIL_BUSBW = 1.0, 9.0, 15.0
UTILISATION = 0.87
# kB; the smallest 128 GB Spark shows about 127.5 million.
SMALLEST_MEMORY = 100_000_000
MEMLOCK_FLOOR = 1 * GIB
ANSWERS = {"REACHABLE", "STALE", "DELAY", "PROBE", "PERMANENT"}
VIRTUAL = re.compile(r"^(lo|docker|br-|veth|virbr|cni|flannel|cali|cilium|kube|podman|lxc|lxd|tailscale|wg|tun|tap)")


@dataclass
class Hit:
    """A fault that was found: one sentence, the line that shows it, and a severity where it differs from the table."""

    message: str
    evidence: str
    severity: str = ""


Detector = Callable[[Evidence], Hit | None]


def said(
    needle: str, message: str, pattern: str = "", files: tuple[str, ...] = LOGS, unless: str = "", severity: str = ""
) -> Detector:
    """A detector for a line that holds `needle` and matches `pattern` and not `unless`.

    `message` may use the pattern's groups as {0}, {1}.
    """
    wanted, unwanted = re.compile(pattern or re.escape(needle)), re.compile(unless) if unless else None

    def detect(evidence: Evidence) -> Hit | None:
        for name, line, match in matching(evidence, files, needle, wanted):
            if not (unwanted and unwanted.search(line)):
                return Hit(message.format(*match.groups()), f"{name}: {line}", severity)
        return None

    return detect


def first(*detectors: Detector) -> Detector:
    """A detector that asks others in turn."""

    def detect(evidence: Evidence) -> Hit | None:
        return next((hit for hit in (detector(evidence) for detector in detectors) if hit), None)

    return detect


def matching(
    evidence: Evidence, files: tuple[str, ...], needle: str, pattern: re.Pattern[str]
) -> Iterator[tuple[str, str, re.Match[str]]]:
    """(file, line, match) for the lines that hold `needle` and match `pattern`."""
    for name in files:
        for line in evidence.lines(name, needle):
            match = pattern.search(line)
            if match:
                yield name, line, match


# ---- 3.1 cable, NIC, PCIe --------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """One ib_write_bw result: the device ("" when not printed), Gb/s on average, and the row."""

    device: str
    gbps: float
    row: str


HEADER = re.compile(r"#bytes\s+#iterations.*BW average\[(\w+)/sec\]")
ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+(?:[\d.]+|-?nan|inf)\s+(\d+(?:\.\d+)?)(?:\s+[\d.]+)?\s*$")


def rows_of(text: str) -> Iterator[tuple[int, int, Measured]]:
    """(table, message size in bytes, result) for each numeric row of ib_write_bw's output."""
    table, device, unit = 0, "", 1.0
    for line in text.splitlines():
        named, header, row = re.match(r"\s*Device\s*:\s*(\S+)", line), HEADER.search(line), ROW.match(line)
        if named:
            device = named[1]
        elif header:
            # Without --report_gbits it prints MiB, and calls them MB in old versions.
            table, unit = table + 1, 1.0 if header[1] == "Gb" else 8 * 1024**2 / 1e9
        elif row:
            yield table, int(row[1]), Measured(device, float(row[3]) * unit, line.strip())


def measured(evidence: Evidence) -> list[Measured]:
    """The ib_write_bw results that say something about a rail: large messages, of a sweep the best row."""
    tables: dict[int, list[tuple[int, Measured]]] = {}
    for table, size, result in rows_of(evidence.text("ib_write_bw.txt") or ""):
        if size >= JUDGED_BYTES:
            tables.setdefault(table, []).append((size, result))
    found: list[Measured] = []
    for rows in tables.values():
        sweep = len({size for size, _ in rows}) > 1
        found += [max((row for _, row in rows), key=lambda row: row.gbps)] if sweep else [row for _, row in rows]
    return found


def slow_rail(evidence: Evidence) -> Hit | None:
    """F01: a measurement below the floor."""
    worst = min(measured(evidence), key=lambda result: result.gbps, default=None)
    if worst is None or worst.gbps >= FLOOR:
        return None
    what = "the port is wedged (the 13 Gb/s trap)" if worst.gbps < TRAP else f"below the floor of {FLOOR:.0f}"
    return Hit(f"{worst.device or 'A rail'} carries {worst.gbps:.1f} Gb/s: {what}.", f"ib_write_bw.txt: {worst.row}")


def silent_wedge(evidence: Evidence) -> Hit | None:
    """F01: the adapter's own controller has stopped answering, unless a measurement says that all is well."""
    results = measured(evidence)
    if results and min(result.gbps for result in results) >= FLOOR:
        return None
    return said("irisc not responding", "The adapter's own controller does not answer: the port is wedged.")(evidence)


BUSBW_ROW = re.compile(r"^\s*(\d+)\s+\d+\s+[a-z]\w*\s+\w+\s+-?\d+\s+[\d.]+\s+[\d.]+\s+([\d.]+)\s", re.MULTILINE)


def collective(evidence: Evidence) -> tuple[float, str] | None:
    """(GB/s of bus bandwidth, line) of nccl-tests at a size that fills the rails; None when there is no such result."""
    text = evidence.text("nccl-tests.txt") or ""
    if worlds_of_one(evidence):
        return None
    rows = [(int(match[1]), float(match[2]), match[0].strip()) for match in BUSBW_ROW.finditer(text + "\n")]
    large = [(busbw, line) for size, busbw, line in rows if size >= JUDGED_COLLECTIVE]
    if rows:
        return max(large, default=None)
    average = re.search(r"^#\s*Avg bus bandwidth\s*:\s*([\d.]+)", text, re.MULTILINE)
    return (float(average[1]), average[0]) if average else None


def busbw(low: float, high: float, message: str) -> Detector:
    """A detector for a collective whose bus bandwidth lies in [low, high) GB/s."""

    def detect(evidence: Evidence) -> Hit | None:
        result = collective(evidence)
        if result is None or not low <= result[0] < high:
            return None
        return Hit(message.format(result[0]), f"nccl-tests.txt: {result[1]}")

    return detect


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
    if node.hcas == {} or (devices and devices.is_dir() and not discovery.names_in(devices)):
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


USING_IB = re.compile(r"NET/IB\s*: Using (.*)")


def one_hca_in_log(evidence: Evidence) -> Hit | None:
    """F03: NCCL opened one RDMA device."""
    for name, line, match in matching(evidence, LOGS, "NET/IB", USING_IB):
        devices = set(re.findall(r"\[\d+\](\S+?)[:/]", match[1]))
        if len(devices) == 1:
            return Hit(f"NCCL uses {devices.pop()} alone: half of the cable lies idle.", f"{name}: {line}")
    return None


def two_cables(evidence: Evidence) -> Hit | None:
    """F06: both sockets have a link, by all sources together or by one listing alone."""
    listings = [
        discovery.discover(discovery.Sources(ibdev2netdev=evidence.text("ibdev2netdev.txt"))).ports,
        discovery.discover(discovery.Sources(rdma_link=evidence.text("rdma-link.txt"))).ports,
    ]
    for ports in (lit(evidence), *([port for port in listing if port.up] for listing in listings)):
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


def no_row(evidence: Evidence) -> Hit | None:
    """F08: ib_write_bw printed something, and no result."""
    text = evidence.text("ib_write_bw.txt") or ""
    if next(rows_of(text), None) or not re.search(r"#bytes|RDMA_Write|ib_write_bw|GID index|Couldn't|[Ff]ailed", text):
        return None
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip(" -=\t")), "")
    return Hit("ib_write_bw measured nothing: no row of numbers follows its heading.", f"ib_write_bw.txt: {last}")


# ---- 3.2 addresses, GIDs, MTU ----------------------------------------------------------------------------------------


def rails(evidence: Evidence) -> list[Address]:
    """The IPv4 addresses on ports that have a link, or of which nothing is known."""
    return [held for held in evidence.node.addresses if not any(dark(evidence, port) for port in held.ports)]


def no_gid(evidence: Evidence) -> Hit | None:
    """F10: an address has no RoCE v2 GID on the device below it."""
    node = evidence.node
    for held in rails(evidence):
        hca = discovery.hca_for(node, held)
        known = (node.hcas or {}).get(hca)
        if known and known.whole and known.gids is not None and not node.gid(hca, held.text, held.netdev):
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
        gid = node.gid(hca, held.text, held.netdev) if hca else None
        if gid:
            found.append((hca, gid.index))
    return found


PIN = re.compile(r"NCCL_IB_GID_INDEX(?: set by environment to |[\"']?\s*[=:]\s*[\"']?)(\d+)")


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
        if told and told[0] and told[0] != index:
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
    r"NCCL_IB_GID_INDEX(?:=(?:\"\"|''|[\"']?0\b|(?=\s|$))|[\"']?\s*:\s*(?:\"\"|''|null|None)"
    r"|.*set by environment to 0\b)"
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
        return
    for name, text in evidence.netplan().items():
        try:
            yield name, yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError, ValueError) as error:
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
            # An address with options is a mapping of itself to them.
            texts = [next(iter(item), "") if isinstance(item, dict) else item for item in given or []]
            for netdev in planned_ports(evidence, str(name), options) if isinstance(given, list) else ():
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
        states = [set(map(str, found)) for found in (e.get("state") for e in entries) if isinstance(found, list)]
        silent = [entry for entry in entries if {"FAILED", "INCOMPLETE"} & set(entry.get("state") or [])]
        if silent and not any(state & ANSWERS for state in states):
            peer = silent[0].get("dst")
            return Hit(f"{peer} does not answer on {rail}.", f"ip-neigh.json: {peer} {' '.join(silent[0]['state'])}")
    return None


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


# ---- 3.3 NCCL, Gloo, start-up ----------------------------------------------------------------------------------------

IFNAME = re.compile(r"\b((?:NCCL|GLOO|TP)_SOCKET_IFNAME)(?: set by environment to |=)[\"']?=?([\w.,@-]+)")


def wrong_interface(evidence: Evidence) -> Hit | None:
    """F23: a variable names an interface that this node does not have, or that has no IPv4 address."""
    if not evidence.addresses:
        return None
    usable = {entry["ifname"] for entry in evidence.addresses if discovery.ipv4(entry)} | {"lo"}
    for name, line, match in matching(evidence, LOGS, "_SOCKET_IFNAME", IFNAME):
        variable, value = match.groups()
        wanted = [word for word in value.split(",") if word]
        if wanted and not any(netdev.startswith(word) for word in wanted for netdev in usable):
            return Hit(f"{variable} names {value}, which has no IPv4 address on this node.", f"{name}: {line}")
    return None


def loopback_name(evidence: Evidence) -> Hit | None:
    """F24: /etc/hosts gives the host's own name a loopback address."""
    for line in (evidence.text("hosts") or "").splitlines():
        words = line.partition("#")[0].split()
        if len(words) < 2 or not words[0].startswith("127."):
            continue
        names = [name for name in words[1:] if not name.startswith(("localhost", "ip6-")) and name != "loopback"]
        own = [name for name in names if evidence.name and name.split(".")[0] == evidence.name.split(".")[0]]
        if own or (names and words[0].startswith("127.0.1.")):
            return Hit(
                f"/etc/hosts gives {(own or names)[0]} the address {words[0]}: Gloo and Ray announce it to the peer.",
                f"hosts: {line.strip()}",
            )
    return None


def tcp_fallback(evidence: Evidence) -> Hit | None:
    """F25: NCCL took TCP."""
    if not evidence.rdma:
        return None
    for needle, pattern in (
        ("NET/Socket", r"NET/Socket"),
        ("network Socket", r"Using network Socket"),
        ("NET plugin Socket", r"(Assigned|Initialized|Using) NET plugin Socket"),
        ("NET plugin IB", r"Failed to initialize NET plugin IB"),
    ):
        hit = said(needle, "NCCL fell back to TCP sockets: a tenth of the cable.", pattern)(evidence)
        if hit:
            return hit
    return None


def stranded_cma(evidence: Evidence) -> Hit | None:
    """F27: memory that the kernel has set aside and lost."""
    memory = meminfo(evidence)
    if memory.get("CmaTotal") != 0 or memory.get("CmaFree", 0) <= 0:
        return None
    lost = memory["CmaFree"] / 1024**2
    return Hit(
        f"The kernel has stranded {lost:.1f} GiB in CMA (KHO bug).",
        f"meminfo: CmaTotal: 0 kB, CmaFree: {memory['CmaFree']} kB",
    )


def low_memlock(evidence: Evidence) -> Hit | None:
    """F26: RDMA may lock too little memory."""
    match = re.search(r"^Max locked memory\s+(\d+|unlimited)\s+(\d+|unlimited)", evidence.text("limits") or "", re.M)
    if match and match[1] != "unlimited" and int(match[1]) < MEMLOCK_FLOOR:
        return Hit(
            f"The process may lock {int(match[1]) // 1024} KiB only: RDMA needs unlimited.", f"limits: {match[0]}"
        )
    return None


def no_lock(evidence: Evidence) -> Hit | None:
    """F26: registering memory failed, and no stranded CMA explains it."""
    if stranded_cma(evidence):
        return None
    return said("ibv_reg_mr", "RDMA could not lock memory.", r"ibv_reg_mr\w* failed.*Cannot allocate memory")(evidence)


def worlds_of_one(evidence: Evidence) -> Hit | None:
    """F28: nccl-tests ran as one-rank worlds, which measures nothing."""
    text = evidence.text("nccl-tests.txt") or ""
    ranks = set(re.findall(r"\bRank\s+(\d+)\b", text))
    alone = ranks == {"0"} or (not ranks and bool(re.search(r"\bnGpus 1\b", text)))
    zero = re.search(r"^#\s*Avg bus bandwidth\s*:\s*0+(?:\.0*)?\s*$", text, re.MULTILINE)
    if not (alone and re.search(r"\bnGpus 1\b|busbw|bus bandwidth", text)) and not zero:
        return None
    line = zero[0] if zero else next((line for line in text.splitlines() if "Rank" in line or "nGpus" in line), "")
    return Hit(
        "nccl-tests ran without MPI, each rank alone: the result says nothing.", f"nccl-tests.txt: {line.strip()}"
    )


def huge_collective(evidence: Evidence) -> Hit | None:
    """F29: a 16 GB collective was begun with too little memory and did not end."""
    text = evidence.text("nccl-tests.txt") or ""
    size = re.search(r"maxBytes (\d+)", text)
    available = meminfo(evidence).get("MemAvailable")
    if not size or int(size[1]) < 8 * GIB or available is None or available >= 48 * 1024**2:
        return None
    if "Avg bus bandwidth" in text or BUSBW_ROW.search(text + "\n"):
        return None
    begun = int(size[1]) // 10**9
    return Hit(
        f"nccl-tests of {begun} GB was begun with {available // 1024**2} GiB available and did not end.",
        f"nccl-tests.txt: {size[0]}",
    )


# ---- memory ----------------------------------------------------------------------------------------------------------


def meminfo(evidence: Evidence) -> dict[str, int]:
    """The figures of /proc/meminfo in kB; {} when there are none."""
    text = evidence.text("meminfo") or ""
    return {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB\s*$", text, re.MULTILINE)}


def engine_runs(evidence: Evidence) -> bool:
    """Whether a process holds GPU memory, or this machine's engine is up."""
    table = evidence.text("nvidia-smi-table.txt") or ""
    held = re.findall(r"^\|.*\s(?:C|C\+G)\s.*?(\d+)\s*MiB\s*\|", table, re.MULTILINE)
    return evidence.busy or any(int(size) > 8 * 1024 for size in held)


def memory_gate(evidence: Evidence) -> Hit | None:
    """F30: too little is free for a start; MemAvailable decides."""
    memory = meminfo(evidence)
    total, free, available = (memory.get(key) for key in ("MemTotal", "MemFree", "MemAvailable"))
    if not total or free is None or available is None or engine_runs(evidence):
        return None
    need = int(total * UTILISATION)
    shown = f"meminfo: MemFree: {free} kB, MemAvailable: {available} kB"
    if available < need:
        return Hit(
            f"{available / 1024**2:.1f} GiB are available and a start at {UTILISATION} needs {need / 1024**2:.1f}.",
            shown,
        )
    if free < need:
        return Hit(
            f"{free / 1024**2:.1f} GiB are free, {available / 1024**2:.1f} available: the page cache holds the rest.",
            shown,
        )
    return None


FREE_MEMORY = re.compile(r"Free memory on device \S+ \(([\d.]+)/[\d.]+ GiB\) on startup is less than .*?([\d.]+) GiB\)")


def restart_race(evidence: Evidence) -> Hit | None:
    """F31: the start missed its memory by a hair: the last engine's had not come back yet."""
    for name, line, match in matching(evidence, LOGS, "on startup is less than", FREE_MEMORY):
        if float(match[1]) >= 0.99 * float(match[2]):
            return Hit("The engine before this start had not given all its memory back.", f"{name}: {line}")
    return None


def swap(evidence: Evidence) -> Hit | None:
    """F33: swap is on."""
    total = meminfo(evidence).get("SwapTotal", 0)
    if not total:
        return None
    return Hit(
        f"{total / 1024**2:.0f} GiB of swap are on: a full node stalls in it.",
        f"meminfo: SwapTotal: {total} kB",
        "warn",
    )


def explicit_bytes(evidence: Evidence) -> Hit | None:
    """F36: KV bytes were given, and what is left is too little."""
    available = meminfo(evidence).get("MemAvailable")
    if available is not None and available >= 4 * 1024**2:
        return None
    return said(
        "does not respect the gpu_memory_utilization", "The KV cache has a fixed size and ignores the utilisation."
    )(evidence)


def hang_at_init(evidence: Evidence) -> Hit | None:
    """F39: the log ends where two nodes meet."""
    last = evidence.last_line("engine.log")
    if "CustomAllreduce is disabled because this process group spans across nodes" not in last:
        return None
    return Hit("The engine's log ends where the two ranks meet: they wait for each other.", f"engine.log: {last}")


GPU_ROW = re.compile(r"\s(\d+)W\s*/.*\|\s*(\d+)%\s")


def idle_power(evidence: Evidence) -> Hit | None:
    """F39, F71: the GPU is busy and draws what an idle one draws."""
    for line in evidence.lines("nvidia-smi-table.txt", "%"):
        match = GPU_ROW.search(line)
        if match and int(match[2]) >= 90 and int(match[1]) <= 30:
            return Hit(
                f"The GPU is {match[2]} % busy at {match[1]} W: it spins in a deadlock, or its clock is stuck.",
                f"nvidia-smi-table.txt: {line}",
            )
    return None


# ---- driver, identity ------------------------------------------------------------------------------------------------


def gpus(evidence: Evidence) -> list[list[str]]:
    """The rows of nvidia-smi.csv: name, memory, driver; without a heading."""
    lines = (evidence.text("nvidia-smi.csv") or "").splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    return [row for row in rows if len(row) >= 3 and row[0].lower() != "name"]


def driver(evidence: Evidence) -> str:
    """The driver's version; "" when it is not known."""
    return next((row[2] for row in gpus(evidence) if re.match(r"^\d{3,}\.\d+", row[2])), "")


def driver_branch(evidence: Evidence) -> Hit | None:
    """F45: a driver outside the branch that GB10 is supported with."""
    version = driver(evidence)
    if not version or version.startswith("580."):
        return None
    return Hit(f"The driver is {version}, not of branch 580.", f"nvidia-smi.csv: {version}")


def no_memory_figure(evidence: Evidence) -> Hit | None:
    """F69: nvidia-smi shows no GPU, or no memory figure."""
    for name in ("nvidia-smi.csv", "nvidia-smi-table.txt"):
        line = next(evidence.lines(name, "No devices were found"), "")
        if line:
            return Hit("nvidia-smi finds no GPU.", f"{name}: {line}", "stop")
    for row in gpus(evidence):
        shown = f"nvidia-smi.csv: {', '.join(row)}"
        if row[0] in ("[N/A]", "N/A", "[Not Supported]"):
            return Hit("nvidia-smi does not tell the GPU's name.", shown, "warn")
        if row[1] in ("[N/A]", "N/A", "[Not Supported]", "Not Supported"):
            return Hit("nvidia-smi has no memory figure, as is normal on GB10: /proc/meminfo has it.", shown)
    return None


def release_file(evidence: Evidence) -> Hit | None:
    """F72: dgx-release holds a serial number, or several updates of which the last counts."""
    text = evidence.text("dgx-release") or ""
    serial = re.search(r"^DGX_SERIAL_NUMBER=[\"']?([^\"'\n]*)", text, re.MULTILINE)
    if serial and serial[1].strip() not in ("", "REDACTED"):
        return Hit("dgx-release holds a serial number.", "dgx-release: DGX_SERIAL_NUMBER=…")
    updates = re.findall(r"^DGX_OTA_VERSION=[\"']?([^\"'\s]+)", text, re.MULTILINE)
    if len(updates) > 1:
        return Hit(f"dgx-release lists {len(updates)} updates: {updates[-1]} is the one that counts.", "dgx-release")
    return None


def small_spark(evidence: Evidence) -> Hit | None:
    """F73: too little memory for this model."""
    total = meminfo(evidence).get("MemTotal")
    if not total or total >= SMALLEST_MEMORY:
        return None
    return Hit(
        f"This node has {total / 1024**2:.0f} GiB of memory: a rank needs a 128 GB Spark.", f"meminfo: {total} kB"
    )


def tuning(evidence: Evidence) -> Hit | None:
    """R1: the log ends in a tuning round at 0 %."""
    last = evidence.last_line("engine.log")
    if not re.search(r"(?i)tun(?:ing|er)\b.*\b0%", last):
        return None
    return Hit("The engine's log ends in FlashInfer's autotuner at 0 %.", f"engine.log: {last}")


def no_prefix_hits(evidence: Evidence) -> Hit | None:
    """R9: with speculation on, no prefix was ever found in the cache."""
    lines = [line for line in evidence.lines("engine.log", "Prefix cache hit rate:") if "Running:" in line]
    rates = re.findall(r"Prefix cache hit rate: ([\d.]+)%", "\n".join(lines))
    if len(rates) < 20 or any(float(rate) > 0 for rate in rates):
        return None
    if next(evidence.lines("engine.log", "SpecDecoding metrics"), None) is None:
        return None
    return Hit(
        f"No prefix was found in the cache in {len(rates)} reports, with speculation on.", f"engine.log: {lines[-1]}"
    )


# ---- all nodes together ----------------------------------------------------------------------------------------------


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
    """F04: the cable is in different sockets."""
    sockets = {node.name: {port.port for port in lit(node) if port.port is not None} for node in nodes}
    told = {name: found for name, found in sockets.items() if len(found) == 1}
    if len(set().union(*told.values())) < 2:
        return None
    shown = ", ".join(f"{name}: port {min(found)}" for name, found in told.items())
    return Hit("The cable is in different sockets on the nodes, so that interface names differ.", shown)


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


def other_driver(nodes: list[Evidence]) -> Hit | None:
    """F45: drivers differ between nodes."""
    versions = {node.name: driver(node) for node in nodes if driver(node)}
    if len(set(versions.values())) < 2:
        return None
    return Hit(
        "The nodes have different GPU drivers.", ", ".join(f"{name}: {version}" for name, version in versions.items())
    )


def tuning_apart(nodes: list[Evidence]) -> Hit | None:
    """R1: one rank is in a tuning round and the other is not."""
    inside = [node for node in nodes if tuning(node)]
    outside = [node for node in nodes if node.last_line("engine.log") and not tuning(node)]
    if not inside or not outside:
        return None
    return Hit(
        f"{inside[0].name} waits in FlashInfer's autotuner and {outside[0].name} does not: they wait for each other.",
        f"{inside[0].name}: {inside[0].last_line('engine.log')}",
    )


def unequal_cache(nodes: list[Evidence]) -> Hit | None:
    """R10: the ranks have KV caches of different sizes."""
    sizes = {}
    for node in nodes:
        found = [match[1] for _, _, match in matching(node, ("engine.log",), "GPU KV cache size:", KV_SIZE)]
        if found:
            sizes[node.name] = found[-1]
    if len(set(sizes.values())) < 2:
        return None
    shown = ", ".join(f"{name}: {size} tokens" for name, size in sizes.items())
    return Hit("The ranks have KV caches of different sizes: the pool is as small as the smaller.", shown)


KV_SIZE = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
