/* SPDX-License-Identifier: MIT
 *
 * Order of an item's tiles. Per head the walk goes from tile `start` to the last and then from the first to
 * the one before `start`, so that CTAs that process the same head at the same time add to different tiles.
 */
#pragma once

#include "layout.cuh"

namespace mha_backward {

/* Returns a word of shared memory, uniform over the warp. */
DEVICE int word_at(uint32_t from)
{
    return (int)__shfl_sync(~0u, load_shared_4(from), 0);
}

template <typename Layout> struct Walk {
    int left;     /* tiles left in the item, including this one */
    int at;       /* the tile's number over all heads */
    int in_row;   /* contiguous tiles left, including this one */
    int diagonal; /* row i of the tile sees key t of the item if t + diagonal <= i */

    DEVICE void begin(const mha_backward_sm90_params &p, uint32_t item)
    {
        left = word_at(item + offsetof(Item, tiles)) * p.call.group;
        if (left) turn(p, item);
    }

    DEVICE void turn(const mha_backward_sm90_params &p, uint32_t item)
    {
        const int first = word_at(item + offsetof(Item, first_tile)),
                  tiles = word_at(item + offsetof(Item, tiles)),
                  start = word_at(item + offsetof(Item, start)),
                  head = word_at(item + offsetof(Item, head)) * p.call.group;
        const int done = tiles * p.call.group - left, h = done / tiles, i = done - h * tiles;
        const bool round = i >= tiles - start;
        const int tile = i + start - (round ? tiles : 0);
        at = (head + h) * p.row_tiles + first + tile;
        in_row = round ? tiles - i : tiles - start - i;
        diagonal = word_at(item + offsetof(Item, diagonal)) - tile * Layout::ROWS;
    }

    /* Goes to the next tile; returns false if there is none. */
    DEVICE bool step(const mha_backward_sm90_params &p, uint32_t item)
    {
        if (!--left) return false;
        at++, diagonal -= Layout::ROWS;
        if (!--in_row) turn(p, item);
        return true;
    }
};

} // namespace mha_backward
