/* SPDX-License-Identifier: MIT
 *
 * The shapes of a benchmark: named grids of an operation, each one or more Cartesian products of lists.
 */
#ifndef FLASHMLA_TOOL_BENCH_GRID_H
#define FLASHMLA_TOOL_BENCH_GRID_H

#include "make.h"
#include "options.h"

/* In row order; the last axis varies fastest. */
enum bench_axis {
    AXIS_TOKENS,
    AXIS_HEADS,
    AXIS_KV_HEADS,
    AXIS_D_QK,
    AXIS_D_V,
    AXIS_PAGE_SIZE,
    AXIS_DTYPE,        /* enum element */
    AXIS_FORMAT,       /* FMLA_KV_…; 0: the row's type */
    AXIS_EXTRA_FORMAT, /* FMLA_KV_… of the second cache, if any; 0: format */
    AXIS_PRODUCTS,     /* MADE_… */
    AXIS_NORM,
    AXIS_TURNS, /* FMLA_ROPE_… */
    AXIS_CAUSAL,
    AXIS_VARLEN,
    AXIS_USED,
    AXIS_SINK,
    AXIS_TOPK,
    AXIS_QUERY_TOKENS,
    AXIS_BATCH,
    AXIS_SEQ_LEN,
    AXIS_PARTS,
    AXIS_LAST,
    BENCH_AXES
};

/* Values of an axis; count 0: those of the grid. */
struct bench_axes {
    struct option_counts axis[BENCH_AXES];
};

/* Lists the grids of an operation: "cpu, h20, latency, peers, varlen, quick". */
void bench_grid_names(enum operation op, char *names, size_t room);

/* Returns the rows of grid `name`, allocated. The lists in `chosen` replace the grid's own; if
 * products differ only in a chosen list, the first one remains. Omits rows whose products do not fit their
 * cache and, if formats of an extra cache were chosen, rows without one or whose two caches have keys of
 * different sizes. Returns NULL with *count = -1 if the operation has no such grid, NULL with *count = 0
 * if memory runs out. */
struct shape *bench_grid(enum operation op, const char *name, const struct bench_axes *chosen,
                         int64_t *count);

#endif
