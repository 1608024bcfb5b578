/* SPDX-License-Identifier: MIT
 *
 * The gradients of dense MHA on a GPU, as the hosts of their kernels share it.
 */
#ifndef FMLA_CUDA_BACKWARD_H
#define FMLA_CUDA_BACKWARD_H

#include "cuda.h"
#include "kernels.h"

/* A way of a GPU to compute them: what a row of the table has as `inner`. */
struct cuda_gradients {
    /* NULL if it takes the problem; else what it takes, and which argument differs. */
    const char *(*refuses)(const struct backward_problem *p, const char **argument);
    fmla_status (*launch)(const struct cuda_scope *scope, const struct backward_problem *p);
};
extern const struct cuda_gradients cuda_any_gradients, cuda_sm80_gradients, cuda_sm90_gradients;

/* What kernels are given of a problem. */
struct mha_backward_params cuda_backward_params(const struct backward_problem *p);

#endif
