"""`glm-vllm plan`: what a node's memory would be used for, and whether it fits; touches no device, starts nothing."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from glm_vllm_overlay.inspect import Checkpoint, read_checkpoint
from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node import state, units
from glm_vllm_overlay.node.errors import Refusal, Unusable
from glm_vllm_overlay.node.files import read_json_if_there
from glm_vllm_overlay.node.serve import DRAFT_TOKENS
from glm_vllm_overlay.node.settings import SPECULATORS, Node, Settings
from glm_vllm_overlay.plan.budget import (
    ACTIVATIONS_PER_TOKEN,
    GIB,
    GRAPHS,
    IMAGES,
    MARGIN,
    SYSTEM,
    Budget,
    Part,
    Wish,
    document,
    judge,
    settle,
)
from glm_vllm_overlay.plan.weights import on_a_rank

BAR = 96  # characters
FILL = "0123456789abcdef"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `glm-vllm plan`; without any it describes the current deployment of this node."""
    paths = node_paths.current()
    parser.add_argument(
        "--config", default=str(paths.serve_yaml), help="a serve.yaml, or - for its options as JSON on stdin"
    )
    parser.add_argument("--drafter", type=Path, help="folder of the drafter (default: the deployment's)")
    parser.add_argument("--speculator", choices=SPECULATORS, help="what drafts (default: the unit's, else dflash2)")
    parser.add_argument("--utilisation", type=float, help="share of memory (default: the unit's, else 0.87)")
    parser.add_argument("--memory", type=int, help="bytes of memory of the smaller node (default: this one's)")
    parser.add_argument("--reserve", type=int, default=4 * GIB, help="bytes to be left free (default: 4 GiB)")
    parser.add_argument("--start-cost", type=int, help="bytes of API server and NCCL (default: the node's, else 6 GiB)")
    parser.add_argument("--profile", choices=sorted(SYSTEM), default="full", help="safe: beside a desktop or services")


def complete(args: argparse.Namespace) -> None:
    """Fill in what was not said: from this node's unit, as `systemctl edit` left it, or from the role's defaults."""
    speculator, utilisation, start_cost = "dflash2", 0.87, 6 * GIB
    with contextlib.suppress(Unusable):  # no node of ours, as on a controller
        node = Node.load(node_paths.current())
        settings = Settings.parse(units.environment(units.show(node.unit)[node.unit]))
        speculator, utilisation, start_cost = settings.speculator, settings.utilisation, node.start_cost
    args.speculator = args.speculator or speculator
    args.utilisation = args.utilisation or utilisation
    args.start_cost = start_cost if args.start_cost is None else args.start_cost


class Options:
    """The options of `vllm serve` that decide about memory. Unusable for one that is missing or makes no sense."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.model = Path(self._need("model"))
        self.max_model_len = int(self._need("max-model-len"))
        self.max_num_seqs = int(self._need("max-num-seqs"))
        self.max_num_batched_tokens = int(self._need("max-num-batched-tokens"))
        self.tensor_parallel = int(options.get("tensor-parallel-size", 1))
        self.prefix_caching = not options.get("no-enable-prefix-caching", False)
        self.eager = bool(options.get("enforce-eager", False))
        self.drafter_kv = str(self._dictionary("additional-config").get("drafter_kv", "stock"))
        self.state_dtype = str(options.get("mamba-ssm-cache-dtype", "auto"))
        kv = options.get("kv-cache-memory-bytes")
        self.kv = None if kv is None else int(kv)
        self.images = any(self._dictionary("limit-mm-per-prompt").values())

    def _dictionary(self, key: str) -> dict[str, Any]:
        """An option that serve.yaml writes as JSON text."""
        value = self.options.get(key, {})
        return json.loads(value) if isinstance(value, str) else value

    def _need(self, key: str) -> Any:
        if key not in self.options:
            raise Unusable(f"the options do not say {key}: give a serve.yaml as playbooks/serve.yml renders it")
        return self.options[key]


def read_options(config: str) -> Options:
    """From standard input or a file; Unusable when it is neither JSON nor YAML."""
    if config == "-":
        try:
            return Options(json.load(sys.stdin))
        except (ValueError, AttributeError, TypeError) as error:
            raise Unusable(f"standard input holds no options as a JSON object ({error})") from None
    from glm_vllm_overlay.node.check_config import read_config

    return Options(read_config(Path(config)))


def drafter_of(args: argparse.Namespace) -> Checkpoint | None:
    """The drafter's headers; None unless one drafts. Unusable when it has to and nobody says where it is."""
    if args.speculator != "dflash2":
        return None
    deployed = read_json_if_there(node_paths.current().deployment).get("drafter") or {}
    folder = args.drafter or deployed.get("path")
    if not folder:
        raise Unusable("speculator dflash2 needs a drafter: give --drafter, or --speculator mtp")
    return read_checkpoint(Path(folder))


def workspace(text: Any, options: Options) -> int:
    """Buffers that vLLM and the experts' kernels allocate once, in bytes."""
    from vllm.models.glm5next.common.model import get_sparse_topk_buffer_width
    from vllm.v1.attention.backends.mla.indexer import get_max_prefill_buffer_size

    from glm_vllm_overlay.exl3.execute import scratch_bytes

    # VllmConfig sets this factor when it is built (config/vllm.py); the rest is vLLM's function of it.
    factor = 5 if options.max_model_len <= 256 * 1024 else 2
    config = argparse.Namespace(
        model_config=argparse.Namespace(max_model_len=options.max_model_len),
        attention_config=argparse.Namespace(sparse_mla_prefill_workspace_factor=factor),
    )
    entry = text.index_head_dim + text.index_head_dim // 128 * 4
    gathered = get_max_prefill_buffer_size(config) // text.index_kpool * entry
    logits = int(os.environ.get("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "512")) << 20
    indices = options.max_num_batched_tokens * get_sparse_topk_buffer_width(text) * 4
    width = text.moe_intermediate_size // options.tensor_parallel
    experts = scratch_bytes(text.hidden_size, width, text.num_experts_per_tok, options.max_num_batched_tokens)
    return gathered + logits + indices + experts


def plan(args: argparse.Namespace, options: Options) -> tuple[Budget, dict[str, Any], Refusal | None]:
    """The budget, what else there is to tell, and why it does not fit, if it does not."""
    from glm_vllm_overlay.plan.cache import Engine, Planner

    target, drafter = read_checkpoint(options.model), drafter_of(args)
    mtp = args.speculator == "mtp"
    engine = Engine(
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        tokens=DRAFT_TOKENS.get(args.speculator, 0),
        prefix_caching=options.prefix_caching,
        tensor_parallel=options.tensor_parallel,
        state_dtype=options.state_dtype,
        drafter_kv=options.drafter_kv,
    )
    planner = Planner(target.config, drafter.config if drafter else None, engine, mtp)
    cache, text = planner.cache(), planner.text
    weights = on_a_rank(target, options.tensor_parallel, None if mtp else text.num_hidden_layers)
    drafting = on_a_rank(drafter, options.tensor_parallel).total if drafter else 0
    parts = [
        Part("system", SYSTEM[args.profile], "estimate", inside=False),
        Part("processes", args.start_cost, "setting", inside=False),
        Part("margin", MARGIN, "estimate", inside=False),
        Part("experts", weights.experts, "headers"),
        Part("dense weights", weights.dense, "headers"),
        Part("drafter", drafting, "headers"),
        Part("workspace", workspace(text, options), "vLLM"),
        Part("activations", options.max_num_batched_tokens * ACTIVATIONS_PER_TOKEN, "estimate"),
        Part("graphs", 0 if options.eager else GRAPHS, "estimate"),
        Part("images", IMAGES if options.images else 0, "estimate"),
    ]
    memory = args.memory or state.memory("/proc/meminfo")["total"]
    wish = Wish(memory, args.utilisation, args.reserve, args.start_cost, args.profile, options.kv)
    budget = settle(wish, tuple(part for part in parts if part.bytes), cache.bytes_per_block)
    longest, needed = planner.longest(budget.kv), cache.need()
    more = {
        "cache": {
            "block_size": cache.block_size,
            "bytes_per_block": cache.bytes_per_block,
            "blocks": cache.blocks(budget.kv),
            "bytes_per_request": needed,
            "groups": [vars(group) for group in cache.groups],
        },
        "fits": {"context": longest, "requests": round(cache.requests(budget.kv), 2)},
    }
    try:
        judge(budget, needed, longest, options.max_model_len)
    except Refusal as refusal:
        return budget, more, refusal
    return budget, more, None


def picture(shares: list[tuple[str, int]], memory: int) -> str:
    """The node's memory as one line of digits, each the number of a row of the table; dots are free."""
    line, done = "", 0
    for number, (_, size) in enumerate(shares):
        done += size
        line = line.ljust(min(BAR, round(BAR * done / memory)), FILL[number])
    return f"|{line.ljust(BAR, '.')}|"


def table(budget: Budget, more: dict[str, Any], options: Options) -> str:
    """For people: one line a part, the picture, and what fits."""
    rows = [(part.name, part.bytes, part.basis) for part in budget.parts]
    rows += [
        ("KV cache", budget.kv, "vLLM" if options.kv is None else "setting"),
        ("reserve", budget.wish.reserve, "setting"),
    ]
    lines = [f"{FILL[i]}  {name:<14}{size / GIB:8.2f} GiB  {basis}" for i, (name, size, basis) in enumerate(rows)]
    free = budget.left - budget.wish.reserve
    lines.append(f"{'.' if free >= 0 else '!'}  {'free':<14}{free / GIB:8.2f} GiB  of {budget.wish.memory / GIB:.2f}")
    lines += ["", picture([(name, size) for name, size, _ in rows], budget.wish.memory), ""]
    cache, fits = more["cache"], more["fits"]
    for group in cache["groups"]:
        drafts = ", drafter" if group["draft"] else ""
        fill = group["bytes"] / cache["bytes_per_block"]
        lines.append(
            f"{group['kind']:<19}{group['layers']:3} layers, blocks of {group['block_size']} tokens, "
            f"{fill:6.1%} of a block's bytes, {group['blocks']} blocks a request{drafts}"
        )
    lines += [
        f"a block of all groups is {cache['bytes_per_block'] / (1 << 20):.2f} MiB, the cache holds {cache['blocks']}",
        f"one request of {options.max_model_len} tokens takes {cache['bytes_per_request'] / GIB:.2f} GiB: "
        f"{fits['requests']} at once; longest context {fits['context']}",
        f"utilisation {budget.wish.utilisation}: needed {budget.utilisation_needed}, vLLM starts up to "
        f"{budget.utilisation_largest}",
    ]
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """`glm-vllm plan`: 0 when it fits, 1 with one sentence that names the variable to change."""
    complete(args)
    options = read_options(args.config)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Standard output is ours for the outcome.
    with contextlib.redirect_stdout(sys.stderr):
        budget, more, refusal = plan(args, options)
    if args.json:
        outcome = {"message": str(refusal)} if refusal else {}
        print(json.dumps({"schema": 1, "ok": refusal is None, **outcome, **document(budget, **more)}))
    else:
        print(table(budget, more, options))
    if refusal:
        print(f"glm-vllm plan: {refusal}", file=sys.stderr)
        return 1
    return 0
