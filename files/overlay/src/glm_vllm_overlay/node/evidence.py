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
import os
import stat
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from glm_vllm_overlay.node import discovery

FILES = (
    *("ip-addr.json", "ip-route.json", "ip-neigh.json", "ibdev2netdev.txt", "show_gids.txt", "rdma-link.txt"),
    *("nvidia-smi.csv", "nvidia-smi-table.txt", "meminfo", "hosts", "dgx-release", "limits"),
    *("ib_write_bw.txt", "nccl.log", "nccl-tests.txt", "engine.log", "journal.txt"),
)
FOLDERS = ("netplan", "sys/class/infiniband", "sys/class/net")
# Enough for a needle in every line of any log that a person collects; a bound all the same.
MOST_HITS = 1_000_000
# Bytes before and after a needle that are its line: no line that means something is longer.
LONGEST_LINE = 1000


class Evidence:
    """One node's evidence in `folder`. `name` is the node's, "" where none is known.

    `unusable` collects sentences about files that are there and cannot be read as what they should be.
    """

    # Whether RDMA is wanted here, and whether the engine is known to run.
    rdma = True
    busy = False

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.name = folder, name
        self.unusable: list[str] = []
        self._read: dict[str, bytes | None] = {}

    def fetch(self, name: str) -> bytes | None:
        """The bytes of a file of the bundle; None when there is no such file."""
        path = self.folder / name
        try:
            # Opening a pipe would wait for its writer, for ever.
            if stat.S_ISREG(path.stat().st_mode):
                return path.read_bytes()
            self.unusable.append(f"{name} is no file")
        except FileNotFoundError:
            return None
        except OSError as error:
            self.unusable.append(f"{name} cannot be read ({error.strerror})")
        return None

    def data(self, name: str) -> bytes | None:
        """The bytes of a file, fetched once; None when there is no such file."""
        if name not in self._read:
            self._read[name] = self.fetch(name)
        return self._read[name]

    def text(self, name: str) -> str | None:
        """The text of a file, whatever bytes it holds; None when there is no such file."""
        data = self.data(name)
        return None if data is None else data.decode("utf-8-sig", errors="replace")

    def lines(self, name: str, needle: str) -> Iterator[str]:
        """The lines of a file that hold `needle`, in order; fast in files of any size."""
        data, wanted, end = self.data(name) or b"", needle.encode(), -1
        for _ in range(MOST_HITS):
            start = data.find(wanted, end + 1)
            if start < 0:
                return
            end = data.find(b"\n", start, start + LONGEST_LINE)
            end = min(len(data), start + LONGEST_LINE) if end < 0 else end
            begin = max(0, start - LONGEST_LINE)
            begin = max(begin, data.rfind(b"\n", begin, start) + 1)
            yield data[begin:end].decode(errors="replace").strip()

    def last_line(self, name: str) -> str:
        """The last line of a file that is not blank; "" when there is none."""
        data = (self.data(name) or b"").rstrip()
        # A progress bar returns the carriage and stays on its line.
        return data[max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 :].decode(errors="replace").strip()

    def listing(self, name: str) -> list[dict] | None:
        """The objects in what an `ip -j` command printed; None when there is none."""
        text = self.text(name)
        if text is None:
            return None
        try:
            document = json.loads(text)
            if not isinstance(document, list):
                raise ValueError("not a list")
        except (ValueError, RecursionError):
            self.unusable.append(f"{name} is not what `ip -j` prints")
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
            self.unusable.append("ip-addr.json is not what `ip -j addr` prints")
            return None

    @cached_property
    def routes(self) -> list[dict]:
        """The routes of `ip -j route`."""
        return self.listing("ip-route.json") or []

    @cached_property
    def neighbours(self) -> list[dict]:
        """The neighbours of `ip -j neigh`."""
        return self.listing("ip-neigh.json") or []

    @property
    def sysfs(self) -> Path | None:
        """The folder that holds `class/`; None when there is none."""
        folder = self.folder / "sys"
        return folder if discovery.is_folder(folder / "class") else None

    def netplan(self) -> dict[str, str]:
        """The text of each netplan file by its name."""
        names = [name for name in discovery.names_in(self.folder / "netplan") if name.endswith(".yaml")]
        texts = {name: self.text(f"netplan/{name}") for name in names}
        return {name: text for name, text in texts.items() if text is not None}

    @cached_property
    def node(self) -> discovery.Node:
        """The ConnectX-7 of this node."""
        return discovery.discover(
            discovery.Sources(
                rdma=self.rdma,
                sysfs=self.sysfs,
                addresses=self.addresses,
                ibdev2netdev=self.text("ibdev2netdev.txt"),
                show_gids=self.text("show_gids.txt"),
                rdma_link=self.text("rdma-link.txt"),
            )
        )


def is_bundle(folder: Path) -> bool:
    """Whether a folder holds any file or folder of a bundle."""
    files = any(os.path.isfile(folder / name) for name in FILES)
    return files or any(os.path.isdir(folder / name) for name in FOLDERS)
