/* SPDX-License-Identifier: MIT
 *
 * The table of kernels (kernels.def), from which each file of the back end gets its own kernels, and
 * cuda_prepare all of them.
 */
#ifndef FMLA_CUDA_KERNELS_H
#define FMLA_CUDA_KERNELS_H

#include "launch.h"
#include "params.h"
#include "variants.h"

#include "../problem.h"

/* The schedule named after an operation is its portable kernel. */
enum cuda_schedule {
#define OPERATION(op, OP) CUDA_##OP,
#include "../operations.def"
    CUDA_PLAN,
    CUDA_JOIN,
    CUDA_QUANTISE_QUERIES,
    CUDA_MHA_BACKWARD_DSINKS,
    CUDA_MHA_PADDING,
    CUDA_SM80_DENSE_DECODE,
    CUDA_SM80_MHA_FORWARD,
    CUDA_SM80_MHA_FORWARD_SPLITS,
    CUDA_SM80_MHA_FORWARD_JOIN,
    CUDA_SM80_MHA_BACKWARD,
    CUDA_SM80_MHA_BACKWARD_PREPARE,
    CUDA_SM80_MHA_BACKWARD_FINISH,
    CUDA_SM80_SPARSE_DECODE,
    CUDA_SM90_DENSE_DECODE,
    CUDA_SM90_DENSE_DECODE_FP8,
    CUDA_SM90_SPARSE_DECODE,
    CUDA_SM90_SPARSE_DECODE_SMALL,
    CUDA_SM90_SPARSE_PREFILL,
    CUDA_SM90_SPARSE_PREFILL_JOIN,
    CUDA_SM90_MHA_FORWARD,
    CUDA_SM90_MHA_FORWARD_SPLITS,
    CUDA_SM90_MHA_FORWARD_FEW,
    CUDA_SM90_MHA_FORWARD_JOIN,
    CUDA_SM90_MHA_BACKWARD,
    CUDA_SM90_MHA_BACKWARD_PREPARE,
    CUDA_SM90_MHA_BACKWARD_FINISH,
    CUDA_SM90_JOIN_HALF_ROWS,
    CUDA_SCHEDULES
};

/* Stands for all byte formats in the key of a kernel that takes them all; in sparse operations also for two
 * caches of different formats. */
#define CUDA_BYTES KV_FP8_656

/* The key of a kernel; fields that do not distinguish kernels of a schedule are 0. */
struct cuda_key {
    enum cuda_schedule schedule;
    enum element element;
    enum kv_format format;
    int variant; /* see kernels.def */
};

/* Variants of append: without norm and RoPE; with them; with them for any format, where accesses of 16 bytes
 * are not possible. */
enum { CUDA_APPEND, CUDA_APPEND_FUSED, CUDA_APPEND_FUSED_ANY };

/* Returns the kernel with this key; NULL if the table has none. */
struct cuda_kernel *cuda_kernel_of(struct cuda_key key);

/* Returns row `index` of the table; NULL past the end. */
struct cuda_kernel *cuda_kernel_at(int index);

/* Returns whether the device can run the kernel. Hopper's kernels also need their machine code in the
 * build. */
bool cuda_can_have(const struct cuda_device *device, const struct cuda_kernel *kernel);

/* Launches the planner in an open scope (plan.c). */
fmla_status cuda_launch_plan(const char *operation, const struct cuda_scope *scope,
                             const struct plan_problem *problem);

#endif
