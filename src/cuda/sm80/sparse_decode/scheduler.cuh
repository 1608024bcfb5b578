/* SPDX-License-Identifier: MIT
 *
 * Scheduler: the tasks of a CTA, which are the splits of a worker for one tile of heads of a token.
 */
#pragma once

#include "../../device/divide.cuh"
#include "../../device/gather.cuh"
#include "../../device/kernel.cuh"
#include "../../device/splits.cuh"

namespace sparse_decode {

/* A task of a CTA: a split of a token's lists, for one tile of heads. */
struct ListTask {
    Split split;
    int token, first_head;
    ListEnds ends;
    const int32_t *entries[2]; /* of the cache; of the extra cache */
};

DEVICE int worker_of_block(const struct sparse_decode_params &p)
{
    return fast_divide((int)blockIdx.x, p.tiles_divisor);
}

/* A CTA's progress through its tasks. */
struct TaskCursor {
    SplitList list;
    int next; /* index in the list */

    DEVICE void begin(const struct sparse_sm80_params &params)
    {
        list = split_list(params.call, (unsigned)worker_of_block(params.call));
        next = list.first;
    }

    /* Returns the next task in `task`, with tiles of `rows` heads; false after the last. Called by one
     * thread. */
    DEVICE bool advance(const struct sparse_sm80_params &params, int rows, ListTask &task)
    {
        const struct sparse_decode_params &p = params.call;
        if (next > list.last) return false;
        const int tile = (int)blockIdx.x - worker_of_block(p) * p.tiles;
        int length;
        task.split = list_split(p, list, next, &length);
        task.token = fast_divide(tile, p.token_divisor);
        task.first_head = (tile - task.token * p.tiles_of_token) * rows;
        task.ends = list_ends(p, task.split.request);
#pragma unroll
        for (int i = 0; i < 2; i++)
            task.entries[i] = p.cache[i].indices + task.split.request * p.cache[i].indices_stride[0] +
                              task.token * p.cache[i].indices_stride[1];
        next += list.step;
        return true;
    }
};

} // namespace sparse_decode
