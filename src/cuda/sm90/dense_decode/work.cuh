/* SPDX-License-Identifier: MIT
 *
 * The work of a block of threads, as every role finds it by itself: its tile of rows, and its way through the pieces. Hopper's dense
 * decodes over caches of 16 bits and of bytes share it.
 */
#pragma once

#include "../../device/divide.cuh"
#include "../../device/task.cuh"

/* What a block of threads has where each has one piece (one_piece.cuh). */
struct OnePiece {
    int request, part, parts, begin, end, length;
    int64_t slot; /* of the request's first part */
};

/* Every role goes through the same list by itself. The plan is read by plain loads from addresses that all threads share:
 * ptxas then knows the bounds of the loops to be uniform, and keeps the descriptors of wgmma in uniform registers. */
struct Work {
    Task task;
    int blocks;

    DEVICE Work(const struct dense_decode_sm90_params &p, const PieceList &list, int i, int kv_head,
                int first_row, int rows)
    {
        int length;
        const Piece piece = list_piece(p.call, list, i, &length);
        task = task_of(p.call, piece, length, kv_head, first_row, rows);
        blocks = (int)((unsigned)(piece.end - piece.begin + (int)PLAN_BLOCK - 1) / PLAN_BLOCK);
    }

    DEVICE Work(const struct dense_decode_sm90_params &p, const OnePiece &one, int kv_head, int first_row,
                int rows)
    {
        Piece piece = {};
        piece.request = one.request, piece.begin = one.begin, piece.end = one.end;
        piece.slot = one.slot + one.part;
        task = task_of(p.call, piece, one.length, kv_head, first_row, rows);
        blocks = (int)((unsigned)(piece.end - piece.begin + (int)PLAN_BLOCK - 1) / PLAN_BLOCK);
    }
};

/* The worker and the tile of rows of this block of threads. */
struct Place {
    int worker, kv_head, tile;

    DEVICE explicit Place(const struct dense_decode_sm90_params &p)
    {
        const int block = fresh_block();
        worker = fast_divide(block, p.tiles_divisor);
        const int within = block - worker * p.call.h_kv * p.tiles_of_head;
        kv_head = fast_divide(within, p.tiles_of_head_divisor), tile = within - kv_head * p.tiles_of_head;
    }
};
