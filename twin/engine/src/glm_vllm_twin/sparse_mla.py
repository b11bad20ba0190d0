"""Sparse MLA in plain torch: every query attends to the token positions that the indexer left for it.

The metadata and its builder are vLLM's own for Intel GPUs: they are device-neutral, and route prefill and decode alike
through `forward_mqa`.
"""

import torch
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.xpu_mla_sparse import XPUMLASparseBackend, XPUMLASparseImpl, XPUMLASparseMetadata


class TorchSparseMLABackend(XPUMLASparseBackend):
    """Any head size, any block size that is a multiple of 16, an unquantised latent cache."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "TORCH_SPARSE_MLA"

    @staticmethod
    def get_impl_cls() -> type["TorchSparseMLAImpl"]:
        return TorchSparseMLAImpl

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[MultipleOf]:
        return [MultipleOf(16)]


class TorchSparseMLAImpl(XPUMLASparseImpl):
    """Attention of absorbed queries over gathered latents, in float32."""

    dcp_world_size = 1

    def record_logical_topk_ready(self) -> None:
        """A CUDA event elsewhere; here the indexer has finished when it returns."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Store latents [T, kv_lora_rank] and rope keys [T, ..., rope] at their slots of [blocks, block size, row]."""
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten().long()
        kept = slots >= 0
        tokens = len(slots)
        rows = torch.cat([kv_c_normed[:tokens], k_pe[:tokens].reshape(tokens, -1)], -1)[kept]
        size = kv_cache.shape[1]
        kv_cache[slots[kept] // size, slots[kept] % size] = rows.to(kv_cache.dtype)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: XPUMLASparseMetadata,
        layer: torch.nn.Module,
    ) -> tuple[torch.Tensor, None]:
        """q [T, heads, row] (or its latent and rope parts); returns [T, heads, kv_lora_rank] and no log-sum-exp."""
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        tokens = q.shape[0]
        chosen = self.topk_indices_buffer[:tokens].long()
        # Attended positions first, so that short contexts do not pay for the buffer's whole width.
        width = max(1, int((chosen >= 0).sum(-1).max())) if tokens else 1
        chosen = chosen.gather(1, (chosen < 0).to(torch.int8).argsort(dim=-1, stable=True)[:, :width])
        absent = chosen < 0
        chosen = chosen.clamp_min(0)
        size = kv_c_and_k_pe_cache.shape[1]
        tables = attn_metadata.block_table[attn_metadata.req_id_per_token[:tokens].long()].long()
        latents = kv_c_and_k_pe_cache[tables.gather(1, chosen // size), chosen % size].float()
        scores = torch.einsum("thd,tkd->thk", q.float(), latents) * self.scale
        weights = scores.masked_fill(absent[:, None], float("-inf")).softmax(-1).nan_to_num()
        return torch.einsum("thk,tkd->thd", weights, latents[..., : self.kv_lora_rank]).to(q.dtype), None
