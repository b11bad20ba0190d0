// Prefill over packed experts: every 16x16 tile of weights is decoded once per 128 rows, straight into tensor-core
// fragments. (exllamav3's own kernel decodes it once per 16 rows with this codebook.)
//
// Slots are (token, choice) pairs sorted by expert. Five launches, no host synchronisation, and a fixed order of sums:
//   rotate   x -> H(suh · x) for gate and up          [S, H] float16 each
//   gemm     gate and up against their tiles          [S, I] float16 each
//   activate clamp, silu, product, H(suh · h)         [S, I] float16
//   gemm     down                                     [S, H] float16
//   reduce   out[token] = sum over choices of weight · svh · H(slot)
// K = 4, mcg. A tile's stream is laid out for mma.m16n8k16: lane l owns weights 8l..8l+7, which end in its own 32-bit
// word and begin in the word before.

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_fp16.h>

#include "grouped.h"

namespace {

constexpr int kRows = 128;    // rows of a block
constexpr int kColumns = 128; // columns of a block, 16 a warp
constexpr int kDepth = 64;    // k of one stage in shared memory
constexpr int kStages = 3;
constexpr int kThreads = 256;
constexpr int kStageHalfs = kRows * kDepth;
constexpr float kNorm = 0.08838834764831845f;  // 1 / sqrt(128)

// The 128-wide Hadamard transform over a warp, four neighbouring values a lane.
__device__ __forceinline__ void hadamard(float (&v)[4])
{
    float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c; v[1] = b + d; v[2] = a - c; v[3] = b - d;
    #pragma unroll
    for (int bit = 1; bit < 32; bit <<= 1)
    {
        const bool high = threadIdx.x & bit;
        #pragma unroll
        for (float& x : v)
        {
            const float other = __shfl_xor_sync(0xffffffffu, x, bit);
            x = high ? other - x : other + x;
        }
    }
    #pragma unroll
    for (float& x : v) x *= kNorm;
}

__device__ __forceinline__ void load4(const half* p, float (&v)[4])
{
    const uint2 raw = *reinterpret_cast<const uint2*>(p);
    const float2 low = __half22float2(*reinterpret_cast<const half2*>(&raw.x));
    const float2 high = __half22float2(*reinterpret_cast<const half2*>(&raw.y));
    v[0] = low.x; v[1] = low.y; v[2] = high.x; v[3] = high.y;
}

__device__ __forceinline__ void store4(half* p, const float (&v)[4])
{
    const half2 low = __floats2half2_rn(v[0], v[1]), high = __floats2half2_rn(v[2], v[3]);
    *reinterpret_cast<uint2*>(p) = {*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high)};
}

__device__ __forceinline__ const half* entry(const int64_t* table, int64_t expert)
{
    return reinterpret_cast<const half*>(table[expert]);
}

__global__ void grouped_rotate_kernel(const half* x, const int64_t* experts, const int64_t* tokens,
                                      const int64_t* gate_suh, const int64_t* up_suh, half* gate, half* up, int64_t units,
                                      int hidden, int sides)
{
    const int64_t unit = (int64_t) blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (unit >= units) return;
    const int chunks = hidden / 128;
    const int64_t slot = unit / chunks;
    const int column = (int) (unit % chunks) * 128 + (threadIdx.x & 31) * 4;
    float value[4], scale[4], rotated[4];
    load4(x + tokens[slot] * hidden + column, value);
    const int64_t expert = experts[slot];
    #pragma unroll
    for (int side = 0; side < 2; ++side)
    {
        if (side == sides) break;
        load4(entry(side ? up_suh : gate_suh, expert) + column, scale);
        for (int i = 0; i < 4; ++i) rotated[i] = value[i] * scale[i];
        hadamard(rotated);
        store4((side ? up : gate) + slot * hidden + column, rotated);
    }
}

__global__ void grouped_activate_kernel(half* gate, const half* up, const int64_t* experts, const int64_t* gate_svh,
                                        const int64_t* up_svh, const int64_t* down_suh, int64_t units, int width, float limit)
{
    const int64_t unit = (int64_t) blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (unit >= units) return;
    const int chunks = width / 128;
    const int64_t slot = unit / chunks, expert = experts[slot];
    const int column = (int) (unit % chunks) * 128 + (threadIdx.x & 31) * 4;
    float g[4], u[4], scale[4];
    load4(gate + slot * width + column, g);
    load4(up + slot * width + column, u);
    hadamard(g);
    hadamard(u);
    load4(entry(gate_svh, expert) + column, scale);
    for (int i = 0; i < 4; ++i) g[i] *= scale[i];
    load4(entry(up_svh, expert) + column, scale);
    for (int i = 0; i < 4; ++i) u[i] *= scale[i];
    load4(entry(down_suh, expert) + column, scale);
    #pragma unroll
    for (int i = 0; i < 4; ++i)
    {
        if (limit > 0.0f)
        {
            g[i] = fminf(g[i], limit);
            u[i] = fminf(fmaxf(u[i], -limit), limit);
        }
        g[i] = g[i] / (1.0f + __expf(-g[i])) * u[i] * scale[i];
    }
    hadamard(g);
    store4(gate + slot * width + column, g);
}

__global__ void grouped_reduce_kernel(const half* down, const int64_t* slots, const half* weights,
                                      const int64_t* experts, const int64_t* down_svh, float* out, int64_t units,
                                      int hidden, int choices)
{
    const int64_t unit = (int64_t) blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (unit >= units) return;
    const int chunks = hidden / 128;
    const int64_t token = unit / chunks;
    const int column = (int) (unit % chunks) * 128 + (threadIdx.x & 31) * 4;
    float sum[4] = {};
    for (int choice = 0; choice < choices; ++choice)
    {
        const int64_t slot = slots[token * choices + choice];
        const float weight = __half2float(weights[token * choices + choice]);
        float value[4], scale[4];
        load4(down + slot * hidden + column, value);
        load4(entry(down_svh, experts[slot]) + column, scale);
        hadamard(value);
        for (int i = 0; i < 4; ++i) sum[i] += value[i] * scale[i] * weight;
    }
    *reinterpret_cast<float4*>(out + token * hidden + column) = make_float4(sum[0], sum[1], sum[2], sum[3]);
}

// Two neighbouring weights: states end at bits 4j+4 and 4j+8 of the lane's word.
__device__ __forceinline__ uint32_t decode_pair(uint32_t before, uint32_t word, int j)
{
    uint32_t first = __funnelshift_r(word, before, 28 - 4 * j) & 0xffffu;
    uint32_t second = __funnelshift_r(word, before, 24 - 4 * j) & 0xffffu;
    first = ((first * 0xCBAC1FEDu) & 0x8FFF8FFFu) ^ 0x3B603B60u;
    second = ((second * 0xCBAC1FEDu) & 0x8FFF8FFFu) ^ 0x3B603B60u;
    const uint32_t low = __byte_perm(first, second, 0x5410), high = __byte_perm(first, second, 0x7632);
    const half2 sum = __hadd2(*reinterpret_cast<const half2*>(&low), *reinterpret_cast<const half2*>(&high));
    return *reinterpret_cast<const uint32_t*>(&sum);
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct Operand
{
    const half* a;           // [S, k]
    const int64_t* trellis;  // [E]
    half* c;                 // [S, n]
};

__device__ __forceinline__ void load_matrix(uint32_t (&a)[4], const half* tile, int row, int chunk)
{
    const uint32_t address = __cvta_generic_to_shared(tile + row * kDepth + (chunk ^ (row & 7)) * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address));
}

// A block of 16 M rows and 16 columns a warp. M is a constant so that nothing in the loops branches: decoding, loads
// and products of neighbouring steps then overlap, which matters more than the few rows computed in vain.
template <int M>
__device__ __forceinline__ void gemm_block(const Operand& op, half* stages, int64_t row0, int rows, const uint32_t* words,
                                           int column_tile, int k, int n)
{
    static_assert(M % 2 == 0 && 16 * M <= kRows, "a stage is loaded in pieces of 32 rows");
    const int lane = threadIdx.x & 31;
    const int64_t word_step = n / 16 * 32;  // from one 16-row band of tiles to the next

    // Rows beyond the last are copies of it: their products are never stored.
    auto load_stage = [&](int stage)
    {
        half* target = stages + stage % kStages * kStageHalfs;
        #pragma unroll
        for (int i = 0; i < M / 2; ++i)
        {
            const int piece = i * kThreads + threadIdx.x, row = piece / (kDepth / 8), chunk = piece % (kDepth / 8);
            const half* source = op.a + (row0 + min(row, rows - 1)) * k + stage * kDepth + chunk * 8;
            const uint32_t address = __cvta_generic_to_shared(target + row * kDepth + (chunk ^ (row & 7)) * 8);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(address), "l"(source));
        }
        asm volatile("cp.async.commit_group;");
    };
    uint32_t next[kDepth / 16];
    auto load_words = [&]()
    {
        #pragma unroll
        for (int i = 0; i < kDepth / 16; ++i) next[i] = __ldcs(words + i * word_step);
        words += kDepth / 16 * word_step;
    };

    float sums[M][2][4] = {};
    const int depth = k / kDepth;
    load_stage(0);
    load_stage(1);
    load_words();
    for (int stage = 0; stage < depth; ++stage)
    {
        uint32_t current[kDepth / 16], before[kDepth / 16];
        #pragma unroll
        for (int i = 0; i < kDepth / 16; ++i)
        {
            current[i] = next[i];
            before[i] = __shfl_sync(0xffffffffu, current[i], (lane + 31) & 31);
        }
        asm volatile("cp.async.wait_group 1;");
        __syncthreads();
        if (stage + 2 < depth) load_stage(stage + 2); else asm volatile("cp.async.commit_group;");
        if (stage + 1 < depth) load_words();
        const half* tile = stages + stage % kStages * kStageHalfs;
        #pragma unroll
        for (int i = 0; i < kDepth / 16; ++i)
        {
            uint32_t b[4];
            #pragma unroll
            for (int pair = 0; pair < 4; ++pair) b[pair] = decode_pair(before[i], current[i], 2 * pair);
            uint32_t a[2][4];
            load_matrix(a[0], tile, lane & 15, i * 2 + (lane >> 4));
            #pragma unroll
            for (int m = 0; m < M; ++m)
            {
                if (m + 1 < M) load_matrix(a[(m + 1) & 1], tile, (m + 1) * 16 + (lane & 15), i * 2 + (lane >> 4));
                mma(sums[m][0], a[m & 1], b[0], b[1]);
                mma(sums[m][1], a[m & 1], b[2], b[3]);
            }
        }
    }
    #pragma unroll
    for (int m = 0; m < M; ++m)
    {
        #pragma unroll
        for (int part = 0; part < 4; ++part)
        {
            const int row = m * 16 + lane / 4 + 8 * (part & 1), column = column_tile * 16 + 8 * (part >> 1) + 2 * (lane & 3);
            const float* c = sums[m][part >> 1] + 2 * (part & 1);
            if (row < rows) *reinterpret_cast<half2*>(op.c + (row0 + row) * n + column) = __floats2half2_rn(c[0], c[1]);
        }
    }
}

// Grid: (n / 128, row tiles, operands). tiles [3, gridDim.y]: expert, first slot, number of rows (0 = no such tile).
__global__ __launch_bounds__(kThreads, 2)
void grouped_gemm_kernel(Operand first, Operand second, const int* tiles, int k, int n)
{
    extern __shared__ half stages[];
    const int rows = tiles[2 * gridDim.y + blockIdx.y];
    if (rows == 0) return;
    const Operand op = blockIdx.z ? second : first;
    const int64_t row0 = tiles[gridDim.y + blockIdx.y];
    const int column_tile = blockIdx.x * (kColumns / 16) + threadIdx.x / 32;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(op.trellis[tiles[blockIdx.y]]) + column_tile * 32
                            + (threadIdx.x & 31);
    switch ((rows + 31) / 32)
    {
        case 1: gemm_block<2>(op, stages, row0, rows, words, column_tile, k, n); break;
        case 2: gemm_block<4>(op, stages, row0, rows, words, column_tile, k, n); break;
        case 3: gemm_block<6>(op, stages, row0, rows, words, column_tile, k, n); break;
        default: gemm_block<8>(op, stages, row0, rows, words, column_tile, k, n);
    }
}

int64_t* row(const at::Tensor& tables, int i) { return tables.data_ptr<int64_t>() + i * tables.size(1); }
half* halfs(const at::Tensor& t) { return reinterpret_cast<half*>(t.data_ptr<at::Half>()); }

}  // namespace

void moe_grouped(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& tokens, const at::Tensor& slots,
                 const at::Tensor& weights, const at::Tensor& tiles, const at::Tensor& tables, double limit,
                 at::Tensor rotated, at::Tensor mid, at::Tensor out)
{
    const at::cuda::OptionalCUDAGuard guard(x.device());
    const cudaStream_t stream = at::cuda::getCurrentCUDAStream().stream();
    const int hidden = x.size(1), width = mid.size(2), choices = slots.size(1);
    const int64_t count = tokens.size(0);
    TORCH_CHECK(tables.dim() == 2 && tables.size(0) == 9 && tables.is_contiguous(), "glm_exl3: tables must be [9, experts]");
    TORCH_CHECK(rotated.size(0) == 1 || rotated.size(0) == 2, "glm_exl3: rotated holds one or two planes");
    TORCH_CHECK(rotated.size(1) >= count && mid.size(1) >= count && rotated.size(2) == hidden,
                "glm_exl3: scratch for ", mid.size(1), " slots cannot hold ", count);
    TORCH_CHECK(hidden % 128 == 0 && width % 128 == 0, "glm_exl3: hidden size and width must be multiples of 128");
    for (const at::Tensor& t : {x, experts, tokens, slots, weights, tiles, rotated, mid, out})
        TORCH_CHECK(t.is_cuda() && t.is_contiguous(), "glm_exl3: every tensor must be contiguous on the device");

    // One plane when gate and up have the same suh in every expert: then they multiply the same rotated rows.
    const int sides = rotated.size(0);
    half* plane[2] = {halfs(rotated), halfs(rotated) + (sides - 1) * rotated.stride(0)};
    half* middle[2] = {halfs(mid), halfs(mid) + mid.stride(0)};
    const int64_t* expert = experts.data_ptr<int64_t>();
    const auto blocks = [](int64_t units) { return (unsigned) ((units + 7) / 8); };
    const int shared = kStages * kStageHalfs * sizeof(half);
    const auto gemm = [&](const Operand& first, const Operand& second, int operands, int k, int n)
    {
        const dim3 grid(n / kColumns, tiles.size(1), operands);
        grouped_gemm_kernel<<<grid, kThreads, shared, stream>>>(first, second, tiles.data_ptr<int>(), k, n);
    };

    const int64_t wide = count * (hidden / 128), narrow = count * (width / 128);
    grouped_rotate_kernel<<<blocks(wide), 256, 0, stream>>>(halfs(x), expert, tokens.data_ptr<int64_t>(), row(tables, 1),
                                                            row(tables, 4), plane[0], plane[1], wide, hidden, sides);
    gemm({plane[0], row(tables, 0), middle[0]}, {plane[1], row(tables, 3), middle[1]}, 2, hidden, width);
    grouped_activate_kernel<<<blocks(narrow), 256, 0, stream>>>(middle[0], middle[1], expert, row(tables, 2), row(tables, 5),
                                                                row(tables, 7), narrow, width, (float) limit);
    const Operand down = {middle[0], row(tables, 6), plane[0]};
    gemm(down, down, 1, width, hidden);
    const int64_t results = x.size(0) * (hidden / 128);
    grouped_reduce_kernel<<<blocks(results), 256, 0, stream>>>(plane[0], slots.data_ptr<int64_t>(), halfs(weights), expert,
                                                               row(tables, 8), out.data_ptr<float>(), results, hidden, choices);
    C10_CUDA_CHECK(cudaGetLastError());
}
