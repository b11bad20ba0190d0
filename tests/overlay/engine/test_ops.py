"""Plain-torch operators against slower or independent statements of the same mathematics."""

import pytest
import torch
import torch.nn.functional as F
from glm_vllm_twin.ops import conv, kda, kpool, mhc, sampling


@pytest.fixture(autouse=True)
def _seeded(seed):
    torch.manual_seed(seed)


def test_prefill_in_chunks_equals_the_recurrence():
    tokens, heads, size = 150, 3, 32
    q, k, v, g = (torch.randn(1, tokens, heads, size) for _ in range(4))
    beta, a_log, bias = torch.randn(1, tokens, heads), torch.rand(heads), torch.randn(heads * size)
    start = torch.randn(1, heads, size, size)
    common = dict(cu_seqlens=torch.tensor([0, tokens]), lower_bound=-5.0)
    chunked, final = kda.chunk_kda_with_fused_gate(
        q, k, v, raw_g=g, beta=beta.sigmoid(), A_log=a_log, g_bias=bias, initial_state=start, **common
    )
    pool = torch.stack([torch.zeros_like(start[0]), start[0]])
    stepped, pool = kda.fused_recurrent_kda(
        q,
        k,
        v,
        g=g,
        beta=beta,
        a_log=a_log,
        g_bias=bias,
        initial_state=pool,
        ssm_state_indices=torch.tensor([1]),
        **common,
    )
    torch.testing.assert_close(chunked, stepped, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(final[0], pool[1], rtol=1e-3, atol=1e-4)


def test_a_rejected_draft_is_forgotten():
    """Three drafts of which one is accepted, then the right tokens: equal to never having drafted."""
    heads, size = 2, 16
    a_log, bias = torch.rand(heads), torch.randn(heads * size)
    common = dict(a_log=a_log, g_bias=bias, lower_bound=-5.0)
    q, k, v, g = (torch.randn(1, 6, heads, size) for _ in range(4))
    beta = torch.randn(1, 6, heads)
    kept = [0, 1, 4, 5]  # tokens 2 and 3 were drafts, rejected
    plain = torch.zeros(2, heads, size, size)
    wanted, _ = kda.fused_recurrent_kda(
        *(x[:, kept] for x in (q, k, v, g, beta)),
        initial_state=plain,
        cu_seqlens=torch.tensor([0, 4]),
        ssm_state_indices=torch.tensor([1]),
        **common,
    )
    pool = torch.zeros(5, heads, size, size)
    columns, outputs = torch.tensor([[1, 2, 3, 4]]), []
    for tokens, accepted in (((0, 4), 1), ((4, 6), 2)):
        part = slice(*tokens)
        out, _ = kda.fused_recurrent_kda(
            *(x[:, part] for x in (q, k, v, g, beta)),
            initial_state=pool,
            cu_seqlens=torch.tensor([0, tokens[1] - tokens[0]]),
            ssm_state_indices=columns,
            num_accepted_tokens=torch.tensor([accepted]),
            **common,
        )
        outputs.append(out)
    got = torch.cat([outputs[0][:, :2], outputs[1]], 1)
    torch.testing.assert_close(got, wanted)


def test_convolution_continues_over_steps_and_rejected_drafts():
    channels, taps = 6, 4
    weight, x = torch.randn(channels, taps), torch.randn(10, channels)
    whole = F.silu(F.conv1d(F.pad(x.t()[None], (taps - 1, 0)), weight[:, None], groups=channels))[0].t()
    states = torch.zeros(2, channels, taps + 1)
    row = torch.tensor([1])
    prefill = conv.causal_conv1d_fn(
        x[:5].t(), weight, None, states, torch.tensor([0, 5]), row, torch.tensor([False]), activation="silu"
    ).t()
    drafts = torch.cat([x[5:6], torch.randn(2, channels)])  # the first is kept, two are rejected
    common = dict(activation="silu", conv_state_indices=row)
    step = conv.causal_conv1d_update(
        drafts,
        states,
        weight,
        num_accepted_tokens=torch.tensor([1]),
        query_start_loc=torch.tensor([0, 3]),
        **common,
    )
    after = conv.causal_conv1d_update(
        x[6:9],
        states,
        weight,
        num_accepted_tokens=torch.tensor([1]),
        query_start_loc=torch.tensor([0, 3]),
        **common,
    )
    torch.testing.assert_close(torch.cat([prefill, step[:1], after]), whole[:9])


class _Indexer:
    """The two caches of N sequences, fed in chunks."""

    PAGE, K, RING = 8, 4, 8

    def __init__(self, sequences: int, length: int) -> None:
        pages = -(-length // (self.K * self.PAGE))
        self.cache = torch.zeros(1 + sequences * pages, self.PAGE, kpool.HEAD + 4, dtype=torch.uint8)
        self.tail = torch.full((1 + sequences, 2, self.RING, kpool.HEAD), float("nan"), dtype=torch.bfloat16)
        self.table = 1 + torch.arange(sequences * pages).view(sequences, pages)
        self.blocks = 1 + torch.arange(sequences)
        self.ape = torch.randn(self.K, kpool.HEAD)

    def feed(self, keys: list[torch.Tensor], gates: list[torch.Tensor], first: list[int]) -> None:
        """One step: the next keys [t, 128] of each sequence, which start at position `first`."""
        counts = torch.tensor([len(part) for part in keys])
        starts = F.pad(counts.cumsum(0), (1, 0))
        kpool.update_caches(
            self.cache,
            self.tail,
            torch.cat(keys),
            torch.cat(gates),
            self.ape,
            torch.cat([torch.arange(f, f + len(part)) for f, part in zip(first, keys, strict=True)]),
            torch.repeat_interleave(torch.arange(len(keys)), counts),
            starts,
            torch.ones(int(counts.sum()), dtype=torch.bool),
            self.table,
            self.blocks,
        )

    def pools(self, sequence: int, count: int) -> torch.Tensor:
        return kpool.read_pools(self.cache, self.table[sequence], count)


@pytest.mark.parametrize("chunk", [1, 3, 5, 7, 13, 64])
def test_pools_do_not_depend_on_where_chunks_start(chunk):
    length = 61
    keys, gates = torch.randn(2, 3, length, kpool.HEAD).to(torch.bfloat16)
    indexer = _Indexer(3, length)
    for start in range(0, length, chunk):
        part = slice(start, min(length, start + chunk))
        indexer.feed(list(keys[:, part]), list(gates[:, part]), [start] * 3)
    for sequence in range(3):
        groups = slice(0, length // 4 * 4)
        wanted = kpool.pool(
            keys[sequence, groups].view(-1, 4, kpool.HEAD), gates[sequence, groups].view(-1, 4, kpool.HEAD), indexer.ape
        )
        codes, scales = kpool.rotate_and_quantise(wanted)
        torch.testing.assert_close(indexer.pools(sequence, length // 4), codes.float() * scales, rtol=0, atol=0)


def test_rejected_drafts_leave_the_ring_right():
    """Two drafts beyond a pool's end are rejected; the tokens that replace them still complete their pools."""
    keys, gates = torch.randn(2, 12, kpool.HEAD).to(torch.bfloat16)
    wrong = torch.randn(2, kpool.HEAD).to(torch.bfloat16)
    straight, drafted = _Indexer(1, 12), _Indexer(1, 12)
    drafted.ape = straight.ape
    straight.feed([keys], [gates], [0])
    drafted.feed([keys[:6]], [gates[:6]], [0])
    drafted.feed([torch.cat([keys[6:7], wrong])], [torch.cat([gates[6:7], wrong])], [6])
    drafted.feed([keys[7:10]], [gates[7:10]], [7])
    drafted.feed([keys[10:]], [gates[10:]], [10])
    torch.testing.assert_close(drafted.pools(0, 3), straight.pools(0, 3), rtol=0, atol=0)


def test_selection_takes_the_best_complete_pools_and_the_tail():
    queries = torch.randn(1, 2, kpool.HEAD).to(torch.float8_e4m3fn)
    pools, weights, position = torch.randn(9, kpool.HEAD), torch.rand(1, 2), torch.tensor([29])
    chosen = kpool.select(queries, pools, weights, position, 4, 3)
    scores = [
        sum(float(w * F.relu(q.float() @ p)) for q, w in zip(queries[0], weights[0], strict=True)) for p in pools[:7]
    ]
    assert sorted(chosen[0].tolist()) == sorted(sorted(range(7), key=lambda i: -scores[i])[:3])
    attended = [i for i in kpool.expand(chosen, position, 4)[0].tolist() if i >= 0]
    assert sorted(attended) == sorted([p * 4 + i for p in chosen[0].tolist() for i in range(4)] + [28, 29])


def test_hyper_connections_agree_with_hugging_face():
    from glm_vllm_twin import torchvision_ops

    torchvision_ops.declare()
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection

    config = Glm5NextTextConfig(hidden_size=32, hc_mult=4)
    reference = Glm5NextTextHyperConnection(config)
    for weight in reference.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    streams = torch.randn(1, 7, 4, 32)
    with torch.no_grad():
        post, comb, collapsed = reference(streams)
    norm = torch.rand(32)
    got_post, got_comb, got = mhc.mhc_pre(
        streams[0],
        reference.fn,
        reference.scale,
        reference.base,
        1e-5,
        1e-6,
        1e-6,
        2.0,
        20,
        norm_weight=norm,
        norm_eps=1e-5,
    )
    torch.testing.assert_close(got_post[..., 0], post[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_comb, comb[0], rtol=1e-4, atol=1e-5)
    wanted = F.rms_norm(collapsed[0], (32,), norm, 1e-5)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_each_token_gets_its_requests_temperature():
    expanded = torch.full((6,), float("nan"))
    sampling.expand_kernel(expanded, torch.tensor([0.7, 0.0, 1.5]), torch.tensor([2, 5, 6]), 0, 1)
    assert expanded.tolist() == pytest.approx([0.7, 0.7, 1, 1, 1, 1.5])
