"""pinned_job.py TARGET DRAFTER: everything that the tests of this folder ask the pinned vLLM, as one JSON document."""

import contextlib
import functools
import io
import json
import os
import sys
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import model
from glm_vllm_twin import torchvision_ops

torchvision_ops.declare()  # vLLM imports the registry's torchvision, whose compiled half needs CUDA

from glm_vllm_overlay import cli, rehearsal  # noqa: E402
from glm_vllm_overlay.hooks import compat  # noqa: E402
from glm_vllm_overlay.plan import command as plan_command  # noqa: E402
from glm_vllm_overlay.plan.cache import Engine, Planner  # noqa: E402

# The headers stay what they are, and there are 150,000 of them.
plan_command.read_checkpoint = functools.cache(plan_command.read_checkpoint)

GIB = 1 << 30
OPTIONS = {
    "model": sys.argv[1],
    "max-model-len": 1000000,
    "max-num-seqs": 4,
    "max-num-batched-tokens": 4640,
    "tensor-parallel-size": 2,
    "limit-mm-per-prompt": {"image": 48, "video": 1},
}


def caches() -> dict:
    """How the pool is cut, by case: the inputs of the first analysis, 24 GiB a rank."""
    drafter = model.DRAFTER | {"sliding_window": 4096}
    cases = {
        "no draft": dict(tokens=7),
        "mtp": dict(tokens=2, mtp=True),
        "dflash2": dict(tokens=7, drafter=drafter),
        "bf16 state": dict(tokens=7, state_dtype="bfloat16"),
        "bf16 state, dflash2": dict(tokens=7, state_dtype="bfloat16", drafter=drafter),
    }
    for length in (1_000_000, 850_000, 256_000):
        for kind in ("stock", "split"):
            cases[f"{kind} {length}"] = dict(
                tokens=7, drafter=model.DRAFTER, drafter_kv=kind, max_model_len=length, max_num_batched_tokens=4640
            )
    answers = {}
    for name, case in cases.items():
        case = {"max_model_len": 1_000_000, "max_num_batched_tokens": 2048, "max_num_seqs": 2} | case
        mtp, draft = case.pop("mtp", False), case.pop("drafter", None)
        planner = Planner(model.TARGET, draft, Engine(**case), mtp)
        cache = planner.cache()
        answers[name] = {
            "block": cache.block_size,
            "bytes": cache.bytes_per_block,
            "blocks": cache.blocks(24 * GIB),
            "contexts": cache.blocks(24 * GIB) / cache.blocks_per_request,
            "tokens per GiB": case["max_model_len"] / (cache.blocks_per_request * cache.bytes_per_block / GIB),
            "groups": [vars(group) for group in cache.groups],
            "longest": planner.longest(cache.need()),
            "longest, a block less": planner.longest(cache.need() - cache.bytes_per_block),
        }
    return answers


def live() -> dict:
    """The caches of a tiny model that an engine on a GPU has built, as planned for that GPU."""
    import speculation

    return {case: speculation.planned(case, (9, 0)) for case in speculation.CASES}


def rehearsed() -> dict:
    """How the pool of a rehearsal is cut, whose kernels have its strides as constants, beside the served model's."""
    found = {}
    for name, target in {"served": model.TARGET, "rehearsed": rehearsal.target_config(model.TARGET, 1)}.items():
        cache = Planner(target, None, Engine(1_000_000, 4, 4640, tokens=2), True).cache()
        found[name] = {"block": cache.block_size, "bytes": cache.bytes_per_block}
    return found


def tensors() -> dict:
    """Where vLLM places each layer in a block, with split groups: (group, offset, bytes, stride) of each."""
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups

    engine = Engine(1_000_000, 4, 4640, tokens=7, drafter_kv="split")
    planner = Planner(model.TARGET, model.DRAFTER, engine)
    groups, placed = planner._groups(), []
    config = get_kv_cache_config_from_groups(planner.vllm_config, groups, 24 * GIB)
    owner = {name: number for number, group in enumerate(groups) for name in group.layer_names}
    for tensor in config.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            size = planner.specs[name].page_size_bytes
            offset = tensor.offset + index * tensor.layer_stride
            placed.append([owner[name], name, offset, size, tensor.block_stride])
    return {"placed": placed, "blocks": [group.kv_cache_spec.block_size for group in groups]}


def start() -> dict:
    """What a start on a GB10 would be told of, from vLLM's own layers without weights."""
    from glm_vllm_overlay.hooks import startup

    planner = Planner(model.TARGET, model.DRAFTER, Engine(1_000_000, 4, 4640, tokens=7))
    config = planner.vllm_config
    config.parallel_config.world_size = 2
    config.kernel_config = SimpleNamespace(enable_flashinfer_autotune=False)
    facts = startup.target_facts(config)
    told = {name: sorted(value) if isinstance(value, set) else value for name, value in facts.items()}
    return {"facts": told, "problems": startup.target_problems(facts, pdl=False)}


def chunks() -> dict:
    """Ends of the chunks of one long prompt beside other requests' tokens, by scheduler and step."""
    from glm_vllm_overlay.hooks.scheduler import PoolAlignedScheduler
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    answers = {}
    for kind in (AsyncScheduler, PoolAlignedScheduler):
        for step, blocks in ((2048, True), (4640, True), (2048, False)):
            scheduler = kind.__new__(kind)
            scheduler.cache_config = scheduler.scheduler_config = SimpleNamespace(
                block_size=4608, long_prefill_token_threshold=0
            )
            scheduler.block_size = scheduler.hash_block_size = 4608
            scheduler.max_num_scheduled_tokens, scheduler.num_hash_lookahead_tokens = step, 0
            scheduler.use_eagle_block_drop = scheduler.mamba_partial_cache_hit = False
            scheduler.mamba_shared_prefix_checkpoint = False
            scheduler.mamba_has_prefill_checkpoint_blocks, scheduler.mamba_prefill_checkpoint_alignment = True, 16
            scheduler.pool, scheduler.ends_on_blocks = 4, blocks
            request = SimpleNamespace(
                num_computed_tokens=0, num_prompt_tokens=30001, num_tokens=30001, shared_prefix_boundary=0
            )
            ends, turn = [], 0
            while request.num_computed_tokens < request.num_prompt_tokens and turn < 200:
                taken, turn = (0, 1, 3, 8, 21, 32)[turn % 6], turn + 1
                tokens = min(request.num_tokens - request.num_computed_tokens, step - taken)
                if blocks or kind is PoolAlignedScheduler:  # else vLLM takes what there is
                    tokens = scheduler._mamba_block_aligned_split(request, tokens)
                request.num_computed_tokens += tokens
                ends.append(request.num_computed_tokens)
            answers[f"{kind.__name__} {step} {'blocks' if blocks else 'no blocks'}"] = ends
    return answers


def command(*arguments: str, **changes) -> dict:
    """`glm-vllm plan` with these options changed, None taking one out."""
    options = {key: value for key, value in (OPTIONS | changes).items() if value is not None}
    out, err = io.StringIO(), io.StringIO()
    sys.stdin = io.StringIO(json.dumps(options))
    line = ["plan", "--config", "-", "--drafter", sys.argv[2], "--memory", "130595921920", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(line)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def commands() -> dict:
    return {
        "fits": command("--json"),
        "again": command("--json"),
        "table": command(),
        "safe at 0.87": command("--profile", "safe"),
        "safe": command("--profile", "safe", "--utilisation", "0.86"),
        "safe, shorter": command("--profile", "safe", "--utilisation", "0.86", **{"max-model-len": 200000}),
        "too much cache": command("--json", **{"kv-cache-memory-bytes": 18 * GIB}),
        "too much for the reserve": command("--utilisation", "0.9", **{"kv-cache-memory-bytes": 18 * GIB}),
        "own cache": command("--json", **{"kv-cache-memory-bytes": 13 * GIB}),
        "utilisation": command("--utilisation", "0.95"),
        "mtp": command("--json", "--speculator", "mtp"),
        "none": command("--json", "--speculator", "none"),
        "text only": command("--json", **{"limit-mm-per-prompt": {"image": 0, "video": 0}}),
        "no length": command("--json", **{"max-model-len": None}),
        "no model": command("--json", **{"model": "/nonexistent"}),
    }


if __name__ == "__main__":
    for hook in ("ablation", "cache", "plan", "scheduler", "startup"):
        compat.require(hook)
    with contextlib.redirect_stdout(sys.stderr):
        answers = {
            "caches": caches(),
            "live": live(),
            "commands": commands(),
            "rehearsed": rehearsed(),
            "tensors": tensors(),
            "start": start(),
            "chunks": chunks(),
        }
    print(json.dumps(answers))
