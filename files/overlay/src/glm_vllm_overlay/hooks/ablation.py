"""Weight ablation at load: W ← (I − α r rᵀ/‖r‖²) W on the attention output projection of some layers.

Off unless the unit says ABLIT=1. The direction r is the operator's file; nothing on disk is changed and no drafter is
touched. W is [hidden, inputs] and the ranks divide its inputs, so each does its own columns without asking the others.
Every failure ends the engine's start with one sentence.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm_vllm_overlay.hooks import compat
from glm_vllm_overlay.node.errors import Refusal

if TYPE_CHECKING:
    import torch
    from torch import nn

PROJECTION = re.compile(r"(?<!visual)\.layers\.(\d+)\.self_attn\.o_proj$")
# Whatever drafts for them is another architecture.
TARGETS = ("Glm5NextForConditionalGeneration", "Glm5NextForCausalLM")
VARIABLE = "glm_vllm_overlay_ablation_"
# Of a direction that was stored in float32: shorter ones are no direction.
SHORTEST = 1e-6


@dataclass(frozen=True)
class Ablation:
    """What to do. layers: first and last, both included. sha256: of the file, so that no rank takes another one."""

    file: Path
    sha256: str
    layers: tuple[int, int]
    alpha: float

    @classmethod
    def of(cls, settings: Any) -> Ablation:
        """From `ablation` of vLLM's additional-config; Refusal when it is not there or lacks a part."""
        try:
            first, last = settings["layers"]
            return cls(Path(settings["file"]), settings["sha256"], (int(first), int(last)), float(settings["alpha"]))
        except (KeyError, TypeError, ValueError):
            raise Refusal(
                f"ABLIT=1, and serve.yaml names no direction: set {VARIABLE}enabled and {VARIABLE}file and run "
                "site.yml, or take it out of `systemctl edit`"
            ) from None

    def direction(self, hidden: int) -> torch.Tensor:
        """The file's one vector, float32 [hidden] of length 1; Refusal when the file is none of that."""
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            content = self.file.read_bytes()
        except OSError as error:
            raise Refusal(
                f"{self.file} cannot be read ({error.strerror}): set {VARIABLE}file and run site.yml"
            ) from None
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise Refusal(f"{self.file} is not the file that was deployed: run site.yml for both nodes")
        try:
            tensors = load(content)
        except SafetensorError:
            raise Refusal(
                f"{self.file} is no safetensors file: {VARIABLE}file needs one vector in that format"
            ) from None
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors.values()]
        if shapes != [((hidden,), torch.float32)]:
            told = ", ".join(f"{list(shape)} {dtype}".replace("torch.", "") for shape, dtype in shapes) or "nothing"
            raise Refusal(f"{self.file} holds {told}: {VARIABLE}file needs one float32 vector of {hidden} numbers")
        [vector] = tensors.values()
        length = vector.norm().item()
        if not SHORTEST < length < float("inf"):
            raise Refusal(
                f"the vector in {self.file} has length {length}: {VARIABLE}file needs a finite one above zero"
            )
        return vector / length


def project(weight: torch.Tensor, direction: torch.Tensor, alpha: float) -> float:
    """Take `alpha` of `direction` ([hidden], length 1) out of `weight` ([hidden, inputs], any width) in place.

    Computed in float32; returns the relative change ‖ΔW‖/‖W‖ of what `weight` then holds.
    """
    import torch

    before = weight.to(torch.float32, copy=True)
    direction = direction.to(weight.device)
    # A sum down each column: the result of a column does not depend on how many others this rank holds.
    shares = (before * direction[:, None]).sum(0)
    weight.copy_(before - alpha * direction[:, None] * shares)
    norm = before.norm().item()
    return (weight.float() - before).norm().item() / norm if norm else 0.0


def projections(model: nn.Module, layers: tuple[int, int]) -> dict[int, nn.Module]:
    """The attention output projection of each of the model's layers in the range."""
    found = {}
    for name, module in model.named_modules():
        if match := PROJECTION.search(name):
            number = int(match[1])
            if layers[0] <= number <= layers[1]:
                found[number] = module
    return dict(sorted(found.items()))


def ablate(model: nn.Module, wish: Ablation) -> dict[int, float]:
    """Apply it to a loaded model; layer → relative change. Refusal when it can't be, or when nothing would change."""
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    chosen = projections(model, wish.layers)
    if not chosen:
        raise Refusal(f"the model has no layer from {wish.layers[0]} to {wish.layers[1]}: set {VARIABLE}layers")
    for number, module in chosen.items():
        if not isinstance(module.quant_method, UnquantizedLinearMethod) or not module.weight.is_floating_point():
            raise Refusal(
                f"the attention output projection of layer {number} is quantised, and only plain weights can be "
                f"ablated: set {VARIABLE}enabled: false"
            )
    direction = wish.direction(next(iter(chosen.values())).weight.shape[0])
    with torch.no_grad():
        changes = {number: project(module.weight, direction, wish.alpha) for number, module in chosen.items()}
    if not any(changes.values()):
        raise Refusal(f"the direction in {wish.file} changes no weight of these layers: set {VARIABLE}enabled: false")
    return changes


def after_loading(original: Any, model: nn.Module, model_config: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's `process_weights_after_loading`, with the target's weights ablated before it packs them."""
    from vllm.config import get_current_vllm_config
    from vllm.logger import init_logger

    if model_config.architecture in TARGETS:
        wish = Ablation.of((get_current_vllm_config().additional_config or {}).get("ablation"))
        logger = init_logger("vllm.glm_vllm_overlay.ablation")
        for number, change in ablate(model, wish).items():
            logger.warning("ablation: layer %d, relative change %.3e", number, change)
        logger.warning("ablation: on, alpha %s, %s", wish.alpha, wish.file)
    return original(model, model_config, *args, **kwargs)


def register() -> None:
    """Called by vLLM in each of its processes, once or more often."""
    on = os.environ.get("ABLIT", "0") == "1"
    _show(on)
    if not on:
        return
    compat.require("ablation")
    from vllm.model_executor.model_loader import base_loader

    original = base_loader.process_weights_after_loading
    if getattr(original, "func", None) is not after_loading:
        base_loader.process_weights_after_loading = functools.partial(after_loading, original)


@functools.cache
def _gauge() -> Any:
    from prometheus_client import Gauge

    # vLLM takes every metric with its own name in it off the page when an engine starts.
    return Gauge("glm_ablation_enabled", "Whether weight ablation is on (1) or off (0).", multiprocess_mode="max")


def _show(on: bool) -> None:
    _gauge().set(int(on))
