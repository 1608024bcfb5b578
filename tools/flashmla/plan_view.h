/* SPDX-License-Identifier: MIT
 *
 * A split plan and its lengths; the table, the JSON and the picture are printed from it.
 */
#ifndef FLASHMLA_TOOL_PLAN_VIEW_H
#define FLASHMLA_TOOL_PLAN_VIEW_H

#include "reason.h"

#include "flashmla/flashmla.h"

enum { BLOCK_KEYS = 64, REQUEST_OVERHEAD = 5 }; /* docs/semantics.md, "The split plan" */
#define PLAN_EMPTY "The batch has no request: every partition is idle."

struct plan_row {
    int64_t begin_request, end_request; /* inclusive */
    int64_t begin_key, end_key;         /* 64 · blocks where a request is split, its length at its end */
    int64_t split;                      /* index of the first request's split */
    int64_t load;                       /* blocks and overheads */
};

struct plan_picture {
    fmla_plan_view view;
    const int32_t *lengths; /* [view.batch], clamped as in the plan */
    int64_t max_load;
    double mean_load;
};

struct plan_row plan_row_of(const struct plan_picture *picture, int64_t partition);

/* Returns the blocks of a request; a request without keys has one. */
static inline int64_t plan_blocks(int64_t length)
{
    return length > BLOCK_KEYS ? (length + BLOCK_KEYS - 1) / BLOCK_KEYS : 1;
}

/* Draws the plan: a bar per request, proportional to its keys and coloured by partition; below, the load
 * of each partition. The file is complete or absent. */
bool plan_svg_write(const char *path, const struct plan_picture *picture, struct reason *reason);

#endif
