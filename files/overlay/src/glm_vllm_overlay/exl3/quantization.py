"""The `exl3` quantisation of vLLM: packed routed experts (main layers and the MTP layer), everything else as stored.

Settings come from vLLM's `--additional-config`: ``exl3_backend`` (fused, loop or reference; default by device) and
``exl3_check_overflow`` (bool; looks for float16 overflow after every layer and needs eager mode).
Serves vLLM 0.32.0 (CPU) and 0.33.0.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.utils import set_weight_attrs

from glm_vllm_overlay.exl3.execute import Experts, make_backend
from glm_vllm_overlay.exl3.loader import CheckpointError, ExpertLoader, ExpertShape
from glm_vllm_overlay.inspect import Checkpoint, read_checkpoint

logger = init_logger("vllm.glm_vllm_overlay.exl3")


class Exl3Config(QuantizationConfig):
    """What the whole checkpoint has in common. Pickled to the workers, so it holds two values and no ledger."""

    def __init__(self, bits: int | None, codebook: str | None) -> None:
        super().__init__()
        self.bits = bits
        self.codebook = codebook

    def get_name(self) -> str:
        return "exl3"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantization_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Exl3Config:
        # exllamav3 writes a ledger of every tensor here, some 37 MiB; nothing below reads it.
        config.pop("tensor_storage", None)
        if config.get("quant_method") != "exl3":
            return cls(None, None)  # mis-stamped: `maybe_update_config` reads the truth from the tensors
        bits = config.get("bits")
        if bits is not None and bits != int(bits):
            raise ValueError(f"quantization_config.bits is {bits}: one whole bit width is served")
        return cls(None if bits is None else int(bits), config.get("codebook"))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim a checkpoint that is stamped with another method but holds packed experts."""
        if hf_quant_cfg.get("quant_method") == "exl3":
            return None
        checkpoint = _read(getattr(hf_config, "name_or_path", ""))
        if checkpoint is None or not checkpoint.expert_layers:
            return None
        logger.warning(
            "config.json says quant_method %r, but the experts are packed EXL3: serving them as exl3",
            hf_quant_cfg.get("quant_method"),
        )
        return "exl3"

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Compare the stamp with the tensors on disk before anything is loaded; ValueError lists what is wrong."""
        checkpoint = _read(model_name)
        if checkpoint is None:
            return
        problems = checkpoint.problems(stamp={"bits": self.bits, "codebook": self.codebook})
        if problems:
            raise CheckpointError(f"{model_name} cannot be served: " + "; ".join(problems))
        self.bits, self.codebook = checkpoint.bits, checkpoint.codebook

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            if self.bits is None or self.codebook is None:
                raise CheckpointError(
                    "quantization_config in config.json names no bits or no codebook: add them (4 and mcg)"
                )
            return Exl3MoEMethod(layer.moe_config, self.bits, self.codebook)
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return None


@functools.lru_cache(maxsize=2)
def _read(model: str) -> Checkpoint | None:
    """The headers of a local checkpoint; None when `model` is no folder with tensors (a hub name, a rehearsal's): a
    loader of weights refuses that by itself."""
    return read_checkpoint(Path(model)) if model and any(Path(model).glob("*.safetensors")) else None


class Exl3MoEMethod(FusedMoEMethodBase):
    """Routed experts that stay packed. Returns this rank's partial sum: the runner adds and reduces it."""

    def __init__(self, moe: Any, bits: int, codebook: str) -> None:
        super().__init__(moe)
        self.bits = bits
        self.codebook = codebook

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int64

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int, *_: Any) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        if num_experts != extra.get("global_num_experts", num_experts):
            raise ValueError("exl3 splits each expert over the ranks: serve without --enable-expert-parallel")
        if layer.apply_router_weight_on_input:
            raise ValueError("exl3 applies the router's weight to the output; this model wants it on the input")
        if layer.activation != MoEActivation.SILU:
            raise ValueError(f"exl3 computes silu(gate) x up; this model's experts want {layer.activation.value}")
        tp_size = get_tensor_model_parallel_world_size()
        shape = ExpertShape(
            experts=num_experts,
            hidden=hidden_size,
            intermediate=intermediate_size_per_partition * tp_size,
            bits=self.bits,
            codebook=self.codebook,
            tp_size=tp_size,
            tp_rank=get_tensor_model_parallel_rank(),
        )
        parameters: dict[str, torch.Tensor] = {}
        for name, (size, dtype) in shape.parameters().items():
            parameter = torch.nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=False)
            layer.register_parameter(name, parameter)
            parameters[name] = parameter.data
        loader = ExpertLoader(layer.layer_name, shape, parameters)
        for name in parameters:
            set_weight_attrs(
                getattr(layer, name), {"weight_loader": functools.partial(_load, loader, name.split("_", 1)[1])}
            )
        layer.exl3_loader = loader

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        loader: ExpertLoader = layer.exl3_loader
        config = get_current_vllm_config()
        if config.load_config.load_format == "dummy":
            logger.warning_once("load_format dummy: the experts are random numbers, and no tensor was counted")
        else:
            loader.finish()
        settings = config.additional_config or {}
        check_overflow = bool(settings.get("exl3_check_overflow"))
        if check_overflow and not config.model_config.enforce_eager:
            raise ValueError("exl3_check_overflow looks at values after every layer: set enforce-eager: true with it")
        experts = Experts(
            bits=self.bits,
            codebook=self.codebook,
            limit=float(layer.swiglu_limit or 0.0),
            **{f"{group}_{name}": getattr(layer, f"{group}_{name}").data
               for group in ("w13", "w2") for name in ("trellis", "suh", "svh")},
        )  # fmt: skip
        layer.exl3_backend = make_backend(
            settings.get("exl3_backend", ""),
            experts,
            layer.top_k,
            config.scheduler_config.max_num_batched_tokens,
            check_overflow,
        )
        logger.info_once(
            "EXL3 experts: %d-bit %s, %d tensors a layer complete, gate and up share suh: %s, backend %s",
            self.bits, self.codebook, loader.loaded, experts.shared_suh, type(layer.exl3_backend).__name__,
        )  # fmt: skip

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return layer.exl3_backend.apply(x, topk_weights, topk_ids)


def _load(
    loader: ExpertLoader,
    suffix: str,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str = "",
    shard_id: str = "",
    expert_id: int = 0,
    return_success: bool = False,
) -> bool | None:
    """vLLM's weight-loader signature. Never False: vLLM takes that as `skip this tensor` and says nothing."""
    loader.load(suffix, expert_id, shard_id, loaded_weight)
    return True if return_success else None
