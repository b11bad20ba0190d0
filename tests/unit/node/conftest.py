"""A node in a folder: every path of the node program below a temporary root, systemd and `ip` as recorded programs,
the peer as a real HTTP server on another loopback address."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from glm_vllm_overlay import cli
from glm_vllm_overlay.node import watch
from glm_vllm_overlay.node.files import write_atomically

REPOSITORY = Path(__file__).parents[3]
FIXTURES = REPOSITORY / "tests/fixtures"
SOURCES = Path(__file__).parents[3] / "files/overlay/src"
SYSTEMCTL = """#!/bin/sh
# Prints what a real systemctl printed for each unit; an unknown unit is inactive.
first=1
for word; do
  case $word in *.service)
    [ $first ] || echo
    first=
    cat "$GLM_ROOT/units/$word" 2>/dev/null || printf 'Id=%s\\nActiveState=inactive\\nSubState=dead\\n' "$word";;
  esac
done
"""
IP = """#!/bin/sh
cat "$GLM_ROOT/ip-addr.json"
"""
# As systemd 252 printed it on a node that serves.
UNIT = {
    "TimeoutStopUSec": "2min 10s",
    "MainPID": "0",
    "StatusText": "serving",
    "Result": "success",
    "NRestarts": "0",
    "ExecMainCode": "0",
    "ExecMainStatus": "0",
    "Environment": "GLM_GPU_MEMORY_UTILIZATION=0.87 GLM_SPECULATOR=dflash2 ABLIT=0",
    "ActiveState": "active",
    "SubState": "running",
    "InvocationID": "own-start",
}


class NodeFolder:
    """One node below `root`. `address` is its own, `peer` the other's; both are loopback addresses."""

    def __init__(self, root: Path, name: str, role: str, address: str, peer: str, peer_name: str) -> None:
        self.root, self.name, self.role, self.address, self.peer = root, name, role, address, peer
        self.unit_name = f"glm-vllm-{role}"
        for folder in (
            "bin",
            "units",
            "etc/glm-vllm",
            "run/glm-vllm",
            "sys/class/net",
            "proc/sys/vm",
            "var/lib/glm-vllm/watch",
        ):
            (root / folder).mkdir(parents=True)
        for program, text in (("systemctl", SYSTEMCTL), ("ip", IP)):
            self.program(root / "bin" / program, text)
        helper = (REPOSITORY / "roles/cuda-sm121/files/drop-caches").read_text()
        self.program(root / "usr/local/sbin/glm-vllm-drop-caches", helper)
        shutil.copy(FIXTURES / "meminfo/healthy.txt", root / "proc/meminfo")
        (root / "proc/sys/vm/drop_caches").touch()
        self.kernels("r1")
        self.env(GLM_NODE=name, GLM_ROLE=role, GLM_NODE_RANK=int(role == "worker"), GLM_EXECUTOR="mp")
        self.fabric("none", [(address, peer)], peer_name)
        self.addresses(json.dumps([interface("enp1s0f0np0", address)]))
        self.deploy("max-num-seqs: 4\ntensor-parallel-size: 2\n")
        self.unit(self.unit_name)

    @staticmethod
    def program(path: Path, text: str) -> None:
        """Write an executable."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def put(self, path: str, text: str) -> None:
        """Replace a file below the root in one step: a running program may be reading it."""
        write_atomically(self.root / path, text)

    def env(self, **values: object) -> None:
        """Write node.env; what is not given keeps the values of this bed."""
        defaults = {
            "GLM_GATE_TIMEOUT": 0.2,
            "GLM_START_COST_BYTES": 4 * 1024**3,
        }
        path = self.root / "etc/glm-vllm/node.env"
        old = dict(line.split("=", 1) for line in path.read_text().splitlines()) if path.exists() else {}
        path.write_text("".join(f"{key}={value}\n" for key, value in (defaults | old | values).items()))

    def fabric(self, rdma: str, rails: list[tuple[str, str]], peer_name: str = "spark-b") -> None:
        """Write fabric.json."""
        entries = [{"address": own, "prefix": 24, "peer": peer, "mtu": 9000} for own, peer in rails]
        document = {"schema": 1, "rdma": rdma, "rails": entries, "peer": peer_name, "peer_management": "192.0.2.12"}
        (self.root / "etc/glm-vllm/fabric.json").write_text(json.dumps(document))

    def addresses(self, text: str) -> None:
        """What `ip -j addr` prints."""
        self.put("ip-addr.json", text)

    def sysfs(self, fixture: str) -> Path:
        """Give the node the RDMA devices of a fixture; returns the folder of the devices."""
        target = self.root / "sys/class/infiniband"
        shutil.copytree(FIXTURES / fixture / "class/infiniband", target)
        return target

    def unit(self, name: str, **properties: str) -> None:
        """What systemd says about a unit."""
        lines = UNIT | {"Id": f"{name}.service"} | properties
        self.put(f"units/{name}.service", "".join(f"{key}={value}\n" for key, value in lines.items()))

    def weights(self, name: str, *, verified: bool = True) -> dict[str, str]:
        """A model folder; returns its entry in deployment.json."""
        folder = self.root / f"var/lib/glm-vllm/models/{name}/rev1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text("{}")
        digest = hashlib.sha256(b"{}" if verified else b"something else").hexdigest()
        (folder / ".verified.json").write_text(json.dumps({"schema": 1, "when": "now", "manifest_sha256": digest}))
        return {"name": name, "revision": "rev1", "path": str(folder)}

    def kernels(self, release: str) -> Path:
        """A release with kernels; returns the library."""
        folder = self.root / f"opt/glm-vllm/releases/{release}"
        library = folder / "venv/lib/glm-vllm/glm_exl3.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_bytes(b"kernels")
        files = {library.name: hashlib.sha256(b"kernels").hexdigest()}
        (folder / "manifest.json").write_text(json.dumps({"id": release, "kernels": {"files": files}}))
        return library

    def deploy(self, config: str, **changes: object) -> dict:
        """Make a deployment current; returns deployment.json."""
        folder = self.root / "var/lib/glm-vllm/deployments/current"
        folder.mkdir(parents=True, exist_ok=True)
        document = {"schema": 1, "n": 1, "release": "r1", "model": self.weights("target")}
        document |= {"drafter": self.weights("drafter"), "executor": "mp"} | changes
        (folder / "deployment.json").write_text(json.dumps(document))
        (self.root / "etc/glm-vllm/serve.yaml").write_text(config)
        return document

    def session(self, peer: str | None = "peer-start", **changes: object) -> None:
        """What this start's gate left behind."""
        document = {"schema": 1, "id": "own-start", "ready": True, "peer": peer, "says": "", "environment": {}}
        (self.root / "run/glm-vllm/session.json").write_text(json.dumps(document | changes))

    def read_session(self) -> dict:
        """What the gate published."""
        return json.loads((self.root / "run/glm-vllm/session.json").read_text())

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a process on this node."""
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        return os.environ | {"GLM_ROOT": str(self.root), "PATH": path, "PYTHONPATH": str(SOURCES)} | more

    def start(self, *argv: str, **more: str) -> subprocess.Popen:
        """A real `glm-vllm` process."""
        command = [sys.executable, "-m", "glm_vllm_overlay", *argv]
        environment = self.environment(**more)
        return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def interface(name: str, address: str, flags: tuple[str, ...] = ("UP", "LOWER_UP")) -> dict:
    """One interface as `ip -j addr` prints it, shortened."""
    return {"ifname": name, "flags": list(flags), "mtu": 9000, "addr_info": [{"family": "inet", "local": address}]}


class Peer:
    """The other node's watch, real but for its document, which the test sets; `calls` counts the questions."""

    def __init__(self, address: str, asker: str) -> None:
        self.document = {
            "schema": 1,
            "node": "spark-b",
            "role": "worker",
            "time": "2026-01-01T00:00:00+00:00",
            "release": "r1",
            "release_sha256": "",
            "config_sha256": "",
            "chat_template_sha256": None,
            "environment": {"GLM_GPU_MEMORY_UTILIZATION": "0.87", "GLM_SPECULATOR": "dflash2", "ABLIT": "0"},
            "model": "target@rev1",
            "model_verified": True,
            "drafter": "drafter@rev1",
            "executor": "mp",
            "memory": {"total": 128 * 1024**3, "available": 100 * 1024**3, "free": 90 * 1024**3},
            "phase": "gate",
            "unit": {
                "name": "glm-vllm-worker",
                "active": "activating",
                "sub": "start-pre",
                "invocation_id": "peer-start",
                "restarts": 0,
                "outcome": "",
            },
            "session": {"id": "peer-start", "ready": True, "peer": None, "says": "waiting for spark-a"},
            "rank": {"cpu_seconds": 1.5},
            "fabric": {"rails": []},
            "incident": None,
        }
        self.door = watch.Door(address, {asker}, self)
        threading.Thread(target=self.door.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def text(self) -> bytes:
        """What the door hands out."""
        return json.dumps(self.document).encode()

    def close(self) -> None:
        """Fall silent."""
        self.door.shutdown()
        self.door.server_close()


@pytest.fixture
def addresses() -> tuple[str, str]:
    """Two loopback addresses that no other test process uses."""
    pid = os.getpid()
    network = f"127.{10 + pid // 62500 % 90}.{1 + pid // 250 % 250}.{1 + pid % 250}"
    return network, network.replace("127.", "127.1", 1)


@pytest.fixture
def node(tmp_path, addresses, monkeypatch) -> NodeFolder:
    """The head; this test process's own environment points to it."""
    own, peer = addresses
    folder = NodeFolder(tmp_path / "spark-a", "spark-a", "head", own, peer, "spark-b")
    for key in ("GLM_ROOT", "PATH"):
        monkeypatch.setenv(key, folder.environment()[key])
    for key in ("GLM_GPU_MEMORY_UTILIZATION", "GLM_SPECULATOR", "ABLIT", "NOTIFY_SOCKET", "INVOCATION_ID"):
        monkeypatch.delenv(key, raising=False)
    return folder


@pytest.fixture
def worker(tmp_path, addresses) -> NodeFolder:
    """The worker, for tests with two real nodes."""
    own, peer = addresses
    return NodeFolder(tmp_path / "spark-b", "spark-b", "worker", peer, own, "spark-a")


@pytest.fixture
def peer(node):
    """spark-b's watch, at its gate and ready, in agreement with `node`."""
    other = Peer(node.peer, node.address)
    for key, path in (
        ("config_sha256", "etc/glm-vllm/serve.yaml"),
        ("release_sha256", "opt/glm-vllm/releases/r1/manifest.json"),
    ):
        other.document[key] = hashlib.sha256((node.root / path).read_bytes()).hexdigest()
    yield other
    other.close()


@pytest.fixture
def glm_vllm(capfd):
    """Run a command in this process: `code, stdout, stderr = glm_vllm("fabric", "--json")`."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = cli.main(list(argv))
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run
