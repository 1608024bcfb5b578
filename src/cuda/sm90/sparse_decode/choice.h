/* SPDX-License-Identifier: MIT
 *
 * What Hopper's sparse decode takes. A function of the problem alone.
 */
#ifndef FMLA_SM90_SPARSE_DECODE_CHOICE_H
#define FMLA_SM90_SPARSE_DECODE_CHOICE_H

#include "../../../problem.h"

enum {
    SM90_SPARSE_DECODE_HEADS = 64, /* of a tile */
    SM90_SPARSE_DECODE_THREADS = 384,
    SM90_SPARSE_DECODE_SHARED_BYTES = 227 * 1024
};

/* NULL if it takes the problem; else what it takes, and which argument differs. */
const char *sm90_sparse_decode_refuses(const struct sparse_decode_problem *problem, const char **argument);

#endif
