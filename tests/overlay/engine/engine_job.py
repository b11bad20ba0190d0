"""Run vLLM in a process of its own: `engine_job.py JOBS RESULTS`, both JSON files.

JOBS is a list of {"name", "model", "options", "prompts", "tokens", "scored", "temperature"}: one engine each, in this
process where it has one rank; temperature 0 where none is given. RESULTS maps each name to {"outputs": [{"tokens",
"logprobs"}, ...], "scores": [[...], ...], "drafted": int, "accepted": int}; a score holds the log-probability of each
token of a "scored" text after its first.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING")

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

COMMON = dict(
    max_model_len=2048,
    max_num_seqs=4,
    kv_cache_memory_bytes=64 << 20,
    enforce_eager=True,
    enable_prefix_caching=False,
    limit_mm_per_prompt={"image": 0, "video": 0},
    disable_log_stats=False,
    seed=0,
)


def run(job: dict) -> dict:
    """One engine: a continuation of every prompt, past any end token, and the scores of every text."""
    llm = LLM(job["model"], **(COMMON | job["options"]))
    sampling = SamplingParams(
        max_tokens=job["tokens"], temperature=job.get("temperature", 0), logprobs=1, ignore_eos=True
    )
    finished = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    scores = []
    for ids in job.get("scored", []):
        [request] = llm.generate(
            [{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), use_tqdm=False
        )
        scores.append([step[token].logprob for token, step in zip(ids[1:], request.prompt_logprobs[1:], strict=True)])
    counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    outputs = []
    for request in finished:
        tokens = list(request.outputs[0].token_ids)
        logprobs = [step[token].logprob for token, step in zip(tokens, request.outputs[0].logprobs, strict=True)]
        outputs.append({"tokens": tokens, "logprobs": logprobs})
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return {
        "outputs": outputs,
        "scores": scores,
        "drafted": int(counters.get("vllm:spec_decode_num_draft_tokens") or 0),
        "accepted": int(counters.get("vllm:spec_decode_num_accepted_tokens") or 0),
    }


if __name__ == "__main__":
    jobs, results = Path(sys.argv[1]), Path(sys.argv[2])
    results.write_text(json.dumps({job["name"]: run(job) for job in json.loads(jobs.read_text())}))
