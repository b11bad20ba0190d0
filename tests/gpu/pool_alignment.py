"""Does a prefill chunk that ends inside a pool spoil the indexer's keys? Asked of unmodified vLLM 0.33.0 on a GPU.

    python pool_alignment.py WORK OUT.json      needs vLLM 0.33.0 and one GPU; unattended, a few minutes

Two prompts are prefilled together, so that the second one's first chunk ends at 0, 1, 2 and 3 modulo the pool of four
tokens; then the second alone, in one chunk. The keys that the indexer has stored for it are compared pool by pool: two
correct keys differ by rounding, a key that lacks a token or has another prompt's is another vector. The same again with
our scheduler. OUT.json: for each scheduler and remainder the cosine of the pool at the chunk's end and the least of all
others, and the verdict. Exit 0 when it could be told, whatever it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).parent))

POOL, STEP, VALUES = 4, 512, 128  # tokens a pool, tokens a step, fp8 values a key
SECOND = 400  # tokens of the second prompt: alone it is one chunk
FIRST_CHUNK = 200  # of the second prompt beside the first, plus the remainder
SAME, OTHER = 0.95, 0.8  # cosines: rounding stays above the one, another vector below the other
OURS = "glm_vllm_overlay.hooks.scheduler.PoolAlignedScheduler"


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that are no special ones."""
    return [20 + (seed * 7919 + position * 104729) % 900 for position in range(length)]


def read_keys(cache: Any, slots: list[int]) -> Any:
    """The stored keys [pools, 128], float32, of a cache [pages, keys, 132] of bytes: a page is values, then scales."""
    import torch

    keys, held = [], cache.shape[1]
    for slot in slots:
        page = cache[slot // held].reshape(-1)
        place = slot % held
        values = page[place * VALUES : (place + 1) * VALUES].view(torch.float8_e4m3fn).float()
        scale = page[held * VALUES + 4 * place : held * VALUES + 4 * place + 4].clone().view(torch.float32)
        keys.append(values * scale)
    return torch.stack(keys).cpu()


class Recorder:
    """Stands before vLLM's insertion of pooled keys and keeps where each call puts them, step by step."""

    def __init__(self) -> None:
        from vllm.models.glm5next.nvidia import sparse_indexer

        self.original, self.calls, self.cache = sparse_indexer._kpool_compress_insert, [], None
        sparse_indexer._kpool_compress_insert = self

    def __call__(self, k: Any, gate: Any, ape: Any, cache: Any, slots: Any, *rest: Any, **more: Any) -> None:
        self.original(k, gate, ape, cache, slots, *rest, **more)
        self.cache = cache
        self.calls.append([slot for slot in slots.tolist() if slot >= 0])


def compare(folder: Path, scheduler: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Cosines by remainder, in this process."""
    import torch
    from glm_vllm_overlay.exl3.plugin import register
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    register()
    recorder = Recorder()
    ours = {"scheduler_cls": OURS} if scheduler == "ours" else {}
    llm = LLM(
        str(folder), quantization="exl3", max_model_len=1024, gpu_memory_utilization=0.3, max_num_seqs=2,
        max_num_batched_tokens=STEP, limit_mm_per_prompt={"image": 0, "video": 0}, enable_prefix_caching=False,
        kv_cache_dtype="fp8_ds_mla", enforce_eager=True, additional_config={"exl3_backend": "reference"}, **ours,
        **engine,
    )  # fmt: skip

    def prefill(*prompts: list[int]) -> list[list[int]]:
        recorder.calls.clear()
        if recorder.cache is not None:
            recorder.cache.zero_()  # or a key that is not written would be the earlier run's right one
        given = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        llm.generate(given, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        return [list(call) for call in recorder.calls]

    second = prompt(SECOND, 2)
    [slots] = prefill(second)
    assert len(slots) == SECOND // POOL, f"alone it is no single chunk: {len(slots)} pools"
    alone = read_keys(recorder.cache, slots)
    found = {}
    for remainder in range(POOL):
        chunk = FIRST_CHUNK + remainder
        first = prompt(STEP - chunk, 1)
        calls = [call for call in prefill(first, second) if call]
        # The first step has both prompts' pools, in an order that is the engine's; later ones have the second's only.
        theirs, later = len(first) // POOL, [slot for call in calls[1:] for slot in call]
        orders = calls[0][theirs:] + later, calls[0][: len(calls[0]) - theirs] + later
        if len(orders[0]) != SECOND // POOL:
            problem = f"{len(orders[0])} pools were inserted, not {SECOND // POOL}"
            found[remainder] = {"chunk": chunk, "problem": problem}
            continue
        likeness = [torch.nn.functional.cosine_similarity(read_keys(recorder.cache, slots), alone) for slots in orders]
        cosines = max(likeness, key=torch.mean).tolist()
        boundary = chunk // POOL
        others = [value for number, value in enumerate(cosines) if number != boundary]
        found[remainder] = {"chunk": chunk, "boundary": cosines[boundary], "least of others": min(others)}
    ends = getattr(llm.llm_engine.engine_core.engine_core.scheduler, "unaligned_ends", None)
    return {"cases": found, "unaligned ends": ends}


def verdict(stock: dict[str, Any]) -> str:
    """wrong, right, or undecided, with the reason, from the cosines without our scheduler."""
    if any("problem" in case for case in stock.values()):
        return "undecided: " + next(case["problem"] for case in stock.values() if "problem" in case)
    if any(case["least of others"] < SAME for case in stock.values()) or stock["0"]["boundary"] < SAME:
        return "undecided: keys away from the boundary differ by more than rounding"
    cut = [stock[str(remainder)]["boundary"] for remainder in range(1, POOL)]
    if all(value < OTHER for value in cut):
        return "wrong: a pool that a chunk's end cuts is stored as another vector"
    return (
        "right: cut pools are stored as whole ones" if all(value > SAME for value in cut) else "undecided: in between"
    )


def main() -> int:
    import serving

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", default="{}", help="further LLM() options, JSON")
    parser.add_argument("--scheduler", choices=("stock", "ours"), help="one of them, in this process")
    options = parser.parse_args()
    folder = options.work / "pool-of-four"
    if options.scheduler:
        options.out.write_text(json.dumps(compare(folder, options.scheduler, json.loads(options.engine))))
        return 0
    if not folder.exists():
        options.work.mkdir(parents=True, exist_ok=True)
        serving.write_checkpoint(folder, serving.TEXT | {"index_kpool": POOL})
    document: dict[str, Any] = {"schema": 1}
    for scheduler in ("stock", "ours"):
        part = options.work / f"{scheduler}.json"
        command = [
            sys.executable,
            __file__,
            str(options.work),
            str(part),
            "--scheduler",
            scheduler,
            "--engine",
            options.engine,
        ]
        environment = os.environ | {"PYTHONPATH": f"{serving.SOURCES}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        failed = {"failed": done.stderr[-4000:]}
        document[scheduler] = json.loads(part.read_text()) if done.returncode == 0 else failed
    told = "failed" not in document["stock"]
    document["verdict"] = (
        verdict(document["stock"]["cases"]) if told else "undecided: vLLM's own scheduler did not get through"
    )
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(document["verdict"])
    return 0 if told else 1


if __name__ == "__main__":
    sys.exit(main())
