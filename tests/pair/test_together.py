"""Both sides live and die together. These tests cost starts of the engine: few, and each shows several things."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bed
import pair
import pytest

DROP_IN = "/run/systemd/system/{0}.service.d/override.conf"


@pytest.fixture(autouse=True)
def serving() -> Iterator[None]:
    """Every test here begins and ends with a pair that serves."""
    assert pair.health() == 200
    yield
    pair.wait_until_serving()


@contextlib.contextmanager
def edited(node: str, setting: str) -> Iterator[None]:
    """What `systemctl edit --runtime` of the engine's unit on one node leaves, taken away afterwards."""
    path = DROP_IN.format(pair.UNITS[node])
    script = 'mkdir -p "${1%/*}" && printf "[Service]\\nEnvironment=%s\\n" "$2" > "$1" && systemctl daemon-reload'
    bed.on(node, "sh", "-c", script, "edit", path, setting)
    try:
        yield
    finally:
        bed.on(node, "rm", "-f", path)
        bed.on(node, "systemctl", "daemon-reload")


def over(incident: dict[str, Any] | None) -> dict[str, Any] | None:
    """An incident that has ended, or None."""
    return incident if incident and incident["seconds"] else None


def status() -> str:
    """What the head's one screen shows; its exit status tells that something is wrong, which it is here."""
    return bed.on(bed.HEAD, "sh", "-c", "glm-vllm status || [ $? = 1 ]")


def says(node: str) -> str:
    """What the engine's gate or its last start says on a node."""
    said = bed.on(node, "journalctl", "--unit", pair.UNITS[node], "--lines=20", "--output=cat", "--no-pager")
    return f"{said}\n{pair.show(node, pair.UNITS[node], 'StatusText')}"


def test_worker_stopped_edited_alone_and_started() -> None:
    """One start of the engine. Fails when the head goes on alone or does not come back, when the smoke check `health`
    passes meanwhile, or when nodes with different settings start together."""
    before = pair.starts()
    bed.on(bed.WORKER, "systemctl", "stop", "glm-vllm-worker")
    try:
        pair.wait_for(lambda: pair.health() == 503, 60, "the head leaves service after the worker's stop")
        with bed.Endpoint() as endpoint:
            reply = endpoint.get("/v1/models")
        assert reply.status_code == 503 and int(reply.headers["Retry-After"]) > 0
        assert reply.json()["error"]["code"] == "engine_not_ready"
        found = pair.probe()
        assert [(check["name"], check["ok"]) for check in found["checks"]] == [("health", False)]
        assert "The engine is not ready" in found["message"]
        pair.wait_for(lambda: "glm-vllm-worker on spark-b is stopped" in status(), 30, "status says why")
        with edited(bed.WORKER, "GLM_SPECULATOR=none"):
            bed.on(bed.WORKER, "systemctl", "start", "--no-block", "glm-vllm-worker")
            sentence = (
                "spark-b runs GLM_SPECULATOR=none and spark-a mtp: undo `systemctl edit glm-vllm-worker` on spark-b"
            )
            pair.wait_for(lambda: sentence in says(bed.WORKER), 90, "the gate refuses nodes that differ")
            assert pair.health() == 503
    finally:
        bed.on(bed.WORKER, "systemctl", "start", "--no-block", "glm-vllm-worker")
    pair.wait_until_serving()
    after = pair.starts()
    assert all(after[node] != before[node] for node in pair.NODES)
    # systemd hears of it a moment after the first answer
    incident = pair.wait_for(lambda: over(bed.state(bed.HEAD)["incident"]), 20, "the incident is over")
    assert "glm-vllm-worker on spark-b is stopped" in incident["what"]


def test_worker_without_power_then_both_reboot() -> None:
    """One start of the engine. Fails when site.yml waits for a dead node, or says nothing of use; when the pair needs a
    hand after a boot of both; or when the boot left something for a run to mend."""
    bed.twin("kill", bed.WORKER)
    try:
        pair.wait_for(lambda: pair.health() == 503, 60, "the head leaves service after the worker's death")
        run = pair.run_playbook("site.yml")
        assert run.status != 0 and run.seconds < 90
        assert f"{bed.WORKER} does not answer at {bed.NET}.12: check its power" in " ".join(run.failures()[bed.WORKER])
        assert run.total("changed") == {}
        bed.on(bed.HEAD, "systemctl", "reboot")
    finally:
        bed.twin("start", bed.WORKER)
    pair.wait_until_serving()
    run = pair.run_playbook("site.yml")
    assert run.status == 0, run.failures()
    assert run.changed() == {}


@pytest.mark.full
def test_memory_runs_out() -> None:
    """One start of the engine. Fails when the guard lets it happen, when the incident does not say who used it, or when
    the gate lets the engine start before there is room."""
    before = pair.starts()
    try:
        bed.twin("meminfo", bed.WORKER, "1000000")
        pair.wait_for(lambda: pair.health() == 503, 60, "the pair leaves service")
        pair.wait_for(lambda: "has 1.0 available" in says(bed.WORKER), 60, "the gate says what is missing")
        assert pair.health() == 503
    finally:
        bed.twin("meminfo", bed.WORKER, "119500000")
    pair.wait_until_serving()
    assert all(pair.starts()[node] != before[node] for node in pair.NODES)
    incident = pair.wait_for(lambda: over(bed.state(bed.WORKER)["incident"]), 20, "the incident is over")
    assert re.match(
        r"the memory guard ended the engine: 0\.95 GiB are available, less than 1\.50; in GiB: VLLM::", incident["what"]
    )
    assert incident["what"] in status()


@pytest.mark.full
def test_reboot_of_both_while_they_serve() -> None:
    """One start of the engine. Fails when an orderly reboot leaves a unit behind that does not start."""
    before = pair.starts()
    for node in pair.NODES:
        bed.on(node, "systemctl", "reboot")
    pair.wait_for(lambda: pair.health() != 200, 60, "the pair goes down")
    pair.wait_until_serving()
    assert all(pair.starts()[node] != before[node] for node in pair.NODES)


@pytest.mark.full
def test_restart_lets_a_running_request_end() -> None:
    """One start of the engine. Fails when a stop ends a request that runs, or rank 1 before the head: an incident."""
    question = {"model": bed.MODEL, "prompt": "1", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    incident = bed.state(bed.WORKER)["incident"]
    with bed.Endpoint() as endpoint, endpoint.post("/v1/completions", json=question, stream=True) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith(b"data: {"))
        assert next(lines)
        assert "1 request ended first" in restart().output
        *_, last = lines
    assert json.loads(last.removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
    assert bed.state(bed.WORKER)["incident"] == incident


@pytest.mark.full
def test_speculator_edited_away_on_both() -> None:
    """Two starts of the engine. Fails when an equal edit of both nodes is refused, or when the smoke check `acceptance`
    does not miss the drafts that the deployment promises."""
    with edited(bed.HEAD, "GLM_SPECULATOR=none"), edited(bed.WORKER, "GLM_SPECULATOR=none"):
        restart()
        assert "GLM_SPECULATOR=none" in pair.show(bed.HEAD, "glm-vllm-head", "Environment")["Environment"]
        found = pair.probe()
        assert found["checks"][-1]["name"] == "acceptance"
        assert found["message"].startswith(
            "acceptance: speculator mtp is deployed and drafted nothing: mend `systemctl edit"
        )
    restart()
    assert pair.probe()["ok"]


@pytest.mark.full
def test_rerun_after_a_wrong_wheel_serves_the_new_release(tmp_path: Path) -> None:
    """Two starts of the engine. Fails when a half-built release stands in the way of a whole one, or `previous` is not
    kept for the way back."""
    old, project = bed.state(bed.HEAD)["release"], pair.other_release(tmp_path)
    try:
        with pair.wrong_wheel(bed.WORKER):
            assert pair.run_playbook("site.yml", project=project).status != 0
        run = pair.run_playbook("site.yml", project=project)
        assert run.status == 0, run.failures()
        new = {bed.state(node)["release"] for node in pair.NODES}
        assert len(new) == 1 and old not in new
        assert pair.answer() == pair.ANSWER
        previous = bed.on(bed.HEAD, "cat", "/var/lib/glm-vllm/deployments/previous/deployment.json")
        assert json.loads(previous)["release"] == old
    finally:
        run = pair.run_playbook("site.yml")
    assert run.status == 0, run.failures()
    assert bed.state(bed.HEAD)["release"] == old


def restart() -> pair.Run:
    """Restart both engines, as playbooks/restart.yml does, and wait."""
    run = pair.run_playbook("playbooks/restart.yml")
    assert run.status == 0, run.failures()
    pair.wait_until_serving()
    return run
