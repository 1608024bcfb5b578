// (Compiled, never run.) Sparse decode over FP8_656 on Hopper, 64 heads a block of threads: the raw e4m3 bytes are operand A of S^T = K Q^T.
//
//   warpgroup 0, scores   asks for raw keys (cp.async; a thread: 16 columns of every 64, of two keys), multiplies them as they are with
//                         Q = (q1 + q2) / 256, two e4m3 parts; sums of 128 columns times their scales; softmax; P
//   warpgroups 1, 2, sums make fp16 V of the same raw bytes, two times 128 columns each, and O += P V
//
// Between them, for every 128 columns g: raw_full[place][g] (all raw bytes are there: 128 threads' cp.async), raw_free[place][g] (the sums' warps
// have read them; warpgroup 1 takes groups 0 and 2, warpgroup 2 groups 1 and 3). Raw bytes have places for two blocks: those of k + 1
// are asked for while k is multiplied. P: full, p_free. V belongs to a warpgroup and has one place: a half is converted when the
// half before it has been multiplied.
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
#ifndef ORDER // of P V's two halves and the conversions; 0: both at once, 1: the second after the first conversion, 2: before it
#define ORDER 1
#endif
#define Q_SCALE 256.0f // |q| <= 1: q * 256 has no digits below 1 / 1024 that count

enum { PLACES = 2 /* of V, of each warpgroup: 2 tiles of 64 columns each */, PLACE_BYTES = 2 * TILE_BYTES, RAW_BYTES = 16 * WG * 16 };
struct Shared {
    unsigned char v[2][PLACES][PLACE_BYTES];
    unsigned char q[TILES][TILE_BYTES]; // q1: 4 tiles of 128 columns; q2: 4; rope
    unsigned char p[2][TILE_BYTES];
    unsigned char raw[2][8][2][WG][16], rope[2][2][WG][16], scale[2][KEYS][16];
    float factor[2][ROWS], sum[ROWS];
    uint32_t moved[2][2]; // of each half of the heads
    uint64_t full[2], p_free[2], raw_full[2][4], raw_free[2][4], sum_full, sum_empty;
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
    "S: all", "S: of it raw_free", "S: wait p_free", "S: softmax of other half", "S: item's rest", "S: blocks (count)", "S: of it wait raw", "S: products, softmax of half", \
    "PV: wait P", "PV: A", "PV: wait raw, convert 0", "PV: wait B", "PV: wait raw, convert 1", "PV: item's rest", "", ""

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
                   (offset - (int)offsetof(Shared, full)) / 8, (offset - (int)offsetof(Shared, p_free)) / 8, (offset - (int)offsetof(Shared, raw_full)) / 8 /* 4 a place */,
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
__device__ __forceinline__ void wgmma_e4m3(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1;\n}"
                 : WGMMA_SUMS_8(d, 0), WGMMA_SUMS_8(d, 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void wgmma_bf16(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
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
    bool valid[2], next_valid[2], all_valid;
    const uint8_t *next[2];
    int index[2];
    const int32_t *indices; // of the token `ahead`
    Walk ahead; // whose indices are in `index`
    float s[2][16]; // of each half of the heads
    float sums[16], reference[16]; // of heads 8 (h / 2) + 2 (lane % 4) + h % 2
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
        const uint32_t from = AT(raw) + count % 2 * RAW_BYTES + threadIdx.x * 16;
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int i = 0; i < 2; i++) raw[g % 2][c][i] = load_shared_16(from + ((2 * g + c) * 2 + i) * WG * 16);
    }
    // Waits until the sums have read block - 2's raw bytes and scales, whose places `block` takes.
    __device__ __forceinline__ void wait_free(uint32_t block)
    {
        TICK_BEGIN();
#pragma unroll
        for (int g = 0; g < 4; g++) WAIT(raw_free, block % 2 * 4 + g, (block >> 1 & 1) ^ 1);
        TICK(1);
    }
    __device__ __forceinline__ void ask_raw(int g, uint32_t block)
    {
        const uint32_t to = AT(raw) + block % 2 * RAW_BYTES + threadIdx.x * 16;
#pragma unroll
        for (int c = 2 * g; c < 2 * g + 2; c++)
#pragma unroll
            for (int i = 0; i < 2; i++) cp_async_16(to + (c * 2 + i) * WG * 16, next[i] + 64 * c, next_valid[i]);
        cp_async_arrive(AT(raw_full) + block % 2 * 32 + 8 * g);
    }
    __device__ __forceinline__ void ask_rope()
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint8_t *token = next[i] - 16 * (lane() % 4);
#pragma unroll
            for (int h = 0; h < 2; h++)
                cp_async_16(AT(rope) + ((i * 2 + h) * WG + threadIdx.x) * 16, token + 528 + 32 * (lane() % 4) + 16 * h, next_valid[i]);
        }
    }
    // Before the raw bytes: raw_full tells of them too.
    __device__ __forceinline__ void ask_scales(uint32_t block)
    {
        const int t = lane() % 4;
        const uint8_t *const scales_of = t ? next[1] : next[0];
        const bool there = t ? next_valid[1] : next_valid[0];
        if (t < 2) cp_async_16(AT(scale) + block % 2 * (KEYS * 16) + (key(0) + 8 * t) * 16, scales_of - 16 * t + 512, there);
    }
    __device__ __forceinline__ void first_loads()
    {
        ahead = {(int)blockIdx.x, 0};
        find_indices();
        load_indices(), take_indices(), load_indices();
        ask_scales(0), ask_rope();
#pragma unroll
        for (int g = 0; g < 4; g++) ask_raw(g, 0);
        cp_async_commit();
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

    // Products of 128 columns g and 32 heads. The small part of Q first: the sums keep few digits.
    __device__ __forceinline__ void multiply(float (&d)[16], int h, int g)
    {
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
                    wgmma_e4m3(d, frag, wgmma_descriptor(AT(q), 0, (part * 4 + g) * TILE_BYTES + h * (32 * 128) + (2 * c + k) * 32),
                               !(part == 1 && c == 0 && k == 0));
                }
        wgmma_commit();
    }
    __device__ __forceinline__ void multiply_rope(int h)
    {
        uint4 rope[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) rope[i / 2][i % 2] = load_shared_16(AT(rope) + (i * WG + threadIdx.x) * 16);
        hold(s[h]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint4 &a = rope[0][k / 2], &b = rope[1][k / 2];
            const uint32_t frag[4] = {k % 2 ? a.z : a.x, k % 2 ? b.z : b.x, k % 2 ? a.w : a.y, k % 2 ? b.w : b.y};
            wgmma_bf16(s[h], frag, wgmma_descriptor(AT(q), 0, 8 * TILE_BYTES + h * (32 * 128) + 32 * k), k > 0);
        }
        wgmma_commit();
    }

    // S^T of 32 heads and then of the others, beside whose products goes the softmax of the first; and the next block's raw keys asked for.
    __device__ __forceinline__ void score_block(bool first)
    {
        TICK_BEGIN();
        cp_async_wait<0>();
        __syncwarp();
        TICK(6);
#pragma unroll
        for (int i = 0; i < 2; i++) valid[i] = next_valid[i];
        all_valid = __all_sync(~0u, valid[0] && valid[1]);
        const uint32_t scales = AT(scale) + count % 2 * (KEYS * 16) + key(0) * 16;
        float part[2][16];
        take_raw(0);
        multiply_rope(0);
        multiply(part[0], 0, 0);
        take_raw(1);
#pragma unroll
        for (int u = 0; u < 8; u++) {
            const int h = u / 4, g = u % 4;
            const float by[2] = {__uint_as_float(load_shared_4(scales + 4 * g)), __uint_as_float(load_shared_4(scales + 4 * g + 8 * 16))};
            if (u == 3) multiply_rope(1);
            if (u < 7) multiply(part[(u + 1) % 2], (u + 1) / 4, (u + 1) % 4);
            if (u == 0) take_indices(), load_indices(), wait_free(count + 1), ask_scales(count + 1);
            if (u == 4) begin_softmax(0, first);
            if (u == 5) weights(0, 0);
            if (u == 6) weights(0, 1);
            if (u == 3) wgmma_wait<2>();
            else if (u < 7) wgmma_wait<1>();
            else wgmma_wait<0>();
            hold(part[u % 2]);
            if (g == 0) hold(s[h]);
            if (u < 6) take_raw((u + 2) % 4);
#pragma unroll
            for (int i = 0; i < 16; i++) s[h][i] = fmaf(part[u % 2][i], by[i / 2 % 2], s[h][i]);
            if (u < 4) ask_raw(u, count + 1);
            if (u == 4) ask_rope(), cp_async_commit();
        }
        TICK(7);
        begin_softmax(1, first), weights(1, 0), weights(1, 1);
        fence_async_shared();
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(AT(full) + 8 * (count & 1));
        TICK(3);
    }

    // Of 32 heads: are the references still good?
    __device__ __forceinline__ void begin_softmax(int half, bool first)
    {
        const uint32_t buffer = count & 1;
        if (half == 0) WAIT(p_free, buffer, (count >> 1 & 1) ^ 1);
        const int t = lane() % 4;
        float (&s)[16] = this->s[half];
        float *const sums = this->sums + 8 * half, *const reference = this->reference + 8 * half;
        float (*most)[32] = (float (*)[32])(shared.p[buffer] + half * (32 * 128)); // free until P goes there
        if (!all_valid)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (!valid[i])
#pragma unroll
                    for (int j = 0; j < 4; j++) s[4 * j + 2 * i] = s[4 * j + 2 * i + 1] = -INFINITY;
        float over = -INFINITY;
#pragma unroll
        for (int j = 0; j < 4; j++)
            over = fmaxf(over, fmaxf(fmaf(fmaxf(s[4 * j], s[4 * j + 2]), score_scale, -reference[2 * j]),
                                     fmaf(fmaxf(s[4 * j + 1], s[4 * j + 3]), score_scale, -reference[2 * j + 1])));
        const bool moves = any_of_128(1, first || over > 8.0f);
        if (moves) {
#pragma unroll
            for (int j = 0; j < 4; j++)
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
            for (int h = 0; h < 8; h++) {
                const int head = 8 * (h / 2) + 2 * t + h % 2;
                const float m = fmaxf(fmaxf(most[0][head], most[1][head]), fmaxf(most[2][head], most[3][head]));
                const float to = fmaxf(m, first ? -1e30f : reference[h]), factor = first ? 0.0f : exp2_fast(reference[h] - to);
                sums[h] *= factor, reference[h] = to;
                if (lane() < 4 && warp() == 0) shared.factor[buffer][32 * half + head] = factor;
            }
            barrier_sync(1, WG); // P goes where the maxima are
        }
        if (threadIdx.x == 0) shared.moved[buffer][half] = moves && !first;
    }
    // P of 16 heads of a half.
    __device__ __forceinline__ void weights(int half, int quarter)
    {
        uint32_t words[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int j = 2 * quarter + h, at = 8 * half + 2 * j;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float x = exp2_fast(fmaf(s[half][4 * j + 2 * i], score_scale, -reference[at])),
                            y = exp2_fast(fmaf(s[half][4 * j + 2 * i + 1], score_scale, -reference[at + 1]));
                sums[at] += x, sums[at + 1] += y;
                words[2 * h + i] = Work::pack(x, y);
            }
        }
        const int m = lane() / 8, head = 32 * half + 16 * quarter + 8 * (m / 2) + lane() % 8;
        store_matrices_transposed(AT(p) + (count & 1) * TILE_BYTES + head * 128 + (((2 * warp() + m % 2) ^ (head & 7)) * 16), words);
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
                score_block(k == 0);
                TICK(0);
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

    int side;
    uint32_t raw_at, scales_at, v_at; // of this thread

    __device__ __forceinline__ Multiply(const sparse_params &params, Shared &memory, uint32_t address)
        : p(params), shared(memory), base(address)
    {
        side = __shfl_sync(~0u, (int)threadIdx.x / WG - 1, 0);
        raw_at = AT(raw) + (4 * side * WG + threadIdx.x % WG) * 16;
        scales_at = AT(scale) + (16 * warp() + lane() / 4) * 16 + 4 * side;
        // Of matrix l / 8 of a step: keys 0 to 7 or 8 to 15 of the warp's, the first or last eight of the step's columns.
        const uint32_t my_key = 16 * warp() + lane() % 16;
        v_at = AT(v) + side * PLACES * PLACE_BYTES + my_key * 128 + ((lane() / 16) ^ (my_key & 7)) * 16;
    }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }

    // V of 128 columns, half h of this warpgroup's, of block `count`.
    __device__ __forceinline__ void convert_half(int h, uint32_t count)
    {
        WAIT(raw_full, count % 2 * 4 + 2 * h + side, count >> 1 & 1);
        const uint32_t from = raw_at + count % 2 * RAW_BYTES + h * (8 * WG * 16);
        uint32_t scale[2];
        uint4 x = load_shared_16(from), y = load_shared_16(from + WG * 16);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float f = __uint_as_float(load_shared_4(scales_at + count % 2 * (KEYS * 16) + 8 * h + 8 * 16 * i));
            scale[i] = Fp16::pack(f, f);
        }
#pragma unroll
        for (int c = 0; c < 2; c++) {
            if (c) x = load_shared_16(from + 2 * WG * 16), y = load_shared_16(from + 3 * WG * 16);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                uint32_t f[4];
                convert(k == 0 ? x.x : k == 1 ? x.y : k == 2 ? x.z : x.w, scale[0], f[0], f[2]);
                convert(k == 0 ? y.x : k == 1 ? y.y : k == 2 ? y.z : y.w, scale[1], f[1], f[3]);
                store_matrices((v_at ^ (32 * k)) + h * PLACE_BYTES + c * TILE_BYTES, f);
            }
        }
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(AT(raw_free) + count % 2 * 32 + 8 * (2 * h + side));
        fence_async_shared();
    }
    __device__ __forceinline__ void multiply(float (&d)[64], uint32_t buffer, int h, bool add)
    {
        hold(d);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; s++)
            wgmma_128_columns<Work>(d, wgmma_lines(AT(p) + buffer * TILE_BYTES, s), wgmma_columns(AT(v) + (side * PLACES + h) * PLACE_BYTES, s), s > 0 || add);
        wgmma_commit();
    }
    __device__ __forceinline__ void run()
    {
        const int tiles = (p.heads + ROWS - 1) / ROWS, items = p.tokens * tiles, blocks = (p.topk + KEYS - 1) / KEYS;
        const int row = warp() * 16 + lane() / 4;
        uint32_t count = 0, done = 0;
#pragma unroll
        for (int i = 0; i < 128; i++) o[i / 64][i % 64] = 0.0f;
        convert_half(0, 0), convert_half(1, 0);
        barrier_sync(2 + side, WG);
        TICK_BEGIN();
        for (int item = blockIdx.x; item < items; item += gridDim.x, done++) {
            for (int k = 0; k < blocks; k++, count++) {
                const uint32_t buffer = count & 1;
                WAIT(full, buffer, count >> 1 & 1);
                TICK(8);
                if (__any_sync(~0u, shared.moved[buffer][warp() / 2])) {
                    const float factor[2] = {shared.factor[buffer][row], shared.factor[buffer][row + 8]};
#pragma unroll
                    for (int i = 0; i < 128; i++) o[i / 64][i % 64] *= factor[i / 2 % 2];
                }
                multiply(o[0], buffer, 0, k > 0);
#if ORDER == 0
                multiply(o[1], buffer, 1, k > 0);
                wgmma_wait<1>();
#else
                wgmma_wait<0>();
#endif
                hold(o[0]);
#if ORDER == 2
                multiply(o[1], buffer, 1, k > 0);
#endif
                TICK(9);
                barrier_sync(2 + side, WG); // all have ended with the first half
                // V of the next block; after the last one of zeros or old keys, which nobody takes.
                convert_half(0, count + 1);
#if ORDER == 1
                multiply(o[1], buffer, 1, k > 0);
#endif
                TICK(10);
                wgmma_wait<0>();
                hold(o[1]);
                if (lane() == 0) mbarrier_arrive(AT(p_free) + 8 * buffer);
                barrier_sync(2 + side, WG);
                TICK(11);
                convert_half(1, count + 1);
                barrier_sync(2 + side, WG); // all V of the next block is there
                TICK(12);
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
                uint16_t *to = p.out + ((int64_t)token * p.heads + first + row + 8 * i) * 512 + side * 128 + 16 * (lane() % 4);
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
        for (int i = 0; i < 8; i++) mbarrier_init(AT(raw_full) + 8 * i, WG), mbarrier_init(AT(raw_free) + 8 * i, 4);
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
