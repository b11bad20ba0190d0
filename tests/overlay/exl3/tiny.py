"""A tiny packed GLM-5.3-Flash made of the twin's builder, and Hugging Face's answer on its decoded weights.

python tiny.py OUT_DIR      writes OUT_DIR (packed) and prints nothing
"""

import json
import sys
from pathlib import Path

import torch
from glm_vllm_overlay.exl3.checkpoint import pack_experts, unpack_experts
from glm_vllm_twin.checkpoint.build import build
from glm_vllm_twin.checkpoint.weights import TEXT
from safetensors.torch import load_file, save_file


def write(out: Path, kind: str = "random") -> None:
    """The twin's checkpoint `kind` with 256-wide experts (two ranks of 128), packed to 4 bits."""
    TEXT["moe_intermediate_size"] = 256
    build(kind, out)
    state, quantization = pack_experts(load_file(out / "model.safetensors"), search=False)
    save_file(state, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = quantization
    (out / "config.json").write_text(json.dumps(config))


def reference_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """float32 logits ``[len(tokens), vocabulary]`` of Hugging Face's model on the decoded weights."""
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    plain = folder.with_name(folder.name + "-decoded")
    if not plain.exists():
        plain.mkdir()
        state = unpack_experts(load_file(folder / "model.safetensors"))
        state = {name: tensor.float() for name, tensor in state.items()}
        save_file(state, plain / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config.pop("quantization_config")
        config["dtype"] = "float32"
        (plain / "config.json").write_text(json.dumps(config))
    config = Glm5NextConfig.from_pretrained(plain)
    model = Glm5NextForConditionalGeneration.from_pretrained(plain, config=config, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
