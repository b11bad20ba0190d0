"""Where the compiled kernels lie. Needs no torch: `glm-vllm build --help` and the gate answer without it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LIBRARY = "glm_exl3.so"


def library_path() -> Path:
    """Where the kernels lie: $GLM_EXL3_LIBRARY, else in the Python environment, where `glm-vllm build` puts them."""
    return Path(os.environ.get("GLM_EXL3_LIBRARY") or Path(sys.prefix) / "lib" / "glm-vllm" / LIBRARY)
