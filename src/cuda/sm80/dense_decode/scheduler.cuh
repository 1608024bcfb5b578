/* SPDX-License-Identifier: MIT
 *
 * Scheduler: the tasks of a CTA, one after the other. A work tile is a tile of rows for a worker, which is a
 * partition of the plan or a lane of the splits. The tasks of a work tile are the splits of its worker.
 */
#pragma once

#include "../../device/kernel.cuh"
#include "../../device/splits.cuh"
#include "../../device/task.cuh"

namespace dense_decode {

/* A CTA's progress through its tasks. */
struct TaskCursor {
    int64_t work_tile;
    SplitList list;
    int next; /* index in the list */

    DEVICE void begin(const struct dense_decode_params &)
    {
        work_tile = (int64_t)blockIdx.x - gridDim.x, next = 0, list.last = -1;
    }

    /* Returns the next task in `task`, with tiles of `rows` rows; false after the last. Called by one
     * thread. */
    DEVICE bool advance(const struct dense_decode_params &p, int rows, Task &task)
    {
        const int tiles_of_head = (p.rows + rows - 1) / rows, tiles = p.h_kv * tiles_of_head;
        const int64_t workers =
            p.split.partitions ? p.split.num_partitions : (int64_t)p.b * p.split.split_lanes;
        while (next > list.last) {
            work_tile += gridDim.x;
            if (work_tile >= workers * tiles) return false;
            list = split_list(p, (unsigned)(work_tile / tiles));
            next = list.first;
        }
        const int tile = (int)(work_tile % tiles);
        int length;
        const Split split = list_split(p, list, next, &length);
        task = task_of(p, split, length, tile / tiles_of_head, tile % tiles_of_head * rows, rows);
        next += list.step;
        return true;
    }
};

} // namespace dense_decode
