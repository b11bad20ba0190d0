"""Checkpoints that real vLLM must refuse, or recognise, by the way of a start. What it answers is in ../engine.

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

pytestmark = [
    pytest.mark.full,  # an engine start each; every refusal of its own is in test_quantization and test_loader
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("vllm", "glm_vllm_twin"))), reason="needs the engine's environment"
    ),
]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
options = dict(max_model_len=512, enforce_eager=True, enable_prefix_caching=False, quantization="exl3",
               limit_mm_per_prompt={"image": 0, "video": 0}, max_num_seqs=4)
llm = LLM(sys.argv[1], **options, additional_config=json.loads(sys.argv[2]))
print("ANSWER", llm.generate(["Hi"], SamplingParams(max_tokens=4))[0].outputs[0].token_ids)
"""


def serve(folder: Path, **additional_config: str) -> str:
    """Everything that a start with one short answer prints; the line ANSWER is there when it came so far."""
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(folder), json.dumps(additional_config)],
        env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == ("ANSWER" in done.stdout)
    return done.stdout + done.stderr


@pytest.fixture
def changed(checkpoint, tmp_path: Path) -> Callable[..., Path]:
    """changed(state=…, config=…): a copy of the twin's checkpoint, passed through one function or both."""

    def make(state: Callable[[dict], None] = lambda _: None, config: Callable[[dict], None] = lambda _: None) -> Path:
        from safetensors.torch import load_file, save_file

        folder = tmp_path / "changed"
        shutil.copytree(checkpoint("random"), folder)
        tensors, stamp = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        state(tensors)
        config(stamp)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(stamp))
        return folder

    return make


UP = "model.language_model.layers.2.mlp.experts.3.up_proj"


def test_before_loading(changed) -> None:
    output = serve(changed(state=lambda tensors: tensors.pop(f"{UP}.suh")))
    assert "cannot be served: layer 2 has 23 of 24 suh tensors" in output and "ANSWER" not in output


def test_while_loading(changed) -> None:
    output = serve(changed(state=lambda tensors: tensors[f"{UP}.mcg"].bitwise_xor_(1)))
    assert "up_proj.mcg is 0xCBAC1FEC, the only mcg multiplier known" in output and "ANSWER" not in output


def test_a_checkpoint_stamped_with_another_method_is_recognised(changed) -> None:
    stamp = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    output = serve(changed(config=lambda config: config.update(quantization_config=stamp)))
    assert "serving them as exl3" in output and "ANSWER" in output


def test_an_impossible_backend_is_refused(checkpoint) -> None:
    output = serve(checkpoint("random"), exl3_backend="fused")
    assert "exl3_backend fused needs a CUDA device" in output and "ANSWER" not in output
