"""The twin as Python sees it: its commands, its controller's network, its endpoint. For demo.py and the tests."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).resolve().parents[1]
STATE = Path(os.environ.get("TWIN_STATE", "/var/tmp/glm-twin"))
CACHE = Path(os.environ.get("TWIN_CACHE", "/var/tmp/glm-twin"))
NET = os.environ.get("TWIN_NET", "10.77.0")
PREFIX = os.environ.get("TWIN_PREFIX", "twin")
HEAD, WORKER = "spark-a", "spark-b"
URL = f"http://{NET}.11:8888"
MODEL = "GLM-5.3-Flash-EXL3"
CLONE_NEWNET = 0x40000000


class BedError(Exception):
    """A command of the bed failed; the message holds the command and what it wrote."""


def inventory() -> list[str]:
    """Inventory sources for ansible; a bed other than the default one adds how it is reached."""
    own = [] if STATE == Path("/var/tmp/glm-twin") else [str(STATE / "run/inventory.yml")]
    return [str(ROOT / "inventory/twin"), *own]


def twin(*arguments: str, timeout: float = 600) -> str:
    """Run twin.sh and return what it wrote on standard output; BedError when it fails."""
    done = subprocess.run(
        [ROOT / "twin/twin.sh", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise BedError(f"twin.sh {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def on(node: str, *command: str, timeout: float = 60) -> str:
    """Standard output of a command on a node, run without any network; BedError when it fails."""
    return twin("sh", node, *command, timeout=timeout)


def checkpoint(kind: str) -> Path:
    """Folder of a tiny checkpoint, built if it is not there; the nodes see it as /srv/models/<its name>."""
    folder = STATE / "models" / f"tiny-glm-5.3-flash-{kind}"
    builder = ROOT / ".venv-engine/bin/glm-vllm-twin-checkpoint"
    subprocess.run([builder, kind, folder], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return folder


@contextlib.contextmanager
def controller_network() -> Iterator[None]:
    """Sockets that this thread makes inside belong to the controller's namespace of the bed, for life."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{PREFIX}-ctl") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter the bed's network: run as root")
        try:
            yield
        finally:
            libc.setns(home.fileno(), CLONE_NEWNET)


class Endpoint(requests.Session):
    """The pair's API as seen from the controller's network; paths instead of URLs, with the first key of the head."""

    def __init__(self, key: str | None = None) -> None:
        super().__init__()
        self.trust_env = False
        self.headers["Authorization"] = f"Bearer {api_key() if key is None else key}"

    def request(self, method: str, url: str, **options: Any) -> requests.Response:  # type: ignore[override]
        options.setdefault("timeout", 120)
        with controller_network():
            return super().request(method, URL + url, **options)

    def chat(self, text: str, **body: Any) -> dict[str, Any]:
        """Answer to one user message, as the API gives it; raises for an HTTP error."""
        message = {"role": "user", "content": text}
        answer = self.post("/v1/chat/completions", json={"model": MODEL, "messages": [message], **body})
        answer.raise_for_status()
        return answer.json()

    def metrics(self) -> dict[str, float]:
        """Sum over labels of every sample, by name."""
        totals: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            sample = re.match(r"([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)$", line)
            if sample:
                totals[sample[1]] = totals.get(sample[1], 0.0) + float(sample[2])
        return totals


def api_key() -> str:
    """The first key that the head knows."""
    return json.loads(on(HEAD, "cat", "/etc/glm-vllm/api-keys"))["keys"][0]["key"]


def state(node: str) -> dict[str, Any]:
    """What the node's glm-vllm-watch tells its peer (GET /v1/state)."""
    peer = WORKER if node == HEAD else HEAD
    address = json.loads(on(peer, "cat", "/etc/glm-vllm/fabric.json"))["rails"][0]["peer"]
    return json.loads(on(peer, "curl", "--silent", "--fail", "--max-time", "5", f"http://{address}:8890/v1/state"))


def state_from_now(node: str) -> dict[str, Any]:
    """`state` as it is after this call: what the watch tells can be a second old, on a busy machine two."""
    called = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    for _ in range(100):
        if (found := state(node))["time"] > called:
            return found
        time.sleep(0.2)
    raise BedError(f"glm-vllm-watch of {node} tells the state of {found['time']} still, long after {called}")
