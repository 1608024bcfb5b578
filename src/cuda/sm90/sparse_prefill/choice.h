/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill on Hopper, host side: which problems the kernel takes, and how a launch is divided.
 */
#ifndef FMLA_SM90_SPARSE_PREFILL_CHOICE_H
#define FMLA_SM90_SPARSE_PREFILL_CHOICE_H

#include "../../params.h"
#include "../../tensor_map.h"

enum { SM90_SPARSE_PREFILL_HEADS = 64 /* heads per tile */ };

/* Returns NULL if the kernel takes the problem; else states its condition and sets `argument` to the argument
 * that violates it. */
const char *sm90_sparse_prefill_refuses(const struct attention_problem *problem, const char **argument);

/* Returns the TMA view of `heads` heads of `tokens` tokens of q or out, `columns` wide, from `data` on: a box
 * is a tile by 128 columns. `stride`: token, head. */
struct tensor_view sm90_sparse_prefill_view(const struct attention_problem *problem, const uint16_t *data,
                                            const int64_t stride[2], int64_t tokens, int64_t heads,
                                            int64_t columns);

/* Returns which of a launch's `tiles` are split on a GPU of `sms` SMs, with lists of `topk`
 * entries. The caller sets the address of the parts. */
struct prefill_splits sm90_sparse_prefill_splits(int64_t tiles, int64_t topk, int32_t sms);

/* Returns the keys per split if the lists of a call over FP8 pages are split, one split per SM at
 * most; 0: not split. */
int32_t sm90_sparse_prefill_split_keys(int64_t tiles, int64_t topk, int32_t sms);

/* Returns the most splits of any launch of at most `tiles` tiles and `topk` entries. */
int64_t sm90_sparse_prefill_most_splits(int64_t tiles, int64_t topk, int32_t sms);

#endif
