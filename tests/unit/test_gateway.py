"""The gateway: the site file as nginx itself runs it, in front of a stand-in for the engine's Unix socket."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import re
import shutil
import signal
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2
import pytest
import yaml
from glm_vllm_overlay.node import certs
from glm_vllm_overlay.node.keys import Store, add, revoke
from glm_vllm_overlay.node.paths import Paths

ROLE = Path(__file__).resolve().parents[2] / "roles/glm-vllm-overlay"
NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
KEY, OTHER = "ab" * 32, "cd" * 32


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def render(**variables) -> Site:
    """What the role renders for the role's defaults with some variables changed."""
    values = yaml.safe_load((ROLE / "defaults/main.yml").read_text(encoding="utf-8"))
    values |= yaml.safe_load((ROLE / "vars/main/main.yml").read_text(encoding="utf-8"))
    values |= {"ansible_managed": "Ansible managed", "ansible_facts": {"lo": {}}} | variables
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    main, site = (
        environment.from_string((ROLE / f"templates/nginx-{name}.conf.j2").read_text(encoding="utf-8")).render(values)
        for name in ("main", "site")
    )
    return Site(main, site)


@dataclass
class Site:
    """What the role renders for nginx: its main context, and the site inside http {}."""

    main: str
    site: str


# Path -> what comes first and what comes when the test lets it, as OpenAI's and Anthropic's clients read them
STREAMS = {
    "/v1/stream": ("one", "two"),
    "/v1/chat/completions": ('data: {"choices": [{"delta": {"content": "a"}}]}\n\n', "data: [DONE]\n\n"),
    "/v1/responses": (
        'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": "a"}\n\n',
        'event: response.completed\ndata: {"type": "response.completed"}\n\n',
    ),
    "/v1/messages": (
        'event: message_start\ndata: {"type": "message_start"}\n\n',
        'event: message_stop\ndata: {"type": "message_stop"}\n\n',
    ),
}


class Engine(http.server.BaseHTTPRequestHandler):
    """What the gateway speaks to: echoes what it got, or streams two chunks with a pause that the test ends."""

    protocol_version = "HTTP/1.1"
    go_on = threading.Event()
    asked: tuple[dict[str, str], bytes]

    def do_GET(self) -> None:
        """Echo path, headers and the length of the body."""
        size = int(self.headers.get("Content-Length", 0))
        left, text = size, b""
        while left:
            text = self.rfile.read(min(left, 1 << 20))
            left -= len(text)
        if self.path in STREAMS:
            Engine.asked = (dict(self.headers), text)
            first, second = STREAMS[self.path]
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(f"{len(first):x}\r\n{first}\r\n".encode())
            self.wfile.flush()
            self.go_on.wait(10)
            self.wfile.write(f"{len(second):x}\r\n{second}\r\n0\r\n\r\n".encode())
            return
        busy = self.path == "/v1/busy"
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

    def __init__(self, folder: Path, rendered: Site, port: int, https: int = 0) -> None:
        self.folder, self.port, self.https, site = folder, port, https, rendered.site
        certificate = certs.Certificate(Paths(folder))
        certificate.folder.mkdir(parents=True, exist_ok=True)
        certs.ensure(certificate, {"IP:127.0.0.1"})
        self.socket = folder / "run/glm-vllm/api.sock"
        self.socket.parent.mkdir(parents=True)
        (folder / "logs").mkdir()
        for ours, here in (
            ("unix:/run/glm-vllm/api.sock", f"unix:{self.socket}"),
            ("/etc/nginx/glm-vllm/keys.map", f"{folder}/etc/nginx/glm-vllm/keys.map"),
            ("/etc/glm-vllm/tls/", f"{folder}/etc/glm-vllm/tls/"),
            ("/var/log/nginx/", f"{folder}/logs/"),
        ):
            site = site.replace(ours, here)
        (folder / "site.conf").write_text(site, encoding="utf-8")
        temporary = "".join(
            f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (folder / "nginx.conf").write_text(
            f"{'user root;' if os.geteuid() == 0 else ''}\ndaemon off;\nworker_processes 1;\npid {folder}/pid;\n"
            f"{rendered.main}"
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

    def reload(self) -> None:
        """What `systemctl reload` does, until no old worker takes a connection any more."""
        before = self.workers()
        self.process.send_signal(signal.SIGHUP)
        end = time.monotonic() + 10
        while any(title and "shutting down" not in title for title in map(self.title, before)):
            assert time.monotonic() < end
            time.sleep(0.02)

    def workers(self) -> list[str]:
        """Process ids of the workers."""
        return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()

    @staticmethod
    def title(pid: str) -> str:
        """What a process calls itself; "" when it has ended."""
        try:
            return Path(f"/proc/{pid}/cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return ""

    def stream(self, headers) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """An answer under way: its first chunk has come, the engine keeps the second until `Engine.go_on`."""
        Engine.go_on.clear()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", "/v1/stream", headers=headers)
        answer = connection.getresponse()
        assert answer.read(3) == b"one"
        return connection, answer

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


@contextlib.contextmanager
def serving(folder: Path, header_timeout: int = 10, **variables) -> Iterator[Gateway]:
    """A gateway whose engine runs; `header_timeout` in seconds takes the place of the site's own."""
    http_port, https_port = free_port(), free_port()
    ports = {"glm_vllm_overlay_api_port": http_port, "glm_vllm_overlay_https_port": https_port}
    rendered = render(**{"glm_vllm_overlay_http": "loopback"} | ports | variables)
    assert "client_header_timeout 10s;" in rendered.site
    rendered.site = rendered.site.replace("header_timeout 10s;", f"header_timeout {header_timeout}s;")
    with Gateway(folder, rendered, http_port, https_port) as running:
        engine = UnixServer(str(running.socket), Engine)
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        try:
            yield running
        finally:
            Engine.go_on.set()
            engine.shutdown()


@pytest.fixture(scope="module")
def gateway(keys):
    """A gateway with the role's defaults; its rate is out of these tests' way."""
    with serving(keys, glm_vllm_overlay_rate_limit=1000) as running:
        yield running


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
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
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


ODD = [
    "//v1/models",
    "/v1//models",
    "/v1%2fmodels",
    "/v1/%6dodels",
    "/v1/..%2fhealth",
    "/v1/./models",
    "/v1/../metrics",
    "/metrics/../health",
    "/metrics/%2e%2e/health",
    "/health/",
    "/health;/v1/models",
    "/v1\\models",
    "/V1/models",
    "/v1",
    "/v1/models/",
    "/",
    "/tokenize",
    "/detokenize",
    "/docs",
    "/openapi.json",
    "/version",
    "/pooling",
    "/invocations",
    "/reset_prefix_cache",
    "/collective_rpc",
]


@pytest.mark.parametrize("path", ODD)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_engine_gets_no_path_with_two_meanings(gateway, path, method):
    """Without a key each is refused like any other; with one it leads nowhere. None comes to the engine."""
    assert gateway.ask(path, method=method)[0] == 401
    status, _, body = gateway.ask(path, {"x-api-key": KEY}, method)
    assert status == 404 and json.loads(body)["error"]["code"] == "unknown_path"


@pytest.mark.parametrize("path", ["/v1/responses/resp_0-1:2.a", "/v1/a/b/c", "/v1/models?a=/../b//c%2f"])
def test_plain_paths_come_through_as_they_are(gateway, path):
    """The rule has room for what the API's paths are made of, and does not look at the query."""
    status, _, body = gateway.ask(path, {"x-api-key": KEY})
    assert status == 200 and json.loads(body)["path"] == path


@pytest.mark.parametrize("path", [f"/v1/models?key={KEY}", f"/v1/models?api_key={KEY.upper()}", f"/v1/{KEY}"])
@pytest.mark.parametrize("headers", [{}, {"x-api-key": KEY}])
def test_a_key_in_the_address_opens_nothing_and_is_not_logged(gateway, path, headers):
    """It is told so, and neither log shows it."""
    status, _, body = gateway.ask(path, headers)
    assert status == 400 and json.loads(body)["error"]["code"] == "key_in_address" and KEY not in body
    time.sleep(0.1)
    assert KEY not in "".join(file.read_text().lower() for file in (gateway.folder / "logs").iterdir())


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
    _, answer = gateway.stream({"x-api-key": KEY})
    Engine.go_on.set()
    assert answer.read() == b"two"


OPENAI = {"Authorization": f"Bearer {KEY}", "OpenAI-Organization": "me"}
ANTHROPIC = {"x-api-key": KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "tools"}


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/chat/completions", OPENAI),
        ("/v1/responses", OPENAI),
        ("/v1/messages", ANTHROPIC),
        ("/v1/messages", OPENAI),
    ],
)
def test_what_clients_send_and_read(gateway, path, headers, secure):
    """Body and headers come to the engine as they were sent, but for the key; each event comes when it was made."""
    if secure:
        connection = http.client.HTTPSConnection("127.0.0.1", gateway.https, timeout=10, context=trust(gateway.folder))
    else:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
    body = json.dumps({"model": "m", "stream": True, "text": "größer \N{SNOWMAN}"}).encode()
    first, second = (text.encode() for text in STREAMS[path])
    Engine.go_on.clear()
    connection.request("POST", path, body, headers | {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.getheader("Content-Type") == "text/event-stream"
    assert answer.read(len(first)) == first
    Engine.go_on.set()
    assert answer.read() == second
    got, text = Engine.asked
    assert text == body
    assert {name: got.get(name) for name in headers if name not in ("Authorization", "x-api-key")} == {
        name: value for name, value in headers.items() if name not in ("Authorization", "x-api-key")
    }
    assert KEY not in str(got)


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
    status, headers, body = gateway.ask("/v1/busy", {"x-api-key": KEY})
    assert status == 503 and "Retry-After" not in headers and json.loads(body)["path"] == "/v1/busy"


@pytest.mark.parametrize("socket_left", [False, True])
def test_engine_away_is_503_with_retry_after(tmp_path, socket_left):
    """No socket, and a socket that nobody answers: clients and load balancers are told to come back."""
    add(Store(Paths(tmp_path)), "laptop", KEY)
    port = free_port()
    ports = {"glm_vllm_overlay_api_port": port, "glm_vllm_overlay_https_port": free_port()}
    with Gateway(tmp_path, render(glm_vllm_overlay_http="loopback", **ports), port) as running:
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
    rendered = render(
        glm_vllm_overlay_api_port=port, glm_vllm_overlay_https_port=free_port(), glm_vllm_overlay_http="loopback"
    )
    rendered.site = rendered.site.replace("127.0.0.0/8 1;", "127.0.0.1/32 1;")
    rendered.site = rendered.site.replace("10.0.0.0/8 1;", "127.0.0.2/32 1;", 1)
    with Gateway(tmp_path, rendered, port) as running:
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
    ports = {"glm_vllm_overlay_api_port": port, "glm_vllm_overlay_https_port": free_port()}
    with Gateway(tmp_path, render(glm_vllm_overlay_http="loopback", **ports), port) as running:
        for headers in ({}, {"x-api-key": ""}, {"x-api-key": KEY}, {"Authorization": "Bearer "}):
            assert running.ask("/v1/models", headers)[0] == 401


SECURE, SECURE6 = "8443 ssl", "[::]:8443 ssl ipv6only=on"


@pytest.mark.parametrize(
    ("http", "ipv6", "listens"),
    [
        ("lan", {}, ["8888", SECURE]),
        ("lan", {"ipv6": []}, ["8888", SECURE, "[::]:8888 ipv6only=on", SECURE6]),
        ("loopback", {}, ["127.0.0.1:8888", SECURE]),
        ("loopback", {"ipv6": []}, ["127.0.0.1:8888", SECURE, "[::1]:8888 ipv6only=on", SECURE6]),
        ("off", {}, [SECURE]),
        ("off", {"ipv6": []}, [SECURE, SECURE6]),
    ],
)
def test_who_reaches_the_port(http, ipv6, listens, tmp_path):
    """The door is where glm_vllm_overlay_http says, and nginx accepts each rendering."""
    rendered = render(glm_vllm_overlay_http=http, ansible_facts={"lo": ipv6})
    assert re.findall(r"^\s*listen (.*);$", rendered.site, re.MULTILINE) == listens
    add(Store(Paths(tmp_path)), "laptop", KEY)
    for port in ("8888", "8443"):
        rendered.site = re.sub(rf"\b{port}\b", str(free_port()), rendered.site)
    assert not Gateway(tmp_path, rendered, 0).test()


# ---- HTTPS -----------------------------------------------------------------------------------------
def trust(folder: Path) -> ssl.SSLContext:
    """A client that knows the head's authority."""
    return ssl.create_default_context(cafile=folder / "etc/glm-vllm/tls/ca.crt")


def ask_securely(gateway: Gateway, headers: dict[str, str], context: ssl.SSLContext) -> int:
    connection = http.client.HTTPSConnection("127.0.0.1", gateway.https, timeout=10, context=context)
    connection.request("GET", "/v1/models", headers=headers)
    return connection.getresponse().status


def test_https_asks_for_the_same_key(gateway):
    """A client that was given ca.crt, and nothing else, is content with the certificate."""
    context = trust(gateway.folder)
    assert ask_securely(gateway, {"x-api-key": KEY}, context) == 200
    assert ask_securely(gateway, {}, context) == 401
    with pytest.raises(ssl.SSLCertVerificationError):
        ask_securely(gateway, {"x-api-key": KEY}, ssl.create_default_context())


@pytest.mark.parametrize(
    ("version", "ciphers", "passes"),
    [
        (ssl.TLSVersion.TLSv1_3, "DEFAULT", True),
        (ssl.TLSVersion.TLSv1_2, "DEFAULT", True),
        (ssl.TLSVersion.TLSv1_2, "ECDHE+AESCCM:ECDHE+AES:!AESGCM", False),
        (ssl.TLSVersion.TLSv1_1, "ALL:@SECLEVEL=0", False),
        (ssl.TLSVersion.TLSv1, "ALL:@SECLEVEL=0", False),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tls_from_1_2_on(gateway, version, ciphers, passes):
    """Older versions, and ciphers that do not authenticate what they encrypt, find nobody."""
    context = trust(gateway.folder)
    context.minimum_version = context.maximum_version = version
    context.set_ciphers(ciphers)
    if passes:
        assert ask_securely(gateway, {"x-api-key": KEY}, context) == 200
    else:
        with pytest.raises(ssl.SSLError):
            ask_securely(gateway, {"x-api-key": KEY}, context)
    assert gateway.ask("/health")[0] == 200


def test_plain_http_on_the_https_port_is_told_so(gateway):
    """A sentence instead of nginx's page."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.https, timeout=10)
    connection.request("GET", "/v1/models", headers={"x-api-key": KEY})
    answer = connection.getresponse()
    assert answer.status == 400 and json.loads(answer.read())["error"]["code"] == "https_only"


def test_a_renewal_drops_nobody(tmp_path):
    """A running answer over the old certificate comes to its end; the next connection sees the new one."""
    add(Store(Paths(tmp_path)), "laptop", KEY)
    with serving(tmp_path) as gateway:
        context = trust(tmp_path)
        Engine.go_on.clear()
        connection = http.client.HTTPSConnection("127.0.0.1", gateway.https, timeout=10, context=context)
        connection.request("GET", "/v1/stream", headers={"x-api-key": KEY})
        answer = connection.getresponse()
        assert answer.read(3) == b"one"
        before = connection.sock.getpeercert()["serialNumber"] if connection.sock else None
        certs.Certificate(Paths(tmp_path)).make({"IP:127.0.0.1"})
        gateway.reload()
        with socket.create_connection(("127.0.0.1", gateway.https)) as plain:
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
                assert secure.getpeercert()["serialNumber"] != before
        assert ask_securely(gateway, {"x-api-key": KEY}, context) == 200
        Engine.go_on.set()
        assert answer.read() == b"two"


# ---- keys that come and go --------------------------------------------------------------------------
def test_keys_come_and_go_by_reload(tmp_path):
    """A new key opens and a revoked one does not, from the reload on; an answer under way ends with the patience."""
    store = Store(Paths(tmp_path))
    add(store, "laptop", KEY)
    with serving(tmp_path, glm_vllm_overlay_reload_timeout=2) as gateway:
        assert gateway.ask("/v1/models", {"x-api-key": OTHER})[0] == 401
        add(store, "phone", OTHER)
        gateway.reload()
        assert gateway.ask("/v1/models", {"x-api-key": OTHER})[0] == 200
        _, answer = gateway.stream({"x-api-key": KEY})
        revoke(store, "laptop")
        gateway.reload()
        began = time.monotonic()
        assert gateway.ask("/v1/models", {"x-api-key": KEY})[0] == 401
        assert gateway.ask("/v1/models", {"x-api-key": OTHER})[0] == 200
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
        assert 1 < time.monotonic() - began < 5


# ---- one client among others ------------------------------------------------------------------------
@pytest.fixture
def narrow(tmp_path):
    """A gateway with two keys and small limits."""
    for name, key in (("laptop", KEY), ("phone", OTHER)):
        add(Store(Paths(tmp_path)), name, key)
    with serving(tmp_path, glm_vllm_overlay_rate_limit=2, glm_vllm_overlay_connection_limit=2) as running:
        yield running


def test_too_many_requests_a_second(narrow):
    """Past rate and burst one key is told to wait; the other, and /health, are not touched."""
    statuses = [narrow.ask("/v1/models", {"x-api-key": KEY}) for _ in range(12)]
    passed = [status for status, *_ in statuses].count(200)
    assert 5 <= passed <= 7 and statuses[0][0] == 200
    status, headers, body = statuses[-1]
    assert status == 429 and headers["Retry-After"] == "1"
    assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
    assert narrow.ask("/v1/models", {"Authorization": f"Bearer {OTHER}"})[0] == 200
    assert all(narrow.ask("/health")[0] == 200 for _ in range(10))


def test_too_many_at_a_time(narrow):
    """A third answer of one key waits outside while two run; another key's does not."""
    running = [narrow.stream({"x-api-key": KEY}) for _ in range(2)]
    assert narrow.ask("/v1/models", {"Authorization": f"Bearer {KEY}"})[0] == 429
    assert narrow.ask("/v1/models", {"x-api-key": OTHER})[0] == 200
    Engine.go_on.set()
    assert [answer.read() for _, answer in running] == [b"two", b"two"]
    time.sleep(0.6)  # half a second a request, and the slots are free again
    assert narrow.ask("/v1/models", {"x-api-key": KEY})[0] == 200


def test_a_client_that_dribbles_is_let_go(tmp_path):
    """Many connections that never finish their request: others are served meanwhile, and these end."""
    add(Store(Paths(tmp_path)), "laptop", KEY)
    with serving(tmp_path, header_timeout=2) as gateway:
        slow = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(100)]
        for each in slow:
            each.sendall(b"GET /v1/models HTTP/1.1\r\nHost: head\r\nX-")
        assert gateway.ask("/v1/models", {"x-api-key": KEY})[0] == 200
        began = time.monotonic()
        for each in slow:
            each.settimeout(20)
            each.recv(4096)  # ends, or says 408
        assert time.monotonic() - began < 8
        assert gateway.ask("/v1/models", {"x-api-key": KEY})[0] == 200
