/* SPDX-License-Identifier: MIT
 *
 * What Hopper's sparse prefill takes, and how a launch of it is made.
 */
#ifndef FMLA_SM90_SPARSE_PREFILL_CHOICE_H
#define FMLA_SM90_SPARSE_PREFILL_CHOICE_H

#include "../../params.h"
#include "../../tensor_map.h"

enum { SM90_SPARSE_PREFILL_HEADS = 64 /* of a tile */ };

/* NULL if it takes the problem; else what it takes, and which argument differs. */
const char *sm90_sparse_prefill_refuses(const struct attention_problem *problem, const char **argument);

/* `heads` heads of `tokens` tokens of q or out, `columns` wide, from `data` on, in boxes of a tile and 128 columns; strides of
 * token and head. */
struct tensor_view sm90_sparse_prefill_view(const struct attention_problem *problem, const uint16_t *data,
                                            const int64_t stride[2], int64_t tokens, int64_t heads,
                                            int64_t columns);

/* Which of a launch's `tiles` are cut, on a GPU of `sms` SMs, with lists of `topk` entries; places are the caller's to give. */
struct prefill_cut sm90_sparse_prefill_cut(int64_t tiles, int64_t topk, int32_t sms);

/* How many keys a part has where the lists of a call over FP8 pages, of `tiles` tiles, are cut into parts, each of which finds an SM;
 * 0: they are not cut. */
int32_t sm90_sparse_prefill_part_keys(int64_t tiles, int64_t topk, int32_t sms);

/* The most pieces of any launch of at most so many tiles and entries. */
int64_t sm90_sparse_prefill_most_pieces(int64_t tiles, int64_t topk, int32_t sms);

#endif
