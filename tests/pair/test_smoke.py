"""Each smoke check fails for its own cause, with its sentence, after all earlier ones passed.

The pair stays up: what a check looks at is broken, not more. Where a real cause would cost a start of the engine, the
docstring says what stands in its place; the check `health` is seen to fail in test_together.py, where the engine is
stopped anyway, and a real speculator `none` under `make test-full` there.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

import bed
import pair
import pytest

SITE = "/etc/nginx/conf.d/glm-vllm.conf"
KEYS = "/etc/glm-vllm/api-keys"
CURRENT = "/var/lib/glm-vllm/deployments/current"
RELOAD = ("sh", "-c", "systemctl reload nginx.service && sleep 1")  # old workers go on for a moment
LAST = "    location / {"
# The checks in their order
NAMES = ["health", "key", "models", "one-token", "chat", "streaming", "wrong-key", "acceptance", "ranks"]


def fails(name: str, *arguments: str) -> str:
    """The sentence of the check that fails; AssertionError unless it is `name`, and the first."""
    found = pair.probe(*arguments)
    assert [check["name"] for check in found["checks"]] == NAMES[: NAMES.index(name) + 1], found
    assert [check["ok"] for check in found["checks"]] == [True] * NAMES.index(name) + [False]
    assert found["ok"] is False and found["not_run"] == NAMES[NAMES.index(name) + 1 :]
    sentence = found["checks"][-1]["message"]
    assert found["message"] == f"{name}: {sentence}"
    return sentence


@contextlib.contextmanager
def gateway(before: str, lines: str) -> Iterator[None]:
    """The gateway with `lines` put in front of the first line `before`."""
    with pair.replaced(bed.HEAD, SITE, lambda text: text.replace(before, f"{lines}\n{before}", 1), *RELOAD):
        yield


@pytest.fixture(autouse=True)
def mended() -> Iterator[None]:
    """After each break all checks pass again, on the same start of the engines."""
    with pair.service_untouched():
        yield


def test_all_pass() -> None:
    """Fails when a check refuses a pair that is well, or measures nothing."""
    found = pair.probe("--expect", pair.ANSWER)
    assert found["ok"], found["message"]
    assert [(check["name"], check["ok"]) for check in found["checks"]] == [(name, True) for name in NAMES]
    measured = found["measured"]
    assert measured["answer"] == pair.ANSWER
    assert measured["speculator"] == "mtp" and 0 < measured["accepted"] <= measured["drafted"]
    assert measured["peer"] == bed.WORKER and measured["peer_cpu_seconds"] > 0 and measured["peer_fabric_bytes"] > 0


def test_key_store_emptied() -> None:
    """`key`: no key is left in the store."""
    with pair.replaced(bed.HEAD, KEYS, lambda _: json.dumps({"schema": 1, "keys": []})):
        assert fails("key") == "/etc/glm-vllm/api-keys holds no key: run `glm-vllm key new default --reload`"


def test_key_that_the_gateway_does_not_know() -> None:
    """`key`: store and map have parted."""
    other = {"schema": 1, "keys": [{"name": "default", "key": "0" * 64, "created": "2026-01-01T00:00:00+00:00"}]}
    with pair.replaced(bed.HEAD, KEYS, lambda _: json.dumps(other)):
        assert "refuses a key" in fails("key")


def test_wrong_served_name() -> None:
    """`models`: configuration and engine have parted. The configuration is changed here, since the engine can't be
    without a start; the check compares the two."""

    def rename(text: str) -> str:
        return text.replace(f"served-model-name: {bed.MODEL}", "served-model-name: another-name")

    with pair.replaced(bed.HEAD, f"{CURRENT}/serve.yaml", rename):
        message = fails("models")
    assert message.startswith(f"the engine serves {bed.MODEL} and not another-name: set glm_vllm_overlay_served_name")


def test_rank_1_hangs() -> None:
    """`one-token`: rank 1 is frozen, so that no step ends. Only the check's patience is shorter than a user's 120 s."""
    unit = pair.show(bed.WORKER, "glm-vllm-worker", "ControlGroup", "MainPID")
    pids = bed.on(bed.WORKER, "cat", f"/sys/fs/cgroup{unit['ControlGroup']}/cgroup.procs").split()
    pids.remove(unit["MainPID"])  # the supervisor stays awake: what it watches is broken
    impatient = (
        "from glm_vllm_overlay import cli; from glm_vllm_overlay.node import probe; "
        "probe.TOKEN_PATIENCE = 5.0; raise SystemExit(cli.main(['probe', '--json']) != 1)"
    )
    python = f"/opt/glm-vllm/releases/{bed.state(bed.HEAD)['release']}/venv/bin/python"
    bed.on(bed.WORKER, "kill", "-STOP", *pids)
    try:
        found = json.loads(bed.on(bed.HEAD, python, "-c", impatient, timeout=100).splitlines()[-1])
    finally:
        bed.on(bed.WORKER, "kill", "-CONT", *pids)
    assert [check["ok"] for check in found["checks"]] == [True, True, True, False]
    assert found["message"].startswith("one-token: /v1/completions has not answered within 5 s")


def test_answer_is_another() -> None:
    """`chat`: the pair's words are not those that are expected."""
    message = fails("chat", "--expect", "Another answer.")
    assert message.startswith(f"the chat's answer is {pair.ANSWER!r} and not 'Another answer.'")


def test_answer_is_broken() -> None:
    """`chat`: the answer holds U+FFFD. The gateway puts it there in the place of a damaged tokenizer or weights."""
    body = json.dumps({"choices": [{"message": {"content": "Two sm\ufffdall"}}]}, ensure_ascii=False)
    with gateway(LAST, f"    location = /v1/chat/completions {{ return 200 '{body}'; }}"):
        assert "broken characters (U+FFFD)" in fails("chat")


def test_stream_comes_at_once() -> None:
    """`streaming`: the gateway asks for a whole answer where the client wants a stream."""
    question = {
        "model": bed.MODEL,
        "messages": [{"role": "user", "content": pair.QUESTION}],
        "max_tokens": 64,
        "temperature": 0,
    }
    location = f"""    location = /v1/chat/completions {{
        proxy_set_body '{json.dumps(question)}';
        proxy_pass http://glm_vllm;
    }}"""
    with gateway(LAST, location):
        assert fails("streaming").startswith("the stream came in 0 pieces: run playbooks/serve.yml")


def test_door_is_open() -> None:
    """`wrong-key`: the gateway lets anyone in."""

    def open_door(text: str) -> str:
        return re.sub(r'(map \$glm_key \$glm_key_name \{\n    default) "";', r'\1 "anyone";', text)

    with pair.replaced(bed.HEAD, SITE, open_door, *RELOAD):
        assert fails("wrong-key").startswith("the door answers 200 to a wrong key, not 401")


def test_counters_stand_still() -> None:
    """`acceptance`: no draft is counted. The gateway shows still counters in the place of an engine that drafts
    nothing; test_together.py has such an engine, under `make test-full`."""
    still = "    location = /metrics { return 200 'vllm:spec_decode_num_draft_tokens_total 7.0\n'; }"
    with gateway(LAST, still):
        assert fails("acceptance").startswith("speculator mtp is deployed and drafted nothing")


@pytest.mark.parametrize(
    ("file", "change", "sentence"),
    [
        (
            "deployment.json",
            lambda text: re.sub(r'"release": "\w+"', '"release": "000000000000"', text),
            r"spark-a has release \w{12} and spark-b 000000000000: run site.yml for both nodes",
        ),
        (
            "serve.yaml",
            lambda text: text + "# a line more\n",
            r"spark-a has serve.yaml \w+ and spark-b \w+: run site.yml for both nodes",
        ),
    ],
)
def test_nodes_differ(file: str, change: object, sentence: str) -> None:
    """`ranks`: the worker has another release or configuration. Only its disk says so; its engine runs the old."""
    before = bed.state(bed.WORKER)
    with pair.replaced(bed.WORKER, f"{CURRENT}/{file}", change):
        pair.wait_for(lambda: differs(before, bed.state(bed.WORKER)), 10, "the worker's watch sees its disk")
        assert re.fullmatch(sentence, fails("ranks"))
    pair.wait_for(lambda: not differs(before, bed.state(bed.WORKER)), 10, "the worker's watch sees it mended")


def differs(before: dict, now: dict) -> bool:
    return any(before[key] != now[key] for key in ("release", "config_sha256"))


def test_watch_of_the_peer_is_down() -> None:
    """`ranks`: the peer can't be asked. Its watch is stopped for less than the engines' patience with silence."""
    bed.on(bed.WORKER, "systemctl", "stop", "glm-vllm-watch")
    try:
        assert fails("ranks").startswith("the peer does not say how it is (")
    finally:
        bed.on(bed.WORKER, "systemctl", "start", "glm-vllm-watch")


def test_playbook_says_the_sentence() -> None:
    """Fails when playbooks/smoke.yml does not fail, or hides why, or changes something."""
    with pair.replaced(bed.HEAD, KEYS, lambda _: json.dumps({"schema": 1, "keys": []})):
        run = pair.run_playbook("playbooks/smoke.yml")
    assert run.status != 0
    assert run.failures() == {
        bed.HEAD: ["key: /etc/glm-vllm/api-keys holds no key: run `glm-vllm key new default --reload`"]
    }
    assert run.total("changed") == {}
