/* SPDX-License-Identifier: MIT
 *
 * The kernels over lists, as sparse decode and sparse prefill launch them.
 */
#ifndef FMLA_SM80_SPARSE_DECODE_LISTED_H
#define FMLA_SM80_SPARSE_DECODE_LISTED_H

#include "../../attention.h"
#include "../latent/shape.h"

/* Says what the kernels take where they refuse the problem; NULL if they take it. */
const char *sm80_listed_refuses(const struct attention_problem *p, const char **argument);

/* The tile for so many heads that share a token's list, where a block of threads may have `shared_bytes`. */
struct latent_choice sm80_listed_choose(const struct attention_problem *p, int64_t heads,
                                        int32_t shared_bytes);

struct cuda_kernel *sm80_listed_kernel(const struct attention_problem *p, const struct latent_choice *choice);

/* The parameters, all but those of the call and max_logits. */
struct sparse_sm80_params sm80_listed_params(const struct attention_problem *p, int32_t stages);

#endif
