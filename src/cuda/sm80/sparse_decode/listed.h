/* SPDX-License-Identifier: MIT
 *
 * The kernels over lists, shared by the launches of sparse decode and sparse prefill.
 */
#ifndef FMLA_SM80_SPARSE_DECODE_LISTED_H
#define FMLA_SM80_SPARSE_DECODE_LISTED_H

#include "../../attention.h"
#include "../latent/shape.h"

/* Returns NULL if the kernels take the problem; else states their condition and sets `argument` to the
 * argument that violates it. */
const char *sm80_listed_refuses(const struct attention_problem *p, const char **argument);

/* Returns the tile shape for `heads` heads that share a token's list, if a CTA may have `shared_bytes`. */
struct latent_choice sm80_listed_choose(const struct attention_problem *p, int64_t heads,
                                        int32_t shared_bytes);

struct cuda_kernel *sm80_listed_kernel(const struct attention_problem *p, const struct latent_choice *choice);

/* Returns the parameters, except those of the call and max_logits. */
struct sparse_sm80_params sm80_listed_params(const struct attention_problem *p, int32_t stages);

#endif
