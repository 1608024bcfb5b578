/* SPDX-License-Identifier: MIT
 *
 * The join of dense MHA on Hopper: adds the parts of tiles whose keys were split. A warp takes a row
 * (device/row_join.cuh).
 */
#pragma once

#include "../../device/row_join.cuh"
#include "scheduler.cuh"

namespace mha_forward {

DEVICE RowCoord coord_of_row(const mha_forward_sm90_params &p, const TileRows &tile, int row)
{
    return coord_of_row(p, tile.token, tile.head, row);
}

template <typename Element, int D_V>
DEVICE void join_row(const mha_forward_sm90_params &p, const TileRows &tile, const TilePart &part, int row)
{
    RowJoin<Element, D_V, mha_forward_sm90_params>(p, part.row + row, part.step, part.splits)
        .finish(tile, row, true);
}

/* Rows are numbered by tile; a tile has tile_rows of them. */
template <typename Element, int D_QK, int D_V> DEVICE void join(const mha_forward_sm90_params &p)
{
    using Window = RequestWindow<MHA_SM90_ROWS(D_QK), MHA_SM90_KEYS(D_QK), Numbers::SPLIT_TILES, false,
                                 MHA_SM90_FEW_KEYS(D_QK)>;
    __shared__ __align__(16) unsigned char windows[MHA_JOIN_WARPS][Window::BYTES + sizeof(WorkTile)];
    const int warp = (int)threadIdx.x / 32;
    const uint32_t window = (uint32_t)__cvta_generic_to_shared(windows[warp]), tile = window + Window::BYTES;
    Window requests(p, window);
    for (int64_t i = blockIdx.x * MHA_JOIN_WARPS + warp;; i += gridDim.x * MHA_JOIN_WARPS) {
        const int number = (int)(i / p.tile_rows), row = (int)(i - (int64_t)number * p.tile_rows);
        __syncwarp();
        if (requests.find(number, tile) < 0) break;
        __syncwarp();
        const TileRows rows = load_tile_rows(tile);
        wait_for_kernels_before();
        if (row < rows.rows) join_row<Element, D_V>(p, rows, load_tile_part(tile), row);
    }
    wait_for_kernels_before(); /* also without a row: when this kernel ends, so has the one before */
}

} // namespace mha_forward

#define MHA_FORWARD_JOIN(NAME, ELEMENT, D_QK, D_V)                                                           \
    DEFINE_KERNEL(NAME, mha_forward_sm90_params, (32 * MHA_JOIN_WARPS, 4),                                   \
                  mha_forward::join<ELEMENT, D_QK, D_V>(p))
