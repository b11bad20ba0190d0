"""`glm-vllm cert`: an authority and a certificate that real TLS clients take, and when a new one is made."""

from __future__ import annotations

import datetime
import json
import socket
import ssl
import stat
import subprocess
import threading

import pytest
from glm_vllm_overlay import cli
from glm_vllm_overlay.node import certs

NAMES = ("spark-a", "spark-a.local", "192.0.2.11", "::1")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the certificate of a machine below a temporary root, seen by root."""
    monkeypatch.setenv("GLM_ROOT", str(tmp_path))
    monkeypatch.setattr(certs.os, "geteuid", lambda: 0)
    return tmp_path / "etc/glm-vllm/tls"


@pytest.fixture
def call(capsys):
    """Run `glm-vllm cert ...`; returns (exit code, its document or None, stderr)."""

    def run(*words):
        code = cli.main(["cert", "--json", *words])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return run


def handshake(folder, name: str) -> dict:
    """What a client with ca.crt sees that connects to `name`; raises ssl.SSLError when it refuses."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    here, there = socket.socketpair()

    def answer() -> None:
        try:
            server.wrap_socket(there, server_side=True).close()
        except ssl.SSLError:
            there.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with ssl.create_default_context(cafile=folder / "ca.crt").wrap_socket(here, server_hostname=name) as secure:
            return secure.getpeercert()
    finally:
        here.close()
        thread.join()


def test_clients_take_it_for_its_names_only(call, folder):
    code, document, _ = call(*NAMES)
    assert (code, document["ok"], document["changed"]) == (0, True, True)
    for name in NAMES:
        handshake(folder, name)
    for name in ("spark-b", "192.0.2.12"):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(folder, name)
    left = datetime.date.fromisoformat(document["ends"]) - datetime.datetime.now(datetime.UTC).date()
    assert left.days == 397


def test_only_root_reads_the_keys(call, folder):
    call(*NAMES)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert modes == {"ca.crt": 0o644, "ca.key": 0o600, "server.crt": 0o644, "server.key": 0o600}


def test_the_server_s_certificate_signs_no_other(call, folder):
    call(*NAMES)
    text = certs.openssl("x509", "-noout", "-text", "-in", folder / "server.crt")
    assert "CA:FALSE" in text and "TLS Web Server Authentication" in text
    text = certs.openssl("x509", "-noout", "-text", "-in", folder / "ca.crt")
    assert "CA:TRUE, pathlen:0" in text


def test_kept_while_it_fits(call, folder):
    call(*NAMES)
    before = {file: file.read_bytes() for file in folder.iterdir()}
    for words in (NAMES, NAMES[:2], ()):
        code, document, _ = call(*words)
        assert (code, document["changed"]) == (0, False)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("cause", ["a name more", "ends soon", "key of another", "key lost"])
def test_a_new_one_from_the_same_authority(call, folder, monkeypatch, cause):
    """Clients that know ca.crt notice nothing."""
    if cause == "ends soon":
        monkeypatch.setattr(certs, "DAYS", 29)
    call(*NAMES)
    monkeypatch.setattr(certs, "DAYS", 397)
    authority, before = (folder / "ca.crt").read_bytes(), (folder / "server.crt").read_bytes()
    if cause == "key of another":
        (folder / "server.key").write_bytes((folder / "ca.key").read_bytes())
    elif cause == "key lost":
        (folder / "server.key").unlink()
    code, document, _ = call(*(NAMES + ("spark.example.org",) if cause == "a name more" else ()))
    assert (code, document["changed"]) == (0, True)
    assert (folder / "ca.crt").read_bytes() == authority and (folder / "server.crt").read_bytes() != before
    for name in NAMES:
        handshake(folder, name)
    assert call()[1]["changed"] is False


def test_the_authority_does_not_end_before_what_it_signs(call, monkeypatch):
    monkeypatch.setattr(certs, "CA_DAYS", 300)
    code, document, _ = call(*NAMES)
    assert code == 1 and "ends within 397 days: move ca.crt and ca.key away" in document["message"]


def given(folder) -> None:
    """A certificate of the operator's, in the place of ours."""
    folder.mkdir(parents=True, exist_ok=True)
    files = ("-keyout", str(folder / "server.key"), "-out", str(folder / "server.crt"))
    names = ("-subj", "/CN=x", "-addext", "subjectAltName=DNS:spark-a")
    command = ["openssl", "req", "-x509", *certs.NEW_KEY, *names, *files]
    subprocess.run(command, check=True, capture_output=True)


def test_a_given_certificate_is_not_renewed(call, folder):
    given(folder)
    before = (folder / "server.crt").read_bytes()
    code, document, _ = call()
    assert code == 1 and "glm_vllm_overlay_tls_cert" in document["message"]
    assert (folder / "server.crt").read_bytes() == before


def test_and_is_replaced_when_the_inventory_names_none(call, folder):
    given(folder)
    assert call("spark-a")[1]["changed"] is True
    handshake(folder, "spark-a")


@pytest.mark.parametrize("name", ["a b", "x,DNS:evil.example.org", "-subj", "ü", "a..b", "*.example.org", "x\ny"])
def test_names_that_could_say_more(call, folder, name):
    """A name goes into openssl's configuration: nothing but host names and addresses gets there."""
    code, document, _ = call("--", name)
    assert code == 2 and "neither an address nor a host name" in document["message"]
    assert not (folder / "server.crt").exists()


def test_no_names_and_no_certificate(call):
    code, document, _ = call()
    assert code == 2 and "name the hosts" in document["message"]


def test_nothing_without_openssl(call, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, document, _ = call(*NAMES)
    assert code == 2 and "install the package openssl" in document["message"]


def test_reload_only_when_one_was_made(call, monkeypatch):
    calls = []
    monkeypatch.setattr(certs, "reload_nginx", lambda: calls.append(1) or "")
    call(*NAMES, "--reload")
    call(*NAMES, "--reload")
    assert calls == [1]
    monkeypatch.setattr(certs, "reload_nginx", lambda: "nginx was not reloaded")
    assert call("other", "--reload")[0] == 1


def test_only_root(call, monkeypatch):
    monkeypatch.setattr(certs.os, "geteuid", lambda: 1000)
    code, document, _ = call(*NAMES)
    assert code == 2 and "sudo glm-vllm cert" in document["message"]
