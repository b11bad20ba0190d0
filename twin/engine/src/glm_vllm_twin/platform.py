"""The CPU platform with what the GLM-5.3-Flash architecture needs beyond vLLM's own."""

import os
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

from glm_vllm_twin.host import require_pinned_vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

# vLLM swallows exceptions of the plugin hook itself; one raised here, while it imports the chosen class, ends the
# start.
require_pinned_vllm()

BLOCK_SIZE = 128


def _is_glm5_next(vllm_config: "VllmConfig") -> bool:
    config = getattr(vllm_config.model_config, "hf_config", None)
    return str(getattr(config, "model_type", "")).startswith("glm5_next")


class TwinPlatform(CpuPlatform):
    """vLLM's CPU platform plus sparse MLA, chunked prefill for it, and Ray placement.

    Ray has no GPU to count on the twin: each node starts with `--num-gpus 1`, a resource by name only, because vLLM's
    Ray executor places one worker on each "GPU" and refuses a platform without such a key.
    """

    ray_device_key = "GPU"
    simple_compile_backend = "eager"

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: "AttentionBackendEnum",
        attn_selector_config: "AttentionSelectorConfig",
        num_heads: int | None = None,
    ) -> str:
        if attn_selector_config.use_sparse:
            return "glm_vllm_twin.sparse_mla.TorchSparseMLABackend"
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        if not _is_glm5_next(vllm_config):
            super().check_and_update_config(vllm_config)
            return
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "glm_vllm_twin.worker.TwinWorker"
        # vLLM would choose by the CPU's instruction set; one choice keeps the twin's numbers the same on every host.
        cache.mamba_ssm_cache_dtype = "float32"
        asked = (
            cache.block_size if cache.user_specified_block_size else BLOCK_SIZE,
            cache.enable_prefix_caching,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
        )
        super().check_and_update_config(vllm_config)
        # Upstream's CPU kernel for MLA forces 16-token blocks and turns chunked prefill and prefix caching off for
        # every MLA model. Ours has no such limits; the hybrid cache needs blocks that the indexer's pools and tails
        # divide.
        (
            cache.block_size,
            cache.enable_prefix_caching,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
        ) = asked
        # Upstream's CPU platform insists on fresh processes. A copy of this one has vLLM imported already, which is
        # most of what a start on two cores spends its time on.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        super().register_triton_kernel_overrides()
        from vllm.triton_utils.dispatcher import register_kernels

        from glm_vllm_twin.ops import sampling, states

        register_kernels(
            {"vllm.v1.sample.rejection_sampler.expand_kernel": sampling.expand_kernel}
            | {
                f"vllm.v1.worker.mamba_utils.{kernel.__name__}": kernel
                for kernel in (
                    states.precopy_mamba_align_fused_kernel,
                    states.postprocess_mamba_fused_kernel,
                    states.batch_memcpy_kernel,
                )
            }
        )

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "glm_vllm_twin.communicator.TwinCommunicator"
