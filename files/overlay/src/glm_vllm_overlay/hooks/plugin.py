"""vLLM entry point (group `vllm.general_plugins`): puts our hooks into a process of vLLM. Idempotent.

vLLM swallows an error while importing this module but not one raised in `register`, so nothing is imported up here.
"""

BUILDER = "glm_vllm_overlay.hooks.cache.DraftSplittingBuilder"


def register() -> None:
    """Each hook decides by itself whether it is asked for; those of another vLLM than this one stay out."""
    from glm_vllm_overlay.hooks import ablation, compat, pdl, startup

    pdl.register()  # first, since some modules ask while they are imported
    ablation.register()
    startup.register()
    if compat.knows("cache"):
        install_builder()


def install_builder() -> None:
    """Have vLLM's platform name our builder of KV cache groups, by its own hook for that."""
    from vllm.platforms.interface import Platform

    from glm_vllm_overlay.hooks import compat

    compat.require("cache")
    Platform.get_kv_cache_config_builder_cls = classmethod(lambda cls, vllm_config: BUILDER)
