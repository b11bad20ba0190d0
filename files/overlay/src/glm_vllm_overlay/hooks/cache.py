"""KV cache groups in which the drafter does not widen every block of the pool.

All groups of layers share one pool, and a block of it is as wide as the widest group. DFlash2's five layers at the
target's block size are wider than the target's own: a quarter of the pool is lost. Here they become as many groups as
keep each within the target's width. Block sizes stay what they are, so prefix caching and recurrent states are cut as
before; vLLM's speculator fills any number of draft groups. vLLM 0.33.0 only: the twin's has another pool. Off unless
`drafter_kv` of vLLM's additional-config is "split".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs


def width(group: KVCacheGroupSpec) -> int:
    """Bytes of one block of all layers of a group."""
    return group.kv_cache_spec.page_size_bytes


def is_draft(group: KVCacheGroupSpec) -> bool:
    """Whether a group is the sliding-window layers of a drafter and nothing else."""
    spec = group.kv_cache_spec
    return isinstance(spec, UniformTypeKVCacheSpecs) and all(
        isinstance(layer, SlidingWindowSpec) and layer.is_draft for layer in spec.kv_cache_specs.values()
    )


def split_drafts(groups: list[KVCacheGroupSpec]) -> list[KVCacheGroupSpec]:
    """The same layers, with each draft group cut into the fewest groups that the widest other group has room for."""
    room = max((width(group) for group in groups if not is_draft(group)), default=0)
    result = []
    for group in groups:
        if not is_draft(group) or width(group) <= room:
            result.append(group)
            continue
        layers = group.kv_cache_spec.kv_cache_specs
        fit = max(1, room // max(layer.page_size_bytes for layer in layers.values()))
        names = list(layers)
        # Even parts, in the drafter's order: five layers become three and two.
        parts = cdiv(len(names), fit)
        size = cdiv(len(names), parts)
        for start in range(0, len(names), size):
            chosen = {name: layers[name] for name in names[start : start + size]}
            spec = UniformTypeKVCacheSpecs.from_specs(chosen)
            assert spec is not None, "a part of layers of one type is of one type"
            result.append(replace(group, layer_names=list(chosen), kv_cache_spec=spec))
    return result


class DraftSplittingBuilder(DefaultKVCacheConfigBuilder):
    """vLLM's own builder, its groups cut as above where that is asked for."""

    def get_kv_cache_groups(self, vllm_config: Any, kv_cache_spec: dict[str, Any]) -> list[KVCacheGroupSpec]:
        groups = super().get_kv_cache_groups(vllm_config, kv_cache_spec)
        asked = (vllm_config.additional_config or {}).get("drafter_kv")
        return split_drafts(groups) if asked == "split" else groups
