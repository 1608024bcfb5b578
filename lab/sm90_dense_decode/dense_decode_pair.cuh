// Dense MLA decode on Hopper, second schedule: two symmetric warpgroups, for 128 rows and more.
//
// Who              what                                                                               registers
//   warpgroup 0    producer: two elected threads issue every TMA load                                  24
//   warpgroup 1    scores and softmax of a piece's even blocks, columns   0..255 of O for all of them  240
//   warpgroup 2    scores and softmax of a piece's odd blocks,  columns 256..511 of O for all of them  240
//
// Shared memory, bytes
//        0  keys of the even blocks, columns 0..511    65536   [8 column groups][64 tokens][128 B]
//    65536  keys of the odd blocks                     65536
//   131072  rope columns, even / odd                2 x 8192
//   147456  Q, columns 0..511                          65536
//   212992  P, even / odd                           2 x 8192
//   229376  references, sums, flags, barriers
// Q's rope columns stay in registers (16 a thread), and Q_REG_GROUPS more of its column groups.
//
// One warpgroup, one block k of its own ("home": its half of the columns; "away": the other half; units of 128 columns):
//   Q K^T over rope, one home, one away unit (20 wgmma)   while the other warpgroup does the softmax of block k - 1
//   P(k-1) from shared memory: O += P(k-1) V(k-1)         its own half of O
//   Q K^T over the other two units (16 wgmma)
//   softmax; P(k) to shared memory and kept in registers
//   O += P(k) V(k)                                        A from registers
// P V of a block thus runs in both warpgroups at once and as soon as P exists, unit by unit; the units freed first are
// those that block k + 2 needs first. A gate keeps the two Q K^T apart: the one whose softmax is waited for goes first.
// The reference maximum is stale (it moves when a score passes it by 2^8) and shared: a warp of one side and the warp
// of the same rows of the other side agree on it through the flag and the references beside P.
//
// CLUSTER 2: two tiles of rows of one partition are a cluster and share the keys. CTA 0 loads the left half of the
// columns and the rope of even blocks for both, CTA 1 the right half and the rope of odd blocks, by multicast; so what
// side i of either CTA frees, CTA i waits for (8 warps). FULL barriers are each CTA's own: it arms a phase as soon as
// the one before is over, and since no load of that phase starts before all 8 warps have seen the one before, bytes may
// well come before the arming.
#pragma once
#include "dense_decode.cuh"

#ifndef LAB_PAIR_N256
#define LAB_PAIR_N256 0
#endif
#ifndef LAB_PAIR_GATE
#define LAB_PAIR_GATE 1
#endif
#ifndef LAB_PAIR_SPLIT
#define LAB_PAIR_SPLIT 2
#endif
#ifndef LAB_PREFETCH
#define LAB_PREFETCH 0
#endif
#ifndef LAB_CLUSTER
#define LAB_CLUSTER 1
#endif
#ifndef LAB_Q_REG_GROUPS
#define LAB_Q_REG_GROUPS 0
#endif
#ifndef LAB_PRODUCER_REGS
#define LAB_PRODUCER_REGS 24 // 24 + 2 x 240 is what a block of 384 threads is launched with (3 x 168): with 32 the sides wait for ever
#endif
#ifndef LAB_SIDE1_REGS
#define LAB_SIDE1_REGS 240
#endif
#ifndef LAB_ARM
#define LAB_ARM 0
#endif

namespace pair_schedule {
enum {
    N256 = LAB_PAIR_N256,   // P V as one m64n256 a step, else two m64n128 with their units freed one by one
    GATE = LAB_PAIR_GATE,   // Q K^T of a block starts only when that of the block before has been issued
    SPLIT = LAB_PAIR_SPLIT, // of the four units of Q K^T, how many come before the block before is multiplied
    PREFETCH = LAB_PREFETCH,     // blocks that keys are brought to L2 ahead of their load, 0: not
    ARM = LAB_ARM, // clusters only: who arms the FULL barriers. 0: a warp of the producer, 1: who has waited for the phase before
    Q_REG_GROUPS = LAB_Q_REG_GROUPS, // column groups 7, 6.. of Q kept in registers beside rope's, 16 registers each
    HALF_UNITS = N256 ? 1 : 2,   // barriers of a block's half
    PIECES = 2 * HALF_UNITS + 1, // rope, units of the left half, units of the right half
    HALF_BYTES = 4 * GROUP_BYTES,
    KEY_BYTES = 8 * GROUP_BYTES,
    Q_UNITS = 4 - Q_REG_GROUPS / 2, // of Q in shared memory; the room of the others is not used for anything yet
    SMEM_KEYS = 0,
    SMEM_ROPE = 2 * KEY_BYTES,
    SMEM_Q = SMEM_ROPE + 2 * GROUP_BYTES,
    SMEM_P = SMEM_Q + KEY_BYTES,
    SMEM_REFERENCE = SMEM_P + 2 * GROUP_BYTES, // [side][64]
    SMEM_SUM = SMEM_REFERENCE + 2 * 256,       // [piece & 1][side][64]
    SMEM_RESCALE = SMEM_SUM + 4 * 256,         // [side][warp]
    BAR_FULL = SMEM_RESCALE + 32,              // [side][PIECES]
    BAR_EMPTY = BAR_FULL + 2 * PIECES * 8,
    BAR_Q_FULL = BAR_EMPTY + 2 * PIECES * 8,
    BAR_Q_EMPTY = BAR_Q_FULL + 8,
    BAR_P_FULL = BAR_Q_EMPTY + 8, // [side]
    BAR_SCORED = BAR_P_FULL + 16, // [side]
    SMEM_BYTES = BAR_SCORED + 16,
    THREADS = 384,
    SIDE_BARRIER = 1, // and 2: one side's four warps
    PIECE_BARRIER = 3 // both sides
};
static_assert(SMEM_BYTES <= 232448, "shared memory of a Hopper SM");

// ---------------------------------------------------------------- producer
template <int CLUSTER>
DEVICE void load_keys(uint32_t to, const CUtensorMap *map, uint32_t bar, int page, int group)
{
    if (CLUSTER == 1)
        tma_load_3d(to, map, bar, 0, page * PAGE, group);
    else
        tma_load_3d_multicast(to, map, bar, 0, page * PAGE, group, (1 << CLUSTER) - 1);
}
template <int CLUSTER>
DEVICE void load_key_unit(const decode_maps &maps, uint32_t smem, int side, int half, int u, uint32_t parity,
                          int page)
{
    uint32_t bar = (side * PIECES + 1 + half * HALF_UNITS + u) * 8;
    uint32_t to = smem + SMEM_KEYS + side * KEY_BYTES + half * HALF_BYTES + u * UNIT_BYTES;
    mbarrier_wait_thread(smem + BAR_EMPTY + bar, parity ^ 1);
    if (CLUSTER == 1) mbarrier_arrive_expect_tx(smem + BAR_FULL + bar, HALF_BYTES / HALF_UNITS);
    load_keys<CLUSTER>(to, &maps.k_pair, smem + BAR_FULL + bar, page, half * 4 + u * 2);
    if (N256) load_keys<CLUSTER>(to + UNIT_BYTES, &maps.k_pair, smem + BAR_FULL + bar, page, half * 4 + 2);
}

template <int CLUSTER>
DEVICE void produce_keys(const decode_params &p, const decode_maps &maps, const partition &part, int tile,
                         uint32_t smem)
{
    uint32_t count[2] = {0, 0};
    for (int r = part.begin_request; r <= part.end_request; r++) {
        piece work(p, part, r);
        if (work.blocks == 0) continue;
        const int *pages = p.block_table + (int64_t)r * p.max_pages + work.first_block;
        int page = pages[0], ahead = pages[min(PREFETCH, work.blocks - 1)];
        for (int b = 0; b < work.blocks; b++) {
            int side = b & 1;
            uint32_t parity = (side ? count[1] : count[0]) & 1;
            int next = b + 1 < work.blocks ? pages[b + 1] : 0;
            int next_ahead = PREFETCH ? pages[min(b + 1 + PREFETCH, work.blocks - 1)] : 0;
            // The tiles that share the keys take turns; one tile alone is bound by memory and loses a third by it.
            if (PREFETCH && p.tiles > 1 && b + PREFETCH < work.blocks && b % p.tiles == tile) {
#pragma unroll
                for (int u = 0; u < 4; u++) tma_prefetch_3d(&maps.k_pair, 0, ahead * PAGE, u * 2);
                tma_prefetch_3d(&maps.k_rope, 0, ahead * PAGE, 8);
            }
            if (CLUSTER == 1 || side == (tile & 1)) {
                uint32_t bar = side * PIECES * 8;
                mbarrier_wait_thread(smem + BAR_EMPTY + bar, parity ^ 1);
                if (CLUSTER == 1) mbarrier_arrive_expect_tx(smem + BAR_FULL + bar, GROUP_BYTES);
                load_keys<CLUSTER>(smem + SMEM_ROPE + side * GROUP_BYTES, &maps.k_rope, smem + BAR_FULL + bar,
                                   page, 8);
            }
#pragma unroll
            for (int u = 0; u < 2 * HALF_UNITS; u++) {
                if (CLUSTER == 1)
                    load_key_unit<CLUSTER>(maps, smem, side, side ^ (u & 1), u >> 1, parity, page);
                else if (u < HALF_UNITS)
                    load_key_unit<CLUSTER>(maps, smem, side, tile & 1, u, parity, page);
            }
            count[0] += side == 0, count[1] += side;
            page = next, ahead = next_ahead;
        }
    }
}

// Bytes of barrier i of a block: rope, then the units.
DEVICE void arm(uint32_t bar, int i)
{
    mbarrier_arrive_expect_tx(bar, i == 0 ? (int)GROUP_BYTES : HALF_BYTES / HALF_UNITS);
}

// A thread of a cluster's CTA: every phase of FULL is armed when the one before is over.
DEVICE void arm_keys(const decode_params &p, const partition &part, uint32_t smem)
{
    uint32_t count[2] = {0, 0};
    for (int r = part.begin_request; r <= part.end_request; r++) {
        piece work(p, part, r);
        for (int b = 0; b < work.blocks; b++) {
            int side = b & 1;
            uint32_t parity = (side ? count[1] : count[0]) & 1;
#pragma unroll
            for (int u = -1; u < 2 * HALF_UNITS; u++) { // in the order of consumption
                int i = u < 0 ? 0 : 1 + (side ^ (u & 1)) * HALF_UNITS + (u >> 1);
                uint32_t bar = smem + BAR_FULL + (side * PIECES + i) * 8;
                mbarrier_wait_thread(bar, parity ^ 1);
                arm(bar, i);
            }
            count[0] += side == 0, count[1] += side;
        }
    }
}

DEVICE void produce_queries(const decode_params &p, const decode_maps &maps, const partition &part, int tile,
                            uint32_t smem)
{
    uint32_t count = 0;
    for (int r = part.begin_request; r <= part.end_request; r++) {
        piece work(p, part, r);
        if (work.blocks == 0) continue;
        mbarrier_wait_thread(smem + BAR_Q_EMPTY, ~count & 1);
        mbarrier_arrive_expect_tx(smem + BAR_Q_FULL, Q_UNITS * UNIT_BYTES);
        for (int unit = 0; unit < Q_UNITS; unit++)
            tma_load_4d(smem + SMEM_Q + unit * UNIT_BYTES, &maps.q_pair, smem + BAR_Q_FULL, 0,
                        tile * TILE_ROWS, unit * 2, r);
        count++;
    }
}

// ---------------------------------------------------------------- one side
// A fragments of a column group of Q (8: rope), from global memory; rows past the end are zero.
DEVICE void load_q_group(uint32_t (&q)[4][4], const decode_params &p, int request, int tile_row, int group, int lane)
{
    const uint32_t *from =
        (const uint32_t *)p.q + (((int64_t)request * p.rows + tile_row) * D_QK + group * 64) / 2 + (lane & 3);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        q[k][0] = tile_row < p.rows ? from[8 * k] : 0;
        q[k][1] = tile_row + 8 < p.rows ? from[8 * k + 8 * (D_QK / 2)] : 0;
        q[k][2] = tile_row < p.rows ? from[8 * k + 4] : 0;
        q[k][3] = tile_row + 8 < p.rows ? from[8 * k + 4 + 8 * (D_QK / 2)] : 0;
    }
}

struct q_fragments {
    uint32_t group[Q_REG_GROUPS ? Q_REG_GROUPS : 1][4][4]; // 7, 6..
};

// Waits for barrier I of a block of this side; ARM 1: and arms its next phase.
template <int CLUSTER, int SIDE> DEVICE void wait_keys(uint32_t smem, uint32_t parity, int i)
{
    uint32_t bar = smem + BAR_FULL + (SIDE * PIECES + i) * 8;
    mbarrier_wait(bar, parity);
    if (CLUSTER > 1 && ARM == 1 && (threadIdx.x & 127) == 0) arm(bar, i);
}

// S += Q K^T over one unit of the columns, as soon as it has arrived.
template <int CLUSTER, int SIDE, int HALF> DEVICE void score_unit(float (&s)[32], const q_fragments &q, uint32_t smem, uint32_t parity, int u)
{
    wait_keys<CLUSTER, SIDE>(smem, parity, 1 + HALF * HALF_UNITS + u);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 16 / HALF_UNITS; k++) {
        uint32_t step = HALF * HALF_BYTES + u * UNIT_BYTES + (k >> 2) * GROUP_BYTES + (k & 3) * 32;
        int group = HALF * 4 + u * 2 + (k >> 2);
        if (group >= 8 - Q_REG_GROUPS)
            wgmma_m64n64_rs(s, q.group[7 - group][k & 3], smem_descriptor(smem + SMEM_KEYS + SIDE * KEY_BYTES, 0, step), 1);
        else
            wgmma_m64n64_ss(s, smem_descriptor(smem + SMEM_Q, 0, step),
                            smem_descriptor(smem + SMEM_KEYS + SIDE * KEY_BYTES, 0, step), 1);
    }
}

// O (+)= P V for this side's columns of a block of side OWNER, P from registers or from shared memory.
template <int SIDE>
DEVICE void multiply_home(float (&o0)[64], float (&o1)[64], const uint32_t (&a)[4][4], uint32_t smem,
                          int accumulate)
{
    uint32_t v = smem + SMEM_KEYS + SIDE * KEY_BYTES + SIDE * HALF_BYTES;
    if (N256) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_m64n256_rs_vt(o0, o1, a[k], smem_descriptor(v, GROUP_BYTES, k * 2048), k > 0 || accumulate);
        wgmma_commit_group();
    } else {
        multiply_pv_rs(o0, a, v, accumulate);
        multiply_pv_rs(o1, a, v + UNIT_BYTES, accumulate);
    }
}
template <int SIDE> DEVICE void multiply_away(float (&o0)[64], float (&o1)[64], uint32_t smem, int accumulate)
{
    uint32_t v = smem + SMEM_KEYS + (SIDE ^ 1) * KEY_BYTES + SIDE * HALF_BYTES,
             p_tile = smem + SMEM_P + (SIDE ^ 1) * GROUP_BYTES;
    if (N256) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_m64n256_ss_vt(o0, o1, smem_descriptor(p_tile, 0, k * 32),
                                smem_descriptor(v, GROUP_BYTES, k * 2048), k > 0 || accumulate);
        wgmma_commit_group();
    } else {
        multiply_pv(o0, p_tile, v, accumulate);
        multiply_pv(o1, p_tile, v + UNIT_BYTES, accumulate);
    }
}
// Gives back barrier i of a block of side OWNER to the CTA that loads what this side frees.
template <int CLUSTER, int SIDE, int OWNER> DEVICE void release_keys(uint32_t smem, int i)
{
    uint32_t bar = BAR_EMPTY + (OWNER * PIECES + i) * 8;
    if (CLUSTER == 1)
        mbarrier_arrive(smem + bar);
    else
        mbarrier_arrive_cluster(mapa(smem, SIDE) + bar);
}
// Gives back this side's columns of a block of side OWNER, unit i of HALF_UNITS.
template <int CLUSTER, int SIDE, int OWNER> DEVICE void release(uint32_t smem, int unit, int lane)
{
    if (lane == 0) release_keys<CLUSTER, SIDE, OWNER>(smem, 1 + SIDE * HALF_UNITS + unit);
}

// The reference may have moved with the other side's block: follow it.
template <int SIDE>
DEVICE void follow(float (&o0)[64], float (&o1)[64], float &reference0, float &reference1, float &sum0,
                   float &sum1, float scale_log2, uint32_t smem, int warp, int row)
{
    if (__any_sync(~0u, ld_shared_u32(smem + SMEM_RESCALE + (SIDE ^ 1) * 16 + warp * 4))) {
        float max0 = ld_shared_f32(smem + SMEM_REFERENCE + (SIDE ^ 1) * 256 + row * 4);
        float max1 = ld_shared_f32(smem + SMEM_REFERENCE + (SIDE ^ 1) * 256 + row * 4 + 32);
        float scale0 = ex2_approx((reference0 - max0) * scale_log2),
              scale1 = ex2_approx((reference1 - max1) * scale_log2);
        reference0 = max0, reference1 = max1;
        sum0 *= scale0, sum1 *= scale1;
        rescale_output(o0, scale0, scale1);
        rescale_output(o1, scale0, scale1);
    }
}

// Keys past the end become zero, as in the first schedule; both sides' P V follow P's barrier.
template <int SIDE> DEVICE void clear_tail(uint32_t smem, int valid, int thread)
{
    named_barrier_sync(SIDE_BARRIER + SIDE, 128);
    for (int i = thread; i < (PAGE - valid) * 64; i += 128) {
        int row = valid + (i >> 6), group = (i >> 3) & 7, chunk = i & 7;
        st_shared_zero_16(smem + SMEM_KEYS + SIDE * KEY_BYTES + group * GROUP_BYTES + row * 128 + chunk * 16);
    }
    fence_proxy_async();
    named_barrier_sync(SIDE_BARRIER + SIDE, 128);
}

// P = exp2(S scale + shift) as bf16, to registers (A fragments) and to shared memory.
DEVICE void exponentials(const float (&s)[32], uint32_t (&a)[4][4], uint32_t p_row, int lane, float scale,
                         float shift0, float shift1, float &sum0, float &sum1)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int i = 8 * k + 2 * j;
            float shift = (j & 1) ? shift1 : shift0;
            float x = ex2_approx(fmaf(s[i], scale, shift)), y = ex2_approx(fmaf(s[i + 1], scale, shift));
            if (j & 1)
                sum1 += x + y;
            else
                sum0 += x + y;
            a[k][j] = pack_bf16(x, y);
        }
        stmatrix_x4(p_row + (((2 * k + (lane >> 4)) ^ (lane & 7)) << 4), a[k][0], a[k][1], a[k][2], a[k][3]);
    }
}

template <int CLUSTER, int SIDE> DEVICE void work_side(const decode_params &p, int tile, uint32_t smem)
{
    int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
    int row = 16 * warp + (lane >> 2); // this thread's rows: row, row + 8
    uint32_t p_row = smem + SMEM_P + SIDE * GROUP_BYTES + (16 * warp + (lane & 15)) * 128;
    float s[32], o0[64], o1[64];
    uint32_t a[4][4], q_rope[4][4];
    q_fragments q;
#pragma unroll
    for (int i = 0; i < 64; i++) o0[i] = o1[i] = 0;
    uint32_t own = 0, other = 0,
             pieces = 0; // blocks of either side and pieces so far: the barriers' parities
    const partition *part = p.plan + blockIdx.x / p.tiles;
    for (int r = part->begin_request, end = part->end_request; r <= end; r++) {
        piece work(p, *part, r);
        if (work.blocks == 0) {
            if (SIDE == 0) store_empty(p, work, tile, thread);
            continue;
        }
        int blocks = work.blocks, length = work.length, key = (work.first_block + SIDE) * PAGE;
        int target = work.split >= 0 ? work.split : ~r;
        float reference0 = -CUDART_INF_F, reference1 = -CUDART_INF_F, sum0 = 0, sum1 = 0;
        load_q_group(q_rope, p, r, tile * TILE_ROWS + row, 8, lane);
#pragma unroll
        for (int i = 0; i < Q_REG_GROUPS; i++)
            load_q_group(q.group[i], p, r, tile * TILE_ROWS + row, 7 - i, lane);
        mbarrier_wait(smem + BAR_Q_FULL, pieces & 1);
        if (SIDE == 1 && blocks == 1 && lane == 0) mbarrier_arrive(smem + BAR_Q_EMPTY);
        for (int k = SIDE; k < blocks; k += 2) {
            // Rope and home columns of Q K^T.
            TRACE(SIDE, own, 0);
            wait_keys<CLUSTER, SIDE>(smem, own & 1, 0);
            hold_accumulator(s);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
                wgmma_m64n64_rs(s, q_rope[i],
                                smem_descriptor(smem + SMEM_ROPE + SIDE * GROUP_BYTES, 0, i * 32), i > 0);
            bool follows = SIDE == 1 || k > 0;
            if (GATE && follows) mbarrier_wait(smem + BAR_SCORED + (SIDE ^ 1) * 8, other & 1);
            // One unit of either half first where the halves are freed by units, else the home half.
            score_unit<CLUSTER, SIDE, SIDE>(s, q, smem, own & 1, 0);
            if (!N256) score_unit<CLUSTER, SIDE, SIDE ^ 1>(s, q, smem, own & 1, 0);
            if (!N256 && SPLIT == 3) score_unit<CLUSTER, SIDE, SIDE>(s, q, smem, own & 1, 1);
            wgmma_commit_group();
            TRACE(SIDE, own, 1);
            // The block before.
            if (follows) {
                mbarrier_wait(smem + BAR_P_FULL + (SIDE ^ 1) * 8, other & 1);
                TRACE(SIDE, own, 2);
                wgmma_wait_group<0>();
                hold_accumulator(s);
                TRACE(SIDE, own, 3);
                follow<SIDE>(o0, o1, reference0, reference1, sum0, sum1, p.scale_log2, smem, warp, row);
                hold_accumulator(o0);
                hold_accumulator(o1);
                wgmma_fence();
                multiply_away<SIDE>(o0, o1, smem, SIDE == 0 || k > 1);
                if (!N256) {
                    wgmma_wait_group<1>();
                    release<CLUSTER, SIDE, SIDE ^ 1>(smem, 0, lane);
                }
            }
            if (N256)
                score_unit<CLUSTER, SIDE, SIDE ^ 1>(s, q, smem, own & 1, 0);
            else {
                if (SPLIT == 2) score_unit<CLUSTER, SIDE, SIDE>(s, q, smem, own & 1, 1);
                score_unit<CLUSTER, SIDE, SIDE ^ 1>(s, q, smem, own & 1, 1);
            }
            wgmma_commit_group();
            // A few instructions are still in flight: the other side's may line up behind them.
            if (GATE && lane == 0) mbarrier_arrive(smem + BAR_SCORED + SIDE * 8);
            wgmma_wait_group<1>();
            if (follows) {
                release<CLUSTER, SIDE, SIDE ^ 1>(smem, HALF_UNITS - 1, lane);
                other++;
            }
            TRACE(SIDE, own, 4);
            wgmma_wait_group<0>();
            hold_accumulator(s);
            hold_accumulator(o0);
            hold_accumulator(o1);
            if (lane == 0) {
                release_keys<CLUSTER, SIDE, SIDE>(smem, 0);
                if (k + 2 >= blocks) mbarrier_arrive(smem + BAR_Q_EMPTY);
            }
            TRACE(SIDE, own, 5);
            // Softmax.
            if (key + PAGE > (p.causal ? min(length, length - p.s_q + 1) : length))
                mask_scores(s, p, key, length, tile, row, lane);
            if (key + PAGE > length) clear_tail<SIDE>(smem, length - key, thread);
            float max0, max1;
            row_maxima(s, max0, max1);
            float stale = 8 / p.scale_log2;
            bool rescale = __any_sync(~0u, max0 > reference0 + stale || max1 > reference1 + stale) || k == 0;
            if (rescale) {
                // Rows without a key in this piece have no reference; any finite one will do for them.
                max0 = fmaxf(fmaxf(reference0, quad_max(max0)), -1e30f);
                max1 = fmaxf(fmaxf(reference1, quad_max(max1)), -1e30f);
                float scale0 = ex2_approx((reference0 - max0) * p.scale_log2);
                float scale1 = ex2_approx((reference1 - max1) * p.scale_log2);
                reference0 = max0, reference1 = max1;
                sum0 *= scale0, sum1 *= scale1;
                st_shared_f32(smem + SMEM_REFERENCE + SIDE * 256 + row * 4, max0);
                st_shared_f32(smem + SMEM_REFERENCE + SIDE * 256 + row * 4 + 32, max1);
                rescale_output(o0, scale0, scale1);
                rescale_output(o1, scale0, scale1);
            }
            if (lane == 0) st_shared_u32(smem + SMEM_RESCALE + SIDE * 16 + warp * 4, rescale);
            // P(k-2) has been read by now: the other side waited for that product before it made P(k-1), seen above.
            exponentials(s, a, p_row, lane, p.scale_log2, -reference0 * p.scale_log2,
                         -reference1 * p.scale_log2, sum0, sum1);
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(smem + BAR_P_FULL + SIDE * 8);
            TRACE(SIDE, own, 6);
            // Its product with the home half.
            hold_accumulator(o0);
            hold_accumulator(o1);
            wgmma_fence();
            multiply_home<SIDE>(o0, o1, a, smem, k > 0);
            if (!N256) {
                wgmma_wait_group<1>();
                release<CLUSTER, SIDE, SIDE>(smem, 0, lane);
            }
            wgmma_wait_group<0>();
            hold_accumulator(o0);
            hold_accumulator(o1);
            release<CLUSTER, SIDE, SIDE>(smem, HALF_UNITS - 1, lane);
            TRACE(SIDE, own, 7);
            own++;
            key += 2 * PAGE;
        }
        if (((blocks - 1) & 1) != SIDE) { // the last block is the other side's
            mbarrier_wait(smem + BAR_P_FULL + (SIDE ^ 1) * 8, other & 1);
            follow<SIDE>(o0, o1, reference0, reference1, sum0, sum1, p.scale_log2, smem, warp, row);
            hold_accumulator(o0);
            hold_accumulator(o1);
            wgmma_fence();
            multiply_away<SIDE>(o0, o1, smem, SIDE == 0 || blocks > 1);
            wgmma_wait_group<0>();
            hold_accumulator(o0);
            hold_accumulator(o1);
#pragma unroll
            for (int u = 0; u < HALF_UNITS; u++) release<CLUSTER, SIDE, SIDE ^ 1>(smem, u, lane);
            other++;
        }
        // Each side has summed its own blocks; both now hold the same references.
        sum0 = quad_sum(sum0), sum1 = quad_sum(sum1);
        uint32_t sums = smem + SMEM_SUM + (pieces & 1) * 512;
        if ((lane & 3) == 0) {
            st_shared_f32(sums + SIDE * 256 + row * 4, sum0);
            st_shared_f32(sums + SIDE * 256 + row * 4 + 32, sum1);
        }
        named_barrier_sync(PIECE_BARRIER, 256);
        sum0 += ld_shared_f32(sums + (SIDE ^ 1) * 256 + row * 4);
        sum1 += ld_shared_f32(sums + (SIDE ^ 1) * 256 + row * 4 + 32);
        if (SIDE == 0 && (lane & 3) == 0) {
            store_lse(p, target, tile * TILE_ROWS + row, reference0, sum0);
            store_lse(p, target, tile * TILE_ROWS + row + 8, reference1, sum1);
        }
        float inv0 = sum0 > 0 ? 1 / sum0 : 0, inv1 = sum1 > 0 ? 1 / sum1 : 0;
        store_output(p, target, o0, inv0, inv1, tile * TILE_ROWS + row, SIDE * 256, lane);
        store_output(p, target, o1, inv0, inv1, tile * TILE_ROWS + row, SIDE * 256 + 128, lane);
        pieces++;
    }
}

// ---------------------------------------------------------------- kernel
// CLUSTER > 1 needs a launch in clusters of that size, and tiles a multiple of it.
template <int CLUSTER>
__global__ void __launch_bounds__(THREADS, 1)
    dense_decode_pair_kernel(const __grid_constant__ decode_params p,
                             const __grid_constant__ decode_maps maps)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    uint32_t smem = smem_address(shared);
    int tile = blockIdx.x % p.tiles;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * PIECES; i++) {
            mbarrier_init(smem + BAR_FULL + 8 * i, 1);
            mbarrier_init(smem + BAR_EMPTY + 8 * i, 4 * CLUSTER);
        }
        mbarrier_init(smem + BAR_Q_FULL, 1);
        mbarrier_init(smem + BAR_Q_EMPTY, 8);
        for (int i = 0; i < 2; i++) {
            mbarrier_init(smem + BAR_P_FULL + 8 * i, 4);
            mbarrier_init(smem + BAR_SCORED + 8 * i, 4);
        }
        fence_mbarrier_init();
        fence_proxy_async();
        if (CLUSTER > 1 && ARM == 1)
            for (int i = 0; i < 2 * PIECES; i++) arm(smem + BAR_FULL + 8 * i, i % PIECES);
    }
    if (CLUSTER == 1)
        __syncthreads();
    else
        cluster_barrier();
    griddepcontrol_launch_dependents();
    int group = threadIdx.x >> 7;
    if (group == 0) {
        setmaxnreg_dec<LAB_PRODUCER_REGS>();
        const partition &part = p.plan[blockIdx.x / p.tiles];
        if (threadIdx.x < 32 && elect_sync())
            produce_keys<CLUSTER>(p, maps, part, tile, smem);
        else if (threadIdx.x >= 32 && threadIdx.x < 64 && elect_sync())
            produce_queries(p, maps, part, tile, smem);
        else if (CLUSTER > 1 && ARM == 0 && threadIdx.x >= 64 && threadIdx.x < 96 && elect_sync())
            arm_keys(p, part, smem);
    } else if (group == 1) {
        setmaxnreg_inc<240>();
        CLOCK_BEGIN;
        work_side<CLUSTER, 0>(p, tile, smem);
        CLOCK_END;
    } else {
        setmaxnreg_inc<LAB_SIDE1_REGS>();
        work_side<CLUSTER, 1>(p, tile, smem);
    }
    // Nobody leaves while the other loads into its shared memory or arrives there.
    if (CLUSTER > 1) {
        __syncwarp();
        cluster_barrier();
    }
}
template __global__ void dense_decode_pair_kernel<1>(const __grid_constant__ decode_params, const __grid_constant__ decode_maps);
#if LAB_CLUSTER > 1
template __global__ void dense_decode_pair_kernel<LAB_CLUSTER>(const __grid_constant__ decode_params, const __grid_constant__ decode_maps);
#endif
} // namespace pair_schedule
