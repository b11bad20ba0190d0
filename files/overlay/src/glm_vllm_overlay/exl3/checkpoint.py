"""Writing EXL3 experts into a checkpoint: for the twin's and the tests' tiny models (slow: 10 ms a tile on one core)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from glm_vllm_overlay.exl3.encode import quantise
from glm_vllm_overlay.exl3.format import MARKERS, Packed, dequantise, marker_tensor

EXPERT_WEIGHT = re.compile(r"\.mlp\.experts\.\d+\.(?:gate_proj|up_proj|down_proj)\.weight$")


def pack_experts(
    state: Mapping[str, torch.Tensor], bits: int = 4, codebook: str = "mcg", seed: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Replace every routed expert's ``….mlp.experts.E.{gate,up,down}_proj.weight`` ``[out, in]`` by its packed tensors.

    Returns the new state and the ``quantization_config`` for config.json. Other tensors are passed on as they are.
    ValueError when there is no such expert, or a dimension is no multiple of 128.
    """
    packed: dict[str, torch.Tensor] = {}
    count = 0
    for name, tensor in state.items():
        if EXPERT_WEIGHT.search(name) is None:
            packed[name] = tensor
            continue
        module = name.removesuffix("weight")
        layer = quantise(tensor.t().contiguous(), bits, codebook, seed + count)
        packed.update({f"{module}trellis": layer.trellis, f"{module}suh": layer.suh, f"{module}svh": layer.svh})
        if (marker := marker_tensor(codebook)) is not None:
            packed[module + marker[0]] = marker[1]
        count += 1
    if not count:
        raise ValueError("no routed expert weights of the form ….mlp.experts.E.gate_proj.weight to pack")
    return packed, {"quant_method": "exl3", "bits": bits, "codebook": codebook, "scope": "routed_experts"}


def unpack_experts(state: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The inverse for a reference model: packed tensors become ``weight`` ``[out, in]`` of `dtype`."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "trellis":
            codebook = next((marker for marker in MARKERS if f"{module}.{marker}" in state), "3inst")
            layer = Packed(tensor, state[f"{module}.suh"], state[f"{module}.svh"], codebook)
            result[f"{module}.weight"] = dequantise(layer).t().contiguous().to(dtype)
        elif suffix not in ("suh", "svh", *MARKERS):
            result[name] = tensor
    return result
