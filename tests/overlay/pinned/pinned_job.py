"""pinned_job.py TARGET DRAFTER: everything that the tests of this folder ask the pinned vLLM, as one JSON document."""

import contextlib
import functools
import io
import json
import os
import sys

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import model
from glm_vllm_twin import torchvision_ops

torchvision_ops.declare()  # vLLM imports the registry's torchvision, whose compiled half needs CUDA

from glm_vllm_overlay import cli  # noqa: E402
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
    answers = {}
    for name, case in cases.items():
        case = dict(case)
        mtp, draft = case.pop("mtp", False), case.pop("drafter", None)
        planner = Planner(model.TARGET, draft, Engine(1_000_000, 2, 2048, **case), mtp)
        cache = planner.cache()
        answers[name] = {
            "block": cache.block_size,
            "bytes": cache.bytes_per_block,
            "blocks": cache.blocks(24 * GIB),
            "contexts": cache.blocks(24 * GIB) / cache.blocks_per_request,
            "groups": [vars(group) for group in cache.groups],
            "longest": planner.longest(cache.need()),
            "longest, a block less": planner.longest(cache.need() - cache.bytes_per_block),
        }
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
    with contextlib.redirect_stdout(sys.stderr):
        answers = {"caches": caches(), "commands": commands()}
    print(json.dumps(answers))
