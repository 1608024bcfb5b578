/* SPDX-License-Identifier: MIT
 *
 * What surrounds a call of dense decode in every subcommand: its workspace, and how much work it is.
 */
#ifndef FLASHMLA_TOOL_CALL_H
#define FLASHMLA_TOOL_CALL_H

#include "flashmla/flashmla.h"

/* Allocates args->workspace as the library asks; free() frees it. The library's status; FMLA_OK with
 * args->workspace NULL if there is no memory for it. */
fmla_status call_workspace(fmla_dense_decode_args *args);

/* Keys of request r, and those that its token j sees; seqlens and block_table must have passed the library's checks. */
int64_t call_length(const fmla_dense_decode_args *args, int64_t r);
int64_t call_visible(const fmla_dense_decode_args *args, int64_t r, int64_t j);

struct call_work {
    int64_t keys; /* of all requests */
    double pairs; /* (row, key that it sees) */
    double flop;  /* two products, each a multiplication and an addition an element */
    double bytes; /* of every key and Q once, and of out */
};

struct call_work call_work(const fmla_dense_decode_args *args);

/* For qsort. */
int call_by_value(const void *left, const void *right);

#endif
