"""The kernel backends but for the kernels: what they are given, in which order, and what is made of their outputs.

Operators of the same names and signatures stand in for the compiled ones. They compute with the reference what the
kernels are described to compute from the very arguments that they get, and refuse sizes that would not hold it.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from experts import EXPERTS, HIDDEN, TOP_K, WIDTH, make_experts
from glm_vllm_overlay.exl3 import execute, ops
from glm_vllm_overlay.exl3 import format as exl3
from glm_vllm_overlay.exl3.execute import (
    COOP_SLOTS,
    GROUP_TOKENS,
    BackendError,
    Experts,
    FusedBackend,
    LoopBackend,
    ReferenceBackend,
    activate,
    make_backend,
    scratch_bytes,
)

BINDINGS = Path(__file__).parents[3] / "files/overlay/csrc/bindings.cpp"


class Kernels:
    """In the place of the compiled operators; `calls` names each with its number of tokens."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.experts: Experts | None = None
        self.spoil = False  # whether outputs are not finite
        source = re.sub(r'"\s*\n\s*"', "", BINDINGS.read_text())
        self.library = torch.library.Library("glm_exl3", "DEF")
        for name in ("decode", "moe_coop", "moe_grouped"):
            schema = re.search(rf'm\.def\("({name}\(.*?)"\);', source)
            self.library.define(schema[1])
            self.library.impl(name, getattr(self, name), "CPU")

    def decode(self, trellis: torch.Tensor, bits: int) -> torch.Tensor:
        self.calls.append(("decode", bits))
        return exl3.decode_tiles(trellis, "mcg")

    def _check_tables(self, tables: torch.Tensor) -> None:
        assert torch.equal(tables, self.experts.pointer_tables())

    def moe_coop(self, x, ids, weights, tables, bits, limit, rotated, gate_up, act, down, counters, out) -> None:
        tokens, hidden = x.shape
        self.calls.append(("coop", tokens))
        self._check_tables(tables)
        assert (x.dtype, ids.dtype, weights.dtype) == (torch.float16, torch.int64, torch.float16)
        assert tokens * ids.shape[1] <= COOP_SLOTS and out.shape == (COOP_SLOTS // ids.shape[1], hidden)
        assert rotated.shape == (2, COOP_SLOTS, hidden) and gate_up.shape == (2, COOP_SLOTS, WIDTH)
        assert act.shape == (COOP_SLOTS, WIDTH) and down.shape == (COOP_SLOTS, hidden) and down.dtype == torch.float32
        # Runs of the rows and tiles of the outputs are counted here, behind them the slots' own table.
        assert len(counters) == COOP_SLOTS * (WIDTH // 128) + out.shape[0] * (hidden // 128) + 3 + 2 * COOP_SLOTS
        assert not counters.any(), "the kernels count from zero and leave zero"
        assert (bits, limit) == (self.experts.bits, self.experts.limit)
        out[:tokens] = ReferenceBackend(self.experts).apply(x.float(), weights.float(), ids)
        if self.spoil:
            out[0, 0] = float("inf")

    def moe_grouped(self, x, experts, tokens, slots, weights, tiles, tables, limit, wide, mid, out) -> None:
        self.calls.append(("grouped", len(x)))
        self._check_tables(tables)
        assert limit == self.experts.limit and out.dtype == torch.float32
        assert bool((experts[1:] >= experts[:-1]).all())
        planes = 1 if self.experts.shared_suh else 2
        assert wide.shape[0] == planes and wide.shape[1] >= len(experts) and wide.shape[2] == x.shape[1]
        assert mid.shape[0] == 2 and mid.shape[1] >= len(experts) and mid.shape[2] == WIDTH
        gate, up, down = (exl3.dequantise(packed) for packed in self.experts.projections())
        results = torch.full((len(experts), x.shape[1]), float("nan"))
        for expert, first, rows in tiles.t().tolist():
            values = x[tokens[first : first + rows]].float()
            results[first : first + rows] = activate(values @ gate[expert], values @ up[expert], limit) @ down[expert]
        out.copy_((results[slots] * weights.float().unsqueeze(-1)).sum(1))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    monkeypatch.setattr(ops, "load", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(execute._Scratch, "_made", {})
    made = Kernels()
    yield made
    made.library._destroy()


def batch(tokens: int, experts: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weights and ids of so many tokens; the last expert is nobody's choice."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts - 1, generator=generator)[:TOP_K] for _ in range(tokens)])
    x = torch.randn(tokens, HIDDEN, generator=generator)
    return x, torch.rand(tokens, TOP_K, generator=generator), ids


def fused(kernels: Kernels, experts: Experts | None = None, **options: object) -> FusedBackend:
    kernels.experts = experts or make_experts()
    return FusedBackend(kernels.experts, TOP_K, **options)


def close(backend: execute.Backend, experts: Experts, tokens: int) -> None:
    """float16 inputs and weights: a thousandth."""
    x, weights, ids = batch(tokens)
    wanted = ReferenceBackend(experts).apply(x, weights, ids)
    found = backend.apply(x, weights, ids)
    assert ((found - wanted).norm() / wanted.norm()).item() < 2e-3
    assert found.dtype == torch.float32 and backend.apply(x.bfloat16(), weights, ids).dtype == torch.bfloat16


def test_loop_is_the_reference(kernels: Kernels) -> None:
    experts = make_experts()
    close(LoopBackend(experts), experts, 9)
    assert set(kernels.calls) == {("decode", 4)}


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
def test_fused_is_the_reference_on_both_sides_of_the_limit(kernels: Kernels, tokens: int) -> None:
    """128 tokens of two choices are the 256 slots that the cooperative kernel takes."""
    backend = fused(kernels)
    kernels.calls.clear()
    close(backend, kernels.experts, tokens)
    assert kernels.calls == [("coop" if tokens <= 128 else "grouped", tokens)] * 2


@pytest.mark.parametrize(("tokens", "parts"), [(200, [200]), (401, [134, 134, 133]), (400, [200, 200])])
def test_a_step_beyond_the_scratch_is_cut(kernels: Kernels, tokens: int, parts: list[int]) -> None:
    backend = fused(kernels, max_tokens=200)
    kernels.calls.clear()
    x, weights, ids = batch(tokens)
    found = backend.apply(x, weights, ids)
    wanted = ReferenceBackend(kernels.experts).apply(x, weights, ids)
    assert ((found - wanted).norm() / wanted.norm()).item() < 2e-3
    assert kernels.calls == [("grouped", part) for part in parts]


def test_the_scratch_is_of_the_largest_step_at_most(kernels: Kernels) -> None:
    assert fused(kernels, max_tokens=10 * GROUP_TOKENS).scratch.batch == GROUP_TOKENS
    assert fused(kernels, max_tokens=500).scratch.batch == 500
    assert fused(kernels, max_tokens=500).scratch is fused(kernels, max_tokens=500).scratch, "one for all layers"
    for shared in (False, True):
        experts = make_experts()
        if shared:
            experts.w13_suh[:, 1] = experts.w13_suh[:, 0]
        scratch = fused(kernels, experts, max_tokens=500).scratch
        told = scratch_bytes(HIDDEN, WIDTH, TOP_K, 500, shared)
        assert told == sum(value.nbytes for value in vars(scratch).values() if isinstance(value, torch.Tensor))
    assert scratch_bytes(HIDDEN, WIDTH, TOP_K, 9999) == scratch_bytes(HIDDEN, WIDTH, TOP_K, GROUP_TOKENS)


def test_equal_input_scales_are_rotated_once(kernels: Kernels) -> None:
    experts = make_experts()
    experts.w13_suh[:, 1] = experts.w13_suh[:, 0]
    close(fused(kernels, experts), experts, 200)
    close(fused(kernels, make_experts()), make_experts(), 200)  # and otherwise twice: see the stand-in


def test_every_kernel_runs_before_anything_is_captured(kernels: Kernels) -> None:
    fused(kernels)
    assert kernels.calls == [("coop", 1), ("coop", 2), ("coop", 128), ("grouped", 129)]


def test_an_answer_is_no_scratch(kernels: Kernels) -> None:
    backend = fused(kernels)
    first = backend.apply(*batch(3))
    kept = first.clone()
    backend.apply(*batch(4))
    assert torch.equal(first, kept) and first.shape == (3, HIDDEN)


def test_overflow_is_found_where_it_is_looked_for(kernels: Kernels) -> None:
    (x, weights, ids), experts = batch(3), make_experts()
    looking, blind = fused(kernels, experts, check_overflow=True), fused(kernels, experts)
    looking.apply(x, weights, ids)
    x[1, 5] = 70000.0
    blind.apply(x, weights, ids)
    with pytest.raises(
        FloatingPointError, match=r"1 inputs beyond 65504, \d+ outputs not finite \(largest .* 7e\+04\)"
    ):
        looking.apply(x, weights, ids)
    x[1, 5] = float("inf")  # was none before: the input's own
    with pytest.raises(FloatingPointError, match="0 inputs beyond 65504"):
        looking.apply(x, weights, ids)
    x[1, 5], kernels.spoil = 0.0, True
    with pytest.raises(FloatingPointError, match="0 inputs beyond 65504, 1 outputs not finite"):
        looking.apply(x, weights, ids)


@pytest.mark.parametrize("backend", [FusedBackend, LoopBackend])
@pytest.mark.parametrize("change", [{"bits": 3}, {"codebook": "mul1"}])
def test_experts_that_the_kernels_were_not_compiled_for(kernels: Kernels, backend: type, change: dict) -> None:
    arguments = (TOP_K,) if backend is FusedBackend else ()
    with pytest.raises(
        BackendError, match="compiled kernels serve 4-bit mcg experts, this layer has .*set exl3_backend"
    ):
        backend(make_experts(**change), *arguments)


@pytest.mark.parametrize(("name", "kind"), [("", "fused"), ("fused", "fused"), ("loop", "loop"), ("reference", "ref")])
def test_on_a_gpu_each_name_is_its_backend(monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    """Without one: what is made of which arguments."""
    for known, target in (("fused", "FusedBackend"), ("loop", "LoopBackend"), ("ref", "ReferenceBackend")):
        monkeypatch.setattr(execute, target, lambda *arguments, known=known: (known, *arguments[1:]))

    class OnGpu(torch.Tensor):
        is_cuda = True

    experts = make_experts(w2_trellis=make_experts().w2_trellis.as_subclass(OnGpu))
    assert make_backend(name, experts, 8, 64, True) == ((kind, 8, 64, True) if kind == "fused" else (kind,))
