/* SPDX-License-Identifier: MIT
 *
 * What Hopper's dense decode over caches of bytes takes, and how it is told of the queries and the cache. Functions of the problem alone.
 */
#ifndef FMLA_SM90_DENSE_DECODE_FP8_CHOICE_H
#define FMLA_SM90_DENSE_DECODE_FP8_CHOICE_H

#include "../../tensor_map.h"

/* NULL if it takes the problem; else what it takes, and which argument differs. */
const char *sm90_dense_decode_fp8_refuses(const struct attention_problem *problem, const char **argument);

/* Rows of a tile, where parts of requests are not joined by those that made them. */
int32_t sm90_dense_decode_fp8_rows(const struct attention_problem *problem);

/* The same, where they are: tiles of fewer rows read keys more often, and have less to store and to join. */
int32_t sm90_dense_decode_fp8_rows_together(const struct attention_problem *problem, int32_t sms);

/* Codes 0 … 511 of keys, or of queries that are given as codes, `rows` a tile; or the last 64 columns. */
struct tensor_view sm90_dense_decode_fp8_key_view(const struct attention_problem *problem, bool end);
struct tensor_view sm90_dense_decode_fp8_q_view(const struct attention_problem *problem, int32_t rows,
                                                bool end);

/* The four scales of keys of FP8_656. */
struct tensor_view sm90_dense_decode_fp8_scale_view(const struct attention_problem *problem);

#endif
