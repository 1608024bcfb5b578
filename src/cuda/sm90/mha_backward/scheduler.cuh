/* SPDX-License-Identifier: MIT
 *
 * Scheduler: which work tile a CTA takes, and the order of its tiles of rows.
 *
 * Work tiles are numbered by request; within a request by sets of key heads whose rows and sums of dQ fit L2;
 * within a set the key blocks with the most rows come first. Per head the loop over the tiles of rows goes
 * from tile `start` to the last and then from the first to the one before `start`, so that CTAs that process
 * the same head at the same time add to different tiles.
 */
#pragma once

#include "layout.cuh"

namespace mha_backward {

/* Returns a word of shared memory, uniform over the warp. */
DEVICE int load_uniform(uint32_t from)
{
    return (int)__shfl_sync(~0u, load_shared_4(from), 0);
}

template <typename Layout> struct RowTiles {
    int left;     /* tiles left in the work tile, including this one */
    int index;    /* the tile's number over all heads */
    int in_run;   /* contiguous tiles left, including this one */
    int diagonal; /* row i of the tile sees key t of the work tile if t + diagonal <= i */

    DEVICE void begin(const mha_backward_sm90_params &p, uint32_t work)
    {
        left = load_uniform(work + offsetof(WorkTile, tiles)) * p.call.group;
        if (left) begin_run(p, work);
    }

    DEVICE void begin_run(const mha_backward_sm90_params &p, uint32_t work)
    {
        const int first = load_uniform(work + offsetof(WorkTile, first_tile)),
                  tiles = load_uniform(work + offsetof(WorkTile, tiles)),
                  start = load_uniform(work + offsetof(WorkTile, start)),
                  head = load_uniform(work + offsetof(WorkTile, head)) * p.call.group;
        const int done = tiles * p.call.group - left, h = done / tiles, i = done - h * tiles;
        const bool wraps = i >= tiles - start;
        const int tile = i + start - (wraps ? tiles : 0);
        index = (head + h) * p.row_tiles + first + tile;
        in_run = wraps ? tiles - i : tiles - start - i;
        diagonal = load_uniform(work + offsetof(WorkTile, diagonal)) - tile * Layout::ROWS;
    }

    /* Goes to the next tile; returns false if there is none. */
    DEVICE bool advance(const mha_backward_sm90_params &p, uint32_t work)
    {
        if (!--left) return false;
        index++, diagonal -= Layout::ROWS;
        if (!--in_run) begin_run(p, work);
        return true;
    }
};

} // namespace mha_backward
