"""The k-pool indexer: keys of k tokens become one pooled entry, queries score pools, chosen pools expand to tokens.

Letters: T tokens of the batch, P pools of a sequence, k tokens a pool, D = 128 key size. The pool cache is paged: a
page of s entries is s*128 fp8 bytes followed by s float32 scales. The tail cache holds, for each sequence, a ring of
the last raw keys and gate scores, [blocks, 2, ring, 128], addressed by position modulo ring; block 0 is vLLM's null
block.
"""

import torch
import torch.nn.functional as F

HEAD = 128
FP8_MAX = 448.0


def _hadamard() -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float32)  # vLLM imports models under its own default dtype
    while matrix.shape[0] < HEAD:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * HEAD**-0.5


_HADAMARD = _hadamard()


def rotate_and_quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hadamard rotation, then fp8 with one power-of-two scale a row: [N, 128] to fp8 [N, 128] and float32 [N, 1]."""
    rotated = (x.float() @ _HADAMARD).to(torch.bfloat16).float()
    scale = torch.exp2(torch.ceil(torch.log2(rotated.abs().amax(-1, keepdim=True).clamp_min(1e-4) / FP8_MAX)))
    return (rotated / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def pool(keys: torch.Tensor, gates: torch.Tensor, ape: torch.Tensor) -> torch.Tensor:
    """Gate-weighted mean of each pool: keys and gates [N, k, 128], ape [k, 128], result [N, 128]."""
    weights = (gates.float() + ape.float()).softmax(-2)
    return (weights * keys.float()).sum(-2).to(torch.bfloat16)


def _pages(cache: torch.Tensor) -> torch.Tensor:
    return cache.as_strided((cache.shape[0], cache.shape[1] * (HEAD + 4)), (cache.stride(0), 1))


def write_pools(cache: torch.Tensor, slots: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Store N entries, fp8 [N, 128] and float32 [N, 1], at `slots` [N] (page * s + entry) of the uint8 pool cache."""
    size = cache.shape[1]
    page, entry = (slots // size)[:, None], (slots % size)[:, None]
    pages = _pages(cache)
    pages[page, entry * HEAD + torch.arange(HEAD)] = codes.view(torch.uint8)
    pages[page, size * HEAD + entry * 4 + torch.arange(4)] = scales.contiguous().view(torch.uint8)


def read_pools(cache: torch.Tensor, pages: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` entries of the sequence stored in `pages`, dequantised to float32 [count, 128]."""
    size = cache.shape[1]
    rows = _pages(cache)[pages[: -(-count // size)].long()]
    codes = rows[:, : size * HEAD].reshape(-1, HEAD).view(torch.float8_e4m3fn).float()
    scales = rows[:, size * HEAD :].contiguous().view(torch.float32).reshape(-1, 1)
    return (codes * scales)[:count]


def update_caches(
    cache: torch.Tensor,
    tail: torch.Tensor,
    keys: torch.Tensor,
    gates: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    sequence: torch.Tensor,
    starts: torch.Tensor,
    writable: torch.Tensor,
    page_table: torch.Tensor,
    tail_blocks: torch.Tensor,
) -> None:
    """Take up T new tokens of several sequences: write each pool they complete, then remember their raw keys.

    Prefill chunks, decode steps and draft checks are one case: a token that ends a pool takes its k-1 predecessors
    from this batch where they are in it, and from the sequence's ring otherwise. So a chunk may start anywhere, inside
    a pool too.

    Args:
        keys, gates: raw keys and gate scores, [T, 128].
        ape: positional bias inside a pool, [k, 128].
        positions: position of each token in its sequence, [T].
        sequence: row of each token's sequence, [T]; tokens of a sequence are adjacent and in order.
        starts: first token of each sequence and T at the end, [N+1].
        writable: tokens whose entry may be stored, [T].
        page_table: pool pages of each sequence, [N, pages].
        tail_blocks: ring of each sequence, [N]; 0 means none.
    """
    k, ring, size = ape.shape[0], tail.shape[2], cache.shape[1]
    blocks = tail_blocks[sequence].long()
    ends = (writable & (positions % k == k - 1)).nonzero()[:, 0]
    if len(ends):
        lag = torch.arange(k - 1, -1, -1)
        member = ends[:, None] - lag
        here = (member >= starts[sequence[ends]][:, None])[..., None]
        slot = (positions[ends][:, None] - lag) % ring
        kept = tail[blocks[ends][:, None], :, slot]
        member = member.clamp_min(0)
        pooled = pool(
            torch.where(here, keys[member], kept[:, :, 0]), torch.where(here, gates[member], kept[:, :, 1]), ape
        )
        index = positions[ends] // k
        page = page_table[sequence[ends]].gather(1, (index // size)[:, None])[:, 0].long()
        write_pools(cache, page * size + index % size, *rotate_and_quantise(pooled))
    # A chunk longer than the ring would write slots twice, in no defined order: only its last tokens are remembered.
    last = (torch.arange(len(positions)) + ring >= starts[sequence + 1]) & (blocks > 0)
    tail[blocks[last], 0, positions[last] % ring] = keys[last].to(tail.dtype)
    tail[blocks[last], 1, positions[last] % ring] = gates[last].to(tail.dtype)


def select(
    queries: torch.Tensor, pools: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, k: int, budget: int
) -> torch.Tensor:
    """Best-scored pools among those complete at each query's position, [T, min(budget, P)]; -1 for none.

    queries are fp8 [T, heads, 128]; pools float32 [P, 128]; weights [T, heads] carry the queries' scales.
    """
    scores = torch.einsum("thd,pd->thp", queries.float(), pools)
    scores = (F.relu(scores) * weights.float()[..., None]).sum(1)
    complete = torch.arange(pools.shape[0])[None] < ((positions + 1) // k)[:, None]
    scores = scores.masked_fill(~complete, float("-inf"))
    best, chosen = scores.topk(min(budget, pools.shape[0]), -1)
    return chosen.masked_fill(best == float("-inf"), -1)


def expand(chosen: torch.Tensor, positions: torch.Tensor, k: int) -> torch.Tensor:
    """Token positions of the chosen pools and of the query's own incomplete pool, int32, -1 for none.

    `chosen` is [T, C]; the result [T, C*k + k-1]. A query that ends a pool has no incomplete one: that pool competes.
    """
    tokens = chosen[..., None] * k + torch.arange(k)
    tokens = tokens.masked_fill(chosen[..., None] < 0, -1).flatten(1)
    length = (positions + 1)[:, None]
    tail = length // k * k + torch.arange(k - 1)
    return torch.cat([tokens, tail.masked_fill(tail >= length, -1)], 1).to(torch.int32)
