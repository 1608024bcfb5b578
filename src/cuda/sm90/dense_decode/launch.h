/* SPDX-License-Identifier: MIT
 *
 * What the hosts of Hopper's dense decodes share, over caches of 16 bits and of bytes.
 */
#ifndef FMLA_SM90_DENSE_DECODE_LAUNCH_H
#define FMLA_SM90_DENSE_DECODE_LAUNCH_H

#include "../../attention.h"

/* Few requests: no plan is made or read; the blocks of threads share the requests out, and join what they made. The words by which they
 * meet have the place of the marks. Decides whether the call is one of those. */
void sm90_dense_decode_meet(const struct attention_problem *p, struct cuda_work *w);

/* All but the tensors as TMA is told of them. */
struct dense_decode_sm90_params sm90_dense_decode_params(const struct attention_problem *p,
                                                         const struct cuda_work *w);

#endif
