"""MTP drafting across several KV cache groups in vLLM's Model Runner V1, the only runner without Triton.

The runner's plain MTP proposer insists on one cache group, and this architecture's MTP layer has two: latent and
indexer share one, the indexer's tail ring is another. vLLM holds a multi-group proposer, written for Step3.5; this
module lets the runner choose it for GLM's MTP and undoes the two details that are Step3.5's own.
"""

import torch
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.step3p5 import Step3p5MTPProposer
from vllm.v1.worker import gpu_model_runner

ARCHITECTURE = "Glm5NextMTPModel"
_chosen_upstream = SpeculativeConfig.use_step3p5_mtp


class Glm5NextMTPProposer(Step3p5MTPProposer):
    """Multi-group MTP proposer for Glm5Next: its draft layer shares the target's output head and configuration."""

    def _maybe_share_lm_head(self, target_language_model: torch.nn.Module) -> None:
        EagleProposer._maybe_share_lm_head(self, target_language_model)

    def _create_draft_vllm_config(self) -> VllmConfig:
        return EagleProposer._create_draft_vllm_config(self)


def is_glm_mtp(config: SpeculativeConfig) -> bool:
    """Whether the configuration drafts with Glm5Next's own MTP layer."""
    draft = config.draft_model_config
    architectures = getattr(getattr(draft, "hf_config", None), "architectures", None) or []
    return config.method == "mtp" and ARCHITECTURE in architectures


def install() -> None:
    """Let this process's model runner build `Glm5NextMTPProposer`. The worker calls it for Glm5Next models only."""
    SpeculativeConfig.use_step3p5_mtp = lambda self: is_glm_mtp(self) or _chosen_upstream(self)
    gpu_model_runner.Step3p5MTPProposer = Glm5NextMTPProposer
