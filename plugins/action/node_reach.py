"""Action ``node_reach``: SSH answers and sudo works, or one sentence that says which does not and what to do.

Takes no arguments; run it with ``become: true``. Needs no Python on the node and changes nothing.
"""

from __future__ import annotations

import re
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase

# First match wins: the words ssh prints, and what they mean for the reader.
SSH = (
    (
        "permission denied",
        "refuses the login of {user}",
        "put your SSH key on it with ssh-copy-id {user}@{address}, or correct ansible_user",
    ),
    (
        "host identification has changed",
        "shows another host key than last time",
        "find out why, then ssh-keygen -R {address}",
    ),
    (
        "host key verification failed",
        "has a host key that this controller does not know",
        "log in once with ssh {user}@{address} and compare it",
    ),
    ("could not resolve", "has no address: {address} can't be resolved", "correct ansible_host in hosts.yml"),
    ("connection refused", "is up and runs no SSH server", "start ssh on it, or correct ansible_host and ansible_port"),
    ("", "does not answer at {address}", "check its power, its management cable and ansible_host in hosts.yml"),
)
SUDO = (
    ("incorrect", "did not accept the sudo password", "run again with -K and the right one"),
    ("password", "asks for a sudo password", "run again with -K"),
    ("", "gives {user} no sudo", "add the user to the group sudo, or choose another ansible_user"),
)


def sentence(table: tuple[tuple[str, str, str], ...], text: str, **names: str) -> str:
    """The sentence of the first row whose words stand in ``text``. names: host, address, user."""
    # Where only ssh's own configuration names the user, its refusal does.
    if login := re.search(r"(\S+?)@\S+: Permission denied", text):
        names["user"] = login[1]
    what, fix = next(row[1:] for row in table if row[0] in text.lower())
    return f"{names['host']} {what.format(**names)}: {fix.format(**names)}."


class ActionModule(ActionBase):
    """Run ``true`` on the node, first as the user, then through sudo."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        variables = task_vars or {}
        names = {
            "host": str(variables["inventory_hostname"]),
            "address": str(variables.get("ansible_host", variables["inventory_hostname"])),
            "user": str(self._play_context.remote_user or variables.get("ansible_user", "this user")),
        }
        result["changed"] = False
        become = self._connection.become
        for table, plugin in ((SSH, None), (SUDO, become)):
            self._connection.set_become_plugin(plugin)
            said = self._answer()
            if said is not None:
                return result | {"failed": True, "msg": sentence(table, said, **names)}
        return result | {"msg": f"{names['host']} answers."}

    def _answer(self) -> str | None:
        """None when ``true`` ran; else what was said instead."""
        try:
            done = self._low_level_execute_command("true")
        except AnsibleError as failure:
            return str(failure)
        return None if done["rc"] == 0 else f"{done['stdout']} {done['stderr']}"
