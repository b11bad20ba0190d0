"""The doors from another address of the twin's networks, by HTTP and HTTPS: what has to stay outside does, and the pair
answers all the while."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import bed
import pair
import pytest

HEAD, NODES = f"{bed.NET}.11", {bed.HEAD: f"{bed.NET}.11", bed.WORKER: f"{bed.NET}.12"}
ENGINE, STATE, RENDEZVOUS, RAY = (8000, 8080), (8890,), (29521,), (6379, 8265, 10001)


@pytest.fixture(autouse=True, scope="module")
def untouched() -> Iterator[None]:
    """After all of it both engines go on with the start that they had, and answer as before."""
    with pair.service_untouched():
        yield


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The head's ca.crt, as a client would have it."""
    file = tmp_path_factory.mktemp("tls") / "ca.crt"
    file.write_text(bed.on(bed.HEAD, "cat", "/etc/glm-vllm/tls/ca.crt"))
    return file


def connect(port: int, address: str = HEAD, timeout: float = 5) -> socket.socket:
    """A connection from the controller's network; OSError when nobody takes it."""
    with bed.controller_network():
        return socket.create_connection((address, port), timeout)


def ask(
    path: str, headers: dict[str, str], trust: ssl.SSLContext | None, method: str = "GET", body: bytes = b""
) -> tuple[int, str]:
    """Status and text of one request, with the path as it stands; over TLS where `trust` is given."""
    connection = http.client.HTTPConnection(HEAD, timeout=30)
    plain = connect(8443 if trust else 8888)
    connection.sock = trust.wrap_socket(plain, server_hostname=HEAD) if trust else plain
    connection.request(method, path, body or None, headers)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


@pytest.fixture(params=["http", "https"])
def trust(request: pytest.FixtureRequest, authority: Path) -> ssl.SSLContext | None:
    """Each door in its turn."""
    return ssl.create_default_context(cafile=authority) if request.param == "https" else None


def test_a_key_opens_both_doors(trust: ssl.SSLContext | None) -> None:
    """Fails when a client with ca.crt and a key is refused."""
    for headers in ({"Authorization": f"Bearer {bed.api_key()}"}, {"x-api-key": bed.api_key()}):
        status, text = ask("/v1/models", headers, trust)
        assert status == 200 and bed.MODEL in text


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/chat/completions", "/tokenize", "/docs", "//v1/models", "/v1%2fmodels"]
)
def test_wrong_keys(trust: ssl.SSLContext | None, path: str) -> None:
    """Fails when no key, a wrong one, or one in another case opens anything."""
    key = bed.api_key()
    for headers in ({}, {"x-api-key": "0" * 64}, {"x-api-key": key.upper()}, {"Authorization": key}, {"Cookie": key}):
        assert ask(path, headers, trust)[0] == 401


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/v1%2fmodels", "/v1/..%2fmetrics", "/metrics/../v1/models", "/tokenize", "/docs", "/openapi.json"],
)
def test_paths_with_two_meanings(trust: ssl.SSLContext | None, path: str) -> None:
    """Fails when the engine is asked for what the gateway did not read."""
    status, text = ask(path, {"x-api-key": bed.api_key()}, trust)
    assert status == 404 and json.loads(text)["error"]["code"] == "unknown_path"


def test_a_key_in_the_address(trust: ssl.SSLContext | None) -> None:
    """Fails when it opens something, or a log keeps it."""
    key = bed.api_key()
    for path in (f"/v1/models?api_key={key}", f"/v1/models/{key}"):
        assert ask(path, {}, trust)[0] == 400
    found = bed.on(bed.HEAD, "sh", "-c", "cat /var/log/nginx/*; journalctl --unit nginx --output=cat")
    assert key not in found and "(an address that holds a key)" in found


def test_a_body_past_the_limit(trust: ssl.SSLContext | None) -> None:
    """Fails when the engine would have to take it."""
    headers = {"x-api-key": bed.api_key(), "Content-Length": str(257 << 20)}
    status, text = ask("/v1/chat/completions", headers, trust, "POST")
    assert status == 413 and json.loads(text)["error"]["code"] == "request_too_large"


def test_a_key_comes_and_goes(trust: ssl.SSLContext | None) -> None:
    """Fails when a reload does not make a key count, or a revoked one opens; the log has its name and not the key."""
    key = bed.on(bed.HEAD, "glm-vllm", "key", "new", "guest", "--reload").strip()
    try:
        pair.wait_for(lambda: ask("/v1/models", {"x-api-key": key}, trust)[0] == 200, 5, "the new key opens")
    finally:
        bed.on(bed.HEAD, "glm-vllm", "key", "revoke", "guest", "--reload")
    pair.wait_for(lambda: ask("/v1/models", {"x-api-key": key}, trust)[0] == 401, 5, "the revoked key is shut out")
    logs = bed.on(
        bed.HEAD, "sh", "-c", "cat /var/log/nginx/* /etc/nginx/glm-vllm/* /etc/glm-vllm/api-keys; journalctl -b"
    )
    assert re.search(r' guest \[[^]]+\] "GET /v1/models" 200', logs)
    assert key not in logs


def test_dribbling_clients(trust: ssl.SSLContext | None) -> None:
    """Fails when clients that never finish their request keep another one out."""
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            slow = stack.enter_context(connect(8443 if trust else 8888))
            if not trust:
                slow.sendall(b"GET /v1/models HTTP/1.1\r\nX-")
        began = time.monotonic()
        assert ask("/v1/models", {"x-api-key": bed.api_key()}, trust)[0] == 200
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("version", ["TLSv1", "TLSv1_1"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_tls(authority: Path, version: str) -> None:
    """Fails when something older than TLS 1.2 is spoken."""
    old = ssl.create_default_context(cafile=authority)
    old.minimum_version = old.maximum_version = ssl.TLSVersion[version]
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError):
        ask("/v1/models", {"x-api-key": bed.api_key()}, old)


@pytest.mark.parametrize("address", NODES.values(), ids=list(NODES))
@pytest.mark.parametrize("port", [*ENGINE, *STATE, *RENDEZVOUS, *RAY])
def test_ports_that_are_not_for_clients(address: str, port: int) -> None:
    """Fails when the engine, the state service, the rendezvous or Ray can be reached past the gateway."""
    with pytest.raises(OSError):
        connect(port, address, timeout=1)


def test_a_renewal(authority: Path) -> None:
    """Fails when the timer's unit may not do what it has to: a lost key is a new certificate, and nginx shows it."""
    bed.on(bed.HEAD, "rm", "/etc/glm-vllm/tls/server.key")
    bed.on(bed.HEAD, "systemctl", "start", "glm-vllm-cert.service")
    serial = bed.on(bed.HEAD, "openssl", "x509", "-noout", "-serial", "-in", "/etc/glm-vllm/tls/server.crt")
    trust = ssl.create_default_context(cafile=authority)

    def shown() -> str:
        with connect(8443) as plain, trust.wrap_socket(plain, server_hostname=HEAD) as secure:
            return secure.getpeercert()["serialNumber"]

    # nginx begins its reload at the signal, and answers with the old certificate until it has ended
    pair.wait_for(lambda: serial.strip().removeprefix("serial=") == shown(), 10, "the new certificate is shown")
    assert bed.on(bed.HEAD, "systemctl", "is-active", "glm-vllm-cert.timer").strip() == "active"


@pytest.mark.parametrize("node", pair.NODES)
def test_units_are_shut(node: str) -> None:
    """Fails when a unit as it runs is further open than the one that was rendered."""
    for unit in ("glm-vllm-watch", "glm-vllm-guard", *(["nginx"] if node == bed.HEAD else [])):
        said = bed.on(node, "systemd-analyze", "security", "--no-pager", f"{unit}.service")
        assert float(re.search(r"exposure level for \S+: ([\d.]+)", said)[1]) < 4.0


def test_memory_that_is_short_is_said() -> None:
    """Fails when the guard does not see the node's memory, or ends an engine that it should only warn of."""
    node = bed.WORKER
    try:
        bed.twin("meminfo", node, "3000000")
        said = "journalctl --unit glm-vllm-guard --output=cat --no-pager | tail -n 3"
        warned = "2.9 GiB are available, less than the reserve of 4.0; largest: "
        pair.wait_for(lambda: warned in bed.on(node, "sh", "-c", said), 10, "the guard warns")
    finally:
        bed.twin("meminfo", node, "119500000")
    pair.wait_for(lambda: "are available again" in bed.on(node, "sh", "-c", said), 10, "the guard is content")
