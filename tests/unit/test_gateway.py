"""The gateway: the site file as nginx itself runs it, in front of a stand-in for the engine's Unix socket."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import re
import shutil
import socket
import socketserver
import subprocess
import threading
import time
from pathlib import Path

import jinja2
import pytest
import yaml
from glm_vllm_overlay.node.keys import Store, add
from glm_vllm_overlay.node.paths import Paths

ROLE = Path(__file__).resolve().parents[2] / "roles/glm-vllm-overlay"
NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
KEY, OTHER = "ab" * 32, "cd" * 32


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def render(**variables) -> str:
    """The site file for the role's defaults with some variables changed."""
    values = yaml.safe_load((ROLE / "defaults/main.yml").read_text(encoding="utf-8"))
    values |= yaml.safe_load((ROLE / "vars/main/main.yml").read_text(encoding="utf-8"))
    values |= {"ansible_managed": "Ansible managed", "ansible_facts": {"lo": {}}} | variables
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string((ROLE / "templates/nginx-site.conf.j2").read_text(encoding="utf-8")).render(values)


class Engine(http.server.BaseHTTPRequestHandler):
    """What the gateway speaks to: echoes what it got, or streams two chunks with a pause that the test ends."""

    protocol_version = "HTTP/1.1"
    go_on = threading.Event()

    def do_GET(self) -> None:
        """Echo path, headers and the length of the body."""
        size = int(self.headers.get("Content-Length", 0))
        left = size
        while left:
            left -= len(self.rfile.read(min(left, 1 << 20)))
        if self.path == "/stream":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"3\r\none\r\n")
            self.wfile.flush()
            self.go_on.wait(10)
            self.wfile.write(b"3\r\ntwo\r\n0\r\n\r\n")
            return
        busy = self.path == "/busy"
        body = json.dumps({"path": self.path, "headers": dict(self.headers), "size": size}).encode()
        self.send_response(503 if busy else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *args) -> None:
        """Say nothing."""


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Serves HTTP on a Unix socket."""

    daemon_threads = True

    def get_request(self):
        """A client address of the shape that the HTTP handler expects."""
        return super().get_request()[0], ("unix", 0)


class Gateway:
    """A running nginx with our site in a folder of its own."""

    def __init__(self, folder: Path, site: str, port: int) -> None:
        self.folder, self.port = folder, port
        self.socket = folder / "run/glm-vllm/api.sock"
        self.socket.parent.mkdir(parents=True)
        (folder / "logs").mkdir()
        for ours, here in (
            ("unix:/run/glm-vllm/api.sock", f"unix:{self.socket}"),
            ("/etc/nginx/glm-vllm/keys.map", f"{folder}/etc/nginx/glm-vllm/keys.map"),
            ("/var/log/nginx/", f"{folder}/logs/"),
        ):
            site = site.replace(ours, here)
        (folder / "site.conf").write_text(site, encoding="utf-8")
        temporary = "".join(
            f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (folder / "nginx.conf").write_text(
            f"{'user root;' if os.geteuid() == 0 else ''}\ndaemon off;\nworker_processes 1;\npid {folder}/pid;\n"
            f"error_log {folder}/logs/error.log;\nevents {{}}\nhttp {{\naccess_log off;\n{temporary}"
            f"include {folder}/site.conf;\n}}\n",
            encoding="utf-8",
        )
        self.command = [
            NGINX,
            "-p",
            str(folder),
            "-c",
            str(folder / "nginx.conf"),
            "-e",
            str(folder / "logs/start.log"),
        ]

    def test(self) -> str:
        """What `nginx -t` complains about; "" when it accepts the site."""
        done = subprocess.run([*self.command, "-t"], capture_output=True, text=True, check=False)
        return done.stderr if done.returncode or "[warn]" in done.stderr else ""

    def __enter__(self) -> Gateway:
        assert not self.test()
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return self
            time.sleep(0.02)
        raise AssertionError((self.folder / "logs/start.log").read_text())

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.wait(10)

    def ask(self, path, headers=None, method="GET", body=None, source="127.0.0.1"):
        """(status, headers, body) of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10, source_address=(source, 0))
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A root folder with one key named laptop."""
    folder = tmp_path_factory.mktemp("gateway")
    add(Store(Paths(folder)), "laptop", KEY)
    return folder


@pytest.fixture(scope="module")
def gateway(keys):
    """A gateway whose engine runs."""
    port = free_port()
    with Gateway(keys, render(glm_vllm_overlay_api_port=port, glm_vllm_overlay_http="loopback"), port) as running:
        engine = UnixServer(str(running.socket), Engine)
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        yield running
        engine.shutdown()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer {KEY}"}, 200),
        ({"x-api-key": KEY}, 200),
        ({"Authorization": "Bearer sk-dummy", "x-api-key": KEY}, 401),
        ({}, 401),
        ({"Authorization": f"Bearer {OTHER}"}, 401),
        ({"x-api-key": OTHER}, 401),
        ({"Authorization": f"Bearer {KEY.upper()}"}, 401),
        ({"x-api-key": KEY.upper()}, 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": f"Bearer {KEY}0"}, 401),
        ({"Authorization": "Bearer ", "x-api-key": ""}, 401),
        ({"x-api-key": f".*{KEY}"}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/"])
def test_only_the_right_key_opens(gateway, headers, status, path):
    """Every path but two asks for the key, in both header forms, in its own letter case."""
    assert gateway.ask(path, headers)[0] == status


def test_refusal_is_what_openai_clients_read(gateway):
    """401 in OpenAI's error shape."""
    status, headers, body = gateway.ask("/v1/chat/completions", method="POST", body="{}")
    assert status == 401 and headers["Content-Type"] == "application/json" and headers["WWW-Authenticate"] == "Bearer"
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_api_key" and set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_health_and_metrics_need_no_key(gateway, path):
    """Both are open from loopback; nothing below them is."""
    assert gateway.ask(path)[0] == 200
    assert gateway.ask(f"{path}/x")[0] == 401


@pytest.mark.parametrize("path", ["/metrics/../health", "/v1/models/../../health", "/metrics/%2e%2e/health"])
def test_an_open_path_leads_nowhere_else(gateway, path):
    """The engine reads a path as it stands; what is /health to the gateway must be that to the engine."""
    status, _, body = gateway.ask(path)
    assert status == 200 and json.loads(body)["path"] == "/health"


def test_the_engine_never_sees_a_key(gateway):
    """Keys stop at the door."""
    for headers in ({"Authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
        assert KEY not in gateway.ask("/v1/models", headers)[2]


def test_the_log_names_the_key_and_never_shows_it(gateway):
    """The access log holds the key's name, not the key, not a wrong key either."""
    gateway.ask("/v1/logged?x=1", {"x-api-key": KEY})
    gateway.ask("/v1/refused", {"x-api-key": OTHER})
    log = gateway.folder / "logs/glm-vllm.access.log"
    deadline = time.monotonic() + 5
    while "/v1/refused" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    text = "".join(path.read_text() for path in (gateway.folder / "logs").iterdir())
    assert re.search(r'127\.0\.0\.1 laptop \[[^]]+\] "GET /v1/logged" 200', text)
    assert KEY not in text and OTHER not in text


def test_streams_are_not_held_back(gateway):
    """The first chunk arrives while the engine still thinks about the second."""
    Engine.go_on.clear()
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=5)
    connection.request("GET", "/stream", headers={"x-api-key": KEY})
    answer = connection.getresponse()
    assert answer.read(3) == b"one"
    Engine.go_on.set()
    assert answer.read() == b"two"


def test_large_bodies_pass_and_larger_ones_are_told_so(gateway):
    """Images and long prompts: 2 MB pass (nginx's own limit is 1), 257 MiB are refused in JSON."""
    status, _, body = gateway.ask("/v1/x", {"x-api-key": KEY}, "POST", b"x" * 2_000_000)
    assert status == 200 and json.loads(body)["size"] == 2_000_000
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
    connection.putrequest("POST", "/v1/x")
    connection.putheader("x-api-key", KEY)
    connection.putheader("Content-Length", str(257 << 20))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413 and json.loads(answer.read())["error"]["code"] == "request_too_large"


def test_the_engines_own_503_passes(gateway):
    """Only connection errors are ours to word."""
    status, headers, body = gateway.ask("/busy", {"x-api-key": KEY})
    assert status == 503 and "Retry-After" not in headers and json.loads(body)["path"] == "/busy"


@pytest.mark.parametrize("socket_left", [False, True])
def test_engine_away_is_503_with_retry_after(tmp_path, socket_left):
    """No socket, and a socket that nobody answers: clients and load balancers are told to come back."""
    add(Store(Paths(tmp_path)), "laptop", KEY)
    port = free_port()
    with Gateway(tmp_path, render(glm_vllm_overlay_api_port=port, glm_vllm_overlay_http="loopback"), port) as running:
        if socket_left:
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(running.socket))
        for path, method in (("/health", "GET"), ("/v1/chat/completions", "POST")):
            status, headers, body = running.ask(path, {"x-api-key": KEY}, method)
            assert status == 503 and headers["Retry-After"] == "10"
            assert json.loads(body)["error"]["code"] == "engine_not_ready"
        assert running.ask("/v1/models")[0] == 401


def test_networks_outside_stay_out(tmp_path):
    """An address in no allowed network gets 403 even with a key; one in a public network needs it for counters."""
    add(Store(Paths(tmp_path)), "laptop", KEY)
    port = free_port()
    site = render(glm_vllm_overlay_api_port=port, glm_vllm_overlay_http="loopback")
    site = site.replace("127.0.0.0/8 1;", "127.0.0.1/32 1;")
    site = site.replace("10.0.0.0/8 1;", "127.0.0.2/32 1;", 1)
    with Gateway(tmp_path, site, port) as running:
        engine = UnixServer(str(running.socket), Engine)
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        with_key = {"x-api-key": KEY}
        assert running.ask("/metrics")[0] == 200
        assert running.ask("/health", source="127.0.0.2")[0] == 200
        assert running.ask("/metrics", source="127.0.0.2")[0] == 401
        assert running.ask("/metrics", with_key, source="127.0.0.2")[0] == 200
        for path in ("/health", "/metrics", "/v1/models"):
            status, _, body = running.ask(path, with_key, source="127.0.0.3")
            assert status == 403 and "allowed_networks" in json.loads(body)["error"]["message"]
        engine.shutdown()


def test_an_empty_store_lets_nobody_in(tmp_path):
    """A key file that was emptied is a closed door, not an open one."""
    Store(Paths(tmp_path)).render([])
    port = free_port()
    with Gateway(tmp_path, render(glm_vllm_overlay_api_port=port, glm_vllm_overlay_http="loopback"), port) as running:
        for headers in ({}, {"x-api-key": ""}, {"x-api-key": KEY}, {"Authorization": "Bearer "}):
            assert running.ask("/v1/models", headers)[0] == 401


@pytest.mark.parametrize(
    ("http", "ipv6", "listens"),
    [
        ("lan", {}, ["8888"]),
        ("lan", {"ipv6": []}, ["8888", "[::]:8888 ipv6only=on"]),
        ("loopback", {}, ["127.0.0.1:8888"]),
        ("loopback", {"ipv6": []}, ["127.0.0.1:8888", "[::1]:8888 ipv6only=on"]),
        ("off", {"ipv6": []}, []),
    ],
)
def test_who_reaches_the_port(http, ipv6, listens, tmp_path):
    """The door is where glm_vllm_overlay_http says, and nginx accepts each rendering."""
    site = render(glm_vllm_overlay_http=http, ansible_facts={"lo": ipv6})
    assert re.findall(r"^\s*listen (.*);$", site, re.MULTILINE) == listens
    add(Store(Paths(tmp_path)), "laptop", KEY)
    port = free_port()
    assert not Gateway(tmp_path, re.sub(r"\b8888\b", str(port), site), port).test()
