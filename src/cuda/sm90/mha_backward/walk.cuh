/* SPDX-License-Identifier: MIT
 *
 * The tiles of an item, one after the other. A head's begin with `start`, go up to the last, and then from the first to the one before
 * `start`: blocks of threads that work at the same head at the same time add to different ones.
 */
#pragma once

#include "layout.cuh"

/* A word in shared memory that is the same for the whole warp. */
DEVICE int word_at(uint32_t from)
{
    return (int)__shfl_sync(~0u, load_shared_4(from), 0);
}

template <typename Layout> struct Walk {
    int left;     /* tiles of the item, this one included */
    int at;       /* its number, of all heads */
    int in_row;   /* tiles that are next to each other, from this one on */
    int diagonal; /* of the tile: row i sees key t of the item if t + diagonal <= i */

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

    /* Goes to the next one; false: there is none. */
    DEVICE bool step(const mha_backward_sm90_params &p, uint32_t item)
    {
        if (!--left) return false;
        at++, diagonal -= Layout::ROWS;
        if (!--in_row) turn(p, item);
        return true;
    }
};
