# SPDX-License-Identifier: Apache-2.0
"""Action ``cx7_plan``: plan the rails of all nodes together, on the controller.

Arguments are those of ``cx7_candidate`` and ``cx7_plan`` in plugins/filter/cx7.py; ``step`` says which of the two.
Returns ``plan``, or fails with the one sentence that says why there is none.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible.plugins.action import ActionBase

load = runpy.run_path(str(Path(__file__).resolve().parents[1] / "controller/own_code.py"))["load"]


class ActionModule(ActionBase):
    """Hand the arguments over; the node is not touched."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        logic = load("plugins/filter/cx7.py")
        step = {"candidate": logic.cx7_candidate, "plan": logic.cx7_plan}[arguments.pop("step")]
        try:
            return result | {"changed": False, "plan": step(**arguments)}
        except AnsibleFilterError as refusal:
            return result | {"failed": True, "msg": refusal.message}
