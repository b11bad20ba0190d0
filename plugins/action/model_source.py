# SPDX-License-Identifier: Apache-2.0
"""Action `model_source`: choose the first usable source of a model and list its files. Nothing is downloaded.

    - model_source:
        sources: [{repo: owner/name, revision: 40 hex digits, licence: Apache-2.0}]
        dir: /var/lib/glm-vllm/models
        python: /opt/glm-vllm/tools/hub/bin/python

A source is `repo`, `url` or `path`, with `revision`, `licence` and `name`. Further arguments: `token`, `endpoint`,
`proxy`, `offline`, `caches`. Hashes in files/manifests/ hold for what the source names. Returns `source`, `path`,
`files`, `origins` (without the token) and `passed_over`; one passed over is a warning.
"""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

load = runpy.run_path(str(Path(__file__).resolve().parents[1] / "controller/own_code.py"))["load"]


class ActionModule(ActionBase):
    """Asks the node's program."""

    TRANSFERS_FILES = True
    _supports_check_mode = True
    _VALID_ARGS = frozenset(
        ("sources", "dir", "python", "token", "endpoint", "proxy", "offline", "caches"),
    )

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the chosen source."""
        result = super().run(tmp, task_vars)
        given = dict(self._task.args)
        python = given.pop("python")
        host = str((task_vars or {})["inventory_hostname"])
        if self._task.check_mode and self._low_level_execute_command(f"test -x {shlex.quote(python)}")["rc"] != 0:
            return result | self._foretold(given)
        tool = load("plugins/controller/model_program.py")
        try:
            chosen = tool.ask(self, python, ["--list"], given | {"manifests": tool.manifests(given["sources"])}, host)
        finally:
            self._remove_tmp_path(self._connection._shell.tmpdir)
        for reason in chosen["passed_over"]:
            self._display.warning(f"{host} passed over a source of the model: {reason}")
        return result | {"changed": False} | chosen

    def _foretold(self, given: dict[str, Any]) -> dict[str, Any]:
        """In check mode before the tool is there: the first source, and no list of its files."""
        source = dict(given["sources"][0])
        source["name"] = source.get("name") or Path(source.get("repo") or source.get("path") or source["url"]).name
        path = str(Path(given["dir"], source["name"], source.get("revision") or "revision"))
        return {"changed": False, "source": source, "path": path, "files": {}, "origins": [], "passed_over": []}
