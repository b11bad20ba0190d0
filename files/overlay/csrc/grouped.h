#pragma once

#include <ATen/Tensor.h>

// x [T, H] f16; slots sorted by expert: experts [S] and tokens [S] int64; slots [T, k] int64 (where each choice went);
// weights [T, k] f16; tiles [3, M] int32 (expert, first slot, rows ≤ 128; rows 0 = unused); tables [9, E] int64.
// Scratch: rotated [2, ≥S, H] f16 ([1, ≥S, H] when gate and up share suh), mid [2, ≥S, I] f16. out [T, H] f32 is overwritten.
void moe_grouped(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& tokens, const at::Tensor& slots,
                 const at::Tensor& weights, const at::Tensor& tiles, const at::Tensor& tables, double limit,
                 at::Tensor rotated, at::Tensor mid, at::Tensor out);
