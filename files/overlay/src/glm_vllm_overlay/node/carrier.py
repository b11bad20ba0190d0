"""Ways in which one file comes from a source into the folder of what is arriving: one class a scheme.

`bring(name, want, part)` ends when the source has delivered, and raises Trouble otherwise. What has arrived in `part`
stays and is gone on with. `stop()` may be called from another thread: it makes a `bring` that hangs end.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import glm_vllm_overlay

FICLONE = 0x40049409
PASSING = ("busy", "network", "stalled")


class Trouble(Exception):
    """A file could not be brought. `kind`: absent, denied, busy, network, stalled, disk or other; `wait`: seconds."""

    def __init__(self, kind: str, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.kind, self.wait = kind, wait

    @property
    def passing(self) -> bool:
        """Whether trying again can help."""
        return self.kind in PASSING


def environment(proxy: str) -> dict[str, str]:
    """What a child gets: no ambient proxy, cache or token of whoever runs this, only what the job says."""
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "SSL_CERT_FILE", "TMPDIR")}
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return kept | ({name: proxy for name in names} if proxy else {})


class Child:
    """A process that can be ended from another thread."""

    process: subprocess.Popen[str] | None = None
    stopped = False

    def prepare(self) -> None:
        """What takes time before the first byte can be expected."""

    def stop(self) -> None:
        """End the process, at once."""
        self.stopped = True
        if self.process and self.process.poll() is None:
            self.process.kill()


class Hub(Child):
    """{"repo", "revision", "endpoint", "token", "proxy"}: a repository of the hub, or of what speaks like it."""

    def __init__(self, origin: dict[str, Any]) -> None:
        self.origin = origin

    def prepare(self) -> None:
        """Start the child process when there is none, and wait until it has loaded the client."""
        self.stopped = False
        if self.process is not None and self.process.poll() is None:
            return
        code = Path(glm_vllm_overlay.__file__).parent.parent  # a folder, or the zipapp
        given = environment(self.origin.get("proxy", "")) | {"PYTHONPATH": str(code), "HF_HUB_DISABLE_XET": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from glm_vllm_overlay.node.hub import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=given,
        )
        self.ask({"do": "nothing"})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request to the child process."""
        assert self.process
        fields = {key: self.origin.get(key) or "" for key in ("repo", "revision", "endpoint", "token")}
        try:
            assert self.process.stdin
            assert self.process.stdout
            self.process.stdin.write(json.dumps(request | fields) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self.process.kill()
            self.process.wait()
            raise Trouble("stalled" if self.stopped else "network", "the hub's client ended without an answer")
        answer = json.loads(line)
        if not answer["ok"]:
            raise Trouble(answer["kind"], answer["message"], answer["wait"])
        return answer

    def bring(self, name: str, want: dict[str, Any], part: Path) -> None:
        self.ask({"do": "get", "name": name, "want": want, "to": str(part)})

    def listing(self) -> dict[str, Any]:
        """The repository's files as wanted files."""
        self.prepare()
        return self.ask({"do": "list"})["files"]


class Tool(Child, ABC):
    """A program that brings one file and ends."""

    def __init__(self, origin: dict[str, Any]) -> None:
        self.origin = origin
        self.url = origin["url"].rstrip("/")

    @abstractmethod
    def command(self, name: str, part: Path) -> list[str]:
        """The command line."""

    @abstractmethod
    def kind(self, code: int, said: str) -> str:
        """The kind of trouble that an exit code means."""

    def variables(self) -> dict[str, str]:
        """Its environment, which is where a password goes: a command line can be read by everybody."""
        return environment(self.origin.get("proxy", ""))

    def run(self, command: list[str]) -> str:
        """Run it to its end; returns what it printed."""
        self.stopped = False
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.variables(),
        )
        out, err = self.process.communicate()
        if self.process.returncode == 0:
            return out
        if self.stopped:
            raise Trouble("stalled", "it was ended")
        said = (err.strip().splitlines() or [f"{command[0]} ended with {self.process.returncode}"])[0]
        raise Trouble("disk" if "No space left" in err else self.kind(self.process.returncode, said), said)

    def bring(self, name: str, want: dict[str, Any], part: Path) -> None:
        if part.exists() and part.stat().st_size > want["size"]:
            part.unlink()
        if part.exists() and part.stat().st_size == want["size"]:
            return
        self.run(self.command(name, part))


def files_of(text: str) -> dict[str, Any]:
    """The files that a source's manifest.json names; raises Trouble."""
    try:
        return json.loads(text)["files"]
    except (ValueError, KeyError, TypeError):
        raise Trouble("other", "its manifest.json cannot be read: make one with `glm-vllm manifest`") from None


class Http(Tool):
    """{"url": "https://…/folder/", "proxy"}: files below an address, by curl."""

    def kind(self, code: int, said: str) -> str:
        if code == 22:  # an HTTP status; curl itself has tried the passing ones again, for as long as they asked
            return {"401": "denied", "403": "denied", "404": "absent", "410": "absent"}.get(said[-3:], "busy")
        return "disk" if code == 23 else "network"

    def bring(self, name: str, want: dict[str, Any], part: Path) -> None:
        try:
            super().bring(name, want, part)
        except Trouble:
            if self.process and self.process.returncode == 33:  # a server that cannot go on in the middle
                part.unlink(missing_ok=True)
            raise

    def command(self, name: str, part: Path) -> list[str]:
        return [
            "curl", "--silent", "--show-error", "--fail", "--location", "--continue-at", "-", "--connect-timeout", "20",
            "--retry", "5", "--output", str(part), f"{self.url}/{quote(name)}",
        ]  # fmt: skip

    def listing(self) -> dict[str, Any]:
        """The files of the manifest that lies at the address."""
        return files_of(self.run(self.command("manifest.json", Path("-"))))


class Rsync(Tool):
    """{"url": "rsync://…/module/", "password"}: an rsync daemon.

    The file is appended to, so a torn copy costs nothing twice; its content is proved by SHA-256 afterwards, which is
    more than rsync's own check of what it appends to.
    """

    def kind(self, code: int, said: str) -> str:
        return {5: "denied", 23: "absent"}.get(code, "network")

    def variables(self) -> dict[str, str]:
        return super().variables() | {"RSYNC_PASSWORD": self.origin.get("password", "")}

    def command(self, name: str, part: Path) -> list[str]:
        return ["rsync", "--append", "--copy-links", "--contimeout=15", "--timeout=60", f"{self.url}/{name}", str(part)]

    def listing(self) -> dict[str, Any]:
        """The files of the manifest that lies in the module."""
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "manifest.json")
            self.run(self.command("manifest.json", target))
            return files_of(target.read_text(encoding="utf-8"))


def clone(source: Path, target: Path) -> bool:
    """Have the file system share the bytes of a copy (btrfs, XFS); False where it cannot."""
    with source.open("rb") as origin, target.open("wb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), FICLONE, origin.fileno())
        except OSError:
            return False
    return True


def share(source: Path, target: Path) -> None:
    """Take a file of this machine: shared bytes where the file system can, else a second name, else a copy."""
    source = source.resolve()
    target.unlink(missing_ok=True)
    if clone(source, target):
        return
    target.unlink()
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        shutil.copyfile(source, target)


class Folder(Child):
    """{"path"}: a folder of this machine, by sharing bytes or by copying."""

    def __init__(self, origin: dict[str, Any]) -> None:
        self.top = Path(origin["path"])

    def bring(self, name: str, want: dict[str, Any], part: Path) -> None:
        try:
            if not clone(self.top / name, part):
                shutil.copyfile(self.top / name, part)
        except OSError as error:
            kind = {errno.ENOSPC: "disk", errno.ENOENT: "absent"}.get(error.errno or 0, "other")
            raise Trouble(kind, f"{error.filename or name}: {error.strerror}") from None


def through(origin: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """An origin with what the job says for all: token, proxy and the hub's address."""
    return origin | {key: job.get(key, "") for key in ("token", "proxy", "endpoint")}


def make(origin: dict[str, Any]) -> Hub | Http | Rsync | Folder:
    """The carrier of an origin, by its scheme."""
    if origin.get("repo"):
        return Hub(origin)
    if origin.get("path"):
        return Folder(origin)
    return (Rsync if urlsplit(origin["url"]).scheme == "rsync" else Http)(origin)


def label(origin: dict[str, Any]) -> str:
    """An origin in a sentence, without secrets."""
    if origin.get("repo"):
        return f"{origin['repo']}@{(origin.get('revision') or '')[:8]}"
    if origin.get("path"):
        return str(origin["path"])
    parts = urlsplit(origin["url"])
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
