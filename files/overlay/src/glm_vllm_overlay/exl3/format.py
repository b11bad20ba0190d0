"""EXL3 in plain torch: what the bits of a packed linear layer mean. Any device, no compiled code.

A layer computes ``y = x W`` with W of shape ``[in, out]``, both multiples of 128. The checkpoint holds

=========  =======  =========================  ======================================================
tensor     dtype    shape                      meaning
=========  =======  =========================  ======================================================
trellis    int16    [in/16, out/16, 16 K]      one row of 16-bit words per 16x16 tile, K bits a weight
suh        float16  [in]                       sign and scale of each input channel
svh        float16  [out]                      sign and scale of each output channel
mcg|mul1   int32    scalar                     codebook marker (none of the two: the older `3inst`)
=========  =======  =========================  ======================================================

``W = diag(suh) · H · What · H · diag(svh)`` with H the normalised 128-wide Sylvester Hadamard matrix, block-diagonal,
and What the decoded tiles. A tile is one cyclic stream of 256 K bits: weight t is the codebook value of the 16-bit
window which ends at bit ``(t + 1) K``, so neighbouring weights share 16 - K bits and the first windows wrap around.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

TILE = 16  # a tile is 16 x 16 weights
TILE_WEIGHTS = TILE * TILE
BLOCK = 128  # width of the Hadamard rotation
WINDOW = 16  # bits of state behind each weight

MCG_MARKER = 0xCBAC1FED
MUL1_MARKER = 0x83DCD12D
CODEBOOKS = ("mcg", "mul1", "3inst")
MARKERS = {"mcg": MCG_MARKER, "mul1": MUL1_MARKER}


@dataclass(frozen=True)
class Packed:
    """One packed linear layer.

    trellis int16 ``[in/16, out/16, 16 bits]``; suh float16 ``[in]``; svh float16 ``[out]``; all on one device.
    """

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    codebook: str = "mcg"

    @property
    def bits(self) -> int:
        return self.trellis.shape[-1] // TILE


def _halves(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two float16 halves (low, high) of 32-bit words held in int64, as float32."""
    words = torch.stack((z & 0xFFFF, z >> 16))
    signed = ((words + 0x8000) % 0x10000 - 0x8000).to(torch.int16)
    low, high = signed.view(torch.float16).float()
    return low, high


@functools.lru_cache(maxsize=16)
def codebook_table(codebook: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """float16 ``[65536]``: the weight value of every 16-bit state. ValueError for an unknown codebook."""
    if torch.device(device).type != "cpu":
        return codebook_table(codebook).to(device)
    state = torch.arange(1 << WINDOW, dtype=torch.int64)
    if codebook == "mul1":
        z = (state * MUL1_MARKER) & 0xFFFFFFFF
        byte_sum = sum((z >> shift) & 0xFF for shift in (0, 8, 16, 24))
        scale, offset = torch.tensor([0x1EEE, 0xC931 - 0x10000], dtype=torch.int16).view(torch.float16).float()
        # Every product and sum has at most 22 significant bits: float32 is exact, so this rounds once, like an fma.
        return ((1024 + byte_sum).float() * scale + offset).half()
    if codebook == "mcg":
        z = (state * MCG_MARKER) & 0xFFFFFFFF
    elif codebook == "3inst":
        z = (state * 89226354 + 64248484) & 0xFFFFFFFF
    else:
        raise ValueError(f"unknown EXL3 codebook {codebook!r}; known: {', '.join(CODEBOOKS)}")
    low, high = _halves((z & 0x8FFF8FFF) ^ 0x3B603B60)
    return (low + high).half()


def _stream_order(words: torch.Tensor) -> torch.Tensor:
    """Swap the 16-bit words of each 32-bit word: the stream runs from bit 31 of the little-endian word down."""
    return words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def unpack_states(trellis: torch.Tensor) -> torch.Tensor:
    """int16 ``[..., 16 K]`` → int32 ``[..., 256]``: the 16-bit state behind each weight, in stream order.

    ValueError unless the last dimension is 16 K with K in 1..8 and the dtype int16.
    """
    bits = check_bits(trellis)
    words = _stream_order(trellis).to(torch.int32) & 0xFFFF
    start = (torch.arange(1, TILE_WEIGHTS + 1) * bits - WINDOW) % (TILE_WEIGHTS * bits)
    index = (start // WINDOW).to(trellis.device)
    shift = (WINDOW - start % WINDOW).to(trellis.device, torch.int32)
    following = (index + 1) % words.shape[-1]
    # A window spans at most two 16-bit words; int32 arithmetic would smear the sign of the upper one.
    pair = (words[..., index].to(torch.int64) << WINDOW) | words[..., following]
    return ((pair >> shift) & 0xFFFF).to(torch.int32)


def pack_states(states: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of `unpack_states`: int ``[..., 256]`` → int16 ``[..., 16 bits]``.

    Only the low `bits` bits of each state are stored; the caller guarantees that neighbours overlap.
    """
    symbols = states.to(torch.int64) & ((1 << bits) - 1)
    weight_bits = (symbols.unsqueeze(-1) >> torch.arange(bits - 1, -1, -1, device=states.device)) & 1
    stream = weight_bits.flatten(-2).unflatten(-1, (-1, WINDOW))
    words = (stream << torch.arange(WINDOW - 1, -1, -1, device=states.device)).sum(-1)
    return _stream_order(((words + 0x8000) % 0x10000 - 0x8000).to(torch.int16))


def check_bits(trellis: torch.Tensor) -> int:
    """K of a trellis tensor; ValueError when its dtype or width is none that EXL3 has."""
    if trellis.dtype != torch.int16:
        raise ValueError(f"an EXL3 trellis is int16, this one is {str(trellis.dtype).removeprefix('torch.')}")
    bits, rest = divmod(trellis.shape[-1], TILE)
    if rest or not 1 <= bits <= 8:
        raise ValueError(f"an EXL3 trellis has 16 x (1..8) words a tile, this one has {trellis.shape[-1]}")
    return bits


@functools.lru_cache(maxsize=1)
def tile_positions() -> torch.Tensor:
    """int64 ``[256]``: row * 16 + column of the t-th weight of the stream (tensor-core fragment order)."""
    t = torch.arange(TILE_WEIGHTS)
    lane, j = t // 8, t % 8
    row = 2 * (lane % 4) + j % 2 + 8 * ((j // 2) % 2)
    column = lane // 4 + 8 * (j // 4)
    return row * TILE + column


def to_tiles(weight: torch.Tensor) -> torch.Tensor:
    """``[in, out]`` → ``[in/16, out/16, 256]`` in stream order."""
    tiles = weight.unflatten(0, (-1, TILE)).unflatten(-1, (-1, TILE)).transpose(1, 2).flatten(-2)
    return tiles[..., tile_positions().to(weight.device)]


def from_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """Inverse of `to_tiles`; leading dimensions before the last three are kept."""
    plain = torch.empty_like(tiles)
    plain[..., tile_positions().to(tiles.device)] = tiles
    return plain.unflatten(-1, (TILE, TILE)).transpose(-3, -2).flatten(-2).flatten(-3, -2)


def decode_tiles(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    """What: int16 ``[..., in/16, out/16, 16 K]`` → float16 ``[..., in, out]``, still rotated, without suh and svh."""
    table = codebook_table(codebook, trellis.device)
    return from_tiles(table[unpack_states(trellis).long()])


@functools.lru_cache(maxsize=16)
def hadamard(dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """The normalised 128-wide Sylvester Hadamard matrix ``[128, 128]`` (symmetric, its own inverse)."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < BLOCK:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return (h / BLOCK**0.5).to(device, dtype)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Apply the block-diagonal Hadamard rotation to the last dimension (a multiple of 128), in x's dtype."""
    return (x.unflatten(-1, (-1, BLOCK)) @ hadamard(x.dtype, x.device)).flatten(-2)


def dequantise(packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """W ``[..., in, out]`` in `dtype`; leading dimensions of the three tensors must agree (a stack of experts)."""
    inner = decode_tiles(packed.trellis, packed.codebook).to(dtype)
    rotated = rotate(rotate(inner.transpose(-1, -2)).transpose(-1, -2))
    return packed.suh.to(dtype).unsqueeze(-1) * rotated * packed.svh.to(dtype).unsqueeze(-2)


def linear(x: torch.Tensor, packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``x W`` the way the kernels order it: rotate the activations, never the weights. x ``[..., in]``."""
    inner = decode_tiles(packed.trellis, packed.codebook).to(dtype)
    rotated = rotate(x.to(dtype) * packed.suh.to(dtype))
    return rotate(rotated @ inner) * packed.svh.to(dtype)


def marker_tensor(codebook: str) -> tuple[str, torch.Tensor] | None:
    """Name and int32 scalar that mark `codebook` in a checkpoint; None for `3inst`, which has no marker."""
    if codebook not in MARKERS:
        return None
    value = MARKERS[codebook]
    return codebook, torch.tensor(value - (1 << 32) if value >= 1 << 31 else value, dtype=torch.int32)
