/* SPDX-License-Identifier: MIT
 *
 * The gradients of dense MHA on a GPU, as the hosts of their kernels share it.
 */
#ifndef FMLA_CUDA_BACKWARD_H
#define FMLA_CUDA_BACKWARD_H

#include "cuda.h"
#include "kernels.h"

/* A way of a GPU to compute them: what a row of the table has as `inner`. All kernels of a device that may take a call answer the same
 * size of workspace, the most that one of them needs: a size query has no addresses, by which kernels refuse. */
struct cuda_backward {
    /* NULL if it takes the problem; else what it takes, and which argument differs. */
    const char *(*refuses)(const struct backward_problem *p, const char **argument);
    fmla_status (*launch)(const struct cuda_scope *scope, const struct backward_problem *p);
};

/* What kernels are given of a problem. */
struct mha_backward_params cuda_backward_params(const struct backward_problem *p);

#endif
