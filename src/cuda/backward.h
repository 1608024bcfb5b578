/* SPDX-License-Identifier: MIT
 *
 * Declarations that the hosts of the dense MHA gradient kernels share.
 */
#ifndef FMLA_CUDA_BACKWARD_H
#define FMLA_CUDA_BACKWARD_H

#include "cuda.h"
#include "kernels.h"

/* An implementation of the gradients on a GPU; the `inner` of a row of the kernel table. */
struct cuda_gradients {
    /* Returns NULL if it takes the problem; else says which problems it takes, and sets *argument to the one
     * that differs. */
    const char *(*refuses)(const struct backward_problem *p, const char **argument);
    fmla_status (*launch)(const struct cuda_scope *scope, const struct backward_problem *p);
};
extern const struct cuda_gradients cuda_any_gradients, cuda_sm80_gradients, cuda_sm90_gradients;

/* Returns the kernel parameters of a problem. */
struct mha_backward_params cuda_backward_params(const struct backward_problem *p);

#endif
