"""Reading and writing the small files of a node."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from glm_vllm_overlay.node.errors import Unusable


def read_json(path: Path) -> dict:
    """The JSON object in `path`.

    Raises Unusable with one sentence when it is missing, unreadable or not an object.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unusable(f"{path} does not exist: run site.yml for this node") from None
    except PermissionError:
        raise Unusable(f"{path} cannot be read by this user: run the command as root") from None
    except (OSError, ValueError) as error:
        raise Unusable(f"{path} cannot be used ({error}): run site.yml for this node") from None
    if not isinstance(document, dict):
        raise Unusable(f"{path} does not hold a JSON object: run site.yml for this node")
    return document


def read_json_if_there(path: Path) -> dict:
    """The JSON object in `path`, or {} when it is missing or damaged."""
    try:
        return read_json(path)
    except Unusable:
        return {}


def read_env(path: Path) -> dict[str, str]:
    """The KEY=value lines of an environment file, as systemd reads the plain ones that we write; {} when missing."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.lstrip().startswith("#"))
    return {key.strip(): value.strip().strip('"') for key, value in pairs}


def read_line(path: Path, default: str = "") -> str:
    """The stripped text of a sysfs-like file, or `default` when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return default


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace `path` in one step: a reader sees the old text or the new one, never half of it."""
    # A name nobody can foretell, and never an existing file: root writes into the engine's own folder too.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def sha256(path: Path) -> str | None:
    """The SHA-256 of a small file in hex, or None when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other commands that lock this folder out until the end of the block."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
