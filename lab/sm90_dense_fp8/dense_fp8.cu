// Dense decode over FP8_576 with e4m3 products on Hopper: one scale, q given as e4m3. See NOTES.md.
//
//   producer warp   keys of a block by TMA: four boxes of 128 columns and one of 64, and Q once
//   sides 0, 1      (warpgroups) S of blocks of 64 keys in turns, softmax, P as e4m3 to shared memory; both: O^T of 256 columns of V each
//                   += V^T P^T, with V^T as A in registers: ldmatrix.trans of 16-bit pairs of columns, and byte permutes
#include "../../src/cuda/device/mbarrier.cuh"
#include "../../src/cuda/device/shared.cuh"
#include "../../src/cuda/device/warpgroup.cuh"
#include <cuda.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>
#include <algorithm>

#ifndef BUFFERS
#define BUFFERS 4
#endif
enum { ROWS = 64, KEYS = 64, WG = 128, THREADS = 3 * WG, TILE = 64 * 128, BLOCK_BYTES = 4 * TILE + 64 * 64, D = 576, DV = 512 };
struct __align__(1024) Shared {
    unsigned char keys[BUFFERS][BLOCK_BYTES], q[BLOCK_BYTES], p[2][64 * 64];
    float ref[2][ROWS], factor[2][ROWS], sum[2][ROWS];
    uint32_t moved[2][4];
    uint64_t full[BUFFERS], empty[BUFFERS], q_full, p_full[2], p_empty[2], ref_full[2][4];
};
static_assert(sizeof(Shared) <= 227 * 1024, "");
#define AT(member) (base + (uint32_t)offsetof(Shared, member))

struct Params {
    CUtensorMap keys, keys_end, q, q_end;
    const int *table; // [b, pages]
    uint16_t *out;    // [b, rows, 512] bf16, of parts 1
    float *lse;
    int pages, s_k, tiles, parts, rows;
    float scale_log2, v_scale;
};

__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ void load2d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ uint64_t desc128(uint32_t at) { return (uint64_t)(at >> 4) | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62; }
__device__ __forceinline__ uint64_t desc64(uint32_t at) { return (uint64_t)(at >> 4) | (uint64_t)(512 >> 4) << 32 | (uint64_t)2 << 62; }
#define S8(d, i) "+f"((d)[i]), "+f"((d)[i + 1]), "+f"((d)[i + 2]), "+f"((d)[i + 3]), "+f"((d)[i + 4]), "+f"((d)[i + 5]), "+f"((d)[i + 6]), "+f"((d)[i + 7])
#define S32(d) S8(d, 0), S8(d, 8), S8(d, 16), S8(d, 24)
#define N32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
__device__ __forceinline__ void mma_ss(float (&d)[32], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" N32 "}, %32, %33, p, 1, 1;\n}" : S32(d) : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void mma_rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" N32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1;" : S32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#define FENCE() asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define COMMIT() asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define WAITG(n) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory")
template <int N> __device__ __forceinline__ void keep(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ uint32_t e4m3x4(float a, float b, float c, float d)
{
    uint16_t lo, hi;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(d), "f"(c));
    return (uint32_t)hi << 16 | lo;
}

// V^T of 16 columns (of the warp) and 32 keys as A.
__device__ __forceinline__ void v_fragment(uint32_t (&a)[4], uint32_t keys, int column, int step, int lane)
{
    const uint32_t token = 32 * step + lane; // lane / 8: of four matrices; lane % 8: its row
    const uint32_t at = keys + (uint32_t)(column / 128) * TILE + token * 128 + ((((uint32_t)column % 128 / 16) ^ (token & 7)) << 4);
    uint32_t r[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    a[0] = __byte_perm(r[0], r[1], 0x6420), a[1] = __byte_perm(r[0], r[1], 0x7531);
    a[2] = __byte_perm(r[2], r[3], 0x6420), a[3] = __byte_perm(r[2], r[3], 0x7531);
}

struct Side {
    const Params &p;
    Shared &shared;
    const uint32_t base;
    const int side, warp, lane, blocks, length_of_part;
    float o[4][32];

    // Its place in ring and phases: block k has buffer k % BUFFERS; P of a side is used once in two blocks.
    // Behind the last block it multiplies what is there, for nobody: so that the loop has one text.
    __device__ __forceinline__ void multiply_keys(float (&s)[32], int k)
    {
        if (__any_sync(~0u, k < blocks)) mbarrier_wait(AT(full) + 8 * (k % BUFFERS), k / BUFFERS & 1);
        const uint32_t keys = AT(keys) + (k % BUFFERS) * BLOCK_BYTES, q = AT(q);
        FENCE();
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) mma_ss(s, desc128(q + t * TILE + 32 * i), desc128(keys + t * TILE + 32 * i), t + i > 0);
#pragma unroll
        for (int i = 0; i < 2; i++) mma_ss(s, desc64(q + 4 * TILE + 32 * i), desc64(keys + 4 * TILE + 32 * i), 1);
        COMMIT();
    }

    __device__ __forceinline__ void load_v(uint32_t (&a)[8][4], int k)
    {
        const uint32_t keys = AT(keys) + (k % BUFFERS) * BLOCK_BYTES;
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
            for (int m = 0; m < 4; m++) v_fragment(a[4 * step + m], keys, 256 * side + 64 * m + 16 * warp, step, lane);
    }

    __device__ __forceinline__ void shrink(int k)
    {
        const int of = k & 1;
        const uint32_t any = shared.moved[of][0] | shared.moved[of][1] | shared.moved[of][2] | shared.moved[of][3];
        if (__any_sync(~0u, any)) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float2 f = *(const float2 *)&shared.factor[of][8 * n + 2 * (lane % 4)];
#pragma unroll
                for (int m = 0; m < 4; m++) o[m][4 * n] *= f.x, o[m][4 * n + 1] *= f.y, o[m][4 * n + 2] *= f.x, o[m][4 * n + 3] *= f.y;
            }
        }
    }

    __device__ __forceinline__ void multiply_v(const uint32_t (&a)[8][4], int k)
    {
        const uint32_t weights = AT(p) + (k & 1) * 64 * 64;
        FENCE();
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
            for (int m = 0; m < 4; m++) mma_rs(o[m], a[4 * step + m], desc64(weights + 32 * step));
        COMMIT();
    }
    __device__ __forceinline__ void keep_o()
    {
#pragma unroll
        for (int m = 0; m < 4; m++) keep(o[m]);
    }
    __device__ __forceinline__ void multiply_block(uint32_t (&a)[8][4], int k)
    {
        load_v(a, k);
        wait_p(k);
        shrink(k);
        keep_o();
        multiply_v(a, k);
    }
    __device__ __forceinline__ void done_with(int k)
    {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(AT(empty) + 8 * (k % BUFFERS)), mbarrier_arrive(AT(p_empty) + 8 * (k & 1));
    }
    __device__ __forceinline__ void wait_p(int k) { mbarrier_wait(AT(p_full) + 8 * (k & 1), k / 2 & 1); }

    // References: in powers of two, 6 below the maximum when they move, so that P is up to 64 then and 448 later.
    __device__ __forceinline__ void softmax(float (&s)[32], int k, float (&ref)[2], float (&sum)[2])
    {
        const int row = 16 * warp + lane / 4;
        if ((k + 1) * KEYS > length_of_part)
#pragma unroll
            for (int e = 0; e < 32; e++)
                if (k * KEYS + 8 * (e / 4) + 2 * (lane % 4) + e % 2 >= length_of_part) s[e] = -INFINITY;
        float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int e = 0; e < 32; e++) most[e / 2 % 2] = fmaxf(most[e / 2 % 2], s[e]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
            most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2)) * p.scale_log2;
        }
        float before[2] = {-1e30f, -1e30f};
        if (k > 0) {
            mbarrier_wait(AT(ref_full[(k & 1) ^ 1]) + 8 * warp, (k - 1) / 2 & 1);
            before[0] = shared.ref[(k & 1) ^ 1][row], before[1] = shared.ref[(k & 1) ^ 1][row + 8];
        }
        if (k >= 2) mbarrier_wait(AT(p_empty) + 8 * (k & 1), (k / 2 - 1) & 1); // P, factors of two blocks ago have been used
        bool moves = false;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool up = most[i] > before[i] + 8.5f;
            const float to = up ? most[i] - 6.0f : before[i];
            if (lane % 4 == 0) shared.ref[k & 1][row + 8 * i] = to, shared.factor[k & 1][row + 8 * i] = ex2(before[i] - to);
            sum[i] *= ex2(ref[i] - to), ref[i] = to, moves |= up;
        }
        const uint32_t any = __ballot_sync(~0u, moves);
        if (lane == 0) shared.moved[k & 1][warp] = any;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(AT(ref_full[k & 1]) + 8 * warp);
#pragma unroll
        for (int e = 0; e < 32; e++) s[e] = ex2(fmaf(s[e], p.scale_log2, -ref[e / 2 % 2])), sum[e / 2 % 2] += s[e];
        uint32_t low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            low[i] = e4m3x4(s[8 * i], s[8 * i + 1], s[8 * i + 4], s[8 * i + 5]);
            high[i] = e4m3x4(s[8 * i + 2], s[8 * i + 3], s[8 * i + 6], s[8 * i + 7]);
        }
        const uint32_t at = 16 * warp + lane % 8, i = lane / 8, to = AT(p) + (k & 1) * 64 * 64 + at * 64 + ((i ^ (at >> 1 & 3)) << 4);
        store_matrices(to, low), store_matrices(to + 8 * 64, high); // eight rows on the swizzle is the same
        fence_async_shared();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(AT(p_full) + 8 * (k & 1));
    }

    __device__ void run(int request, int tile)
    {
        float s[32], ref[2] = {-1e30f, -1e30f}, sum[2] = {0, 0};
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int i = 0; i < 32; i++) o[m][i] = 0.0f;
        mbarrier_wait(AT(q_full), 0);
        multiply_keys(s, side);
        uint32_t a[8][4];
        for (int k = side; __any_sync(~0u, k < blocks); k += 2) {
            WAITG(0);
            keep(s);
            softmax(s, k, ref, sum);
            if (__any_sync(~0u, k > 0)) {
                multiply_block(a, k - 1);
                WAITG(0);
                keep_o();
                done_with(k - 1);
            }
            multiply_block(a, k);
            multiply_keys(s, k + 2);
            WAITG(1);
            keep_o();
            done_with(k);
        }
        WAITG(0);
        keep(s);
        // The last block is of the other side.
        if (__any_sync(~0u, blocks > 0 && ((blocks - 1) & 1) != side)) {
            multiply_block(a, blocks - 1);
            WAITG(0);
            keep_o();
            done_with(blocks - 1);
        }
        // Sums of both sides, relative to the last reference.
        const int row = 16 * warp + lane / 4, last = (blocks - 1) & 1;
        barrier_sync(1, 2 * WG);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float to = shared.ref[last][row + 8 * i];
            sum[i] *= ex2(ref[i] - to);
            sum[i] += __shfl_xor_sync(~0u, sum[i], 1), sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
            if (lane % 4 == 0) shared.sum[side][row + 8 * i] = ref[i] < -1e29f ? 0.0f : sum[i];
        }
        barrier_sync(1, 2 * WG);
        uint16_t *out = p.out + ((int64_t)request * p.rows + tile * ROWS) * DV;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int head = 8 * n + 2 * (lane % 4) + h;
                const float by = p.v_scale / (shared.sum[0][head] + shared.sum[1][head]);
                if (tile * ROWS + head >= p.rows) continue;
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    uint32_t word;
                    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(o[m][4 * n + 2 + h] * by), "f"(o[m][4 * n + h] * by));
                    *(uint32_t *)(out + head * DV + 256 * side + 64 * m + 16 * warp + 2 * (lane / 4)) = word;
                }
            }
    }
};

__global__ void __launch_bounds__(THREADS, 1) dense_fp8(const __grid_constant__ Params p)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(memory);
    const int part = blockIdx.x % p.parts, tile = blockIdx.x / p.parts % p.tiles, request = blockIdx.x / p.parts / p.tiles;
    const int all = (p.s_k + KEYS - 1) / KEYS, begin = (int)((int64_t)all * part / p.parts), end = (int)((int64_t)all * (part + 1) / p.parts);
    if (threadIdx.x == 0) {
        for (int i = 0; i < BUFFERS; i++) mbarrier_init(AT(full) + 8 * i, 1), mbarrier_init(AT(empty) + 8 * i, 8);
        for (int i = 0; i < 2; i++) {
            mbarrier_init(AT(p_full) + 8 * i, 4), mbarrier_init(AT(p_empty) + 8 * i, 8);
            for (int w = 0; w < 4; w++) mbarrier_init(AT(ref_full[i]) + 8 * w, 1);
        }
        mbarrier_init(AT(q_full), 1);
        mbarrier_fence_init();
    }
    __syncthreads();
    if (threadIdx.x < WG) {
        give_registers<24>();
        if (threadIdx.x / 32 == 0 && elect_one()) {
            mbarrier_arrive_expect(AT(q_full), BLOCK_BYTES);
            for (int t = 0; t < 4; t++) load2d(AT(q) + t * TILE, &p.q, AT(q_full), 128 * t, request * p.rows + tile * ROWS);
            load2d(AT(q) + 4 * TILE, &p.q_end, AT(q_full), 512, request * p.rows + tile * ROWS);
            for (int k = 0; k < end - begin; k++) {
                const int buffer = k % BUFFERS, page = p.table[request * p.pages + begin + k];
                mbarrier_wait_thread(AT(empty) + 8 * buffer, (k / BUFFERS & 1) ^ 1);
                const uint32_t to = AT(keys) + buffer * BLOCK_BYTES, full = AT(full) + 8 * buffer;
                mbarrier_arrive_expect(full, BLOCK_BYTES);
                for (int t = 0; t < 4; t++) load2d(to + t * TILE, &p.keys, full, 128 * t, page * KEYS);
                load2d(to + 4 * TILE, &p.keys_end, full, 512, page * KEYS);
            }
        }
    } else {
        take_registers<240>();
        const int side = __shfl_sync(~0u, (int)threadIdx.x / WG - 1, 0);
        Side work{p, shared, base, side, (int)threadIdx.x / 32 % 4, (int)threadIdx.x % 32, end - begin, p.s_k - begin * KEYS};
        work.run(request, tile);
    }
}

static float from_e4m3(uint8_t c)
{
    const int e = c >> 3 & 15, m = c & 7;
    if ((c & 127) == 127) return NAN;
    const float v = e ? ldexpf(1 + m / 8.0f, e - 7) : ldexpf(m / 8.0f, -6);
    return c & 128 ? -v : v;
}
#define C(x) do { int r_ = (int)(x); if (r_) { printf("%s: %d\n", #x, r_); exit(1); } } while (0)
static void map2d(CUtensorMap *m, void *at, uint64_t rows, int box, CUtensorMapSwizzle swizzle)
{
    cuuint64_t dim[2] = {D, rows}, stride[1] = {D};
    cuuint32_t b[2] = {(cuuint32_t)box, 64}, el[2] = {1, 1};
    C(cuTensorMapEncodeTiled(m, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, at, dim, stride, b, el, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}
int main(int n, char **argument)
{
    C(cudaFree(0));
    C(cudaFuncSetAttribute(dense_fp8, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(Shared)));
    for (int a = 1; a < n; a++) {
        int b, rows, s_k, parts, check;
        if (sscanf(argument[a], "%d,%d,%d,%d,%d", &b, &rows, &s_k, &parts, &check) != 5) return 1;
        const int pages = (s_k + 63) / 64, tiles = (rows + 63) / 64;
        std::vector<uint8_t> keys((size_t)b * pages * 64 * D), q((size_t)b * rows * D);
        std::vector<int> table(b * pages);
        uint64_t seed = 12345 + a;
        auto draw = [&] { seed = seed * 6364136223846793005ull + 1442695040888963407ull; return (uint32_t)(seed >> 33); };
        for (auto &x : keys) { x = (uint8_t)(draw() & 0xbf); if ((x & 0x3f) > 0x38) x &= 0xb8; }
        for (auto &x : q) { x = (uint8_t)(draw() & 0xbf); if ((x & 0x3f) > 0x34) x &= 0xb4; }
        for (int i = 0; i < b * pages; i++) table[i] = i;
        for (int i = b * pages - 1; i > 0; i--) std::swap(table[i], table[draw() % (i + 1)]);
        uint8_t *dk, *dq; int *dt; uint16_t *out;
        C(cudaMalloc(&dk, keys.size())); C(cudaMalloc(&dq, q.size() + 64 * D)); C(cudaMalloc(&dt, table.size() * 4)); C(cudaMalloc(&out, (size_t)b * rows * DV * 2));
        C(cudaMemcpy(dk, keys.data(), keys.size(), cudaMemcpyDefault)); C(cudaMemcpy(dq, q.data(), q.size(), cudaMemcpyDefault)); C(cudaMemcpy(dt, table.data(), table.size() * 4, cudaMemcpyDefault));
        C(cudaMemset(out, 0xff, (size_t)b * rows * DV * 2));
        Params p = {};
        map2d(&p.keys, dk, (uint64_t)b * pages * 64, 128, CU_TENSOR_MAP_SWIZZLE_128B), map2d(&p.keys_end, dk, (uint64_t)b * pages * 64, 64, CU_TENSOR_MAP_SWIZZLE_64B);
        map2d(&p.q, dq, (uint64_t)b * rows, 128, CU_TENSOR_MAP_SWIZZLE_128B), map2d(&p.q_end, dq, (uint64_t)b * rows, 64, CU_TENSOR_MAP_SWIZZLE_64B);
        p.table = dt, p.out = out, p.pages = pages, p.s_k = s_k, p.tiles = tiles, p.parts = parts, p.rows = rows, p.v_scale = 1.0f;
        const float scale = 0.02f;
        p.scale_log2 = scale * 1.4426950408889634f;
        cudaEvent_t e0, e1;
        cudaEventCreate(&e0), cudaEventCreate(&e1);
        std::vector<float> t;
        for (int i = 0; i < 7; i++) {
            cudaEventRecord(e0);
            dense_fp8<<<b * tiles * parts, THREADS, sizeof(Shared)>>>(p);
            cudaEventRecord(e1);
            C(cudaDeviceSynchronize());
            float ms; cudaEventElapsedTime(&ms, e0, e1); t.push_back(ms * 1e3f);
        }
        std::sort(t.begin(), t.end());
        double worst = 0, dot = 0, norm = 0;
        if (check && parts == 1) {
            std::vector<uint16_t> r((size_t)b * rows * DV);
            C(cudaMemcpy(r.data(), out, r.size() * 2, cudaMemcpyDefault));
            for (int c = 0; c < check; c++) {
                const int request = draw() % b, row = draw() % rows;
                std::vector<double> w(s_k), o(DV, 0.0);
                double most = -1e300, sum = 0;
                for (int k = 0; k < s_k; k++) {
                    const uint8_t *key = &keys[((size_t)table[request * pages + k / 64] * 64 + k % 64) * D];
                    double x = 0;
                    for (int i = 0; i < D; i++) x += (double)from_e4m3(q[((size_t)request * rows + row) * D + i]) * from_e4m3(key[i]);
                    w[k] = x * scale, most = std::max(most, w[k]);
                }
                for (int k = 0; k < s_k; k++) {
                    const uint8_t *key = &keys[((size_t)table[request * pages + k / 64] * 64 + k % 64) * D];
                    w[k] = exp(w[k] - most), sum += w[k];
                    for (int i = 0; i < DV; i++) o[i] += w[k] * from_e4m3(key[i]);
                }
                for (int i = 0; i < DV; i++) {
                    uint32_t bits = (uint32_t)r[((size_t)request * rows + row) * DV + i] << 16;
                    float got; memcpy(&got, &bits, 4);
                    const double want = o[i] / sum;
                    worst = std::max(worst, std::isfinite(got) ? fabs(got - want) : 1e9), dot += got * want, norm += (double)got * got + want * want;
                }
            }
        }
        const double flop = 2.0 * b * rows * (double)s_k * (D + DV), bytes = (double)b * s_k * D;
        printf("b %4d rows %4d s_k %7d parts %3d: %8.1f us (least %8.1f) %6.0f TFLOP/s %5.2f TB/s", b, rows, s_k, parts, t[t.size() / 2], t[0], flop / t[t.size() / 2] * 1e-6, bytes / t[t.size() / 2] * 1e-6);
        if (check) printf("   worst %.4f cosine %.2e", worst, 1 - 2 * dot / norm);
        printf("\n"); fflush(stdout);
        cudaFree(dk), cudaFree(dq), cudaFree(dt), cudaFree(out);
    }
    return 0;
}
