"""What upstream repaired before 0.33.0, by behaviour: the wheel does it right, and did not before (upstream_job.py).

The Triton kernels among the repairs are tested on a GPU: tests/gpu/test_upstream.py.
"""

import json
import os
import subprocess
import sys

import pytest
from conftest import HERE, PINNED, ROOT

ALL, END, THOUGHT_ENDS, THINK, A, B = list(range(6)), 0, 1, 2, 3, 4
GRAMMAR = [True, True, True, [], [A, B, END], False, False, [END]]
BOUNDARY = [[[THINK, THOUGHT_ENDS, A], [THINK, THOUGHT_ENDS], [THINK, THINK]], [ALL, ALL, [A], [B], [END]]]
WANTED = {
    # xgrammar's end and the end of a thought inside a draft (vLLM #52805, #53046)
    "termination, a step later": GRAMMAR,
    "termination, in the step": GRAMMAR,
    "termination, taken back": GRAMMAR,
    "boundary, kept drafts": BOUNDARY,
    "boundary, masks": BOUNDARY,
    # DFlash's keys need no next token (vLLM #54163)
    "block drop": {"dflash": False, "mtp": True, "eagle3": True},
    # 1,000,000 tokens in pools of four; the buffer holds 2 · 8 rows of that length
    "index workspace": {"longest row": 250_000, "gathered": 4_000_000},
    # the pools' tail has no table to run out of (vLLM #53982)
    "ring": {"blocks": 1, "generic slots": False},
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """Case → what the wheel says, what the wheel with the repair undone says."""
    if not (PINNED / "vllm").is_dir():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs .cache/vllm-0.33.0: run `make setup`")
    environment = os.environ | {
        "PYTHONPATH": f"{PINNED}:{ROOT}/files/overlay/src",
        "HOME": str(tmp_path_factory.mktemp("home")),
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, str(HERE / "upstream_job.py"), str(tmp_path_factory.mktemp("as_before"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", WANTED)
def test_the_wheel_has_the_repair(said: dict[str, list], case: str) -> None:
    now, before = said[case]
    assert now == WANTED[case]
    assert before != WANTED[case], "the case does not see the repair"


def test_a_videos_placeholder_has_a_place_for_each_pair_of_frames(said: dict[str, list]) -> None:
    now, before = said["video"]
    assert all(stamps == pairs for stamps, pairs in now)
    assert any(stamps != pairs for stamps, pairs in before), "the case does not see the repair"
