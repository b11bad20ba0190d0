# SPDX-License-Identifier: Apache-2.0
"""A model hub on loopback that speaks as much of the hub's protocol as its client needs, with faults on request."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPO, REVISION = "own/model", "0123456789abcdef0123456789abcdef01234567"
CHUNK = 16384


def blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def checkpoint(shards: int = 4, size: int = 200_000, seed: int = 1) -> dict[str, bytes]:
    """Names and content: configuration, index and random shards, the same for the same seed."""
    names = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    files = {
        name: hashlib.shake_128(f"{seed}/{name}".encode()).digest(size + number) for number, name in enumerate(names)
    }
    weight_map = {f"tensor.{number}": name for number, name in enumerate(names)}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return files | {"config.json": b'{"model_type": "random"}', ".gitattributes": b"*.safetensors filter=lfs\n"}


@dataclass
class Hub:
    """One repository at one commit.

    `begun`: names, and the byte from which they were asked for. `faults`: name → function(handler, data) that answers
    a GET in its own way.
    """

    files: dict[str, bytes] = field(default_factory=checkpoint)
    etags: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    faults: dict[str, Any] = field(default_factory=dict)
    list_faults: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    token: str = ""
    revision: str = REVISION
    pause: float = 0.0
    served: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    begun: set[tuple[str, int]] = field(default_factory=set)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Hub:
        hub = self
        handler = type("Handler", (Handler,), {"hub": hub})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def total(self) -> int:
        """Bytes of file content sent so far."""
        return sum(self.served.values())

    def listing(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": self.sizes.get(name, len(data)), "blobId": blob(data)}
            if name.endswith(".safetensors"):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": REPO, "sha": self.revision, "private": False, "tags": [], "downloads": 0, "siblings": siblings}

    def etag(self, name: str) -> str:
        data = self.files[name]
        given = hashlib.sha256(data).hexdigest() if name.endswith(".safetensors") else blob(data)
        return self.etags.get(name, given)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, code: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(code)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        with hub.guard:
            hub.asked.append(f"{self.command} {path}")
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.answer(401, {"X-Error-Message": "Invalid credentials"})
        elif path == f"/api/models/{REPO}/revision/{REVISION}":
            if hub.list_faults:
                self.answer(*hub.list_faults.pop(0))
            else:
                self.answer(200, {"Content-Type": "application/json"}, json.dumps(hub.listing()).encode())
        elif (match := re.fullmatch(rf"/{REPO}/resolve/{REVISION}/(.+)", path)) and match[1] in hub.files:
            self.file(match[1])
        else:
            self.answer(404, {"X-Error-Code": "RepoNotFound"})

    def file(self, name: str) -> None:
        hub, data = self.hub, self.hub.files[name]
        headers = {"X-Repo-Commit": hub.revision, "ETag": f'"{hub.etag(name)}"', "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            return self.answer(200, headers | {"Content-Length": str(len(data))})
        if fault := hub.faults.get(name):
            return fault(self, data)
        self.send(name, data, headers)

    def send(self, name: str, data: bytes, headers: dict[str, str] | None = None, until: int | None = None) -> None:
        """Send a file from where the client asks; with `until`, close the connection there, whatever was promised."""
        first = int((re.match(r"bytes=(\d+)-", self.headers.get("Range") or "") or [0, 0])[1])
        self.hub.begun.add((name, first))
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        for key, value in ({"Content-Length": str(len(data) - first)} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        for start in range(first, len(data) if until is None else until, CHUNK):
            piece = data[start : min(start + CHUNK, len(data) if until is None else until)]
            try:
                self.wfile.write(piece)
            except OSError:
                self.close_connection = True
                return
            with self.hub.guard:
                self.hub.served[name] = self.hub.served.get(name, 0) + len(piece)
            if self.hub.pause:
                time.sleep(self.hub.pause)
        if until is not None:
            self.close_connection = True
