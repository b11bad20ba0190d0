"""`scheduler_job.py MODEL RESULTS`: two prompts in small steps, with vLLM's scheduler and with ours.

RESULTS: {"stock" | "ours": {"tokens": [[...], [...]], "unaligned": chunk ends inside a pool, "steps": engine steps}}.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING")

from glm_vllm_overlay.hooks.scheduler import PoolAlignedScheduler  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402


class Counting(PoolAlignedScheduler):
    """vLLM's own decisions, our count."""

    def _aligned(self, request, start, tokens):
        return tokens


def run(scheduler: type, prompts: list[list[int]]) -> dict:
    llm = LLM(
        sys.argv[1],
        max_model_len=512,
        max_num_seqs=2,
        max_num_batched_tokens=70,
        kv_cache_memory_bytes=32 << 20,
        enforce_eager=True,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 0, "video": 0},
        scheduler_cls=scheduler,
    )
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    finished = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    core = llm.llm_engine.engine_core.engine_core
    result = {
        "tokens": [list(request.outputs[0].token_ids) for request in finished],
        "unaligned": core.scheduler.unaligned_ends,
        "steps": core.scheduler.current_step,
    }
    llm.llm_engine.engine_core.shutdown()
    del llm, core
    gc.collect()
    cleanup_dist_env_and_memory()
    return result


if __name__ == "__main__":
    prompts = [[20 + (seed + 7 * i) % 200 for i in range(length)] for seed, length in ((1, 93), (2, 211))]
    results = {"stock": run(Counting, prompts), "ours": run(PoolAlignedScheduler, prompts)}
    Path(sys.argv[2]).write_text(json.dumps(results))
