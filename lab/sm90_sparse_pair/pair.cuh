// Sparse decode over FP8_656 on Hopper, 128 heads a cluster of two blocks of threads: each has half of every key's columns.
//
//   block r of a cluster has columns [256 r, 256 r + 256) of the codes, and [32 r, 32 r + 32) of the rope columns, of all keys:
//   warpgroup 0, scores     loads raw keys (a thread: 16 columns of every 64, of two keys), makes fp16 of them, which are at once
//                           A of S^T = K Q^T (128 heads, a part of the sum) and, stored to shared memory, V
//                           sends the sums of 64 heads to the other block, adds what it gets for heads [64 r, 64 r + 64),
//                           softmax; the weights P to its own shared memory and to the other block's
//   warpgroups 1, 2         O of the block's heads (1), of the other block's (2), 256 columns each, += P V
//
// A line of Q is head n ^ 64 r, so that sums 0 to 63 of a block are those it keeps.
// S^T of block k + 1 is multiplied while the sums of block k travel and become weights (-DSERIAL: one after the other).
//
// Who waits for what (k: blocks of keys; the same count in both blocks of a cluster). Every wait is for an older block of keys,
// or for an earlier step of the same one, so that none waits in a circle. All barriers' phases are one a block of keys (V's one a round
// of its ring), and whoever may end a phase has first heard that its waiters have seen the one before:
//   part_full    the other block's sums of k are in `part`           ends by bytes (st.async), armed by thread 0 for k + 1 as soon as it has seen k
//   part_empty   `part` there has been read up to k                  its 4 score warps arrive from afar; waited for before sums of k + 1 are sent
//   p_full       P and V of k are here                               4 score warps arrive; warpgroup 1 waits
//   v_full       V of k is here                                      4 score warps arrive with p_full; warpgroup 2 waits (p_full could run ahead of it:
//                                                                    P's place does not wait for warpgroup 2 of the same block)
//   p_peer_full  the other block's P of k is here                    ends by bytes (bulk copies), armed by warpgroup 2 as soon as it has seen k
//   p_empty      P of k is in registers: warpgroup 1's 4 warps here, and warpgroup 2's 4 warps there (whose copy is thereby done);
//                waited for before P of k + 1 is written
//   v_empty      V of k has been multiplied: 8 warps here; three places
//   sum_full, sum_peer_full, sum_empty: the same for the sums of weights at an item's end.
// Arrivals from afar say only "I have read": nothing needs to be released, so they are of the default form. No block ends before the other:
// a barrier of the cluster is the last thing that they do.
//
// Column order: of every 64 columns lane t of four has 16, four of them (one raw word) in each step of 16: as k = 2t, 2t + 1
// and 2t + 8, 2t + 9 of A's fragment. Q is permuted likewise; V, stored by stmatrix from the fragments, and O have the same
// order, so that a thread ends with 16 neighbouring columns of every 64. Of the 32 rope columns a lane has 8.
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
    long long *clocks; // of block 0: see CLOCK_NAMES
    unsigned char *dump; // LAB_DUMP: of the first block of keys of cluster 0, [rank][P, P of the other, V]
    int *stuck;        // LAB_BOUND: [block][warp][4] on the host: 1 + barrier's offset, parity, count, lane's thread
};

enum { HEADS = 128, ROWS = 64 /* heads a block has the softmax of */, KEYS = 64, WG = 128, THREADS = 3 * WG, TOKEN_BYTES = 656 };
enum { CHUNKS = 4 /* of 64 columns */, V_BLOCKS = 3, V_BYTES = CHUNKS * TILE_BYTES, Q_TILE_BYTES = HEADS * LINE_BYTES };
#ifndef SCORE_REGISTERS
#define SCORE_REGISTERS 184 // 184 + 2 * 160 = 504 = 3 * 168, what the block is launched with
#endif
#ifndef PV_REGISTERS
#define PV_REGISTERS 160
#endif
#ifndef BEGIN_AT // after which chunk of k + 1 the sums of k are waited for
#define BEGIN_AT 1
#endif

using Work = Fp16;

struct Header { // of a P
    float factor[ROWS];
    uint32_t moved, unused[3];
};
struct Shared {
    unsigned char v[V_BLOCKS][V_BYTES];
    unsigned char q[CHUNKS][Q_TILE_BYTES], q_rope[HEADS * 64];
    unsigned char p[TILE_BYTES], p_peer[TILE_BYTES]; // P^T: a line is a key
    unsigned char part[8][WG][16];
    unsigned char raw[CHUNKS][2][WG][16], rope[2][WG][16], scale[KEYS][8];
    Header header, header_peer;
    float most[4][ROWS], sum[ROWS], reference[ROWS], last_reference[ROWS], sum_peer[ROWS];
    uint64_t part_full, part_empty, p_full, p_peer_full, p_empty, v_full[V_BLOCKS], v_empty[V_BLOCKS], sum_full, sum_peer_full, sum_empty;
};
static_assert(sizeof(Shared) <= 227 * 1024, "");
// Where products find it. An address in shared memory has the block's rank in its cluster in bits 24 and up; in a descriptor it would end in
// the stride between tiles.
#define TILE_AT(member) ((base & 0x3ffff) + (uint32_t)offsetof(Shared, member))
#define AT(member) (base + (uint32_t)offsetof(Shared, member))
enum { PART_BYTES = 8 * WG * 16, P_PEER_BYTES = TILE_BYTES + sizeof(Header), SUM_BYTES = 4 * ROWS };

#ifdef LAB_CLOCK
#define CLOCK() clock64()
#else
#define CLOCK() 0ll
#endif
enum { C_BLOCKS, C_SCORE, C_V_EMPTY, C_PART_EMPTY, C_PART_FULL, C_P_EMPTY, C_SOFTMAX, C_ITEM, C_OWN_WAIT, C_OWN_WORK, C_PEER_WAIT, C_PEER_WORK, CLOCKS };
#define CLOCK_NAMES "blocks", "scores", "wait v", "wait part_empty", "wait part", "wait p_empty", "softmax", "item end", "own waits", "own works", "peer's waits", "peer's works"

// ---- Clusters ----
__device__ __forceinline__ uint32_t cluster_rank()
{
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ __forceinline__ uint32_t address_at(uint32_t address, uint32_t rank)
{
    uint32_t r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
}
__device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void arrive_remote(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void store_remote_16(uint32_t to, uint32_t barrier, float a, float b, float c, float d)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(a), "f"(b), "f"(c),
                 "f"(d), "r"(barrier) : "memory");
}
__device__ __forceinline__ void store_remote_4(uint32_t to, uint32_t barrier, float a)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(a), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_remote(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from), "r"(bytes),
                 "r"(barrier) : "memory");
}

// A converged warp waits; with LAB_BOUND not for ever.
__device__ __forceinline__ void wait_for(const sparse_params &p, uint32_t base, uint32_t barrier, uint32_t parity, uint32_t count)
{
#ifdef LAB_BOUND
    const long long start = clock64();
    bool told = false;
    while (!__all_sync(~0u, mbarrier_try(barrier, parity))) {
        const long long waited = clock64() - start;
        if (waited > 400000000ll && !told) {
            told = true;
            volatile int *to = p.stuck + (blockIdx.x * (THREADS / 32) + threadIdx.x / 32) * 4;
            if (threadIdx.x % 32 == 0) to[1] = (int)parity, to[2] = (int)count, to[3] = (int)threadIdx.x, to[0] = 1 + (int)(barrier - base);
            __threadfence_system();
        }
        if (waited > 1200000000ll) __trap();
    }
#else
    mbarrier_wait(barrier, parity);
#endif
}
#define WAIT(member, parity, count) wait_for(p, base, AT(member), parity, count)
#define WAIT_AT(address, parity, count) wait_for(p, base, address, parity, count)

__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// S^T (+)= K Q^T: A in registers, 128 lines of B.
__device__ __forceinline__ void wgmma_scores(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile(WGMMA("m64n128k16", "f16", WGMMA_NAMES_64, "%69", "{%64, %65, %66, %67}", "%68", "0")
                 : WGMMA_SUMS_32(d, 0), WGMMA_SUMS_32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
// O += P V: A in registers, 256 columns of B.
__device__ __forceinline__ void wgmma_output(float (&d)[128], const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile(WGMMA("m64n256k16", "f16", WGMMA_NAMES_128, "%133", "{%128, %129, %130, %131}", "%132", "1")
                 : WGMMA_D_128(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
// The same with A in shared memory, a line a column of it (a key).
__device__ __forceinline__ void wgmma_output(float (&d)[128], uint64_t a, uint64_t b, int add)
{
    asm volatile(WGMMA("m64n256k16", "f16", WGMMA_NAMES_128, "%130", "%128", "%129", "1, 1")
                 : WGMMA_D_128(d)
                 : "l"(a), "l"(b), "r"(add));
}
// Lines of 64 bytes, swizzled by 64: 16-byte piece i of line n is at i ^ (n / 2 % 4).
__device__ __forceinline__ uint64_t wgmma_short_lines(uint32_t tile, int step)
{
    const uint32_t low = (tile >> 4) + 2 * step;
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(512u >> 4 | 2u << 30));
    return descriptor;
}

__device__ __forceinline__ bool any_of_128(int barrier, bool mine)
{
    uint32_t any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(any) : "r"((int)mine), "r"(barrier) : "memory");
    return any;
}

// Four e4m3 values c0..c3 → (c0, c1), (c2, c3) in fp16, times scale (twice in a word).
__device__ __forceinline__ void convert(uint32_t w, uint32_t scale, uint32_t &low, uint32_t &high)
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
__device__ __forceinline__ float2 load_shared_floats(uint32_t from)
{
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(from) : "memory");
    return r;
}

// The blocks of all items of this cluster, one after the other.
struct Walk {
    int item, block;
};

struct Score {
    const sparse_params &p;
    Shared &shared;
    uint32_t base, rank, peer; // base of the other block
    int items, blocks;
    uint32_t scale[2]; // two in fp16
    uint4 raw[2];
    uint32_t valid;         // bit i: key i of the block that is multiplied
    int next[2]; // keys, or -1
    int index[2];
    const int32_t *indices; // of the token `ahead`
    Walk ahead;             // whose indices are in `index`
    float s[64];            // part of S^T of keys (lane / 4) + 8 (i / 2 % 2), lines 8 (i / 4) + 2 (lane % 4) + i % 2
    float kept[32], sums[16]; // of heads 8 (h / 2) + 2 (lane % 4) + h % 2 of the block's 64
    uint32_t count = 0;                      // blocks multiplied; `kept` is of block count - 1
    uint32_t v_at = 0, v_parity = 0, kept_v = 0;
    long long clocks[CLOCKS] = {};

    __device__ __forceinline__ Score(const sparse_params &params, Shared &memory, uint32_t address, uint32_t r)
        : p(params), shared(memory), base(address), rank(r)
    {
        peer = address_at(base, rank ^ 1);
        items = p.tokens, blocks = (p.topk + KEYS - 1) / KEYS;
    }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
    static __device__ __forceinline__ int key(int i) { return 16 * warp() + lane() / 4 + 8 * i; }
#define AT_PEER(member) (peer + (uint32_t)offsetof(Shared, member))

    __device__ __forceinline__ void find_indices() { indices = p.indices + (int64_t)ahead.item * p.topk; }
    __device__ __forceinline__ void load_indices()
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = ahead.block * KEYS + key(i);
            index[i] = ahead.item < items && at < p.topk ? __ldg(indices + at) : -1;
        }
        if (++ahead.block == blocks) ahead.block = 0, ahead.item += gridDim.x / 2, find_indices();
    }
    __device__ __forceinline__ void take_indices()
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
            next[i] = (uint32_t)index[i] < (uint32_t)p.keys ? index[i] : -1;
    }
    __device__ __forceinline__ const uint8_t *token(int i) const { return p.cache + (int64_t)max(next[i], 0) * TOKEN_BYTES; }
    // Chunk c of this block, from shared memory.
    __device__ __forceinline__ void take_raw(int c)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) raw[i] = load_shared_16(AT(raw) + ((c * 2 + i) * WG + threadIdx.x) * 16);
    }
    // Raw bytes of the next block; a group each.
    __device__ __forceinline__ void ask_chunk(int c)
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
            cp_async_16(AT(raw) + ((c * 2 + i) * WG + threadIdx.x) * 16, token(i) + (256 * rank + 16 * (lane() % 4)) + 64 * c, next[i] >= 0);
        cp_async_commit();
    }
    __device__ __forceinline__ void ask_rope_and_scales()
    {
        const int t = lane() % 4;
#pragma unroll
        for (int i = 0; i < 2; i++)
            cp_async_16(AT(rope) + (i * WG + threadIdx.x) * 16, token(i) + (64 * rank + 16 * t) + 528, next[i] >= 0);
        const int mine = t ? next[1] : next[0];
        if (t < 2) cp_async_8(AT(scale) + (key(0) + 8 * t) * 8, p.cache + (int64_t)max(mine, 0) * TOKEN_BYTES + 8 * rank + 512, mine >= 0);
        cp_async_commit();
    }
    __device__ __forceinline__ void first_loads()
    {
        ahead = {(int)blockIdx.x / 2, 0};
        find_indices();
        load_indices(), take_indices(), load_indices();
        ask_rope_and_scales();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) ask_chunk(c);
    }

    __device__ __forceinline__ void prefetch_q(int item)
    {
        if (item >= items) return;
        const char *from = (const char *)(p.q + (int64_t)item * HEADS * 576) + rank * (HEADS * 576);
        for (int line = threadIdx.x; line < HEADS * 576 / 128; line += WG) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + 128 * line));
    }

    __device__ __forceinline__ void load_q(int item)
    {
        barrier_sync(1, WG); // all products with the old Q are done
        const uint4 *const q = (const uint4 *)(p.q + (int64_t)item * HEADS * 576);
        // Eight lanes take 128 bytes of a head, so that both sides of the copy take all banks and whole sectors.
        const int u = lane() % 8, t = u / 2, first = 4 * warp() + lane() / 8, tr = lane() % 4, first_r = 8 * warp() + lane() / 4;
        const uint4 *const codes = q + (first ^ (int)(64 * rank)) * 72 + 32 * rank + u; // line first + 16 i: 64 rank flips i's bit 2
        const uint4 *const ropes = q + (first_r ^ (int)(64 * rank)) * 72 + 64 + 4 * rank + tr;
        const int flip = rank ? -2 * 64 * 72 : 0;
        uint4 wr[4];
#pragma unroll
        for (int i = 0; i < 4; i++) wr[i] = __ldg(ropes + 32 * i * 72 + (i >= 2 ? flip : 0));
#pragma unroll
        for (int part = 0; part < CHUNKS / 2; part++) {
            uint4 w[2][8];
#pragma unroll
            for (int i = 0; i < 16; i++) w[i / 8][i % 8] = __ldg(codes + 16 * (i % 8) * 72 + (i % 8 >= 4 ? flip : 0) + 8 * (2 * part + i / 8));
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int n = first + 16 * (i % 8);
                const uint4 x = w[i / 8][i % 8];
                const uint32_t line = AT(q) + (2 * part + i / 8) * Q_TILE_BYTES + n * 128 + 4 * t;
                const uint32_t in[4] = {to_fp16(x.x), to_fp16(x.y), to_fp16(x.z), to_fp16(x.w)};
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int step = 2 * (u % 2) + half;
                    store_shared_4(line + ((2 * step ^ (n & 7)) * 16), in[2 * half]);
                    store_shared_4(line + (((2 * step + 1) ^ (n & 7)) * 16), in[2 * half + 1]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int n = first_r + 32 * i;
            const uint32_t line = AT(q_rope) + n * 64 + 4 * tr;
            const uint32_t in[4] = {to_fp16(wr[i].x), to_fp16(wr[i].y), to_fp16(wr[i].z), to_fp16(wr[i].w)};
#pragma unroll
            for (int piece = 0; piece < 4; piece++) store_shared_4(line + ((piece ^ (n / 2 & 3)) * 16), in[piece]);
        }
        fence_async_shared();
        barrier_sync(1, WG);
    }

    // Part of S^T, V stored, and the next block's raw keys asked for. PENDING: the softmax of the block before between its products.
    template <bool PENDING> __device__ __forceinline__ void score_block(bool first)
    {
        cp_async_wait<3>();
        __syncwarp();
        take_raw(0);
        valid = (uint32_t)(next[0] >= 0) | (uint32_t)(next[1] >= 0) << 1;
        uint4 rope[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            
            const float2 two = load_shared_floats(AT(scale) + key(i) * 8);
            scale[i] = Work::pack(two.x, two.y);
            const uint4 w = load_shared_16(AT(rope) + (i * WG + threadIdx.x) * 16);
            rope[i] = make_uint4(to_fp16(w.x), to_fp16(w.y), to_fp16(w.z), to_fp16(w.w));
        }
        hold(s);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const uint4 &a = rope[0], &b = rope[1];
            const uint32_t frag[4] = {k ? a.z : a.x, k ? b.z : b.x, k ? a.w : a.y, k ? b.w : b.y};
            wgmma_scores(s, frag, wgmma_short_lines(TILE_AT(q_rope), k), k > 0);
        }
        wgmma_commit();
        take_indices(), load_indices();
        __syncwarp(); // every lane has its scales
        ask_rope_and_scales();
        // Of matrix l / 8 of a step: keys 0 to 7 or 8 to 15 of the warp's, the first or last eight of the step's columns.
        const uint32_t my_key = 16 * warp() + lane() % 16;
        const uint32_t v_line = AT(v) + my_key * 128 + ((lane() / 16) ^ (my_key & 7)) * 16;
        uint32_t at[4]; // where a step's matrices go: registers of their own, so that no store waits for one before it
        uint32_t frag[2][2][4]; // of two steps, multiplied while the next two are converted
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            if (c >= 1) cp_async_wait<CHUNKS>(), take_raw(c);
            if (c == 0) {
                const long long a = CLOCK();
                WAIT_AT(AT(v_empty) + 8 * v_at, v_parity ^ 1, count);
                clocks[C_V_EMPTY] += CLOCK() - a;
#pragma unroll
                for (int k = 0; k < 4; k++) at[k] = (v_line ^ (32 * k)) + v_at * V_BYTES;
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (c || h) wgmma_wait<1>();
                uint32_t (&f)[2][4] = frag[h];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint32_t two = __byte_perm(scale[i], 0, c < 2 ? 0x1010 : 0x3232);
                    convert(h ? raw[i].z : raw[i].x, two, f[0][i], f[0][i + 2]);
                    convert(h ? raw[i].w : raw[i].y, two, f[1][i], f[1][i + 2]);
                }
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 2; k++) wgmma_scores(s, f[k], wgmma_lines(TILE_AT(q) + c * Q_TILE_BYTES, 2 * h + k), 1);
                wgmma_commit();
                if (h == 1) ask_chunk(c);
#pragma unroll
                for (int k = 0; k < 2; k++) store_matrices(at[2 * h + k] + c * TILE_BYTES, f[k]);
            }
            if constexpr (PENDING) {
                if (c == BEGIN_AT) softmax_begin(first);
                if (c == BEGIN_AT + 1) softmax_slice<0, 4>();
                if (c == 3) {
                    if (BEGIN_AT == 3) softmax_slice<0, 4>();
                    softmax_slice<4, 8>(), softmax_end();
                }
            }
        }
        wgmma_wait<0>();
        hold(s);
    }

    // The sums of 64 heads go to the other block, the others are kept.
    __device__ __forceinline__ void send()
    {
        const long long a = CLOCK();
        WAIT(part_empty, count & 1 ^ 1, count);
        clocks[C_PART_EMPTY] += CLOCK() - a;
        const uint32_t to = AT_PEER(part) + threadIdx.x * 16, barrier = AT_PEER(part_full);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            store_remote_16(to + j * (WG * 16), barrier, s[32 + 4 * j], s[33 + 4 * j], s[34 + 4 * j], s[35 + 4 * j]);
#pragma unroll
            for (int i = 0; i < 4; i++) kept[4 * j + i] = valid >> i / 2 & 1 ? s[4 * j + i] : -INFINITY;
        }
        kept_v = v_at;
        if (++v_at == V_BLOCKS) v_at = 0, v_parity ^= 1;
        count++;
    }

    __device__ __forceinline__ float2 reference(int j) const { return load_shared_floats(AT(reference) + (8 * j + 2 * (lane() % 4)) * 4); }
    // The scores are whole; references that hold for them.
    __device__ __forceinline__ void softmax_begin(bool first)
    {
        const uint32_t parity = (count - 1) & 1;
        const long long a = CLOCK();
        WAIT(part_full, parity, count - 1);
        clocks[C_PART_FULL] += CLOCK() - a;
        if (threadIdx.x == 0) mbarrier_arrive_expect(AT(part_full), PART_BYTES);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint4 w = load_shared_16(AT(part) + (j * WG + threadIdx.x) * 16);
            kept[4 * j] += __uint_as_float(w.x), kept[4 * j + 1] += __uint_as_float(w.y);
            kept[4 * j + 2] += __uint_as_float(w.z), kept[4 * j + 3] += __uint_as_float(w.w);
        }
        float over = -INFINITY;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 r = reference(j);
            over = fmaxf(over, fmaxf(fmaf(fmaxf(kept[4 * j], kept[4 * j + 2]), p.scale_log2, -r.x),
                                     fmaf(fmaxf(kept[4 * j + 1], kept[4 * j + 3]), p.scale_log2, -r.y)));
        }
        const bool moves = any_of_128(1, first || over > 8.0f);
        if (lane() == 0) arrive_remote(AT_PEER(part_empty)); // all lanes' part has been read
        const long long b = CLOCK();
        WAIT(p_empty, parity ^ 1, count - 1);
        clocks[C_P_EMPTY] += CLOCK() - b;
        if (moves) {
            const int t = lane() % 4;
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float m = fmaxf(kept[4 * j + e], kept[4 * j + 2 + e]) * p.scale_log2;
                    m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
                    m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
                    m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
                    if (lane() < 4) shared.most[warp()][8 * j + 2 * t + e] = m;
                }
            barrier_sync(1, WG);
            if (threadIdx.x < ROWS) {
                const int h = threadIdx.x;
                const float m = fmaxf(fmaxf(shared.most[0][h], shared.most[1][h]), fmaxf(shared.most[2][h], shared.most[3][h]));
                const float from = shared.reference[h], to = fmaxf(m, first ? -1e30f : from);
                shared.header.factor[h] = first ? 0.0f : exp2_fast(from - to);
                shared.reference[h] = to;
            }
            barrier_sync(1, WG);
#pragma unroll
            for (int h = 0; h < 16; h++) sums[h] *= shared.header.factor[8 * (h / 2) + 2 * t + h % 2];
        }
        if (threadIdx.x == 0) shared.header.moved = moves && !first;
    }
    // Weights of heads [8 FROM, 8 TO).
    template <int FROM, int TO> __device__ __forceinline__ void softmax_slice()
    {
        const int m = lane() / 8, line = 16 * warp() + lane() % 8 + 8 * (m % 2);
#pragma unroll
        for (int j = FROM; j < TO; j += 2) {
            uint32_t words[4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 r = reference(j + h);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float x = exp2_fast(fmaf(kept[4 * (j + h) + 2 * i], p.scale_log2, -r.x)),
                                y = exp2_fast(fmaf(kept[4 * (j + h) + 2 * i + 1], p.scale_log2, -r.y));
                    sums[2 * (j + h)] += x, sums[2 * (j + h) + 1] += y;
                    words[2 * h + i] = Work::pack(x, y);
                }
            }
            store_matrices(AT(p) + line * 128 + (((j + m / 2) ^ (line & 7)) * 16), words);
        }
    }
    // P here and there.
    __device__ __forceinline__ void softmax_end()
    {
        fence_async_shared();
        __syncwarp();
        if (elect_one()) {
            copy_remote(AT_PEER(p_peer) + warp() * 2048, AT(p) + warp() * 2048, 2048, AT_PEER(p_peer_full));
            if (warp() == 0) copy_remote(AT_PEER(header_peer), AT(header), sizeof(Header), AT_PEER(p_peer_full));
            mbarrier_arrive(AT(p_full));
            mbarrier_arrive(AT(v_full) + 8 * kept_v);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void softmax(bool first)
    {
        const long long a = CLOCK();
        softmax_begin(first);
        softmax_slice<0, 4>(), softmax_slice<4, 8>();
        softmax_end();
        clocks[C_SOFTMAX] += CLOCK() - a;
    }

    __device__ __forceinline__ void run()
    {
        first_loads();
        uint32_t done = 0;
        for (int item = blockIdx.x / 2; item < items; item += gridDim.x / 2, done++) {
            long long a = CLOCK();
            load_q(item);
            prefetch_q(item + gridDim.x / 2);
#pragma unroll
            for (int i = 0; i < 16; i++) sums[i] = 0.0f;
            clocks[C_ITEM] += CLOCK() - a;
            a = CLOCK();
#ifdef SERIAL
            for (int k = 0; k < blocks; k++) {
                a = CLOCK();
                score_block<false>(false);
                clocks[C_SCORE] += CLOCK() - a;
                send(), softmax(k == 0);
            }
#else
            score_block<false>(false), send();
            for (int k = 1; k < blocks; k++) score_block<true>(k == 1), send();
            clocks[C_SCORE] += CLOCK() - a;
            softmax(blocks == 1);
#endif
            a = CLOCK();
            WAIT(sum_empty, done & 1 ^ 1, done);
            barrier_sync(1, WG); // the maxima have been read
#pragma unroll
            for (int h = 0; h < 16; h++) {
                float x = sums[h];
                x += __shfl_xor_sync(~0u, x, 4), x += __shfl_xor_sync(~0u, x, 8), x += __shfl_xor_sync(~0u, x, 16);
                if (lane() < 4) shared.most[warp()][8 * (h / 2) + 2 * lane() + h % 2] = x;
            }
            barrier_sync(1, WG);
            if (threadIdx.x < ROWS) {
                const int h = threadIdx.x;
                const float sum = shared.most[0][h] + shared.most[1][h] + shared.most[2][h] + shared.most[3][h];
                shared.sum[h] = sum, shared.last_reference[h] = shared.reference[h];
                store_remote_4(AT_PEER(sum_peer) + 4 * h, AT_PEER(sum_peer_full), sum);
            }
            __syncwarp();
            if (lane() == 0) mbarrier_arrive(AT(sum_full));
            clocks[C_ITEM] += CLOCK() - a;
        }
        if (p.clocks && blockIdx.x == 0 && threadIdx.x == 0) {
            clocks[C_BLOCKS] = count;
            for (int i = 0; i <= C_ITEM; i++) p.clocks[i] = clocks[i];
        }
    }
};

// 128 of its registers are O, 24 are for all else: what is needed once an item is computed anew there.
struct Multiply {
    const sparse_params &p;
    Shared &shared;
    uint32_t base;
    float o[128];

    __device__ __forceinline__ Multiply(const sparse_params &params, Shared &memory, uint32_t address)
        : p(params), shared(memory), base(address)
    {
    }
    template <bool OWN> __device__ __forceinline__ void free_p() const
    {
        if (threadIdx.x % 32) return;
        if (OWN) mbarrier_arrive(AT(p_empty));
        else arrive_remote(address_at(AT(p_empty), cluster_rank() ^ 1));
    }
    // OWN: the heads whose softmax this block does; or those of the other block.
    template <bool OWN> __device__ __forceinline__ void run()
    {
        long long waited = 0, worked = 0;
        uint32_t count = 0, done = 0, v_at = 0, v_parity = 0;
#pragma unroll
        for (int i = 0; i < 128; i++) o[i] = 0.0f;
        for (int item = fresh_block() / 2; item < p.tokens; item += gridDim.x / 2, done ^= 1) {
#pragma unroll 1
            for (int key = 0; key < p.topk; key += KEYS, count ^= 1) {
                const long long a = CLOCK();
                if (OWN) {
                    WAIT(p_full, count, count);
                } else {
                    WAIT(p_peer_full, count, count);
                    if (threadIdx.x == 2 * WG) mbarrier_arrive_expect(AT(p_peer_full), P_PEER_BYTES);
                }
                const long long b = CLOCK();
                const uint32_t header = OWN ? AT(header) : AT(header_peer);
                if (__any_sync(~0u, load_shared_4(header + offsetof(Header, moved)))) {
                    const int t = fresh_thread(), row = t / 32 % 4 * 16 + t % 32 / 4;
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const float factor = __uint_as_float(load_shared_4(header + 4 * (row + 8 * half)));
#pragma unroll
                        for (int i = 0; i < 128; i++)
                            if (i / 2 % 2 == half) o[i] *= factor;
                    }
                }
#ifdef P_REGISTERS
                uint32_t weights[4][4];
                {
                    // Matrix m of a step of 16 keys: heads 8 (m % 2) … of the warp's 16, keys 8 (m / 2) …
                    const int t = fresh_thread(), m = t % 32 / 8, r = t % 8;
                    const uint32_t line = (OWN ? AT(p) : AT(p_peer)) + (r + 8 * (m / 2)) * 128 + (((2 * (t / 32 % 4) + m % 2) ^ r) * 16);
#pragma unroll
                    for (int s = 0; s < 4; s++)
                        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                                     : "=r"(weights[s][0]), "=r"(weights[s][1]), "=r"(weights[s][2]), "=r"(weights[s][3])
                                     : "r"(line + s * 2048) : "memory");
                }
                __syncwarp();
                free_p<OWN>();
#endif
                if (!OWN) WAIT_AT(AT(v_full) + 8 * v_at, v_parity, count);
#ifdef LAB_DUMP
                if (!OWN && p.dump && blockIdx.x < 2 && item == 0 && key == 0) {
                    WAIT(p_full, 0, 99); // P of the block's own heads too
                    for (int i = threadIdx.x - 2 * WG; i < (2 * TILE_BYTES + V_BYTES) / 4; i += WG)
                        ((uint32_t *)p.dump)[blockIdx.x * ((2 * TILE_BYTES + V_BYTES) / 4) + i] =
                            load_shared_4(i < 2 * TILE_BYTES / 4 ? AT(p) + 4 * i : AT(v) + 4 * i - 2 * TILE_BYTES);
                    __syncwarp();
                }
#endif
                hold(o);
                wgmma_fence();
                const uint32_t v = TILE_AT(v) + v_at * V_BYTES;
#pragma unroll
                for (int s = 0; s < 4; s++)
#ifdef P_REGISTERS
                    wgmma_output(o, weights[s], wgmma_columns(v, s), s > 0 || key > 0);
#else
                    wgmma_output(o, wgmma_columns(OWN ? TILE_AT(p) : TILE_AT(p_peer), s), wgmma_columns(v, s), s > 0 || key > 0);
#endif
                wgmma_commit();
                wgmma_wait<0>();
                hold(o);
#ifndef P_REGISTERS
                free_p<OWN>();
#endif
                if (threadIdx.x % 32 == 0) mbarrier_arrive(AT(v_empty) + 8 * v_at);
                waited += b - a, worked += CLOCK() - b;
                if (++v_at == V_BLOCKS) v_at = 0, v_parity ^= 1;
            }
            if (OWN) {
                WAIT(sum_full, done, done);
            } else {
                WAIT(sum_peer_full, done, done);
                if (threadIdx.x == 2 * WG) mbarrier_arrive_expect(AT(sum_peer_full), SUM_BYTES);
            }
            float inverse[2];
            {
                const uint32_t sums = OWN ? AT(sum) : AT(sum_peer);
                const int t = fresh_thread(), h = t / 32 % 4 * 16 + t % 32 / 4;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float sum = __uint_as_float(load_shared_4(sums + 4 * (h + 8 * i)));
                    inverse[i] = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
                    if (OWN && t % 4 == 0)
                        p.lse[item * HEADS + ROWS * cluster_rank() + h + 8 * i] =
                            sum == 0.0f ? INFINITY : (shared.last_reference[h + 8 * i] + __log2f(sum)) * 0.69314718056f;
                }
            }
#pragma unroll
            for (int i = 0; i < 128; i++) o[i] *= inverse[i / 2 % 2];
            hold(o);
            __syncwarp();
            if (threadIdx.x % 32 == 0) {
                if (OWN) mbarrier_arrive(AT(sum_empty));
                else arrive_remote(address_at(AT(sum_empty), cluster_rank() ^ 1));
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t t = fresh_thread(), rank = cluster_rank(), h = t / 32 % 4 * 16 + t % 32 / 4 + 8 * i;
                uint4 *to = (uint4 *)p.out + ((item * HEADS + ROWS * (OWN ? rank : rank ^ 1) + h) * 64 + rank * 32 + 2 * (t % 4));
#pragma unroll
                for (int c = 0; c < 4; c++)
#pragma unroll
                    for (int h = 0; h < 2; h++) { // 8 of the 16 columns that this thread has of 64
                        uint32_t w[4];
#pragma unroll
                        for (int k = 0; k < 2; k++) {
                            const float *low = o + 32 * c + 8 * (2 * h + k) + 2 * i, *high = low + 4;
                            w[2 * k] = Bf16::pack(low[0], low[1]);
                            w[2 * k + 1] = Bf16::pack(high[0], high[1]);
                        }
                        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to + 8 * c + h), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
                    }
            }
        }
        if (p.clocks && blockIdx.x == 0 && threadIdx.x % WG == 0) {
            const int at = OWN ? C_OWN_WAIT : C_PEER_WAIT;
            p.clocks[at] = waited, p.clocks[at + 1] = worked;
        }
    }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) pair_kernel(const __grid_constant__ sparse_params p)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    const uint32_t base = shared_address(memory), rank = cluster_rank();
    if (threadIdx.x == 0) {
        mbarrier_init(AT(part_full), 1), mbarrier_init(AT(part_empty), 4);
        mbarrier_init(AT(p_full), 4), mbarrier_init(AT(p_peer_full), 1), mbarrier_init(AT(p_empty), 8);
        for (int i = 0; i < V_BLOCKS; i++) mbarrier_init(AT(v_full) + 8 * i, 4), mbarrier_init(AT(v_empty) + 8 * i, 8);
        mbarrier_init(AT(sum_full), 4), mbarrier_init(AT(sum_peer_full), 1), mbarrier_init(AT(sum_empty), 8);
        mbarrier_fence_init();
        mbarrier_arrive_expect(AT(part_full), PART_BYTES);
        mbarrier_arrive_expect(AT(p_peer_full), P_PEER_BYTES);
        mbarrier_arrive_expect(AT(sum_peer_full), SUM_BYTES);
    }
    cluster_sync(); // of all threads: the barriers are there
    if (threadIdx.x < WG) {
        take_registers<SCORE_REGISTERS>();
#ifndef NO_SCORE
        Score(p, shared, base, rank).run();
#endif
    } else {
        give_registers<PV_REGISTERS>();
#ifndef NO_PV
        if (threadIdx.x < 2 * WG) Multiply(p, shared, base).run<true>();
        else Multiply(p, shared, base).run<false>();
#endif
    }
    __syncwarp();
    cluster_sync(); // nothing comes here any more
}
