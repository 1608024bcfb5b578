/* SPDX-License-Identifier: MIT
 *
 * The tasks of a block of threads, one after the other.
 */
#pragma once

#include "../../device/task.cuh"

/* What a block of threads works through: items (a worker and a tile of rows) in turn, and an item's pieces. */
struct Turn {
    int64_t item;
    PieceList list;
    int next; /* of the list */
};

/* By one thread: the next task, with tiles of `rows` rows; false after the last. */
DEVICE bool next_task(const struct dense_decode_params &p, int rows, Turn &turn, Task &task)
{
    const int tiles_of_head = (p.rows + rows - 1) / rows, tiles = p.h_kv * tiles_of_head;
    const int64_t workers = p.split.partitions ? p.split.num_partitions : (int64_t)p.b * p.split.chunk_lanes;
    while (turn.next > turn.list.last) {
        turn.item += gridDim.x;
        if (turn.item >= workers * tiles) return false;
        turn.list = piece_list(p, (unsigned)(turn.item / tiles));
        turn.next = turn.list.first;
    }
    const int tile = (int)(turn.item % tiles);
    int length;
    const Piece piece = list_piece(p, turn.list, turn.next, &length);
    task = task_of(p, piece, length, tile / tiles_of_head, tile % tiles_of_head * rows, rows);
    turn.next += turn.list.step;
    return true;
}
