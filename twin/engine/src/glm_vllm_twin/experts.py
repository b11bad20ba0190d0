"""Unquantised routed experts: vLLM's bf16 CPU kernel ignores `swiglu_limit`, so this method replaces it."""

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from glm_vllm_twin.ops.moe import routed_experts


@UnquantizedFusedMoEMethod.register_oot
class TorchExpertsMethod(UnquantizedFusedMoEMethod):
    """Plain-torch experts over the weights as they were loaded; the router and shared experts stay vLLM's."""

    @property
    def is_monolithic(self) -> bool:
        return False

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Nothing to repack. Another activation than SiLU is refused here, before the first token."""
        if layer.activation != MoEActivation.SILU or layer.apply_router_weight_on_input:
            raise NotImplementedError(
                f"glm-vllm-twin computes SwiGLU experts weighted after the fact only, not {layer.activation}."
            )

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: torch.nn.Module | None,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [T, H] to this rank's part of the experts' sum, [T, H]."""
        return routed_experts(x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids, layer.swiglu_limit)
