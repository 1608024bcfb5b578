/* SPDX-License-Identifier: MIT
 *
 * The work of a CTA: its tile of rows and its list of splits. Every role computes it for itself. Shared by
 * Hopper's dense decodes over 16-bit and FP8 caches.
 */
#pragma once

#include "../../device/divide.cuh"
#include "../../device/task.cuh"

/* The split of a CTA in kernels where each CTA has one split (one_split.cuh). */
struct OneSplit {
    int request, part, parts, begin, end, length;
    int64_t slot; /* slot of the request's first part */
};

/* Every role iterates over the same list by itself. The plan is read by plain loads from addresses that
 * all threads share: ptxas then knows that the loop bounds are uniform, and keeps the wgmma descriptors in
 * uniform registers. */
struct Work {
    Task task;
    int blocks;

    DEVICE Work(const struct dense_decode_sm90_params &p, const SplitList &list, int i, int kv_head,
                int first_row, int rows)
    {
        int length;
        const Split split = list_split(p.call, list, i, &length);
        task = task_of(p.call, split, length, kv_head, first_row, rows);
        blocks = (int)((unsigned)(split.end - split.begin + (int)PLAN_BLOCK - 1) / PLAN_BLOCK);
    }

    DEVICE Work(const struct dense_decode_sm90_params &p, const OneSplit &one, int kv_head, int first_row,
                int rows)
    {
        Split split = {};
        split.request = one.request, split.begin = one.begin, split.end = one.end;
        split.slot = one.slot + one.part;
        task = task_of(p.call, split, one.length, kv_head, first_row, rows);
        blocks = (int)((unsigned)(split.end - split.begin + (int)PLAN_BLOCK - 1) / PLAN_BLOCK);
    }
};

/* The worker and the tile of rows of this CTA. */
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
