"""A rehearsal of the committed serve.yaml, as far as the pinned vLLM's parser, with headers of the real size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import PINNED, ROOT

HERE = Path(__file__).parent


def test_its_kv_cache_has_the_strides_of_the_served_ones(found) -> None:
    """Fails when a layer is left out: with the first five alone a block is a fifth."""
    assert found["rehearsed"]["rehearsed"] == found["rehearsed"]["served"]


@pytest.mark.full  # a process of its own: the other one's vLLM believes that it is on a GB10 already
def test_its_options_are_the_served_ones_but_what_is_the_pairs(models, tmp_path: Path) -> None:
    if not (PINNED / "vllm").is_dir():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs .cache/vllm-0.33.0: run `make setup`")
    environment = os.environ | {
        "PYTHONPATH": f"{PINNED}:{ROOT}/files/overlay/src",
        "HOME": str(tmp_path),
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, str(HERE / "rehearsal_job.py"), *map(str, models.values()), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    served = yaml.safe_load((ROOT / "tests/golden/sparks/spark-a/etc/glm-vllm/serve.yaml").read_text())
    common = {
        "load_format": "dummy",
        "tensor_parallel_size": 1,
        "distributed_executor_backend": None,
        "kv_cache_memory_bytes": served["kv-cache-memory-bytes"],
        "max_model_len": 1000000,
        "max_num_batched_tokens": 4640,
        "max_num_seqs": 4,
        "quantization": "exl3",
        "additional_config": json.loads(served["additional-config"]),
        "model": True,
    }
    assert all(common.items() <= answer.items() for answer in found.values())
    assert [answer["sparse"] for answer in found.values()] == [3, 3, 3]
    assert [answer["cudagraph_capture_sizes"] for answer in found.values()] == [
        None,
        [1, 2, 3, 4, 6, 8, 9, 12],
        [1, 2, 4, 8, 16, 24, 32],
    ]
    drafts = [answer["speculative_config"] for answer in found.values()]
    assert drafts[0] is None and drafts[1]["method"] == "mtp"
    assert drafts[2]["model"] == str(tmp_path / "dflash2/drafter") and drafts[2]["draft_tensor_parallel_size"] == 1
