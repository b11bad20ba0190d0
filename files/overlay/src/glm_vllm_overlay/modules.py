"""`glm-vllm build --modules`: compiles what FlashInfer would compile when the engine first uses it.

That is some twenty nvcc processes at once, at a moment when the weights fill the memory that CPU and GPU share. No GPU
and no engine is needed for it. It runs on each node: FlashInfer asks ninja whether a module is up to date, which
compares times of files, and those of another machine's mean nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
from pathlib import Path

from glm_vllm_overlay.node.errors import Refusal, Unusable
from glm_vllm_overlay.node.files import write_atomically
from glm_vllm_overlay.node.release import FLASHINFER, MODULES, toolkit_version

# What GLM-5.3-Flash needs of FlashInfer 0.7.2.post1 on SM12x: module → who makes its specification, and for what.
NEEDED = {
    "sparse_mla_sm120": ("flashinfer.jit.mla", "gen_sparse_mla_sm120_module"),  # attention of the MLA layers
    "sampling": ("flashinfer.jit.sampling", "gen_sampling_module"),  # vLLM's sampler
    "topk": ("flashinfer.jit.topk", "gen_topk_module"),  # the same, for requests with top_k
}


def workspace() -> Path:
    """FlashInfer's folder, from the engine's environment; Unusable without it."""
    folder = os.environ.get(FLASHINFER, "")
    if not folder:
        raise Unusable(f"{FLASHINFER} is not set: run this with the environment of the engine's unit")
    return Path(folder)


def compile_modules(jobs: int, nvcc: Path) -> dict[str, str]:
    """Compile every needed module with `jobs` processes; module → library below the workspace, also written to it.

    Refusal names the module that does not compile and the first error.
    """
    base = workspace()
    os.environ["MAX_JOBS"] = str(jobs)
    files = {}
    for name, (package, function) in NEEDED.items():
        try:
            spec = getattr(importlib.import_module(package), function)()
            spec.build()
        except (ImportError, AttributeError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
            lines = f"{getattr(error, 'output', '') or ''}\n{error}".splitlines()
            first = next((line for line in lines if re.search(r"\berror\b", line)), str(error))
            raise Refusal(
                f"FlashInfer's module {name} does not compile ({' '.join(first.split())[:300]}): "
                "check cuda_sm121_cuda_home and that g++ and ninja are installed"
            ) from None
        if not spec.jit_library_path.is_file():
            raise Refusal(f"FlashInfer left no {spec.jit_library_path}: install the release's lock again")
        files[name] = str(spec.jit_library_path.relative_to(base))
    document = {"schema": 1, "toolkit": toolkit_version(nvcc), "files": files}
    write_atomically(base / MODULES, json.dumps(document, indent=1) + "\n")
    return files
