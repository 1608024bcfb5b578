/* SPDX-License-Identifier: MIT
 *
 * The unit of work of a CTA: a split, for one tile of rows.
 */
#pragma once

#include "divide.cuh"
#include "splits.cuh"

struct Task {
    Split split;
    int length; /* keys of the request */
    int kv_head, first_row;
    int end;     /* of the keys that some row of the tile sees */
    int all_see; /* of the keys that every row sees */
};

/* Returns the first key that row `row` of the tile does not see. */
DEVICE int visible_end(const struct dense_decode_params &p, const Task &task, int row)
{
    if (!p.causal) return task.length;
    /* Padding rows, whose number may pass 2^31, use the last row. */
    const int row_of_head = (int)min((unsigned)(task.first_row + row), (unsigned)p.rows - 1u);
    return min(task.length, task.length - p.s_q + fast_divide(row_of_head, p.group_divisor) + 1);
}

/* Returns the position of row `row` of the key head among the rows of all parts. */
DEVICE int64_t part_row(const struct dense_decode_params &p, const Task &task, int row)
{
    return task.split.part * ((int64_t)p.h_q * p.s_q) + (int64_t)task.kv_head * p.rows + row;
}

/* Returns the task of the split for the tile of `rows` rows that begins at first_row of a key head. */
DEVICE Task task_of(const struct dense_decode_params &p, const Split &split, int length, int kv_head,
                    int first_row, int rows)
{
    Task task;
    task.split = split, task.length = length;
    task.kv_head = kv_head, task.first_row = first_row;
    const int last_row = min(rows, p.rows - first_row) - 1;
    task.end = min(split.end, visible_end(p, task, last_row));
    task.all_see = min(task.end, visible_end(p, task, 0));
    return task;
}
