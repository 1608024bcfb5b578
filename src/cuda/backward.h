/* SPDX-License-Identifier: MIT
 *
 * Declarations that the hosts of the dense MHA gradient kernels share.
 */
#ifndef FMLA_CUDA_BACKWARD_H
#define FMLA_CUDA_BACKWARD_H

#include "cuda.h"
#include "kernels.h"

/* An implementation of the gradients on a GPU. */
struct cuda_gradients {
    struct kernel_driver driver;
    /* Returns NULL if it takes the problem; else says which problems it takes, and sets *argument to the one
     * that differs. */
    const char *(*refuses)(const struct backward_problem *p, const char **argument);
    fmla_status (*launch)(const struct cuda_scope *scope, const struct backward_problem *p);
};
driver_refuses cuda_backward_refuses;
driver_prepare cuda_backward_prepare;
driver_run cuda_backward_run;
#define CUDA_BACKWARD_DRIVER                                                                                 \
    {                                                                                                        \
        .refuses = cuda_backward_refuses, .prepare = cuda_backward_prepare, .run = cuda_backward_run         \
    }

extern const struct cuda_gradients cuda_any_gradients, cuda_sm80_gradients, cuda_sm90_gradients;

/* Returns the kernel parameters of a problem. The kernels leave `dsink_parts` parts of each head's gradient of the
 * sink, if it is wanted, at `of_dsink`. */
struct mha_backward_params cuda_backward_params(const struct backward_problem *p, void *of_dsink,
                                                int64_t dsink_parts);

/* Adds the parts, if they are wanted; after the kernels that leave them. */
fmla_status cuda_backward_add_dsinks(const struct cuda_scope *scope, const struct backward_problem *p,
                                     struct mha_backward_params *params);

#endif
