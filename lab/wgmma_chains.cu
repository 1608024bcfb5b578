/* SPDX-License-Identifier: MIT
 *
 * How three warpgroups share the tensor cores of an SM. Warpgroup 0 issues a chain of small products (the scores of an
 * attention kernel), while warpgroups 1 and 2 multiply P (64 x 64) by V (64 x 256). A chunk of the chain is 4 products
 * of K = 16 in fp16, or 8 of K = 32 in e4m3. Rows of the table differ in where operand A comes from (RS: registers,
 * SS: shared memory), in when the chain waits, and in how A is prepared before each chunk.
 *
 *     nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -o wgmma_chains lab/wgmma_chains.cu && ./wgmma_chains
 *
 * The program prints the clocks of a chunk and, in brackets, of a product P V. It shows that one warpgroup's wgmma gets a
 * quarter of the tensor cores beside two others: 4 products take 494 clocks instead of 128. -DQUICK compiles one row.
 */
#include "../src/cuda/device/element.cuh"
#include "../src/cuda/device/shared.cuh"
#include "../src/cuda/device/warpgroup.cuh"
#include "../src/cuda/device/wgmma.cuh"
#include <cstdio>
#include <cstdlib>

enum { RS, RS_E4M3, SS };
enum { WAIT_0, WAIT_1, NEVER };
enum { NOTHING, N256, N128, EVERY_2900 };
enum { SAME, IMAD, CVT, LDS, STSM }; // how A is prepared before each chunk, as main names the rows; for e4m3, LDS has no cvt
enum { WG = 128, CHUNKS = 4096, RAW = 32768 };

struct Shared {
    unsigned char q[65536], v[98304], p[8192], raw[RAW];
    unsigned done;
};
#define AT(member) (base + (uint32_t)offsetof(Shared, member))

__device__ __forceinline__ void rs_fp16(float (&d)[32], const uint32_t (&a)[4], uint64_t b) { wgmma_64<Fp16>(d, a, b, 1); }
__device__ __forceinline__ void rs_fp16(float (&d)[64], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile(WGMMA("m64n128k16", "f16", WGMMA_NAMES_64, "%69", "{%64, %65, %66, %67}", "%68", "0")
                 : WGMMA_SUMS_32(d, 0), WGMMA_SUMS_32(d, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}
__device__ __forceinline__ void rs_e4m3(float (&d)[32], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WGMMA_NAMES_32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1;\n}"
                 : WGMMA_SUMS_32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}
__device__ __forceinline__ void rs_e4m3(float (&d)[64], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" WGMMA_NAMES_64
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1;\n}"
                 : WGMMA_SUMS_32(d, 0), WGMMA_SUMS_32(d, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}
__device__ __forceinline__ void ss_fp16(float (&d)[32], uint64_t a, uint64_t b) { wgmma_64<Fp16>(d, a, b, 1); }
__device__ __forceinline__ void ss_fp16(float (&d)[64], uint64_t a, uint64_t b)
{
    asm volatile(WGMMA("m64n128k16", "f16", WGMMA_NAMES_64, "%66", "%64", "%65", "0, 0")
                 : WGMMA_SUMS_32(d, 0), WGMMA_SUMS_32(d, 32) : "l"(a), "l"(b), "r"(1));
}
__device__ __forceinline__ void convert(uint32_t w, uint32_t scale, uint32_t &low, uint32_t &high)
{
    asm volatile("{\n.reg .b16 x, y;\n.reg .b32 a, b;\nmov.b32 {x, y}, %2;\ncvt.rn.f16x2.e4m3x2 a, x;\ncvt.rn.f16x2.e4m3x2 b, y;\n"
                 "mul.rn.f16x2 %0, a, %3;\nmul.rn.f16x2 %1, b, %3;\n}" : "=r"(low), "=r"(high) : "r"(w), "r"(scale));
}

template <int KIND, int WAIT, int PREPARE, int N> __device__ __forceinline__ void scores(uint32_t base, Shared &shared, long long *clocks, float *sink)
{
    constexpr int TILE = N * 128, TILES = 65536 / TILE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float s[N / 2];
    uint32_t frag[2][4][4], x = threadIdx.x * 0x01010101u & 0x37373737u;
    uint4 raw[4][4]; // raw keys of four chunks, loaded two ahead
#pragma unroll
    for (int i = 0; i < N / 2; i++) s[i] = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) frag[i / 16][i / 4 % 4][i % 4] = x + i;
    constexpr int WORDS = KIND == RS_E4M3 ? 4 : 2; // of 16 bytes, which a thread loads for a chunk
    auto load = [&](int c) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) raw[c % 4][i] = load_shared_16(AT(raw) + ((c % 4 * WORDS + i) * WG + threadIdx.x) * 16);
    };
    const uint32_t key = 16 * warp + lane % 16, line = AT(v) + 65536 + key * 128 + ((lane / 16) ^ (key & 7)) * 16;
    uint32_t at[4];
#pragma unroll
    for (int k = 0; k < 4; k++) at[k] = line ^ (32 * k);
    const uint32_t scale = 0x14001400u + (threadIdx.x & 1);
    if (PREPARE >= LDS) load(0), load(1);
    long long begin = 0;
    for (int round = 0; round < CHUNKS / 8 + 16; round++) {
        if (round == 16) begin = clock64();
#pragma unroll
        for (int c = 0; c < 8; c++) {
            uint32_t (&f)[4][4] = frag[PREPARE == SAME ? 0 : c % 2];
            if (WAIT == WAIT_1 && PREPARE != SAME) wgmma_wait<1>();
            if (PREPARE >= LDS) load(c + 2);
            if (PREPARE == IMAD || (PREPARE == CVT && KIND == RS_E4M3)) {
#pragma unroll
                for (int i = 0; i < 16; i++) asm volatile("mad.lo.u32 %0, %1, %2, %3;" : "=r"(f[i / 4][i % 4]) : "r"(x), "r"(round + c), "r"(scale + i));
            } else if (PREPARE >= CVT && KIND == RS) {
                uint4 a = raw[c % 4][0], b = raw[c % 4][1];
                if (PREPARE == CVT) a = make_uint4(x ^ round, x + round, x & round, x | round), b = make_uint4(x - round, ~x ^ round, round, x);
                convert(a.x, scale, f[0][0], f[0][2]), convert(b.x, scale, f[0][1], f[0][3]);
                convert(a.y, scale, f[1][0], f[1][2]), convert(b.y, scale, f[1][1], f[1][3]);
                convert(a.z, scale, f[2][0], f[2][2]), convert(b.z, scale, f[2][1], f[2][3]);
                convert(a.w, scale, f[3][0], f[3][2]), convert(b.w, scale, f[3][1], f[3][3]);
            } else if (PREPARE >= LDS) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const uint4 w = raw[c % 4][i % WORDS];
                    f[i][0] = w.x, f[i][1] = w.y, f[i][2] = w.z, f[i][3] = w.w;
                }
            }
            wgmma_fence();
            const uint32_t tile = AT(q) + c % TILES * TILE;
            if (KIND == RS_E4M3) {
#pragma unroll
                for (int k = 0; k < 8; k++) rs_e4m3(s, f[k % 4], wgmma_descriptor(tile, 0, k % 4 * 32));
            } else {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    if (KIND == RS) rs_fp16(s, f[k], wgmma_lines(tile, k));
                    else ss_fp16(s, wgmma_lines(AT(v) + 65536 + c % 4 * 8192, k), wgmma_lines(tile, k));
                }
            }
            wgmma_commit();
            if (PREPARE == STSM)
#pragma unroll
                for (int k = 0; k < 4; k++) store_matrices(at[k] + c % 4 * 8192, f[k]);
            if (WAIT == WAIT_1 && PREPARE == SAME) wgmma_wait<1>();
            if (WAIT == WAIT_0) wgmma_wait<0>();
        }
    }
    wgmma_wait<0>();
    hold(s);
    if (threadIdx.x == 0) clocks[0] = clock64() - begin, *(volatile unsigned *)&shared.done = 1;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum += s[i];
    if (sum == 12345.0f) *sink = sum;
}

// All warps of a warpgroup leave the loop together: a wgmma without one of its warps is an illegal instruction.
__device__ __forceinline__ bool any_of_128(int barrier, bool mine)
{
    uint32_t any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(any) : "r"((int)mine), "r"(barrier) : "memory");
    return any;
}
__device__ __forceinline__ void p_v_products(float (&o)[1][128], uint32_t p, uint32_t v)
{
    hold(o[0]);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; s++) wgmma_256_columns<Fp16>(o[0], wgmma_lines(p, s), wgmma_columns(v, s), 1);
    wgmma_commit();
    wgmma_wait<0>();
    hold(o[0]);
}
__device__ __forceinline__ void p_v_products(float (&o)[2][64], uint32_t p, uint32_t v)
{
    hold(o[0]), hold(o[1]);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 8; s++) wgmma_128_columns<Fp16>(o[s / 4], wgmma_lines(p, s % 4), wgmma_columns(v + s / 4 * 16384, s % 4), 1);
    wgmma_commit();
    wgmma_wait<0>();
    hold(o[0]), hold(o[1]);
}
template <int PV> __device__ __forceinline__ void p_v(uint32_t base, Shared &shared, long long *clocks, float *sink)
{
    constexpr int PARTS = PV == N128 ? 2 : 1;
    const int side = __shfl_sync(~0u, (int)threadIdx.x / WG - 1, 0);
    float o[PARTS][128 / PARTS];
#pragma unroll
    for (int i = 0; i < 128; i++) o[i / (128 / PARTS)][i % (128 / PARTS)] = 0;
    const long long begin = clock64();
    int n = 0;
    for (; !any_of_128(1 + side, n == 100000 || *(volatile unsigned *)&shared.done); n++) {
        const long long at = clock64();
        p_v_products(o, AT(p), AT(v) + side * 32768);
        if (PV == EVERY_2900)
            while (__any_sync(~0u, clock64() - at < 2900)) __nanosleep(100);
    }
    if (threadIdx.x % WG == 0) clocks[1 + side] = (clock64() - begin) / (n ? n : 1);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 128; i++) sum += o[i / (128 / PARTS)][i % (128 / PARTS)];
    if (sum == 12345.0f) *sink = sum;
}

template <int KIND, int WAIT, int PREPARE, int N, int PV> __global__ void __launch_bounds__(384, 1) kernel(long long *clocks, float *sink)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(memory);
    for (int i = threadIdx.x; i < (int)sizeof(Shared) / 4; i += 384) ((uint32_t *)memory)[i] = 0;
    fence_async_shared();
    __syncthreads();
    long long *to = clocks + blockIdx.x * 4;
    if (threadIdx.x < WG) {
        take_registers<184>();
        scores<KIND, WAIT, PREPARE, N>(base, shared, to, sink);
    } else {
        give_registers<160>();
        if (PV != NOTHING) p_v<PV>(base, shared, to, sink);
    }
}

static void ok(cudaError_t e, int line)
{
    if (e != cudaSuccess) printf("wgmma_chains.cu:%d: %s\n", line, cudaGetErrorString(e)), exit(1);
}
#define OK(call) ok((call), __LINE__)

template <int KIND, int WAIT, int PREPARE, int N, int PV> void cell(long long *clocks, float *sink)
{
    auto *const f = kernel<KIND, WAIT, PREPARE, N, PV>;
    OK(cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    f<<<132, 384, sizeof(Shared)>>>(clocks, sink);
    OK(cudaGetLastError());
    OK(cudaDeviceSynchronize());
    long long c[4];
    OK(cudaMemcpy(c, clocks + 4 * 7, sizeof c, cudaMemcpyDeviceToHost));
    printf(" %6.0f", (double)c[0] / CHUNKS);
    if (PV) printf(" (%5lld)", c[1]);
    else printf("        ");
}
template <int KIND, int WAIT, int PREPARE, int N> void row(long long *clocks, float *sink, const char *name)
{
    printf("N = %-4d%-46s", N, name);
    cell<KIND, WAIT, PREPARE, N, NOTHING>(clocks, sink), cell<KIND, WAIT, PREPARE, N, N256>(clocks, sink);
    cell<KIND, WAIT, PREPARE, N, N128>(clocks, sink), cell<KIND, WAIT, PREPARE, N, EVERY_2900>(clocks, sink);
    printf("\n");
    fflush(stdout);
}
template <int N> void table(long long *clocks, float *sink)
{
    row<RS, NEVER, SAME, N>(clocks, sink, "RS fp16, no wait");
#ifndef QUICK
    row<RS, WAIT_1, SAME, N>(clocks, sink, "RS fp16, wait 1");
    row<RS, WAIT_0, SAME, N>(clocks, sink, "RS fp16, wait 0");
    row<SS, NEVER, SAME, N>(clocks, sink, "SS fp16, no wait");
    row<SS, WAIT_1, SAME, N>(clocks, sink, "SS fp16, wait 1");
    row<SS, WAIT_0, SAME, N>(clocks, sink, "SS fp16, wait 0");
    row<RS_E4M3, NEVER, SAME, N>(clocks, sink, "RS e4m3 (8 products), no wait");
    row<RS_E4M3, WAIT_1, SAME, N>(clocks, sink, "RS e4m3 (8 products), wait 1");
    row<RS_E4M3, WAIT_0, SAME, N>(clocks, sink, "RS e4m3 (8 products), wait 0");
    row<RS, WAIT_1, IMAD, N>(clocks, sink, "RS fp16, wait 1, A by 16 IMAD");
    row<RS, WAIT_1, CVT, N>(clocks, sink, "RS fp16, wait 1, A by cvt, HMUL2");
    row<RS, WAIT_1, LDS, N>(clocks, sink, "RS fp16, wait 1, LDS 2 ahead, cvt, HMUL2");
    row<RS, WAIT_1, STSM, N>(clocks, sink, "RS fp16, wait 1, LDS, cvt, HMUL2, 4 STSM");
    row<RS_E4M3, WAIT_1, IMAD, N>(clocks, sink, "RS e4m3 (8), wait 1, A by 16 IMAD");
    row<RS_E4M3, WAIT_1, LDS, N>(clocks, sink, "RS e4m3 (8), wait 1, 4 LDS 2 ahead");
#endif
}
int main()
{
    long long *clocks;
    float *sink;
    OK(cudaMalloc(&clocks, 132 * 32)), OK(cudaMalloc(&sink, 4));
    OK(cudaMemset(clocks, 0, 132 * 32));
    printf("clocks a chunk; ideal N = 64: 128 (e4m3 256), N = 128: 256 (512); P V of a warpgroup ideal 512, two 1024\n%-54s %-15s %-15s %-15s %s\n", "", "alone", "2 x n256", "2 x 2 x n128", "n256 every 2900");
    table<64>(clocks, sink);
#ifndef QUICK
    table<128>(clocks, sink);
#endif
    return 0;
}
