// Sparse decode over FP8_656 on Hopper, 64 heads a block of threads: keys go through registers.
//
//   warpgroup 0, scores   loads raw keys (a thread: 16 columns of every 64, of two keys), makes bf16 of them, which are at
//                         once A of S^T = K Q^T and, stored to shared memory, V; softmax of S^T; P to shared memory
//   warpgroups 1, 2       O of 256 columns each += P V; the second one's product waits until the next block's score products have ended, for its
//                         softmax, during which the tensor cores would have nothing to do
//
// Raw keys come by cp.async, every thread its own, into as much shared memory as a block of raw keys takes; a slot is asked for
// anew as soon as it has been read, so that 42 KB an SM are always under way. V has room for one block and a half.
// Column order: of every 64 columns lane t of four has 16, four of them (c0..c3, one raw word) in each step of 16: as k = 2t, 2t + 1
// and 2t + 8, 2t + 9 of A's fragment. Q is permuted likewise; V, stored by stmatrix from the fragments, and O have the same
// order, so that a thread ends with 16 neighbouring columns of every 64. bf16 (bit moves) makes the pairs (c0, c2), (c1, c3),
// fp16 (-DFP16: cvt) (c0, c1), (c2, c3).
#pragma once
#include "../../src/cuda/device/element.cuh"
#include "../../src/cuda/device/mbarrier.cuh"
#include "../../src/cuda/device/shared.cuh"
#include "../../src/cuda/device/warpgroup.cuh"
#include "../../src/cuda/device/wgmma.cuh"

struct sparse_params {
    const uint16_t *q;      // [tokens, heads, 576]
    const uint8_t *cache;   // [keys, 656]
    const int32_t *indices; // [tokens, topk]
    uint16_t *out;          // [tokens, heads, 512]
    float *lse;             // [tokens, heads]
    int tokens, heads, topk, keys;
    float scale_log2;
    long long *clocks; // of block 0: waits for V's place, Q·Kᵀ with it, softmax, blocks; P·V's waits for P, P·V
};

#ifdef LAB_CLOCK
#define CLOCK() clock64()
#else
#define CLOCK() 0ll
#endif
enum { ROWS = 64, KEYS = 64, WG = 128, THREADS = 3 * WG, TILES = 9, TOKEN_BYTES = 656 };
#ifndef SCORE_REGISTERS
#define SCORE_REGISTERS 184
#endif
#ifndef PV_REGISTERS
#define PV_REGISTERS 160
#endif

enum { HALVES = 3 /* of V: 4 tiles of 64 columns each */, HALF_BYTES = 4 * TILE_BYTES };
struct Shared {
    unsigned char v[HALVES][HALF_BYTES];
    unsigned char q[TILES][TILE_BYTES];
    unsigned char p[2][TILE_BYTES];
    unsigned char raw[8][2][WG][16], rope[2][2][WG][16], scale[KEYS][16];
    float factor[2][ROWS], sum[ROWS], last_reference[ROWS];
    uint32_t moved[2];
    uint64_t full[2], empty[HALVES], sum_full, sum_empty, products_done;
};
static_assert(sizeof(Shared) <= 227 * 1024, "");
#define AT(member) (base + (uint32_t)offsetof(Shared, member))

__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#define SUMS_128(d) WGMMA_SUMS_32(d, 0), WGMMA_SUMS_32(d, 32), WGMMA_SUMS_32(d, 64), WGMMA_SUMS_32(d, 96)
#define NAMES_128 WGMMA_NAMES_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
__device__ __forceinline__ void wgmma_256_columns(float (&d)[128], uint64_t a, uint64_t b, int add)
{
#ifdef FP16
    asm volatile(WGMMA("m64n256k16", "f16", NAMES_128, "%130", "%128", "%129", "0, 1")
                 : SUMS_128(d) : "l"(a), "l"(b), "r"(add));
    return;
#endif
    asm volatile(WGMMA("m64n256k16", "bf16", NAMES_128, "%130", "%128", "%129", "0, 1")
                 : SUMS_128(d) : "l"(a), "l"(b), "r"(add));
}

__device__ __forceinline__ uint4 load_16(const uint8_t *from, bool valid)
{
    uint4 r;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
                 "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(r.x), "=&r"(r.y), "=&r"(r.z), "=&r"(r.w) : "l"(from), "r"((int)valid));
    return r;
}

__device__ __forceinline__ void store_16(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Four e4m3 values c0..c3 → (c0, c2), (c1, c3) in bf16; `scale` holds scale · 2^120 twice.
__device__ __forceinline__ void convert(uint32_t w, uint32_t scale, uint32_t &even, uint32_t &odd)
{
    even = mul_bf16x2(((w << 8) & 0x80008000u) | ((w << 4) & 0x07f007f0u), scale);
    odd = mul_bf16x2((w & 0x80008000u) | ((w >> 4) & 0x07f007f0u), scale);
}

__device__ __forceinline__ bool any_of_128(int barrier, bool mine)
{
    uint32_t any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(any) : "r"((int)mine), "r"(barrier) : "memory");
    return any;
}

#ifdef FP16
// Four e4m3 values c0..c3 → (c0, c1), (c2, c3) in fp16, times scale (twice in a word).
__device__ __forceinline__ void convert_fp16(uint32_t w, uint32_t scale, uint32_t &low, uint32_t &high)
{
    uint32_t a, b;
    asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.rn.f16x2.e4m3x2 %0, x;\ncvt.rn.f16x2.e4m3x2 %1, y;\n}" : "=r"(a), "=r"(b) : "r"(w));
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(low) : "r"(a), "r"(scale));
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(high) : "r"(b), "r"(scale));
}
__device__ __forceinline__ uint32_t to_fp16(uint32_t w)
{
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(__uint_as_float(w & 0xffff0000u)), "f"(__uint_as_float(w << 16)));
    return r;
}
#define convert convert_fp16
using Work = Fp16;
#else
using Work = Bf16;
#endif

// The blocks of all items of this block of threads, one after the other.
struct Walk {
    int item, block;
};

struct Score {
    const sparse_params &p;
    Shared &shared;
    uint32_t base;
    int tiles, items, blocks;
    float4 scale[2];
    uint4 raw[3][2];
    bool valid[2], next_valid[2];
    const uint8_t *next[2];
    int index[2];
    const int32_t *indices; // of the token `ahead`
    Walk ahead; // whose indices are in `index`
    float s[32], sums[16], reference[16]; // of heads 8 (h / 2) + 2 (lane % 4) + h % 2
    uint32_t count = 0, half = 0, half_parity = 0;
    long long clocks[4] = {};

    __device__ __forceinline__ Score(const sparse_params &params, Shared &memory, uint32_t address)
        : p(params), shared(memory), base(address)
    {
        tiles = (p.heads + ROWS - 1) / ROWS, items = p.tokens * tiles, blocks = (p.topk + KEYS - 1) / KEYS;
    }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
    static __device__ __forceinline__ int key(int i) { return 16 * warp() + lane() / 4 + 8 * i; }

    __device__ __forceinline__ void find_indices() { indices = p.indices + (int64_t)(ahead.item / tiles) * p.topk; }
    __device__ __forceinline__ void load_indices()
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = ahead.block * KEYS + key(i);
            index[i] = ahead.item < items && at < p.topk ? __ldg(indices + at) : -1;
        }
        if (++ahead.block == blocks) ahead.block = 0, ahead.item += gridDim.x, find_indices();
    }
    __device__ __forceinline__ void take_indices()
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            next_valid[i] = (uint32_t)index[i] < (uint32_t)p.keys;
            next[i] = p.cache + (next_valid[i] ? (int64_t)index[i] : 0) * TOKEN_BYTES + 16 * (lane() % 4);
        }
    }
    // Chunk c of this block, from shared memory.
    __device__ __forceinline__ void take_raw(int c)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) raw[c % 3][i] = load_shared_16(AT(raw) + ((c * 2 + i) * WG + threadIdx.x) * 16);
    }
    // Raw bytes of the next block; a group each.
    __device__ __forceinline__ void ask_chunk(int c)
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
            cp_async_16(AT(raw) + ((c * 2 + i) * WG + threadIdx.x) * 16, next[i] + 64 * c, next_valid[i]);
        cp_async_commit();
    }
    __device__ __forceinline__ void ask_rope_and_scales()
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint8_t *token = next[i] - 16 * (lane() % 4);
#pragma unroll
            for (int h = 0; h < 2; h++)
                cp_async_16(AT(rope) + ((i * 2 + h) * WG + threadIdx.x) * 16, token + 528 + 16 * (lane() % 4) + 64 * h, next_valid[i]);
        }
        const int t = lane() % 4;
        const uint8_t *const scales_of = t ? next[1] : next[0];
        const bool there = t ? next_valid[1] : next_valid[0];
        if (t < 2) cp_async_16(AT(scale) + (key(0) + 8 * t) * 16, scales_of - 16 * t + 512, there);
        cp_async_commit();
    }
    __device__ __forceinline__ void first_loads()
    {
        ahead = {(int)blockIdx.x, 0};
        find_indices();
        load_indices(), take_indices(), load_indices();
        ask_rope_and_scales();
#pragma unroll
        for (int c = 0; c < 8; c++) ask_chunk(c);
    }

    __device__ __forceinline__ void prefetch_q(int item)
    {
        if (item >= items) return;
        const int token = item / tiles, first = item % tiles * ROWS, heads = min(ROWS, p.heads - first);
        const char *from = (const char *)(p.q + ((int64_t)token * p.heads + first) * 576);
        for (int line = threadIdx.x; line < heads * 9; line += WG) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + 128 * line));
    }

    __device__ __forceinline__ void load_q(int item)
    {
        const int token = item / tiles, first = item % tiles * ROWS;
        barrier_sync(1, WG); // all products with the old Q are done
        // Eight lanes take 128 bytes of a head, so that both sides of the copy take all banks and whole sectors.
        const int u = lane() % 8, t = u / 2, head_0 = 4 * warp() + lane() / 8;
        const uint4 *from = (const uint4 *)(p.q + ((int64_t)token * p.heads + first) * 576) + u;
#pragma unroll 1
        for (int part = 0; part < 2; part++) {
            uint4 w[5][4];
#pragma unroll
            for (int i = 0; i < 20; i++) {
                const int head = head_0 + 16 * (i % 4), c = 5 * part + i / 4;
                w[i / 4][i % 4] = c < TILES && first + head < p.heads ? __ldg(from + head * 72 + c * 8) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < 20; i++) {
                const int c = 5 * part + i / 4, head = head_0 + 16 * (i % 4);
                const uint32_t line = AT(q) + c * TILE_BYTES + head * 128 + 4 * (c < 8 ? t : u % 4);
                if (c >= TILES) continue;
                const uint4 x = w[i / 4][i % 4];
#ifdef FP16
                const uint32_t in[4] = {c < 8 ? to_fp16(x.x) : x.x, c < 8 ? to_fp16(x.y) : x.y, c < 8 ? to_fp16(x.z) : x.z, c < 8 ? to_fp16(x.w) : x.w};
#else
                const uint32_t in[4] = {x.x, x.y, x.z, x.w};
#endif
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int step = 2 * (c < 8 ? u % 2 : u / 4) + half; // rope values: 8 neighbours in either half of the 64
                    const uint32_t a = in[2 * half], b = in[2 * half + 1];
                    const bool pairs = c < 8 && Work::IS_BF16; // (c0, c2), (c1, c3)
                    const uint32_t low = pairs ? __byte_perm(a, b, 0x5410) : a, high = pairs ? __byte_perm(a, b, 0x7632) : b;
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(line + ((2 * step ^ (head & 7)) * 16)), "r"(low) : "memory");
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(line + (((2 * step + 1) ^ (head & 7)) * 16)), "r"(high) : "memory");
                }
            }
        }
        fence_async_shared();
        barrier_sync(1, WG);
    }

    __device__ __forceinline__ uint32_t scale_of(int i, int c) const
    {
        const float f = c < 2 ? scale[i].x : c < 4 ? scale[i].y : c < 6 ? scale[i].z : scale[i].w;
#ifdef FP16
        return Fp16::pack(f, f);
#endif
        const float g = f * 0x1p120f;
        return Bf16::pack(g, g);
    }

    // S^T, V stored; and the next block's raw keys asked for.
    __device__ __forceinline__ void score_block()
    {
        cp_async_wait<6>();
        __syncwarp();
        take_raw(0), take_raw(1);
        uint4 rope[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            valid[i] = next_valid[i];
            const uint4 w = load_shared_16(AT(scale) + key(i) * 16);
            scale[i] = make_float4(__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w));
#pragma unroll
            for (int h = 0; h < 2; h++) rope[i][h] = load_shared_16(AT(rope) + ((i * 2 + h) * WG + threadIdx.x) * 16);
        }
        hold(s);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint4 &a = rope[0][k / 2], &b = rope[1][k / 2];
            const uint32_t frag[4] = {k % 2 ? a.z : a.x, k % 2 ? b.z : b.x, k % 2 ? a.w : a.y, k % 2 ? b.w : b.y};
            wgmma_64<Bf16>(s, frag, wgmma_lines(AT(q) + 8 * TILE_BYTES, k), k > 0); // rope stays bf16
        }
        wgmma_commit();
        take_indices(), load_indices();
        __syncwarp(); // every lane has its scales
        ask_rope_and_scales();
        // Of matrix l / 8 of a step: keys 0 to 7 or 8 to 15 of the warp's, the first or last eight of the step's columns.
        const uint32_t my_key = 16 * warp() + lane() % 16;
        const uint32_t v_line = AT(v) + my_key * 128 + ((lane() / 16) ^ (my_key & 7)) * 16;
        uint32_t at[4]; // where a step's matrices go: registers of their own, so that no store waits for one before it
        uint32_t frag[2][4][4];
#pragma unroll
        for (int c = 0; c < 8; c++) {
            if (c >= 1) wgmma_wait<1>();
            if (c % 4 == 0) {
                const long long a = CLOCK();
                mbarrier_wait(AT(empty) + 8 * half, (half_parity ^ 1) & 1);
                clocks[0] += CLOCK() - a;
#pragma unroll
                for (int k = 0; k < 4; k++) at[k] = (v_line ^ (32 * k)) + half * HALF_BYTES;
            }
            uint32_t (&f)[4][4] = frag[c % 2];
            const uint32_t scales[2] = {scale_of(0, c), scale_of(1, c)};
            if (c < 6) cp_async_wait<6>(), take_raw(c + 2);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint4 x = raw[c % 3][i];
                convert(x.x, scales[i], f[0][i], f[0][i + 2]);
                convert(x.y, scales[i], f[1][i], f[1][i + 2]);
                convert(x.z, scales[i], f[2][i], f[2][i + 2]);
                convert(x.w, scales[i], f[3][i], f[3][i + 2]);
            }
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++) wgmma_64<Work>(s, f[k], wgmma_lines(AT(q) + c * TILE_BYTES, k), 1);
            wgmma_commit();
            ask_chunk(c);
#pragma unroll
            for (int k = 0; k < 4; k++) store_matrices(at[k] + c % 4 * TILE_BYTES, f[k]);
            if (c % 4 == 3 && ++half == HALVES) half = 0, half_parity ^= 1;
        }
        wgmma_wait<0>();
        hold(s);
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(AT(products_done));
    }

    __device__ __forceinline__ void softmax(bool first)
    {
        const uint32_t buffer = count & 1;
        const int t = lane() % 4;
        float (*most)[ROWS] = (float (*)[ROWS])shared.p[buffer]; // free until P goes there
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (!valid[i])
#pragma unroll
                for (int j = 0; j < 8; j++) s[4 * j + 2 * i] = s[4 * j + 2 * i + 1] = -INFINITY;
        float over = -INFINITY;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 r = make_float2(reference[2 * j], reference[2 * j + 1]);
            over = fmaxf(over, fmaxf(fmaf(fmaxf(s[4 * j], s[4 * j + 2]), p.scale_log2, -r.x),
                                     fmaf(fmaxf(s[4 * j + 1], s[4 * j + 3]), p.scale_log2, -r.y)));
        }
        const bool moves = any_of_128(1, first || over > 8.0f);
        if (moves) {
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float m = fmaxf(s[4 * j + e], s[4 * j + 2 + e]) * p.scale_log2;
                    m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
                    m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
                    m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
                    if (lane() < 4) most[warp()][8 * j + 2 * t + e] = m;
                }
            barrier_sync(1, WG);
#pragma unroll
            for (int h = 0; h < 16; h++) {
                const int head = 8 * (h / 2) + 2 * t + h % 2;
                const float m = fmaxf(fmaxf(most[0][head], most[1][head]), fmaxf(most[2][head], most[3][head]));
                const float to = fmaxf(m, first ? -1e30f : reference[h]), factor = first ? 0.0f : exp2_fast(reference[h] - to);
                sums[h] *= factor, reference[h] = to;
                if (lane() < 4 && warp() == 0) shared.factor[buffer][head] = factor;
            }
            barrier_sync(1, WG); // P goes where the maxima are
        }
        if (threadIdx.x == 0) shared.moved[buffer] = moves && !first;
        const uint32_t line = AT(p) + buffer * TILE_BYTES;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            uint32_t words[4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 r = make_float2(reference[2 * (j + h)], reference[2 * (j + h) + 1]);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float x = exp2_fast(fmaf(s[4 * (j + h) + 2 * i], p.scale_log2, -r.x)),
                                y = exp2_fast(fmaf(s[4 * (j + h) + 2 * i + 1], p.scale_log2, -r.y));
                    sums[2 * (j + h)] += x, sums[2 * (j + h) + 1] += y;
                    words[2 * h + i] = Work::pack(x, y);
                }
            }
            const int m = lane() / 8, head = 8 * (j + m / 2) + lane() % 8;
            const uint32_t to = line + head * 128 + (((2 * warp() + m % 2) ^ (head & 7)) * 16);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
                         "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
        }
        fence_async_shared();
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(AT(full) + 8 * buffer);
    }

    __device__ __forceinline__ void run()
    {
        first_loads();
        uint32_t done = 0;
        for (int item = blockIdx.x; item < items; item += gridDim.x, done++) {
            load_q(item);
#pragma unroll
            for (int i = 0; i < 16; i++) sums[i] = 0.0f;
            for (int k = 0; k < blocks; k++, count++) {
                if (k == max(blocks - 4, 0)) prefetch_q(item + gridDim.x); // not earlier: the keys stream through L2
                const long long a = CLOCK();
                score_block();
                const long long b = CLOCK();
                softmax(k == 0);
                if (p.clocks) clocks[1] += b - a, clocks[2] += CLOCK() - b, clocks[3]++;
            }
            mbarrier_wait(AT(sum_empty), (done & 1) ^ 1);
            float (*parts)[ROWS] = (float (*)[ROWS])shared.q[0]; // nobody reads Q any more
#pragma unroll
            for (int h = 0; h < 16; h++) {
                float x = sums[h];
                x += __shfl_xor_sync(~0u, x, 4), x += __shfl_xor_sync(~0u, x, 8), x += __shfl_xor_sync(~0u, x, 16);
                if (lane() < 4) parts[warp()][8 * (h / 2) + 2 * (lane() % 4) + h % 2] = x;
            }
            barrier_sync(1, WG);
            if (threadIdx.x < ROWS)
                shared.sum[threadIdx.x] = parts[0][threadIdx.x] + parts[1][threadIdx.x] + parts[2][threadIdx.x] + parts[3][threadIdx.x];
            if (threadIdx.x < 4)
#pragma unroll
                for (int h = 0; h < 16; h++) shared.last_reference[8 * (h / 2) + 2 * lane() + h % 2] = reference[h];
            __syncwarp();
            if (lane() == 0) mbarrier_arrive(AT(sum_full));
        }
        if (p.clocks && blockIdx.x == 0 && threadIdx.x == 0)
            for (int i = 0; i < 4; i++) p.clocks[i] = clocks[i];
    }
};

struct Multiply {
    const sparse_params &p;
    Shared &shared;
    uint32_t base;
    float o[128];

    __device__ __forceinline__ Multiply(const sparse_params &params, Shared &memory, uint32_t address)
        : p(params), shared(memory), base(address)
    {
    }
    __device__ __forceinline__ void run()
    {
        const int tiles = (p.heads + ROWS - 1) / ROWS, items = p.tokens * tiles, blocks = (p.topk + KEYS - 1) / KEYS;
        const int lane = threadIdx.x % 32, side = threadIdx.x / WG - 1, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
        long long waited = 0, worked = 0;
        uint32_t count = 0, done = 0, half = side;
#pragma unroll
        for (int i = 0; i < 128; i++) o[i] = 0.0f;
        for (int item = blockIdx.x; item < items; item += gridDim.x, done++) {
            for (int k = 0; k < blocks; k++, count++) {
                const uint32_t buffer = count & 1;
                const long long a = CLOCK();
                mbarrier_wait(AT(full) + 8 * buffer, count >> 1 & 1);
                // The tensor cores have nothing to do during softmax: the second warpgroup's product is kept for it, until the
                // products of the next block's scores have ended (not those of the next item).
                if (side == 1 && k + 1 < blocks) mbarrier_wait(AT(products_done), (count + 1) & 1);
                const long long b = CLOCK();
                if (__any_sync(~0u, shared.moved[buffer])) {
                    const float factor[2] = {shared.factor[buffer][row], shared.factor[buffer][row + 8]};
#pragma unroll
                    for (int i = 0; i < 128; i++) o[i] *= factor[i / 2 % 2];
                }
                hold(o);
                wgmma_fence();
                const uint32_t v = AT(v) + half * HALF_BYTES;
#pragma unroll
                for (int s = 0; s < 4; s++)
                    wgmma_256_columns(o, wgmma_lines(AT(p) + buffer * TILE_BYTES, s), wgmma_columns(v, s), s > 0 || k > 0);
                wgmma_commit();
                wgmma_wait<0>();
                hold(o);
                if (lane == 0) mbarrier_arrive(AT(empty) + 8 * half);
                waited += b - a, worked += CLOCK() - b;
                half += 2;
                if (half >= HALVES) half -= HALVES;
            }
            mbarrier_wait(AT(sum_full), done & 1);
            const int token = item / tiles, first = item % tiles * ROWS;
            float inverse[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int r = row + 8 * i;
                const float sum = shared.sum[r];
                inverse[i] = sum == 0.0f ? 0.0f : 1.0f / sum;
                if (side == 0 && lane % 4 == 0 && first + r < p.heads)
                    p.lse[(int64_t)token * p.heads + first + r] =
                        sum == 0.0f ? INFINITY : (shared.last_reference[r] + log2f(sum)) * 0.69314718056f;
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(AT(sum_empty));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (first + row + 8 * i >= p.heads) continue;
                uint16_t *to = p.out + ((int64_t)token * p.heads + first + row + 8 * i) * 512 + side * 256 + 16 * (lane % 4);
#pragma unroll
                for (int c = 0; c < 4; c++)
#pragma unroll
                    for (int h = 0; h < 2; h++) { // 8 of the 16 columns that this thread has of 64
                        uint32_t w[4];
#pragma unroll
                        for (int k = 0; k < 2; k++) {
                            const float *even = o + 32 * c + 8 * (2 * h + k) + 2 * i, *odd = even + 4;
#ifdef FP16
                            w[2 * k] = Bf16::pack(even[0] * inverse[i], even[1] * inverse[i]);
                            w[2 * k + 1] = Bf16::pack(odd[0] * inverse[i], odd[1] * inverse[i]);
#else
                            w[2 * k] = Bf16::pack(even[0] * inverse[i], odd[0] * inverse[i]);
                            w[2 * k + 1] = Bf16::pack(even[1] * inverse[i], odd[1] * inverse[i]);
#endif
                        }
                        *(uint4 *)(to + 64 * c + 8 * h) = make_uint4(w[0], w[1], w[2], w[3]);
                    }
            }
        }
        if (p.clocks && blockIdx.x == 0 && threadIdx.x == WG) p.clocks[4] = waited, p.clocks[5] = worked;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_kernel(const __grid_constant__ sparse_params p)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    const uint32_t base = shared_address(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) mbarrier_init(AT(full) + 8 * i, 4);
        for (int i = 0; i < HALVES; i++) mbarrier_init(AT(empty) + 8 * i, 4);
        mbarrier_init(AT(products_done), 4), mbarrier_init(AT(sum_full), 4), mbarrier_init(AT(sum_empty), 8);
        mbarrier_fence_init();
    }
    __syncthreads();
    if (threadIdx.x < WG) {
        take_registers<SCORE_REGISTERS>();
        Score(p, shared, base).run();
    } else {
        give_registers<PV_REGISTERS>();
        Multiply(p, shared, base).run();
    }
}
