"""The backends as far as a CPU goes: the reference against a slow sum, the clamp, and what is refused."""

import pytest
import torch
from experts import EXPERTS, HIDDEN, TOP_K, WIDTH, make_experts
from glm_vllm_overlay.exl3 import format as exl3
from glm_vllm_overlay.exl3.execute import (
    TILE_ROWS,
    BackendError,
    Experts,
    ReferenceBackend,
    activate,
    make_backend,
    row_tiles,
)


def slow(experts: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The formula of the model, token by token, rotating activations instead of weights."""
    gate, up, down = experts.projections()

    def one(packed: exl3.Packed, e: int) -> exl3.Packed:
        return exl3.Packed(packed.trellis[e], packed.suh[e], packed.svh[e])

    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for choice in range(ids.shape[1]):
            e, value = int(ids[token, choice]), x[token].double()
            g = exl3.linear(value, one(gate, e), torch.float64).clamp(max=experts.limit)
            u = exl3.linear(value, one(up, e), torch.float64).clamp(-experts.limit, experts.limit)
            h = g * torch.sigmoid(g) * u
            out[token] += weights[token, choice].double() * exl3.linear(h, one(down, e), torch.float64)
    return out


@pytest.mark.parametrize("tokens", [1, 7])
def test_reference_is_the_models_formula(tokens: int) -> None:
    experts, x = make_experts(), torch.randn(tokens, HIDDEN)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])
    weights = torch.rand(tokens, TOP_K)
    out = ReferenceBackend(experts).apply(x, weights, ids)
    expected = slow(experts, x, weights, ids)
    assert ((out - expected).norm() / expected.norm()).item() < 1e-5
    assert ReferenceBackend(experts).apply(x.bfloat16(), weights, ids).dtype == torch.bfloat16


def test_reference_is_hugging_faces_layer_of_experts() -> None:
    pytest.importorskip("glm_vllm_twin.torchvision_ops").declare()
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextExperts

    config = Glm5NextTextConfig(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, n_routed_experts=EXPERTS, swiglu_limit=0.2
    )
    model, experts = Glm5NextTextExperts(config), make_experts()
    gate, up, down = (exl3.dequantise(packed).transpose(1, 2) for packed in experts.projections())
    ids, weights = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(20)]), torch.rand(20, TOP_K)
    x = torch.randn(20, HIDDEN)
    with torch.no_grad():
        model.gate_up_proj.copy_(torch.cat([gate, up], 1))
        model.down_proj.copy_(down)
        wanted = model(x, ids, weights)
    torch.testing.assert_close(ReferenceBackend(experts).apply(x, weights, ids), wanted, rtol=1e-4, atol=1e-3)
    without = ReferenceBackend(make_experts(limit=0.0)).apply(x, weights, ids)
    assert ((without - wanted).norm() / wanted.norm()).item() > 0.1


def test_both_places_to_clamp_differ_by_less_than_half_a_float16_step() -> None:
    """The kernels clamp silu(gate), the model gate: the bound stands in `activate`'s description."""
    gate, limit = torch.linspace(-30, 60, 200001, dtype=torch.float64), 10.0
    one = torch.ones_like(gate)
    kernels = torch.nn.functional.silu(gate).clamp(max=limit)
    difference = (activate(gate, one, limit) - kernels).abs()
    assert 4.4e-4 < difference.max().item() < 4.6e-4
    assert difference[gate <= limit].max().item() == 0
    assert difference.max().item() < 0.5 * 2**-7  # float16 steps by 2^-7 between 8 and 16
    assert torch.equal(activate(gate, one, 0.0), torch.nn.functional.silu(gate))


def test_pointer_tables_name_every_tensor() -> None:
    experts = make_experts()
    table = experts.pointer_tables()
    gate, up, down = experts.projections()
    for row, tensor in enumerate(t for p in (gate, up, down) for t in (p.trellis, p.suh, p.svh)):
        for e in range(EXPERTS):
            assert table[row, e].item() == tensor[e].data_ptr()
            assert tensor[e].is_contiguous()


def test_projections_are_the_parameters_rows() -> None:
    experts = make_experts(codebook="mul1")
    for number, packed in enumerate(experts.projections()):
        for part in ("trellis", "suh", "svh"):
            whole = getattr(experts, f"w2_{part}") if number == 2 else getattr(experts, f"w13_{part}")[:, number]
            assert torch.equal(getattr(packed, part), whole)
        assert packed.codebook == "mul1"


def test_default_backend_of_a_cpu_is_the_reference() -> None:
    assert isinstance(make_backend("", make_experts(), TOP_K), ReferenceBackend)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fused", "needs a CUDA device"),
        ("loop", "needs a CUDA device"),
        ("fast", "one of fused, loop, reference"),
    ],
)
def test_backends_that_cannot_run(name: str, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        make_backend(name, make_experts(), TOP_K)


def test_shared_suh_is_read_from_the_checkpoint() -> None:
    experts = make_experts()
    assert not experts.shared_suh
    experts.w13_suh[:, 1] = experts.w13_suh[:, 0]
    assert experts.shared_suh
    experts.w13_suh[EXPERTS - 1, 1, 7] *= 2
    assert not experts.shared_suh


@pytest.mark.parametrize("counts", [[0, 1, 128, 129, 0, 300], [1], [0, 0, 5], [4096, 0], [127, 128, 256, 257]])
def test_every_slot_lies_in_exactly_one_row_tile(counts: list[int]) -> None:
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    covered = torch.zeros(sum(counts), dtype=torch.int64)
    for expert, first, rows in row_tiles(experts, len(counts)).t().tolist():
        assert 0 <= rows <= TILE_ROWS
        covered[first : first + rows] += 1
        assert (experts[first : first + rows] == expert).all()
    assert (covered == 1).all()
