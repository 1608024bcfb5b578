/* SPDX-License-Identifier: MIT */
#ifndef FMLA_CUDA_PLAN_H
#define FMLA_CUDA_PLAN_H

#include "../problem.h"
#include "device.h"

/* Launches the planner in a scope that is open. */
fmla_status cuda_launch_plan(const char *operation, const struct cuda_scope *scope,
                             const struct plan_problem *problem);

#endif
