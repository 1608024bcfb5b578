/* SPDX-License-Identifier: MIT
 *
 * Hopper's gradients of dense MHA, the host's part: which problems it takes, how it cuts them, and what TMA loads.
 */
#ifndef FMLA_CUDA_SM90_MHA_BACKWARD_CHOICE_H
#define FMLA_CUDA_SM90_MHA_BACKWARD_CHOICE_H

#include "../../backward_tiles.h"
#include "../../tensor_map.h"

/* NULL if it takes the problem; else what it takes, and which argument differs. */
const char *sm90_mha_backward_refuses(const struct backward_problem *p, const char **argument);

struct backward_tiles sm90_mha_backward_tiles(const struct backward_problem *p);

/* Boxes of the rows of a tile, or of a block of keys, and all d columns of a head, in lines of `columns`. */
struct tensor_view sm90_mha_backward_view(const struct backward_problem *p, const struct token_view *view,
                                          bool of_keys, int64_t d, int32_t columns);

#endif
