"""The twin's moves of recurrent states against the rule that vLLM's kernels follow."""

import torch
from glm_vllm_twin.ops import states

WIDTH, CHANNELS, BLOCKS, REQUESTS = 5, 8, 6, 2
TABLE = torch.tensor([[1, 2, 3], [4, 5, 1]], dtype=torch.int32)


def pools() -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """(windows [blocks, tokens, channels], states in wider pages, what the kernels are told of them)."""
    torch.manual_seed(0)
    windows = torch.randn(BLOCKS, WIDTH, CHANNELS, dtype=torch.bfloat16)
    recurrent = torch.randn(BLOCKS, 40).as_strided((BLOCKS, 4, 4), (40, 4, 1))
    both = (windows, recurrent)
    told = (
        torch.tensor([TABLE.data_ptr()]), TABLE.stride(0), torch.tensor([pool.data_ptr() for pool in both]),
        torch.tensor([pool.stride(0) * pool.element_size() for pool in both]), torch.tensor([2, 4]),
        torch.tensor([CHANNELS, 16]), torch.tensor([WIDTH, 0]), torch.tensor([0, 0]), None, None,
    )  # fmt: skip
    return windows, recurrent, told


def test_a_request_that_enters_a_block_takes_its_state_along():
    windows, recurrent, told = pools()
    wanted = windows.clone(), recurrent.clone()
    wanted[0][2, : WIDTH - 1] = windows[1, 1:]  # the first: one accepted draft, from its column 0 to 1
    wanted[1][2] = recurrent[2]  # the state of an accepted draft lies one column on
    states.precopy_mamba_align_fused_kernel(
        torch.tensor([1, 2]), torch.tensor([0, -1]), torch.tensor([1, 0]), *told, None, REQUESTS,
        COPY_BLOCK_SIZE=1024, CONV_STATE_DIM_FIRST=False, HAS_IDX_MAPPING=False,
    )  # fmt: skip
    assert torch.equal(windows, wanted[0]) and torch.equal(recurrent, wanted[1])


def test_the_state_at_a_blocks_end_stays_in_the_block():
    windows, recurrent, told = pools()
    wanted = windows.clone(), recurrent.clone()
    # The first: 14 known, 3 drafts of which 2 were right, block of 16: its end is one token beyond the running state.
    wanted[0][1, : WIDTH - 1] = windows[1, 1:]
    wanted[1][1] = recurrent[2]
    out = torch.tensor([3, 2])
    states.postprocess_mamba_fused_kernel(
        torch.tensor([3, 2]), torch.tensor([0, 1]), torch.tensor([4, 4]), torch.tensor([14, 20]), torch.tensor([3, 3]),
        *told, out, None, REQUESTS, block_size=16, COPY_BLOCK_SIZE=1024, CONV_STATE_DIM_FIRST=False,
    )  # fmt: skip
    assert torch.equal(windows, wanted[0]) and torch.equal(recurrent, wanted[1])
    assert out.tolist() == [1, 2]


def test_bytes_move_to_the_left_over_themselves():
    values = torch.arange(64, dtype=torch.uint8)
    start = values.data_ptr()
    states.batch_memcpy_kernel(torch.tensor([start + 3]), torch.tensor([start]), torch.tensor([60]), BLOCK_SIZE=1024)
    assert values[:60].tolist() == list(range(3, 63))
