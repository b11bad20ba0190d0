"""The compiled kernels as torch operators `glm_exl3::*`: loading the library once, shapes for tracing."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from glm_vllm_overlay.exl3.library import library_path


@functools.cache
def load() -> Path:
    """Load the operators; FileNotFoundError says how to build them. Returns the library's path."""
    path = library_path()
    if not path.is_file():
        raise FileNotFoundError(f"the EXL3 kernels are not at {path}: run `glm-vllm build` on the head")
    torch.ops.load_library(str(path))
    register_fakes()
    return path


def register_fakes() -> None:
    """Shape functions, so that torch.compile and export can trace the operators without a device."""

    @torch.library.register_fake("glm_exl3::decode")
    def decode(trellis: torch.Tensor, bits: int) -> torch.Tensor:
        return trellis.new_empty(trellis.shape[0] * 16, trellis.shape[1] * 16, dtype=torch.float16)

    for name in ("moe_coop", "moe_grouped", "moe_rows"):
        torch.library.register_fake(f"glm_exl3::{name}", lambda *arguments: None)
