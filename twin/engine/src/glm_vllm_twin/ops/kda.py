"""Kimi delta attention (KDA): chunked prefill, recurrent decode, and the moves between the state pool and a batch.

Letters: T tokens of the whole batch, N sequences, H heads of this rank, K key size, V value size. States are [H, K, V]
float32; row 0 of a pool is vLLM's null block, which is never read or written, and negative rows are padding.
"""

from itertools import pairwise

import torch

CHUNK = 64


def _normalise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def log_decay(gate: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor, lower_bound: float) -> torch.Tensor:
    """Bounded log decay, [T, H, K] float32, of a raw gate [T, H, K]; `a_log` holds H numbers, `bias` H*K."""
    heads, size = gate.shape[-2:]
    shifted = gate.float() + bias.float().view(heads, size)
    return lower_bound * torch.sigmoid(a_log.float().view(heads, 1).exp() * shifted)


def chunk_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence in chunks of 64 tokens, all float32.

    Args:
        q, k: scaled and normalised queries and keys, [T, H, K].
        v: values, [T, H, V].
        g: log decay, [T, H, K].
        beta: step sizes, [T, H].
        state: state before the first token, [H, K, V].

    Returns:
        Outputs [T, H, V] and the state after the last token.
    """
    outputs = []
    for start in range(0, q.shape[0], CHUNK):
        qc, kc, vc, gc = (x[start : start + CHUNK].transpose(0, 1) for x in (q, k, v, g))
        bc = beta[start : start + CHUNK].transpose(0, 1)[..., None]
        size = qc.shape[1]
        gc = gc.cumsum(1)
        causal = torch.ones(size, size, dtype=torch.bool).tril()[None, :, :, None]
        decay = (gc[:, :, None] - gc[:, None]).masked_fill(~causal, float("-inf")).exp()
        # Within a chunk each value is corrected by what earlier tokens of the chunk wrote: a unit lower-triangular
        # system.
        lower = torch.einsum("hid,hjd,hijd->hij", kc * bc, kc, decay).tril(-1)
        right = torch.cat([vc * bc, kc * bc * gc.exp()], -1)
        solved = torch.linalg.solve_triangular(torch.eye(size) + lower, right, upper=False, unitriangular=True)
        own, carried = solved.split([vc.shape[-1], kc.shape[-1]], -1)
        values = own - carried @ state
        scores = torch.einsum("hid,hjd,hijd->hij", qc, kc, decay)
        outputs.append(((qc * gc.exp()) @ state + scores @ values).transpose(0, 1))
        last = gc[:, -1]
        state = state * last.exp()[..., None] + (kc * (last[:, None] - gc).exp()).transpose(1, 2) @ values
    return torch.cat(outputs), state


def chunk_kda_with_fused_gate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    g_bias: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lower_bound: float,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill of N sequences packed into one: q, k, v, raw_g [1, T, H, ·], beta [1, T, H] after its sigmoid.

    `initial_state` is [N, H, K, V]; `cu_seqlens` holds N+1 token offsets. Returns outputs [1, T, H, V] in q's type and
    the N final states. Keys and queries are normalised here, as the fused kernel does.
    """
    queries = _normalise(q[0].float()) * k.shape[-1] ** -0.5
    keys, values = _normalise(k[0].float()), v[0].float()
    decay, steps = log_decay(raw_g[0], A_log, g_bias, lower_bound), beta[0].float()
    out, final = torch.zeros_like(values), initial_state.clone()
    offsets = cu_seqlens.tolist()
    for i, (start, end) in enumerate(pairwise(offsets)):
        if end > start:
            part = slice(start, end)
            out[part], final[i] = chunk_one(
                queries[part], keys[part], values[part], decay[part], steps[part], initial_state[i].float()
            )
    return out[None].to(q.dtype), final


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    a_log: torch.Tensor,
    g_bias: torch.Tensor,
    lower_bound: float,
    num_accepted_tokens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode of N sequences of a few tokens each; all sequences step together.

    q, k, v, g are [1, T, H, ·] and beta [1, T, H] before its sigmoid; `initial_state` is the pool [rows, H, K, V],
    updated in place. `ssm_state_indices` is [N] (one row a sequence), or [N, steps] under speculation: the state after
    token t goes to column t, and reading starts from column `num_accepted_tokens - 1`, which is how rejected drafts
    are forgotten. Returns outputs [1, T, H, V] (in `out` where given) and the pool.
    """
    queries = _normalise(q[0].float()) * k.shape[-1] ** -0.5
    keys, values = _normalise(k[0].float()), v[0].float()
    decay = log_decay(g[0], a_log, g_bias, lower_bound).exp()
    steps = beta[0].float().sigmoid()
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff()
    rows = ssm_state_indices[: len(starts)].long()
    columns = rows if rows.dim() == 2 else rows[:, None]
    first = torch.zeros_like(starts) if num_accepted_tokens is None else num_accepted_tokens[: len(starts)].long() - 1
    source = columns.gather(1, first[:, None])[:, 0]
    state = initial_state[source.clamp_min(0)].float()
    result = torch.zeros_like(values)
    for t in range(int(lengths.max()) if len(starts) else 0):
        live = (lengths > t) & (source > 0)
        token = (starts + t)[live]
        s = state[live] * decay[token][..., None]
        error = (values[token] - (s * keys[token][..., None]).sum(-2)) * steps[token][..., None]
        s = s + keys[token][..., None] * error[..., None, :]
        result[token] = (s * queries[token][..., None]).sum(-2)
        state[live] = s
        target = columns[live, min(t, columns.shape[1] - 1)]
        kept = target > 0
        initial_state[target[kept]] = s[kept].to(initial_state.dtype)
    if out is None:
        return result[None].to(q.dtype), initial_state
    out[0, : result.shape[0]] = result.to(out.dtype)
    return out, initial_state


def gather_initial_states(pool: torch.Tensor, rows: torch.Tensor, has_state: torch.Tensor) -> torch.Tensor:
    """States of N sequences, [N, ...], from `pool`; zeros where `has_state` is False."""
    states = pool[rows.clamp_min(0).long()]
    states[~has_state.bool()] = 0
    return states


def scatter_states(pool: torch.Tensor, states: torch.Tensor, rows: torch.Tensor) -> None:
    """Write N states, [N, ...], to their rows of `pool`; the null row and padding are skipped."""
    kept = rows > 0
    pool[rows[kept].long()] = states[kept].to(pool.dtype)
