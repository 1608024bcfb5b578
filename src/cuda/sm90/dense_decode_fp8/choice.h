/* SPDX-License-Identifier: MIT
 *
 * Which problems Hopper's dense decode over FP8 caches takes, and the TMA views of their queries and cache.
 * All functions depend on the problem alone.
 */
#ifndef FMLA_SM90_DENSE_DECODE_FP8_CHOICE_H
#define FMLA_SM90_DENSE_DECODE_FP8_CHOICE_H

#include "../../tensor_map.h"

/* Returns NULL if the kernel takes the problem; else states its condition and sets `argument` to the argument
 * that violates it. */
const char *sm90_dense_decode_fp8_refuses(const struct attention_problem *problem, const char **argument);

/* Returns the rows of a tile for calls whose CTAs do not join their own parts. */
int32_t sm90_dense_decode_fp8_rows(const struct attention_problem *problem);

/* Returns the rows of a tile for calls whose CTAs join their own parts. Tiles of fewer rows read the keys
 * more often, and have less to store and to join. */
int32_t sm90_dense_decode_fp8_rows_join_in_kernel(const struct attention_problem *problem, int32_t sms);

/* Return the views of columns 0 … 511, or of the last 64 columns (`end`): of the keys, and of queries that
 * are given as codes, `rows` rows a tile. */
struct tensor_view sm90_dense_decode_fp8_key_view(const struct attention_problem *problem, bool end);
struct tensor_view sm90_dense_decode_fp8_q_view(const struct attention_problem *problem, int32_t rows,
                                                bool end);

/* Returns the view of the four scales of each key of FP8_656. */
struct tensor_view sm90_dense_decode_fp8_scale_view(const struct attention_problem *problem);

#endif
