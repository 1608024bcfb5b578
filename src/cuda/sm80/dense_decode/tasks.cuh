/* SPDX-License-Identifier: MIT
 *
 * What a block of threads is given to do: pieces, each for one tile of rows of a key head.
 */
#pragma once

#include "../../device/pieces.cuh"

/* What a block of threads has in hand: a piece, for one tile of rows. */
struct Task {
    Piece piece;
    int length; /* keys of the request */
    int kv_head, first_row;
    int end;     /* of the keys that some row of the tile sees */
    int all_see; /* of those that every row sees */
};

/* The first key that row `row` of the tile does not see. */
__device__ __forceinline__ int visible_end(const struct dense_decode_params &p, const Task &task, int row)
{
    /* Unsigned: rows of padding, which nobody stores, may pass 2^31. */
    const unsigned token = (unsigned)(task.first_row + row) / (unsigned)p.group;
    const int end = (int)((unsigned)task.length - (unsigned)p.s_q + token + 1);
    return p.causal ? min(task.length, end) : task.length;
}

/* Where row `row` of the key head lies among the rows of the piece's slot. */
__device__ __forceinline__ int64_t slot_row(const struct dense_decode_params &p, const Task &task, int row)
{
    return task.piece.slot * ((int64_t)p.h_q * p.s_q) + (int64_t)task.kv_head * p.rows + row;
}

/* What a block of threads works through: items (a worker and a tile of rows) in turn, and an item's pieces. */
struct Turn {
    int64_t item;
    PieceList list;
    int next; /* of the list */
};

/* By one thread: the next task, with tiles of `rows` rows; false after the last. */
__device__ __forceinline__ bool next_task(const struct dense_decode_params &p, int rows, Turn &turn,
                                          Task &task)
{
    const int tiles_of_head = (p.rows + rows - 1) / rows, tiles = p.h_kv * tiles_of_head;
    const int64_t workers = p.split.plan ? p.split.num_partitions : (int64_t)p.b * p.split.chunk_lanes;
    while (turn.next > turn.list.last) {
        turn.item += gridDim.x;
        if (turn.item >= workers * tiles) return false;
        turn.list = piece_list(p, turn.item / tiles);
        turn.next = turn.list.first;
    }
    const int tile = (int)(turn.item % tiles);
    task.piece = list_piece(p, turn.list, turn.next, &task.length);
    task.kv_head = tile / tiles_of_head;
    task.first_row = tile % tiles_of_head * rows;
    const int last_row = min(rows, p.rows - task.first_row) - 1;
    task.end = min(task.piece.end, visible_end(p, task, last_row));
    task.all_see = min(task.end, visible_end(p, task, 0));
    turn.next += turn.list.step;
    return true;
}
