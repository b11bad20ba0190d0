# SPDX-License-Identifier: Apache-2.0
"""Compare every byte of a model with its manifest, and say so in a flag file."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_verify
short_description: Verifies sizes and SHA-256 of a model's files
description:
  - Files are read in parallel. One whose size, time and inode are those of an earlier reading is not read again.
  - When every byte matches, C(manifest.json) and C(.verified.json) are written; otherwise C(.verified.json) is removed.
options:
  path: {description: Folder of the model., type: path, required: true}
  manifest: {description: What the files must be; the manifest in the folder if left out., type: dict}
  required: {description: Fail when something is missing or wrong. Check mode never does., type: bool, default: false}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Verify
  model_verify:
    path: /var/lib/glm-vllm/models/tiny/0123
    required: true
"""

RETURN = r"""
verified: {description: Whether every byte matched., type: bool, returned: always}
wrong: {description: Files that are missing or wrong., type: list, elements: str, returned: always}
reasons: {description: One sentence for each of them., type: list, elements: str, returned: always}
bytes_read: {description: Bytes that were read., type: int, returned: always}
"""

import datetime
import hashlib
import json
import os
import platform
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

READERS = 8
MANIFEST, FLAG, DIGESTS = "manifest.json", ".verified.json", ".digests.json"


def load(path: Path) -> dict[str, Any] | None:
    """Parsed JSON object, or None when the file is absent or broken."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def dump(path: Path, value: dict[str, Any]) -> None:
    """Write JSON atomically, world-readable, in a form that is equal on all nodes."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    with os.fdopen(handle, "w") as file:
        file.write(text_of(value))
        file.flush()
        os.fsync(file.fileno())
    os.chmod(name, 0o644)
    os.replace(name, path)


def text_of(value: dict[str, Any]) -> str:
    """JSON text of a manifest or flag."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def read(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Model:
    """Files of one model folder against a manifest."""

    def __init__(self, path: Path, manifest: dict[str, Any]):
        self.path, self.files = path, manifest["files"]
        self.cache = (load(path / DIGESTS) or {}).get("files", {})
        self.bytes_read = 0

    def check(self, name: str) -> tuple[list[Any] | None, str]:
        """Digest entry [size, mtime_ns, inode, sha256] (None when there is none) and a reason, empty when right."""
        file, want = self.path / name, self.files[name]
        try:
            stat = file.lstat()
        except OSError:
            return None, f"{name} is missing."
        if not os.path.isfile(file) or file.is_symlink():
            return None, f"{name} is no plain file."
        if stat.st_size != want["size"]:
            return None, f"{name} has {stat.st_size} bytes instead of {want['size']}."
        identity = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = self.cache.get(name)
        if known and known[:3] == identity:
            sha256 = known[3]
        else:
            sha256 = read(file)
            self.bytes_read += stat.st_size
        reason = "" if sha256 == want["sha256"] else f"{name} has other content than its SHA-256 says."
        return [*identity, sha256], reason

    def verify(self) -> tuple[dict[str, str], dict[str, list[Any]]]:
        """Reasons by wrong file, and the digests of all that could be read."""
        names = sorted(self.files)
        with ThreadPoolExecutor(READERS) as readers:
            results = dict(zip(names, readers.map(self.check, names), strict=True))
        reasons = {name: reason for name, (_, reason) in results.items() if reason}
        return reasons, {name: entry for name, (entry, _) in results.items() if entry}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "manifest": {"type": "dict"},
            "required": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    path = Path(module.params["path"])
    manifest = module.params["manifest"] or load(path / MANIFEST)
    if manifest is None:
        module.exit_json(changed=False, verified=False, wrong=[], reasons=[f"{path} has no manifest."], bytes_read=0)
    model = Model(path, manifest)
    reasons, digests = model.verify()
    want = hashlib.sha256(text_of(manifest).encode()).hexdigest()
    flag, text = load(path / FLAG), text_of(manifest)
    stale_manifest = not (path / MANIFEST).is_file() or (path / MANIFEST).read_text() != text
    flag_right = bool(flag) and flag.get("manifest_sha256") == want
    changed = (bool(flag) or False) if reasons else (stale_manifest or not flag_right)
    if not module.check_mode and path.is_dir():
        if digests != model.cache:
            dump(path / DIGESTS, {"schema": 1, "files": digests})
        if reasons:
            (path / FLAG).unlink(missing_ok=True)
        elif changed:
            if stale_manifest:
                dump(path / MANIFEST, manifest)
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            dump(path / FLAG, {"schema": 1, "when": now, "manifest_sha256": want})
    result = {
        "changed": changed,
        "verified": not reasons,
        "wrong": sorted(reasons),
        "reasons": list(reasons.values()),
        "bytes_read": model.bytes_read,
    }
    if reasons and module.params["required"] and not module.check_mode:
        shown = " ".join(list(reasons.values())[:5])
        module.fail_json(
            msg=f"{platform.node()}: {path} is not what its manifest says. {shown} Run again to bring them anew.",
            **result,
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
