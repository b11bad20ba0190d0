"""An upgrade and the way back, under load: another release and another configuration, undone and done again."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bed
import pair
import pytest
import requests

SEQUENCES = 3  # the newer deployment's; the twin's own is another


def deployed() -> dict[str, Any]:
    """Release and hash of serve.yaml that each node runs: the same on both."""
    said = [bed.state(node) for node in pair.NODES]
    both = [{"release": s["release"], "serve": s["config_sha256"]} for s in said]
    assert both[0] == both[1]
    return both[0]


@contextlib.contextmanager
def asked() -> Iterator[Counter[str]]:
    """Counts of what a client gets meanwhile that asks without end: the status, or how a request broke off."""
    counts: Counter[str] = Counter()
    over = threading.Event()

    def ask() -> None:
        with bed.Endpoint() as endpoint:
            while not over.wait(0.2):
                body = {"model": bed.MODEL, "messages": [{"role": "user", "content": pair.QUESTION}], "max_tokens": 16}
                try:
                    counts[str(endpoint.post("/v1/chat/completions", json=body, timeout=120).status_code)] += 1
                except requests.RequestException as error:
                    counts[type(error).__name__] += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield counts
    finally:
        over.set()
        thread.join()


@pytest.mark.full
def test_an_upgrade_is_undone_and_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four starts of the engine. Fails when a return leaves a part of what it leaves behind, when a request is lost
    where a refusal would do, or when the run after it does anything at all."""
    older = deployed()
    project = pair.other_release(tmp_path)
    run = pair.run_playbook("site.yml", project=project, timeout=1500, glm_vllm_overlay_max_num_seqs=SEQUENCES)
    assert run.status == 0, run.failures()
    newer = deployed()
    assert newer["release"] != older["release"]
    assert newer["serve"] != older["serve"]
    for wanted in (older, newer, older):
        with asked() as counts:
            run = pair.run_playbook("playbooks/rollback.yml", timeout=1500)
        with capsys.disabled():
            print(f"\nback: {run.seconds:.0f} s, answers {dict(counts)}")
        assert run.status == 0, run.failures()
        assert deployed() == wanted
        assert pair.answer() == pair.ANSWER
        assert set(counts) <= {"200", "503"}, counts
    run = pair.run_playbook("site.yml")
    assert run.status == 0, run.failures()
    assert run.changed() == {}, "the inventory says what runs"


def test_a_return_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    """Fails when one node is changed although the other has nothing to return to."""
    previous = "/var/lib/glm-vllm/deployments/previous"
    hide = f"test ! -L {previous} || mv -T {previous} {previous}.hidden"
    with pair.service_untouched():
        try:
            bed.on(bed.WORKER, "sh", "-c", hide)
            run = pair.run_playbook("playbooks/rollback.yml")
        finally:
            bed.on(bed.WORKER, "sh", "-c", f"test ! -L {previous}.hidden || mv -T {previous}.hidden {previous}")
        assert run.status != 0
        assert "so there is none to return to" in " ".join(run.failures()[bed.WORKER])
        assert run.total("changed") == {}
