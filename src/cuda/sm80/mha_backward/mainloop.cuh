/* SPDX-License-Identifier: MIT
 *
 * Dense MHA backward on any NVIDIA GPU since Ampere, as in FlashAttention-2: a CTA has 64 keys of a key head,
 * at 192/128 mostly 128, holds their dK and dV in registers, and iterates over the tiles of 64 rows to which
 * they are visible, of every query head of the key head. (At 256/256 with 99 KiB of shared memory tiles have 32
 * rows, and a quarter of V is in registers.)
 *
 *      memory ──cp.async──▶ K, V (shared, for all tiles)     Q, dO, lse, delta of a tile (shared)
 *
 *      Sᵀ = K Qᵀ       each warp WARP_KEYS keys × half the rows Pᵀ = 2^(Sᵀ - lse), to shared memory
 *      dPᵀ = V dOᵀ     the same                                 dSᵀ = Pᵀ (dPᵀ - delta), to shared memory
 *      dK += dSᵀ Q     each warp its keys × half the columns    dSᵀ of its own rows from registers, of its
 *                                                               neighbour's from shared memory
 *      dV += Pᵀ dO     the same                                 Pᵀ from shared memory; of its own rows from
 *                                                               registers with EARLY_DV
 *      dQ = dS K       each warp half the rows × its columns    added to fp32 sums in global memory
 *
 * Keys are the rows of S and dP, so that the accumulators of P and dS have the layout of A. Two neighbouring
 * warps have the same keys: they wait only for each other; all warps synchronize only before dQ and before
 * the next tile.
 *
 * Timeline of a tile (| = barrier of the whole CTA, : of two warps):
 *      wait for its copies | S; P; dP; dS; dK of own rows : dV; dK of others | copy next tile; dQ; add it
 * Q and dO have one stage: the other CTAs of the SM hide the waits, and copies that are issued beside dQ do
 * not delay the products that begin a tile.
 *
 * There are three launches; rows.cuh has the kernels before and after. Deterministic: key blocks are taken in
 * order, and each waits at a tile until those before it have added.
 *
 * Summation order: dK and dV are summed in fp32 in the order of the tiles; dQ in the order in which CTAs
 * arrive or, if deterministic, in the order of the key blocks.
 */
#pragma once

#include "../../device/backward_rows.cuh"
#include "../../device/quad.cuh"
#include "../../device/result.cuh"
#include "dq.cuh"
#include "producer.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"

namespace mha_backward {

/* Waits for the other warp of the same keys. Barrier 0 is __syncthreads. */
template <typename Element, typename Tiles> DEVICE void Backward<Element, Tiles>::pair_barrier() const
{
    const Lane l;
    asm volatile("bar.sync %0, 64;" ::"r"(l.key_group + 1) : "memory");
}

/* Ends a basic block with a branch that is never taken. Otherwise ptxas would start the following
 * products among the preceding ones, for which there are no registers. */
template <typename Element, typename Tiles> DEVICE void Backward<Element, Tiles>::hold_products() const
{
    if (p.call.b < 0) asm volatile("trap;");
}

/* Computes P and dS of a tile, and adds its contributions to dK and dV. */
template <typename Element, typename Tiles>
DEVICE void Backward<Element, Tiles>::process_tile(KeySums &dk, ValueSums &dv, const TileCoord &coord,
                                                   const KeptValues &kept) const
{
    const uint32_t q = this->q(), dout = this->dout(), p_at = smem + Tiles::P_AT, ds_at = smem + Tiles::DS_AT;
    const int diagonal = number() * Tiles::KEYS - shift() - coord.tile * Tiles::ROWS, left = keys();
    Words w;
    {
        Scores s, dp;
        this->template scores<Tiles::D_QK, 0>(s, smem, q, kept);
        if (diagonal + Tiles::KEYS > 1 || left < Tiles::KEYS) mask(s, diagonal, left);
        make_p(s, w);
        this->store_words(w, p_at);
        if (Tiles::PARKS_P && Element::IS_BF16) park_p(s);
        if (Tiles::EARLY_DV) this->add_rows(dv, w, dout, false);
        hold_products();
        this->template scores<Tiles::D_V, KEPT_STEPS>(dp, smem + Tiles::V_AT, dout, kept);
        make_ds(s, dp, w);
    }
    this->store_words(w, ds_at);
    hold_products();
    this->add_rows(dk, w, q, false);
    pair_barrier();
    if (!Tiles::EARLY_DV) {
        this->load_words(w, p_at, false);
        this->add_rows(dv, w, dout, false);
    }
    this->load_words(w, p_at, true);
    this->add_rows(dv, w, dout, true);
    this->load_words(w, ds_at, true);
    this->add_rows(dk, w, q, true);
}

/* Writes the warp's keys and its half of the columns, 32 of every 64, and 16 of the last 32 of 96. */
template <typename Element, typename Tiles>
template <int TILES>
DEVICE void Backward<Element, Tiles>::write_gradient(const mha_vectors &of, float factor,
                                                     const float (&sums)[KEY_TILES][TILES][4]) const
{
    const Lane l;
    const int key = l.key_group * Tiles::WARP_KEYS + l.lane / 4, left = keys();
    uint16_t *to = keys_of(of) + l.row_group * 32 + l.lane % 4 * 8;
#pragma unroll
    for (int m = 0; m < KEY_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < TILES; i += 4) {
                const int tiles = TILES - i < 4 ? TILES - i : 4; /* 2 in half a line */
                uint32_t words[4] = {};
#pragma unroll
                for (int j = 0; j < tiles; j++)
                    words[j] = Element::pack(sums[m][i + j][2 * half] * factor,
                                             sums[m][i + j][2 * half + 1] * factor);
                const uint4 eight = quad_gather_eight(words);
                const int at = key + 16 * m + 8 * half;
                uint16_t *const line = to + at * of.token + i / 4 * LINE_ELEMENTS;
                store_global_16(tiles == 4 ? line : line - l.row_group * 16, eight,
                                at < left && (tiles == 4 || l.lane % 4 < tiles));
            }
}

/* Processes the key block that is described in shared memory. */
template <typename Element, typename Tiles> DEVICE void Backward<Element, Tiles>::run() const
{
    KeySums dk = {};
    ValueSums dv = {};
    TileCoord coord = first_coord();
    KeptValues kept;
    int left = (end_tile() - first_tile()) * p.call.group;
    if (left) {
        copy_keys(), copy_rows_at(coord);
        cp_async_commit();
    }
    if (Tiles::KEEPS_V && left) {
        cp_async_wait<0>();
        __syncthreads();
        this->keep_values(kept);
    }
    for (; left; left--) {
        cp_async_wait<0>();
        if (__syncthreads_or(copied_empty_row())) clear_empty_rows(this->stats(), this->q(), this->dout());
        process_tile(dk, dv, coord, kept);
        __syncthreads();
        const TileCoord next = coord_after(coord);
        if (left > 1) copy_rows_at(next);
        cp_async_commit();
        add_dq(coord);
        coord = next;
    }
    write_gradient(p.call.dk, p.call.scale * DS_UNSCALE<Element>, dk);
    write_gradient(p.call.dv, 1.0f / P_SCALE, dv);
}

template <typename Element, typename Tiles> DEVICE void backward_keys(const mha_backward_sm80_params &p)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    const KeyBlock block = find_key_block<Tiles>(p, take_number(p, shared_address(shared)));
    if (block.keys <= 0) return; /* this number has no keys */
    if (threadIdx.x == 0) *(KeyBlock *)(shared + Tiles::BLOCK_AT) = block;
    __syncthreads();
    const Backward<Element, Tiles> backward(p, shared_address(shared));
    backward.run();
}

} // namespace mha_backward

#define MHA_BACKWARD_OF_SHAPE(PREFIX, ELEMENT, name, d_qk, d_v, keys, warp_keys, rows, early_dv, blocks)     \
    DEFINE_KERNEL(PREFIX##name, mha_backward_sm80_params, (MHA_BACKWARD_THREADS(keys, warp_keys), blocks),   \
                  mha_backward::backward_keys<                                                               \
                      ELEMENT, mha_backward::BackwardTiles<d_qk, d_v, keys, warp_keys, rows, early_dv>>(p))
