"""vLLM entry point (group `vllm.general_plugins`): makes `--quantization exl3` known. Idempotent.

vLLM swallows an error while importing this module but not one raised in `register`, so nothing is imported up here.
"""


def register() -> None:
    """Register the quantisation config in this process."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from glm_vllm_overlay.exl3.quantization import Exl3Config

    register_quantization_config("exl3")(Exl3Config)
