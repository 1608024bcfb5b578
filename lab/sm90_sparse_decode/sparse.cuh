// Sparse decode over FP8_656 on Hopper, 64 heads a block of threads: keys go through registers.
//
//   warpgroups 0, 1, scores   load raw keys (a thread: 16 columns of every 64, of two keys; warpgroup 0 the even 64s and rope, 1 the
//                             odd ones), convert them to what is at once A of S^T = K Q^T and, stored to shared memory, V; exchange
//                             halves of S^T; softmax of 32 heads each, P to shared memory
//   warpgroups 2, 3           O of 256 columns each += P V
//
// Raw keys come by cp.async, every thread its own, into as much shared memory as a block of raw keys takes; a slot is asked for
// anew as soon as it has been read, so that 42 KB an SM are always under way. V has room for one block and a half: a ring of
// pairs of tiles, each free again as soon as it has been multiplied by.
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
#define CLOCKS p.clocks
#else
#define CLOCK() 0ll
#define CLOCKS false
#endif
enum { ROWS = 64, KEYS = 64, WG = 128, THREADS = 4 * WG, TILES = 9, TOKEN_BYTES = 656 };
#ifndef SCORE_REGISTERS
#define SCORE_REGISTERS 96
#endif
#ifndef PV_REGISTERS
#define PV_REGISTERS 160
#endif

enum { PAIRS = 6 /* of V: 2 tiles of 64 columns each */, PAIR_BYTES = 2 * TILE_BYTES };
struct Shared {
    unsigned char v[PAIRS][PAIR_BYTES];
    unsigned char q[TILES][TILE_BYTES];
    unsigned char s[2][4][WG][16]; // S^T as a thread of either warpgroup has it, [j] of the other's heads; P in the first half, once all have read
    unsigned char raw[8][2][WG][16], rope[2][2][WG][16], scale[2][KEYS][16];
    float factor[ROWS], reference[ROWS], last_reference[ROWS];
    uint32_t moved;
    uint64_t half, done; // of P V of a block: tiles 0 to 3 are free; the others, S and P too
    uint64_t last_full, last_empty;
};
static_assert(sizeof(Shared) <= 227 * 1024, "");
#define AT(member) (base + (uint32_t)offsetof(Shared, member))

__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float inverse_of(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Eight values times `factor`, if `there`. In one piece: otherwise ptxas computes all words that it has registers for, and more.
__device__ __forceinline__ void store_bf16(uint16_t *to, int there, float factor, float a, float b, float c, float d, float e, float f, float g, float h)
{
    asm volatile("{\n.reg .pred p;\n.reg .f32 x, y;\n.reg .b32 w0, w1, w2, w3;\nsetp.ne.s32 p, %1, 0;\n"
                 "mul.f32 x, %3, %2;\nmul.f32 y, %4, %2;\ncvt.rn.bf16x2.f32 w0, y, x;\n"
                 "mul.f32 x, %5, %2;\nmul.f32 y, %6, %2;\ncvt.rn.bf16x2.f32 w1, y, x;\n"
                 "mul.f32 x, %7, %2;\nmul.f32 y, %8, %2;\ncvt.rn.bf16x2.f32 w2, y, x;\n"
                 "mul.f32 x, %9, %2;\nmul.f32 y, %10, %2;\ncvt.rn.bf16x2.f32 w3, y, x;\n"
                 "@p st.global.v4.b32 [%0], {w0, w1, w2, w3};\n}"
                 ::"l"(to), "r"(there), "f"(factor), "f"(a), "f"(b), "f"(c), "f"(d), "f"(e), "f"(f), "f"(g), "f"(h) : "memory");
}

__device__ __forceinline__ uint4 load_16(const uint8_t *from, bool valid)
{
    uint4 r;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
                 "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(r.x), "=&r"(r.y), "=&r"(r.z), "=&r"(r.w) : "l"(from), "r"((int)valid));
    return r;
}

__device__ __forceinline__ void load_matrices(uint32_t (&w)[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(from) : "memory");
}

// Both halves of a word, added.
__device__ __forceinline__ float sum_of(uint32_t w)
{
#ifdef FP16
    float x, y;
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(x), "=f"(y) : "r"(w));
    return x + y;
#else
    return __uint_as_float(w << 16) + __uint_as_float(w & 0xffff0000u);
#endif
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

__device__ __forceinline__ float2 load_shared_8(uint32_t from)
{
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(from) : "memory");
    return r;
}

// A barrier that some only arrive at: who waits does not poll.
__device__ __forceinline__ void barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Of the two warpgroups of the scores.
__device__ __forceinline__ bool any_of_256(int barrier, bool mine)
{
    uint32_t any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 256, p;\nselp.u32 %0, 1, 0, q;\n}"
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

template <int G> struct Score {
    const sparse_params &p;
    Shared &shared;
    uint32_t base;
    int tiles, items, blocks;
    uint32_t scale[2][2]; // of a key's four quarters, two in a word
    uint4 raw[2], rope[2][2];
    uint32_t flags = 0; // which of the two keys there are, two bits a block: the newest block is the one whose raw keys are asked for
    const uint8_t *next[2];
    int index[2];
    const int32_t *indices; // of the token `ahead`
    Walk ahead; // whose indices are in `index`
    float s[32]; // of heads 8 (i / 4) + 2 (lane % 4) + i % 2, keys key(i / 2 % 2)
    uint32_t count = 0, pair = 0;
    long long clocks[4] = {};

    __device__ __forceinline__ Score(const sparse_params &params, Shared &memory, uint32_t address)
        : p(params), shared(memory), base(address)
    {
        tiles = (p.heads + ROWS - 1) / ROWS, items = p.tokens * tiles, blocks = (p.topk + KEYS - 1) / KEYS;
    }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int thread() { return threadIdx.x - G * WG; }
    static __device__ __forceinline__ int warp() { return thread() / 32; }
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
        flags <<= 2;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool there = (uint32_t)index[i] < (uint32_t)p.keys;
            next[i] = p.cache + (there ? (int64_t)index[i] : 0) * TOKEN_BYTES + 16 * (lane() % 4);
            flags |= (uint32_t)there << i;
        }
    }
    // Chunks are 64 columns; this warpgroup's i-th is 2 i + G.
    __device__ __forceinline__ void take_raw(int i)
    {
#pragma unroll
        for (int n = 0; n < 2; n++) raw[n] = load_shared_16(AT(raw) + (((2 * i + G) * 2 + n) * WG + thread()) * 16);
    }
    __device__ __forceinline__ void ask_chunk(int i)
    {
#pragma unroll
        for (int n = 0; n < 2; n++)
            cp_async_16(AT(raw) + (((2 * i + G) * 2 + n) * WG + thread()) * 16, next[n] + 64 * (2 * i + G), flags >> n & 1);
        cp_async_commit();
    }
    __device__ __forceinline__ void ask_rope_and_scales()
    {
        if (G == 0)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    cp_async_16(AT(rope) + ((i * 2 + h) * WG + thread()) * 16, next[i] + 16 * (lane() % 4) + 528 + 16 * h, flags >> i & 1);
        const int t = lane() % 4;
        const uint8_t *const scales_of = t ? next[1] : next[0];
        if (t < 2) cp_async_16(AT(scale) + (G * KEYS + key(0) + 8 * t) * 16, scales_of - 16 * t + 512, flags >> t & 1);
        cp_async_commit();
    }
    __device__ __forceinline__ void first_loads()
    {
        ahead = {(int)blockIdx.x, 0};
        find_indices();
        load_indices(), take_indices(), load_indices();
        ask_rope_and_scales();
#pragma unroll
        for (int i = 0; i < 4; i++) ask_chunk(i);
    }

    __device__ __forceinline__ void prefetch_q(int item)
    {
        if (item >= items) return;
        const int token = item / tiles, first = item % tiles * ROWS, heads = min(ROWS, p.heads - first);
        const char *from = (const char *)(p.q + ((int64_t)token * p.heads + first) * 576);
        for (int line = threadIdx.x; line < heads * 9; line += 2 * WG) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + 128 * line));
    }

    __device__ __forceinline__ void load_q(int item)
    {
        const int token = item / tiles, first = item % tiles * ROWS;
        barrier_sync(1, 2 * WG); // all products with the old Q are done
        if (threadIdx.x < ROWS) shared.reference[threadIdx.x] = -1e30f;
        // Eight lanes take 128 bytes of a head, so that both sides of the copy take all banks and whole sectors.
        const int me = fresh_thread() % WG, u = me % 8, t = u / 2, head_0 = me / 8;
        const uint4 *from = (const uint4 *)(p.q + ((int64_t)token * p.heads + first) * 576) + u;
#pragma unroll 1
        for (int c = G; c < TILES; c += 2) {
            uint4 w[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int head = head_0 + 16 * i;
                w[i] = load_16((const uint8_t *)(from + head * 72 + c * 8), first + head < p.heads);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int head = head_0 + 16 * i;
                const uint32_t line = AT(q) + c * TILE_BYTES + head * 128 + 4 * t;
                const uint4 x = w[i];
#ifdef FP16
                const uint32_t in[4] = {c < 8 ? to_fp16(x.x) : x.x, c < 8 ? to_fp16(x.y) : x.y, c < 8 ? to_fp16(x.z) : x.z, c < 8 ? to_fp16(x.w) : x.w};
#else
                const uint32_t in[4] = {x.x, x.y, x.z, x.w};
#endif
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int step = 2 * (u % 2) + half;
                    const uint32_t a = in[2 * half], b = in[2 * half + 1];
                    const bool pairs = c < 8 && Work::IS_BF16; // (c0, c2), (c1, c3)
                    const uint32_t low = pairs ? __byte_perm(a, b, 0x5410) : a, high = pairs ? __byte_perm(a, b, 0x7632) : b;
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(line + ((2 * step ^ (head & 7)) * 16)), "r"(low) : "memory");
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(line + (((2 * step + 1) ^ (head & 7)) * 16)), "r"(high) : "memory");
                }
            }
        }
        fence_async_shared();
        barrier_sync(1, 2 * WG);
    }

    __device__ __forceinline__ uint32_t scale_of(int i, int quarter) const
    {
        uint32_t r;
        if (quarter % 2)
            asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\nmov.b32 %0, {b, b};\n}" : "=r"(r) : "r"(scale[i][quarter / 2]));
        else
            asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\nmov.b32 %0, {a, a};\n}" : "=r"(r) : "r"(scale[i][quarter / 2]));
        return r;
    }

    // What the next block begins with, into registers (but rope); and what the one after it begins with asked for.
    __device__ __forceinline__ void prepare()
    {
        cp_async_wait<3>();
        __syncwarp();
        take_raw(0);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 w = load_shared_16(AT(scale) + (G * KEYS + key(i)) * 16);
            const float by = Work::IS_BF16 ? 0x1p120f : 1.0f;
            scale[i][0] = Work::pack(__uint_as_float(w.x) * by, __uint_as_float(w.y) * by);
            scale[i][1] = Work::pack(__uint_as_float(w.z) * by, __uint_as_float(w.w) * by);
        }
    }
    __device__ __forceinline__ void take_rope()
    {
        if (G == 0)
#pragma unroll
            for (int i = 0; i < 4; i++) rope[i / 2][i % 2] = load_shared_16(AT(rope) + (i * WG + thread()) * 16);
        take_indices();
        __syncwarp(); // every lane has its scales
        ask_rope_and_scales();
    }

    __device__ __forceinline__ void score_block()
    {
        hold(s);
        if (G == 0) {
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const uint4 &a = rope[0][k / 2], &b = rope[1][k / 2];
                const uint32_t frag[4] = {k % 2 ? a.z : a.x, k % 2 ? b.z : b.x, k % 2 ? a.w : a.y, k % 2 ? b.w : b.y};
                wgmma_64<Bf16>(s, frag, wgmma_lines(AT(q) + 8 * TILE_BYTES, k), k > 0); // rope stays bf16
            }
            wgmma_commit();
        }
        load_indices(); // long before they are taken
        // Of matrix l / 8 of a step: keys 0 to 7 or 8 to 15 of the warp's, the first or last eight of the step's columns.
        const uint32_t my_key = 16 * warp() + lane() % 16;
        const uint32_t v_line = AT(v) + my_key * 128 + ((lane() / 16) ^ (my_key & 7)) * 16;
        uint32_t at[4]; // where a step's matrices go: registers of their own, so that no store waits for one before it
        uint32_t f[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t scales[2] = {scale_of(0, i), scale_of(1, i)};
            if (G == 0 || i > 0) wgmma_wait<0>(); // the fragments' registers are free
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const uint4 x = raw[n];
                convert(x.x, scales[n], f[0][n], f[0][n + 2]);
                convert(x.y, scales[n], f[1][n], f[1][n + 2]);
                convert(x.z, scales[n], f[2][n], f[2][n + 2]);
                convert(x.w, scales[n], f[3][n], f[3][n + 2]);
            }
            if (i < 3) cp_async_wait<3>(), take_raw(i + 1);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++) wgmma_64<Work>(s, f[k], wgmma_lines(AT(q) + (2 * i + G) * TILE_BYTES, k), G == 0 || i + k > 0);
            wgmma_commit();
            ask_chunk(i);
            if (i % 2 == 0)
#pragma unroll
                for (int k = 0; k < 4; k++) at[k] = (v_line ^ (32 * k)) + pair * PAIR_BYTES;
            if (i == 2) {
                const long long a = CLOCK();
                mbarrier_wait(AT(half), (count & 1) ^ 1);
                clocks[0] += CLOCK() - a;
            }
#pragma unroll
            for (int k = 0; k < 4; k++) store_matrices(at[k] + (2 * i + G) % 4 * TILE_BYTES, f[k]);
            if (i % 2 == 1) {
                pair += 2;
                if (pair == PAIRS) pair = 0;
            }
        }
        prepare();
    }

    // S^T of this warpgroup's 32 heads, both halves of the columns; P of them.
    __device__ __forceinline__ void softmax()
    {
        const int t = lane() % 4;
        mbarrier_wait(AT(done), (count & 1) ^ 1);
        count++;
        wgmma_wait<0>();
        hold(s);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float *x = s + 16 * (1 - G) + 4 * j;
            store_16(AT(s) + ((4 * G + j) * WG + thread()) * 16, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
        }
        barrier_sync(2, 2 * WG);
        const float bias[2] = {flags & 4 ? 0.0f : -INFINITY, flags & 8 ? 0.0f : -INFINITY};
        float x[16], reference[8];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint4 w = load_shared_16(AT(s) + ((4 * (1 - G) + j) * WG + thread()) * 16);
            const float2 r = load_shared_8(AT(reference) + (32 * G + 8 * j + 2 * t) * 4);
            const float *own = s + 16 * G + 4 * j;
            x[4 * j] = own[0] + __uint_as_float(w.x) + bias[0], x[4 * j + 1] = own[1] + __uint_as_float(w.y) + bias[0];
            x[4 * j + 2] = own[2] + __uint_as_float(w.z) + bias[1], x[4 * j + 3] = own[3] + __uint_as_float(w.w) + bias[1];
            reference[2 * j] = r.x, reference[2 * j + 1] = r.y;
        }
        float over = -INFINITY;
#pragma unroll
        for (int h = 0; h < 8; h++)
            over = fmaxf(over, fmaf(fmaxf(x[4 * (h / 2) + h % 2], x[4 * (h / 2) + h % 2 + 2]), p.scale_log2, -reference[h]));
        const bool moves = any_of_256(2, over > 8.0f);
        if (moves) {
            float (*most)[ROWS] = (float (*)[ROWS])shared.s[1]; // all have read what was there
#pragma unroll
            for (int h = 0; h < 8; h++) {
                float m = fmaxf(x[4 * (h / 2) + h % 2], x[4 * (h / 2) + h % 2 + 2]) * p.scale_log2;
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
                if (lane() < 4) most[warp()][32 * G + 8 * (h / 2) + 2 * t + h % 2] = m;
            }
            barrier_sync(3 + G, WG);
#pragma unroll
            for (int h = 0; h < 8; h++) {
                const int head = 32 * G + 8 * (h / 2) + 2 * t + h % 2;
                const float to = fmaxf(reference[h], fmaxf(fmaxf(most[0][head], most[1][head]), fmaxf(most[2][head], most[3][head])));
                if (lane() < 4 && warp() == 0) shared.factor[head] = exp2_fast(reference[h] - to), shared.reference[head] = to;
                reference[h] = to;
            }
        }
        if (threadIdx.x == 0) shared.moved = moves;
        const int m = lane() / 8, line = 32 * G + 8 * (m / 2) + lane() % 8;
        const uint32_t to = AT(s) + line * 128 + (((2 * warp() + m % 2) ^ (line & 7)) * 16);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            uint32_t words[4];
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    words[2 * n + i] = Work::pack(exp2_fast(fmaf(x[4 * (j + n) + 2 * i], p.scale_log2, -reference[2 * (j + n)])),
                                                  exp2_fast(fmaf(x[4 * (j + n) + 2 * i + 1], p.scale_log2, -reference[2 * (j + n) + 1])));
            store_matrices_transposed(to + j * 1024, words);
        }
        fence_async_shared();
        barrier_arrive(5, THREADS);
        take_rope();
    }

    __device__ __forceinline__ void run()
    {
        first_loads();
        prepare(), take_rope();
        uint32_t done = 0;
        for (int item = blockIdx.x; item < items; item += gridDim.x, done++) {
            load_q(item);
#pragma unroll 1
            for (int k = 0; k < blocks; k++) {
                if (k == max(blocks - 4, 0)) prefetch_q(item + gridDim.x);
                const long long a = CLOCK();
                score_block();
                const long long b = CLOCK();
                softmax();
                if (CLOCKS) clocks[1] += b - a, clocks[2] += CLOCK() - b, clocks[3]++;
            }
            mbarrier_wait(AT(last_empty), (done & 1) ^ 1);
            barrier_sync(3 + G, WG);
            if (thread() < 32) shared.last_reference[32 * G + thread()] = shared.reference[32 * G + thread()];
            __syncwarp();
            if (lane() == 0) mbarrier_arrive(AT(last_full));
        }
        if (CLOCKS && blockIdx.x == 0 && threadIdx.x == 0)
            for (int i = 0; i < 4; i++) p.clocks[i] = clocks[i];
    }
};

// What is not to stay in registers from item to item.
__device__ __forceinline__ int fresh(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}
__device__ __forceinline__ int fresh_grid()
{
    int blocks;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
    return blocks;
}

template <int SIDE> struct Multiply {
    const sparse_params &p;
    Shared &shared;
    uint32_t base;
    float o[2][64], sum[2]; // of columns 256 c + 128 SIDE …; // sum: of P as multiplied, of this thread's keys

    __device__ __forceinline__ Multiply(const sparse_params &params, Shared &memory, uint32_t address)
        : p(params), shared(memory), base(address)
    {
    }
    static __device__ __forceinline__ int row() { return fresh_thread() / 32 % 4 * 16 + fresh_thread() % 32 / 4; }
    __device__ __forceinline__ void run()
    {
        long long waited = 0, worked = 0;
        uint32_t pair = SIDE, done = 0;
        for (int item = fresh_block(); item < p.tokens * ((p.heads + ROWS - 1) / ROWS); item += fresh_grid(), done++) {
#pragma unroll
            for (int i = 0; i < 128; i++) o[i / 64][i % 64] = 0.0f;
            sum[0] = sum[1] = 0.0f;
#pragma unroll 1
            for (int left = (fresh(p.topk) + KEYS - 1) / KEYS; left; left--) {
                const long long a = CLOCK();
                barrier_sync(5, THREADS);
                const long long b = CLOCK();
                if (__any_sync(~0u, shared.moved)) {
                    const float factor[2] = {shared.factor[row()], shared.factor[row() + 8]};
#pragma unroll
                    for (int i = 0; i < 128; i++) o[i / 64][i % 64] *= factor[i / 2 % 2];
                    sum[0] *= factor[0], sum[1] *= factor[1];
                }
                hold(o[0]), hold(o[1]);
                wgmma_fence();
                uint32_t next = pair + 2;
                if (next >= PAIRS) next -= PAIRS;
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const uint32_t v = AT(v) + (c ? next : pair) * PAIR_BYTES;
#pragma unroll
                    for (int s = 0; s < 4; s++) {
                        wgmma_128_columns<Work>(o[c], wgmma_lines(AT(s), s), wgmma_columns(v, s), 1);
                        if (s == 3) wgmma_commit();
                    }
                }
                wgmma_wait<1>();
                if (fresh_thread() % 32 == 0) mbarrier_arrive(AT(half));
                // Here, that it does not come between the products.
                const uint32_t my_row = fresh_thread() / 32 % 4 * 16 + fresh_thread() % 16;
                const uint32_t line = AT(s) + my_row * 128 + ((fresh_thread() % 32 / 16) ^ (my_row & 7)) * 16;
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    uint32_t w[4];
                    load_matrices(w, line ^ (32 * s));
                    sum[0] += sum_of(w[0]) + sum_of(w[2]), sum[1] += sum_of(w[1]) + sum_of(w[3]);
                }
                wgmma_wait<0>();
                hold(o[0]), hold(o[1]);
                if (fresh_thread() % 32 == 0) mbarrier_arrive(AT(done));
                pair = next + 2;
                if (pair >= PAIRS) pair -= PAIRS;
                waited += b - a, worked += CLOCK() - b;
            }
            const int tiles = (p.heads + ROWS - 1) / ROWS, token = item / tiles, first = (item - token * tiles) * ROWS,
                      item_row = token * p.heads + first, rows = p.heads - first, lane = fresh_thread() % 32;
            float inverse[2];
            if (SIDE == 0) mbarrier_wait(AT(last_full), done & 1);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int r = row() + 8 * i;
                float x = sum[i];
                x += __shfl_xor_sync(~0u, x, 1), x += __shfl_xor_sync(~0u, x, 2);
                inverse[i] = x == 0.0f ? 0.0f : inverse_of(x);
                if (SIDE == 0 && lane % 4 == 0 && r < rows)
                    p.lse[item_row + r] = x == 0.0f ? INFINITY : (shared.last_reference[r] + log2_fast(x)) * 0.69314718056f;
            }
            __syncwarp();
            if (SIDE == 0 && lane == 0) mbarrier_arrive(AT(last_empty));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint16_t *to = p.out + (int64_t)(item_row + row() + 8 * i) * 512 + SIDE * 128 + 16 * (lane % 4);
                const int there = row() + 8 * i < rows;
#pragma unroll
                for (int c = 0; c < 4; c++)
#pragma unroll
                    for (int h = 0; h < 2; h++) { // 8 of the 16 columns that this thread has of 64
                        const float *x = o[c / 2] + c % 2 * 32 + 16 * h + 2 * i;
#ifdef FP16
                        store_bf16(to + c / 2 * 256 + c % 2 * 64 + 8 * h, there, inverse[i], x[0], x[1], x[4], x[5], x[8], x[9], x[12], x[13]);
#else
                        store_bf16(to + c / 2 * 256 + c % 2 * 64 + 8 * h, there, inverse[i], x[0], x[4], x[1], x[5], x[8], x[12], x[9], x[13]);
#endif
                    }
            }
        }
        if (CLOCKS && blockIdx.x == 0 && threadIdx.x == 2 * WG) p.clocks[4] = waited, p.clocks[5] = worked;
    }
};

template <int REGISTERS> __device__ __forceinline__ void set_registers()
{
    if constexpr (REGISTERS > 128)
        take_registers<REGISTERS>();
    else
        give_registers<REGISTERS>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_kernel(const __grid_constant__ sparse_params p)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    const uint32_t base = shared_address(memory);
    if (threadIdx.x == 0) {
        mbarrier_init(AT(half), 8), mbarrier_init(AT(done), 8);
        mbarrier_init(AT(last_full), 8), mbarrier_init(AT(last_empty), 4);
        mbarrier_fence_init();
    }
    __syncthreads();
    const int role = __shfl_sync(~0u, threadIdx.x / WG, 0);
    if (role < 2) {
        set_registers<SCORE_REGISTERS>();
        if (role == 0)
            Score<0>(p, shared, base).run();
        else
            Score<1>(p, shared, base).run();
    } else {
        set_registers<PV_REGISTERS>();
        if (role == 2)
            Multiply<0>(p, shared, base).run();
        else
            Multiply<1>(p, shared, base).run();
    }
}
