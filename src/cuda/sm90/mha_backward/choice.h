/* SPDX-License-Identifier: MIT
 *
 * Hopper's gradients of dense MHA, the host's part: which problems it takes, how many tiles there may be, and where its workspace has
 * what.
 *
 * Workspace:  numbers of rows | sums of dQ | a counter | deterministic: counters of tiles
 */
#ifndef FMLA_CUDA_SM90_MHA_BACKWARD_CHOICE_H
#define FMLA_CUDA_SM90_MHA_BACKWARD_CHOICE_H

#include "../../params.h"
#include "../../tensor_map.h"

/* NULL if it takes the problem; else what it takes, and which argument differs. */
const char *sm90_mha_backward_refuses(const struct backward_problem *p, const char **argument);

/* Numbers of tiles of rows, and of blocks of keys, of all requests: the most that they may use, whatever their lengths
 * (device/backward_requests.cuh). */
int64_t sm90_mha_backward_row_tiles(const struct backward_problem *p);
int64_t sm90_mha_backward_key_blocks(const struct backward_problem *p);

/* Key heads whose items are taken together: as many as keep blocks of threads busy to the end, and as L2 holds. */
int32_t sm90_mha_backward_heads(const struct backward_problem *p, int32_t sms);

struct sm90_mha_backward_layout {
    size_t rows, dq_sums, taken, added; /* where they begin */
    size_t bytes;
};
struct sm90_mha_backward_layout sm90_mha_backward_layout(const struct backward_problem *p);

/* Boxes of the rows of a tile, or of a block of keys, and all d columns of a head, in lines of `columns`. */
struct tensor_view sm90_mha_backward_view(const struct backward_problem *p, const struct token_view *view,
                                          bool of_keys, int64_t d, int32_t columns);

#endif
