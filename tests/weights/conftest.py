"""A bed without an engine: two nodes, a cable, and a web server on the controller with a model of some size."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import bed
import pytest

REVISION = "8" * 40
PORT = 8099
SHARDS, SIZE = 5, 96 << 20


class Site:
    """The model, where it is served, and what the nodes have of it. Sizes in bytes."""

    def __init__(self, top: Path) -> None:
        self.source, self.log = top / "model", top / "access.log"
        self.folder = Path("/var/lib/glm-vllm/models/model") / REVISION
        self.url = f"http://{bed.NET}.1:{PORT}/"
        self.source.mkdir(parents=True)
        files = {f"model-{n + 1:05d}-of-{SHARDS:05d}.safetensors": os.urandom(SIZE + n) for n in range(SHARDS)}
        files["config.json"] = b'{"model_type": "random"}'
        self.files = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        for name, data in files.items():
            (self.source / name).write_bytes(data)
        entries = {name: {"size": len(data), "sha256": self.files[name]} for name, data in files.items()}
        manifest = {"schema": 1, "name": "model", "revision": REVISION, "files": entries}
        (self.source / "manifest.json").write_text(json.dumps(manifest))
        self.bytes = sum(len(data) for data in files.values())

    def on_disk(self, node: str) -> Path:
        """The model's folder on a node's disk, read from outside: with the node on or off."""
        return bed.STATE / "run" / node / "up" / str(self.folder).lstrip("/")

    def wipe(self) -> None:
        """Take the model away from both nodes, which are on."""
        for node in (bed.HEAD, bed.WORKER):
            bed.on(node, "rm", "-rf", str(self.folder.parent))
        self.log.write_text("")

    def placed(self, node: str) -> dict[str, int]:
        """Inodes of the files that have their name."""
        return {
            name: (self.on_disk(node) / name).stat().st_ino
            for name in self.files
            if (self.on_disk(node) / name).exists()
        }

    def arriving(self, node: str) -> int:
        """Bytes in the folder of what is still arriving."""
        found = self.on_disk(node) / ".partial"
        return sum(path.stat().st_size for path in found.glob("*") if path.is_file()) if found.is_dir() else 0

    def wrong(self, node: str) -> list[str]:
        """Files with a name whose bytes are not the source's: there must never be one."""
        return [name for name in self.placed(node) if digest(self.on_disk(node) / name) != self.files[name]]

    def verified(self, node: str) -> bool:
        return (self.on_disk(node) / ".verified.json").exists()

    def whole(self, node: str) -> bool:
        return len(self.placed(node)) == len(self.files) and not self.wrong(node) and self.verified(node)

    def served(self) -> int:
        """Bytes that the web server has sent since the last wipe."""
        return sum(int(line) for line in self.log.read_text().split())

    def start(self, **more: object) -> subprocess.Popen[str]:
        """Start playbooks/weights.yml."""
        source = {"url": self.url, "revision": REVISION, "licence": "none", "name": "model"}
        variables = {"model_fetch_sources": [source], "glm_vllm_overlay_speculator": "mtp"} | more
        inventories = [f"--inventory={path}" for path in bed.inventory()]
        return subprocess.Popen(
            ["ansible-playbook", *inventories, "playbooks/weights.yml", "--extra-vars", json.dumps(variables)],
            cwd=bed.ROOT,
            env=os.environ | {"ANSIBLE_NOCOLOR": "1", "ANSIBLE_TIMEOUT": "5"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, **more: object) -> str:
        """Run it to its end, which has to be a good one; returns what it printed."""
        process = self.start(**more)
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0, out[-3000:]
        return out


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def nginx(site: Site, top: Path) -> str:
    """A configuration of nginx: the model at a rate that leaves time to cut, a line of bytes sent a request."""
    folders = "".join(
        f"{kind}_temp_path {top}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return (
        f"daemon off; error_log {top}/error.log; pid {top}/pid; user root; events {{}} http {{ {folders} sendfile on; "
        f"log_format sent '$body_bytes_sent'; access_log {site.log} sent; server {{ listen {bed.NET}.1:{PORT}; "
        f"root {site.source}; limit_rate 40m; }} }}"
    )


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    top = tmp_path_factory.mktemp("weights")
    site = Site(top)
    bed.twin("up")
    cable = [f"--inventory={path}" for path in bed.inventory()]
    subprocess.run(["ansible-playbook", *cable, "playbooks/network.yml"], cwd=bed.ROOT, check=True, timeout=600)
    (top / "nginx.conf").write_text(nginx(site, top))
    server = subprocess.Popen(
        ["ip", "netns", "exec", f"{bed.PREFIX}-ctl", shutil.which("nginx") or "nginx", "-c", str(top / "nginx.conf")]
    )
    time.sleep(1)
    assert server.poll() is None, (top / "error.log").read_text()
    yield site
    server.terminate()
    server.wait()
    bed.twin("clean")
