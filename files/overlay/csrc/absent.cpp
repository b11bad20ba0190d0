// Getters of the kernel instances that are not compiled: this build holds K = 4, mcg only, and exllamav3's dispatch
// tables name them all. A null kernel is refused by the CUDA runtime; the overlay refuses other K and codebooks earlier.

#include <cuda_fp16.h>
#include <cstdint>

#include "quant/comp_units/exl3_moe_coop_instances.cuh"
#include "quant/comp_units/exl3_moe_instances.cuh"

#define ABSENT_COOP(K)                                                                                        \
    MoeCoopKernel exl3_moe_coop_kernel_a_k##K(int, int, bool) { return {nullptr, 0}; }                        \
    MoeCoopKernel exl3_moe_coop_kernel_b_k##K(int, bool) { return {nullptr, 0}; }
#define ABSENT_COOP_HALF(K)                                                                                   \
    MoeCoopKernel exl3_moe_coop_kernel_a_h##K(int, bool) { return {nullptr, 0}; }                             \
    MoeCoopKernel exl3_moe_coop_kernel_b_h##K(bool) { return {nullptr, 0}; }
#define ABSENT_MCG(K)                                                                                         \
    fp_exl3_moe_kernel exl3_moe_kernel_k##K##_n128_cb1() { return nullptr; }                                  \
    fp_exl3_moe_kernel exl3_moe_kernel_k##K##_n256_cb1() { return nullptr; }
#define ABSENT_MUL1(RATE)                                                                                     \
    fp_exl3_moe_kernel exl3_moe_kernel_##RATE##_n128_cb2() { return nullptr; }                                \
    fp_exl3_moe_kernel exl3_moe_kernel_##RATE##_n256_cb2() { return nullptr; }                                \
    fp_exl3_moe_kernel exl3_moe_kernel_##RATE##_n128_cb2_m32() { return nullptr; }                            \
    fp_exl3_moe_kernel exl3_moe_kernel_##RATE##_n128_cb2_m64() { return nullptr; }

ABSENT_COOP(1) ABSENT_COOP(2) ABSENT_COOP(3) ABSENT_COOP(5) ABSENT_COOP(6) ABSENT_COOP(7) ABSENT_COOP(8)
ABSENT_COOP_HALF(1) ABSENT_COOP_HALF(2) ABSENT_COOP_HALF(3)
ABSENT_MCG(0) ABSENT_MCG(1) ABSENT_MCG(2) ABSENT_MCG(3) ABSENT_MCG(5) ABSENT_MCG(6) ABSENT_MCG(7) ABSENT_MCG(8)
ABSENT_MUL1(k0) ABSENT_MUL1(k1) ABSENT_MUL1(k2) ABSENT_MUL1(k3) ABSENT_MUL1(k4) ABSENT_MUL1(k5) ABSENT_MUL1(k6)
ABSENT_MUL1(k7) ABSENT_MUL1(k8) ABSENT_MUL1(h1) ABSENT_MUL1(h2) ABSENT_MUL1(h3)
