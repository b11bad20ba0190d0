"""Causal depthwise convolution over time, with the last inputs of each sequence kept in a pool of states.

Letters: T tokens of the batch, N sequences, D channels, W taps. A pool row is [D, >= W-1]: the last W-1 inputs, and
after a speculative step those of every draft, so that the next step can start from any of them. Row 0 is vLLM's null
block.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F


def _convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    y = F.conv1d(x, weight.float()[:, None], None if bias is None else bias.float(), groups=weight.shape[0])
    return F.silu(y) if activation in ("silu", "swish") else y


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
    **_: object,
) -> torch.Tensor:
    """Prefill: x [D, T] holds N sequences one after another, `query_start_loc` their N+1 offsets. Returns [D, T]."""
    taps = weight.shape[1]
    out = torch.zeros_like(x)
    offsets, rows, known = query_start_loc.tolist(), cache_indices.tolist(), has_initial_state.tolist()
    for i, (start, end) in enumerate(pairwise(offsets)):
        if end <= start or rows[i] <= 0:
            continue
        state = conv_states[rows[i]]
        past = state[:, : taps - 1].float() if known[i] else x.new_zeros(x.shape[0], taps - 1, dtype=torch.float32)
        window = torch.cat([past, x[:, start:end].float()], 1)
        out[:, start:end] = _convolve(window[None], weight, bias, activation)[0].to(out.dtype)
        state[:, : taps - 1] = window[:, 1 - taps :].to(state.dtype)
    return out


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """Decode: x [T, D], one token a sequence, or under speculation the tokens between N+1 offsets. Returns [T, D].

    Under speculation the history starts at column `num_accepted_tokens - 1` of the row, as the previous step left it.
    """
    assert conv_state_indices is not None
    count, taps = conv_state_indices.shape[0], weight.shape[1]
    rows = conv_state_indices.long()
    starts = torch.arange(count) if query_start_loc is None else query_start_loc[:count].long()
    lengths = torch.ones_like(starts) if query_start_loc is None else query_start_loc[: count + 1].diff().long()
    width = int(lengths.max()) if count else 0
    step = torch.arange(width)
    real = (step[None] < lengths[:, None]) & (rows > 0)[:, None]
    token = (starts[:, None] + step[None])[real]
    padded = x.new_zeros(count, width, x.shape[1], dtype=torch.float32)
    padded[real] = x[token].float()
    first = torch.zeros_like(starts) if num_accepted_tokens is None else num_accepted_tokens[:count].long() - 1
    history = (first[:, None] + torch.arange(taps - 1)[None])[:, None].expand(-1, x.shape[1], -1)
    past = conv_state[rows.clamp_min(0)].float().gather(2, history)
    window = torch.cat([past, padded.transpose(1, 2)], 2)
    out = torch.zeros_like(x)
    out[token] = _convolve(window, weight, bias, activation).transpose(1, 2)[real].to(out.dtype)
    # Column j now ends the history of a sequence that keeps j+1 of this step's tokens.
    kept = rows > 0
    conv_state[rows[kept], :, : window.shape[2] - 1] = window[kept, :, 1:].to(conv_state.dtype)
    return out
