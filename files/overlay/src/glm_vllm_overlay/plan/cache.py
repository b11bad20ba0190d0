"""The KV cache of an engine that is not running: vLLM's own layers, block size, grouping and accounting, no device.

There is no formula here. Each attention layer of the model is an instance of vLLM's own layer class without weights,
holding just what that class reads to describe its cache; `get_kv_cache_spec`, the platform's block size alignment and
`kv_cache_planning` do the rest, as in an engine. For vLLM 0.33.0 on capability 12.x (or 9.0, with the backend that the
tests on a GPU use, to hold a plan against a running engine); other versions are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from glm_vllm_overlay.hooks import compat
from glm_vllm_overlay.hooks.plugin import install_builder
from glm_vllm_overlay.node.errors import Unusable
from glm_vllm_overlay.plan.platform import GB10, stand_in

# Asynchronous scheduling starts a step before the one before it has ended.
STEPS_IN_FLIGHT = 2


@dataclass(frozen=True)
class Engine:
    """What an engine is asked for, as far as it decides the cache. Tokens and requests; `tokens` are drafted ones."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tokens: int = 0
    prefix_caching: bool = True
    tensor_parallel: int = 2
    state_dtype: str = "auto"  # of the recurrent state; auto is float32
    drafter_kv: str = "stock"  # or split, hooks/cache.py


@dataclass(frozen=True)
class Group:
    """Layers that share a block table. Sizes in bytes per block; `blocks` are those of one request of full length."""

    kind: str
    layers: int
    block_size: int
    bytes: int
    blocks: int
    draft: bool


@dataclass(frozen=True)
class Cache:
    """How the pool is cut: bytes per block, and the blocks that one request of `max_model_len` holds."""

    block_size: int
    bytes_per_block: int
    groups: tuple[Group, ...]

    @property
    def blocks_per_request(self) -> int:
        return sum(group.blocks for group in self.groups)

    def blocks(self, pool: int) -> int:
        """Blocks in a pool of so many bytes, vLLM's null block included."""
        return pool // self.bytes_per_block

    def need(self, requests: float = 1) -> int:
        """Bytes of a pool that holds so many requests of full length, with the null block that vLLM keeps back."""
        return (math.ceil(self.blocks_per_request * requests) + 1) * self.bytes_per_block

    def requests(self, pool: int) -> float:
        """Requests of full length that a pool of so many bytes holds at once."""
        return max(0, self.blocks(pool) - 1) / self.blocks_per_request


class Planner:
    """The cache of one model in one kind of engine, for any length and step.

    target, drafter: config.json as dictionaries, drafter None without one. mtp: the target's own last layer drafts.
    capability: of the GPU that the engine runs on.
    Unusable when vLLM or the model is another one than these layers describe.
    """

    def __init__(
        self,
        target: dict[str, Any],
        drafter: dict[str, Any] | None,
        engine: Engine,
        mtp: bool = False,
        capability: tuple[int, int] = GB10,
    ) -> None:
        compat.require("plan")
        stand_in(capability)
        install_builder()
        self.engine = engine
        self.text = _text_config(target)
        self.vllm_config = self._configuration()
        self._target_layers()
        if mtp:
            self._sparse_layer(f"model.layers.{self.text.num_hidden_layers}.mtp_block.self_attn", draft=True)
        if drafter is not None:
            self._drafter_layers(drafter)
        from vllm.platforms import current_platform
        from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
        from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

        current_platform.update_block_size_for_backend(self.vllm_config)
        self.specs = get_kv_cache_spec(self.vllm_config)
        self.builder = get_kv_cache_config_builder(self.vllm_config)

    def cache(self, max_model_len: int | None = None) -> Cache:
        """The cache for contexts of this many tokens, the engine's own when not given."""
        from vllm.utils.math_utils import cdiv
        from vllm.v1.core import kv_cache_planning as planning
        from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs, iter_layer_specs

        config = self.vllm_config
        config.model_config.max_model_len = max_model_len or self.engine.max_model_len
        groups = self._groups()
        found = []
        for group in groups:
            spec, members = group.kv_cache_spec, list(iter_layer_specs(group.kv_cache_spec))
            if isinstance(spec, UniformTypeKVCacheSpecs):
                blocks = spec.max_memory_usage_pages(config)
            else:
                blocks = cdiv(spec.max_memory_usage_bytes(config), spec.page_size_bytes)
            size = sum(planning._get_per_layer_spec(group, name).page_size_bytes for name in group.layer_names)
            kind, draft = type(members[0]).__name__, any(member.is_draft for member in members)
            found.append(Group(kind, len(group.layer_names), spec.block_size, size, blocks, draft))
        per_block = planning._pool_bytes_per_block_from_builder(self.builder, config, groups)
        cache = Cache(config.cache_config.block_size, per_block, tuple(found))
        need = planning._max_memory_usage_bytes_from_groups(self.builder, config, groups)
        assert need == cache.blocks_per_request * per_block, "the groups as told are not what vLLM counts"
        return cache

    def longest(self, pool: int) -> int:
        """Tokens of the longest context that fits once into a pool of so many bytes, as vLLM finds them; 0 for none."""
        from vllm.v1.core import kv_cache_planning as planning

        free = pool - self.cache().bytes_per_block  # the null block
        self.vllm_config.model_config.max_model_len = self.text.max_position_embeddings
        return planning._estimate_max_model_len_from_groups(self.builder, self.vllm_config, self._groups(), free)

    def _groups(self) -> list[Any]:
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups_from_builder

        return get_kv_cache_groups_from_builder(self.builder, self.vllm_config, dict(self.specs))

    def _configuration(self) -> SimpleNamespace:
        """What the classes above read of a VllmConfig."""
        import torch
        from vllm.config import CacheConfig

        engine, text = self.engine, self.text
        cache = CacheConfig(cache_dtype="fp8_ds_mla", enable_prefix_caching=engine.prefix_caching)
        cache.mamba_ssm_cache_dtype = engine.state_dtype
        cache.kv_cache_layout = "BLHNC"  # the only one that the indexer's tail cache takes
        cache.mamba_cache_mode = "align" if engine.prefix_caching else "none"
        cache.mamba_block_size = None if engine.prefix_caching else engine.max_model_len
        model = SimpleNamespace(
            architecture="Glm5NextForConditionalGeneration",
            dtype=torch.bfloat16,
            hf_text_config=text,
            is_hybrid=True,
            model_impl="vllm",
            max_model_len=engine.max_model_len,
            supports_kv_cache_grouping=False,
            use_mla=True,
            get_head_size=lambda: text.kv_lora_rank + text.qk_rope_head_dim,
            get_num_kv_heads=lambda parallel: 1,
        )
        speculation = SimpleNamespace(num_speculative_tokens=engine.tokens) if engine.tokens else None
        return SimpleNamespace(
            additional_config={"drafter_kv": engine.drafter_kv},
            attention_config=SimpleNamespace(hisparse_config=None),
            cache_config=cache,
            compilation_config=SimpleNamespace(static_forward_context={}),
            max_in_flight_tokens=STEPS_IN_FLIGHT * engine.max_num_batched_tokens,
            model_config=model,
            num_speculative_tokens=engine.tokens,
            parallel_config=SimpleNamespace(
                tensor_parallel_size=engine.tensor_parallel, decode_context_parallel_size=1
            ),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, max_num_seqs=engine.max_num_seqs),
            speculative_config=speculation,
        )

    def _add(self, name: str, kind: type, draft: bool = False, **attributes: Any) -> None:
        """One attention layer of this class without its weights, under this name."""
        from torch import nn

        layer = kind.__new__(kind)
        nn.Module.__init__(layer)
        for attribute, value in attributes.items():
            setattr(layer, attribute, value)
        layer.is_draft_layer = draft
        self.vllm_config.compilation_config.static_forward_context[name] = layer

    def _target_layers(self) -> None:
        from vllm.models.glm5next.common import kda

        text, config = self.text, self.vllm_config
        for number, kind in enumerate(text.layer_types[: text.num_hidden_layers]):
            name = f"model.layers.{number}.self_attn"
            if kind != "linear_attention":
                self._sparse_layer(name)
                continue
            backend = kda._resolve_kda_prefill_backend(
                "auto", text.linear_head_dim, config.model_config.dtype, text.linear_lower_bound
            )
            self._add(
                name,
                kda.Glm5NextLinearAttention,
                cache_config=config.cache_config,
                conv_size=text.linear_conv_kernel_dim,
                head_dim=text.linear_head_dim,
                kda_prefill_backend=backend,
                model_config=config.model_config,
                num_heads=text.linear_num_heads,
                num_spec=self.engine.tokens,
                tp_size=self.engine.tensor_parallel,
            )

    def _sparse_layer(self, name: str, draft: bool = False) -> None:
        """Sparse MLA with its indexer's two caches."""
        import torch
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention
        from vllm.models.glm5next.common import attention, model
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import FlashInferMLASparseSM120Backend
        from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

        blackwell = current_platform.get_device_capability() >= (12, 0)
        text, cache = self.text, self.vllm_config.cache_config
        self._add(
            f"{name}.attn",
            MLAAttention,
            draft,
            attn_backend=FlashInferMLASparseSM120Backend if blackwell else FlashMLASparseBackend,
            head_size=text.kv_lora_rank + text.qk_rope_head_dim,
            indexer=True,
            kv_cache_dtype=cache.cache_dtype,
            non_causal_multi_token_decode=False,
            num_heads=text.num_attention_heads // self.engine.tensor_parallel,
            sliding_window=None,
            topk_buffer_width=model.get_sparse_topk_buffer_width(text),
        )
        common = dict(cache_config=cache, _index_kpool=text.index_kpool)
        entry = text.index_head_dim + text.index_head_dim // 128 * 4  # fp8 values and a float32 scale for each 128
        raw = dict(head_dim=text.index_head_dim, dtype=torch.bfloat16)
        keys = dict(head_dim=entry, dtype=torch.uint8)
        self._add(f"{name}.indexer.k_cache", attention.Glm5NextIndexerCache, draft, **keys, **common)
        self._add(f"{name}.indexer.tail_cache", attention.Glm5NextTailCache, draft, **raw, **common)

    def _drafter_layers(self, drafter: dict[str, Any]) -> None:
        import torch
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.models.qwen3_dflash import _resolve_layer_attention
        from vllm.v1.attention.backend import AttentionType
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

        shape = SimpleNamespace(**drafter)
        for number in range(shape.num_hidden_layers):
            window, _ = _resolve_layer_attention(shape, number)
            self._add(
                f"draft.layers.{number}.self_attn.attn",
                Attention,
                True,
                attn_backend=FlashAttentionBackend,
                attn_type=AttentionType.DECODER,
                head_size=shape.head_dim,
                head_size_v=shape.head_dim,
                kv_cache_dtype="auto",
                kv_cache_torch_dtype=torch.bfloat16,
                num_kv_heads=max(1, shape.num_key_value_heads // self.engine.tensor_parallel),
                sliding_window=window,
            )


def _text_config(target: dict[str, Any]) -> Any:
    """vLLM's own reading of the text half of config.json."""
    from transformers import Glm5NextTextConfig

    text = target.get("text_config", target)
    if text.get("model_type") != "glm5_next_text":
        raise Unusable(f"config.json describes a {text.get('model_type')}, and the plan knows glm5_next_text only")
    return Glm5NextTextConfig(**{key: value for key, value in text.items() if key != "model_type"})
