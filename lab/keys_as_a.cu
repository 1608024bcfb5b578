/* SPDX-License-Identifier: MIT
 *
 * A bound for a design that was not built: how fast could sparse attention over FP8 keys be if converted keys never went
 * to shared memory? Two warpgroups compute S^T = K Q^T and O^T = V^T P^T, and convert raw codes to fp16 in registers, as
 * operand A of both products. A third warpgroup gathers rows that nobody uses. The program prints the clocks of a block
 * of 64 keys and 64 heads. Inputs are arbitrary, nothing is masked, and no result is checked.
 *
 *     nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -o keys_as_a lab/keys_as_a.cu && ./keys_as_a
 *
 * -DDO_SCORES=0, -DDO_SUMS=0, -DCONVERT=0, -DSOFTMAX=0 and -DGATHER=0 each leave one part out; -DPITCH=672 changes the
 * distance between rows. docs/kernels/sparse-prefill.md ("FP8 designs") has the figures.
 */
#include "../src/cuda/device/async_copy.cuh"
#include "../src/cuda/device/element.cuh"
#include "../src/cuda/device/fragment.h"
#include "../src/cuda/device/mbarrier.cuh"
#include "../src/cuda/device/result.cuh"
#include "../src/cuda/device/shared.cuh"
#include "../src/cuda/device/warpgroup.cuh"
#include "../src/cuda/device/wgmma.cuh"

#include <cstdio>
#include <cuda_fp16.h>

#ifndef PITCH
#define PITCH 656
#endif
enum { ROW = 656 /* bytes of a token */, KEYS = 64, BLOCKS = 512 };
#ifndef DO_SCORES
#define DO_SCORES 1
#endif
#ifndef DO_SUMS
#define DO_SUMS 1
#endif
#ifndef CONVERT
#define CONVERT 1
#endif
#ifndef SOFTMAX
#define SOFTMAX 1
#endif
#ifndef GATHER
#define GATHER 1
#endif

struct Shared {
    unsigned char q[9][TILE_BYTES], p[2][TILE_BYTES];
    unsigned char raw[2][KEYS][PITCH], coming[KEYS / 2][ROW];
    uint64_t p_full[2];
};

// Converts four codes to two pairs of fp16, times a scale.
__device__ __forceinline__ void halves_of(uint32_t codes, uint32_t scale, uint32_t &low, uint32_t &high)
{
#if CONVERT
    asm("{\n.reg .b16 x, y;\n.reg .b32 a, b;\nmov.b32 {x, y}, %2;\ncvt.rn.f16x2.e4m3x2 a, x;\ncvt.rn.f16x2.e4m3x2 b, y;\n"
        "mul.rn.f16x2 %0, a, %3;\nmul.rn.f16x2 %1, b, %3;\n}"
        : "=r"(low), "=r"(high) : "r"(codes), "r"(scale));
#else
    low = codes, high = codes ^ scale;
#endif
}

struct Side {
    Shared &shared;
    const int side, lane, warp;
    const uint32_t base;
    float s[32], o[4][32];

    __device__ Side(Shared &memory, int which)
        : shared(memory), side(which), lane(threadIdx.x % 32), warp(threadIdx.x / 32 % 4), base(shared_address(&memory)) {}

    // Makes the A fragments of 64 columns, four steps. The order of columns does not matter, so a thread loads 16 consecutive codes
    // of each of its two keys.
    __device__ __forceinline__ void key_fragments(uint32_t (&a)[4][4], uint32_t raw, int tile)
    {
        const uint32_t from = raw + (uint32_t)(16 * warp + lane / 4) * PITCH + 16 * (lane % 4) + 64 * tile;
        const uint4 x[2] = {load_shared_16(from), load_shared_16(from + 8 * PITCH)};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
            for (int k = 0; k < 4; k++) halves_of(words[k], 0x3c003c00u + i, a[k][i], a[k][i + 2]);
        }
    }

    __device__ __forceinline__ void scores(uint32_t raw)
    {
        uint32_t a[2][4][4];
        key_fragments(a[0], raw, 0);
        hold(s);
#pragma unroll
        for (int tile = 0; tile < 9; tile++) {
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++)
                wgmma_64<Fp16>(s, a[tile % 2][k], wgmma_lines(base + (uint32_t)offsetof(Shared, q) + tile * TILE_BYTES, k), tile || k);
            wgmma_commit();
            if (tile < 8) {
                if (tile) wgmma_wait<1>();
                key_fragments(a[(tile + 1) % 2], raw, tile + 1);
            }
        }
    }

    // Makes the A fragments of 16 keys of V, for four tiles of 64 columns of O^T. A thread loads eight consecutive columns of each of
    // its four keys.
    __device__ __forceinline__ void value_fragments(uint32_t (&a)[4][4], uint32_t raw, int step)
    {
        uint2 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int key = 16 * step + 2 * (lane % 4) + i % 2 + 8 * (i / 2);
            const uint32_t from = raw + (uint32_t)key * PITCH + 256 * side + 64 * warp + 8 * (lane / 4);
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[i].x), "=r"(x[i].y) : "r"(from));
        }
#pragma unroll
        for (int h = 0; h < 2; h++) // h = 0: keys 2 t and 2 t + 1; h = 1: those 8 later
#pragma unroll
            for (int w = 0; w < 2; w++) { // columns 0 to 3 or 4 to 7: rows g and g + 8 of tiles 2 w and 2 w + 1
                const uint32_t c = w ? x[2 * h].y : x[2 * h].x, d = w ? x[2 * h + 1].y : x[2 * h + 1].x;
                halves_of(__byte_perm(c, d, 0x5140), 0x3c003c00u + h, a[2 * w][2 * h], a[2 * w][2 * h + 1]);
                halves_of(__byte_perm(c, d, 0x7362), 0x3c003c00u + h, a[2 * w + 1][2 * h], a[2 * w + 1][2 * h + 1]);
            }
    }

    __device__ __forceinline__ void sums(uint32_t raw, int owner)
    {
        uint32_t a[2][4][4];
        value_fragments(a[0], raw, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) hold(o[i]);
#pragma unroll
        for (int step = 0; step < 4; step++) {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
                wgmma_64<Fp16>(o[i], a[step % 2][i], wgmma_lines(base + (uint32_t)offsetof(Shared, p) + owner * TILE_BYTES, step), 1);
            wgmma_commit();
            if (step < 3) {
                if (step) wgmma_wait<1>();
                value_fragments(a[(step + 1) % 2], raw, step + 1);
            }
        }
    }

    __device__ __forceinline__ void softmax()
    {
        float most = s[0];
#pragma unroll
        for (int e = 0; e < 32; e++) s[e] = fmaf(s[e], 0.01f, -1.0f), most = fmaxf(most, s[e]);
        if (__any_sync(~0u, most > 8.0f)) s[0] = 0.0f;
        const uint32_t tile = base + (uint32_t)offsetof(Shared, p) + side * TILE_BYTES;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) words[i] = Fp16::pack(exp2_approx(s[4 * j + 2 * i]), exp2_approx(s[4 * j + 2 * i + 1]));
            const uint32_t matrix = lane / 8, row = 8 * (j + matrix / 2) + lane % 8;
            store_matrices_transposed(tile + swizzle_128(row, 2 * warp + matrix % 2), words);
        }
    }

    __device__ __forceinline__ void wait_for(int block) { mbarrier_wait(base + (uint32_t)offsetof(Shared, p_full) + 8 * (block % 2), block / 2 & 1); }

    __device__ void run()
    {
#pragma unroll
        for (int i = 0; i < 128; i++) o[i / 32][i % 32] = 0.0f;
#pragma unroll
        for (int e = 0; e < 32; e++) s[e] = 0.0f;
        const uint32_t raw = base + (uint32_t)offsetof(Shared, raw);
        for (int k = side; k < BLOCKS; k += 2) {
            const uint32_t own = raw + (uint32_t)(k % 2) * KEYS * PITCH, others = raw + (uint32_t)(1 - k % 2) * KEYS * PITCH;
            if (DO_SCORES) scores(own);
            wgmma_wait<0>(); // the registers do not suffice for fragments of both products
            hold(s);
            if (k) {
                wait_for(k - 1);
                if (DO_SUMS) sums(others, 1 - side);
                wgmma_wait<0>();
            }
#pragma unroll
            for (int i = 0; i < 4; i++) hold(o[i]);
#if SOFTMAX
            softmax();
#else
            if (s[0] == 12345.0f) shared.p[0][0] = 1; // keeps the compiler from removing the scores
#endif
            fence_async_shared();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(base + (uint32_t)offsetof(Shared, p_full) + 8 * side);
            wait_for(k); // for the other warps' rows of P
            if (DO_SUMS) sums(own, side);
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < 4; i++) hold(o[i]);
        }
    }
};

__global__ void __launch_bounds__(384, 1) bound(const unsigned char *from, float *to, long long *clocks)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    for (unsigned i = threadIdx.x; i < sizeof(Shared) / 4; i += 384) {
        uint32_t x = (i + blockIdx.x * 7919u) * 2654435761u;
        x ^= x >> 15, x *= 0x2c1b3c6du, x ^= x >> 12;
        ((uint32_t *)memory)[i] = i < sizeof(shared.q) / 4 ? (x & 0x8fff8fffu) | 0x30003000u : (x & 0xbfbfbfbfu);
    }
    if (threadIdx.x == 0) mbarrier_init(shared_address(&shared.p_full[0]), 4), mbarrier_init(shared_address(&shared.p_full[1]), 4), mbarrier_fence_init();
    fence_async_shared();
    __syncthreads();
    const long long begin = clock64();
    if (threadIdx.x < 128) {
        give_registers<56>();
#if GATHER
        for (int k = 0; k < BLOCKS; k++) {
            for (int i = threadIdx.x; i < KEYS * ROW / 16; i += 128) {
                const uint32_t row = ((uint32_t)(k * 64 + i / 41) * 2654435761u + blockIdx.x * 40503u) >> 8 & 32767;
                cp_async_16(shared_address(&shared.coming[i / 41 % 32][i % 41 * 16]), from + (size_t)row * ROW + i % 41 * 16, true);
            }
            cp_async_commit();
            cp_async_wait<1>();
        }
        cp_async_wait<0>();
#endif
    } else {
        take_registers<224>();
        Side side(shared, (int)threadIdx.x / 128 - 1);
        side.run();
        float sum = 0.0f;
        for (int i = 0; i < 128; i++) sum += side.o[i / 32][i % 32];
        to[blockIdx.x * 256 + threadIdx.x - 128] = sum;
        if (threadIdx.x == 128) clocks[blockIdx.x] = clock64() - begin;
    }
}

int main()
{
    unsigned char *from; float *to; long long *clocks, h[132];
    cudaMalloc(&from, 32768 * ROW), cudaMemset(from, 0x31, 32768 * ROW), cudaMalloc(&to, 132 * 256 * 4), cudaMalloc(&clocks, sizeof h);
    cudaFuncSetAttribute(bound, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    cudaEvent_t a, z; cudaEventCreate(&a), cudaEventCreate(&z);
    float best = 1e9f;
    for (int i = 0; i < 8; i++) {
        float ms;
        cudaEventRecord(a), bound<<<132, 384, sizeof(Shared)>>>(from, to, clocks), cudaEventRecord(z), cudaEventSynchronize(z);
        cudaEventElapsedTime(&ms, a, z), best = ms < best ? ms : best;
    }
    cudaMemcpy(h, clocks, sizeof h, cudaMemcpyDeviceToHost);
    printf("%s scores %d sums %d convert %d softmax %d gather %d, rows %d apart: %.0f clocks a block, %.3f ms, %.0f TFLOP/s\n", cudaGetErrorString(cudaGetLastError()),
           DO_SCORES, DO_SUMS, CONVERT, SOFTMAX, GATHER, PITCH, (double)h[5] / BLOCKS, best, 132.0 * BLOCKS * 64 * 64 * 1088 * 2 / best / 1e9);
}
