# SPDX-License-Identifier: Apache-2.0
"""Bring a model's files from its source to the head and write down what they must be."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_stage
short_description: Copies or downloads the missing files of a model and writes its manifest
description:
  - A file of the right size is kept (from a folder, also of the same time), unless O(replace) names it.
  - The manifest holds the SHA-256 of what the source delivered; M(model_verify) then reads what is on the disk.
  - Downloading needs the Python package huggingface_hub in the interpreter that runs this module. It resumes.
options:
  source: {description: What M(model_source) returned., type: dict, required: true}
  files: {description: What M(model_source) returned., type: dict, required: true}
  path: {description: Folder of the model., type: path, required: true}
  replace: {description: Files that are here and wrong., type: list, elements: str, default: []}
  token: {description: Hub token., type: str, default: ""}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Stage the model
  model_stage:
    source: "{{ chosen.source }}"
    files: "{{ chosen.files }}"
    path: "{{ chosen.path }}"
"""

RETURN = r"""
manifest: {description: "Content of manifest.json, with null hashes in check mode.", type: dict, returned: success}
fetched: {description: Files that were (or would be) brought., type: list, elements: str, returned: success}
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

CHUNK = 1 << 20
PART = ".partial"


class Failed(Exception):
    """The model cannot be staged; the text says why."""


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy(origin: Path, target: Path, part: Path) -> str:
    """Copy a file with its time; returns the SHA-256 of what was read."""
    part.mkdir(exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = part / hashlib.sha256(str(target).encode()).hexdigest()[:16]
    read = hashlib.sha256()
    with origin.open("rb") as source, temporary.open("wb") as sink:
        while chunk := source.read(CHUNK):
            read.update(chunk)
            sink.write(chunk)
        sink.flush()
        os.fsync(sink.fileno())
    shutil.copystat(origin, temporary)
    temporary.chmod(0o644)
    temporary.replace(target)
    return read.hexdigest()


def git_blob(path: Path) -> str:
    """Git's name for a file's content."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def download(source: dict[str, Any], name: str, entry: dict[str, Any], path: Path, token: str) -> str:
    """Download a file, resuming what is there; returns the SHA-256 it must have."""
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # its transfers stall for half an hour at a time
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(source["repo"], name, revision=source["revision"], local_dir=path, token=token or False)
    except Exception as exc:  # the library raises its own, httpx's and requests' errors
        raise Failed(
            f"{name} of {source['repo']}: {str(exc).splitlines()[0]}; run again, what has arrived stays."
        ) from exc
    file = path / name
    file.chmod(0o644)
    if entry["blob"] and git_blob(file) != entry["blob"]:
        file.unlink()
        raise Failed(f"{name} of {source['repo']} arrived with other content than the hub names; run again.")
    return entry["sha256"] or digest(file)


def kept(path: Path, name: str, entry: dict[str, Any], origin: Path | None) -> bool:
    """Whether the file on the disk stands for the source's."""
    file = path / name
    if file.is_symlink() or not file.is_file() or file.stat().st_size != entry["size"]:
        return False
    return origin is None or int(file.stat().st_mtime) == int(origin.stat().st_mtime)


def recorded(path: Path) -> dict[str, Any]:
    """Files of the manifest that is there; empty when there is none."""
    try:
        return json.loads((path / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError):
        return {}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "dict", "required": True},
            "files": {"type": "dict", "required": True},
            "path": {"type": "path", "required": True},
            "replace": {"type": "list", "elements": "str", "default": []},
            "token": {"type": "str", "default": "", "no_log": True},
        },
        supports_check_mode=True,
    )
    source, files, path = module.params["source"], module.params["files"], Path(module.params["path"])
    folder = Path(source["path"]) if source.get("path") else None
    known = recorded(path)
    fetched: list[str] = []
    entries: dict[str, dict[str, Any]] = {}
    try:
        for name, entry in sorted(files.items()):
            origin = folder / name if folder else None
            sha256 = entry["sha256"] or known.get(name, {}).get("sha256")
            if name in module.params["replace"] or not sha256 or not kept(path, name, entry, origin):
                fetched.append(name)
                if not module.check_mode:
                    if origin:
                        sha256 = copy(origin, path / name, path / PART)
                    else:
                        if name in module.params["replace"]:
                            (path / name).unlink(missing_ok=True)
                        sha256 = download(source, name, entry, path, module.params["token"])
            entries[name] = {"size": entry["size"], "sha256": sha256}
        shutil.rmtree(path / PART, ignore_errors=True)
    except (Failed, OSError) as exc:
        module.fail_json(msg=str(exc), fetched=fetched)
    manifest = {"schema": 1, "name": source["name"], "revision": source["revision"], "files": entries}
    module.exit_json(changed=bool(fetched), fetched=fetched, manifest=manifest)


if __name__ == "__main__":
    main()
