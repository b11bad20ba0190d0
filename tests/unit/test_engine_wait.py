"""engine_wait against a real Unix socket and stand-ins for systemctl and journalctl."""

import json
import os
import socketserver
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

MODULE = Path(__file__).parents[2] / "plugins/modules/engine_wait.py"


class Server(socketserver.ThreadingUnixStreamServer):
    """HTTP on a Unix socket that answers every path with one status."""

    def __init__(self, path, status):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.end_headers()

            def address_string(self):
                return "unix"

            def log_message(self, *_):
                pass

        super().__init__(str(path), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture
def wait(tmp_path):
    """Run the module with a unit in a given state; returns its answer."""

    def run(active="activating", restarts=0, job=0, seconds=1, check=False):
        programs = tmp_path / "bin"
        programs.mkdir(exist_ok=True)
        for name, text in (
            ("systemctl", f"ActiveState={active}\nNRestarts={restarts}" + (f"\nJob={job}" if job else "")),
            ("journalctl", "the last line"),
        ):
            (programs / name).write_text(f"#!/bin/sh\ncat <<'EOT'\n{text}\nEOT\n")
            (programs / name).chmod(0o755)
        arguments = {"unit": "x.service", "socket": str(tmp_path / "api.sock"), "seconds": seconds}
        done = subprocess.run(
            [sys.executable, MODULE],
            input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments | {"_ansible_check_mode": check}}),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        )
        assert done.stdout, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_an_engine_that_answers_serves(wait, tmp_path):
    with Server(tmp_path / "api.sock", 200):
        answer = wait(active="active")
    assert answer["serving"] and not answer["hopeless"]


def test_an_engine_that_answers_503_does_not(wait, tmp_path):
    with Server(tmp_path / "api.sock", 503):
        assert not wait(active="active")["serving"]


def test_an_engine_on_its_way_out_does_not_serve(wait, tmp_path):
    """A restart has been asked for, and the former engine still answers."""
    with Server(tmp_path / "api.sock", 200):
        answer = wait(active="deactivating", job=7)
    assert not answer["serving"] and not answer["hopeless"]


def test_a_slow_start_is_not_hopeless(wait):
    answer = wait(active="activating", restarts=1)
    assert not answer["serving"] and not answer["hopeless"] and answer["last"] == ["the last line"]


def test_a_unit_that_waits_for_another_is_not_hopeless(wait):
    assert not wait(active="inactive", job=1234)["hopeless"]


@pytest.mark.parametrize(("active", "restarts"), [("inactive", 0), ("failed", 0), ("activating", 4)])
def test_a_stopped_unit_and_one_that_fails_again_and_again_are_hopeless(wait, active, restarts):
    answer = wait(active=active, restarts=restarts, seconds=60)  # returns at once, not after a minute
    assert not answer["serving"] and answer["hopeless"]
