"""vLLM's Python as it would answer on a GB10, in a process that has no device and may not touch one.

Call `stand_in` before anything else of vLLM is imported. Its modules are imported as on no device, since those of CUDA
load compiled parts and start the driver; from then on questions about the device are answered for the capability asked
for: 12.1, or another one where a plan is held against a running engine.
"""

from __future__ import annotations

import importlib
import sys

MODULES = (
    "vllm.model_executor.layers.attention.mla_attention",
    "vllm.models.glm5next.common.model",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.mla.flashinfer_mla_sparse",
    "vllm.v1.attention.backends.mla.flashmla_sparse",
    "vllm.v1.core.kv_cache_config_builder",
    "vllm.v1.core.kv_cache_planning",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.worker.gpu.attn_utils",
)
GB10 = (12, 1)


def stand_in(capability: tuple[int, int] = GB10) -> None:
    """Answer for this capability from now on; AssertionError when vLLM has chosen a platform of its own already."""
    from vllm import platforms

    if type(vars(platforms).get("current_platform")).__name__ == "PlannedDevice":
        type(platforms.current_platform).planned = capability
        return
    assert "vllm.config" not in sys.modules, "vLLM was imported before the planned platform stood in for its own"
    from vllm.platforms.interface import DeviceCapability, PlatformEnum, UnspecifiedPlatform

    class PlannedDevice(UnspecifiedPlatform):
        """Nobody's device."""

        planned = capability

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*cls.planned)

    platforms.current_platform = PlannedDevice()
    for module in MODULES:
        importlib.import_module(module)
    PlannedDevice._enum = PlatformEnum.CUDA
