"""`glm-vllm cert`: the gateway's certificate, from a certificate authority that lives on this machine only."""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import json
import os
import re
import secrets
import ssl
import subprocess
import tempfile
from pathlib import Path

from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node.errors import Refusal, Unusable
from glm_vllm_overlay.node.files import locked, write_atomically
from glm_vllm_overlay.node.gateway import reload_nginx
from glm_vllm_overlay.node.paths import Paths

# Some systems refuse certificates that are good for longer.
DAYS = 397
CA_DAYS = 3650
RENEW_DAYS = 30
DAY = 86400
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
CA_EXTENSIONS = ("basicConstraints=critical,CA:TRUE,pathlen:0", "keyUsage=critical,keyCertSign,cRLSign")
LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST = re.compile(rf"{LABEL}(\.{LABEL})*")


def openssl(*words: str | Path) -> str:
    """Standard output of an openssl command; raises Refusal with its last words when it fails."""
    try:
        done = subprocess.run(["openssl", *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unusable(f"openssl cannot be run ({error.strerror}): install the package openssl") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise Refusal(f"openssl {words[0]} failed ({last}): look at {words[-1]}")
    return done.stdout


def entry(name: str) -> str:
    """One entry of subjectAltName; raises Unusable for what is neither an address nor a host name."""
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        if len(name) < 254 and HOST.fullmatch(name):
            return f"DNS:{name.lower()}"
    raise Unusable(
        f"{name!r} is neither an address nor a host name: give what clients write between https:// and :8443"
    )


class Certificate:
    """The files below `/etc/glm-vllm/tls`: `ca.crt`, `ca.key`, and the gateway's `server.crt`, `server.key`.

    Keys are root's alone (0600). A given certificate lies in the same two files and was not signed by `ca.crt`.
    """

    def __init__(self, paths: Paths) -> None:
        self.folder = paths.tls
        self.ca, self.ca_key = self.folder / "ca.crt", self.folder / "ca.key"
        self.file, self.key = self.folder / "server.crt", self.folder / "server.key"

    def own(self) -> bool:
        """Whether our authority signed the certificate, however long ago."""
        if not (self.file.exists() and self.ca.exists()):
            return False
        command = ["openssl", "verify", "-no_check_time", "-CAfile", str(self.ca), str(self.file)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def names(self) -> set[str]:
        """The entries of the certificate's subjectAltName, in the form of `entry`."""
        text = openssl("x509", "-noout", "-ext", "subjectAltName", "-in", self.file)
        found = re.findall(r"(DNS|IP Address):([^,\s]+)", text)
        return {entry(name) for _, name in found}

    def ends(self) -> datetime.datetime:
        """When the certificate ends (UTC)."""
        text = openssl("x509", "-noout", "-enddate", "-in", self.file).strip().removeprefix("notAfter=")
        return datetime.datetime.fromtimestamp(ssl.cert_time_to_seconds(text), datetime.UTC)

    def fits(self, names: set[str]) -> bool:
        """Whether it is ours, covers `names`, has its key beside it and does not end soon."""
        if not self.own() or not names <= self.names():
            return False
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.file, self.key)
        except (OSError, ssl.SSLError):
            return False
        return self.ends() - datetime.datetime.now(datetime.UTC) > datetime.timedelta(days=RENEW_DAYS)

    def make_ca(self) -> None:
        """Make the authority where there is none; raises Refusal when it ends before a new certificate would."""
        if not (self.ca.exists() and self.ca_key.exists()):
            with tempfile.TemporaryDirectory(dir=self.folder) as draft:
                key, crt = Path(draft) / "key", Path(draft) / "crt"
                name = re.sub(r"[^A-Za-z0-9.-]", "-", os.uname().nodename)
                made = ("-keyout", key, "-out", crt, "-days", str(CA_DAYS), "-subj", f"/CN=glm-vllm on {name}")
                extensions = [word for each in CA_EXTENSIONS for word in ("-addext", each)]
                openssl("req", "-x509", *NEW_KEY, *extensions, *made)
                write_atomically(self.ca_key, key.read_text(encoding="ascii"), 0o600)
                write_atomically(self.ca, crt.read_text(encoding="ascii"))
        try:
            openssl("x509", "-noout", "-checkend", str(DAYS * DAY), "-in", self.ca)
        except Refusal:
            raise Refusal(
                f"the authority {self.ca} ends within {DAYS} days: move ca.crt and ca.key away, run this again, "
                "and give clients the new ca.crt"
            ) from None

    def make(self, names: set[str]) -> None:
        """Make key and certificate for `names` (entries) and put them in place, the key first."""
        self.make_ca()
        extensions = {
            "basicConstraints": "critical,CA:FALSE",
            "keyUsage": "critical,digitalSignature",
            "extendedKeyUsage": "serverAuth",
            "subjectKeyIdentifier": "hash",
            "authorityKeyIdentifier": "keyid",
            "subjectAltName": ",".join(sorted(names)),
        }
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            draft = Path(folder)
            text = "".join(f"{key}={value}\n" for key, value in extensions.items())
            (draft / "ext").write_text(text, encoding="ascii")
            openssl("req", "-new", *NEW_KEY, "-keyout", draft / "key", "-subj", "/CN=glm-vllm", "-out", draft / "csr")
            signed = ("-CA", self.ca, "-CAkey", self.ca_key, "-set_serial", f"0x{secrets.token_hex(16)}")
            how = ("-days", str(DAYS), "-sha256", "-extfile", draft / "ext", "-out", draft / "crt")
            openssl("x509", "-req", *signed, *how, "-in", draft / "csr")
            write_atomically(self.key, (draft / "key").read_text(encoding="ascii"), 0o600)
            write_atomically(self.file, (draft / "crt").read_text(encoding="ascii"))


def ensure(certificate: Certificate, names: set[str]) -> bool:
    """Make a certificate unless the present one fits; returns whether one was made. No names: those that it has."""
    if not names:
        if not certificate.file.exists():
            raise Unusable("there is no certificate yet: name the hosts and addresses that clients use")
        if not certificate.own():
            raise Refusal("the certificate was given (glm_vllm_overlay_tls_cert): renew it there and run site.yml")
        names = certificate.names()
    if certificate.fits(names):
        return False
    certificate.make(names)
    return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`glm-vllm cert [NAME ...] [--reload]`."""
    parser.add_argument(
        "names", nargs="*", help="host names and addresses that clients use; without any, those of the present one"
    )
    parser.add_argument("--reload", action="store_true", help="reload nginx when a certificate was made")


def run(args: argparse.Namespace) -> int:
    """`glm-vllm cert`: exit 0 with a fitting certificate there, 1 for a refusal or failed reload, 2 for bad names."""
    if os.geteuid() != 0:
        raise Unusable("the certificate's key belongs to root: run `sudo glm-vllm cert`")
    certificate = Certificate(node_paths.current())
    wanted = {entry(name) for name in args.names}
    certificate.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with locked(certificate.folder):
        changed = ensure(certificate, wanted)
        ends, names = certificate.ends().date().isoformat(), sorted(certificate.names())
    if args.reload and changed and (problem := reload_nginx()):
        raise Refusal(problem)
    document = {"schema": 1, "ok": True, "changed": changed, "ends": ends, "names": names}
    print(json.dumps(document) if args.json else f"{'made' if changed else 'kept'}: {', '.join(names)}, ends {ends}")
    return 0
