/* SPDX-License-Identifier: MIT
 *
 * The shapes of a benchmark: named grids of an operation, each one or more products of lists.
 */
#ifndef FLASHMLA_TOOL_BENCH_GRID_H
#define FLASHMLA_TOOL_BENCH_GRID_H

#include "make.h"
#include "options.h"

/* In the order of rows, the last one the fastest. */
enum bench_axis {
    AXIS_TOKENS,
    AXIS_HEADS,
    AXIS_KV_HEADS,
    AXIS_D_QK,
    AXIS_D_V,
    AXIS_PAGE_SIZE,
    AXIS_DTYPE,        /* enum element */
    AXIS_FORMAT,       /* FMLA_KV_…; 0: of the type that the row has */
    AXIS_EXTRA_FORMAT, /* FMLA_KV_… of a second cache, where the row has one; 0: format */
    AXIS_PRODUCTS,     /* MADE_… */
    AXIS_NORM,
    AXIS_TURNS, /* FMLA_ROPE_… */
    AXIS_CAUSAL,
    AXIS_VARLEN,
    AXIS_TOPK,
    AXIS_QUERY_TOKENS,
    AXIS_BATCH,
    AXIS_SEQ_LEN,
    AXIS_PARTS,
    BENCH_AXES
};

/* Values of an axis; count 0 = as the grid says. */
struct bench_axes {
    struct option_counts axis[BENCH_AXES];
};

/* "cpu, h20, latency, peers, varlen, quick": those of an operation. */
void bench_grid_names(enum operation op, char *names, size_t room);

/* The rows of grid `name`, allocated, with the lists in `chosen` instead of its own; where products differ in a list
 * that was chosen, only the first one is left then. A row whose products do not fit its cache is left out. Where formats of an
 * extra cache were chosen, so is a row without one, or whose two caches have keys of different sizes. NULL with *count = -1 if
 * the operation has no such grid, NULL with *count = 0 if there is no memory. */
struct shape *bench_grid(enum operation op, const char *name, const struct bench_axes *chosen,
                         int64_t *count);

#endif
