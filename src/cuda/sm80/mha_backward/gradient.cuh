/* SPDX-License-Identifier: MIT
 *
 * The gradients of a block of keys, which a CTA computes. Each function is defined in the file of its role.
 */
#pragma once

#include "../../params.h"
#include "products.cuh"

#include <stddef.h>

namespace mha_backward {

template <typename Element, typename Tiles> struct Backward : WarpProducts<Element, Tiles> {
    using Products = WarpProducts<Element, Tiles>;
    using Products::smem, Products::KEPT_STEPS, Products::KEY_TILES, Products::ROW_TILES, Products::ROW_STEPS;
    using typename Products::Lane, typename Products::Scores, typename Products::Words,
        typename Products::KeptValues, typename Products::KeySums, typename Products::ValueSums,
        typename Products::QuerySums;

    const mha_backward_sm80_params &p;

    DEVICE Backward(const mha_backward_sm80_params &params, uint32_t shared) : Products(shared), p(params) {}

    DEVICE int of_block(uint32_t offset) const { return (int)load_shared_4(smem + Tiles::BLOCK_AT + offset); }
#define OF_BLOCK(MEMBER)                                                                                     \
    DEVICE int MEMBER() const                                                                                \
    {                                                                                                        \
        return of_block(offsetof(KeyBlock, MEMBER));                                                         \
    }
    OF_BLOCK(request)
    OF_BLOCK(token)
    OF_BLOCK(tokens)
    OF_BLOCK(row_tile)
    OF_BLOCK(key)
    OF_BLOCK(keys)
    OF_BLOCK(shift)
    OF_BLOCK(head)
    OF_BLOCK(number)
    OF_BLOCK(first_tile)
    OF_BLOCK(end_tile)
    OF_BLOCK(start_tile)
#undef OF_BLOCK

    /* A query head, and the tile's number within the request. */
    struct TileCoord {
        int head, tile;
    };

    /* ---- scheduler.cuh ---- */

    DEVICE TileCoord first_coord() const;
    DEVICE TileCoord coord_after(const TileCoord &coord) const;
    DEVICE int64_t tile_index(const TileCoord &coord) const;

    /* ---- producer.cuh ---- */

    DEVICE const uint16_t *rows_of(const mha_vectors &of, const TileCoord &coord) const;
    DEVICE void copy_q(const TileCoord &coord) const;
    DEVICE void copy_dout(const TileCoord &coord) const;
    DEVICE const float *stats_of(const TileCoord &coord, int thread) const;
    DEVICE void copy_stats(const TileCoord &coord) const;
    DEVICE void copy_rows_at(const TileCoord &coord) const;
    DEVICE uint16_t *keys_of(const mha_vectors &of) const;
    DEVICE void copy_keys() const;
    DEVICE bool copied_empty_row() const;
    __device__ __noinline__ static void clear_empty_rows(uint32_t stats, uint32_t q, uint32_t dout);

    /* ---- softmax.cuh ---- */

    DEVICE void mask(Scores &s, int diagonal, int left) const;
    DEVICE void make_p(Scores &s, Words &w) const;
    DEVICE uint32_t parking() const;
    DEVICE void park_p(const Scores &s) const;
    DEVICE void make_ds(const Scores &s, const Scores &dp, Words &w) const;

    /* ---- dq.cuh ---- */

    DEVICE int order_of(const TileCoord &coord) const;
    DEVICE void add_dq(const TileCoord &coord) const;

    /* ---- mainloop.cuh ---- */

    DEVICE void pair_barrier() const;
    DEVICE void hold_products() const;
    DEVICE void process_tile(KeySums &dk, ValueSums &dv, const TileCoord &coord,
                             const KeptValues &kept) const;
    template <int TILES>
    DEVICE void write_gradient(const mha_vectors &of, float factor,
                               const float (&sums)[KEY_TILES][TILES][4]) const;
    DEVICE void run() const;
};

} // namespace mha_backward
