// torch.library operators over exllamav3's fused MoE kernels and our grouped one (grouped.cu).
//
// exllamav3's own front ends check shapes and dtypes; here only what they cannot know is checked: that every tensor is
// on one CUDA device, and that scratch is large enough for no expert to be skipped.
// Nothing here synchronises with the host, so every operator but `concurrency` may be captured in a CUDA graph.

#include <torch/library.h>
#include <ATen/ATen.h>

#include "grouped.h"
#include "quant/exl3_moe.cuh"
#include "quant/exl3_moe_coop.cuh"
#include "quant/reconstruct.cuh"

namespace {

constexpr int kTables = 9;  // gate, up, down × trellis, suh, svh

std::vector<at::Tensor> rows(const at::Tensor& tables)
{
    TORCH_CHECK(tables.dim() == 2 && tables.size(0) == kTables && tables.is_contiguous(),
                "glm_exl3: tables must be a contiguous [9, experts] int64 tensor");
    return tables.unbind(0);
}

// x [T, H] f16; ids [T, k] int64; weights [T, k] f16; tables [9, E] int64 device pointers; limit 0 = no clamp.
// Scratch, with S slots >= T * k: rotated [2, S, H] f16, gate_up [2, S, I] f16, act [S, I] f16, down [S, H] f32,
// counters int32 (zero before the first call, left zero), out [R, H] f32 with R >= T: rows 0..T are overwritten.
// The counters' layout depends on S and R, so a set of scratch tensors belongs together for good.
void moe_coop(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights, const at::Tensor& tables,
              int64_t bits, double limit, at::Tensor rotated, at::Tensor gate_up, at::Tensor act, at::Tensor down,
              at::Tensor counters, at::Tensor out)
{
    auto p = rows(tables);
    TORCH_CHECK(rotated.dim() == 3 && rotated.size(0) == 2 && gate_up.dim() == 3 && gate_up.size(0) == 2,
                "glm_exl3: rotated and gate_up hold two planes each");
    auto rotated_gate = rotated.select(0, 0), rotated_up = rotated.select(0, 1);
    auto gate = gate_up.select(0, 0), up = gate_up.select(0, 1);
    exl3_moe_coop(x, ids, weights, -1, -1, static_cast<int>(x.size(1)), p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7],
                  p[8], c10::nullopt, c10::nullopt, c10::nullopt, bits, bits, bits, /*mcg*/ true, /*mul1*/ false,
                  MOE_COOP_ACT_SILU, static_cast<float>(limit), /*gated*/ true, rotated_gate, rotated_up, gate, up, act,
                  down, counters, out, c10::nullopt, c10::nullopt);
}

// x [T, H] f16; counts [E + 1] int64; tokens [T * k] int64 and weights [T * k] f16, both sorted by expert;
// state [2, C, R, H] f16 and mid [2, C, R, I] f16 with C <= concurrency(device); out [T, H] f32 is added to.
// The kernel skips an expert with more than R rows without a word: R >= T makes that impossible.
// The yardstick of benchmarks/moe.py; serving uses moe_grouped, which is faster at every size.
void moe_rows(const at::Tensor& x, const at::Tensor& counts, const at::Tensor& tokens, const at::Tensor& weights,
              const at::Tensor& tables, int64_t bits, double limit, at::Tensor state, at::Tensor mid, at::Tensor out)
{
    auto p = rows(tables);
    TORCH_CHECK(state.dim() == 4 && mid.dim() == 4 && state.size(2) >= x.size(0),
                "glm_exl3: scratch for ", state.size(2), " rows cannot hold every token of a batch of ", x.size(0));
    exl3_moe(x, out, counts, tokens, weights, state.select(0, 0), state.select(0, 1), mid.select(0, 0), mid.select(0, 1),
             /*silu*/ 0, bits, bits, bits, p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], true, false, true, false,
             true, false, static_cast<float>(limit), /*active unknown*/ -1, c10::nullopt, c10::nullopt, 0, 1 << 30, 16);
}

// trellis [in/16, out/16, 16 K] int16 → [in, out] f16, still rotated.
at::Tensor decode(const at::Tensor& trellis, int64_t bits)
{
    auto weight = at::empty({trellis.size(0) * 16, trellis.size(1) * 16}, trellis.options().dtype(at::kHalf));
    reconstruct(weight, trellis, static_cast<float>(bits), /*mcg*/ true, /*mul1*/ false);
    return weight;
}

int64_t concurrency(int64_t device) { return exl3_moe_max_concurrency(static_cast<int>(device)); }

}  // namespace

TORCH_LIBRARY(glm_exl3, m)
{
    m.def("moe_coop(Tensor x, Tensor ids, Tensor weights, Tensor tables, int bits, float limit, Tensor(a!) rotated, "
          "Tensor(b!) gate_up, Tensor(c!) act, Tensor(d!) down, Tensor(e!) counters, Tensor(f!) out) -> ()");
    m.def("moe_rows(Tensor x, Tensor counts, Tensor tokens, Tensor weights, Tensor tables, int bits, float limit, "
          "Tensor(a!) state, Tensor(b!) mid, Tensor(c!) out) -> ()");
    m.def("moe_grouped(Tensor x, Tensor experts, Tensor tokens, Tensor slots, Tensor weights, Tensor tiles, Tensor tables, "
          "float limit, Tensor(a!) rotated, Tensor(b!) mid, Tensor(c!) out) -> ()");
    m.def("decode(Tensor trellis, int bits) -> Tensor");
    m.def("concurrency(int device) -> int", &concurrency);
}

TORCH_LIBRARY_IMPL(glm_exl3, CUDA, m)
{
    m.impl("moe_coop", &moe_coop);
    m.impl("moe_rows", &moe_rows);
    m.impl("moe_grouped", &moe_grouped);
    m.impl("decode", &decode);
}
