"""Action ``print_once``: show a text on the controller's terminal, and nowhere else.

``print_once: {text: ...}`` writes neither to Ansible's log file nor into the task's result, and reports no change.
Run it with ``no_log: true``, so that no callback and no ``-vvv`` repeats the argument.
"""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()


class ActionModule(ActionBase):
    """Print the text; the node is not touched."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec({"text": {"type": "str", "required": True, "no_log": True}})
        if not self._task.no_log:
            return result | {
                "failed": True,
                "msg": "print_once: set no_log: true on the task, or its log shows the text.",
            }
        display.display(arguments["text"].rstrip("\n"), screen_only=True)
        return result | {"changed": False}
