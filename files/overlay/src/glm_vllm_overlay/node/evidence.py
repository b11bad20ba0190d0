"""What a node printed, by the names of a bundle: read from a folder, or asked of this machine.

A bundle is a folder; every file in it may be missing:

    sys/class/infiniband/  sys/class/net/   copies
    ip-addr.json  ip-route.json  ip-neigh.json   ip -j …
    ibdev2netdev.txt  show_gids.txt  rdma-link.txt
    nvidia-smi.csv (name,memory.total,driver_version)  nvidia-smi-table.txt
    meminfo  hosts  dgx-release  netplan/  limits (/proc/<pid>/limits)
    ib_write_bw.txt  nccl.log  nccl-tests.txt  engine.log  journal.txt
"""

from __future__ import annotations

import json
import stat
from functools import cached_property
from pathlib import Path

from glm_vllm_overlay.node import discovery

FILES = (
    *("ip-addr.json", "ip-route.json", "ip-neigh.json", "ibdev2netdev.txt", "show_gids.txt", "rdma-link.txt"),
    *("nvidia-smi.csv", "nvidia-smi-table.txt", "meminfo", "hosts", "dgx-release", "limits"),
    *("ib_write_bw.txt", "nccl.log", "nccl-tests.txt", "engine.log", "journal.txt"),
)
FOLDERS = ("netplan", "sys/class/infiniband", "sys/class/net")


class Evidence:
    """One node's evidence in `folder`. `name` is the node's, "" where none is known."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.name = folder, name
        self.unusable: list[str] = []

    def data(self, name: str) -> bytes | None:
        """The bytes of a file; None when there is no such file."""
        path = self.folder / name
        try:
            # Opening a pipe would wait for its writer, for ever.
            if not stat.S_ISREG(path.stat().st_mode):
                return None
            return path.read_bytes()
        except OSError:
            return None

    def text(self, name: str) -> str | None:
        """The text of a file, whatever bytes it holds; None when there is no such file."""
        data = self.data(name)
        return None if data is None else data.decode("utf-8-sig", errors="replace")

    def listing(self, name: str) -> list[dict] | None:
        """The objects in what an `ip -j` command printed; None when there is none, and noted when it is damaged."""
        text = self.text(name)
        if text is None:
            return None
        try:
            document = json.loads(text)
            if not isinstance(document, list):
                raise ValueError("not a list")
        except (ValueError, RecursionError):
            self.unusable.append(f"{name} is not what ip -j prints")
            return None
        return [entry for entry in document if isinstance(entry, dict)]

    @cached_property
    def addresses(self) -> list[dict] | None:
        """The interfaces of `ip -j addr`; None when they are not known."""
        text = self.text("ip-addr.json")
        if text is None:
            return None
        try:
            return discovery.parse_addresses(text)
        except (ValueError, RecursionError):
            self.unusable.append("ip-addr.json is not what ip -j addr prints")
            return None

    @property
    def sysfs(self) -> Path | None:
        """The folder that holds `class/`; None when there is none."""
        folder = self.folder / "sys"
        return folder if (folder / "class").is_dir() else None

    @cached_property
    def node(self) -> discovery.Node:
        """The ConnectX-7 of this node."""
        return discovery.discover(
            discovery.Sources(
                sysfs=self.sysfs,
                addresses=self.addresses,
                ibdev2netdev=self.text("ibdev2netdev.txt"),
                show_gids=self.text("show_gids.txt"),
                rdma_link=self.text("rdma-link.txt"),
            )
        )
