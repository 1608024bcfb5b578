/* SPDX-License-Identifier: MIT
 *
 * Gradients of dense MHA on tensor cores, the part of the host that Hopper's kernels and the portable ones share: tiles of rows, blocks of
 * keys, and where the workspace has what.
 *
 * Workspace:  numbers of rows | sums of dQ | a counter | counters of tiles
 */
#ifndef FMLA_CUDA_BACKWARD_TILES_H
#define FMLA_CUDA_BACKWARD_TILES_H

#include "params.h"

#include "../problem.h"

/* How a kernel cuts a problem. */
struct backward_tiles {
    int32_t rows;     /* of a tile */
    int32_t keys;     /* of a block */
    int32_t counters; /* of a tile */
};

/* Numbers of tiles of rows, and of blocks of keys, of all requests: the most that they may use, whatever their lengths
 * (device/backward_requests.cuh). */
int64_t backward_row_tiles(const struct backward_problem *p, struct backward_tiles tiles);
int64_t backward_key_blocks(const struct backward_problem *p, struct backward_tiles tiles);

/* Key heads whose blocks of keys are taken together: as many as keep all SMs busy to the end, and as L2 holds. */
int32_t backward_heads(const struct backward_problem *p, struct backward_tiles tiles, int32_t sms);

struct backward_layout {
    size_t rows, dq_sums, taken, added; /* where they begin */
    size_t bytes;
};
struct backward_layout backward_layout(const struct backward_problem *p, struct backward_tiles tiles);

/* Are the base and the strides of a tensor multiples of 16 bytes? */
bool backward_rows_aligned(const struct backward_problem *p, const struct token_view *view, bool of_keys);

/* NULL if there are kernels of the problem's head sizes; else which. */
const char *backward_refuses_sizes(const struct backward_problem *p);

#endif
