"""The power of either node is cut while weights are fetched, copied and verified; the next run finishes it."""

from __future__ import annotations

import time
from collections.abc import Callable

import bed
import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


def cut_when(site, node: str, reached: Callable[[], bool], **more: object) -> None:
    """Start a run, cut the node's power as soon as `reached`, and switch it on again once the run has failed."""
    process = site.start(**more)
    deadline = time.monotonic() + 300
    while not reached():
        assert process.poll() is None, f"the run ended before the moment came:\n{process.stdout.read()[-3000:]}"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    bed.twin("kill", node)
    out, _ = process.communicate(timeout=300)
    assert process.returncode != 0, "a run through a power cut claims to have succeeded"
    print(out[-1500:])


def recovers(site, node: str, **more: object) -> tuple[dict[str, int], dict[str, int]]:
    """Run again; nothing wrong counts before, all is right after. Returns the placed files before and after."""
    assert site.wrong(node) == []
    if len(site.placed(node)) < len(site.files):
        assert not site.verified(node), "an incomplete model is marked verified"
    before = site.placed(node)
    bed.twin("start", node)
    site.run(**more)
    assert site.whole(bed.HEAD)
    assert site.whole(bed.WORKER)
    return before, site.placed(node)


def test_while_fetching(site):
    site.wipe()
    cut_when(site, bed.HEAD, lambda: len(site.placed(bed.HEAD)) >= 2 and site.arriving(bed.HEAD) > 20 << 20)
    before, after = recovers(site, bed.HEAD)
    assert len(before) >= 2
    assert {name: after[name] for name in before} == before, "a file that was there was brought again"
    # each of the streams may have had some megabytes on the way
    assert site.served() < site.bytes * 1.2, (site.served(), site.bytes)


@pytest.mark.parametrize("node", [bed.HEAD, bed.WORKER])
def test_while_copying(site, node):
    site.wipe()
    cut_when(site, node, lambda: site.arriving(bed.WORKER) > 20 << 20)
    before, after = recovers(site, node)
    assert {name: after[name] for name in before} == before
    assert site.served() < site.bytes * 1.01, "what the head had was fetched again"


def test_while_verifying(site):
    site.run()
    before = site.placed(bed.WORKER)
    began = time.monotonic()

    def reading() -> bool:
        return (
            time.monotonic() - began > 1
            and "active" == bed.on(bed.WORKER, "sh", "-c", "systemctl is-active glm-vllm-model || true").strip()
        )

    cut_when(site, bed.WORKER, reading, model_fetch_full=True)
    recovers(site, bed.WORKER)
    assert site.placed(bed.WORKER) == before


def test_afterwards_nothing_is_left_to_do(site):
    site.run()
    out = site.run()
    recap = [line for line in out.splitlines() if "changed=" in line]
    assert len(recap) == 2
    assert all("changed=0" in line for line in recap), recap
