"""EXL3 encoder for fixtures: tail-biting Viterbi search over the 16-bit trellis, plain torch.

It minimises the plain squared error of the rotated weights: no calibration data, no error feedback between columns.
Good enough to build test checkpoints of known quality; a checkpoint meant for people comes from exllamav3's converter.
"""

from __future__ import annotations

import torch

from glm_vllm_overlay.exl3.format import (
    BLOCK,
    TILE_WEIGHTS,
    WINDOW,
    Packed,
    codebook_table,
    pack_states,
    rotate,
    to_tiles,
)

# Standard deviation that the rotated weights are scaled to before the search: the best of a scan over N(0, 1) tiles.
TARGET_STD = {
    "mcg": (1.35, 1.20, 1.14, 1.10, 1.02, 0.99, 0.95, 0.92),
    "3inst": (1.40, 1.23, 1.15, 1.08, 1.04, 0.99, 0.95, 0.92),
    "mul1": (1.12, 0.97, 0.92, 0.87, 0.87, 0.84, 0.80, 0.74),
}


def _forward(weights: torch.Tensor, bits: int, table: torch.Tensor, start: torch.Tensor | None) -> list[torch.Tensor]:
    """Cheapest cost of every context after each step, for tiles ``[B, steps]``.

    A context is the low 16 - bits bits of a state: all that the next state remembers. Returns steps + 1 tensors
    ``[B, 2^(16 - bits)]``; entry 0 is the start (all contexts, or only `start` ``[B]``). Costs leave out w².
    """
    contexts = 1 << (WINDOW - bits)
    squared = table * table
    first = torch.zeros(weights.shape[0], contexts)
    if start is not None:
        first.fill_(float("inf")).scatter_(1, start.unsqueeze(1), 0.0)
    costs = [first]
    for step in range(weights.shape[1]):
        # The state is (context << bits) | symbol, so states of one context are neighbours in the table.
        branch = torch.addcmul(squared, table, weights[:, step : step + 1], value=-2.0)
        branch.view(-1, contexts, 1 << bits).add_(costs[-1].unsqueeze(-1))
        costs.append(branch.view(-1, 1 << bits, contexts).amin(1))
    return costs


def _backward(
    weights: torch.Tensor, bits: int, table: torch.Tensor, costs: list[torch.Tensor], end: torch.Tensor
) -> torch.Tensor:
    """States ``[B, steps]`` of the cheapest path that ends in context `end` ``[B]``.

    The predecessor is found again from the stored costs: keeping an argmin for every state would cost more than this.
    """
    contexts = 1 << (WINDOW - bits)
    high = torch.arange(1 << bits) * contexts
    states = torch.empty(weights.shape, dtype=torch.int64)
    context = end
    for step in range(weights.shape[1] - 1, -1, -1):
        candidates = high + context.unsqueeze(1)
        value = table[candidates]
        cost = costs[step].gather(1, candidates >> bits) + value * value - 2.0 * weights[:, step : step + 1] * value
        states[:, step] = candidates.gather(1, cost.argmin(1, keepdim=True)).squeeze(1)
        context = states[:, step] >> bits
    return states


def search(tiles: torch.Tensor, bits: int, codebook: str) -> torch.Tensor:
    """States ``[B, 256]`` for tiles ``[B, 256]`` (stream order, scaled to the codebook): a tail-biting path each.

    The context at the tile's seam is fixed first, from a search over the weights on both sides of it (a path forgets
    its start within a few context lengths); the second search is exact given that context.
    """
    table = codebook_table(codebook).float()
    reach = min(TILE_WEIGHTS // 2, 8 * -(-WINDOW // bits))
    around = torch.cat((tiles[:, -reach:], tiles[:, :reach]), 1)
    costs = _forward(around, bits, table, None)
    seam_states = _backward(around, bits, table, costs, costs[-1].argmin(1))
    seam = seam_states[:, reach] >> bits
    return _backward(tiles, bits, table, _forward(tiles, bits, table, seam), seam)


def quantise_tiles(tiles: torch.Tensor, bits: int, codebook: str = "mcg", batch: int = 2) -> torch.Tensor:
    """int16 ``[..., 16 bits]`` for float tiles ``[..., 256]`` scaled to the codebook; `batch` tiles at a time."""
    flat = tiles.reshape(-1, TILE_WEIGHTS).float()
    threads = torch.get_num_threads()
    # Every step is one small operation: more threads only wait for each other, for minutes on a busy machine.
    torch.set_num_threads(1)
    try:
        packed = [pack_states(search(part, bits, codebook), bits) for part in flat.split(batch)]
    finally:
        torch.set_num_threads(threads)
    return torch.cat(packed).reshape(*tiles.shape[:-1], -1)


def quantise(weight: torch.Tensor, bits: int = 4, codebook: str = "mcg", seed: int = 0) -> Packed:
    """Pack W ``[in, out]`` (float, CPU). Both dimensions must be multiples of 128: ValueError otherwise.

    Channel signs are random (from `seed`), input scales 1, output scales set each column to the codebook's range.
    """
    rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK:
        raise ValueError(f"EXL3 needs dimensions that are multiples of {BLOCK}, got {rows} x {columns}")
    generator = torch.Generator().manual_seed(seed)
    suh = torch.randint(0, 2, (rows,), generator=generator).float() * 2 - 1
    signs = torch.randint(0, 2, (columns,), generator=generator).float() * 2 - 1
    rotated = rotate(rotate((weight.float() * suh.unsqueeze(1) * signs).t()).t())
    # One output scale serves 128 rotated columns: it must be the same for a whole Hadamard block.
    spread = rotated.unflatten(1, (-1, BLOCK)).pow(2).mean((0, 2)).sqrt().clamp_min(1e-8)
    scale = (spread / TARGET_STD[codebook][bits - 1]).half().float().clamp_min(6e-8).repeat_interleave(BLOCK)
    trellis = quantise_tiles(to_tiles(rotated / scale), bits, codebook)
    return Packed(trellis, suh.half(), (signs * scale).half(), codebook)
