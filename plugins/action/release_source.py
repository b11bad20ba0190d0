"""Pack what this project puts into a release and name the release after it.

Runs on the controller. A release's id is a hash of everything that decides its content: the lock, the interpreter
version it is made for, and what is installed of the packages beside the lock. Equal inputs give an equal archive, byte
for byte, on every controller.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tempfile
from pathlib import Path

from ansible import constants as C
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

# What a package is built from. Its README, benchmarks and locks make no other release.
PARTS = ("pyproject.toml", "csrc", "src")
SKIPPED_DIRECTORIES = {"__pycache__", "build", "dist", ".pytest_cache", ".ruff_cache"}
ID_LENGTH = 12


def source_files(root: Path) -> list[Path]:
    """Files that the package in root is built from, sorted; caches and build output left out."""
    found = [root / part for part in PARTS if (root / part).is_file()]
    for directory, names, files in (step for part in PARTS for step in os.walk(root / part)):
        names[:] = sorted(n for n in names if n not in SKIPPED_DIRECTORIES and not n.endswith(".egg-info"))
        found += [Path(directory) / f for f in files if not f.endswith((".pyc", ".so"))]
    return sorted(found)


def pack(packages: dict[str, Path]) -> bytes:
    """Uncompressed tar of the named package folders; fixed owners, modes and times make equal input equal bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(packages):
            for path in source_files(packages[name]):
                content = path.read_bytes()
                info = tarfile.TarInfo(f"{name}/{path.relative_to(packages[name]).as_posix()}")
                info.size, info.mode, info.mtime = len(content), 0o644, 0
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def release_id(archive: bytes, *texts: str) -> str:
    """First hex digits of the SHA-256 over the archive and the texts (lock content, interpreter)."""
    digest = hashlib.sha256(archive)
    for text in texts:
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()[:ID_LENGTH]


class ActionModule(ActionBase):
    """Arguments: lock (path), packages (name -> folder), python (text). Returns id, archive (path), lock_sha256."""

    _requires_connection = False
    _VALID_ARGS = frozenset(("lock", "packages", "python"))

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        lock = Path(self._task.args["lock"])
        packages = {name: Path(folder) for name, folder in self._task.args["packages"].items()}
        for path in (lock, *(folder / "pyproject.toml" for folder in packages.values())):
            if not path.is_file():
                raise AnsibleActionFail(f"{path} is missing: run from a complete clone of the repository.")
        lock_bytes = lock.read_bytes()
        archive = pack(packages)
        identity = release_id(archive, lock_bytes.decode(), str(self._task.args["python"]))
        # Ansible's own folder of this run, which nobody else can write to and which goes with the run.
        target = Path(C.DEFAULT_LOCAL_TMP) / f"glm-vllm-release-{identity}.tar"
        if not target.exists():  # another host's task may write the same bytes now
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
            with os.fdopen(handle, "wb") as stream:
                stream.write(archive)
            os.replace(name, target)
        result.update(
            changed=False, id=identity, archive=str(target), lock_sha256=hashlib.sha256(lock_bytes).hexdigest()
        )
        return result
