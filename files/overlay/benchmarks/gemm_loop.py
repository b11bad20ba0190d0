"""A yardstick for moe.py: a loop over the active experts with exllamav3's own GEMM.

Compiled only here, by `load`, for 4-bit mcg: never shipped. It names kernels of every other rate and codebook, and
parts of exllamav3 that a plain product does not use; those references are made weak: null in the library.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import torch
from glm_vllm_overlay.exl3 import build
from glm_vllm_overlay.exl3.execute import Experts

UNITS = (
    "exl3_gemm.cu",
    "exl3_gemv.cu",
    "exl3_kernel_map.cu",
    "exl3_devctx.cu",
    "coop_autotune.cu",
    "comp_units/exl3_comp_unit_4_cb1.cu",
)
ABSENT = ("tfp_exl3_*", "*exl3_gemv*", "_ZN5Graph*")
BINDING = """
#include <torch/library.h>
#include "quant/exl3_gemm.cuh"
// x [m, k] f16, trellis [k/16, n/16, 64] int16 -> out [m, n] f16; rotated: scratch like x.
void gemm(const at::Tensor& x, const at::Tensor& trellis, const at::Tensor& suh, const at::Tensor& svh,
          at::Tensor rotated, at::Tensor out)
{
    exl3_gemm(x, trellis, out, suh, rotated, svh, -1, /*mcg*/ true, /*mul1*/ false, 0);
}
TORCH_LIBRARY(glm_yardstick, m)
{
    m.def("gemm(Tensor x, Tensor trellis, Tensor suh, Tensor svh, Tensor(a!) rotated, Tensor(b!) out) -> ()");
}
TORCH_LIBRARY_IMPL(glm_yardstick, CUDA, m) { m.impl("gemm", &gemm); }
"""


def load(chain: build.Toolchain, work: Path, jobs: int) -> None:
    """Compile and register `torch.ops.glm_yardstick.gemm`; Refusal when it does not compile or link."""
    own = work / "yardstick"
    own.mkdir(parents=True, exist_ok=True)
    (own / "gemm_loop.cpp").write_text(BINDING)
    chain = replace(chain, csrc=own)
    sources = [chain.sources / "quant" / unit for unit in UNITS] + [own / "gemm_loop.cpp"]
    weak = []
    for compiled in build.compile_objects(chain, work, sources, jobs):
        weak.append(own / compiled.name)
        names = [f"--weaken-symbol={name}" for name in ABSENT]
        subprocess.run(["objcopy", "--wildcard", *names, str(compiled), str(weak[-1])], check=True)
    library = own / "libyardstick.so"
    build.link(chain, weak, library)
    torch.ops.load_library(str(library))


class GemmLoop:
    """`apply` of one layer: for each expert that has tokens, three GEMMs, launched one by one from the host."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts
        self.parts = experts.projections()

    def _linear(self, x: torch.Tensor, part: int, expert: int) -> torch.Tensor:
        packed = self.parts[part]
        out = torch.empty(x.shape[0], packed.svh.shape[-1], dtype=torch.float16, device=x.device)
        torch.ops.glm_yardstick.gemm(
            x, packed.trellis[expert], packed.suh[expert], packed.svh[expert], torch.empty_like(x), out
        )
        return out

    def apply(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, H] in x's dtype; reads the active experts back to the host, as such a loop has to."""
        values, out = x.half(), torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        flat, order = ids.flatten().sort(stable=True)
        counts = torch.bincount(flat, minlength=self.parts[0].trellis.shape[0]).tolist()
        rows, share = order // ids.shape[1], weights.flatten()[order].float().unsqueeze(1)
        limit, start = self.experts.limit, 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(start, start + count)
                start += count
                given = values[rows[part]]
                gate, up = self._linear(given, 0, expert), self._linear(given, 1, expert)
                if limit:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                down = self._linear(torch.nn.functional.silu(gate) * up, 2, expert)
                out.index_add_(0, rows[part], down.float() * share[part])
        return out.to(x.dtype)
