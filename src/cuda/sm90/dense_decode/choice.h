/* SPDX-License-Identifier: MIT
 *
 * Which problems Hopper's dense decode takes, and the TMA views of their queries and cache. All functions
 * depend on the problem alone.
 */
#ifndef FMLA_SM90_DENSE_DECODE_CHOICE_H
#define FMLA_SM90_DENSE_DECODE_CHOICE_H

#include "../../tensor_map.h"

enum { SM90_DENSE_DECODE_ROWS = 64 /* of a tile */ };

/* Returns NULL if the kernel takes the problem; else states its condition and sets `argument` to the argument
 * that violates it. */
const char *sm90_dense_decode_refuses(const struct attention_problem *problem, const char **argument);

/* Returns how many rows of a key head the queries' view counts as heads of one token, or 0 if no such view
 * exists. A tile of 64 rows must be one TMA box: either heads of one token (tokens follow each other as
 * heads do, or there is one token, or 64 divides the heads of a key head), or whole tokens (the heads of a
 * key head divide 64). */
int64_t sm90_dense_decode_q_heads(const struct attention_problem *problem);

struct tensor_view sm90_dense_decode_q_view(const struct attention_problem *problem);

/* `groups`: number of 64-column groups that one box loads. */
struct tensor_view sm90_dense_decode_key_view(const struct attention_problem *problem, int32_t groups);

#endif
