"""Moves of recurrent states between blocks, as vLLM's Triton kernels make them: for prefix caching with drafts.

vLLM has no CPU code for them. Addresses are the kernels' own (int64 tensors of pointers into this process).
"""

from __future__ import annotations

import ctypes

import torch


def copy_state(
    state: int, row: int, source: int, target: int, bias: int,
    tables: torch.Tensor, table_stride: int, bases: torch.Tensor, strides: torch.Tensor, sizes: torch.Tensor,
    inner: torch.Tensor, widths: torch.Tensor, groups: torch.Tensor,
) -> None:  # fmt: skip
    """One state tensor of one request, from a column of its block table to another.

    A convolution's window (widths > 0) moves `bias` tokens to the left; a temporal state of `bias` accepted drafts lies
    that many columns further on. Windows are [tokens, channels], vLLM's default.
    """
    table = int(tables[int(groups[state])]) + 4 * row * int(table_stride)

    def address(column: int) -> int:
        return int(bases[state]) + ctypes.c_int32.from_address(table + 4 * column).value * int(strides[state])

    token, width = int(inner[state]) * int(sizes[state]), int(widths[state])
    if width:
        ctypes.memmove(address(target), address(source) + bias * token, (width - bias) * token)
    else:
        ctypes.memmove(address(target), address(source + bias), token)


def precopy_mamba_align_fused_kernel(
    state_columns, source_columns, biases, tables, table_stride, bases, strides, sizes, inner, widths, groups,
    row_counts, row_strides, mapping, num_reqs, COPY_BLOCK_SIZE, CONV_STATE_DIM_FIRST, HAS_IDX_MAPPING=True,
    TEMPORAL_TILES=1,
):  # fmt: skip
    """Before a step: a request that enters a new block takes its state along."""
    for place in range(num_reqs):
        row = int(mapping[place]) if HAS_IDX_MAPPING else place
        if row < 0:
            continue
        source, target = int(source_columns[row]), int(state_columns[row])
        if source < 0 or source == target:
            continue
        for state in range(len(bases)):
            copy_state(
                state, row, source, target, int(biases[row]), tables, table_stride, bases, strides, sizes, inner,
                widths, groups,
            )  # fmt: skip


def postprocess_mamba_fused_kernel(
    accepted, state_columns, scheduled, computed, drafts, tables, table_stride, bases, strides, sizes, inner, widths,
    groups, row_counts, row_strides, accepted_out, mapping, num_reqs, block_size, COPY_BLOCK_SIZE,
    CONV_STATE_DIM_FIRST, HAS_IDX_MAPPING=False, PRECOMPUTED_NEW_COMPUTED=False, TEMPORAL_TILES=1,
):  # fmt: skip
    """After a step: where accepted drafts cross the end of a block, the state at that end stays in the block."""
    for place in range(num_reqs):
        row = int(mapping[place]) if HAS_IDX_MAPPING else place
        if row < 0:
            continue
        source, taken = int(state_columns[row]), int(accepted[row])
        if PRECOMPUTED_NEW_COMPUTED:
            after = int(computed[row])
            running = after - taken + 1
        else:
            running = int(computed[row]) + int(scheduled[row]) - int(drafts[row])
            after = running + taken - 1
        end = after // block_size * block_size
        if end < running:
            continue
        bias, target = end - running, end // block_size - 1
        if source == target:
            accepted_out[row] = 1
        if source == target and bias == 0:
            continue
        for state in range(len(bases)):
            copy_state(
                state, row, source, target, bias, tables, table_stride, bases, strides, sizes, inner, widths, groups
            )


def batch_memcpy_kernel(sources, targets, sizes, BLOCK_SIZE):
    """Bytes from addresses to addresses."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
