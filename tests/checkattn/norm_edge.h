/* SPDX-License-Identifier: MIT
 *
 * Values for which the order of the norm's sum of squares changes the bytes in a cache. With random values
 * orders differ in the last bits of the double sum, and the factor rounded to fp32 hides them.
 */
#ifndef CHECKATTN_NORM_EDGE_H
#define CHECKATTN_NORM_EDGE_H

#include "flashmla/flashmla.h"
#include "random.h"

enum { NORM_EDGE_WIDTH = 512 };

/* Makes values and weights of a type, and norm_eps, so that any other double sum on one side of the defined
 * one (below or above it, as drawn) gives another fp32 factor, and another value in a cache of bf16 or fp16.
 * Sums in the order of memory, by strided lanes, and by neighbours are among these. */
void norm_edge_make(struct random_state *random, fmla_dtype vectors, fmla_dtype cache,
                    float values[NORM_EDGE_WIDTH], float weights[NORM_EDGE_WIDTH], float *eps);

#endif
