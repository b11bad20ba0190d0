"""A model folder on a node: what its files must be, what they were when last read, and whether all of it is right.

Beside the model's own files lie
  manifest.json    {"schema": 1, "name", "revision", "files": {path: {"size": bytes, "sha256": hex}}}, as on the peer
  .digests.json    {"schema": 1, "files": {path: [size, mtime_ns, inode, sha256]}}: what the last reading found
  .verified.json   {"schema": 1, "when", "manifest_sha256"}: every byte matched that manifest
  .partial/        what is still arriving; nothing in it counts
  .lock            held while files are brought or verified
A wanted file is {"size": bytes, "sha256": hex or null, "blob": Git's SHA-1 or null}; a null hash is learnt by reading.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from glm_vllm_overlay.node.errors import Refusal, Unusable
from glm_vllm_overlay.node.files import read_json_if_there, sha256, write_atomically

MANIFEST, FLAG, DIGESTS, PARTIAL, LOCK = "manifest.json", ".verified.json", ".digests.json", ".partial", ".lock"
CHUNK = 4 << 20
HEX = re.compile(r"[0-9a-f]{64}")

Wanted = dict[str, dict[str, Any]]


def text_of(document: dict[str, Any]) -> str:
    """JSON in a form that is byte-identical wherever it is written."""
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def manifest_text(name: str, revision: str, files: Wanted) -> str:
    """The text of manifest.json; every file needs its sha256."""
    entries = {path: {"size": entry["size"], "sha256": entry["sha256"]} for path, entry in files.items()}
    return text_of({"schema": 1, "name": name, "revision": revision, "files": entries})


def checked_files(files: Any, origin: str) -> Wanted:
    """The wanted files of a listing or manifest, completed with null hashes.

    Raises Unusable naming `origin` when it is empty, has no config.json, or holds a path that leaves the folder.
    """
    if not isinstance(files, dict) or not files:
        raise Unusable(f"{origin} names no files: this revision is empty or its upload is not complete")
    wanted: Wanted = {}
    for name, entry in files.items():
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or any(part.startswith(".") for part in pure.parts):
            raise Unusable(f"{origin} names {name!r}, which does not belong into a model folder")
        size, digest = entry.get("size"), entry.get("sha256")
        if not isinstance(size, int) or size < 0 or (digest is not None and not HEX.fullmatch(str(digest))):
            raise Unusable(f"{origin} has no usable size and SHA-256 for {name}")
        wanted[name] = {"size": size, "sha256": digest, "blob": entry.get("blob")}
    if "config.json" not in wanted:
        raise Unusable(f"{origin} holds no config.json: it is not a model, or its upload is not complete")
    if not any(name.endswith(".safetensors") and entry["size"] for name, entry in wanted.items()):
        raise Unusable(f"{origin} holds no weights (*.safetensors): its upload is not complete")
    return wanted


def in_index(index: Path, wanted: Wanted, origin: str) -> None:
    """Raises Unusable when the checkpoint's own index names shards that the listing lacks (a short revision)."""
    shards = set(read_json_if_there(index).get("weight_map", {}).values())
    if missing := sorted(shards - set(wanted)):
        raise Unusable(
            f"{origin} is short: model.safetensors.index.json names {len(missing)} files that it does not hold, "
            f"such as {missing[0]}"
        )


def list_folder(top: Path) -> dict[str, os.stat_result]:
    """Regular files below `top` by relative path, links followed; hidden ones, broken links and a manifest left out."""
    found = {}
    for folder, folders, names in os.walk(top, followlinks=True):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                found[str(file.relative_to(top))] = file.stat()
    found.pop(MANIFEST, None)
    return found


def folder_revision(found: dict[str, os.stat_result]) -> str:
    """40 hex digits that change when a file's name, size or time changes."""
    text = json.dumps([[name, stat.st_size, stat.st_mtime_ns] for name, stat in sorted(found.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def read(path: Path, blob_of: int | None = None, tell: Callable[[int], None] = lambda n: None) -> tuple[str, str]:
    """SHA-256 of a file and, with its size in `blob_of`, Git's name for its content ("" without).

    The pages that this brought into the cache are given back: on unified memory they stand in the engine's way.
    """
    whole = hashlib.sha256()
    blob = hashlib.sha1(b"blob %d\0" % blob_of, usedforsecurity=False) if blob_of is not None else None
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            whole.update(view[:count])
            if blob:
                blob.update(view[:count])
            tell(count)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return whole.hexdigest(), blob.hexdigest() if blob else ""


def fault(name: str, want: dict[str, Any], digest: str, blob: str) -> str:
    """Why content with these hashes is not the wanted file, or ""."""
    if want["sha256"] and digest != want["sha256"]:
        return f"{name} has other content than its SHA-256 says"
    if not want["sha256"] and want.get("blob") and blob != want["blob"]:
        return f"{name} has other content than the hub names"
    return ""


def readers() -> int:
    """Files read at once: one a core (hashing is the limit), and enough to keep an NVMe disk busy on small ones."""
    return max(2, min(16, os.cpu_count() or 2))


@dataclass
class Findings:
    """What a look at the files found. `wrong` and `unknown` are sentences by file, the digests' entries by file."""

    wrong: dict[str, str] = field(default_factory=dict)
    digests: dict[str, list[Any]] = field(default_factory=dict)
    bytes_read: int = 0
    files_read: int = 0


class Model:
    """One model folder. `full` reads every byte, otherwise only files that changed since they were last read."""

    def __init__(self, folder: Path, *, full: bool = False) -> None:
        self.folder, self.full = folder, full
        stored = read_json_if_there(folder / DIGESTS).get("files")
        self.known: dict[str, list[Any]] = stored if isinstance(stored, dict) else {}
        self.guard = threading.Lock()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against another run; raises Refusal when one is at work, Unusable without the right to."""
        try:
            lock = (self.folder / LOCK).open("a")
        except PermissionError:
            raise Unusable(f"{self.folder} cannot be written by this user: run the command as root") from None
        with lock as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refusal(f"another run is at work in {self.folder}: wait until it has ended") from None
            yield

    def manifest(self) -> dict[str, Any]:
        """The manifest in the folder, or {}."""
        return read_json_if_there(self.folder / MANIFEST)

    def look(self, name: str, want: dict[str, Any], findings: Findings, tell: Callable[[int], None]) -> None:
        """Compare one file with what it must be, and add to the findings."""
        file = self.folder / name
        try:
            stat = file.lstat()
        except OSError:
            findings.wrong[name] = f"{name} is missing"
            return
        if file.is_symlink() or not file.is_file():
            findings.wrong[name] = f"{name} is no plain file"
            return
        if stat.st_size != want["size"]:
            findings.wrong[name] = f"{name} has {stat.st_size} bytes instead of {want['size']}"
            return
        identity = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = self.known.get(name)
        if known and known[:3] == identity and want["sha256"] and not self.full:
            digest, blob = known[3], ""
        else:
            digest, blob = read(file, None if want["sha256"] else stat.st_size, tell)
            with self.guard:
                findings.bytes_read += stat.st_size
                findings.files_read += 1
        findings.digests[name] = [*identity, digest]
        if reason := fault(name, want, digest, blob):
            findings.wrong[name] = reason

    def check(self, wanted: Wanted, tell: Callable[[int], None] = lambda n: None) -> Findings:
        """Compare all files, several at once, the largest first."""
        findings = Findings()
        order = sorted(wanted, key=lambda name: (-wanted[name]["size"], name))
        with ThreadPoolExecutor(readers()) as pool:
            for done in [pool.submit(self.look, name, wanted[name], findings, tell) for name in order]:
                done.result()
        findings.wrong = dict(sorted(findings.wrong.items()))
        return findings

    def remember(self, digests: dict[str, list[Any]]) -> None:
        """Make these the readings that a later look may trust."""
        if digests != self.known:
            write_atomically(self.folder / DIGESTS, text_of({"schema": 1, "files": digests}))
            self.known = digests

    def distrust(self) -> bool:
        """Take the flag away; True when there was one."""
        there = (self.folder / FLAG).exists()
        (self.folder / FLAG).unlink(missing_ok=True)
        return there

    def vouch(self, manifest: str) -> bool:
        """Write manifest and flag, the manifest first; True when either was not so already."""
        want = hashlib.sha256(manifest.encode()).hexdigest()
        if sha256(self.folder / MANIFEST) == want == read_json_if_there(self.folder / FLAG).get("manifest_sha256"):
            return False
        write_atomically(self.folder / MANIFEST, manifest)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_atomically(self.folder / FLAG, text_of({"schema": 1, "when": now, "manifest_sha256": want}))
        return True


def changed_since_verified(folder: Path) -> str:
    """Why the files are not those that were verified, or "", in milliseconds: their bytes are not read."""
    model = Model(folder)
    flag, manifest = read_json_if_there(folder / FLAG), model.manifest()
    if not flag or flag.get("manifest_sha256") != sha256(folder / MANIFEST):
        return f"{folder} was never verified"
    for name, want in manifest.get("files", {}).items():
        try:
            stat = (folder / name).lstat()
        except OSError:
            return f"{name} is missing"
        if model.known.get(name) != [stat.st_size, stat.st_mtime_ns, stat.st_ino, want["sha256"]]:
            return f"{name} has changed since it was verified"
    return ""
