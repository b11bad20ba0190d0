"""Bundles made from the recorded outputs in tests/fixtures, and changed one step at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from glm_vllm_overlay.node import doctor

FIXTURES = Path(__file__).parents[2] / "fixtures"
# What every healthy bundle shows: the recorded nodes have swap, a GPU without a memory figure and two OTA blocks.
ALWAYS = {"F33 warn", "F69 info", "F72 info"}


class Bundle:
    """One node's bundle in `folder`; every step returns the bundle, so that steps can be chained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    def put(self, name: str, text: str | bytes) -> Bundle:
        """Write a file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return self

    def take(self, name: str, fixture: str) -> Bundle:
        """Write a file from a recorded output."""
        return self.put(name, (FIXTURES / fixture).read_bytes())

    def edit(self, name: str, change: Callable[[str], str]) -> Bundle:
        """Rewrite a file."""
        return self.put(name, change((self.folder / name).read_text()))

    def drop(self, *names: str) -> Bundle:
        """Remove files or folders."""
        for name in names:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return self

    def only(self, *names: str) -> Bundle:
        """Remove everything else."""
        for path in self.folder.iterdir():
            if path.name not in names:
                self.drop(path.name)
        return self

    def sysfs(self, fixture: str) -> Bundle:
        """Take the RDMA devices of a recorded tree."""
        target = self.folder / "sys/class/infiniband"
        shutil.rmtree(target, ignore_errors=True)
        # Entries 8 to 15 are unused in every recording.
        shutil.copytree(FIXTURES / fixture / "class/infiniband", target, ignore=shutil.ignore_patterns("[89]", "1?"))
        return self

    def ip(self, change: Callable[[dict[str, dict]], object]) -> Bundle:
        """Change the interfaces of ip-addr.json, given by name."""
        entries = json.loads((self.folder / "ip-addr.json").read_text())
        by_name = {entry["ifname"]: entry for entry in entries}
        change(by_name)
        return self.put("ip-addr.json", json.dumps(list(by_name.values())))

    def rename(self, old: str, new: str) -> Bundle:
        """Replace a name in all texts and paths."""
        for path in sorted(self.folder.rglob("*"), key=lambda path: -len(path.parts)):
            if path.is_file():
                path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))
            if old in path.name:
                path.rename(path.with_name(path.name.replace(old, new)))
        return self

    def found(self) -> set[str]:
        """What the doctor finds, beyond what every healthy bundle shows, as "F01 stop"."""
        return diagnosed(self.folder)


def diagnosed(folder: Path) -> set[str]:
    """What the doctor finds in a folder, beyond what every healthy bundle shows."""
    return {f"{one['id']} {one['severity']}" for one in doctor.diagnose(doctor.from_bundle(folder))} - ALWAYS


def healthy(folder: Path, other: bool = False) -> Bundle:
    """A node that is well: the first of the pair, or the `other`, whose GIDs are shifted to index 5."""
    bundle = Bundle(folder).sysfs("sysfs_gid_shift5" if other else "sysfs_healthy")
    bundle.take("ip-addr.json", f"ip_j_addr/healthy{'_node_b' if other else ''}.json")
    bundle.take("show_gids.txt", f"show_gids/{'gid_shift5' if other else 'healthy'}.txt")
    for name, fixture in {
        "ibdev2netdev.txt": "ibdev2netdev/port0_up_rocep_first.txt",
        "rdma-link.txt": "rdma_link/port0.txt",
        "ip-neigh.json": "ip_j_neigh/show_6.1.0.json",
        "ip-route.json": "ip_j_route/get_with_from_oif_6.1.0.json",
        "nvidia-smi.csv": "nvidia_smi/query_ok.csv",
        "nvidia-smi-table.txt": "nvidia_smi/table_row.txt",
        "meminfo": "meminfo/healthy.txt",
        "hosts": "hosts/good.txt",
        "dgx-release": "dgx_release/multi_ota.txt",
        "ib_write_bw.txt": "perftest/ib_write_bw_healthy_row.txt",
        "nccl.log": "nccl_log/roce_ok.txt",
        "netplan/40-cx7.yaml": "netplan/good/40-cx7.yaml",
    }.items():
        bundle.take(name, fixture)
    bundle.put("limits", "Max locked memory         unlimited            unlimited            bytes\n")
    bundle.put("engine.log", "INFO Application startup complete.\n")
    return bundle.put("journal.txt", "2026-01-01T00:00:00+00:00 spark-a kernel: Linux version 6.17.0-1032-nvidia\n")
