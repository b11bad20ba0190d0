"""Packing a state dict's experts, and back."""

import pytest
import torch
from glm_vllm_overlay.exl3.checkpoint import pack_experts, unpack_experts
from glm_vllm_overlay.exl3.format import CODEBOOKS, MARKERS, Packed, dequantise

EXPERT = "model.language_model.layers.1.mlp.experts.0"


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{EXPERT}.gate_proj.weight": torch.randn(128, 256, generator=generator).bfloat16() * 0.03,
        f"{EXPERT}.down_proj.weight": torch.randn(256, 128, generator=generator).bfloat16() * 0.03,
        "model.language_model.layers.1.mlp.shared_experts.up_proj.weight": torch.ones(8, 8),
        "lm_head.weight": torch.ones(4, 4),
    }


def test_searched_experts_are_near_the_originals() -> None:
    original = state()
    packed, config = pack_experts(original, bits=5)
    assert config == {"quant_method": "exl3", "bits": 5, "codebook": "mcg", "scope": "routed_experts"}
    assert packed[f"{EXPERT}.gate_proj.trellis"].shape == (16, 8, 80)
    assert packed[f"{EXPERT}.gate_proj.mcg"].dtype == torch.int32
    assert torch.equal(packed["lm_head.weight"], original["lm_head.weight"])
    back = unpack_experts(packed)
    assert back.keys() == original.keys()
    for name in original:
        error = (back[name] - original[name].float()).norm() / original[name].float().norm()
        assert error.item() < 0.04, name


def test_drawn_experts_have_the_originals_spread() -> None:
    original = state()
    back = unpack_experts(pack_experts(original, search=False)[0])
    name = f"{EXPERT}.gate_proj.weight"
    assert back[name].std().item() == pytest.approx(original[name].float().std().item(), rel=0.02)
    assert not torch.allclose(back[name], original[name].float(), atol=0.01)
    again = unpack_experts(pack_experts(original, search=False)[0])
    assert torch.equal(again[name], back[name])


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_the_codebook_is_read_from_its_marker(codebook: str) -> None:
    packed, config = pack_experts(state(), codebook=codebook, search=False)
    module = f"{EXPERT}.gate_proj"
    assert config["codebook"] == codebook and (f"{module}.{codebook}" in packed) == (codebook in MARKERS)
    layer = Packed(*(packed[f"{module}.{part}"] for part in ("trellis", "suh", "svh")), codebook)
    assert torch.equal(unpack_experts(packed)[f"{module}.weight"], dequantise(layer).t())


def test_nothing_to_pack_and_wrong_dimensions() -> None:
    with pytest.raises(ValueError, match="no routed expert weights"):
        pack_experts({"lm_head.weight": torch.ones(4, 4)})
    for shape in ((96, 256), (256, 96)):
        with pytest.raises(
            ValueError, match=rf"gate_proj.weight is {shape[0]} x {shape[1]}: EXL3 needs multiples of 128"
        ):
            pack_experts({f"{EXPERT}.gate_proj.weight": torch.ones(shape)})
