"""The fabric: which network interface, RDMA device and GID carry each rail, resolved anew each time.

The rails are those of fabric.json, which names addresses only: interface names, RDMA device names and GID indices
change with the port that the cable is in, with firmware and with the order in which addresses came up, so none of them
is ever stored. In a bundle, where there is no fabric.json, the rails are the addresses on cabled ports.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from glm_vllm_overlay.node import discovery
from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node.errors import Refusal, Unusable
from glm_vllm_overlay.node.evidence import Evidence
from glm_vllm_overlay.node.files import read_json, write_atomically
from glm_vllm_overlay.node.paths import Paths

# Measured on the recipe's own pair. NCCL_NET=IB makes a fall-back to TCP an error, not a slow pair.
NCCL = {
    "NCCL_NET": "IB",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "0",
    "NCCL_IB_MERGE_NICS": "0",
    "NCCL_CROSS_NIC": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_IGNORE_CPU_AFFINITY": "1",
    "NCCL_DEBUG": "WARN",
}


@dataclass
class Rail:
    """One rail: `address` and `peer` as intended, the rest as found now; `problem` is "" when it is usable.

    `hca` is as NCCL_IB_HCA takes it: the device, and `:port` where that is not 1.
    """

    number: int
    address: str
    peer: str
    netdev: str = ""
    carrier: bool = False
    mtu: int = 0
    hca: str = ""
    gid_index: int | None = None
    problem: str = ""

    @property
    def title(self) -> str:
        """The rail as a sentence names it."""
        return f"rail {self.number} ({self.address}{f' on {self.netdev}' if self.netdev else ''})"


@dataclass
class Fabric:
    """All rails of this node. `rdma` is "auto" or "none"; `peer` is the other node's name."""

    rdma: str
    peer: str
    rails: list[Rail]

    def problem(self) -> str:
        """The first rail's problem as one sentence, or ""."""
        return next((rail.problem for rail in self.rails if rail.problem), "")


def load(paths: Paths) -> Fabric:
    """The intent in fabric.json, with nothing resolved; raises Unusable naming the entry that is wrong."""
    document = read_json(paths.fabric_json)
    try:
        rails = [
            Rail(number, str(ipaddress.IPv4Address(rail["address"])), str(ipaddress.IPv4Address(rail["peer"])))
            for number, rail in enumerate(document["rails"])
        ]
        fabric = Fabric(document["rdma"], document["peer"], rails)
    except (KeyError, TypeError, ValueError) as error:
        raise Unusable(f"{paths.fabric_json} has no usable rails ({error}): run playbooks/network.yml") from None
    if not rails or fabric.rdma not in ("auto", "none"):
        raise Unusable(f"{paths.fabric_json} names no rail or an unknown rdma mode: run playbooks/network.yml")
    return fabric


def interfaces() -> list[dict]:
    """This node's interfaces as `ip -j addr` prints them; raises Unusable when it cannot be asked."""
    try:
        result = subprocess.run(["ip", "-j", "addr"], capture_output=True, text=True, timeout=10, check=True)
        return discovery.parse_addresses(result.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise Unusable(f"`ip -j addr` gave no answer ({error}): install iproute2") from None


def discover(paths: Paths) -> discovery.Node:
    """The ConnectX-7 of this machine; raises Unusable when `ip` cannot be asked."""
    return discovery.discover(discovery.Sources(sysfs=paths.sys, addresses=interfaces()))


def resolve_rail(rail: Rail, fabric: Fabric, node: discovery.Node) -> None:
    """Fill in what this node has for `rail`, or its `problem`."""
    holders = [address for address in node.addresses if address.text == rail.address]
    foreign = [name for name, held in node.others.items() if rail.address in [text.split("/")[0] for text in held]]
    if len(holders) + len(foreign) > 1:
        names = " and ".join([address.netdev for address in holders] + foreign)
        rail.problem = f"{rail.title}: {names} both have this address; take it off one of them"
    elif foreign:
        rail.problem = f"{rail.title}: {foreign[0]} has this address and is no ConnectX-7 port; give it to the rail"
    elif not holders:
        rail.problem = (
            f"{rail.title}: no interface has this address; check the cable to {fabric.peer}, "
            "then run playbooks/network.yml"
        )
    else:
        resolve_holder(rail, fabric, node, holders[0])


def resolve_holder(rail: Rail, fabric: Fabric, node: discovery.Node, holder: discovery.Address) -> None:
    """Fill in `rail` from the one interface that has its address."""
    rail.netdev, rail.mtu, rail.carrier = holder.netdev, holder.mtu, holder.link
    if not rail.carrier:
        rail.problem = f"{rail.title}: no carrier; check the cable to {fabric.peer} and that {fabric.peer} is on"
        return
    if fabric.rdma == "none":
        return
    hca = discovery.hca_for(node, holder)
    if not hca:
        rail.problem = f"{rail.title}: no RDMA device belongs to it; load mlx5_ib or set cx7_network_rdma: none"
        return
    rail.hca = hca
    if (node.hcas or {})[hca].active is False:
        rail.problem = f"{rail.title}: the port of {hca} is not active; take {rail.netdev} down and up again"
        return
    gid = node.gid(hca, rail.address, rail.netdev)
    if gid is None:
        rail.problem = f"{rail.title}: {hca} has no RoCE v2 GID for it; take {rail.netdev} down and up again"
        return
    rail.hca, rail.gid_index = hca if gid.port == 1 else f"{hca}:{gid.port}", gid.index


def resolve(paths: Paths) -> Fabric:
    """fabric.json with every rail resolved, or given its problem."""
    fabric = load(paths)
    node = discover(paths)
    for rail in fabric.rails:
        resolve_rail(rail, fabric, node)
    return fabric


def one_a_port(node: discovery.Node, held: list[discovery.Address]) -> list[discovery.Address]:
    """One address for each port: of several the first that has a GID, as NCCL takes each device once."""
    by_port: dict[str, list[discovery.Address]] = {}
    for address in held:
        by_port.setdefault(address.ports[0].netdev, []).append(address)
    return [next((one for one in group if discovery.gid_for(node, one)), group[0]) for group in by_port.values()]


def resolve_bundle(folder: Path) -> Fabric:
    """The rails of a recorded node: every IPv4 address on a port that has, or should have, a cable.

    Raises Unusable when the bundle does not tell this node's own addresses.
    """
    evidence = Evidence(folder)
    if evidence.addresses is None:
        why = evidence.unusable[0] if evidence.unusable else f"{folder}/ip-addr.json is missing"
        raise Unusable(f"{why}: without this node's own addresses no GID can be chosen; save `ip -j addr` there")
    node = evidence.node
    # One cable leaves the other socket dark; an address that was left there is no rail, unless there is no other.
    lit = [address for address in node.addresses if address.link]
    holders = one_a_port(node, lit or node.addresses)
    rails = [Rail(number, address.text, "") for number, address in enumerate(holders)]
    fabric = Fabric("auto", "the other node", rails)
    for rail in rails:
        resolve_rail(rail, fabric, node)
    if not rails:
        ports = " or ".join(port.netdev for port in node.ports if port.up is not False)
        raise Refusal(
            f"no ConnectX-7 port of this node has an IPv4 address: give {ports} one"
            if ports
            else "this node has no ConnectX-7 port with a link: seat the cable on both nodes and reboot them"
        )
    return fabric


def environment(fabric: Fabric) -> dict[str, str]:
    """The variables of fabric.env for a fabric without a problem; no value is ever empty."""
    first = fabric.rails[0]
    values = {
        "VLLM_HOST_IP": first.address,
        "NCCL_SOCKET_IFNAME": first.netdev,
        "GLOO_SOCKET_IFNAME": first.netdev,
        "TP_SOCKET_IFNAME": first.netdev,
    }
    if fabric.rdma == "none":
        return values
    values |= NCCL | {"NCCL_IB_HCA": ",".join(rail.hca for rail in fabric.rails), "NCCL_IB_ROCE_VERSION_NUM": "2"}
    indices = {rail.gid_index for rail in fabric.rails}
    if len(indices) == 1:
        values["NCCL_IB_GID_INDEX"] = str(indices.pop())
    else:
        # One variable for all devices: with different indices NCCL must look for itself.
        values["NCCL_IB_ADDR_FAMILY"] = "AF_INET"
    return values


def write(fabric: Fabric, paths: Paths) -> dict[str, str]:
    """Write fabric.env and return what it holds; raises Refusal when a rail has a problem or the file is not ours."""
    if fabric.problem():
        raise Refusal(fabric.problem())
    values = environment(fabric)
    try:
        write_atomically(paths.fabric_env, "".join(f"{key}={value}\n" for key, value in values.items()))
    except OSError as error:
        raise Refusal(
            f"{paths.fabric_env} cannot be written ({error.strerror}): run as root, or with --check"
        ) from None
    return values


def why(rail: Rail, rdma: str) -> str:
    """What was chosen for a usable rail, and the reason."""
    if rdma == "none":
        return f"{rail.netdev} has {rail.address}; no RDMA wanted"
    return f"{rail.netdev} has {rail.address}; {rail.hca} GID {rail.gid_index} is RoCE v2 and carries it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `glm-vllm fabric`."""
    parser.add_argument("--check", action="store_true", help="resolve only, write nothing")
    parser.add_argument("--bundle", metavar="DIR", type=Path, help="a recorded node's folder; nothing is written")


def run(args: argparse.Namespace) -> int:
    """`glm-vllm fabric`: show each rail, and write fabric.env when all are usable."""
    paths = node_paths.current()
    if args.bundle and not os.path.isdir(args.bundle):
        raise Unusable(f"{args.bundle} is no folder: give the folder of one node's bundle")
    fabric = resolve_bundle(args.bundle) if args.bundle else resolve(paths)
    problem = fabric.problem()
    values: dict[str, str] = {}
    if not problem:
        values = environment(fabric) if args.check or args.bundle else write(fabric, paths)
    if args.json:
        rails = [asdict(rail) | {"why": "" if rail.problem else why(rail, fabric.rdma)} for rail in fabric.rails]
        document = {"schema": 1, "ok": not problem, "rdma": fabric.rdma, "rails": rails, "environment": values}
        print(json.dumps(document | ({"message": problem} if problem else {})))
    else:
        for rail in fabric.rails:
            print(rail.problem or f"rail {rail.number}: {why(rail, fabric.rdma)}, MTU {rail.mtu}")
    return 1 if problem else 0
