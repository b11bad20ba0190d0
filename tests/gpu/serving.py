"""vLLM 0.33.0 on a GPU serves a tiny packed GLM-5.3-Flash: against Hugging Face's model on the decoded weights.

    python serving.py WORK OUT.json [--tp N]     needs vLLM 0.33.0, the built kernels ($GLM_EXL3_LIBRARY), N GPUs

Runs every backend eagerly and the fused one also with CUDA graphs, each in a process of its own; prompts long enough
for the grouped kernel, concurrent decoding for the cooperative one. Exit 0 when all of them agree with the reference.

`compiled` in OUT.json says what each process compiled below the caches that the environment names (node/release.py);
with the caches of an earlier run it has to be nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[2] / "files/overlay/src"
sys.path.insert(0, str(SOURCES))
TEXT = {
    "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "n_shared_experts": 1,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "kv_lora_rank": 512, "q_lora_rank": 256, "qk_rope_head_dim": 0,
    "v_head_dim": 256, "qk_nope_head_dim": 256, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 16,
    "index_kpool": 16, "linear_head_dim": 128, "linear_num_heads": 8, "max_position_embeddings": 65536,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": ["linear_attention"] * 3 + ["indexed_attention"], "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "mhc": True, "mla_use_nope": True, "indexer_rope_interleave": True,
    "num_nextn_predict_layers": 0, "first_k_dense_replace": 1, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": None,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 512, "intermediate_size": 128,
    "projection_intermediate_size": 128,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "fused": {"enforce_eager": True, "additional_config": {"exl3_backend": "fused", "exl3_check_overflow": True}},
    "loop": {"enforce_eager": True, "additional_config": {"exl3_backend": "loop"}},
    "reference": {"enforce_eager": True, "additional_config": {"exl3_backend": "reference"}},
    "fused with CUDA graphs": {"additional_config": {"exl3_backend": "fused"}},
}
# Three short ones and one longer than a step and than the 2048 keys that the indexer chooses.
PROMPTS = [list(range(20 + 7 * i, 120 + 9 * i)) for i in range(3)] + [[20 + 37 * i % 997 for i in range(2600)]]
NEW_TOKENS = 16


def write_checkpoint(
    folder: Path, text: dict[str, Any] = TEXT, alter: Callable[[dict[str, Any]], None] = lambda state: None
) -> None:
    """Random weights under the hub's names, experts packed to 4-bit mcg; `alter` changes the tensors before that."""
    import torch
    from glm_vllm_overlay.exl3.checkpoint import pack_experts
    from safetensors.torch import load_file, save_file
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    torch.manual_seed(0)
    config = Glm5NextConfig(
        text_config=text, vision_config=VISION, image_token_id=10, video_token_id=11, image_start_token_id=12,
        image_end_token_id=13, video_start_token_id=14, video_end_token_id=15,
    )  # fmt: skip
    model = Glm5NextForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(0.0, 1.5)
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.randn(parameter.shape) * 0.5 - 3.0)
            elif parameter.dim() >= 2:
                # Activations stay near 1, so that rounding does not decide the next token.
                torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else 0.6 / parameter.shape[-1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    alter(state)
    state, quantization = pack_experts(state, search=False)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    stamped = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(stamped))
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"<t{i}>": i for i in range(TEXT["vocab_size"])}, unk_token="<t0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<t1>", "pad_token": "<t0>", "unk_token": "<t0>"}
    names = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def answered(output: Any) -> dict[str, Any]:
    """The tokens of one of vLLM's outputs and the log-probability of each."""
    tokens = list(output.outputs[0].token_ids)
    steps = zip(output.outputs[0].logprobs, tokens, strict=True)
    return {"tokens": tokens, "logprobs": [step[token].logprob for step, token in steps]}


def generate(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Answers of vLLM, in this process."""
    import torch
    from glm_vllm_overlay.exl3.plugin import register
    from glm_vllm_overlay.node.release import compiled_since, machine_code
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    register()
    start, before = time.time(), machine_code(os.environ)
    llm = LLM(
        str(folder), quantization="exl3", max_model_len=4096, gpu_memory_utilization=0.3, max_num_seqs=4,
        max_num_batched_tokens=2048, limit_mm_per_prompt={"image": 0, "video": 0}, enable_prefix_caching=False,
        kv_cache_dtype="fp8_ds_mla", **options,
    )  # fmt: skip
    boot = time.time() - start
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS],
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=1, ignore_eos=True),
    )
    answers = [answered(output) for output in outputs]
    compiled = compiled_since(before, os.environ)
    return {"boot_seconds": boot, "answers": answers, "compiled": compiled, "gpu": torch.cuda.get_device_name()}


def reference(
    folder: Path, answers: dict[str, list[list[int]]], prompts: list[list[int]] = PROMPTS
) -> dict[str, list[list[tuple[float, float]]]]:
    """For every case and prompt: (log-probability of the engine's token, of the best) by Hugging Face's model."""
    import torch
    from glm_vllm_overlay.exl3.checkpoint import unpack_experts
    from safetensors.torch import load_file, save_file
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    plain = folder.with_name(f"{folder.name}-decoded")
    plain.mkdir(exist_ok=True)
    state = {name: tensor.float() for name, tensor in unpack_experts(load_file(folder / "model.safetensors")).items()}
    save_file(state, plain / "model.safetensors", {"format": "pt"})
    stamped = json.loads((folder / "config.json").read_text())
    stamped.pop("quantization_config")
    (plain / "config.json").write_text(json.dumps(stamped | {"dtype": "float32"}))
    config = Glm5NextConfig.from_pretrained(plain)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Glm5NextForConditionalGeneration.from_pretrained(plain, config=config, dtype=torch.float32).eval()
    model.to(device)
    known: dict[tuple[int, ...], list[tuple[float, float]]] = {}

    def judged(prompt: list[int], reply: list[int]) -> list[tuple[float, float]]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + reply], device=device)).logits
        logits = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu()
        chosen = logits[torch.arange(len(reply)), reply]
        return list(zip(chosen.tolist(), logits.max(-1).values.tolist(), strict=True))

    result: dict[str, list[list[tuple[float, float]]]] = {}
    for case, replies in answers.items():
        result[case] = []
        for prompt, reply in zip(prompts, replies, strict=True):
            key = (*prompt, -1, *reply)
            if key not in known:
                known[key] = judged(prompt, reply)
            result[case].append(known[key])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--engine", default="{}", help="further LLM() options, JSON")
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = args.work / "packed"
    if args.step:
        kind, argument = args.step
        if kind == "generate":
            print("RESULT" + json.dumps(generate(folder, json.loads(argument))), flush=True)
        elif kind == "reference":
            print("RESULT" + json.dumps(reference(folder, json.loads(Path(argument).read_text()))), flush=True)
        else:
            write_checkpoint(folder)
            print("RESULTtrue")
        return 0
    args.work.mkdir(parents=True, exist_ok=True)

    def step(kind: str, argument: str) -> Any:
        command = [sys.executable, __file__, str(args.work), str(args.out), "--step", kind, argument]
        environment = {**os.environ, "PYTHONPATH": f"{SOURCES}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
        line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
        if line is None:
            print(done.stdout[-2000:] + done.stderr[-4000:], flush=True)
            return {"error": done.stderr[-4000:]}
        return json.loads(line.removeprefix("RESULT"))

    report: dict[str, Any] = {"schema": 1, "tp": args.tp, "cases": {}}
    if not folder.exists():
        folder.mkdir()
        step("checkpoint", "")
    for case in args.cases:
        options = {**CASES[case], **json.loads(args.engine), "tensor_parallel_size": args.tp}
        report["cases"][case] = step("generate", json.dumps(options))
        print(case, {k: v for k, v in report["cases"][case].items() if k != "answers"}, flush=True)
        args.out.write_text(json.dumps(report, indent=1))
    done = {case: result for case, result in report["cases"].items() if "answers" in result}
    replies = args.work / "replies.json"
    replies.write_text(json.dumps({case: [a["tokens"] for a in result["answers"]] for case, result in done.items()}))
    truth = step("reference", str(replies))
    good = len(done) == len(args.cases) and "error" not in truth
    for case, result in done.items():
        if case not in truth:
            continue
        pairs = [pair for prompt in truth[case] for pair in prompt]
        ours = [value for answer in result["answers"] for value in answer["logprobs"]]
        result["tokens"] = len(pairs)
        result["same_as_best"] = sum(best - chosen < 1e-6 for chosen, best in pairs)
        result["worst_regret"] = max(best - chosen for chosen, best in pairs)
        result["worst_logprob_difference"] = max(abs(c - o) for (c, _), o in zip(pairs, ours, strict=True))
        good &= result["worst_regret"] < 0.1 and result["worst_logprob_difference"] < 0.1
        print(case, {key: value for key, value in result.items() if key != "answers"}, flush=True)
    report["ok"] = good
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
