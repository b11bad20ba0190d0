"""Start-up truth: what the engine was built as, one line a fact in the journal, and a refusal of what must not serve.

Looked at when a model's layers exist and before any weight is read: each rank by itself, target and drafter alike.
vLLM 0.33.0 on CUDA only; the twin has none of these backends.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from glm_vllm_overlay.hooks import compat
from glm_vllm_overlay.hooks.ablation import TARGETS
from glm_vllm_overlay.hooks.pdl import wanted as pdl_wanted
from glm_vllm_overlay.node.errors import Refusal

if TYPE_CHECKING:
    from torch import nn

DRAFTERS = ("DFlash2DraftModel",)
# What the sparse MLA kernel of SM12x for this model's layout was made for (FlashInfer's GLM53_NOPE).
BACKEND, CACHE, HEAD, TOPK, HEADS = "FLASHINFER_MLA_SPARSE_SM120", "fp8_ds_mla", 512, 2048, (8, 16, 32, 64)
DRAFT_BACKEND, DRAFT_CACHE = "FLASH_ATTN", ("auto", "bfloat16")


def target_facts(vllm_config: Any) -> dict[str, Any]:
    """What decides whether the target may serve; a set where each layer has a say."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.platforms import current_platform

    layers = [
        layer
        for layer in vllm_config.compilation_config.static_forward_context.values()
        if isinstance(layer, MLAAttention)
    ]
    return {
        "attention backend": {layer.attn_backend.get_name() for layer in layers},
        "kv cache": {layer.kv_cache_dtype for layer in layers},
        "head size": {layer.head_size for layer in layers},
        "heads a rank": {layer.num_heads for layer in layers},
        "index_topk": vllm_config.model_config.hf_text_config.index_topk,
        "ranks": vllm_config.parallel_config.world_size,
        "autotune": bool(vllm_config.kernel_config.enable_flashinfer_autotune),
        "capability": tuple(current_platform.get_device_capability() or ()),
        "pdl": bool(current_platform.is_arch_support_pdl()),
    }


def target_problems(facts: dict[str, Any], pdl: bool) -> list[str]:
    """Sentences for what must not serve. pdl: whether the unit asks for it."""
    found = []
    if facts["capability"][:1] == (12,):
        if facts["attention backend"] != {BACKEND}:
            chosen = ", ".join(sorted(facts["attention backend"])) or "none"
            found.append(f"attention backend {chosen} was selected, not {BACKEND}: take attention options out")
        if facts["kv cache"] != {CACHE}:
            chosen = ", ".join(sorted(map(str, facts["kv cache"])))
            found.append(f"the KV cache is {chosen}, not {CACHE}: set glm_vllm_overlay_kv_cache_dtype: fp8")
        if facts["head size"] != {HEAD} or facts["index_topk"] != TOPK:
            found.append(
                f"the kernel takes heads of {HEAD} and an index of {TOPK}, the checkpoint has "
                f"{sorted(facts['head size'])} and {facts['index_topk']}: it is another model"
            )
        if not facts["heads a rank"] <= set(HEADS):
            told = sorted(facts["heads a rank"])
            found.append(f"{told} heads a rank do not fit the kernel, which takes {HEADS}: serve on other ranks")
        if facts["pdl"] and not pdl:
            found.append("programmatic dependent launch is on, and glm_vllm_overlay_pdl is false: run site.yml")
    if facts["autotune"] and facts["ranks"] > 1:
        found.append(
            "FlashInfer's tuner is on, and it deadlocks pairs: set glm_vllm_overlay_flashinfer_autotune: false"
        )
    return found


def drafter_facts(vllm_config: Any, model: nn.Module) -> dict[str, Any]:
    """The same for a DFlash2 drafter. Its attention sees the whole block: a causal one drafts a third as well."""
    from vllm.model_executor.layers.attention import Attention

    layers = [module for module in model.modules() if isinstance(module, Attention)]
    return {
        "drafter's backend": {layer.attn_backend.get_name() for layer in layers},
        "drafter's kv cache": {str(layer.kv_cache_dtype) for layer in layers},
        "drafter is causal": {bool(module.causal) for module in model.modules() if hasattr(module, "causal")},
        "drafts": vllm_config.speculative_config.num_speculative_tokens,
    }


def drafter_problems(facts: dict[str, Any]) -> list[str]:
    """Sentences for a drafter that would draft badly or not at all."""
    found = []
    if facts["drafter's backend"] != {DRAFT_BACKEND}:
        chosen = ", ".join(sorted(facts["drafter's backend"])) or "none"
        found.append(f"the drafter's attention backend is {chosen}, not {DRAFT_BACKEND}: take attention options out")
    if not facts["drafter's kv cache"] <= set(DRAFT_CACHE):
        chosen = ", ".join(sorted(facts["drafter's kv cache"]))
        found.append(f"the drafter's KV cache is {chosen}, not bfloat16: run site.yml, which renders auto for it")
    if True in facts["drafter is causal"]:
        found.append(
            "the drafter's attention is causal, and it was trained with the whole block in view: fetch it again"
        )
    return found


def after_building(original: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's `initialize_model`; Refusal when what it built must not serve."""
    from vllm.logger import init_logger

    model = original(*args, **kwargs)
    vllm_config = kwargs.get("vllm_config") or args[0]
    architecture = (kwargs.get("model_config") or vllm_config.model_config).architecture
    if architecture in TARGETS:
        facts = target_facts(vllm_config)
        problems = target_problems(facts, pdl_wanted())
    elif architecture in DRAFTERS:
        facts = drafter_facts(vllm_config, model)
        problems = drafter_problems(facts)
    else:
        return model
    logger = init_logger("vllm.glm_vllm_overlay.startup")
    for name, value in facts.items():
        logger.info("start: %s: %s", name, ", ".join(map(str, sorted(value))) if isinstance(value, set) else value)
    if problems:
        raise Refusal("; ".join(problems))
    return model


def register() -> None:
    """Called by vLLM in each of its processes, once or more often."""
    from vllm.platforms import current_platform

    if not compat.knows("startup") or not current_platform.is_cuda():
        return
    compat.require("startup")
    from vllm.model_executor.model_loader import base_loader

    original = base_loader.initialize_model
    if getattr(original, "func", None) is not after_building:
        base_loader.initialize_model = functools.partial(after_building, original)
