"""The ConnectX-7 of a node: ports, RDMA devices, GIDs, and which of them carry an address. Pure functions.

A live node and a bundle are read alike: a folder of sysfs (`/sys`, or its copy) and what programs printed. Nothing here
runs a program, changes anything or imports anything of this package: Ansible ships this file to the node with its
module cx7_facts.

Several sources may speak of one port. A link counts as up only when one source says so and none says that it is down:
a port whose RDMA half is down is of no use, whatever its network half says.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# The names that DGX OS gives the four functions, and no other card's: the chip is soldered to bus 1 of domains 0 and 2.
SPARK_NETDEV = re.compile(r"^en(?:P(?P<domain>2))?p1s0f(?P<function>[01])(?:np(?P<port>[01]))?$")
SPARK_HCA = re.compile(r"^(?:roce|ib)(?:P(?P<domain>2))?p1s0f(?P<function>[01])$")
# Names that tell a place on some bus; with no word about the hardware, another place is another card.
PLACED = re.compile(r"^(?:en|wl|ww|sl)(?:[osx]|P?\d*p\d|P\d)")
# RDMA in software, on top of any interface.
SOFT_HCA = re.compile(r"^(?:rxe|siw)")
MELLANOX, CX7 = "0x15b3", "0x1021"
IBDEV2NETDEV = re.compile(r"^(\S+) port (\d+) ==> (\S+) \((Up|Down)\)$")
# What the kernel calls the states of an RDMA port; anything else is noise, or a line that was cut off.
PORT_STATE = re.compile(r"(?:ACTIVE|ACTIVE_DEFER|ARMED|INIT|DOWN|NOP)\b")
RDMA_LINK = re.compile(rf"^link (\S+?)/(\d+)\b.*? state ({PORT_STATE.pattern})(?:.* netdev (\S+))?")
SHOW_GIDS = re.compile(
    r"^(\S+)\s+(\d{1,5})\s+(\d{1,5})\s+([0-9a-fA-F:]{3,39})\s+(?:[\d.]{7,15}\s+)?(v[12])\b(?:\s+(\S+))?$"
)


@dataclass
class Gid:
    """One entry of a GID table: port of the device, index, the address in it, "v1" or "v2" (RoCE), its interface."""

    port: int
    index: int
    address: ipaddress.IPv6Address
    version: str
    netdev: str = ""

    @property
    def ipv4(self) -> str:
        """The IPv4 address that this entry carries, or ""."""
        return str(self.address.ipv4_mapped or "")


@dataclass
class Hca:
    """One RDMA device. `active` is its port's state, None when nothing tells; `gids` is None when no table was seen.

    `whole` is False when its GIDs come from a listing that was cut off: then what it lacks may only be lost.
    """

    name: str
    netdev: str = ""
    active: bool | None = None
    gids: list[Gid] | None = None
    whole: bool = True
    foreign: bool = False
    certain: bool = False


@dataclass
class Port:
    """One function of the ConnectX-7. Numbers are None and texts "" where nothing tells; `speed` is in Mb/s."""

    netdev: str
    hca: str = ""
    port: int | None = None
    domain: int = 0
    pci: str = ""
    driver: str = ""
    switch: str = ""
    link: bool | None = None
    active: bool | None = None
    speed: int | None = None
    width: int | None = None
    mtu: int | None = None
    mac: str = ""

    @property
    def up(self) -> bool | None:
        """Whether the link is up by every source that speaks of it."""
        votes = {self.link, self.active}
        return False if False in votes else True if True in votes else None


@dataclass
class Address:
    """An IPv4 address of this node: its interface (the port itself, or a VLAN or bond above it) and the ports below."""

    netdev: str
    interface: ipaddress.IPv4Interface
    mtu: int
    link: bool
    ports: list[Port]

    @property
    def text(self) -> str:
        """The address without its prefix."""
        return str(self.interface.ip)


@dataclass
class Sources:
    """What a node printed. None: not there. `sysfs` is a folder that holds `class/`; `addresses` is parsed already.

    `rdma` is False where RDMA is not wanted: then nothing is said about RDMA devices.
    """

    rdma: bool = True
    sysfs: Path | None = None
    addresses: list[dict] | None = None
    ibdev2netdev: str | None = None
    show_gids: str | None = None
    rdma_link: str | None = None


@dataclass
class Node:
    """All that was found. `hcas` is None when no source tells of RDMA devices; `addresses` when ip was not asked."""

    ports: list[Port] = field(default_factory=list)
    hcas: dict[str, Hca] | None = None
    entries: list[dict] | None = None
    addresses: list[Address] = field(default_factory=list)
    others: dict[str, list[str]] = field(default_factory=dict)

    def groups(self) -> list[list[Port]]:
        """The ports by QSFP socket: the twins of one cable stand together."""
        by_switch: dict[tuple, list[Port]] = {}
        for port in self.ports:
            by_switch.setdefault((port.switch, port.port), []).append(port)
        # One chip has one switch id. Where each function tells another one, it says nothing about who is whose twin.
        if all(len(group) == 1 for group in by_switch.values()):
            by_switch = {}
            for port in self.ports:
                by_switch.setdefault(("", port.port), []).append(port)
        return list(by_switch.values())

    def of(self, port: Port) -> list[Address]:
        """The addresses on a port or above it."""
        return [address for address in self.addresses if port in address.ports]

    def gid(self, hca: str, address: str, netdev: str = "") -> Gid | None:
        """The RoCE v2 GID of `hca` that carries `address` itself; the one of `netdev` first where there are several."""
        known = (self.hcas or {}).get(hca)
        matches = [gid for gid in (known.gids if known else None) or [] if gid.version == "v2" and gid.ipv4 == address]
        return min(matches, key=lambda gid: (gid.netdev not in ("", netdev), gid.port, gid.index), default=None)


def read(path: Path) -> str | None:
    """The text of a sysfs file, or None: sysfs answers EINVAL for the carrier and speed of a port that is down."""
    try:
        # In a bundle a pipe may stand here: opening it would wait for its writer, for ever.
        with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return (file.read(4096) or b"").decode(errors="replace").strip("\0 \t\r\n")
    except (OSError, ValueError):
        return None


def number(text: str | None) -> int | None:
    """The integer in text; None when there is none or it is negative (sysfs writes -1 for unknown)."""
    try:
        value = int(text or "", 0)
    except ValueError:
        return None
    return value if value >= 0 else None


def is_folder(path: Path) -> bool:
    """Whether there is a folder that can be read: one that cannot tells nothing, and not that it is empty."""
    try:
        os.scandir(path).close()
        os.stat(os.path.join(path, "."))
    except (OSError, ValueError):
        return False
    return True


def names_in(folder: Path | None) -> list[str]:
    """The names in a folder, sorted, without hidden ones; [] when there is no such folder."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(".")) if folder else []
    except OSError:
        return []


# ---- what programs print ---------------------------------------------------------------------------------------------


def parse_addresses(text: str) -> list[dict]:
    """The interfaces in what `ip -j addr` printed; raises ValueError when it is no list of interfaces."""
    document = json.loads(text)
    if not isinstance(document, list) or not all(isinstance(entry, dict) for entry in document):
        raise ValueError("not a list of interfaces")
    # Old iproute2 prints {} for interfaces that a filter left out.
    entries = [entry for entry in document if isinstance(entry.get("ifname"), str)]
    if document and not entries and any(document):
        raise ValueError("no entry names an interface")
    return entries


def infos(entry: dict) -> list[dict]:
    """The addresses of one interface, those that are objects."""
    found = entry.get("addr_info")
    return [info for info in found if isinstance(info, dict)] if isinstance(found, list) else []


def ipv4(entry: dict) -> list[ipaddress.IPv4Interface]:
    """The global IPv4 addresses of one interface; what is none is left out."""
    found = []
    for info in infos(entry):
        if info.get("family") == "inet" and info.get("scope", "global") == "global":
            try:
                found.append(ipaddress.IPv4Interface(f"{info.get('local')}/{info.get('prefixlen', 32)}"))
            except ValueError:
                continue
    return found


def flags(entry: dict) -> list[str]:
    """The flags of one interface."""
    found = entry.get("flags")
    return found if isinstance(found, list) else []


def link_of(entry: dict) -> bool | None:
    """Whether an interface has a carrier; None while it is administratively down, when it cannot tell."""
    if not flags(entry):
        return {"UP": True, "LOWERLAYERDOWN": False}.get(str(entry.get("operstate")))
    return True if "LOWER_UP" in flags(entry) else False if "UP" in flags(entry) else None


def parse_ibdev2netdev(text: str) -> list[tuple[str, str, bool]]:
    """(device, interface, up) for each line of ibdev2netdev, in any order."""
    matches = (IBDEV2NETDEV.match(line.strip()) for line in text.splitlines())
    return [(match[1], match[3], match[4] == "Up") for match in matches if match]


def parse_rdma_link(text: str) -> list[tuple[str, str, bool]]:
    """(device, interface or "", up) for each line of `rdma link`."""
    matches = (RDMA_LINK.match(line.strip()) for line in text.splitlines())
    return [(match[1], match[4] or "", match[3] == "ACTIVE") for match in matches if match]


def parse_gid(text: str) -> ipaddress.IPv6Address | None:
    """The address in a GID, or None for an unused entry."""
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return None
    return address if int(address) else None


def parse_show_gids(text: str) -> tuple[list[tuple[str, Gid]], bool]:
    """((device, GID) for each line of show_gids, whether its last line says that these are all)."""
    found = []
    for line in text.splitlines():
        match = SHOW_GIDS.match(line.strip())
        address = parse_gid(match[4]) if match else None
        if match and address:
            found.append((match[1], Gid(int(match[2]), int(match[3]), address, match[5], match[6] or "")))
    counted = re.search(r"^n_gids_found=(\d{1,5})\s*$", text, re.MULTILINE)
    return found, bool(counted) and int(counted[1]) == len(found)


# ---- RDMA devices ----------------------------------------------------------------------------------------------------


def gids_of(port: Path) -> Iterator[Gid]:
    """The used entries of the GID table of one port of a device (`…/ports/1`)."""
    for name in names_in(port / "gids"):
        address = parse_gid(read(port / "gids" / name) or "") if name.isdecimal() else None
        if address:
            version = "v2" if (read(port / "gid_attrs/types" / name) or "") == "RoCE v2" else "v1"
            netdev = read(port / "gid_attrs/ndevs" / name) or ""
            yield Gid(number(port.name) or 1, int(name), address, version, netdev)


def table_of(device: Path) -> list[Gid] | None:
    """The GID table of an RDMA device, all ports; None when the folder holds none."""
    ports = [device / "ports" / name for name in names_in(device / "ports")]
    if not any(is_folder(port / "gids") for port in ports):
        return None
    return sorted((gid for port in ports for gid in gids_of(port)), key=lambda gid: (gid.port, gid.index))


def identity(device: Path) -> bool | None:
    """Whether a PCI device is a physical function of a ConnectX-7; None when the folder does not tell."""
    vendor, model = read(device / "vendor"), read(device / "device")
    driver = driver_of(device)
    if (vendor and vendor != MELLANOX) or (model and model != CX7) or driver not in ("", "mlx5_core"):
        return False
    if os.path.exists(device / "physfn"):
        return False
    return True if (vendor and model) or driver else None


def driver_of(device: Path) -> str:
    """The driver of a PCI device: where its link points, or what a copy of its uevent says."""
    link = device / "driver"
    if os.path.islink(link):
        return link.readlink().name
    match = re.search(r"^DRIVER=(\S+)$", read(device / "uevent") or "", re.MULTILINE)
    return match[1] if match else ""


def sysfs_hcas(sysfs: Path) -> dict[str, Hca] | None:
    """The RDMA devices in a folder of sysfs; None when it tells nothing of RDMA."""
    root = sysfs / "class/infiniband"
    if not is_folder(root):
        return None
    found = {}
    for name in names_in(root):
        device = root / name
        states = [read(device / "ports" / port / "state") for port in names_in(device / "ports")]
        told = [state for state in states if state and PORT_STATE.search(state)]
        known = identity(device / "device")
        kind = read(device / "hca_type") or ""
        gids = table_of(device)
        # A copy may have lost the empty folder that names the interface; the GIDs name it too, or a VLAN on it.
        netdevs = [gid.netdev for gid in gids or [] if gid.netdev and "." not in gid.netdev]
        found[name] = Hca(
            name,
            next(iter([*names_in(device / "device/net"), *netdevs]), ""),
            any("ACTIVE" in state for state in told) if told else None,
            gids,
            foreign=known is False or (kind.startswith("MT") and kind not in ("MT4129", "MT2910")),
            certain=known is True,
        )
    return found


def worse(one: bool | None, other: bool | None) -> bool | None:
    """Of two words about a link, the one that counts."""
    return False if False in (one, other) else one if other is None else other


def all_hcas(sources: Sources) -> dict[str, Hca] | None:
    """Every RDMA device in hardware that any source tells of, foreign ones too; None when no source is there."""
    if not sources.rdma:
        return None
    found = sysfs_hcas(sources.sysfs) if sources.sysfs else None
    listings = [
        parser(text)
        for parser, text in ((parse_ibdev2netdev, sources.ibdev2netdev), (parse_rdma_link, sources.rdma_link))
        if text is not None
    ]
    active = {name for name, hca in (found or {}).items() if hca.active}
    for listing in listings:
        found = {} if found is None else found
        up_there = {name for name, _, up in listing if up}
        # It names other ports of the same devices: the cable was in the other socket then, and sysfs is the kernel's.
        stale = bool(active and up_there) and up_there <= found.keys() and not up_there & active
        for name, netdev, up in listing:
            hca = found.setdefault(name, Hca(name))
            hca.netdev = hca.netdev or netdev
            hca.active = hca.active if stale else worse(hca.active, up)
    if sources.show_gids is not None:
        found = {} if found is None else found
        add_shown_gids(found, sources.show_gids)
    return None if found is None else {name: hca for name, hca in found.items() if not SOFT_HCA.match(name)}


def add_shown_gids(found: dict[str, Hca], text: str) -> None:
    """Add what show_gids printed to devices whose table no other source showed."""
    rows, complete = parse_show_gids(text)
    unread = {name for name, hca in found.items() if hca.gids is None}
    for name, gid in rows:
        if name not in found:
            # Only a port that is up has GIDs.
            found[name] = Hca(name, gid.netdev, True)
            unread.add(name)
        if name in unread:
            hca = found[name]
            hca.whole = complete
            hca.gids = [*(hca.gids or []), gid]
            hca.netdev = hca.netdev or gid.netdev
    if complete:
        for name in unread:
            found[name].gids = sorted(found[name].gids or [], key=lambda gid: (gid.port, gid.index))


# ---- ports -----------------------------------------------------------------------------------------------------------


def is_port(name: str, device: Path | None, hca: Hca | None, aliases: list[str], guess: bool) -> bool:
    """Whether an interface is a ConnectX-7 port: by its hardware where it tells, else by the name DGX OS gives it.

    With `guess` the kernel's own name of any mlx5 device is enough.
    """
    known = identity(device) if device else None
    if known is not None:
        return known
    if hca and (hca.foreign or hca.certain):
        return not hca.foreign
    if any(SPARK_NETDEV.match(alias) for alias in (name, *aliases)):
        return True
    if PLACED.match(name) or not hca or hca.name.startswith("mlx5_bond"):
        return False
    return bool(SPARK_HCA.match(hca.name) or (guess and re.match(r"^mlx5_\d+$", hca.name)))


def numbers_of(name: str, net: Path | None, hca: str, pci: str) -> tuple[int | None, int]:
    """(QSFP socket, PCI domain) of a port: what the hardware says first, then what names say."""
    told = re.match(r"^p(\d+)$", (read(net / "phys_port_name") if net else None) or "")
    by_name, by_hca = SPARK_NETDEV.match(name), SPARK_HCA.match(hca)
    place = re.match(r"^([0-9a-f]{4,}):[0-9a-f]{2}:[0-9a-f]{2}\.(\d)$", pci)
    socket = told[1] if told else None
    if socket is None and by_name:
        socket = by_name["port"] or by_name["function"]
    if socket is None and (by_hca or place):
        socket = by_hca["function"] if by_hca else place[2]
    if place:
        return number(socket), int(place[1], 16)
    return number(socket), int((by_name and by_name["domain"]) or (by_hca and by_hca["domain"]) or 0)


def pci_of(device: Path) -> str:
    """The PCI address of a device: the name that its link resolves to, or what a copy of its uevent says."""
    if os.path.islink(device):
        name = device.resolve().name
        if re.match(r"^[0-9a-f]{4,}:", name):
            return name
    match = re.search(r"^PCI_SLOT_NAME=(\S+)$", read(device / "uevent") or "", re.MULTILINE)
    return match[1] if match else ""


def sysfs_link(net: Path) -> bool | None:
    """The carrier of an interface in sysfs."""
    told = read(net / "carrier")
    if told in ("0", "1"):
        return told == "1"
    return {"up": True, "lowerlayerdown": False}.get(read(net / "operstate") or "")


def port_of(name: str, net: Path | None, hca: Hca | None, entry: dict | None, guess: bool) -> Port | None:
    """The port that an interface is, or None when it is none."""
    aliases = (entry or {}).get("altnames")
    aliases = [alias for alias in aliases if isinstance(alias, str)] if isinstance(aliases, list) else []
    device = net / "device" if net else None
    if not is_port(name, device, hca, aliases, guess):
        return None
    named = next((alias for alias in (name, *aliases) if SPARK_NETDEV.match(alias)), name)
    pci = pci_of(device) if device else ""
    socket, domain = numbers_of(named, net, hca.name if hca else "", pci)
    port = Port(name, hca.name if hca else "", socket, domain, pci, driver_of(device) if device else "")
    port.active = hca.active if hca else None
    if net:
        port.switch = read(net / "phys_switch_id") or ""
        port.link = sysfs_link(net)
        port.speed = number(read(net / "speed"))
        port.width = number(read(device / "current_link_width"))
        port.mtu = number(read(net / "mtu"))
        port.mac = read(net / "address") or ""
    if entry:
        port.link = worse(port.link, link_of(entry))
        port.mtu = entry["mtu"] if isinstance(entry.get("mtu"), int) else port.mtu
        port.mac = port.mac or str(entry.get("address") or "")
    return port


def namesake(hca: str, netdevs: list[str]) -> str:
    """The interface that has the same place in its name as an RDMA device, or ""."""
    place = SPARK_HCA.match(hca)
    for netdev in netdevs:
        other = SPARK_NETDEV.match(netdev)
        if place and other and (place["domain"], place["function"]) == (other["domain"], other["function"]):
            return netdev
    return ""


def ports_of(sysfs: Path | None, entries: list[dict] | None, hcas: dict[str, Hca] | None) -> list[Port]:
    """All ports, ordered by QSFP socket and PCI domain."""
    nets = sysfs / "class/net" if sysfs else None
    by_name = {entry["ifname"]: entry for entry in entries or []}
    for hca in (hcas or {}).values():
        hca.netdev = hca.netdev or namesake(hca.name, [*by_name, *names_in(nets)])
    # Of two devices that claim one interface the last counts: the one that is not known to be another card's.
    by_netdev = {
        hca.netdev: hca for hca in sorted((hcas or {}).values(), key=lambda hca: not hca.foreign) if hca.netdev
    }
    found: list[Port] = []
    # Only where no port can be told by hardware or name may a nameless one be ours; beside those it is another card's.
    for guess in (False, True):
        for name in () if found else sorted({*names_in(nets), *by_name, *by_netdev}):
            net = nets / name if nets and os.path.isdir(nets / name) else None
            port = port_of(name, net, by_netdev.get(name), by_name.get(name), guess)
            if port:
                found.append(port)
    return sorted(found, key=lambda port: (port.port is None, port.port or 0, port.domain, port.netdev))


# ---- addresses -------------------------------------------------------------------------------------------------------


def below(name: str, entries: dict[str, dict], ports: dict[str, Port], depth: int = 4) -> list[Port]:
    """The ports that carry an interface: itself, what a VLAN sits on, or what a bond or bridge holds."""
    if name in ports:
        return [ports[name]]
    if not depth or name not in entries:
        return []
    under = {str(entries[name].get("link") or ""), name.rpartition(".")[0]}
    under |= {other for other, entry in entries.items() if entry.get("master") == name}
    found = [port for other in sorted(under - {"", name}) for port in below(other, entries, ports, depth - 1)]
    return [port for index, port in enumerate(found) if port not in found[:index]]


def discover(sources: Sources) -> Node:
    """Everything the sources tell about the ConnectX-7 of one node."""
    hcas = all_hcas(sources)
    ports = ports_of(sources.sysfs, sources.addresses, hcas)
    by_netdev = {port.netdev: port for port in ports}
    if hcas is not None:
        ours = {port.hca for port in ports}
        bonds = {name: hca for name, hca in hcas.items() if name.startswith("mlx5_bond") and not hca.foreign}
        nameless = any(not hca.foreign and not hca.netdev for hca in hcas.values())
        hcas = {name: hca for name, hca in hcas.items() if name in ours} | bonds
        # Devices are there, and which interfaces are theirs was lost: that says nothing, and not that there are none.
        hcas = None if nameless and not hcas else hcas
    node = Node(ports, hcas, sources.addresses)
    entries = {entry["ifname"]: entry for entry in sources.addresses or []}
    for name, entry in entries.items():
        under = below(name, entries, by_netdev)
        mtu = entry["mtu"] if isinstance(entry.get("mtu"), int) else 0
        held = ipv4(entry)
        if under:
            node.addresses += [Address(name, found, mtu, link_of(entry) is True, under) for found in held]
        elif held and name != "lo":
            node.others[name] = [str(found) for found in held]
    order = {port.netdev: index for index, port in enumerate(ports)}
    node.addresses.sort(key=lambda address: order[address.ports[0].netdev])
    return node


def gid_for(node: Node, address: Address) -> Gid | None:
    """The RoCE v2 GID that carries an address on the device that it goes through."""
    hca = hca_for(node, address)
    return node.gid(hca, address.text, address.netdev) if hca else None


def hca_for(node: Node, address: Address) -> str:
    """The RDMA device that an address goes through: its interface's own, else the port's below it; "" for none."""
    own = [name for name, hca in (node.hcas or {}).items() if hca.netdev == address.netdev]
    under = [port.hca for port in address.ports if port.hca]
    candidates = [*own, *under]
    carrying = [name for name in candidates if node.gid(name, address.text, address.netdev)]
    return next(iter([*carrying, *candidates]), "")
