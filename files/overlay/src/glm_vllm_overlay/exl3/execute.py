"""Running a layer of packed experts: three backends with one contract.

``apply(x [T, H], weights [T, k] float32, ids [T, k] int64) -> [T, H]`` in x's dtype: the sum over the chosen experts of
``weight · down(min(silu(gate x), L) · clip(up x, ±L))``, this rank's part of it only (no all-reduce).

* ``reference``: decoded once to float32, plain torch. CPU machines, tests.
* ``loop``: decoded by the kernel expert by expert, multiplied by torch. To tell a kernel's fault from a loader's.
* ``fused``: up to 256 slots (32 tokens at top-8) exllamav3's cooperative kernel, which is captured in CUDA graphs;
  above that our grouped kernel (csrc/grouped.cu), which decodes a tile once per 128 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from glm_vllm_overlay.exl3.format import BLOCK, Packed, dequantise, rotate

BACKENDS = ("fused", "loop", "reference")
COOP_SLOTS = 256  # what the cooperative kernel's run table holds
GROUP_TOKENS = 4096  # most tokens a launch of the grouped kernel: what its scratch holds
TILE_ROWS = 128  # rows for which the grouped kernel decodes a tile once


class BackendError(RuntimeError):
    """The backend cannot run here; the message says which setting to change."""


@dataclass
class Experts:
    """One rank's packed experts of one layer, parameters as `loader.ExpertShape.parameters` lays them out."""

    bits: int
    codebook: str
    limit: float  # clamp of the activation; 0 means none
    w13_trellis: torch.Tensor
    w13_suh: torch.Tensor
    w13_svh: torch.Tensor
    w2_trellis: torch.Tensor
    w2_suh: torch.Tensor
    w2_svh: torch.Tensor

    @property
    def hidden(self) -> int:
        return self.w2_svh.shape[-1]

    @property
    def width(self) -> int:
        return self.w2_suh.shape[-1]

    @property
    def shared_suh(self) -> bool:
        """Whether gate and up of every expert have the same input scales, so that one rotation serves both."""
        return bool(torch.equal(self.w13_suh[:, 0], self.w13_suh[:, 1]))

    def projections(self) -> tuple[Packed, Packed, Packed]:
        """Gate, up and down as stacks over experts."""
        gate, up = (
            Packed(self.w13_trellis[:, i], self.w13_suh[:, i], self.w13_svh[:, i], self.codebook) for i in range(2)
        )
        return gate, up, Packed(self.w2_trellis, self.w2_suh, self.w2_svh, self.codebook)

    def pointer_tables(self) -> torch.Tensor:
        """int64 ``[9, E]`` device addresses: gate, up, down × trellis, suh, svh. Valid while the parameters live."""
        columns = []
        for packed in self.projections():
            for tensor in (packed.trellis, packed.suh, packed.svh):
                step = tensor.stride(0) * tensor.element_size()
                start = torch.arange(tensor.shape[0], dtype=torch.int64) * step + tensor.data_ptr()
                columns.append(start)
        return torch.stack(columns).to(self.w2_trellis.device)


class Backend(Protocol):
    def apply(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor: ...


def activate(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(gate) · up with the model's clamps: gate from above before the silu, up on both sides; limit 0 = none.

    exllamav3's kernels clamp silu(gate) instead. The two differ only for gate > limit, by at most
    limit · (1 - sigmoid(limit)): 4.6e-4 at 10, half a float16 step there.
    """
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate) * up


class ReferenceBackend:
    """Every expert decoded once to float32: eight times the packed size at 4 bits."""

    def __init__(self, experts: Experts) -> None:
        self.limit = experts.limit
        self.gate, self.up, self.down = (dequantise(packed) for packed in experts.projections())

    def apply(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        values = x.float()
        out = torch.zeros_like(values)
        for expert in ids.unique().tolist():
            token, choice = (ids == expert).nonzero(as_tuple=True)
            rows = values[token]
            hidden = activate(rows @ self.gate[expert], rows @ self.up[expert], self.limit)
            out.index_add_(0, token, (hidden @ self.down[expert]) * weights[token, choice].float().unsqueeze(1))
        return out.to(x.dtype)


class LoopBackend:
    """One expert after another: the kernel decodes to float16, torch rotates and multiplies. Waits for the host."""

    def __init__(self, experts: Experts) -> None:
        from glm_vllm_overlay.exl3 import ops

        ops.load()
        _check_kernels_fit(experts)
        self.experts = experts

    def _linear(self, x: torch.Tensor, packed: Packed, expert: int) -> torch.Tensor:
        weight = torch.ops.glm_exl3.decode(packed.trellis[expert], self.experts.bits)
        rotated = rotate(x * packed.suh[expert].float())
        return rotate((rotated.half() @ weight).float()) * packed.svh[expert].float()

    def apply(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        values = x.float()
        out = torch.zeros_like(values)
        gate, up, down = self.experts.projections()
        for expert in ids.unique().tolist():
            token, choice = (ids == expert).nonzero(as_tuple=True)
            rows = values[token]
            hidden = activate(self._linear(rows, gate, expert), self._linear(rows, up, expert), self.experts.limit)
            result = self._linear(hidden, down, expert) * weights[token, choice].float().unsqueeze(1)
            out.index_add_(0, token, result)
        return out.to(x.dtype)


class _Scratch:
    """Kernel scratch shared by all layers of one shape on one device: the layers of a step run one after another."""

    _made: dict[tuple[torch.device, int, int, int, int, int], _Scratch] = {}

    def __init__(self, device: torch.device, hidden: int, width: int, top_k: int, batch: int, planes: int) -> None:
        def half(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float16, device=device)

        self.tokens = COOP_SLOTS // top_k
        # The counters lie at offsets that depend on these sizes, so the buffers are never resized or sliced.
        self.rotated, self.gate_up = half(2, COOP_SLOTS, hidden), half(2, COOP_SLOTS, width)
        self.act = half(COOP_SLOTS, width)
        self.down = torch.empty(COOP_SLOTS, hidden, dtype=torch.float32, device=device)
        self.out = torch.empty(self.tokens, hidden, dtype=torch.float32, device=device)
        counters = COOP_SLOTS * (width // BLOCK) + self.tokens * (hidden // BLOCK) + 3 + 2 * COOP_SLOTS
        self.counters = torch.zeros(counters, dtype=torch.int32, device=device)
        self.batch = batch
        self.wide, self.mid = half(planes, batch * top_k, hidden), half(2, batch * top_k, width)

    @classmethod
    def of(cls, device: torch.device, hidden: int, width: int, top_k: int, batch: int, planes: int) -> _Scratch:
        key = (device, hidden, width, top_k, batch, planes)
        if key not in cls._made:
            cls._made[key] = cls(*key)
        return cls._made[key]


def scratch_bytes(hidden: int, width: int, top_k: int, max_tokens: int, shared_suh: bool = False) -> int:
    """What the fused backend's scratch takes on a device, once for all layers; `width` is one rank's."""
    planes, batch = 1 if shared_suh else 2, min(max_tokens, GROUP_TOKENS)
    scratch = _Scratch(torch.device("meta"), hidden, width, top_k, batch, planes)
    return sum(value.nbytes for value in vars(scratch).values() if isinstance(value, torch.Tensor))


def row_tiles(experts: torch.Tensor, count: int) -> torch.Tensor:
    """int32 ``[3, M]``: expert, first slot and number of rows of every tile that `moe_grouped` works on.

    experts int64 ``[S]`` ascending, one a slot; `count` = number of experts. Every slot lies in exactly one tile, so no
    expert can be skipped, however many rows it has. M depends on shapes alone: unused tiles have 0 rows.
    """
    device = experts.device
    rows = torch.zeros(count, dtype=torch.int64, device=device).scatter_add_(0, experts, torch.ones_like(experts))
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    ends = tiles.cumsum(0)
    index = torch.arange(experts.numel() // TILE_ROWS + min(count, experts.numel()), device=device)
    expert = torch.searchsorted(ends, index, right=True)
    expert = expert.clamp(max=count - 1)  # of the unused, whose rows are then spent
    within = (index - (ends - tiles)[expert]) * TILE_ROWS
    first = (rows.cumsum(0) - rows)[expert] + within
    size = (rows[expert] - within).clamp(0, TILE_ROWS)
    return torch.stack((expert, first, size)).int()


class FusedBackend:
    """The fused kernels on CUDA; float16 inside: `check_overflow` finds inputs beyond 65504."""

    def __init__(
        self, experts: Experts, top_k: int, max_tokens: int = GROUP_TOKENS, check_overflow: bool = False
    ) -> None:
        from glm_vllm_overlay.exl3 import ops

        ops.load()
        _check_kernels_fit(experts)
        self.experts = experts
        self.check_overflow = check_overflow
        self.tables = experts.pointer_tables()
        planes, batch = 1 if experts.shared_suh else 2, min(max_tokens, GROUP_TOKENS)
        self.scratch = _Scratch.of(self.tables.device, experts.hidden, experts.width, top_k, batch, planes)
        self._warm(top_k)

    def _warm(self, top_k: int) -> None:
        """Run every kernel once: the first call allocates locks and sets attributes, which a graph cannot capture."""
        for tokens in (1, 2, self.scratch.tokens, self.scratch.tokens + 1):
            x = torch.zeros(tokens, self.experts.hidden, dtype=torch.float16, device=self.tables.device)
            ids = torch.arange(top_k, device=x.device).remainder(self.tables.shape[1]).expand(tokens, top_k)
            self.apply(x, torch.zeros(tokens, top_k, device=x.device), ids)
        torch.cuda.synchronize(self.tables.device)

    def apply(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        values, weights, ids = x.half().contiguous(), weights.half().contiguous(), ids.long().contiguous()
        if x.shape[0] <= self.scratch.tokens:
            out = self._coop(values, weights, ids)
        else:
            out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
            parts = -(-x.shape[0] // self.scratch.batch)
            for part in zip(*(t.tensor_split(parts) for t in (values, weights, ids, out)), strict=True):
                self._grouped(*part)
        if self.check_overflow:
            self._find_overflow(x, values, out)
        return out.to(x.dtype, copy=True)  # `out` may be scratch, whatever the dtype

    def _coop(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        s = self.scratch
        torch.ops.glm_exl3.moe_coop(
            x, ids, weights, self.tables, self.experts.bits, self.experts.limit,
            s.rotated, s.gate_up, s.act, s.down, s.counters, s.out,
        )  # fmt: skip
        return s.out[: x.shape[0]]

    def _grouped(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        experts, order = ids.flatten().sort(stable=True)
        slots = torch.empty_like(order)
        slots[order] = torch.arange(order.numel(), device=x.device)
        tiles = row_tiles(experts, self.tables.shape[1])
        torch.ops.glm_exl3.moe_grouped(
            x, experts, order // ids.shape[1], slots.view_as(ids), weights, tiles, self.tables, self.experts.limit,
            self.scratch.wide, self.scratch.mid, out,
        )  # fmt: skip

    def _find_overflow(self, x: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        lost_in = int((torch.isfinite(x) & ~torch.isfinite(values)).sum())
        lost_out = int((~torch.isfinite(out)).sum())
        if lost_in or lost_out:
            raise FloatingPointError(
                f"float16 overflow in the expert kernels: {lost_in} inputs beyond 65504, {lost_out} outputs not finite"
                f" (largest input {float(x.abs().amax()):.4g})"
            )


def _check_kernels_fit(experts: Experts) -> None:
    if experts.bits != 4 or experts.codebook != "mcg":
        raise BackendError(
            f"the compiled kernels serve 4-bit mcg experts, this layer has {experts.bits}-bit {experts.codebook}:"
            " set exl3_backend to reference, or use a 4-bit mcg checkpoint"
        )


def make_backend(
    name: str, experts: Experts, top_k: int, max_tokens: int = GROUP_TOKENS, check_overflow: bool = False
) -> Backend:
    """The backend `name`; empty = fused on CUDA, reference elsewhere. BackendError when it cannot run here."""
    cuda = experts.w2_trellis.is_cuda
    name = name or ("fused" if cuda else "reference")
    if name not in BACKENDS:
        raise BackendError(f"exl3_backend is {name!r}; choose one of {', '.join(BACKENDS)}")
    if name != "reference" and not cuda:
        raise BackendError(f"exl3_backend {name} needs a CUDA device; on this machine set exl3_backend to reference")
    if name == "reference":
        return ReferenceBackend(experts)
    return LoopBackend(experts) if name == "loop" else FusedBackend(experts, top_k, max_tokens, check_overflow)
