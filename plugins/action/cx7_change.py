# SPDX-License-Identifier: Apache-2.0
"""Action ``cx7_change``: change the rails of a node, and confirm over a new management connection.

The module of the same name documents the arguments. A node that cannot be reached anew after the change undoes it by
itself; this says so once it can be reached again, or once it had the time and still cannot.
"""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

# netplan's and NetworkManager's effects come late: who asks at once finds a management link that is about to go.
SETTLE = 5
PATIENCE = 60  # seconds for the way back, after the node has begun to undo
PAUSE = 2


class ActionModule(ActionBase):
    """Begin on the node, then confirm."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        timeout = int(arguments.get("timeout", 60))
        result |= self._execute_module("cx7_change", arguments | {"state": "begun"}, task_vars=task_vars)
        if result.get("failed") or not result.get("begun"):
            return result
        end = time.monotonic() + timeout + PATIENCE
        time.sleep(SETTLE)
        host = (task_vars or {}).get("inventory_hostname", "the node")
        while True:
            try:
                self._connection.reset()
                answer = self._execute_module("cx7_change", arguments | {"state": "confirmed"}, task_vars=task_vars)
                break
            except AnsibleConnectionFailure:
                if time.monotonic() > end:
                    return result | {
                        "failed": True,
                        "msg": f"{host}: not reached again after its rails were changed; it had {timeout} s to undo "
                        "that. Look at its console: journalctl -u glm-vllm-network-change.",
                    }
                time.sleep(PAUSE)
        undone = answer.get("undone", answer.get("msg", "its answer makes no sense"))
        if undone:
            return result | {
                "failed": True,
                "changed": False,
                "msg": f"{host}: the rails could not be configured and are as they were before: {undone}.",
            }
        return result
