"""vLLM 0.33.0 on a GPU drafts, caches prefixes and cuts its KV cache as planned: tiny target, MTP layer, drafter.

    python speculation.py WORK OUT.json      needs vLLM 0.33.0, the built kernels ($GLM_EXL3_LIBRARY) and one GPU

Cases: no speculation and no prefix cache (the yardstick), MTP k=2, DFlash2 k=7, DFlash2 with the drafter's KV groups
split; the last three with prefix caching. In each: prompts together, the same again (prefix hits), and prompts that
share a beginning with them (a wrong hit or a foreign recurrent state shows). Judged: tokens equal to the yardstick's,
log-probabilities within 0.25 of Hugging Face's float32 model on the decoded weights, drafts accepted, prefixes hit. The
KV cache that the engine built is compared with `glm-vllm plan`'s field by field. Exit 0 when all of it holds.
`--torch-topk` spares the minutes in which FlashInfer compiles the top-k of DFlash2's candidates: torch's instead.
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

import serving  # noqa: E402

HIDDEN, VOCABULARY = serving.TEXT["hidden_size"], serving.TEXT["vocab_size"]
# As many sparse layers as the drafter has: then its layers form one group of the cache, as with the real model.
LAYERS = 8
TEXT = serving.TEXT | {
    "num_hidden_layers": LAYERS, "layer_types": ["linear_attention"] * 3 + ["indexed_attention"] * 5,
    "mlp_layer_types": ["dense"] + ["sparse"] * 7, "num_nextn_predict_layers": 1, "index_kpool": 4,
}  # fmt: skip
# Each token is followed by the next one, and this one by itself. The mask token, which stands where the drafter has to
# guess, leads there too: its guesses are wrong until the target has arrived, and right from then on.
END, MASK = VOCABULARY - 1, VOCABULARY - 2
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_act": "silu",
    "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "intermediate_size": 512, "num_hidden_layers": 5,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-6,
    "max_position_embeddings": serving.TEXT["max_position_embeddings"], "rope_theta": 1000000.0,
    "sliding_window": 2048, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 5,
    "is_causal": False, "tie_word_embeddings": False, "attention_bias": False,
    "dflash_config": {
        "block_size": 8, "causal": False, "conv_kernel_size": 2, "conv_group_size": 16,
        "selector_rank": 32, "selector_top_k": 16, "target_layer_ids": [2, 5], "mask_token_id": MASK,
    },
}  # fmt: skip
LENGTH, STEP, TOKENS, POOL = 8192, 2048, 24, 4 << 30
TOLERANCE = 0.25  # of a log-probability: bfloat16 and the fp8 cache against float32, twice what was seen
CASES: dict[str, dict[str, Any]] = {
    "none": {"enable_prefix_caching": False},
    "mtp": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    "dflash2": {"speculative_config": {"method": "dflash", "num_speculative_tokens": 7}},
    "dflash2, split": {"speculative_config": {"method": "dflash", "num_speculative_tokens": 7}, "split": True},
}


def walk(length: int, seed: int, last: int) -> list[int]:
    """Token ids that follow no rule, and then the one from which the reply starts."""
    return [20 + (seed * 7919 + position * 104729) % 900 for position in range(length - 1)] + [last]


def prompts() -> list[list[list[int]]]:
    """Three rounds: several lengths at once, the same again, and beginnings of those with other ends."""
    lengths = (100, 1500, 3300, 5000)
    first = [walk(length, seed, END - 4 - seed) for seed, length in enumerate(lengths)]
    third = [prompt[: len(prompt) * 4 // 5] + walk(60 + seed, 50 + seed, END - 3) for seed, prompt in enumerate(first)]
    return [first, first, third]


def chain(state: dict[str, Any]) -> None:
    """Output head of the chain over noise, recurrent states that last, an MTP layer that mostly drafts the chain."""
    import torch

    generator = torch.Generator().manual_seed(5)
    embedding = state["model.language_model.embed_tokens.weight"].float()
    following = torch.arange(1, VOCABULARY + 1).clamp(max=END)
    following[MASK] = END
    head = torch.zeros_like(embedding).index_add_(0, following, embedding)
    noise = torch.randn(head.shape, generator=generator) * 0.6 / HIDDEN**0.5
    state["lm_head.weight"] = (noise + 0.01 * head).to(torch.bfloat16)
    for key in [key for key in state if key.endswith("dt_bias")]:
        state[key][::2] -= 4  # a state that forgets in ten tokens would hide whose it was
    source, target = f"model.language_model.layers.{LAYERS - 1}.", f"model.language_model.layers.{LAYERS}."
    for key in [key for key in state if key.startswith(source) and "hc_" not in key]:
        state[key.replace(source, target)] = state[key].clone()
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        state[f"{target}{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    state[f"{target}embed_tokens.weight"] = state["model.language_model.embed_tokens.weight"].clone()
    mixing = torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.2 / HIDDEN**0.5
    state[f"{target}eh_proj.weight"] = torch.cat([torch.eye(HIDDEN), mixing], 1).to(torch.bfloat16)


def write_drafter(folder: Path) -> None:
    """A DFlash2 drafter with the real one's parts; its five layers are the widest group of the cache."""
    import torch
    from safetensors.torch import save_file

    head, inner = DRAFTER["head_dim"], DRAFTER["intermediate_size"]
    heads, kv_heads = DRAFTER["num_attention_heads"], DRAFTER["num_key_value_heads"]
    rank, taps, group = (
        DRAFTER["dflash_config"][name] for name in ("selector_rank", "conv_kernel_size", "conv_group_size")
    )
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int, scale: float = 0.1) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale / shape[-1] ** 0.5).to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    state = {"fc.weight": noise(HIDDEN, 2 * HIDDEN, scale=1.0), "hidden_norm.weight": ones, "norm.weight": ones}
    for name in ("predecessor_codebook", "successor_codebook"):
        state[f"candidate_selector.{name}"] = noise(VOCABULARY, rank)
    state["candidate_selector.hidden_projection.weight"] = noise(rank, HIDDEN)
    for number in range(5):
        layer = f"layers.{number}."
        for name, shape in {
            "self_attn.q_proj": (heads * head, HIDDEN), "self_attn.k_proj": (kv_heads * head, HIDDEN),
            "self_attn.v_proj": (kv_heads * head, HIDDEN), "self_attn.o_proj": (HIDDEN, heads * head),
            "mlp.gate_proj": (inner, HIDDEN), "mlp.up_proj": (inner, HIDDEN), "mlp.down_proj": (HIDDEN, inner),
        }.items():  # fmt: skip
            state[f"{layer}{name}.weight"] = noise(*shape, scale=1.0 if name.endswith(("k_proj", "v_proj")) else 0.3)
        for name in ("q_norm", "k_norm"):
            state[f"{layer}self_attn.{name}.weight"] = torch.ones(head, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{layer}{name}.weight"] = ones
        for name in ("attention_conv", "mlp_conv"):
            base = torch.zeros(2, taps, HIDDEN, dtype=torch.bfloat16)
            base[:, 0] = 1  # each position itself; its neighbour comes in through the projection
            state[f"{layer}{name}.base_kernel"] = base
            state[f"{layer}{name}.kernel_projection.weight"] = noise(2 * taps * HIDDEN // group, HIDDEN)
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(DRAFTER))


def options(work: Path, case: str) -> dict[str, Any]:
    """LLM() options of a case."""
    chosen = {"enable_prefix_caching": True} | CASES[case]
    additional = {"exl3_backend": "fused"} | ({"drafter_kv": "split"} if chosen.pop("split", False) else {})
    if chosen.get("speculative_config", {}).get("method") == "dflash":
        drafter = {"model": str(work / "drafter"), "kv_cache_dtype": "auto", "attention_backend": "FLASH_ATTN"}
        chosen["speculative_config"] = chosen["speculative_config"] | drafter
    return chosen | {"additional_config": additional}


def built_cache(llm: Any) -> dict[str, Any]:
    """The groups of the engine's KV cache and the blocks of its pool."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    groups = [
        {
            "kind": type(next(iter(iter_layer_specs(group.kv_cache_spec)))).__name__,
            "layers": len(group.layer_names),
            "block_size": group.kv_cache_spec.block_size,
        }
        for group in config.kv_cache_groups
    ]
    return {"groups": groups, "blocks": config.num_blocks}


def generate(work: Path, case: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Rounds of answers, counters and the cache of one engine, in this process."""
    torch_topk = engine.pop("torch_topk", False)
    from glm_vllm_overlay.exl3 import plugin as exl3
    from glm_vllm_overlay.hooks import plugin as hooks
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    if torch_topk:
        from vllm.model_executor.layers import logits_processor

        logits_processor._flashinfer_topk = lambda: None
    exl3.register()
    hooks.register()  # what a start is told about itself is in the log: `startup` of the document
    llm = LLM(
        str(work / "target"), quantization="exl3", max_model_len=LENGTH, gpu_memory_utilization=0.15, max_num_seqs=4,
        max_num_batched_tokens=STEP, limit_mm_per_prompt={"image": 0, "video": 0}, kv_cache_dtype="fp8_ds_mla",
        kv_cache_memory_bytes=POOL, disable_log_stats=False, **options(work, case), **engine,
    )  # fmt: skip

    def counters() -> dict[str, float]:
        wanted = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "prefix_cache_hits")
        found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return {name: found.get(f"vllm:{name}", 0) for name in wanted}

    rounds = []
    for given in prompts():
        before = counters()
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids in given],
            SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, ignore_eos=True),
        )
        answers = [serving.answered(output) for output in outputs]
        after = counters()
        rounds.append({"answers": answers, "counters": {name: after[name] - before[name] for name in after}})
    return {"rounds": rounds, "cache": built_cache(llm)}


def planned(case: str, capability: tuple[int, int]) -> dict[str, Any]:
    """The same cache by `glm-vllm plan`'s planner, which needs no device and has to have a process of its own."""
    from glm_vllm_overlay.plan.cache import Engine, Planner

    chosen = options(Path(), case)
    speculative = chosen.get("speculative_config", {})
    engine = Engine(
        max_model_len=LENGTH, max_num_seqs=4, max_num_batched_tokens=STEP, tensor_parallel=1,
        tokens=speculative.get("num_speculative_tokens", 0), prefix_caching=chosen["enable_prefix_caching"],
        drafter_kv=chosen["additional_config"].get("drafter_kv", "stock"),
    )  # fmt: skip
    target = {"text_config": TEXT | {"model_type": "glm5_next_text"}}
    drafter = DRAFTER if speculative.get("method") == "dflash" else None
    cache = Planner(target, drafter, engine, speculative.get("method") == "mtp", capability).cache()
    groups = [{"kind": group.kind, "layers": group.layers, "block_size": group.block_size} for group in cache.groups]
    return {"groups": groups, "blocks": cache.blocks(POOL)}


def judge(document: dict[str, Any], truth: dict[str, Any]) -> list[str]:
    """What does not hold, a sentence each; figures go into the document."""
    problems = []
    yardstick = document["none"]["rounds"]
    for case in CASES:
        for number, given in enumerate(document[case]["rounds"]):
            tokens = [answer["tokens"] for answer in given["answers"]]
            if tokens != [answer["tokens"] for answer in yardstick[number]["answers"]]:
                problems.append(f"{case}: round {number} says something else than without speculation")
            pairs = [pair for reply in truth[f"{case}/{number}"] for pair in reply]
            ours = [value for answer in given["answers"] for value in answer["logprobs"]]
            given["worst_difference"] = max(abs(c - o) for (c, _), o in zip(pairs, ours, strict=True))
            given["worst_regret"] = max(best - chosen for chosen, best in pairs)
            theirs = [value for answer in yardstick[number]["answers"] for value in answer["logprobs"]]
            given["worst_from_none"] = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            if max(given["worst_difference"], given["worst_regret"]) > TOLERANCE:
                problems.append(
                    f"{case}: round {number} differs from the reference by {given['worst_difference']:.3f},"
                    f" regret {given['worst_regret']:.3f}"
                )
            counters = given["counters"]
            if case != "none" and not counters["spec_decode_num_accepted_tokens"]:
                problems.append(f"{case}: round {number} accepted no draft")
            if case != "none" and number > 0 and not counters["prefix_cache_hits"]:
                problems.append(f"{case}: round {number} hit no prefix")
        if not document[case]["startup"]:
            problems.append(f"{case}: the start said nothing of itself")
        built, plan = document[case]["cache"], document[case]["plan"]
        if built != plan:
            problems.append(f"{case}: the cache is not as planned: {built}, {plan}")
    return problems


def step(kind: str, work: Path, case: str = "", argument: str = "", device: bool = True) -> Any:
    """One step in a process of its own; its result, or {"failed": the end of what it said}."""
    command = [sys.executable, __file__, str(work), "-", "--step", kind, case, argument]
    environment = os.environ | {"PYTHONPATH": f"{serving.SOURCES}:{os.environ.get('PYTHONPATH', '')}"}
    if not device:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    said = done.stdout + done.stderr
    (work / f"{kind}-{case.replace(', ', '-')}.log").write_text(said)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
    result = {"failed": done.stderr[-3000:]} if line is None else json.loads(line.removeprefix("RESULT"))
    if kind == "generate":
        result["startup"] = [line.split("start: ", 1)[1] for line in said.splitlines() if " start: " in line]
    return result


def run_step(kind: str, work: Path, case: str, argument: str) -> Any:
    """The other side of `step`."""
    if kind == "write":
        serving.write_checkpoint(work / "target", TEXT, chain)
        write_drafter(work / "drafter")
        return True
    if kind == "generate":
        return generate(work, case, json.loads(argument))
    if kind == "plan":
        return planned(case, tuple(json.loads(argument)))
    return serving.reference(
        work / "target", json.loads(Path(argument).read_text()), [ids for given in prompts() for ids in given]
    )


def main() -> int:
    from concurrent.futures import ThreadPoolExecutor

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", default="{}", help="further LLM() options, JSON")
    parser.add_argument("--torch-topk", action="store_true", help="see above")
    parser.add_argument("--jobs", type=int, default=2, help="engines at once")
    parser.add_argument("--step", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print("RESULT" + json.dumps(run_step(args.step[0], args.work, *args.step[1:])), flush=True)
        return 0
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / "drafter/config.json").exists():
        step("write", args.work)
    import torch

    capability = json.dumps(torch.cuda.get_device_capability())
    engine = json.dumps(json.loads(args.engine) | ({"torch_topk": True} if args.torch_topk else {}))
    with ThreadPoolExecutor(args.jobs) as pool:
        engines = {case: pool.submit(step, "generate", args.work, case, engine) for case in CASES}
        plans = {case: pool.submit(step, "plan", args.work, case, capability, False) for case in CASES}
        document = {case: engines[case].result() | {"plan": plans[case].result()} for case in CASES}
    failed = [case for case in CASES if "failed" in document[case] or "failed" in document[case]["plan"]]
    problems = [f"{case}: did not get through" for case in failed]
    if not failed:
        replies = args.work / "replies.json"
        flat = {case: [a["tokens"] for r in document[case]["rounds"] for a in r["answers"]] for case in CASES}
        replies.write_text(json.dumps(flat))
        truth = step("reference", args.work, "", str(replies))
        if "failed" in truth:
            problems = ["the reference did not get through", truth["failed"]]
        else:
            size = len(prompts()[0])
            rounds = {f"{case}/{n}": truth[case][n * size : (n + 1) * size] for case in CASES for n in range(3)}
            problems = judge(document, rounds)
    document |= {"schema": 1, "problems": problems, "ok": not problems}
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    for case in CASES:
        for number, given in enumerate(document[case].get("rounds", [])):
            print(case, number, {key: value for key, value in given.items() if key != "answers"}, flush=True)
    print("\n".join(problems) or "everything holds")
    return 0 if not problems else 1


if __name__ == "__main__":
    sys.exit(main())
