/* SPDX-License-Identifier: MIT
 *
 * What Hopper's dense decode takes, and how it is told of the queries and the cache. Functions of the problem alone.
 */
#ifndef FMLA_SM90_DENSE_DECODE_CHOICE_H
#define FMLA_SM90_DENSE_DECODE_CHOICE_H

#include "../../tensor_map.h"

enum { SM90_DENSE_DECODE_ROWS = 64 /* of a tile */ };

/* NULL if it takes the problem; else what it takes, and which argument differs. */
const char *sm90_dense_decode_refuses(const struct attention_problem *problem, const char **argument);

/* Rows of a key head that the queries' view counts as heads of one token; 0 if there is no such view. A tile of 64 rows
 * must be one box: of one token's heads, where tokens follow each other as heads do, or where there is one token, or 64
 * divides the heads of a key head; of whole tokens, where these heads divide 64. */
int64_t sm90_dense_decode_q_heads(const struct attention_problem *problem);

struct tensor_view sm90_dense_decode_q_view(const struct attention_problem *problem);

/* `groups`: of 64 columns, that one box brings. */
struct tensor_view sm90_dense_decode_key_view(const struct attention_problem *problem, int32_t groups);

#endif
