# SPDX-License-Identifier: Apache-2.0
"""Action `model_bring`: make a model folder on a node complete, and say on the way how far it is.

    - model_bring:
        name: tiny
        revision: 40 hex digits
        folder: /var/lib/glm-vllm/models/tiny/…
        files: "{{ chosen.files }}"
        origins: "{{ chosen.origins }}"

The job runs as a transient unit of systemd, `glm-vllm-model.service`: it goes on when this controller goes away, and
the next run waits for it. `origins` may be empty: then only what the node has elsewhere (`adopt`) is taken. With
`plan: true` nothing is brought; the task fails where there is no room. Further arguments: `token`, `proxy`, `endpoint`,
`only`, `adopt`, `move`, `full`, `streams`, `stall`, `tries` as in node/fetch.py, `python`, and `required` (fail when it
stays incomplete). Returns what `glm-vllm fetch` answers. Check mode foretells from names and sizes.
"""

from __future__ import annotations

import json
import runpy
import secrets
import shlex
import time
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

UNIT = "glm-vllm-model.service"
FOLDER = "/run/glm-vllm-model"
RUNNING = 100
SHORTEST, LONGEST = 0.3, 5.0
OPTIONS = ("plan", "python", "required")
load = runpy.run_path(str(Path(__file__).resolve().parents[1] / "controller/own_code.py"))["load"]


def start(python: str, pyz: str, job: str) -> str:
    """The shell command that takes the job from stdin, in memory only, and starts the unit; its answer lies beside."""
    run = [
        "systemd-run", "--quiet", "--collect", f"--unit={UNIT}", "--service-type=exec",
        f"--property=StandardOutput=file:{job}.out", f"--property=StandardError=file:{job}.err",
        python, pyz, "fetch", "--json", job,
    ]  # fmt: skip
    return f"umask 077; mkdir -p -m 755 {FOLDER} && cat > {job} && {{ {shlex.join(run)} || {{ rm {job}; false; }}; }}"


def look(job: str) -> str:
    """The shell command that prints the progress and ends with RUNNING, or prints the answer and removes it."""
    running = f"systemctl --quiet is-active {UNIT}"
    ended = f"cat {job}.out; cat {job}.err >&2; rm -f {job} {job}.out {job}.err"
    return f"if {running}; then cat {FOLDER}/progress.json 2>/dev/null; exit {RUNNING}; fi; {ended}"


class ActionModule(ActionBase):
    """Starts the unit and looks after it."""

    TRANSFERS_FILES = True
    _supports_check_mode = True
    _VALID_ARGS = frozenset(
        ("name", "revision", "folder", "files", "origins", "only", "adopt", "move", "full", "streams", "stall", "tries")
        + ("token", "proxy", "endpoint", *OPTIONS)
    )

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the program's answer."""
        result = super().run(tmp, task_vars)
        job = {key: value for key, value in self._task.args.items() if key not in OPTIONS}
        self.host = str((task_vars or {})["inventory_hostname"])
        self.python = self._task.args.get("python", "/usr/bin/python3")
        self.tool = load("plugins/controller/model_program.py")
        if not job["files"]:  # foretold without a list
            return result | {"changed": True, "verified": False, "missing": [], "manifest": None}
        try:
            if self._task.check_mode or self._task.args.get("plan"):
                answer = self.tool.ask(self, "/usr/bin/python3", ["--plan"], job, self.host)
                if answer["no_room"]:
                    raise AnsibleActionFail(answer["no_room"])
                answer["changed"] = answer["changed"] and not self._task.args.get("plan")
            else:
                answer = self._bring(job)
        finally:
            self._remove_tmp_path(self._connection._shell.tmpdir)
        if self._task.args.get("required") and answer["missing"] and not self._task.check_mode:
            shown = ", ".join(answer["missing"][:5])
            raise AnsibleActionFail(f"{self.host}: {job['folder']} lacks {shown}; run again.")
        return result | answer

    def _bring(self, job: dict[str, Any]) -> dict[str, Any]:
        path = f"{FOLDER}/{secrets.token_hex(8)}.json"
        command = start(self.python, self.tool.put(self), path)
        begun = False
        pause, shown = SHORTEST, ""
        while True:
            if not begun:
                done = self._low_level_execute_command(command, in_data=json.dumps(job).encode())
                begun = done["rc"] == 0
                if not begun and "already" not in done["stderr"]:
                    raise AnsibleActionFail(f"{self.host}: {UNIT} does not start: {done['stderr'].strip()}")
            time.sleep(pause)
            pause = min(LONGEST, pause * 1.5)
            done = self._low_level_execute_command(look(path))
            if done["rc"] == RUNNING:
                shown = self._say(done["stdout"], shown)
            elif begun:
                return self.tool.answer(done["stdout"], done["stderr"], self.host)

    def _say(self, progress: str, shown: str) -> str:
        """Print the progress when it is another than last time; returns what was printed."""
        try:
            says = json.loads(progress)["says"]
        except (ValueError, KeyError):
            return shown
        if says != shown:
            self._display.display(f"{self.host}: {says}")
        return says
