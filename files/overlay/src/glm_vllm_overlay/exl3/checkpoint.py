"""Writing EXL3 experts into a checkpoint: for the twin's and the tests' tiny models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from glm_vllm_overlay.exl3.encode import quantise
from glm_vllm_overlay.exl3.format import BLOCK, MARKERS, TILE, Packed, codebook_table, dequantise, marker_tensor

EXPERT_WEIGHT = re.compile(r"\.mlp\.experts\.\d+\.(?:gate_proj|up_proj|down_proj)\.weight$")


def draw(rows: int, columns: int, std: float, bits: int, codebook: str, seed: int) -> Packed:
    """A random packed layer whose weights have standard deviation `std`: every sequence of words is a valid trellis."""
    generator = torch.Generator().manual_seed(seed)

    def signs(count: int) -> torch.Tensor:
        return torch.randint(0, 2, (count,), generator=generator).float() * 2 - 1

    size = (rows // TILE, columns // TILE, TILE * bits)
    words = torch.randint(-32768, 32768, size, generator=generator).to(torch.int16)
    rms = codebook_table(codebook).float().pow(2).mean().sqrt().item()
    return Packed(words, signs(rows).half(), (signs(columns) * std / rms).half(), codebook)


def pack_experts(
    state: Mapping[str, torch.Tensor], bits: int = 4, codebook: str = "mcg", seed: int = 0, search: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Replace every routed expert's ``….mlp.experts.E.{gate,up,down}_proj.weight`` ``[out, in]`` by its packed tensors.

    With `search` the weights are approximated (10 ms a 16x16 tile on one core); without, they are replaced by random
    packed ones of the same standard deviation, at once: enough for a model whose experts are random anyway.
    Returns the new state and the ``quantization_config`` for config.json; other tensors are passed on as they are.
    ValueError when there is no such expert, or a dimension is no multiple of 128.
    """
    packed: dict[str, torch.Tensor] = {}
    count = 0
    for name, tensor in state.items():
        if EXPERT_WEIGHT.search(name) is None:
            packed[name] = tensor
            continue
        module = name.removesuffix("weight")
        columns, rows = tensor.shape
        if rows % BLOCK or columns % BLOCK:
            raise ValueError(f"{name} is {columns} x {rows}: EXL3 needs multiples of {BLOCK}")
        if search:
            layer = quantise(tensor.t().contiguous(), bits, codebook, seed + count)
        else:
            layer = draw(rows, columns, tensor.float().std().item(), bits, codebook, seed + count)
        packed.update({f"{module}trellis": layer.trellis, f"{module}suh": layer.suh, f"{module}svh": layer.svh})
        if (marker := marker_tensor(codebook)) is not None:
            packed[module + marker[0]] = marker[1]
        count += 1
    if not count:
        raise ValueError("no routed expert weights of the form ….mlp.experts.E.gate_proj.weight to pack")
    return packed, {"quant_method": "exl3", "bits": bits, "codebook": codebook, "scope": "routed_experts"}


def unpack_experts(state: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The inverse, for a reference model: packed tensors become ``weight`` ``[out, in]`` of `dtype`."""
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
