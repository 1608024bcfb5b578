/* SPDX-License-Identifier: MIT
 *
 * The shapes of a benchmark: named grids, each one or more products of lists.
 */
#ifndef FLASHMLA_TOOL_BENCH_GRID_H
#define FLASHMLA_TOOL_BENCH_GRID_H

#include "batch.h"
#include "options.h"

enum bench_axis {
    AXIS_HEADS,
    AXIS_KV_HEADS,
    AXIS_D_QK,
    AXIS_PAGE_SIZE,
    AXIS_DTYPE, /* 0 = bf16, 1 = fp16 */
    AXIS_CAUSAL,
    AXIS_VARLEN,
    AXIS_QUERY_TOKENS,
    AXIS_BATCH,
    AXIS_SEQ_LEN,
    BENCH_AXES
};

/* Values of an axis; count 0 = as the grid says. */
struct bench_axes {
    struct option_counts axis[BENCH_AXES];
};

/* "cpu, h20, latency, peers, varlen, quick". Static storage. */
const char *bench_grid_names(void);

/* The rows of grid `name`, allocated: with lists in `chosen`, its first product with those instead of its own. NULL
 * with *count = -1 if there is no such grid, NULL with *count = 0 if there is no memory. */
struct batch_shape *bench_grid(const char *name, const struct bench_axes *chosen, int64_t *count);

#endif
