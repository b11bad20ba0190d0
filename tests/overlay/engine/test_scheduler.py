"""PoolAlignedScheduler in a real engine; its arithmetic on the pinned vLLM is in tests/overlay/pinned."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def served(checkpoint, tmp_path_factory) -> dict:
    """Results of scheduler_job.py."""
    results = tmp_path_factory.mktemp("scheduler") / "results.json"
    command = [sys.executable, HERE / "scheduler_job.py", checkpoint("chain"), results]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(results.read_text())


@pytest.mark.full
def test_no_chunk_ends_inside_a_pool_where_vllms_own_do(served):
    assert served["ours"]["unaligned"] == 0 < served["stock"]["unaligned"]


@pytest.mark.full
def test_the_same_text_in_about_as_many_steps(served):
    """The twin's operators are right for any chunk, so both are."""
    assert served["ours"]["tokens"] == served["stock"]["tokens"]
    assert abs(served["ours"]["steps"] - served["stock"]["steps"]) <= 1
