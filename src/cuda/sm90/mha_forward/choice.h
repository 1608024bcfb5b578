/* SPDX-License-Identifier: MIT
 *
 * Hopper's dense MHA, the host's part: which problems it takes, how tiles are made of rows, and how TMA sees the tensors.
 */
#ifndef FMLA_CUDA_SM90_MHA_FORWARD_CHOICE_H
#define FMLA_CUDA_SM90_MHA_FORWARD_CHOICE_H

#include "../../tensor_map.h"

/* NULL if it takes the problem; else what it takes, and which argument differs. */
const char *sm90_mha_forward_refuses(const struct attention_problem *problem, const char **argument);

/* Query heads that share a tile: those of a key head, where tiles of one head's rows would be more; else 1. */
int32_t sm90_mha_forward_heads(const struct attention_problem *problem);

/* Tokens of a tile. */
int32_t sm90_mha_forward_tokens(const struct attention_problem *problem);

/* The most tiles that there can be, of ragged requests of any lengths. */
int64_t sm90_mha_forward_tiles(const struct attention_problem *problem);

/* Is the portable kernel faster, on a GPU of so many SMs? It begins sooner, which counts where a tile has few keys and no SM has more
 * than two tiles (docs/kernels/mha.md has the measured crossover). */
bool sm90_mha_forward_leaves(const struct attention_problem *problem, int32_t sms);

/* Boxes of the rows of a tile and 64 columns. */
struct tensor_view sm90_mha_forward_q_view(const struct attention_problem *problem);

/* Boxes of a block of keys of a head, of all columns: of keys, or of values, which have d of them. */
struct tensor_view sm90_mha_forward_key_view(const struct attention_problem *problem,
                                             const struct key_view *view, int64_t d);

#endif
