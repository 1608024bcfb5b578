/* SPDX-License-Identifier: MIT
 *
 * The tiles of an item, one after the other; of each one those of all heads that read the keys, so that blocks of threads that work at the
 * same keys' head at the same time read the same rows.
 *
 *   one head, full      from `start` on to the last, then from the first to the one before `start`: blocks add to different tiles of dQ
 *   several, causal     from the last down to the diagonal: as many blocks as possible are at the same tile
 *   else                from the first on
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
    int tile, h;  /* of the item's tiles of a head, of its heads */
    int at;       /* the number of the tile, of all heads */
    int diagonal; /* row i of the tile sees key t of the item if t + diagonal <= i */

    DEVICE void begin(const mha_backward_sm90_params &p, uint32_t item)
    {
        left = word_at(item + offsetof(Item, tiles)) * p.call.group;
        tile = word_at(item + offsetof(Item, start)), h = 0;
        at = word_at(item + offsetof(Item, head)) * p.call.group * p.row_tiles +
             word_at(item + offsetof(Item, first_tile)) + tile;
        diagonal = word_at(item + offsetof(Item, diagonal)) - tile * Layout::ROWS;
    }

    DEVICE void move(int tiles) { tile += tiles, at += tiles, diagonal -= tiles * Layout::ROWS; }

    /* Goes to the next one; false: there is none. */
    DEVICE bool step(const mha_backward_sm90_params &p, uint32_t item)
    {
        if (!--left) return false;
        if (++h < p.call.group) {
            at += p.row_tiles;
            return true;
        }
        h = 0, at -= (p.call.group - 1) * p.row_tiles;
        move(p.goes_down ? -1 : 1);
        const int tiles = word_at(item + offsetof(Item, tiles));
        if (tile == tiles) move(-tiles);
        return true;
    }
};
