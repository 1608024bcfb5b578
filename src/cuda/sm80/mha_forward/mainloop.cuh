/* SPDX-License-Identifier: MIT
 *
 * Dense MHA forward on any NVIDIA GPU since Ampere, as in FlashAttention-2 (docs/kernels/mha.md has the
 * measurements).
 *
 * A CTA takes a tile of 128 rows of one head (a row is one query token of one query head) through the keys
 * that are visible to them, KEYS at a time. A warp owns 16 · ROW_TILES rows of the tile: their scores, their
 * weights and their rows of O stay in its registers, and warps exchange no values. The scores S = Q Kᵀ are in
 * the registers in which the product with V needs P: two C of m16n8k16 side by side are one A (fragment.h),
 * so that P never touches shared memory.
 *
 *      memory ──cp.async──▶ ring of key blocks ────ldmatrix──────▶ S = Q·Kᵀ ◀──ldmatrix── Q (shared)
 *                                                                    │ mask, reference, exp2
 *                                                                    ▼
 *             ──cp.async──▶ ring of value blocks ──ldmatrix.trans─▶ O += P·V        (S, P and O in registers)
 *
 * Timeline of a block of keys (| = barrier of the CTA):
 *
 *      wait for its copies | copy the next block; S; P; are weights large? O += P·V
 *
 * Between S and O += P·V a warp has no products in flight; the warp of the other CTA on its scheduler has.
 * Therefore two CTAs share an SM, each with half of the registers: at 128/128, 128 of 255 registers hold O
 * and 80 hold S. At 256/256 O of 16 rows takes as many, and an SM has one CTA of 8 warps.
 *
 * A warp has 32 rows because of the bandwidth of shared memory. A fragment of K or V serves ROW_TILES
 * products: with one row tile an m16n8k16 takes 256 bytes, which are 2 clocks, where mma.sync could take one
 * every 1.6 clocks; with two it takes 128. The fragments of Q are read once per block of keys, so that more
 * keys per block cost less.
 *
 * Work that is done once per tile is compact code, in loops that are not unrolled: code that runs once takes
 * several clocks per instruction.
 */
#pragma once

#include "../../device/mma.cuh"
#include "epilogue.cuh"
#include "producer.cuh"
#include "softmax.cuh"

namespace mha_forward {

/* Returns the offset of this lane's chunk `chunk` (even) chunks further on: the swizzle is an XOR. */
template <typename Layout> DEVICE uint32_t MhaForward<Layout>::lane_chunk(int chunk) const
{
    return lane_at ^ (uint32_t)(chunk % 8 * CHUNK_BYTES);
}

template <typename Layout> DEVICE void MhaForward<Layout>::load_q(uint32_t (&a)[ROW_TILES][4], int step) const
{
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
        ldmatrix_x4(a[m], lane_chunk(2 * step) + q_at + threadIdx.x / 32 * (WARP_ROWS * LINE_BYTES) +
                              (uint32_t)(step / 4 * Q_GROUP + 16 * m * LINE_BYTES));
}

/* s = Q Kᵀ */
template <typename Layout>
DEVICE void MhaForward<Layout>::score(int stage, const QFragments &q, Scores &s) const
{
    const uint32_t block_at = k_at + (uint32_t)stage * K_BYTES;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[m][t][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32_t a[ROW_TILES][4], b[KEY_TILES / 2][4];
        if (!Q_IN_REGISTERS) load_q(a, step);
#pragma unroll
        for (int t = 0; t < KEY_TILES; t += 2)
            ldmatrix_x4(b[t / 2], lane_chunk(2 * step) + block_at +
                                      (uint32_t)(step / 4 * KEY_GROUP + 8 * t * LINE_BYTES));
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++)
                mma_16816<Element>(s[m][t], Q_IN_REGISTERS ? q.a[Q_IN_REGISTERS ? step : 0][m] : a[m],
                                   b[t / 2][t % 2], b[t / 2][t % 2 + 2]);
    }
}

/* o += P V */
template <typename Layout>
DEVICE void MhaForward<Layout>::add_values(int stage, const Weights &w, Sums &o) const
{
    const uint32_t block_at = v_at + (uint32_t)stage * V_BYTES;
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b,
                              lane_chunk(n) + block_at + (uint32_t)(n / 8 * KEY_GROUP + 16 * k * LINE_BYTES));
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                mma_16816<Element>(o[m][n], w[m][k], b[0], b[1]);
                mma_16816<Element>(o[m][n + 1], w[m][k], b[2], b[3]);
            }
        }
}

template <typename Layout>
DEVICE typename MhaForward<Layout>::VisibleKeys MhaForward<Layout>::keys_visible_to_warp() const
{
    const int first = first_row(), last = min(first + WARP_ROWS, tile.rows) - 1;
    return {first <= last ? visible_keys(p, tile, last) : 0, visible_keys(p, tile, first)};
}

template <typename Layout> DEVICE void MhaForward<Layout>::run()
{
    Sums o = {};
    RowState state;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            state.reference[m][half] = LEAST_REFERENCE, state.sum[m][half] = 0.0f;
    state.careful = true;
    const int keys = visible_keys(p, tile, tile.rows - 1); /* visible to some row of the tile */
    if (keys > 0) mainloop((unsigned)keys, state, o);
    epilogue(state, o);
}

/* Processes all blocks of keys. Key numbers are unsigned, because the number behind the last block may
 * pass 2^31. */
template <typename Layout>
DEVICE void MhaForward<Layout>::mainloop(unsigned keys, RowState &state, Sums &o) const
{
    static_assert(STAGES == 2, "a block is loaded when the one before it is begun");
    if (threadIdx.x % 32 == 0) shared->visible[threadIdx.x / 32] = keys_visible_to_warp();
    __syncwarp();
    load_queries(); /* in the same cp.async group as the first block */
    QFragments q;
    int stage = 0;
#pragma unroll 1
    for (unsigned next = 0;; next += KEYS, stage ^= 1) {
        cp_async_wait<0>();
        __syncthreads(); /* all copies have arrived, and all warps are done with the previous block */
        if (next < keys) load_block(next, stage);
        if (Q_IN_REGISTERS && next == KEYS)
#pragma unroll
            for (int step = 0; step < STEPS; step++) load_q(q.a[Q_IN_REGISTERS ? step : 0], step);
        const VisibleKeys visible = shared->visible[fresh_thread() / 32];
        const int first_key = (int)(next - KEYS);
        if (next && first_key < visible.to_some)
            process_block(first_key, stage ^ 1, visible.to_all - first_key < KEYS, q, state, o);
        if (next >= keys) break;
    }
}

/* Processes the block whose first key is first_key; `masked`: not all of it is visible to every row. */
template <typename Layout>
DEVICE void MhaForward<Layout>::process_block(int first_key, int stage, bool masked, const QFragments &q,
                                              RowState &state, Sums &o) const
{
    Weights w;
    RowSums sum;
#pragma unroll 1
    for (;;) {
        Scores s;
        score(stage, q, s);
        if (masked) mask(s, first_key);
        if (SELDOM(state.careful)) move_references_to_scores(s, state, o);
        if (SELDOM(state.careful)) {
            const float reference[ROW_TILES][2] = {};
            make_exponents(s, state);
            softmax_block(s, 1.0f, reference, sum, w);
        } else {
            softmax_block(s, p.call.scale_log2, state.reference, sum, w);
        }
        if (!SELDOM(needs_rescale(sum))) break;
        move_references_by_weights(sum, state, o);
    }
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) state.sum[m][half] += sum[m][half];
    add_values(stage, w, o);
}

template <typename Layout> DEVICE void kernel(const mha_forward_sm80_params &p)
{
    extern __shared__ __align__(128) unsigned char memory[];
    WorkTile tile;
    int part_row;
    if (!find_tile < Layout::SPLITS ? Numbers::SPLITS : Numbers::TILES > (p, (int)blockIdx.x, tile, part_row))
        return;
    MhaForward<Layout> forward(p, memory);
    if (threadIdx.x == 0) forward.shared->tile = tile;
    if (Layout::SPLITS && threadIdx.x == 0) forward.shared->part_row = part_row;
    __syncthreads();
    forward.run();
}

} // namespace mha_forward

#define MHA_FORWARD_KERNEL(NAME, LAYOUT, WARPS, CTAS)                                                        \
    DEFINE_KERNEL(NAME, mha_forward_sm80_params, (32 * (WARPS), CTAS), mha_forward::kernel<LAYOUT>(p))
