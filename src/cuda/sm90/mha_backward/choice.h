/* SPDX-License-Identifier: MIT
 *
 * Dense MHA backward on Hopper, host side: which problems the kernel takes, its tile sizes, and the TMA views
 * of the tensors.
 */
#ifndef FMLA_CUDA_SM90_MHA_BACKWARD_CHOICE_H
#define FMLA_CUDA_SM90_MHA_BACKWARD_CHOICE_H

#include "../../backward_tiles.h"
#include "../../tensor_map.h"

/* Returns NULL if the kernel takes the problem; else states its condition and sets `argument` to the argument
 * that violates it. */
const char *sm90_mha_backward_refuses(const struct backward_problem *p, const char **argument);

struct backward_tiles sm90_mha_backward_tiles(const struct backward_problem *p);

/* Returns how many key blocks of a head begin at different tiles of rows, and are therefore processed at the same time,
 * if the gradients are deterministic; 1 if none may wait for those behind it. On GPUs of at least 64 SMs it depends on
 * the sizes alone, of ragged requests on max_s_q. */
int32_t sm90_mha_backward_group(const struct backward_problem *p, int32_t sms);

/* Returns the number of key heads whose key blocks are taken together. */
int32_t sm90_mha_backward_heads(const struct backward_problem *p, int32_t sms);

/* Returns the TMA view of a tensor: a box is a tile of rows, or a CTA's keys if `of_keys`, by box_columns of the d
 * columns of a head, in lines of `columns`. */
struct tensor_view sm90_mha_backward_view(const struct backward_problem *p, const struct token_view *view,
                                          bool of_keys, int64_t d, int32_t columns, int32_t box_columns);

#endif
