# SPDX-License-Identifier: Apache-2.0
"""Run `glm-vllm fetch` on a node with the program of this clone, whatever is installed there."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import tempfile
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail

REPOSITORY = Path(__file__).resolve().parents[2]
MANIFESTS = REPOSITORY / "files/manifests"
load = runpy.run_path(str(Path(__file__).resolve().parents[1] / "controller/own_code.py"))["load"]


def build() -> bytes:
    """The node program as a zipapp."""
    return load("plugins/action/node_pyz.py").build()


def put(action: Any) -> str:
    """Copy the program into the action's temporary folder on the node; returns its path there."""
    if not action._connection._shell.tmpdir:
        action._make_tmp_path()
    remote = action._connection._shell.join_path(action._connection._shell.tmpdir, "node.pyz")
    descriptor, local = tempfile.mkstemp(prefix="node-", suffix=".pyz")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(build())
        action._transfer_file(local, remote)
    finally:
        os.unlink(local)
    return remote


def answer(out: str, err: str, who: str) -> dict[str, Any]:
    """What the program printed; raises AnsibleActionFail with its one sentence when it failed."""
    lines = [line for line in out.strip().splitlines() if line.startswith("{")]
    try:
        document = json.loads(lines[-1])
    except (IndexError, ValueError):
        said = err.strip().splitlines()
        raise AnsibleActionFail(f"{who}: {said[-1] if said else 'the program ended without an answer'}") from None
    if not document.pop("ok"):
        raise AnsibleActionFail(f"{who}: {document['message']}")
    document.pop("schema")
    return document


def ask(action: Any, python: str, options: list[str], job: dict[str, Any], who: str) -> dict[str, Any]:
    """Run the program to its end, the job on its stdin."""
    command = shlex.join([python, put(action), "fetch", "--json", *options, "-"])
    done = action._low_level_execute_command(command, in_data=json.dumps(job).encode())
    return answer(done["stdout"], done["stderr"], who)


def manifests(sources: list[dict[str, Any]], folder: Path = MANIFESTS) -> dict[str, Any]:
    """The manifests of ours for these sources, by name/revision."""
    found = {}
    for source in sources:
        name = source.get("name") or Path(source.get("repo") or source.get("path") or source["url"].rstrip("/")).name
        file = folder / name / f"{source.get('revision')}.json"
        if file.is_file():
            found[f"{name}/{source['revision']}"] = json.loads(file.read_text(encoding="utf-8"))
    return found
