"""The sparse-attention indexer inside vLLM: metadata for the plain-torch operators, and the forward pass."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.models.glm5next.nvidia.sparse_indexer import SparseAttnIndexerKpool
from vllm.utils.torch_utils import _resolve_layer_name
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec

from glm_vllm_twin.ops import kpool


@dataclass
class KpoolMetadata:
    """Where the batch's tokens come from and where their cache entries go.

    `offsets` are the N+1 first tokens of the sequences, on the host and (`starts`) as a tensor; `sequence` [T] is each
    token's row in `block_table` [N, blocks]; `writable` [T] is False for padding.
    """

    offsets: list[int]
    starts: torch.Tensor
    sequence: torch.Tensor
    writable: torch.Tensor
    block_table: torch.Tensor


class KpoolMetadataBuilder(AttentionMetadataBuilder[KpoolMetadata]):
    """Builds `KpoolMetadata` for the pool cache and for the tail ring; neither cares about prefill or decode."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KpoolMetadata:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].long()
        tokens = common.num_actual_tokens
        return KpoolMetadata(
            offsets=starts.tolist(),
            starts=starts,
            sequence=torch.repeat_interleave(torch.arange(common.num_reqs), starts.diff())[:tokens],
            writable=common.slot_mapping[:tokens] >= 0,
            block_table=common.block_table_tensor,
        )


def indexer_forward(
    self: SparseAttnIndexerKpool,
    hidden_states: torch.Tensor,
    q_quant: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    *,
    gate_score: torch.Tensor,
    compress_ape: torch.Tensor,
    index_kpool: int,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Fill `topk_indices_buffer` [rows, width] with the token positions that each query attends to; -1 means none.

    q_quant is fp8 [T, heads, 128], k and gate_score [T, 128], weights [T, heads], positions [T]. T may include padding
    behind the batch's own tokens. Without metadata (vLLM's profiling run) nothing is touched.
    """
    buffer = self.topk_indices_buffer
    layers = get_forward_context().attn_metadata
    if not isinstance(layers, dict):
        return buffer
    meta: KpoolMetadata = layers[_resolve_layer_name(self.k_cache.prefix)]
    tail: KpoolMetadata = layers[_resolve_layer_name(self.tail_cache.prefix)]
    cache, tokens = self.k_cache.kv_cache, len(meta.sequence)
    positions = positions[:tokens].long()
    kpool.update_caches(
        cache,
        self.tail_cache.kv_cache,
        k[:tokens],
        gate_score[:tokens],
        compress_ape,
        positions,
        meta.sequence,
        meta.starts,
        meta.writable,
        meta.block_table,
        tail.block_table[:, 0],
    )
    buffer[: hidden_states.shape[0]] = -1
    for row, (start, end) in enumerate(pairwise(meta.offsets)):
        if end <= start:
            continue
        part = slice(start, end)
        complete = int(positions[part].max() + 1) // index_kpool
        chosen = torch.empty(end - start, 0, dtype=torch.long)
        if complete:
            pools = kpool.read_pools(cache, meta.block_table[row], complete)
            budget = self.topk_tokens // index_kpool
            chosen = kpool.select(q_quant[part], pools, weights[part], positions[part], index_kpool, budget)
        attended = kpool.expand(chosen, positions[part], index_kpool)
        buffer[part, : attended.shape[1]] = attended
    return buffer
