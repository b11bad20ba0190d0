# SPDX-License-Identifier: Apache-2.0
"""Choose the first usable source of a model and list its files."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_source
short_description: Chooses the first source of a model that can be read
description:
  - Reads names and sizes only, never content.
  - A hub repository whose verified files are already in O(dir) is chosen without asking the hub.
  - Asking the hub needs the Python package huggingface_hub in the interpreter that runs this module.
options:
  sources:
    description: Sources in the order in which they are tried.
    type: list
    elements: dict
    required: true
    options:
      repo: {description: Hub repository as owner/name., type: str}
      path: {description: Folder on this node., type: str}
      revision:
        description: Commit, 40 hex digits. A folder without one gets one from its file names, sizes and times.
        type: str
      licence: {description: Licence of the files., type: str, required: true}
      name: {description: Name of the model; the last part of repo or path if left out., type: str}
  dir: {description: Folder of all models., type: path, required: true}
  token: {description: Hub token; empty for public repositories., type: str, default: ""}
  offline: {description: Never ask the hub., type: bool, default: false}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Choose the source
  model_source:
    dir: /var/lib/glm-vllm/models
    sources: [{path: /srv/models/tiny, licence: none}]
"""

RETURN = r"""
source:
  description: "The chosen source: repo or path, name, revision, licence."
  type: dict
  returned: success
path: {description: Where its files go., type: str, returned: success}
files:
  description: "Relative path to {size, sha256, blob}: bytes, and hashes or null where only reading would tell."
  type: dict
  returned: success
passed_over: {description: One sentence for every source tried before., type: list, elements: str, returned: always}
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

Files = dict[str, dict[str, Any]]


class Unusable(Exception):
    """This source cannot be used; the text says why."""


def walk(top: Path) -> dict[str, os.stat_result]:
    """Regular files below top by relative path; hidden files and folders, and links that lead nowhere, left out."""
    found = {}
    for folder, folders, names in os.walk(top, followlinks=True):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                found[str(file.relative_to(top))] = file.stat()
    return found


def folder_revision(found: dict[str, os.stat_result]) -> str:
    """40 hex digits that change when a file's name, size or time changes."""
    text = json.dumps([[name, stat.st_size, stat.st_mtime_ns] for name, stat in sorted(found.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def from_folder(source: dict[str, Any]) -> tuple[str, Files]:
    """Revision and files of a folder source."""
    top = Path(source["path"])
    if not top.is_dir():
        raise Unusable(f"{top} is not a folder on this node.")
    found = walk(top)
    found.pop("manifest.json", None)  # a folder's own list of files is not one of the model's
    if "config.json" not in found:
        raise Unusable(f"{top} holds no config.json.")
    files = {name: {"size": stat.st_size, "sha256": None, "blob": None} for name, stat in found.items()}
    return source["revision"] or folder_revision(found), files


def from_store(path: Path) -> Files | None:
    """Files of a verified model that is here already, or None."""
    try:
        flag = json.loads((path / ".verified.json").read_text())
        text = (path / "manifest.json").read_bytes()
        if flag["manifest_sha256"] != hashlib.sha256(text).hexdigest():
            return None
        return {name: {**entry, "blob": None} for name, entry in json.loads(text)["files"].items()}
    except (OSError, ValueError, KeyError):
        return None


def from_hub(source: dict[str, Any], token: str) -> Files:
    """Files of a hub repository at its revision, with the hashes that the hub knows."""
    try:
        from huggingface_hub import HfApi
    except ImportError as exc:
        raise Unusable("huggingface_hub is not installed for this interpreter.") from exc
    try:
        info = HfApi(token=token or False).model_info(
            source["repo"], revision=source["revision"], files_metadata=True, timeout=30
        )
    except Exception as exc:  # the library raises its own, httpx's and requests' errors
        raise Unusable(
            f"{source['repo']}@{source['revision'][:8]} cannot be listed: {str(exc).splitlines()[0]}"
        ) from exc
    files: Files = {}
    for entry in info.siblings or []:
        if not entry.rfilename.startswith("."):
            sha256 = entry.lfs.sha256 if entry.lfs else None
            files[entry.rfilename] = {"size": entry.size, "sha256": sha256, "blob": None if sha256 else entry.blob_id}
    if "config.json" not in files:
        raise Unusable(f"{source['repo']}@{source['revision'][:8]} holds no config.json.")
    return files


def choose(
    sources: list[dict[str, Any]], store: Path, token: str, offline: bool
) -> tuple[dict[str, Any] | None, Files, list[str]]:
    """First usable source (completed with name and revision, None when there is none), its files, reasons before."""
    reasons: list[str] = []
    for given in sources:
        source = {**given, "name": given["name"] or Path(given["repo"] or given["path"]).name}
        try:
            if source["path"]:
                source["revision"], files = from_folder(source)
                return source, files, reasons
            here = from_store(store / source["name"] / source["revision"])
            if here is None and offline:
                raise Unusable(f"{source['repo']} is not complete here, and model_fetch_offline is true.")
            return source, here if here is not None else from_hub(source, token), reasons
        except Unusable as exc:
            reasons.append(str(exc))
    return None, {}, reasons


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "sources": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "repo": {"type": "str"},
                    "path": {"type": "str"},
                    "revision": {"type": "str"},
                    "licence": {"type": "str", "required": True},
                    "name": {"type": "str"},
                },
                "required_one_of": [("repo", "path")],
                "mutually_exclusive": [("repo", "path")],
                "required_by": {"repo": "revision"},
            },
            "dir": {"type": "path", "required": True},
            "token": {"type": "str", "default": "", "no_log": True},
            "offline": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    store = Path(module.params["dir"])
    source, files, reasons = choose(module.params["sources"], store, module.params["token"], module.params["offline"])
    if source is None:
        module.fail_json(msg=f"No source of the model can be used. {' '.join(reasons)}", passed_over=reasons)
    for reason in reasons:
        module.warn(f"Passed over a source of the model: {reason}")
    path = str(store / source["name"] / source["revision"])
    module.exit_json(changed=False, source=source, path=path, files=files, passed_over=reasons)


if __name__ == "__main__":
    main()
