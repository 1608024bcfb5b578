/* SPDX-License-Identifier: MIT
 *
 * Dense MHA forward on Hopper, host side: which problems the kernel takes, how rows form tiles, and the TMA
 * views of the tensors.
 */
#ifndef FMLA_CUDA_SM90_MHA_FORWARD_CHOICE_H
#define FMLA_CUDA_SM90_MHA_FORWARD_CHOICE_H

#include "../../mha_tiles.h"
#include "../../tensor_map.h"

/* Returns NULL if the kernel takes the problem; else states its condition and sets `argument` to the argument
 * that violates it. */
const char *sm90_mha_forward_refuses(const struct attention_problem *problem, const char **argument);

/* Returns tiles and blocks of the kernel that the call takes: by the batch, where no request has more than
 * MHA_SM90_FEW_ROWS rows of a key head and splitting keys pays, those of few rows. `sms`: of the device. */
struct mha_tiling sm90_mha_forward_tiling(const struct attention_problem *problem, int32_t sms);

/* Returns whether a call that is not split takes the kernel with splits nevertheless: with lengths in use of tokens,
 * whose padding it clears; at 128/128 with a sink, or for its order of products, which is faster with a mask, or where most
 * SMs have one tile of not too many key blocks. */
bool sm90_mha_forward_takes_splits_kernel(const struct attention_problem *problem, int32_t sms);

/* Returns the TMA view of q: a box is the rows of a tile by 64 columns. */
struct tensor_view sm90_mha_forward_q_view(const struct attention_problem *problem,
                                           const struct mha_tiling *tiling);

/* Returns the TMA view of K or V: a box is a block of keys of one head and all `d` columns. */
struct tensor_view sm90_mha_forward_key_view(const struct attention_problem *problem,
                                             const struct mha_tiling *tiling, const struct key_view *view,
                                             int64_t d);

#endif
