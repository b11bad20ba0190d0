"""`glm-vllm watch`: tells the peer this node's state over the fabric, and notes when the engine left service."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import socketserver
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler

from glm_vllm_overlay.node import fabric as node_fabric
from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node import state
from glm_vllm_overlay.node.errors import Unusable
from glm_vllm_overlay.node.files import read_json_if_there, write_atomically
from glm_vllm_overlay.node.notify import notify
from glm_vllm_overlay.node.paths import Paths
from glm_vllm_overlay.node.settings import Node

TICK = 1.0
# Linux: bind to an address that no interface has yet, so that the order at boot and a lost address do not matter.
IP_FREEBIND = 15


class Incidents:
    """Follows the engine from one look to the next and keeps the last incident in a file.

    An incident is a start of the engine that was `serving` and ended otherwise than by a stop or restart on purpose.
    `seconds` is the time out of service, null until it serves again.
    """

    def __init__(self, paths: Paths) -> None:
        self.path = paths.incident
        self.serving: dict | None = None

    def look(self, document: dict, clock: float) -> None:
        """Take in the state at `clock` (seconds since the epoch)."""
        unit, phase = document["unit"], document["phase"]
        if phase == "serving":
            if self.serving and self.serving["invocation_id"] != unit["invocation_id"]:
                self.left(unit, phase, clock)
            self.serving = unit
            self.close(clock)
        elif self.serving and phase != "stopping":
            self.left(unit, phase, clock)
            self.serving = None

    def left(self, unit: dict, phase: str, clock: float) -> None:
        """The start that was serving is over: note an incident unless someone wanted it."""
        restarted = unit["invocation_id"] != self.serving["invocation_id"]
        # systemd counts its own restarts and begins anew when someone starts the unit.
        if unit["restarts"] <= self.serving["restarts"] if restarted else phase == "stopped":
            return
        what = unit["outcome"] or "the engine ended and systemd started it again"
        self.store({"schema": 1, "when": iso(clock), "what": what, "seconds": None})
        print(f"incident: {unit['name']} left service: {what}", flush=True)

    def close(self, clock: float) -> None:
        """The engine serves: an incident that is still open is over."""
        incident = read_json_if_there(self.path)
        if incident and incident.get("seconds") is None:
            seconds = round(clock - datetime.fromisoformat(incident["when"]).timestamp())
            self.store(incident | {"seconds": seconds})
            print(f"incident over: in service again after {seconds} s", flush=True)

    def store(self, incident: dict) -> None:
        """Write the incident; a full disk must not take the watch down."""
        try:
            write_atomically(self.path, json.dumps(incident) + "\n")
        except OSError as error:
            print(f"{self.path} cannot be written: {error}", flush=True)


def iso(clock: float) -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.fromtimestamp(clock, UTC).isoformat(timespec="seconds")


class Board:
    """The newest document, shared between the loop that makes it and the threads that answer."""

    def __init__(self) -> None:
        self.text = b""


class Answer(BaseHTTPRequestHandler):
    """GET /v1/state for the peers' fabric addresses; nothing else for anyone."""

    server: Door
    timeout = 5
    server_version = "glm-vllm-watch"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer 200 with the document, or 403, 404, 503 with a sentence."""
        if self.client_address[0] not in self.server.peers:
            self.reply(403, f"{self.client_address[0]} is no peer in this node's /etc/glm-vllm/fabric.json\n".encode())
        elif self.path != "/v1/state":
            self.reply(404, b"only /v1/state is here\n")
        elif not self.server.board.text:
            self.reply(503, b"this node's state is not known yet\n")
        else:
            self.reply(200, self.server.board.text, "application/json")

    def reply(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        """Send one whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the peer asks every two seconds."""


class Door(socketserver.ThreadingTCPServer):
    """Listens on one fabric address. (http.server's own class would ask the resolver for the address's name.)"""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: str, peers: set[str], board: Board) -> None:
        self.peers, self.board = peers, board
        super().__init__((address, state.PORT), Answer)

    def server_bind(self) -> None:
        """Bind even while the address is missing."""
        self.socket.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
        super().server_bind()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`glm-vllm watch` has no arguments of its own."""


def run(args: argparse.Namespace) -> int:
    """`glm-vllm watch`: runs until it is stopped."""
    paths = node_paths.current()
    Node.load(paths)
    fabric = node_fabric.load(paths)
    peers, board, incidents = {rail.peer for rail in fabric.rails}, Board(), Incidents(paths)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    doors = []
    for rail in fabric.rails:
        try:
            doors.append(Door(rail.address, peers, board))
        except OSError as error:
            raise Unusable(f"{rail.address} port {state.PORT} cannot be listened on ({error.strerror})") from None
    for door in doors:
        threading.Thread(target=door.serve_forever, daemon=True).start()
    ready, complaint = False, ""
    while not stop.is_set():
        try:
            document = state.own(paths)
            incidents.look(document, time.time())
            document["incident"] = read_json_if_there(paths.incident) or None
            board.text = json.dumps(document).encode()
            said = ""
        except Unusable as error:
            # node.env is being replaced, or the manager re-executed: an old answer would be a wrong one.
            board.text, said = b"", str(error)
        if said and said != complaint:
            print(said, flush=True)
        complaint = said
        if not ready:
            notify("READY=1", f"STATUS=answering {', '.join(sorted(peers))}")
            ready = True
        if os.environ.get("WATCHDOG_USEC"):
            notify("WATCHDOG=1")
        stop.wait(TICK)
    notify("STOPPING=1")
    return 0
