"""exllamav3's kernels, through our operators, against float64 at the recipe's layer shape (one rank of two)."""

from collections.abc import Iterator

import pytest
import torch
from glm_vllm_overlay.exl3 import format as exl3
from glm_vllm_overlay.exl3.execute import Experts, FusedBackend, LoopBackend
from moe import LIMIT, make_experts, make_routing

E, H, I, K = 288, 4096, 1024, 8  # noqa: E741 - the letters of the formulas
TOLERANCE = 2e-3  # ‖out - ref‖ / ‖ref‖ of every single token: a skipped expert would be some 0.35


class Layer:
    """Random experts, their float64 decode (29 GB at the real shape) and the fused backend over them."""

    def __init__(self, experts: int = E, hidden: int = H, width: int = I, top_k: int = K) -> None:
        self.experts = make_experts(experts, hidden, width, "cuda")
        self.fused = FusedBackend(self.experts, top_k)
        self.decoded = [self._decode(packed) for packed in self.experts.projections()]

    @staticmethod
    def _decode(stack: exl3.Packed) -> torch.Tensor:
        one = [exl3.Packed(stack.trellis[e], stack.suh[e], stack.svh[e]) for e in range(stack.trellis.shape[0])]
        return torch.stack([exl3.dequantise(packed, torch.float64) for packed in one])

    def reference(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The model's arithmetic in float64: gate clamped before the silu."""
        gate, up, down = self.decoded
        values, out = x.double(), torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        for e in ids.unique().tolist():
            token, choice = (ids == e).nonzero(as_tuple=True)
            rows = values[token]
            hidden = torch.nn.functional.silu((rows @ gate[e]).clamp(max=LIMIT)) * (rows @ up[e]).clamp(-LIMIT, LIMIT)
            out.index_add_(0, token, (hidden @ down[e]) * weights[token, choice].double().unsqueeze(1))
        return out


@pytest.fixture(scope="module")
def layer() -> Iterator[Layer]:
    yield Layer()
    torch.cuda.empty_cache()


def worst(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest relative error of a token; infinite when anything is not finite."""
    error = ((out.double() - reference).norm(dim=1) / reference.norm(dim=1)).max().item()
    return error if torch.isfinite(out).all() else float("inf")


def check(layer: Layer, tokens: int, ids: torch.Tensor | None = None, scale: float = 1.0) -> float:
    x = scale * torch.randn(tokens, H, device="cuda")
    x = x.half().float()  # exact in float16: the kernel's input rounding is not what is measured
    chosen, weights = make_routing(tokens, E, K, "cuda")
    ids = chosen if ids is None else ids
    layer.fused.scratch.out.fill_(float("nan"))
    out = layer.fused.apply(x, weights, ids)
    error = worst(out, layer.reference(x, weights.half(), ids))
    assert error < TOLERANCE, f"T={tokens}: {error:.2e}"
    return error


def test_decode_is_exact(layer: Layer) -> None:
    trellis = layer.experts.w2_trellis[7]
    assert torch.equal(torch.ops.glm_exl3.decode(trellis, 4), exl3.decode_tiles(trellis, "mcg"))


@pytest.mark.parametrize("tokens", [*range(1, 33), 33, 64, 128, 333, 1024, 1025, 2048, 4096, 4640, 7168])
def test_every_batch_size(layer: Layer, tokens: int) -> None:
    print(f"T={tokens} error={check(layer, tokens):.2e}")


@pytest.mark.parametrize("tokens", [1, 7, 32, 33, 1024, 4640])
def test_hot_experts(layer: Layer, tokens: int) -> None:
    """Every token chooses the same eight experts; all others are empty."""
    check(layer, tokens, torch.arange(K, device="cuda").mul(36).add(3).expand(tokens, K))


def test_one_hot_expert_among_others(layer: Layer) -> None:
    ids, _ = make_routing(1024, E - 1, K, "cuda")
    ids[:, 0] = E - 1
    check(layer, 1024, ids)


def test_activation_clamp_is_within_the_documented_difference(layer: Layer) -> None:
    """Large inputs drive gate and up past the limit: the two places to clamp agree to half a float16 step."""
    for tokens in (4, 64):
        check(layer, tokens, scale=12.0)


def test_counters_survive_changing_batch_sizes(layer: Layer) -> None:
    for tokens in (1, 32, 5, 1, 40, 31, 2, 32):
        check(layer, tokens)


def test_graph_replay_follows_new_inputs(layer: Layer) -> None:
    x = torch.randn(32, H, device="cuda").half()
    ids, weights = make_routing(32, E, K, "cuda")
    layer.fused.apply(x, weights, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.fused.apply(x, weights, ids)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        fresh_ids, fresh_weights = make_routing(32, E, K, "cuda")
        ids.copy_(fresh_ids)
        weights.copy_(fresh_weights)
        graph.replay()
        assert worst(out, layer.reference(x, weights.half(), ids)) < TOLERANCE


@pytest.mark.parametrize(
    ("hidden", "width", "experts", "top_k"), [(512, 256, 16, 4), (128, 128, 3, 1), (384, 640, 9, 8)]
)
def test_other_shapes(hidden: int, width: int, experts: int, top_k: int) -> None:
    small = Layer(experts, hidden, width, top_k)
    for tokens in (1, 5, 32, 300):
        x = torch.randn(tokens, hidden, device="cuda").half()
        ids, weights = make_routing(tokens, experts, top_k, "cuda")
        out = small.fused.apply(x.float(), weights, ids)
        assert worst(out, small.reference(x, weights.half(), ids)) < TOLERANCE, tokens


@pytest.mark.parametrize("tokens", [40, 5000])
def test_shared_and_separate_input_scales(layer: Layer, tokens: int) -> None:
    """The pack's gate and up share suh: one rotation. The same experts through the two-plane path must agree."""
    experts = Experts(**vars(layer.experts))
    experts.w13_suh = experts.w13_suh.clone()
    experts.w13_suh[0, 1, 0] *= -1
    x = torch.randn(tokens, H, device="cuda").half()
    ids, weights = make_routing(tokens, E - 1, K, "cuda")
    separate = FusedBackend(experts, K)
    assert (layer.fused.scratch.wide.shape[0], separate.scratch.wide.shape[0]) == (1, 2)
    assert torch.equal(separate.apply(x, weights, ids + 1), layer.fused.apply(x, weights, ids + 1))


@pytest.mark.parametrize("tokens", [1, 9, 32, 333, 1300])
def test_grouped_kernel_agrees_below_its_range_too(layer: Layer, tokens: int) -> None:
    x = torch.randn(tokens, H, device="cuda").half()
    ids, weights = make_routing(tokens, E, K, "cuda")
    out = torch.full((tokens, H), float("nan"), device="cuda")
    layer.fused._grouped(x, weights.half(), ids, out)
    assert worst(out, layer.reference(x, weights.half(), ids)) < TOLERANCE


@pytest.mark.parametrize("tokens", [500, 4000])
def test_grouped_kernel_repeats_itself_bit_by_bit(layer: Layer, tokens: int) -> None:
    x = torch.randn(tokens, H, device="cuda").half()
    ids, weights = make_routing(tokens, E, K, "cuda")
    first, second = (layer.fused.apply(x, weights, ids) for _ in range(2))
    assert torch.equal(first, second)


def test_loop_backend(layer: Layer) -> None:
    x = torch.randn(16, H, device="cuda").half().float()
    ids, weights = make_routing(16, E, K, "cuda")
    assert worst(LoopBackend(layer.experts).apply(x, weights, ids), layer.reference(x, weights, ids)) < TOLERANCE


def test_overflow_is_seen_in_debug_mode(layer: Layer) -> None:
    backend = FusedBackend(layer.experts, K, check_overflow=True)
    ids, weights = make_routing(3, E, K, "cuda")
    x = torch.randn(3, H, device="cuda")
    backend.apply(x, weights, ids)
    x[1, 5] = 1e5
    with pytest.raises(FloatingPointError, match="1 inputs beyond 65504"):
        backend.apply(x, weights, ids)


def test_a_batch_beyond_the_scratch_is_refused(layer: Layer) -> None:
    s = layer.fused.scratch
    tokens = s.mid.shape[1] // K + 1
    x = torch.zeros(tokens, H, device="cuda", dtype=torch.float16)
    ids, weights = make_routing(tokens, E, K, "cuda")
    with pytest.raises(RuntimeError, match=f"scratch for {s.mid.shape[1]} slots cannot hold {tokens * K}"):
        layer.fused._grouped(x, weights.half(), ids, torch.empty(tokens, H, device="cuda"))


def test_operators_trace_without_a_device(layer: Layer) -> None:
    torch.library.opcheck(
        torch.ops.glm_exl3.decode, (layer.experts.w2_trellis[0], 4), test_utils=("test_schema", "test_faketensor")
    )


def test_wrong_format_is_refused(layer: Layer) -> None:
    e = layer.experts
    other = Experts(**{**vars(e), "codebook": "mul1"})
    with pytest.raises(RuntimeError, match="4-bit mcg"):
        FusedBackend(other, K)
