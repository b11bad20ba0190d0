"""memory_plan: the release's command is asked, its refusal is the failure, and check mode needs no release."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = Path(__file__).parents[2] / "plugins/modules/memory_plan.py"
GIB = 1 << 30


@pytest.fixture
def ask(tmp_path):
    """Run the module against a stand-in for the release's command that gives one answer and keeps its input."""

    def run(answer=None, code=0, check=False, current=None, **more):
        command = tmp_path / "glm-vllm"
        if answer is not None:
            (tmp_path / "answer").write_text(answer)
            command.write_text(
                f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat > {tmp_path}/stdin\n'
                f"cat {tmp_path}/answer\necho words >&2\nexit {code}\n"
            )
            command.chmod(0o755)
        if current is not None:
            (tmp_path / "serve.yaml").write_text(current)
        arguments = {
            "command": str(command),
            "options": {"model": "/m", "max-model-len": 1000000},
            "speculator": "dflash2",
            "drafter": "/d",
            "utilisation": 0.87,
            "memory": 128 * GIB,
            "reserve": 4 * GIB,
            "start_cost": 6 * GIB,
            "profile": "full",
            "current": str(tmp_path / "serve.yaml"),
            "_ansible_check_mode": check,
        }
        done = subprocess.run(
            [sys.executable, MODULE],
            input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments | more}),
            capture_output=True,
            text=True,
            check=False,
        )
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_the_answer_is_the_releases(ask, tmp_path):
    said = ask(json.dumps({"ok": True, "kv_cache_memory_bytes": 42}))
    assert (said["kv_cache_memory_bytes"], said["foretold"], said["changed"]) == (42, False, False)
    words = (tmp_path / "arguments").read_text()
    assert words.startswith("plan --json --config - --speculator dflash2 --utilisation 0.87 --memory 137438953472")
    assert words.rstrip().endswith("--reserve 4294967296 --profile full --start-cost 6442450944 --drafter /d")
    assert json.loads((tmp_path / "stdin").read_text()) == {"model": "/m", "max-model-len": 1000000}


def test_without_a_drafter_none_is_named(ask, tmp_path):
    ask(json.dumps({"ok": True, "kv_cache_memory_bytes": 42}), drafter="")
    assert "--drafter" not in (tmp_path / "arguments").read_text()


def test_a_refusal_is_the_failure(ask):
    said = ask(json.dumps({"ok": False, "message": "set glm_vllm_overlay_max_model_len to at most 7"}), code=1)
    assert said["failed"] and "set glm_vllm_overlay_max_model_len to at most 7." in said["msg"]


def test_no_answer_is_a_failure_with_the_commands_words(ask):
    said = ask("Killed", code=137)
    assert said["failed"] and "exit code 137" in said["msg"] and "words" in said["msg"]


def test_check_mode_asks_a_release_that_is_there(ask):
    assert ask(json.dumps({"ok": True, "kv_cache_memory_bytes": 42}), check=True)["kv_cache_memory_bytes"] == 42


def test_check_mode_without_a_release_foretells_what_is_in_force(ask):
    said = ask(check=True, current="kv-cache-dtype: fp8\nkv-cache-memory-bytes: 7\nmodel: /m\n")
    assert (said["kv_cache_memory_bytes"], said["foretold"]) == (7, True)


def test_check_mode_with_nothing_in_force_says_nothing(ask):
    said = ask(check=True)
    assert said["foretold"] and "kv_cache_memory_bytes" not in said
