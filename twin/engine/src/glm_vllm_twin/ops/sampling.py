"""What vLLM's rejection sampler needs and its CPU version gets wrong."""

import torch


def expand_kernel(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat each request's value, [N], for each of its tokens, into `output` [T]; `cu_num_tokens` counts tokens, [N].

    Values equal to `replace_from` become `replace_to`. vLLM's own version writes into an int64 copy of `output` and
    drops it, so that temperatures are whatever lay in memory and every sampled draft is judged by them.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(torch.repeat_interleave(values, counts))
