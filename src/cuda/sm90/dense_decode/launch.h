/* SPDX-License-Identifier: MIT
 *
 * Host functions shared by Hopper's dense decodes over 16-bit and FP8 caches.
 */
#ifndef FMLA_SM90_DENSE_DECODE_LAUNCH_H
#define FMLA_SM90_DENSE_DECODE_LAUNCH_H

#include "../../attention.h"

/* Decides whether a call has few enough requests to run without a plan: its CTAs then share the requests
 * out among themselves and join their results. The words of their group barriers take the place of the ready
 * flags in the workspace. */
void sm90_dense_decode_join_in_kernel(const struct attention_problem *p, struct cuda_work *w);

/* Returns the kernel's parameters without the tensor maps. */
struct dense_decode_sm90_params sm90_dense_decode_params(const struct attention_problem *p,
                                                         const struct cuda_work *w);

#endif
