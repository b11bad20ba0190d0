"""Packed experts inside real vLLM on a CPU: equal to Hugging Face's model with the decoded weights.

Each test is a process of its own: an engine cannot be started twice in one, and a refusal must reach the command line.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("vllm", "glm_vllm_twin"))), reason="needs the engine's environment"
)

HERE = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": f"{HERE.parents[2] / 'files/overlay/src'}:{HERE}",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
GENERATE = """
import json, sys
from glm_vllm_overlay.exl3.plugin import register
register()
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
options = dict(max_model_len=512, enforce_eager=True, enable_prefix_caching=False, quantization="exl3",
               limit_mm_per_prompt={"image": 0, "video": 0}, max_num_seqs=4)
llm = LLM(sys.argv[1], **{**options, **json.loads(sys.argv[2])})
prompts = [list(range(20, 27)), list(range(40, 80))]
outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts],
                       SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True))
print("RESULT", json.dumps([
    {"prompt": p, "tokens": list(o.outputs[0].token_ids),
     "logprobs": [step[t].logprob for step, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids)]}
    for p, o in zip(prompts, outputs)]))
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exl3") / "tiny"
    result = run((HERE / "tiny.py").read_text(), str(out))
    assert result.returncode == 0, result.stderr[-2000:]
    return out


@pytest.mark.parametrize(
    "options",
    [{}, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}],
    ids=["main layers", "with the MTP layer"],
)
def test_equal_to_hugging_face_on_decoded_weights(checkpoint: Path, options: dict[str, object]) -> None:
    served = run(GENERATE, str(checkpoint), json.dumps(options))
    line = next((line for line in served.stdout.splitlines() if line.startswith("RESULT")), None)
    assert line, served.stderr[-3000:]
    for answer in json.loads(line.removeprefix("RESULT")):
        tokens = answer["prompt"] + answer["tokens"]
        code = (
            "import sys, json, pathlib, tiny;"
            "logits = tiny.reference_logits(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])).log_softmax(-1);"
            "print('LOGITS', json.dumps([[l[t].item(), l.max().item()] for l, t in"
            " zip(logits[int(sys.argv[3]) - 1 :], json.loads(sys.argv[2])[int(sys.argv[3]) :])]))"
        )
        truth = run(code, str(checkpoint), json.dumps(tokens), str(len(answer["prompt"])))
        values = json.loads(truth.stdout.split("LOGITS", 1)[1])
        for (chosen, best), ours in zip(values, answer["logprobs"], strict=True):
            # A bfloat16 engine may prefer another token only where the float32 model nearly does.
            assert best - chosen < 0.1, (best, chosen)
            assert abs(chosen - ours) < 0.2, (chosen, ours)


REFUSALS: dict[str, tuple[Callable[[dict[str, object], dict[str, object]], None], str]] = {}


def refusal(name: str, message: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def keep(change: Callable[..., None]) -> Callable[..., None]:
        REFUSALS[name] = (change, message)
        return change

    return keep


MODULE = "model.language_model.layers.2.mlp.experts.3.up_proj"


@refusal("missing tensor", "layer 2 has 23 of 24 suh tensors")
def _missing(state: dict, config: dict) -> None:
    del state[f"{MODULE}.suh"]


@refusal("marker bit", "up_proj.mcg is 0xCBAC1FEC, the only mcg multiplier known")
def _marker(state: dict, config: dict) -> None:
    state[f"{MODULE}.mcg"] ^= 1


@refusal("wrong bits in config", "config.json promises bits 3, the tensors have 4")
def _bits(state: dict, config: dict) -> None:
    config["quantization_config"]["bits"] = 3


@refusal("wrong codebook in config", "config.json promises codebook mul1, the tensors have mcg")
def _codebook(state: dict, config: dict) -> None:
    config["quantization_config"]["codebook"] = "mul1"


@refusal("swapped shards", "a gate_proj trellis is .* not of 256 x 256|needs int16|up_proj trellis")
def _swapped(state: dict, config: dict) -> None:
    state[f"{MODULE}.trellis"] = state[f"{MODULE}.trellis"][:, :8].repeat(2, 1, 1).contiguous()


@refusal("native experts under an exl3 stamp", "its experts are not packed EXL3: serve it without --quantization exl3")
def _native(state: dict, config: dict) -> None:
    from glm_vllm_overlay.exl3.checkpoint import unpack_experts

    plain = unpack_experts(dict(state))
    state.clear()
    state.update(plain)


@pytest.mark.full  # an engine start each
@pytest.mark.parametrize("name", list(REFUSALS))
def test_a_wrong_checkpoint_is_refused_with_a_sentence(checkpoint: Path, tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    change, message = REFUSALS[name]
    wrong = tmp_path / "wrong"
    shutil.copytree(checkpoint, wrong)
    state, config = load_file(wrong / "model.safetensors"), json.loads((wrong / "config.json").read_text())
    change(state, config)
    save_file(state, wrong / "model.safetensors", {"format": "pt"})
    (wrong / "config.json").write_text(json.dumps(config))
    result = run(GENERATE, str(wrong), "{}")
    assert result.returncode != 0
    import re

    assert re.search(message, result.stderr + result.stdout), result.stderr[-1500:]


@pytest.mark.full
def test_a_checkpoint_stamped_with_another_method_is_recognised(checkpoint: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "stamped"
    shutil.copytree(checkpoint, wrong)
    config = json.loads((wrong / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (wrong / "config.json").write_text(json.dumps(config))
    result = run(GENERATE, str(wrong), "{}")
    assert "RESULT" in result.stdout, result.stderr[-2000:]
    assert "serving them as exl3" in result.stderr + result.stdout


@pytest.mark.full
def test_an_impossible_backend_is_refused(checkpoint: Path) -> None:
    result = run(GENERATE, str(checkpoint), json.dumps({"additional_config": {"exl3_backend": "fused"}}))
    assert "exl3_backend fused needs a CUDA device" in result.stderr + result.stdout
