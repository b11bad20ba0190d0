"""The fabric: which network interface, RDMA device and GID carry each rail of fabric.json, resolved anew each time.

fabric.json names addresses only. Interface names, RDMA device names and GID indices change with the port that the
cable is in, with firmware and with the order in which addresses came up, so none of them is ever stored.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node.errors import Refusal, Unusable
from glm_vllm_overlay.node.files import read_json, read_line, write_atomically
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
    """One rail: `address` and `peer` from fabric.json, the rest as found now; `problem` is "" when it is usable."""

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
        return [entry for entry in json.loads(result.stdout) if entry.get("ifname")]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise Unusable(f"`ip -j addr` gave no answer ({error}): install iproute2") from None


def hca_of(netdev: str, infiniband: Path) -> str:
    """The RDMA device on top of `netdev`, or ""."""
    return next((device.parents[2].name for device in sorted(infiniband.glob(f"*/device/net/{netdev}"))), "")


def gid_index_of(hca: str, address: str, infiniband: Path) -> int | None:
    """The index of the GID of port 1 that is RoCE v2 and carries `address` itself, or None."""
    wanted = "0" * 20 + "ffff" + ipaddress.IPv4Address(address).packed.hex()
    port = infiniband / hca / "ports/1"
    for entry in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
        # Unused entries read as zeros and have no type; both are simply not ours.
        carried = read_line(entry).replace(":", "")
        if carried == wanted and read_line(port / "gid_attrs/types" / entry.name) == "RoCE v2":
            return int(entry.name)
    return None


def resolve_rail(rail: Rail, fabric: Fabric, found: list[dict], paths: Paths) -> None:
    """Fill in what this node has for `rail`, or its `problem`."""
    holders = [
        entry for entry in found if any(info.get("local") == rail.address for info in entry.get("addr_info", []))
    ]
    if not holders:
        rail.problem = (
            f"{rail.title}: no interface has this address; check the cable to {fabric.peer}, "
            "then run playbooks/network.yml"
        )
        return
    if len(holders) > 1:
        names = " and ".join(entry["ifname"] for entry in holders)
        rail.problem = f"{rail.title}: {names} both have this address; take it off one of them"
        return
    rail.netdev, rail.mtu = holders[0]["ifname"], int(holders[0].get("mtu", 0))
    rail.carrier = "LOWER_UP" in holders[0].get("flags", [])
    if not rail.carrier:
        rail.problem = f"{rail.title}: no carrier; check the cable to {fabric.peer} and that {fabric.peer} is on"
        return
    if fabric.rdma == "none":
        return
    rail.hca = hca_of(rail.netdev, paths.infiniband)
    if not rail.hca:
        rail.problem = f"{rail.title}: no RDMA device belongs to it; load mlx5_ib or set cx7_network_rdma: none"
        return
    rail.gid_index = gid_index_of(rail.hca, rail.address, paths.infiniband)
    if rail.gid_index is None:
        rail.problem = f"{rail.title}: {rail.hca} has no RoCE v2 GID for it; take {rail.netdev} down and up again"


def resolve(paths: Paths) -> Fabric:
    """fabric.json with every rail resolved, or given its problem."""
    fabric = load(paths)
    found = interfaces()
    for rail in fabric.rails:
        resolve_rail(rail, fabric, found, paths)
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


def run(args: argparse.Namespace) -> int:
    """`glm-vllm fabric`: show each rail, and write fabric.env when all are usable."""
    paths = node_paths.current()
    fabric = resolve(paths)
    problem = fabric.problem()
    values: dict[str, str] = {}
    if not problem:
        values = environment(fabric) if args.check else write(fabric, paths)
    if args.json:
        rails = [asdict(rail) | {"why": "" if rail.problem else why(rail, fabric.rdma)} for rail in fabric.rails]
        document = {"schema": 1, "ok": not problem, "rdma": fabric.rdma, "rails": rails, "environment": values}
        print(json.dumps(document | ({"message": problem} if problem else {})))
    else:
        for rail in fabric.rails:
            print(rail.problem or f"rail {rail.number}: {why(rail, fabric.rdma)}, MTU {rail.mtu}")
    return 1 if problem else 0
