// Sparse decode over FP8_656 on Hopper, 64 heads a block of threads: keys go through registers.
//
//   warpgroup 0, scores   loads raw keys (a thread: 16 columns of every 64, of two keys), converts them to what is at once A of
//                         S^T = K Q^T and, stored to shared memory, V; S^T to shared memory as it lies in registers
//   warpgroups 1, 2       softmax of 32 heads each, P to shared memory; O of 256 columns each += P V
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
enum { ROWS = 64, KEYS = 64, WG = 128, THREADS = 3 * WG, TILES = 9, TOKEN_BYTES = 656 };
#ifndef SCORE_REGISTERS
#define SCORE_REGISTERS 152
#endif
#ifndef PV_REGISTERS
#define PV_REGISTERS 176
#endif

enum { PAIRS = 6 /* of V: 2 tiles of 64 columns each */, PAIR_BYTES = 2 * TILE_BYTES };
struct Shared {
    unsigned char v[PAIRS][PAIR_BYTES];
    unsigned char q[TILES][TILE_BYTES];
    unsigned char s[8][WG][16]; // S^T: [j] s[4 j .. 4 j + 3] of a thread; P in the first half, once all have read theirs
    unsigned char raw[8][2][WG][16], rope[2][2][WG][16], scale[KEYS][16];
    uint8_t valid[2][WG]; // of a score thread's two keys
    float parts[4][ROWS], factor[ROWS], reference[ROWS]; // by warp: maxima, or sums at an item's end
    uint64_t empty[PAIRS];
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

// A barrier that some only arrive at: who waits does not poll.
__device__ __forceinline__ void barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Has the phase ended? Unlike mbarrier_try, does not suspend the warp.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity)
{
    uint32_t ended;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
    return ended;
}

// Of the two warpgroups of the sums.
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

struct Score {
    const sparse_params &p;
    Shared &shared;
    uint32_t base;
    int tiles, items, blocks;
    uint32_t scale[2][2]; // of a key's four quarters, two in a word
    uint4 raw[3][2];
    bool next_valid[2];
    const uint8_t *next[2];
    int index[2];
    const int32_t *indices; // of the token `ahead`
    Walk ahead; // whose indices are in `index`
    uint4 rope[2][2];
    float s[32]; // of heads 8 (i / 4) + 2 (lane % 4) + i % 2, keys key(i / 2 % 2)
    uint32_t count = 0, pair = 0, pair_parity = 1;
    bool pair_free = false; // as was seen ahead
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
                cp_async_16(AT(rope) + ((i * 2 + h) * WG + threadIdx.x) * 16, token + 528 + 32 * (lane() % 4) + 16 * h, next_valid[i]);
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
                const uint32_t line = AT(q) + c * TILE_BYTES + head * 128 + 4 * t;
                if (c >= TILES) continue;
                const uint4 x = w[i / 4][i % 4];
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
        barrier_sync(1, WG);
    }

    __device__ __forceinline__ uint32_t scale_of(int i, int c) const
    {
        uint32_t r;
        if (c / 2 % 2)
            asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\nmov.b32 %0, {b, b};\n}" : "=r"(r) : "r"(scale[i][c / 4]));
        else
            asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\nmov.b32 %0, {a, a};\n}" : "=r"(r) : "r"(scale[i][c / 4]));
        return r;
    }

    // What the next block begins with, into registers; and what the one after it begins with asked for.
    __device__ __forceinline__ void prepare()
    {
        cp_async_wait<6>();
        __syncwarp();
        take_raw(0), take_raw(1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 w = load_shared_16(AT(scale) + key(i) * 16);
            const float by = Work::IS_BF16 ? 0x1p120f : 1.0f;
            scale[i][0] = Work::pack(__uint_as_float(w.x) * by, __uint_as_float(w.y) * by);
            scale[i][1] = Work::pack(__uint_as_float(w.z) * by, __uint_as_float(w.w) * by);
        }
        shared.valid[count & 1][threadIdx.x] = next_valid[0] + 2 * next_valid[1];
        take_indices();
        __syncwarp(); // every lane has its scales
        ask_rope_and_scales();
    }
    // Its rope, before.
    __device__ __forceinline__ void take_rope()
    {
        cp_async_wait<6>();
#pragma unroll
        for (int i = 0; i < 4; i++) rope[i / 2][i % 2] = load_shared_16(AT(rope) + (i * WG + threadIdx.x) * 16);
    }

    // S^T and V stored, the next block's raw keys asked for. The block before is published meanwhile: its stores are done then.
    __device__ __forceinline__ void score_block(int block)
    {
        hold(s);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint4 &a = rope[0][k / 2], &b = rope[1][k / 2];
            const uint32_t frag[4] = {k % 2 ? a.z : a.x, k % 2 ? b.z : b.x, k % 2 ? a.w : a.y, k % 2 ? b.w : b.y};
            wgmma_64<Bf16>(s, frag, wgmma_lines(AT(q) + 8 * TILE_BYTES, k), k > 0); // rope stays bf16
        }
        wgmma_commit();
        load_indices(); // long before they are taken
        // Of matrix l / 8 of a step: keys 0 to 7 or 8 to 15 of the warp's, the first or last eight of the step's columns.
        const uint32_t my_key = 16 * warp() + lane() % 16;
        const uint32_t v_line = AT(v) + my_key * 128 + ((lane() / 16) ^ (my_key & 7)) * 16;
        uint32_t at[4]; // where a step's matrices go: registers of their own, so that no store waits for one before it
        uint32_t frag[2][4][4];
#pragma unroll
        for (int c = 0; c < 8; c++) {
            if (c >= 1) wgmma_wait<1>();
            uint32_t (&f)[4][4] = frag[c % 2];
            const uint32_t scales[2] = {scale_of(0, c), scale_of(1, c)};
            if (c < 6) cp_async_wait<6>(), take_raw(c + 2);
            if (c == 7) take_rope();
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
            if (c == 0) publish(block > 0);
            if (c % 4 == 0) // two pairs: `pair` is even; addresses are rarely written, for that waits until stores have read them
#pragma unroll
                for (int k = 0; k < 4; k++) at[k] = (v_line ^ (32 * k)) + pair * PAIR_BYTES;
            if (c % 2 == 0) {
                const long long a = CLOCK();
                if (!__all_sync(~0u, pair_free)) mbarrier_wait(AT(empty) + 8 * pair, pair_parity);
                clocks[0] += CLOCK() - a;
                if (++pair == PAIRS) pair = 0, pair_parity ^= 1;
            }
#pragma unroll
            for (int k = 0; k < 4; k++) store_matrices(at[k] + c % 4 * TILE_BYTES, f[k]);
            if (c % 2) pair_free = mbarrier_test(AT(empty) + 8 * pair, pair_parity);
        }
        if (count > 0) barrier_sync(6, THREADS);
        count++;
        prepare();
        wgmma_wait<0>();
        hold(s);
#pragma unroll
        for (int j = 0; j < 8; j++)
            store_16(AT(s) + (j * WG + threadIdx.x) * 16, __float_as_uint(s[4 * j]), __float_as_uint(s[4 * j + 1]), __float_as_uint(s[4 * j + 2]),
                     __float_as_uint(s[4 * j + 3]));
    }
    __device__ __forceinline__ void publish(bool there)
    {
        fence_async_shared();
        if (there) barrier_arrive(5, THREADS);
    }

    __device__ __forceinline__ void run()
    {
        first_loads();
        take_rope(), prepare();
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            load_q(item);
#ifdef EARLY_PREFETCH
            prefetch_q(item + gridDim.x);
#endif
#pragma unroll 1
            for (int k = 0; k < blocks; k++) {
#ifndef EARLY_PREFETCH
                if (k == max(blocks - 4, 0)) prefetch_q(item + gridDim.x);
#endif
                const long long a = CLOCK();
                score_block(k);
                if (CLOCKS) clocks[1] += CLOCK() - a, clocks[3]++;
            }
            publish(true);
        }
        if (count > 0) barrier_sync(6, THREADS);
        if (CLOCKS && blockIdx.x == 0 && threadIdx.x == 0)
            for (int i = 0; i < 4; i++) p.clocks[i] = clocks[i];
    }
};

template <int SIDE> struct Multiply {
    const sparse_params &p;
    Shared &shared;
    uint32_t base;
    float o[2][64];                // of columns 256 c + 128 SIDE …
    float reference[8], sums[8];   // of heads 32 SIDE + 8 (h / 2) + 2 (lane % 4) + h % 2; sums of this thread's keys

    __device__ __forceinline__ Multiply(const sparse_params &params, Shared &memory, uint32_t address)
        : p(params), shared(memory), base(address)
    {
    }
    static __device__ __forceinline__ int lane() { return fresh_thread() % 32; }
    static __device__ __forceinline__ int warp() { return fresh_thread() / 32 % 4; }
    static __device__ __forceinline__ int row() { return warp() * 16 + lane() / 4; }
    static __device__ __forceinline__ int head(int h) { return 32 * SIDE + 8 * (h / 2) + 2 * (lane() % 4) + h % 2; }

    // P of this warpgroup's heads, in shared memory; true if O must be multiplied by `factor` first. All 256 threads together.
    __device__ __forceinline__ bool softmax(uint32_t count)
    {
        float s[16];
        const int valid = shared.valid[count & 1][fresh_thread() % WG];
        const float bias[2] = {valid & 1 ? 0.0f : -INFINITY, valid & 2 ? 0.0f : -INFINITY};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint4 w = load_shared_16(AT(s) + ((4 * SIDE + j) * WG + fresh_thread() % WG) * 16);
            s[4 * j] = __uint_as_float(w.x) + bias[0], s[4 * j + 1] = __uint_as_float(w.y) + bias[0], s[4 * j + 2] = __uint_as_float(w.z) + bias[1],
                  s[4 * j + 3] = __uint_as_float(w.w) + bias[1];
        }
        float over = -INFINITY;
#pragma unroll
        for (int h = 0; h < 8; h++)
            over = fmaxf(over, fmaf(fmaxf(s[4 * (h / 2) + h % 2], s[4 * (h / 2) + h % 2 + 2]), p.scale_log2, -reference[h]));
        const bool moves = any_of_256(2, over > 8.0f);
        if (moves) {
#pragma unroll
            for (int h = 0; h < 8; h++) {
                float m = fmaxf(s[4 * (h / 2) + h % 2], s[4 * (h / 2) + h % 2 + 2]) * p.scale_log2;
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
                if (lane() < 4) shared.parts[warp()][head(h)] = m;
            }
            barrier_sync(3 + SIDE, WG);
#pragma unroll
            for (int h = 0; h < 8; h++) {
                const int at = head(h);
                const float to = fmaxf(reference[h], fmaxf(fmaxf(shared.parts[0][at], shared.parts[1][at]), fmaxf(shared.parts[2][at], shared.parts[3][at])));
                const float factor = exp2_fast(reference[h] - to);
                sums[h] *= factor, reference[h] = to;
                if (lane() < 4 && warp() == 0) shared.factor[at] = factor;
            }
        }
        const int m = lane() / 8, line = 32 * SIDE + 8 * (m / 2) + lane() % 8;
        const uint32_t to = AT(s) + line * 128 + (((2 * warp() + m % 2) ^ (line & 7)) * 16);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            uint32_t words[4];
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int h = 2 * (j + n);
                    const float x = exp2_fast(fmaf(s[4 * (j + n) + 2 * i], p.scale_log2, -reference[h])),
                                y = exp2_fast(fmaf(s[4 * (j + n) + 2 * i + 1], p.scale_log2, -reference[h + 1]));
                    sums[h] += x, sums[h + 1] += y;
                    words[2 * n + i] = Work::pack(x, y);
                }
            store_matrices_transposed(to + j * 1024, words);
        }
        fence_async_shared();
        barrier_sync(2, 2 * WG);
        return moves;
    }

    __device__ __forceinline__ void run()
    {
        long long waited = 0, worked = 0;
        uint32_t count = 0, pair = SIDE;
        for (int item = blockIdx.x; item < p.tokens * ((p.heads + ROWS - 1) / ROWS); item += gridDim.x) {
#pragma unroll
            for (int i = 0; i < 128; i++) o[i / 64][i % 64] = 0.0f;
#pragma unroll
            for (int h = 0; h < 8; h++) sums[h] = 0.0f, reference[h] = -1e30f;
#pragma unroll 1
            for (int left = (p.topk + KEYS - 1) / KEYS; left; left--, count++) {
                const long long a = CLOCK();
                barrier_sync(5, THREADS);
                const long long b = CLOCK();
                if (softmax(count)) {
                    const float factor[2] = {shared.factor[row()], shared.factor[row() + 8]};
#pragma unroll
                    for (int i = 0; i < 128; i++) o[i / 64][i % 64] *= factor[i / 2 % 2];
                }
                hold(o[0]), hold(o[1]);
                wgmma_fence();
                uint32_t next = pair + 2;
                if (next >= PAIRS) next -= PAIRS;
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const uint32_t v = AT(v) + (c ? next : pair) * PAIR_BYTES;
#pragma unroll
                    for (int s = 0; s < 4; s++) wgmma_128_columns<Work>(o[c], wgmma_lines(AT(s), s), wgmma_columns(v, s), 1);
                    wgmma_commit();
                }
                wgmma_wait<1>();
                if (lane() == 0) mbarrier_arrive(AT(empty) + 8 * pair);
                wgmma_wait<0>();
                hold(o[0]), hold(o[1]);
                barrier_arrive(6, THREADS);
                if (lane() == 0) mbarrier_arrive(AT(empty) + 8 * next);
                pair = next + 2;
                if (pair >= PAIRS) pair -= PAIRS;
                waited += b - a, worked += CLOCK() - b;
            }
#pragma unroll
            for (int h = 0; h < 8; h++) {
                float x = sums[h];
                x += __shfl_xor_sync(~0u, x, 4), x += __shfl_xor_sync(~0u, x, 8), x += __shfl_xor_sync(~0u, x, 16);
                if (lane() < 4) shared.parts[warp()][head(h)] = x;
                if (lane() < 4 && warp() == 0) shared.reference[head(h)] = reference[h];
            }
            barrier_sync(2, 2 * WG);
            const int tiles = (p.heads + ROWS - 1) / ROWS, token = item / tiles, of = (item - token * tiles) * ROWS,
                      item_row = token * p.heads + of, rows = p.heads - of;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int r = row() + 8 * i;
                const float x = shared.parts[0][r] + shared.parts[1][r] + shared.parts[2][r] + shared.parts[3][r];
                const float inverse = x == 0.0f ? 0.0f : inverse_of(x);
                if (SIDE == 0 && lane() % 4 == 0 && r < rows)
                    p.lse[item_row + r] = x == 0.0f ? INFINITY : (shared.reference[r] + log2_fast(x)) * 0.69314718056f;
                uint16_t *to = p.out + (int64_t)(item_row + r) * 512 + SIDE * 128 + 16 * (lane() % 4);
                const int there = r < rows;
#pragma unroll
                for (int c = 0; c < 4; c++)
#pragma unroll
                    for (int h = 0; h < 2; h++) { // 8 of the 16 columns that this thread has of 64
                        const float *x = o[c / 2] + c % 2 * 32 + 16 * h + 2 * i;
                        uint16_t *const at = to + c / 2 * 256 + c % 2 * 64 + 8 * h;
#ifdef FP16
                        store_bf16(at, there, inverse, x[0], x[1], x[4], x[5], x[8], x[9], x[12], x[13]);
#else
                        store_bf16(at, there, inverse, x[0], x[4], x[1], x[5], x[8], x[12], x[9], x[13]);
#endif
                    }
            }
        }
        if (CLOCKS && blockIdx.x == 0 && threadIdx.x == WG) p.clocks[4] = waited, p.clocks[5] = worked;
    }
};

template <int REGISTERS> __device__ __forceinline__ void set_registers()
{
    if constexpr (REGISTERS > 168)
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
        for (int i = 0; i < PAIRS; i++) mbarrier_init(AT(empty) + 8 * i, 4);
        mbarrier_fence_init();
    }
    __syncthreads();
    if (threadIdx.x < WG) {
        set_registers<SCORE_REGISTERS>();
        Score(p, shared, base).run();
    } else {
        set_registers<PV_REGISTERS>();
        if (threadIdx.x < 2 * WG)
            Multiply<0>(p, shared, base).run();
        else
            Multiply<1>(p, shared, base).run();
    }
}
