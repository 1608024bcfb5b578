/* SPDX-License-Identifier: MIT
 *
 * The host planner. One pass over the requests: every partition is filled up to the same payload, and a
 * request that does not fit is cut at a block.
 */
#include "plan.h"

#include <string.h>

int64_t plan_row_tiles(int64_t s_q, int64_t h_q, int64_t h_kv)
{
    return h_kv * ((s_q * (h_q / h_kv) + PLAN_ROW_TILE - 1) / PLAN_ROW_TILE);
}

int32_t plan_default_partitions(int64_t workers, int64_t s_q, int64_t h_q, int64_t h_kv)
{
    const int64_t row_tiles = plan_row_tiles(s_q, h_q, h_kv) / h_kv;
    const int64_t partitions = workers / h_kv / row_tiles;
    return (int32_t)(partitions > 1 ? partitions : 1);
}

int32_t plan_even_partitions(int32_t workers, int64_t s_q, int64_t h_q, int64_t h_kv)
{
    int64_t a = workers, b = plan_row_tiles(s_q, h_q, h_kv);
    while (b) { /* the greatest common divisor */
        const int64_t rest = a % b;
        a = b, b = rest;
    }
    return (int32_t)(workers / a);
}

/* Blocks of a request; one without keys still has one, so that some partition writes its (empty) result. */
static int64_t blocks_of(const int32_t *seqlens, int64_t request, int64_t capacity)
{
    const int64_t length = plan_clamp_length(seqlens[request], capacity);
    return length > PLAN_BLOCK ? (length + PLAN_BLOCK - 1) / PLAN_BLOCK : 1;
}

void plan_build(struct plan_header *plan, int64_t batch, int32_t num_partitions, const int32_t *seqlens,
                int64_t capacity)
{
    int64_t total = 0;
    for (int64_t r = 0; r < batch; r++) total += blocks_of(seqlens, r, capacity) + PLAN_OVERHEAD;
    const int64_t payload = (total + num_partitions - 1) / num_partitions + PLAN_OVERHEAD;

    memset(plan, 0, sizeof *plan);
    plan->magic = PLAN_MAGIC;
    plan->num_partitions = num_partitions;
    plan->batch = batch;
    plan->payload = payload;
    struct plan_partition *partitions = plan_partitions(plan);
    int32_t *num_splits = plan_num_splits(plan);
    num_splits[0] = 0;

    int64_t request = 0;     /* the next one to place */
    int64_t done = 0;        /* its blocks that earlier partitions took */
    int32_t split = 0;       /* its splits that earlier partitions took */
    int64_t last_blocks = 0; /* of the last request placed whole */
    for (int32_t p = 0; p < num_partitions; p++) {
        struct plan_partition row = {(int32_t)request, 0, (int32_t)done, 0, split, 0, 0, 0};
        const int32_t first_split = split;
        int64_t room = payload;
        int cut = 0;
        while (request < batch && !cut) {
            const int64_t blocks = blocks_of(seqlens, request, capacity);
            const int64_t left = blocks - done;
            if (room >= left + PLAN_OVERHEAD) {
                room -= left + PLAN_OVERHEAD;
                num_splits[request + 1] = num_splits[request] + split + 1;
                last_blocks = blocks;
                request++, done = 0, split = 0;
            } else if (room > PLAN_OVERHEAD) {
                done += room - PLAN_OVERHEAD, split++;
                cut = 1;
            } else {
                break;
            }
        }
        row.end_request = (int32_t)(cut ? request : request - 1);
        row.end_block = (int32_t)(cut ? done : last_blocks);
        const int idle = row.end_request < row.begin_request;
        const int alone = row.end_request == row.begin_request;
        row.first_is_split = !idle && (first_split > 0 || (alone && cut));
        row.last_is_split = !idle && (cut || (alone && first_split > 0));
        partitions[p] = row;
    }
}
