# SPDX-License-Identifier: Apache-2.0
"""What the actions of model-fetch run on a node, and what they make of its answer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleActionFail

ROOT = Path(__file__).parents[3]


@pytest.fixture
def shell(tmp_path, plugin, monkeypatch):
    """Runs the action's shell commands with stand-ins for systemd, in a folder of their own."""
    module = plugin("action/model_bring.py")
    run = tmp_path / "run"
    monkeypatch.setattr(module, "FOLDER", str(run))
    bin_ = tmp_path / "bin"
    bin_.mkdir()

    def program(name: str, text: str) -> None:
        (bin_ / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_ / name).chmod(0o755)

    def sh(command: str, given: str = "") -> subprocess.CompletedProcess[str]:
        path = {"PATH": f"{bin_}:/usr/bin:/bin"}
        return subprocess.run(["sh", "-c", command], input=given, capture_output=True, text=True, env=path, check=False)

    return module, run, program, sh


def test_the_job_is_private_and_gone_when_the_unit_does_not_start(shell):
    module, run, program, sh = shell
    program("systemd-run", 'echo "$@" > "$0.said"; exit 0')
    assert sh(module.start("python3", "/t/node.pyz", f"{run}/1.json"), '{"token": "x"}').returncode == 0
    assert (run / "1.json").read_text() == '{"token": "x"}'
    assert (run / "1.json").stat().st_mode & 0o777 == 0o600
    assert run.stat().st_mode & 0o777 == 0o755, "the watch reads the progress there"
    program("systemd-run", 'echo "Unit glm-vllm-model.service already exists" >&2; exit 1')
    done = sh(module.start("python3", "/t/node.pyz", f"{run}/2.json"), "{}")
    assert done.returncode != 0
    assert "already" in done.stderr
    assert not (run / "2.json").exists()


def test_progress_first_then_the_answer_once(shell):
    module, run, program, sh = shell
    run.mkdir()
    (run / "progress.json").write_text('{"says": "half"}')
    for suffix, text in ((".out", '{"schema": 1, "ok": true}'), (".err", "a warning")):
        Path(f"{run}/1.json{suffix}").write_text(text)
    program("systemctl", "exit 0")
    done = sh(module.look(f"{run}/1.json"))
    assert (done.returncode, done.stdout) == (module.RUNNING, '{"says": "half"}')
    program("systemctl", "exit 3")
    done = sh(module.look(f"{run}/1.json"))
    assert (done.returncode, done.stdout, done.stderr) == (0, '{"schema": 1, "ok": true}', "a warning")
    assert [path.name for path in run.iterdir()] == ["progress.json"]


@pytest.mark.parametrize("name", ["model_bring", "model_source"])
def test_the_role_gives_only_what_the_actions_take(plugin, name):
    taken = plugin(f"action/{name}.py").ActionModule._VALID_ARGS
    given = set()
    for file in (ROOT / "roles/model-fetch/tasks").glob("*.yml"):
        tasks = yaml.safe_load(file.read_text())
        tasks += [inner for task in tasks for inner in task.get("block", [])]
        given |= {key for task in tasks for key in task.get(name, {})}
    assert given
    assert given <= taken


def test_answers(plugin):
    tool = plugin("controller/model_program.py")
    assert tool.answer('noise\n{"schema": 1, "ok": true, "changed": false}\n', "", "spark-a") == {"changed": False}
    with pytest.raises(AnsibleActionFail, match="^spark-a: it broke$"):
        tool.answer('{"schema": 1, "ok": false, "message": "it broke"}', "", "spark-a")
    with pytest.raises(AnsibleActionFail, match="spark-a: no space"):
        tool.answer("", "first\nno space", "spark-a")


def test_our_own_manifests_are_found_by_name_and_revision(plugin, tmp_path):
    tool = plugin("controller/model_program.py")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/0123.json").write_text(json.dumps({"files": {}}))
    wanted = [{"repo": "own/model", "revision": "0123"}, {"repo": "own/model", "revision": "4567"}, {"path": "/x/y"}]
    assert tool.manifests(wanted, tmp_path) == {"model/0123": {"files": {}}}
    assert tool.build() == tool.build()


def test_before_the_tool_is_there_the_first_source_is_foretold(plugin):
    action = plugin("action/model_source.py").ActionModule
    given = {"sources": [{"repo": "own/model", "revision": "0123"}], "dir": "/models"}
    foretold = action._foretold(None, given)
    assert (foretold["path"], foretold["files"], foretold["origins"]) == ("/models/model/0123", {}, [])
