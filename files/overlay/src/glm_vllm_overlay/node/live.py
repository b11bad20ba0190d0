"""This machine's evidence, by the names of a bundle, and its copy into a folder."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

from glm_vllm_overlay.node import discovery, units
from glm_vllm_overlay.node.errors import Refusal, Unusable
from glm_vllm_overlay.node.evidence import FILES, Evidence
from glm_vllm_overlay.node.files import read_env, read_json_if_there
from glm_vllm_overlay.node.paths import Paths
from glm_vllm_overlay.node.redact import redact

ENGINES = ("glm-vllm-head", "glm-vllm-worker")
# What else says something about a fault; the engine's own words are engine.log.
BESIDE = ("glm-vllm-guard", "glm-vllm-watch", "ray-head", "ray-worker", "nginx", "docker", "earlyoom", "NetworkManager")
JOURNAL = ("journalctl", "--quiet", "--no-pager", "--lines", "20000")
COMMANDS = {
    "ip-addr.json": ("ip", "-j", "addr"),
    "ip-route.json": ("ip", "-j", "route"),
    "ip-neigh.json": ("ip", "-j", "neigh"),
    "rdma-link.txt": ("rdma", "link"),
    "nvidia-smi.csv": ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
    "nvidia-smi-table.txt": ("nvidia-smi",),
    "journal.txt": (
        *(*JOURNAL, "--boot", "--output", "short-iso", "_TRANSPORT=kernel"),
        *(word for unit in BESIDE for word in ("+", f"_SYSTEMD_UNIT={unit}.service")),
    ),
}
# Vendors' scripts that take a second and more, and say nothing that sysfs does not.
SLOW = {"ibdev2netdev.txt": ("ibdev2netdev",), "show_gids.txt": ("show_gids",)}
# Their complaints go to stdout in one version and to stderr in another.
WITH_STDERR = ("nvidia-smi.csv", "nvidia-smi-table.txt")
NET = (
    *("address", "carrier", "mtu", "operstate", "phys_port_name", "phys_switch_id", "speed"),
    *("device/vendor", "device/device", "device/uevent", "device/current_link_width", "device/current_link_speed"),
)
HCA = ("hca_type", "fw_ver", "board_id", "device/vendor", "device/device", "device/uevent")


class Live(Evidence):
    """What this machine prints. `seconds` is the time that all its programs have together."""

    def __init__(self, paths: Paths, seconds: float = 0.7, slow: bool = False) -> None:
        super().__init__(paths.root, os.uname().nodename)
        self.paths = paths
        self.rdma = read_json_if_there(paths.fabric_json).get("rdma") != "none"
        unit = self.engine()
        self.busy = unit.get("ActiveState") == "active"
        self.pid = unit.get("MainPID", "0")
        commands = COMMANDS | (SLOW if slow else {})
        if not self.rdma:
            commands = {name: words for name, words in commands.items() if name not in ("rdma-link.txt", *SLOW)}
        if unit.get("InvocationID"):
            # This start alone: what an earlier one died of may be mended.
            match = f"_SYSTEMD_INVOCATION_ID={unit['InvocationID']}"
            commands |= {"engine.log": (*JOURNAL, "--output", "cat", match)}
        self._read = self.ask(commands, seconds)
        engine = self._read.get("engine.log")
        if engine is not None:
            lines = [line for line in engine.splitlines(keepends=True) if b"NCCL" in line]
            self._read["nccl.log"] = b"".join(lines) or None

    @staticmethod
    def engine() -> dict[str, str]:
        """What systemd says about this node's engine; {} when there is none."""
        try:
            shown = units.show(*ENGINES)
        except Unusable:
            return {}
        return next((unit for unit in shown.values() if unit.get("InvocationID")), {})

    def ask(self, commands: dict[str, tuple[str, ...]], seconds: float) -> dict[str, bytes | None]:
        """Run all commands at once; what one printed by its file's name, None for one that cannot be run or is late."""
        running = {}
        for name, words in commands.items():
            errors = subprocess.STDOUT if name in WITH_STDERR else subprocess.DEVNULL
            try:
                # A locale would change dates and units.
                environment = os.environ | {"LC_ALL": "C"}
                running[name] = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, env=environment)
            except OSError:
                continue
        printed: dict[str, bytes | None] = {}
        end = time.monotonic() + seconds
        for name, process in running.items():
            try:
                output, _ = process.communicate(timeout=max(0.01, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                self.unusable.append(f"`{' '.join(commands[name][:2])}` gave no answer in {seconds} s")
                continue
            # `rdma` without the kernel's part and the like: no answer, which is no empty answer.
            printed[name] = output if process.returncode == 0 or name in WITH_STDERR else None
        return printed

    def measured(self) -> bytes | None:
        """What playbooks/network.yml last measured of the rails, in ib_write_bw's own form; None when it did not."""
        newest = max(self.paths.measurements.glob("*.json"), default=None)
        record = read_json_if_there(newest) if newest else {}
        if record.get("tool") != "ib_write_bw":
            return None
        rails = [rail for rail in record.get("rails", []) if rail.get("gbps") is not None]
        tables = [
            f" Device         : {rail['netdev']}\n #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]\n"
            f" 65536      0              0.00               {rail['gbps']}\n"
            for rail in rails
        ]
        return "".join([f" measured {record.get('when')}\n", *tables]).encode() if tables else None

    def fetch(self, name: str) -> bytes | None:
        """The bytes that stand on this machine for a file of a bundle."""
        if name == "ib_write_bw.txt":
            return self.measured()
        etc = self.paths.root / "etc"
        path = {
            "meminfo": Path(read_env(self.paths.node_env).get("GLM_MEMINFO") or self.paths.proc / "meminfo"),
            "hosts": etc / "hosts",
            "dgx-release": etc / "dgx-release",
            "limits": self.paths.proc / self.pid / "limits" if self.pid != "0" else None,
        }.get(name)
        if name.startswith("netplan/"):
            path = etc / name
        try:
            return path.read_bytes() if path else None
        except OSError:
            return None

    @property
    def sysfs(self) -> Path | None:
        """This machine's sysfs."""
        return self.paths.sys

    def netplan(self) -> dict[str, str]:
        """The text of each file in /etc/netplan."""
        names = [name for name in discovery.names_in(self.paths.root / "etc/netplan") if name.endswith(".yaml")]
        return {name: text for name in names if (text := self.text(f"netplan/{name}")) is not None}


def copy_files(source: Path, target: Path, names: tuple[str, ...] | list[str]) -> None:
    """Copy small files of sysfs that can be read; of a uevent only driver and place, which are no serial numbers."""
    for name in names:
        text = discovery.read(source / name)
        if text is None:
            continue
        if name.endswith("uevent"):
            text = "\n".join(re.findall(r"^(?:DRIVER|PCI_SLOT_NAME|PCI_ID)=.*$", text, re.MULTILINE))
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text + "\n")


def copy_sysfs(sysfs: Path, target: Path, rdma: bool) -> None:
    """Copy what a bundle holds of sysfs; node GUIDs and the like stay behind."""
    nets, devices = sysfs / "class/net", sysfs / "class/infiniband"
    for name in discovery.names_in(nets):
        if (nets / name).is_dir() and name != "lo":
            (target / "class/net" / name).mkdir(parents=True, exist_ok=True)
            copy_files(nets / name, target / "class/net" / name, NET)
    if not rdma or not devices.is_dir():
        return
    (target / "class/infiniband").mkdir(parents=True, exist_ok=True)
    for name in discovery.names_in(devices):
        device, copy = devices / name, target / "class/infiniband" / name
        copy_files(device, copy, HCA)
        for netdev in discovery.names_in(device / "device/net"):
            (copy / "device/net" / netdev).mkdir(parents=True, exist_ok=True)
        for port in discovery.names_in(device / "ports"):
            copy_files(device / "ports" / port, copy / "ports" / port, ["state", "phys_state", "rate", "link_layer"])
            copy_gids(device / "ports" / port, copy / "ports" / port)


def copy_gids(port: Path, copy: Path) -> None:
    """Copy the used entries of a GID table."""
    if not (port / "gids").is_dir():
        return
    (copy / "gids").mkdir(parents=True, exist_ok=True)
    for gid in discovery.gids_of(port):
        copy_files(port, copy, [f"{part}/{gid.index}" for part in ("gids", "gid_attrs/types", "gid_attrs/ndevs")])


def save(evidence: Live, folder: Path) -> None:
    """Write a bundle into a new folder, without keys and serial numbers; raises Refusal when it cannot be written."""
    try:
        folder.mkdir(mode=0o700, parents=True)
        texts = {name: evidence.text(name) for name in FILES}
        texts |= {f"netplan/{name}": text for name, text in evidence.netplan().items()}
        for name, text in texts.items():
            if text is not None:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(redact(text), encoding="utf-8")
        if evidence.sysfs:
            copy_sysfs(evidence.sysfs, folder / "sys", evidence.rdma)
    except OSError as error:
        raise Refusal(f"{folder} cannot be written ({error.strerror}): name a folder that is not there yet") from None
