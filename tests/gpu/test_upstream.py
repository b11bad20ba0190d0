"""Triton kernels that upstream repaired before vLLM 0.33.0 and that our serving stands on: the wheel has the repairs.

    python -m pytest tests/gpu/test_upstream.py      needs vLLM 0.33.0 on the path and a CUDA device; under a minute

Each check runs twice: on the wheel, where it has to hold, and on a copy of the module with the repaired line as it was
before, where it must not. What needs no device is in tests/overlay/pinned/test_upstream.py.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

DEVICE = "cuda"
NULL = 0  # vLLM's null block, of requests that are none


@pytest.fixture
def as_before(tmp_path: Path) -> Callable[..., ModuleType]:
    """A module of the wheel with lines put back: (name, (new, old), …) → the copy, imported beside the original."""

    def copy(name: str, *lines: tuple[str, str]) -> ModuleType:
        source = Path(importlib.util.find_spec(name).origin).read_text()
        for new, old in lines:
            assert source.count(new) == 1, f"{name} no longer has: {new}"
            source = source.replace(new, old)
        path = tmp_path / "as_before.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("as_before", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return copy


# ---- the ring of raw keys behind a pool that is not full yet ---------------------------------------------------------
KPOOL, RING, HEAD, BLOCKS = 4, 8, 128, 6
PADDED = 19008  # elements between two blocks: the ring lies in the first 4 KiB of an indexer page


def seeded(module: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the kernel wrote, what it has to write): the whole padded pool, bfloat16, two requests of one batch."""
    torch.manual_seed(0)
    blocks, lengths, starts = (2, 5), (11, 3), (1000, 7)
    slots = [
        block * RING + position % RING
        for block, length, start in zip(blocks, lengths, starts, strict=True)
        for position in range(start, start + length)
    ]
    slots += [-1, -1]  # padding of a captured graph
    keys, scores = (torch.randn(len(slots), HEAD, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    pool = torch.full((BLOCKS * PADDED,), -7.0, device=DEVICE, dtype=torch.bfloat16)
    expected = pool.clone()
    strides = (BLOCKS, 2, RING, HEAD), (PADDED, RING * HEAD, HEAD, 1)
    row = 0
    for block, length in zip(blocks, lengths, strict=True):
        for token in range(row + max(0, length - KPOOL), row + length):
            view = expected.as_strided(*strides)
            view[block, 0, slots[token] % RING] = keys[token]
            view[block, 1, slots[token] % RING] = scores[token]
        row += length
    module.kpool_seed_tail_cache(
        pool.as_strided(*strides), keys, scores, torch.tensor(slots, device=DEVICE), KPOOL, HEAD
    )
    return pool, expected


def test_the_seed_of_a_ring_stays_in_its_padded_block(as_before) -> None:
    """vLLM #57477: with a dense stride it went into other requests' index keys."""
    from vllm.models.glm5next.nvidia.ops import kpool_compress

    assert torch.equal(*seeded(kpool_compress))
    dense = (
        "    base = blk * TAIL_BLOCK_ELEMS + (t % RING) * HEAD_DIM",
        "    base = (blk * 2 * RING + t % RING) * HEAD_DIM",
    )
    assert not torch.equal(*seeded(as_before(kpool_compress.__name__, dense)))


def mapped(module: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots by the kernel, slots by the rule): a long decode with drafts, a dummy request, a prefill, padding."""
    counts, first, blocks = (8, 2, 700), (999_996, 0, 123), (4, NULL, 2)
    tokens, padding = sum(counts), 58
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(first, counts, strict=True)]).to(DEVICE)
    given = torch.arange(tokens + padding, dtype=torch.int64, device=DEVICE)
    table = torch.full((len(counts), 3), 99, dtype=torch.int32, device=DEVICE)
    table[:, 0] = torch.tensor(blocks, dtype=torch.int32)
    expected = given.clone()  # what lies beyond the batch stays
    row = 0
    for block, count in zip(blocks, counts, strict=True):
        for token in range(row, row + count):
            expected[token] = block * RING + int(positions[token]) % RING if block != NULL else -1
        row += count
    out = module.compute_kpool_tail_slot_mapping(
        given, table, torch.tensor(bounds, dtype=torch.int32, device=DEVICE), positions, tokens, len(counts), RING
    )
    return out, expected


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ("slot = tl.where(has_block, own_block * kpool + pos % kpool, -1)", "slot = own_block * kpool + pos % kpool"),
        ("own_block * kpool + pos % kpool, -1)", "own_block * kpool + pos, -1)"),
    ],
    ids=["the null block", "the ring"],
)
def test_a_tokens_slot_is_in_its_requests_own_ring(as_before, new: str, old: str) -> None:
    """vLLM #53982: positions beyond the one block of the ring led out of its table, after some 2000 tokens."""
    from vllm.v1.attention.backends.mla import indexer

    assert torch.equal(*mapped(indexer))
    assert not torch.equal(*mapped(as_before(indexer.__name__, (new, old))))


# ---- recurrent states that move within their pool (vLLM #50729) ------------------------------------------------------
WIDTH, CHANNELS, LAYERS = 10, 12288, 64  # convolution's window with seven drafts, channels of three projections


def shifted(module: ModuleType, bias: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(windows, windows as they have to be) [layers, blocks, tokens, channels]: each moved left within its block."""
    torch.manual_seed(1)
    states = torch.randn(LAYERS, 3, WIDTH, CHANNELS, device=DEVICE, dtype=torch.bfloat16)
    expected = states.clone()
    expected[:, 1, : WIDTH - bias] = states[:, 1, bias:]
    rows = states[:, 1]
    size = (WIDTH - bias) * CHANNELS * states.element_size()

    def addresses(offset: int) -> torch.Tensor:
        return torch.tensor([row.data_ptr() + offset for row in rows], dtype=torch.int64, device=DEVICE)

    sizes = torch.full((LAYERS,), size, dtype=torch.int32, device=DEVICE)
    module.batch_memcpy(addresses(bias * CHANNELS * states.element_size()), addresses(0), sizes)
    return states, expected


def test_a_window_moves_within_its_block_unharmed() -> None:
    from vllm.v1.worker import mamba_utils

    for bias in (1, 2, 7):
        assert torch.equal(*shifted(mamba_utils, bias)), bias


def close_shift(module: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes, bytes as they have to be): 512 rows moved left by 32 bytes: what one warp reads another one writes."""
    torch.manual_seed(2)
    rows, length, bias = 512, 1 << 16, 32
    values = torch.randint(0, 256, (rows, length), dtype=torch.uint8, device=DEVICE)
    expected = values.clone()
    expected[:, :-bias] = values[:, bias:]
    starts = torch.tensor([row.data_ptr() for row in values], dtype=torch.int64, device=DEVICE)
    sizes = torch.full((rows,), length - bias, dtype=torch.int32, device=DEVICE)
    module.batch_memcpy(starts + bias, starts, sizes)
    return values, expected


def test_a_copy_to_the_left_reads_before_it_writes(as_before) -> None:
    from vllm.v1.worker import mamba_utils

    for _ in range(20):
        assert torch.equal(*close_shift(mamba_utils))
    before = as_before(mamba_utils.__name__, ("        if is_left_overlap:", "        if False:"))
    lost = sum(not torch.equal(*close_shift(before)) for _ in range(20))
    print(f"without the barrier {lost} of 20 copies were wrong")  # a race: none of 20 would prove nothing


def postprocessed(module: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
    """(windows, as they have to be) of the fused step after a verified draft: source and target block are one."""
    torch.manual_seed(3)
    block, accepted, requests = 16, 4, 8
    states = torch.randn(requests + 1, WIDTH, CHANNELS, device=DEVICE, dtype=torch.bfloat16)
    expected = states.clone()
    # 12 tokens + 1 scheduled + 7 drafts, of which 3 were right: 16 are known, one block, three beyond the running state
    bias = 3
    expected[1:, : WIDTH - bias] = states[1:, bias:]

    def each(value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((requests,), value, dtype=dtype, device=DEVICE)

    def one(value: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype, device=DEVICE)

    table = torch.arange(1, requests + 1, dtype=torch.int32, device=DEVICE).reshape(-1, 1)
    size = states.element_size()
    counted = each(accepted)
    module.postprocess_mamba_fused_kernel[(requests, 1, 1)](
        each(accepted), each(0), each(8), each(12), each(7), one(table.data_ptr()), table.stride(0),
        one(states.data_ptr()), one(states.stride(0) * size), one(size, torch.int32), one(CHANNELS, torch.int32),
        one(WIDTH, torch.int32), one(0, torch.int32), one(0, torch.int32), one(0), counted, None, requests,
        block_size=block, COPY_BLOCK_SIZE=1024, CONV_STATE_DIM_FIRST=False, TEMPORAL_TILES=1,
    )  # fmt: skip
    assert counted.tolist() == [1] * requests
    return states, expected


def test_the_state_after_a_verified_draft_moves_within_its_block(as_before) -> None:
    from vllm.v1.worker import mamba_utils

    for _ in range(10):
        assert torch.equal(*postprocessed(mamba_utils))
    old = ("if src_block_id != dest_block_id or token_bias == 0:", "if src_block_id >= 0:")
    before = as_before(mamba_utils.__name__, old)
    lost = sum(not torch.equal(*postprocessed(before)) for _ in range(10))
    print(f"with one copy of the whole window {lost} of 10 steps were wrong")  # a race, as above
