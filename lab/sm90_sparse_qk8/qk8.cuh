// Sparse decode over FP8_656 on Hopper, 64 heads a block of threads: the raw e4m3 bytes are operand A of S^T = K Q^T.
//
//   warpgroup 0, scores   asks for raw keys (cp.async; a thread: 16 columns of every 64, of two keys), multiplies them as they are with
//                         Q = (q1 + q2) / 256, two e4m3 parts; sums of 128 columns times their scales; softmax; P
//   warpgroups 1, 2, sums make fp16 V of the same raw bytes, two times 128 columns each, and O += P V
//
// Between them, for every 128 columns g: raw_full[g] (all raw bytes are there: 128 threads' cp.async), raw_free[g] (the sums' warps have
// read them; warpgroup 1 takes groups 0 and 2, warpgroup 2 groups 1 and 3). P: full, p_free. V belongs to a warpgroup: three places
// of 128 columns, in turns: the halves of block k + 1 take the third and, after its product, the first half's of block k.
// Column order: of every 64 columns lane t of four has 16, as words w0..w3. As bytes of A step 0 (K = 32) is w0 (k = 4t..), w1 (k = 16 + 4t..), step 1
// w2, w3; Q is permuted likewise. As fp16 V word j is k = 2t, 2t + 1 and 2t + 8, 2t + 9 of 16 columns, so that a thread ends with 16
// neighbouring columns of O of every 64.
#pragma once
#include "../../src/cuda/device/element.cuh"
#include "../../src/cuda/device/mbarrier.cuh"
#include "../../src/cuda/device/shared.cuh"
#include "../../src/cuda/device/warpgroup.cuh"
#include "../../src/cuda/device/wgmma.cuh"
#include <stddef.h>
#include <stdio.h>

struct sparse_params {
    const uint16_t *q;      // [tokens, heads, 576]
    const uint8_t *cache;   // [keys, 656]
    const int32_t *indices; // [tokens, topk]
    uint16_t *out;          // [tokens, heads, 512]
    float *lse;             // [tokens, heads]
    int tokens, heads, topk, keys;
    float scale_log2;
    unsigned *clocks; // [16], of block 0: see CLOCK_NAMES
};

enum { ROWS = 64, KEYS = 64, WG = 128, THREADS = 3 * WG, TILES = 9, TOKEN_BYTES = 656 };
#ifndef SCORE_REGISTERS
#define SCORE_REGISTERS 184
#endif
#ifndef PV_REGISTERS
#define PV_REGISTERS 160
#endif
#ifndef HEADS_AT_ONCE // of a product of K and Q
#define HEADS_AT_ONCE 32
#endif
#define Q_SCALE 256.0f // |q| <= 1: q * 256 has no digits below 1 / 1024 that count

enum { PLACES = 3 /* of V, of each warpgroup: 2 tiles of 64 columns each */, PLACE_BYTES = 2 * TILE_BYTES };
struct Shared {
    unsigned char v[2][PLACES][PLACE_BYTES];
    unsigned char q[TILES][TILE_BYTES]; // q1: 4 tiles of 128 columns; q2: 4; rope
    unsigned char p[2][TILE_BYTES];
    unsigned char raw[8][2][WG][16], rope[2][2][WG][16], scale[2][KEYS][16];
    float factor[2][ROWS], sum[ROWS];
    uint32_t moved[2];
    uint64_t full[2], p_free[2], raw_full[4], raw_free[4], sum_full, sum_empty;
    unsigned clocks[16];
};
static_assert(sizeof(Shared) <= 227 * 1024, "");
#define AT(member) (base + (uint32_t)offsetof(Shared, member))

// TICK(i) adds the clocks since the last one to clocks[i].
#ifdef LAB_CLOCK
#define TICK_BEGIN() unsigned tick_ = (unsigned)clock()
#define TICK(i) \
    do { \
        const unsigned now_ = (unsigned)clock(); \
        if (threadIdx.x % WG == 0 && threadIdx.x / WG < 2) asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(AT(clocks) + 4 * (i)), "r"(now_ - tick_) : "memory"); \
        tick_ = now_; \
    } while (0)
#define RETICK() tick_ = (unsigned)clock()
#else
#define RETICK() (void)0
#define TICK_BEGIN() (void)0
#define TICK(i) (void)0
#endif
#define CLOCK_NAMES \
    "S: scores", "S: of it raw_free", "S: wait p_free", "S: softmax", "S: item's rest", "S: blocks (count)", "S: of it wait raw 0", "S: wait raw 1", \
    "PV: wait P", "PV: wait raw, convert 0", "PV: wait A", "PV: wait raw, convert 1", "PV: wait B", "PV: item's rest", "S: wait raw 2", "S: wait raw 3"

// wait for a phase; LAB_BOUND: half a second at most; then it says so, and no wait waits any more, so that the kernel ends.
#ifdef LAB_BOUND
__device__ int stuck;
__device__ __noinline__ void bounded_wait(uint32_t barrier, uint32_t parity, int offset)
{
    const long long begin = clock64();
    while (!__all_sync(~0u, mbarrier_try(barrier, parity))) {
        if (__any_sync(~0u, *(volatile int *)&stuck == 2)) return;
        if (clock64() - begin < 800000000ll) continue;
        if (threadIdx.x % 32 == 0)
            printf("block %d warp %d waits for full[%d] p_free[%d] raw_full[%d] raw_free[%d] sum_full[%d] sum_empty[%d] (the smallest from 0 is it), parity %u\n", blockIdx.x, threadIdx.x / 32,
                   (offset - (int)offsetof(Shared, full)) / 8, (offset - (int)offsetof(Shared, p_free)) / 8, (offset - (int)offsetof(Shared, raw_full)) / 8,
                   (offset - (int)offsetof(Shared, raw_free)) / 8, (offset - (int)offsetof(Shared, sum_full)) / 8, (offset - (int)offsetof(Shared, sum_empty)) / 8, parity);
        const long long more = clock64();
        while (clock64() - more < 400000000ll) __nanosleep(1000); // others say their part
        *(volatile int *)&stuck = 2;
    }
}
#define WAIT(member, i, parity) bounded_wait(AT(member) + 8 * (i), parity, (int)offsetof(Shared, member) + 8 * (i))
#else
#define WAIT(member, i, parity) mbarrier_wait(AT(member) + 8 * (i), parity)
#endif

__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// D (+)= A B, K = 32: A in registers, B lines of 32 bytes.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WGMMA_NAMES_32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1;\n}"
                 : WGMMA_SUMS_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma_e4m3(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1;\n}"
                 : WGMMA_SUMS_8(d, 0), WGMMA_SUMS_8(d, 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ uint32_t mul_fp16x2(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ uint32_t sub_fp16x2(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ uint16_t to_e4m3(uint32_t fp16x2)
{
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(r) : "r"(fp16x2));
    return r;
}
__device__ __forceinline__ uint32_t from_e4m3(uint16_t two)
{
    uint32_t r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(two));
    return r;
}
// Two bf16 values of q to e4m3: q * 256 = first + second.
__device__ __forceinline__ void split_q(uint32_t two, uint32_t &first, uint32_t &second)
{
    const uint32_t x = Fp16::pack(__uint_as_float(two << 16) * Q_SCALE, __uint_as_float(two & 0xffff0000u) * Q_SCALE);
    const uint16_t a = to_e4m3(x);
    first = a;
    second = to_e4m3(sub_fp16x2(x, from_e4m3(a)));
}

// Four e4m3 values c0..c3 → (c0, c1), (c2, c3) in fp16, times scale (twice in a word).
__device__ __forceinline__ void convert(uint32_t w, uint32_t scale, uint32_t &low, uint32_t &high)
{
    uint32_t a, b;
    asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.rn.f16x2.e4m3x2 %0, x;\ncvt.rn.f16x2.e4m3x2 %1, y;\n}" : "=r"(a), "=r"(b) : "r"(w));
    low = mul_fp16x2(a, scale), high = mul_fp16x2(b, scale);
}

// All asynchronous copies of this thread so far, when they have come, are an arrival.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool any_of_128(int barrier, bool mine)
{
    uint32_t any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(any) : "r"((int)mine), "r"(barrier) : "memory");
    return any;
}
using Work = Fp16;

// The blocks of all items of this block of threads, one after the other.
struct Walk {
    int item, block;
};

struct Score {
    const sparse_params &p;
    Shared &shared;
    uint32_t base;
    int tiles, items, blocks;
    uint4 raw[2][2][2];
    float score_scale; // of S, which is 256 times too large
    bool valid[2], next_valid[2];
    const uint8_t *next[2];
    int index[2];
    const int32_t *indices; // of the token `ahead`
    Walk ahead; // whose indices are in `index`
    float s[32], sums[16], reference[16]; // of heads 8 (h / 2) + 2 (lane % 4) + h % 2
    uint32_t count = 0;

    __device__ __forceinline__ Score(const sparse_params &params, Shared &memory, uint32_t address)
        : p(params), shared(memory), base(address)
    {
        tiles = (p.heads + ROWS - 1) / ROWS, items = p.tokens * tiles, blocks = (p.topk + KEYS - 1) / KEYS, score_scale = p.scale_log2 * (1 / Q_SCALE);
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
    // Columns 128 g … of this block, from shared memory.
    __device__ __forceinline__ void take_raw(int g)
    {
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int i = 0; i < 2; i++) raw[g % 2][c][i] = load_shared_16(AT(raw) + (((2 * g + c) * 2 + i) * WG + threadIdx.x) * 16);
    }
    // The same of the next block, from global memory, when the sums have read this block's; a group of copies.
    template <bool FIRST> __device__ __forceinline__ void ask_raw(int g)
    {
        TICK_BEGIN();
        if (!FIRST) WAIT(raw_free, g, count & 1);
        TICK(1);
#pragma unroll
        for (int c = 2 * g; c < 2 * g + 2; c++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                cp_async_16(AT(raw) + ((c * 2 + i) * WG + threadIdx.x) * 16, next[i] + 64 * c, next_valid[i]);
        cp_async_commit();
        cp_async_arrive(AT(raw_full) + 8 * g);
    }
    // `block` counts blocks: the scales have two places.
    __device__ __forceinline__ void ask_rope_and_scales(uint32_t block)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint8_t *token = next[i] - 16 * (lane() % 4);
#pragma unroll
            for (int h = 0; h < 2; h++)
                cp_async_16(AT(rope) + ((i * 2 + h) * WG + threadIdx.x) * 16, token + 528 + 32 * (lane() % 4) + 16 * h, next_valid[i]);
        }
        const int t = lane() % 4;
        const uint8_t *const scales_of = t ? next[1] : next[0];
        const bool there = t ? next_valid[1] : next_valid[0];
        if (t < 2) cp_async_16(AT(scale) + block % 2 * (KEYS * 16) + (key(0) + 8 * t) * 16, scales_of - 16 * t + 512, there);
        cp_async_commit();
    }
    __device__ __forceinline__ void first_loads()
    {
        ahead = {(int)blockIdx.x, 0};
        find_indices();
        load_indices(), take_indices(), load_indices();
        ask_rope_and_scales(0);
#pragma unroll
        for (int g = 0; g < 4; g++) ask_raw<true>(g);
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
                if (c >= TILES) continue;
                const uint4 x = w[i / 4][i % 4];
                const uint32_t in[4] = {x.x, x.y, x.z, x.w};
                if (c == 8) {
                    const uint32_t line = AT(q) + c * TILE_BYTES + head * 128 + 4 * t, by = Bf16::pack(Q_SCALE, Q_SCALE);
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        store_shared_4(line + (((4 * (u % 2) + j) ^ (head & 7)) * 16), mul_bf16x2(in[j], by));
                    continue;
                }
                const uint32_t line = AT(q) + c / 2 * TILE_BYTES + head * 128 + 4 * t;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t first[2], second[2];
                    split_q(in[2 * half], first[0], second[0]), split_q(in[2 * half + 1], first[1], second[1]);
                    const uint32_t to = line + ((4 * (c % 2) + 2 * (u % 2) + half) ^ (head & 7)) * 16;
                    store_shared_4(to, first[0] | first[1] << 16);
                    store_shared_4(to + 4 * TILE_BYTES, second[0] | second[1] << 16);
                }
            }
        }
        fence_async_shared();
        barrier_sync(1, WG);
    }

    enum { PARTS = 64 / HEADS_AT_ONCE, UNITS = 4 * PARTS, SUMS = HEADS_AT_ONCE / 2 };
    // Products of a unit: 128 columns, HEADS_AT_ONCE heads. The small part of Q first: the sums keep few digits.
    __device__ __forceinline__ void multiply(float (&d)[SUMS], int unit)
    {
        const int g = unit / PARTS;
        hold(d);
        wgmma_fence();
#pragma unroll
        for (int part = 1; part >= 0; part--)
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const uint4 &x = raw[g % 2][c][0], &y = raw[g % 2][c][1];
                    const uint32_t frag[4] = {k ? x.z : x.x, k ? y.z : y.x, k ? x.w : x.y, k ? y.w : y.y};
                    wgmma_e4m3(d, frag, wgmma_descriptor(AT(q), 0, (part * 4 + g) * TILE_BYTES + unit % PARTS * (HEADS_AT_ONCE * 128) + (2 * c + k) * 32),
                               !(part == 1 && c == 0 && k == 0));
                }
        wgmma_commit();
    }

    // S^T; and the next block's raw keys asked for.
    __device__ __forceinline__ void score_block()
    {
        TICK_BEGIN();
        cp_async_wait<3>();
        __syncwarp();
        TICK(6);
        float4 scale[2];
        uint4 rope[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            valid[i] = next_valid[i];
#pragma unroll
            for (int h = 0; h < 2; h++) rope[i][h] = load_shared_16(AT(rope) + ((i * 2 + h) * WG + threadIdx.x) * 16);
        }
        take_raw(0);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 w = load_shared_16(AT(scale) + count % 2 * (KEYS * 16) + key(i) * 16);
            scale[i] = make_float4(__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w));
        }
        hold(s);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint4 &a = rope[0][k / 2], &b = rope[1][k / 2];
            const uint32_t frag[4] = {k % 2 ? a.z : a.x, k % 2 ? b.z : b.x, k % 2 ? a.w : a.y, k % 2 ? b.w : b.y};
            wgmma_64<Bf16>(s, frag, wgmma_lines(AT(q) + 8 * TILE_BYTES, k), k > 0);
        }
        wgmma_commit();
        float part[2][SUMS];
        multiply(part[0], 0);
        take_indices(), load_indices();
        ask_rope_and_scales(count + 1);
        wgmma_wait<1>();
        hold(s);
        RETICK();
        cp_async_wait<3>();
        TICK(7);
        take_raw(1);
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const int g = u / PARTS;
            if (u + 1 < UNITS) multiply(part[(u + 1) % 2], u + 1), wgmma_wait<1>();
            else wgmma_wait<0>();
            float (&d)[SUMS] = part[u % 2];
            hold(d);
            const bool last = u % PARTS == PARTS - 1; // of the group
            if (last && g == 0) {
                RETICK();
                cp_async_wait<2>();
                TICK(14);
                take_raw(2);
            }
            if (last && g == 1) {
                RETICK();
                cp_async_wait<1>();
                TICK(15);
                take_raw(3);
            }
            const float by[2] = {g == 0 ? scale[0].x : g == 1 ? scale[0].y : g == 2 ? scale[0].z : scale[0].w,
                                 g == 0 ? scale[1].x : g == 1 ? scale[1].y : g == 2 ? scale[1].z : scale[1].w};
#pragma unroll
            for (int i = 0; i < SUMS; i++) s[u % PARTS * SUMS + i] = fmaf(d[i], by[i / 2 % 2], s[u % PARTS * SUMS + i]);
            if (last && g == 1) ask_raw<false>(0);
            if (last && g == 2) ask_raw<false>(1);
        }
        ask_raw<false>(2), ask_raw<false>(3);
    }

    __device__ __forceinline__ void softmax(bool first)
    {
        const uint32_t buffer = count & 1;
        TICK_BEGIN();
        WAIT(p_free, buffer, (count >> 1 & 1) ^ 1);
        TICK(2);
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
            over = fmaxf(over, fmaxf(fmaf(fmaxf(s[4 * j], s[4 * j + 2]), score_scale, -r.x),
                                     fmaf(fmaxf(s[4 * j + 1], s[4 * j + 3]), score_scale, -r.y)));
        }
        const bool moves = any_of_128(1, first || over > 8.0f);
        if (moves) {
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float m = fmaxf(s[4 * j + e], s[4 * j + 2 + e]) * score_scale;
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
                    const float x = exp2_fast(fmaf(s[4 * (j + h) + 2 * i], score_scale, -r.x)),
                                y = exp2_fast(fmaf(s[4 * (j + h) + 2 * i + 1], score_scale, -r.y));
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
        TICK(3);
    }

    __device__ __forceinline__ void run()
    {
        first_loads();
        TICK_BEGIN();
        uint32_t done = 0;
        for (int item = blockIdx.x; item < items; item += gridDim.x, done++) {
            load_q(item);
            prefetch_q(item + gridDim.x);
#pragma unroll
            for (int i = 0; i < 16; i++) sums[i] = 0.0f;
            TICK(4);
            for (int k = 0; k < blocks; k++, count++) {
                score_block();
                TICK(0);
                softmax(k == 0);
#ifdef LAB_CLOCK
                if (threadIdx.x == 0) shared.clocks[5]++;
                tick_ = (unsigned)clock();
#endif
            }
            WAIT(sum_empty, 0, (done & 1) ^ 1);
            float (*parts)[ROWS] = (float (*)[ROWS])shared.q[0]; // nobody reads Q any more
#pragma unroll
            for (int h = 0; h < 16; h++) {
                float x = sums[h];
                x += __shfl_xor_sync(~0u, x, 4), x += __shfl_xor_sync(~0u, x, 8), x += __shfl_xor_sync(~0u, x, 16);
                if (lane() < 4) parts[warp()][8 * (h / 2) + 2 * (lane() % 4) + h % 2] = x;
            }
            if (threadIdx.x < 4)
#pragma unroll
                for (int h = 0; h < 16; h++) parts[4][8 * (h / 2) + 2 * lane() + h % 2] = reference[h];
            barrier_sync(1, WG);
            if (threadIdx.x < ROWS) {
                const float sum = parts[0][threadIdx.x] + parts[1][threadIdx.x] + parts[2][threadIdx.x] + parts[3][threadIdx.x];
                shared.sum[threadIdx.x] = sum;
                const int head = item % tiles * ROWS + threadIdx.x;
                if (head < p.heads)
                    p.lse[(int64_t)(item / tiles) * p.heads + head] = sum == 0.0f ? INFINITY : (parts[4][threadIdx.x] + log2f(sum)) * 0.69314718056f;
            }
            __syncwarp();
            if (lane() == 0) mbarrier_arrive(AT(sum_full));
        }
    }
};

struct Multiply {
    const sparse_params &p;
    Shared &shared;
    uint32_t base;
    float o[2][64]; // of columns 256 h + 128 side …

    __device__ __forceinline__ Multiply(const sparse_params &params, Shared &memory, uint32_t address)
        : p(params), shared(memory), base(address)
    {
    }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int side() { return threadIdx.x / WG - 1; }
    static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }

    // V of 128 columns of block `count`, to `place`.
    __device__ __forceinline__ void convert_half(int h, uint32_t count, uint32_t place)
    {
        const int g = 2 * h + side();
        WAIT(raw_full, g, count & 1);
        const uint32_t from = AT(raw) + (4 * g * WG + threadIdx.x % WG) * 16;
        const uint32_t scales_at = AT(scale) + count % 2 * (KEYS * 16) + (16 * warp() + lane() / 4) * 16 + 4 * g;
        // Of matrix l / 8 of a step: keys 0 to 7 or 8 to 15 of the warp's, the first or last eight of the step's columns.
        const uint32_t my_key = 16 * warp() + lane() % 16;
        const uint32_t to = AT(v) + (side() * PLACES + place) * PLACE_BYTES + my_key * 128 + ((lane() / 16) ^ (my_key & 7)) * 16;
        uint32_t scale[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float f = __uint_as_float(load_shared_4(scales_at + 8 * 16 * i));
            scale[i] = Fp16::pack(f, f);
        }
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint4 x = load_shared_16(from + 2 * c * WG * 16), y = load_shared_16(from + (2 * c + 1) * WG * 16);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                uint32_t f[4];
                convert(k == 0 ? x.x : k == 1 ? x.y : k == 2 ? x.z : x.w, scale[0], f[0], f[2]);
                convert(k == 0 ? y.x : k == 1 ? y.y : k == 2 ? y.z : y.w, scale[1], f[1], f[3]);
                store_matrices((to ^ (32 * k)) + c * TILE_BYTES, f);
            }
        }
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(AT(raw_free) + 8 * g);
        fence_async_shared();
    }
    __device__ __forceinline__ void multiply(float (&d)[64], uint32_t buffer, uint32_t place, bool add)
    {
        hold(d);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; s++)
            wgmma_128_columns<Work>(d, wgmma_lines(AT(p) + buffer * TILE_BYTES, s), wgmma_columns(AT(v) + (side() * PLACES + place) * PLACE_BYTES, s), s > 0 || add);
        wgmma_commit();
    }
    static __device__ __forceinline__ uint32_t after(uint32_t place) { return place == PLACES - 1 ? 0 : place + 1; }

    __device__ __forceinline__ void run()
    {
        const int tiles = (p.heads + ROWS - 1) / ROWS, items = p.tokens * tiles, blocks = (p.topk + KEYS - 1) / KEYS;
        const int row = warp() * 16 + lane() / 4;
        uint32_t count = 0, done = 0, place = 0; // place of this block's first half
#pragma unroll
        for (int i = 0; i < 128; i++) o[i / 64][i % 64] = 0.0f;
        convert_half(0, 0, 0), convert_half(1, 0, 1);
        barrier_sync(2 + side(), WG);
        TICK_BEGIN();
        for (int item = blockIdx.x; item < items; item += gridDim.x, done++) {
            for (int k = 0; k < blocks; k++, count++) {
                const uint32_t buffer = count & 1, second = after(place), third = after(second);
                WAIT(full, buffer, count >> 1 & 1);
                TICK(8);
                if (__any_sync(~0u, shared.moved[buffer])) {
                    const float factor[2] = {shared.factor[buffer][row], shared.factor[buffer][row + 8]};
#pragma unroll
                    for (int i = 0; i < 128; i++) o[i / 64][i % 64] *= factor[i / 2 % 2];
                }
                multiply(o[0], buffer, place, k > 0);
#ifdef EARLY_B
                multiply(o[1], buffer, second, k > 0);
#endif
                // V of the next block; after the last one of zeros or old keys, which nobody takes.
                convert_half(0, count + 1, third);
                TICK(9);
#ifdef EARLY_B
                wgmma_wait<1>();
#else
                wgmma_wait<0>();
#endif
                hold(o[0]);
                barrier_sync(2 + side(), WG); // all have ended with this block's first half
                TICK(10);
#if !defined EARLY_B && defined MIDDLE_B
                multiply(o[1], buffer, second, k > 0);
#endif
                convert_half(1, count + 1, place);
#if !defined EARLY_B && !defined MIDDLE_B
                multiply(o[1], buffer, second, k > 0);
#endif
                TICK(11);
                wgmma_wait<0>();
                hold(o[1]);
                if (lane() == 0) mbarrier_arrive(AT(p_free) + 8 * buffer);
                barrier_sync(2 + side(), WG); // all V of the next block is there, all have ended with this one's
                TICK(12);
                place = third;
            }
            WAIT(sum_full, 0, done & 1);
            const int token = item / tiles, first = item % tiles * ROWS;
            float inverse[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float sum = shared.sum[row + 8 * i];
                inverse[i] = sum == 0.0f ? 0.0f : 1.0f / sum;
            }
            __syncwarp();
            if (lane() == 0) mbarrier_arrive(AT(sum_empty));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (first + row + 8 * i >= p.heads) continue;
                uint16_t *to = p.out + ((int64_t)token * p.heads + first + row + 8 * i) * 512 + side() * 128 + 16 * (lane() % 4);
#pragma unroll
                for (int c = 0; c < 4; c++)
#pragma unroll
                    for (int h = 0; h < 2; h++) { // 8 of the 16 columns that this thread has of 64
                        uint32_t w[4];
#pragma unroll
                        for (int k = 0; k < 2; k++) {
                            const float *even = o[c / 2] + 32 * (c % 2) + 8 * (2 * h + k) + 2 * i, *odd = even + 4;
                            w[2 * k] = Bf16::pack(even[0] * inverse[i], even[1] * inverse[i]);
                            w[2 * k + 1] = Bf16::pack(odd[0] * inverse[i], odd[1] * inverse[i]);
                        }
                        *(uint4 *)(to + c / 2 * 256 + 64 * (c % 2) + 8 * h) = make_uint4(w[0], w[1], w[2], w[3]);
                    }
            }
            TICK(13);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_kernel(const __grid_constant__ sparse_params p)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    const uint32_t base = shared_address(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) mbarrier_init(AT(full) + 8 * i, 4), mbarrier_init(AT(p_free) + 8 * i, 8);
        for (int i = 0; i < 4; i++) mbarrier_init(AT(raw_full) + 8 * i, WG), mbarrier_init(AT(raw_free) + 8 * i, 4);
        mbarrier_init(AT(sum_full), 4), mbarrier_init(AT(sum_empty), 8);
        mbarrier_fence_init();
    }
    if (threadIdx.x < 16) shared.clocks[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x < WG) {
        take_registers<SCORE_REGISTERS>();
        Score(p, shared, base).run();
    } else {
        give_registers<PV_REGISTERS>();
        Multiply(p, shared, base).run();
    }
#ifdef LAB_CLOCK
    __syncthreads();
    if (p.clocks && blockIdx.x == 0 && threadIdx.x < 16) p.clocks[threadIdx.x] = shared.clocks[threadIdx.x];
#endif
}
