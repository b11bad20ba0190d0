"""From checkpoint tensors to one rank's parameters of a layer of packed experts: shapes, shards, checks, a count.

No vLLM here: `ExpertLoader` fills plain tensors, the quantisation method wires it to vLLM's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm_vllm_overlay.exl3.format import BLOCK, CODEBOOKS, MARKERS, TILE

# vLLM's names for the three projections, with the checkpoint's name of each.
PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
SUFFIXES = ("trellis", "suh", "svh")


class CheckpointError(ValueError):
    """The checkpoint does not hold what the model and the configuration promise; the message names the tensor."""


@dataclass(frozen=True)
class ExpertShape:
    """Geometry of one layer's experts: `intermediate` is the whole model's, before tensor parallelism."""

    experts: int
    hidden: int
    intermediate: int
    bits: int
    codebook: str
    tp_size: int
    tp_rank: int

    def __post_init__(self) -> None:
        if self.codebook not in CODEBOOKS:
            raise CheckpointError(f"EXL3 codebook {self.codebook!r} is unknown; known: {', '.join(CODEBOOKS)}")
        if not 1 <= self.bits <= 8:
            raise CheckpointError(f"EXL3 has 1 to 8 bits a weight, the configuration says {self.bits}")
        if self.hidden % BLOCK or self.intermediate % (BLOCK * self.tp_size):
            raise CheckpointError(
                f"EXL3 cannot cut a {BLOCK}-wide rotation: hidden size {self.hidden} must be a multiple of {BLOCK} and"
                f" expert width {self.intermediate} a multiple of {BLOCK} x tensor-parallel size {self.tp_size}"
            )

    @property
    def width(self) -> int:
        """Expert width on this rank."""
        return self.intermediate // self.tp_size

    @property
    def marker(self) -> str | None:
        return self.codebook if self.codebook in MARKERS else None

    def whole(self, shard: str, suffix: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor in the checkpoint (before sharding)."""
        rows, columns = (self.intermediate, self.hidden) if shard == "w2" else (self.hidden, self.intermediate)
        if suffix == "trellis":
            return (rows // TILE, columns // TILE, TILE * self.bits), torch.int16
        return ((rows,) if suffix == "suh" else (columns,)), torch.float16

    def cut(self, shard: str, suffix: str) -> tuple[int, int] | None:
        """(dimension, elements a rank) along which a tensor is split over ranks; None when every rank holds it all.

        Gate and up are split by columns (their svh with them), down by rows (its suh with them). The replicated svh of
        down scales each rank's partial sum: linear, so the all-reduce afterwards is still right.
        """
        if suffix == "trellis":
            return (0 if shard == "w2" else 1), self.width // TILE
        return (0, self.width) if suffix == ("suh" if shard == "w2" else "svh") else None

    def parameters(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name → (shape, dtype) of this rank's parameters; w13 holds gate in row 0 and up in row 1."""
        result: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for group, shard, lead in (("w13", "w1", (self.experts, 2)), ("w2", "w2", (self.experts,))):
            for suffix in SUFFIXES:
                shape, dtype = self.whole(shard, suffix)
                if (cut := self.cut(shard, suffix)) is not None:
                    shape = shape[: cut[0]] + (cut[1],) + shape[cut[0] + 1 :]
                result[f"{group}_{suffix}"] = (lead + shape, dtype)
            if self.marker is not None:
                result[f"{group}_{self.marker}"] = (lead, torch.int32)
        return result

    def packed_bytes(self) -> int:
        """Bytes of one rank's packed experts of this layer, markers left out."""
        sizes = {torch.int16: 2, torch.float16: 2}
        return sum(
            torch.Size(shape).numel() * sizes[dtype] for shape, dtype in self.parameters().values() if dtype in sizes
        )


class ExpertLoader:
    """Copies checkpoint tensors into `parameters` (name → tensor) and knows at any time what is still missing."""

    def __init__(self, layer: str, shape: ExpertShape, parameters: dict[str, torch.Tensor]) -> None:
        self.layer = layer
        self.shape = shape
        self.parameters = parameters
        self._seen: set[tuple[int, str, str]] = set()

    def _name(self, expert: int, shard: str, suffix: str) -> str:
        return f"{self.layer}.{expert}.{PROJECTIONS[shard]}.{suffix}"

    @property
    def expected(self) -> int:
        """Tensors that make this layer complete: experts × projections × (trellis, suh, svh and the marker)."""
        return self.shape.experts * len(PROJECTIONS) * (len(SUFFIXES) + (self.shape.marker is not None))

    @property
    def loaded(self) -> int:
        return len(self._seen)

    def load(self, suffix: str, expert: int, shard: str, tensor: torch.Tensor) -> None:
        """Take one checkpoint tensor, cut this rank's part, copy it. CheckpointError says what is wrong with it."""
        if shard not in PROJECTIONS or not 0 <= expert < self.shape.experts:
            raise CheckpointError(f"{self.layer}: no expert {expert} with shard {shard} exists in this model")
        name = self._name(expert, shard, suffix)
        if (expert, shard, suffix) in self._seen:
            raise CheckpointError(f"{name} appears twice in the checkpoint")
        if suffix in MARKERS:
            self._check_marker(name, suffix, tensor)
            self._slot(suffix, expert, shard).fill_(tensor.reshape(()))
        elif suffix in SUFFIXES:
            self._copy(name, suffix, expert, shard, tensor)
        else:
            raise CheckpointError(f"{name}: packed experts have no tensor of that name")
        self._seen.add((expert, shard, suffix))

    def _check_marker(self, name: str, suffix: str, tensor: torch.Tensor) -> None:
        if suffix != self.shape.marker:
            raise CheckpointError(
                f"{name} marks the {suffix} codebook, but the configuration says {self.shape.codebook}: correct"
                " quantization_config.codebook in config.json, or get an intact checkpoint"
            )
        if tensor.numel() != 1 or tensor.dtype != torch.int32:
            raise CheckpointError(f"{name} must be one int32, it is {_describe(tensor)}")
        value = int(tensor.reshape(()).item()) & 0xFFFFFFFF
        if value != MARKERS[suffix]:
            known = f"0x{MARKERS[suffix]:08X}"
            raise CheckpointError(f"{name} is 0x{value:08X}, the only {suffix} multiplier known is {known}")

    def _copy(self, name: str, suffix: str, expert: int, shard: str, tensor: torch.Tensor) -> None:
        shape, dtype = self.shape.whole(shard, suffix)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            wrong_bits = suffix == "trellis" and tensor.dim() == 3 and tensor.shape[:2] == torch.Size(shape[:2])
            hint = f" (that is {tensor.shape[-1] / TILE:g} bits a weight)" if wrong_bits else ""
            raise CheckpointError(
                f"{name} is {_describe(tensor)}{hint}; the model with {self.shape.bits} bits needs"
                f" {str(dtype).removeprefix('torch.')}{list(shape)}"
            )
        if (cut := self.shape.cut(shard, suffix)) is not None:
            tensor = tensor.narrow(cut[0], self.shape.tp_rank * cut[1], cut[1])
        if suffix != "trellis" and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name} holds a value that is not finite: the file is damaged")
        self._slot(suffix, expert, shard).copy_(tensor)

    def _slot(self, suffix: str, expert: int, shard: str) -> torch.Tensor:
        target = self.parameters[f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"][expert]
        return target if shard == "w2" else target[0 if shard == "w1" else 1]

    def missing(self, limit: int = 3) -> list[str]:
        """Names of the first few tensors that have not arrived."""
        suffixes = SUFFIXES + ((self.shape.marker,) if self.shape.marker else ())
        names = (
            self._name(expert, shard, suffix)
            for expert in range(self.shape.experts)
            for shard in PROJECTIONS
            for suffix in suffixes
            if (expert, shard, suffix) not in self._seen
        )
        return [name for name, _ in zip(names, range(limit), strict=False)]

    def finish(self) -> None:
        """CheckpointError unless every expert × projection × tensor has arrived."""
        if self.loaded != self.expected:
            raise CheckpointError(
                f"{self.layer}: {self.loaded} of {self.expected} expert tensors arrived; missing:"
                f" {', '.join(self.missing())}{' …' if self.expected - self.loaded > 3 else ''}"
            )


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
