// Dense MLA decode on Hopper: O = softmax(scale Q K^T) V for 64 rows (query token x head) a CTA, V = first 512 of K.
//
// Who                    what                                                              registers
//   warpgroup 0          producer: two elected threads issue every TMA load                 24
//   warpgroup 1          scores: S = Q K^T, two thirds of Q in registers, softmax, P        168
//   warpgroup 2, 3       output: columns 0..255 / 256..511 of O (64 x 256 fp32 = 128)       160 each
//
// Shared memory, bytes (Q_REG_UNITS 3, V_UNITS 11, P_BUFFERS 1)
//        0  V units      11 x 16384   [2 column groups][64 tokens][128 B]; columns 0..511 of a block are four units
//   180224  rope          2 x  8192   columns 512..575 of 64 tokens
//   196608  Q rest            24576   column groups 6..8 of the 64 rows of Q
//   221184  P             1 x  8192   64 x 64 bf16, K-major
//   229376  row factors, sums, orders, barriers: see layout.cuh
// All tiles are SWIZZLE_128B. The first column groups of Q come through the ring as if they were keys and are then
// read into registers, so the next request's Q and keys are on their way while this one's last blocks are multiplied:
// the ring never drains at a request's end, and the epilogue does not touch it.
//
// One block of 64 tokens:
//   producer  empty(unit) -> TMA -> full(unit), five units (four pairs of column groups, rope)
//   scores    full(unit) -> 36 wgmma m64n64k16 (24 with A = Q registers) -> softmax -> P, order -> p_full
//   output    p_full -> [O *= scale] -> 2 x 4 wgmma m64n128k16 (A = P, B = V as MN-major) -> empty(unit), p_empty
// The reference maximum of a row is stale: it moves only when a score passes it by more than 2^8, so nearly no block
// rescales O and no shuffle stands between S and P. bf16 P holds up to 2^8 without loss of relative precision.
// P V may be held back (GATED): its first half then runs beside the next block's Q K^T, the second half beside the
// softmax that follows, when the tensor cores would otherwise idle. The LAB_ macros of layout.cuh are the variants that
// NOTES.md measures.
//
// Limits: memory (rows <= 64): one block is 73,728 bytes. Products (rows >= 128): 2176 tensor clocks a block.
#pragma once
#include "layout.cuh"
#include "wgmma.cuh"
#include <cuda_bf16.h>
#include <math_constants.h>

// Clock readings of one CTA's first blocks, for the ladder (LAB_TRACE): [role][block][event].
#ifdef LAB_TRACE
#define TRACE(role, block, event)                                                                            \
    do {                                                                                                     \
        if (blockIdx.x == 6 && (threadIdx.x & 127) == 0 && (block) < 64)                                     \
            p.trace[((role)*64 + (block)) * 8 + (event)] = (uint32_t)clock();                                \
    } while (0)
#else
#define TRACE(role, block, event)
#endif
// Clocks and nanoseconds of one CTA's first mathematical warpgroup (LAB_CLOCK).
#ifdef LAB_CLOCK
#define CLOCK_BEGIN                                                                                          \
    long long clock0 = clock64(), time0, time1;                                                              \
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time0))
#define CLOCK_END                                                                                            \
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time1));                                                \
    if (blockIdx.x == 6 && threadIdx.x == 128)                                                               \
    p.trace[2046] = clock64() - clock0, p.trace[2047] = time1 - time0
#else
#define CLOCK_BEGIN
#define CLOCK_END
#endif

// ---------------------------------------------------------------- producer
// Thread 1: keys, and the part of Q that goes to registers.
DEVICE void produce(const decode_params &p, const decode_maps &maps, const partition &part, int tile,
                    uint32_t smem)
{
    ring at;
    rope_ring rope;
    for (int r = part.begin_request; r <= part.end_request; r++) {
        // The first page is asked for together with the length; it is used only if the length says that it exists.
        int first_block = r == part.begin_request ? part.begin_block : 0;
        const int *pages = p.block_table + (int64_t)r * p.max_pages + first_block;
        int page = first_block < p.max_pages ? pages[0] : 0;
        piece work(p, part, r);
        if (work.blocks == 0) continue;
        for (int unit = 0; unit < Q_REG_UNITS; unit++) {
            mbarrier_wait_thread(at.empty(smem), at.parity ^ 1);
            mbarrier_arrive_expect_tx(at.full(smem), UNIT_BYTES);
            tma_load_4d(at.data(smem), &maps.q_pair, at.full(smem), 0, tile * TILE_ROWS, unit * 2, r);
            at.advance(1);
        }
        for (int b = 0; b < work.blocks; b++) {
            int next = b + 1 < work.blocks ? pages[b + 1] : 0;
            TRACE(0, rope.count, 0);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                mbarrier_wait_thread(at.empty(smem), at.parity ^ 1);
                mbarrier_arrive_expect_tx(at.full(smem), UNIT_BYTES);
                tma_load_3d(at.data(smem), &maps.k_pair, at.full(smem), 0, page * PAGE, unit_in_order(i) * 2);
                at.advance(1);
            }
            TRACE(0, rope.count, 1);
            mbarrier_wait_thread(rope.empty(smem), rope.parity() ^ 1);
            mbarrier_arrive_expect_tx(rope.full(smem), GROUP_BYTES);
            tma_load_3d(rope.data(smem), &maps.k_rope, rope.full(smem), 0, page * PAGE, 8);
            TRACE(0, rope.count, 2);
            rope.count++;
            page = next;
        }
    }
}

// Thread 2: the rest of Q, as soon as the last products with the previous request's are done.
DEVICE void produce_q(const decode_params &p, const decode_maps &maps, const partition &part, int tile,
                      uint32_t smem)
{
    uint32_t count = 0;
    for (int r = part.begin_request; r <= part.end_request; r++) {
        piece work(p, part, r);
        if (work.blocks == 0) continue;
        mbarrier_wait_thread(smem + BAR_Q_EMPTY, ~count & 1);
        mbarrier_arrive_expect_tx(smem + BAR_Q_FULL, Q_REST_BYTES);
        for (int unit = Q_REG_UNITS; unit < 4; unit++)
            tma_load_4d(smem + SMEM_Q + (unit - Q_REG_UNITS) * UNIT_BYTES, &maps.q_pair, smem + BAR_Q_FULL, 0,
                        tile * TILE_ROWS, unit * 2, r);
        tma_load_4d(smem + SMEM_Q + (4 - Q_REG_UNITS) * UNIT_BYTES, &maps.q_rope, smem + BAR_Q_FULL, 0,
                    tile * TILE_ROWS, 8, r);
        count++;
    }
}

// ---------------------------------------------------------------- scores
constexpr int FIRST_REST = Q_REG_UNITS == 0  ? 0
                           : Q_REG_UNITS < 3 ? 1
                                             : Q_REG_UNITS;    // in unit order: first from Q rest
constexpr int Q_REG_STEPS = Q_REG_UNITS ? Q_REG_UNITS * 8 : 1; // k16 steps with A in registers

// Reads the Q units standing in the ring into A fragments and gives them back.
DEVICE void load_q(uint32_t (&q)[Q_REG_STEPS][4], ring &at, uint32_t smem, int warp, int lane)
{
    int row = 16 * warp + (lane & 15), half = lane >> 4;
    ring unit_at = at;
#pragma unroll
    for (int unit = 0; unit < Q_REG_UNITS; unit++) {
        mbarrier_wait(unit_at.full(smem), unit_at.parity);
#pragma unroll
        for (int k = 0; k < 8; k++)
            ldmatrix_x4(q[unit * 8 + k], unit_at.data(smem) + (k >> 2) * GROUP_BYTES + row * 128 +
                                             (((2 * (k & 3) + half) ^ (row & 7)) << 4));
        unit_at.advance(1);
    }
    // An arrive does not wait for loads in flight: without the fence the next keys may overtake ldmatrix.
    fence_proxy_async();
    __syncwarp();
#pragma unroll
    for (int unit = 0; unit < Q_REG_UNITS; unit++) {
        if (lane == 0) mbarrier_arrive(at.empty(smem));
        at.advance(1);
    }
}

// S = Q K^T for the block standing at `at`; ends with the products done.
DEVICE void score_block(float (&s)[32], const uint32_t (&q)[Q_REG_STEPS][4], const ring &at,
                        const rope_ring &rope, uint32_t smem, uint32_t q_parity, const decode_params &p)
{
    hold_accumulator(s);
    ring unit_at = at;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int unit = unit_in_order(i);
        if (i == FIRST_REST) mbarrier_wait(smem + BAR_Q_FULL, q_parity);
        mbarrier_wait(unit_at.full(smem), unit_at.parity);
        uint32_t k_tile = unit_at.data(smem), q_tile = smem + SMEM_Q + (unit - Q_REG_UNITS) * UNIT_BYTES;
        wgmma_fence(); // the wait above is a branch: without this ptxas adds one of its own
#pragma unroll
        for (int k = 0; k < 8; k++) {
            uint32_t step = (k >> 2) * GROUP_BYTES + (k & 3) * 32;
            uint64_t k_desc = smem_descriptor(k_tile, 0, step);
            if (unit < Q_REG_UNITS)
                wgmma_m64n64_rs(s, q[unit * 8 + k], k_desc, i + k > 0);
            else
                wgmma_m64n64_ss(s, smem_descriptor(q_tile, 0, step), k_desc, i + k > 0);
        }
        unit_at.advance(1);
    }
    TRACE(1, rope.count, 5);
    mbarrier_wait(rope.full(smem), rope.parity());
    TRACE(1, rope.count, 1);
    if (Q_REG_UNITS == 4) mbarrier_wait(smem + BAR_Q_FULL, q_parity);
    uint32_t k_tile = rope.data(smem), q_tile = smem + SMEM_Q + (4 - Q_REG_UNITS) * UNIT_BYTES;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_m64n64_ss(s, smem_descriptor(q_tile, 0, k * 32), smem_descriptor(k_tile, 0, k * 32), 1);
    wgmma_commit_group();
    // Free long ago as a rule; asked here because even a wait that succeeds takes 100 to 200 clocks beside wgmma.
    mbarrier_wait(smem + BAR_P_EMPTY + p_buffer(rope.count) * 8, p_parity(rope.count) ^ 1);
    wgmma_wait_group<0>();
    hold_accumulator(s);
}

// Keys past the end of the request: their V rows may hold anything (NaN), and 0 * NaN is NaN, so they become zero.
DEVICE void clear_tail(const ring &at, uint32_t smem, int valid, int thread)
{
    named_barrier_sync(SCORE_BARRIER, 128); // every warp's products have read the block
    for (int i = thread; i < (PAGE - valid) * 64; i += 128) {
        int row = valid + (i >> 6), group = (i >> 3) & 7, chunk = i & 7;
        st_shared_zero_16(at.plus(group >> 1).data(smem) + (group & 1) * GROUP_BYTES + row * 128 +
                          chunk * 16);
    }
}

DEVICE float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// A row that sees no key of this request: nothing for the output warpgroups to do.
DEVICE void store_empty(const decode_params &p, const piece &work, int tile, int thread)
{
    for (int i = thread; i < TILE_ROWS; i += 128) {
        int row = tile * TILE_ROWS + i;
        if (row >= p.rows) break;
        if (work.split >= 0)
            p.part_lse[(int64_t)work.split * p.rows + row] = -CUDART_INF_F;
        else
            p.lse[((int64_t)work.request * p.h_q + row % p.h_q) * p.s_q + row / p.h_q] = CUDART_INF_F;
    }
    if (work.split < 0) {
        int chunks = min(TILE_ROWS, p.rows - tile * TILE_ROWS) * (D_V / 8);
        uint4 *to = (uint4 *)p.out + ((int64_t)work.request * p.rows + tile * TILE_ROWS) * (D_V / 8);
        for (int i = thread; i < chunks; i += 128) to[i] = make_uint4(0, 0, 0, 0);
    }
}

// Keys that a row must not see get score -inf.
DEVICE void mask_scores(float (&s)[32], const decode_params &p, int first_key, int length, int tile, int row,
                        int lane)
{
    int limit0 = length, limit1 = length; // a row sees the keys before its limit
    if (p.causal) {
        limit0 = min(length, length - p.s_q + (tile * TILE_ROWS + row) / p.h_q + 1);
        limit1 = min(length, length - p.s_q + (tile * TILE_ROWS + row + 8) / p.h_q + 1);
    }
    int column = first_key + 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 32; i++)
        if (column + 8 * (i >> 2) + (i & 1) >= ((i & 2) ? limit1 : limit0)) s[i] = -CUDART_INF_F;
}

// Largest of this thread's scores of either row, in four chains each.
DEVICE void row_maxima(const float (&s)[32], float &max0, float &max1)
{
    float m[8];
#pragma unroll
    for (int i = 0; i < 8; i++) m[i] = s[i];
#pragma unroll
    for (int i = 8; i < 32; i++) m[i & 7] = fmaxf(m[i & 7], s[i]);
    max0 = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[4], m[5]));
    max1 = fmaxf(fmaxf(m[2], m[3]), fmaxf(m[6], m[7]));
}

constexpr uint32_t STALE_BF16 = 0x4380; // 2^8: the largest P that a stale reference may leave

// P = exp2(S scale + shift) to shared memory as bf16; adds up the rows, returns the largest values (bf16 x 2).
DEVICE uint32_t exponentials(const float (&s)[32], uint32_t p_row, int lane, float scale, float shift0,
                             float shift1, float &sum0, float &sum1)
{
    uint32_t top = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int i = 8 * k + 2 * j;
            float shift = (j & 1) ? shift1 : shift0;
            float x = ex2_approx(fmaf(s[i], scale, shift)), y = ex2_approx(fmaf(s[i + 1], scale, shift));
            if (j & 1)
                sum1 += x + y;
            else
                sum0 += x + y;
            packed[j] = pack_bf16(x, y);
            top = max_bf16x2(top, packed[j]);
        }
        stmatrix_x4(p_row + (((2 * k + (lane >> 4)) ^ (lane & 7)) << 4), packed[0], packed[1], packed[2],
                    packed[3]);
    }
    return top;
}

DEVICE void store_lse(const decode_params &p, int target, int tile_row, float reference, float sum)
{
    if (tile_row >= p.rows) return;
    float lse_log2 = sum > 0 ? fmaf(reference, p.scale_log2, log2f(sum)) : -CUDART_INF_F;
    if (target >= 0)
        p.part_lse[(int64_t)target * p.rows + tile_row] = lse_log2;
    else
        p.lse[((int64_t)~target * p.h_q + tile_row % p.h_q) * p.s_q + tile_row / p.h_q] =
            sum > 0 ? lse_log2 * 0.693147180559945309f : CUDART_INF_F;
}

DEVICE void score(const decode_params &p, int tile, uint32_t smem)
{
    int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
    int row = 16 * warp + (lane >> 2); // this thread's rows: row, row + 8
    uint32_t q[Q_REG_STEPS][4];
    float s[32];
    ring at;
    rope_ring rope; // counts blocks, so it serves the P buffers as well
    uint32_t q_parity = 0;
    // Plain loads from uniform addresses: ptxas then knows the loops' bounds to be uniform (see ptx.cuh).
    const partition *part = p.plan + blockIdx.x / p.tiles;
    for (int r = part->begin_request, end = part->end_request; r <= end; r++) {
        piece work(p, *part, r);
        if (work.blocks == 0) {
            store_empty(p, work, tile, thread);
            continue;
        }
        int key = work.first_block * PAGE, end_key = key + work.blocks * PAGE, length = work.length;
        int target = work.split >= 0 ? work.split : ~r;
        float reference0 = -CUDART_INF_F, reference1 = -CUDART_INF_F, sum0 = 0, sum1 = 0;
        uint32_t order = ORDER_FIRST;
        load_q(q, at, smem, warp, lane);
        for (; key < end_key; key += PAGE) {
            TRACE(1, rope.count, 0);
            score_block(s, q, at, rope, smem, q_parity, p);
            TRACE(1, rope.count, 2);
            __syncwarp();
            if (lane == 0) {
                if (GATED) mbarrier_arrive(smem + BAR_SCORED + (rope.count & 1) * 8);
                mbarrier_arrive(rope.empty(smem));
            }
            {
                if (key + PAGE > (p.causal ? min(length, length - p.s_q + 1) : length))
                    mask_scores(s, p, key, length, tile, row, lane);
                if (key + PAGE > length) clear_tail(at, smem, length - key, thread);
            }
            uint32_t buffer = p_buffer(rope.count);
            TRACE(1, rope.count, 6);
            // Exponentials against the stale reference first, and a look at the largest of them afterwards: that costs
            // a quarter of a maximum over S, and nearly always nothing is left to do.
            uint32_t p_row = smem + SMEM_P + buffer * GROUP_BYTES + (16 * warp + (lane & 15)) * 128;
            float more0 = 0, more1 = 0;
            bool rescale = order & ORDER_FIRST;
            float max0, max1;
            if (!SPECULATE) {
                row_maxima(s, max0, max1);
                float stale = 8 / p.scale_log2;
                rescale |= __any_sync(~0u, max0 > reference0 + stale || max1 > reference1 + stale);
            } else if (!rescale) {
                uint32_t top = exponentials(s, p_row, lane, p.scale_log2, -reference0 * p.scale_log2,
                                            -reference1 * p.scale_log2, more0, more1);
                rescale = __any_sync(~0u, (top & 0xffff) > STALE_BF16 || top >> 16 > STALE_BF16);
            }
            if (rescale) {
                if (SPECULATE) row_maxima(s, max0, max1);
                // Rows without a key in this piece have no reference; any finite one will do for them.
                max0 = fmaxf(fmaxf(reference0, quad_max(max0)), -1e30f);
                max1 = fmaxf(fmaxf(reference1, quad_max(max1)), -1e30f);
                float scale0 = ex2_approx((reference0 - max0) * p.scale_log2);
                float scale1 = ex2_approx((reference1 - max1) * p.scale_log2);
                reference0 = max0, reference1 = max1;
                sum0 *= scale0, sum1 *= scale1;
                st_shared_f32(smem + SMEM_SCALE + buffer * 256 + row * 4, scale0);
                st_shared_f32(smem + SMEM_SCALE + buffer * 256 + row * 4 + 32, scale1);
                more0 = more1 = 0;
            }
            if (lane == 0) st_shared_u32(smem + SMEM_RESCALE + buffer * 16 + warp * 4, rescale);
            if (thread == 0)
                st_shared_u32(smem + SMEM_ORDER + buffer * 4,
                              order | (key + PAGE == end_key ? ORDER_LAST : 0) |
                                  (at.parity ? ORDER_PARITY : 0) | at.slot << ORDER_SLOT_SHIFT);
            TRACE(1, rope.count, 3);
            if (!SPECULATE || rescale)
                exponentials(s, p_row, lane, p.scale_log2, -reference0 * p.scale_log2,
                             -reference1 * p.scale_log2, more0, more1);
            sum0 += more0, sum1 += more1;
            if (key + PAGE == end_key) {
                sum0 = quad_sum(sum0);
                sum1 = quad_sum(sum1);
                st_shared_f32(smem + SMEM_INV_SUM + buffer * 256 + row * 4, sum0 > 0 ? 1 / sum0 : 0);
                st_shared_f32(smem + SMEM_INV_SUM + buffer * 256 + row * 4 + 32, sum1 > 0 ? 1 / sum1 : 0);
                if (thread == 0) st_shared_u32(smem + SMEM_TARGET + buffer * 4, target);
            }
            order = 0;
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) {
                mbarrier_arrive(smem + BAR_P_FULL + buffer * 8);
                if (key + PAGE == end_key) mbarrier_arrive(smem + BAR_Q_EMPTY);
            }
            TRACE(1, rope.count, 4);
            rope.count++;
            at.advance(4);
        }
        q_parity ^= 1;
        if ((lane & 3) == 0) {
            store_lse(p, target, tile * TILE_ROWS + row, reference0, sum0);
            store_lse(p, target, tile * TILE_ROWS + row + 8, reference1, sum1);
        }
    }
    uint32_t buffer = p_buffer(rope.count);
    if (GATED && lane == 0) mbarrier_arrive(smem + BAR_SCORED + (rope.count & 1) * 8); // no block follows
    mbarrier_wait(smem + BAR_P_EMPTY + buffer * 8, p_parity(rope.count) ^ 1);
    if (lane == 0) {
        st_shared_u32(smem + SMEM_ORDER + buffer * 4, ORDER_EXIT);
        mbarrier_arrive(smem + BAR_P_FULL + buffer * 8);
    }
}

// ---------------------------------------------------------------- output
// Within each quad: lane i's word j goes to lane j as word i.
DEVICE void quad_transpose(uint32_t (&w)[4], int lane)
{
    bool odd = lane & 1, high = lane & 2;
    uint32_t x = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), y = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
    if (odd)
        w[0] = x, w[2] = y;
    else
        w[1] = x, w[3] = y;
    x = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2);
    y = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
    if (high)
        w[0] = x, w[1] = y;
    else
        w[2] = x, w[3] = y;
}

// 128 columns of O, normalised, straight from registers: the ring belongs to the next request already.
DEVICE void store_output(const decode_params &p, int target, const float (&o)[64], float inv0, float inv1,
                         int tile_row, int column, int lane)
{
    bool store0 = tile_row < p.rows, store1 = tile_row + 8 < p.rows;
    if (target >= 0) {
        float *to = p.part_out + ((int64_t)target * p.rows + tile_row) * D_V + column + 2 * (lane & 3);
#pragma unroll
        for (int g = 0; g < 16; g++) {
            if (store0) *(float2 *)(to + 8 * g) = make_float2(o[4 * g] * inv0, o[4 * g + 1] * inv0);
            if (store1)
                *(float2 *)(to + 8 * D_V + 8 * g) = make_float2(o[4 * g + 2] * inv1, o[4 * g + 3] * inv1);
        }
    } else {
        __nv_bfloat16 *to =
            (__nv_bfloat16 *)p.out + ((int64_t)~target * p.rows + tile_row) * D_V + column + 8 * (lane & 3);
#pragma unroll
        for (int g = 0; g < 16; g += 4) {
            uint32_t w[4];
#pragma unroll
            for (int k = 0; k < 4; k++) w[k] = pack_bf16(o[4 * (g + k)] * inv0, o[4 * (g + k) + 1] * inv0);
            quad_transpose(w, lane);
            if (store0) *(uint4 *)(to + 8 * g) = make_uint4(w[0], w[1], w[2], w[3]);
#pragma unroll
            for (int k = 0; k < 4; k++)
                w[k] = pack_bf16(o[4 * (g + k) + 2] * inv1, o[4 * (g + k) + 3] * inv1);
            quad_transpose(w, lane);
            if (store1) *(uint4 *)(to + 8 * D_V + 8 * g) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

// 128 columns of O (+)= P V.
DEVICE void multiply_pv(float (&o)[64], uint32_t p_tile, uint32_t v_unit, int accumulate)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_m64n128_ss_vt(o, smem_descriptor(p_tile, 0, k * 32),
                            smem_descriptor(v_unit, GROUP_BYTES, k * 2048), k > 0 || accumulate);
    wgmma_commit_group();
}

DEVICE void multiply_pv_rs(float (&o)[64], const uint32_t (&a)[4][4], uint32_t v_unit, int accumulate)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_m64n128_rs_vt(o, a[k], smem_descriptor(v_unit, GROUP_BYTES, k * 2048), k > 0 || accumulate);
    wgmma_commit_group();
}

DEVICE void rescale_output(float (&o)[64], float scale0, float scale1)
{
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] *= (i & 2) ? scale1 : scale0;
}

DEVICE void output(const decode_params &p, int tile, int half, const uint8_t *shared, uint32_t smem)
{
    int warp = (threadIdx.x & 127) >> 5, lane = threadIdx.x & 31;
    int row = 16 * warp + (lane >> 2);
    float o0[64], o1[64]; // columns 0..127 and 128..255 of this half
    for (uint32_t count = 0;; count++) {
        uint32_t buffer = p_buffer(count);
        mbarrier_wait(smem + BAR_P_FULL + buffer * 8, p_parity(count));
        TRACE(2 + half, count, 0);
        uint32_t order = *(const uint32_t *)(shared + SMEM_ORDER + buffer * 4); // plain: known to be uniform
        if (order & ORDER_EXIT) break;
        if (!(order & ORDER_FIRST) && ld_shared_u32(smem + SMEM_RESCALE + buffer * 16 + warp * 4)) {
            float scale0 = ld_shared_f32(smem + SMEM_SCALE + buffer * 256 + row * 4);
            float scale1 = ld_shared_f32(smem + SMEM_SCALE + buffer * 256 + row * 4 + 32);
            rescale_output(o0, scale0, scale1);
            rescale_output(o1, scale0, scale1);
        }
        ring first;
        first.slot = order >> ORDER_SLOT_SHIFT;
        first.parity = (order & ORDER_PARITY) != 0;
        first.advance(half); // units 0, 1 of the left half stand at 0, 2 of the order, units 2, 3 at 1, 3
        ring second = first.plus(2);
        // Over already, the scores needed them; waiting makes TMA's writes visible to this warpgroup by the rules.
        mbarrier_wait(first.full(smem), first.parity);
        mbarrier_wait(second.full(smem), second.parity);
        uint32_t p_tile = smem + SMEM_P + buffer * GROUP_BYTES;
        if (GATED == 2) mbarrier_wait(smem + BAR_SCORED + (~count & 1) * 8, (count + 1) >> 1 & 1);
        uint32_t a[4][4];
        if (PV_RS) {
            uint32_t p_row = p_tile + (16 * warp + (lane & 15)) * 128;
#pragma unroll
            for (int k = 0; k < 4; k++)
                ldmatrix_x4(a[k], p_row + (((2 * k + (lane >> 4)) ^ (lane & 7)) << 4));
        }
        hold_accumulator(o0);
        hold_accumulator(o1);
        wgmma_fence();
        if (PV_RS)
            multiply_pv_rs(o0, a, first.data(smem), !(order & ORDER_FIRST));
        else
            multiply_pv(o0, p_tile, first.data(smem), !(order & ORDER_FIRST));
        if (GATED == 1) {
            wgmma_wait_group<0>();
            hold_accumulator(o0);
            if (lane == 0) mbarrier_arrive(first.empty(smem));
            mbarrier_wait(smem + BAR_SCORED + (~count & 1) * 8, (count + 1) >> 1 & 1);
            wgmma_fence();
        }
        if (PV_RS)
            multiply_pv_rs(o1, a, second.data(smem), !(order & ORDER_FIRST));
        else
            multiply_pv(o1, p_tile, second.data(smem), !(order & ORDER_FIRST));
        TRACE(2 + half, count, 1);
        if (GATED != 1) {
            wgmma_wait_group<1>();
            if (lane == 0) mbarrier_arrive(first.empty(smem));
        }
        TRACE(2 + half, count, 2);
        wgmma_wait_group<0>();
        hold_accumulator(o0);
        hold_accumulator(o1);
        TRACE(2 + half, count, 3);
        if (lane == 0) mbarrier_arrive(second.empty(smem));
        if (order & ORDER_LAST) {
            float inv0 = ld_shared_f32(smem + SMEM_INV_SUM + buffer * 256 + row * 4);
            float inv1 = ld_shared_f32(smem + SMEM_INV_SUM + buffer * 256 + row * 4 + 32);
            int target = ld_shared_u32(smem + SMEM_TARGET + buffer * 4);
            if (lane == 0) mbarrier_arrive(smem + BAR_P_EMPTY + buffer * 8);
            store_output(p, target, o0, inv0, inv1, tile * TILE_ROWS + row, half * 256, lane);
            store_output(p, target, o1, inv0, inv1, tile * TILE_ROWS + row, half * 256 + 128, lane);
        } else if (lane == 0)
            mbarrier_arrive(smem + BAR_P_EMPTY + buffer * 8);
    }
}

// ---------------------------------------------------------------- kernel
// Grid: partitions x tiles, the tiles of a partition side by side so that they share its keys in L2.
__global__ void __launch_bounds__(THREADS, 1)
    dense_decode_kernel(const __grid_constant__ decode_params p, const __grid_constant__ decode_maps maps)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    uint32_t smem = smem_address(shared);
    int tile = blockIdx.x % p.tiles;
    if (threadIdx.x == 0) {
        for (int i = 0; i < V_UNITS; i++) {
            mbarrier_init(smem + BAR_V_FULL + 8 * i, 1);
            mbarrier_init(smem + BAR_V_EMPTY + 8 * i, 4);
        }
        for (int i = 0; i < ROPE_STAGES; i++) {
            mbarrier_init(smem + BAR_ROPE_FULL + 8 * i, 1);
            mbarrier_init(smem + BAR_ROPE_EMPTY + 8 * i, 4);
        }
        mbarrier_init(smem + BAR_Q_FULL, 1);
        mbarrier_init(smem + BAR_Q_EMPTY, 4);
        for (int i = 0; i < P_BUFFERS; i++) {
            mbarrier_init(smem + BAR_P_FULL + 8 * i, 4);
            mbarrier_init(smem + BAR_P_EMPTY + 8 * i, 8);
        }
        mbarrier_init(smem + BAR_SCORED, 4);
        mbarrier_init(smem + BAR_SCORED + 8, 4);
        fence_mbarrier_init();
        fence_proxy_async();
    }
    __syncthreads();
    griddepcontrol_launch_dependents();
    int group = threadIdx.x >> 7;
    if (group == 0) {
        setmaxnreg_dec<24>();
        const partition &part = p.plan[blockIdx.x / p.tiles];
        if (threadIdx.x < 32 && elect_sync())
            produce(p, maps, part, tile, smem);
        else if (threadIdx.x >= 32 && threadIdx.x < 64 && elect_sync())
            produce_q(p, maps, part, tile, smem);
    } else if (group == 1) {
        setmaxnreg_inc<LAB_SCORE_REGS>();
        CLOCK_BEGIN;
        score(p, tile, smem);
        CLOCK_END;
    } else {
        setmaxnreg_inc<LAB_OUTPUT_REGS>();
        output(p, tile, group - 2, shared, smem);
    }
}
