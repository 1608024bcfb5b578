/* SPDX-License-Identifier: MIT
 *
 * The host part that Hopper's and the portable tensor-core gradient kernels of dense MHA share: row tiles,
 * key blocks, and the layout of the workspace.
 *
 * Workspace:  lse and delta of rows | sums of dQ | a counter | counters of tiles | sums of dK and dV | their counters |
 *             parts of the sinks' gradients
 */
#ifndef FMLA_CUDA_BACKWARD_TILES_H
#define FMLA_CUDA_BACKWARD_TILES_H

#include "params.h"

#include "../problem.h"

/* The tile sizes of a kernel. */
struct backward_tiles {
    int32_t rows;     /* of a tile */
    int32_t keys;     /* of a key block */
    int32_t counters; /* of a tile */
    int32_t heads;    /* query heads with which a key block is processed: all of its key head, or 1 */
    int32_t
        warps; /* that count the query heads added to a key block, if it is processed for each of them; else 0 */
};

/* Return the numbers of row tiles and of key blocks of all requests: upper bounds for requests of any lengths
 * (device/backward_requests.cuh). */
int64_t backward_row_tiles(const struct backward_problem *p, struct backward_tiles tiles);
int64_t backward_key_blocks(const struct backward_problem *p, struct backward_tiles tiles);

/* Returns the number of key heads whose key blocks are taken together: as many as keep all SMs busy to the
 * end and fit in L2. */
int32_t backward_heads(const struct backward_problem *p, struct backward_tiles tiles, int32_t sms);

struct backward_layout {
    size_t rows, dq_sums, taken, added, head_sums, heads_added, of_dsink; /* byte offsets */
    int64_t head_counters;
    size_t bytes;
};
struct backward_layout backward_layout(const struct backward_problem *p, struct backward_tiles tiles);

/* Returns whether the base and the strides of a tensor are multiples of 16 bytes. */
bool backward_rows_aligned(const struct backward_problem *p, const struct token_view *view, bool of_keys);

#endif
