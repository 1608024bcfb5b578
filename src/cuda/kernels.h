/* SPDX-License-Identifier: MIT
 *
 * The table of kernels (kernels.def): where each file of the back end finds its own, and cuda_prepare all of them.
 */
#ifndef FMLA_CUDA_KERNELS_H
#define FMLA_CUDA_KERNELS_H

#include "launch.h"
#include "params.h"

#include "../problem.h"

/* That of an operation is its portable kernel. */
enum cuda_schedule {
#define OPERATION(op, OP) CUDA_##OP,
#include "../operations.def"
    CUDA_PLAN,
    CUDA_JOIN,
    CUDA_QUANTISE_QUERIES,
    CUDA_SM80_DENSE_DECODE,
    CUDA_SM80_MHA_FORWARD,
    CUDA_SM80_MHA_BACKWARD,
    CUDA_SM80_MHA_BACKWARD_ROWS,
    CUDA_SM80_SPARSE_DECODE,
    CUDA_SM90_DENSE_DECODE,
    CUDA_SM90_DENSE_DECODE_FP8,
    CUDA_SM90_SPARSE_DECODE,
    CUDA_SM90_SPARSE_DECODE_SMALL,
    CUDA_SM90_SPARSE_PREFILL,
    CUDA_SM90_SPARSE_PREFILL_JOIN,
    CUDA_SM90_MHA_FORWARD,
    CUDA_SM90_MHA_BACKWARD,
    CUDA_SM90_MHA_BACKWARD_ROWS,
    CUDA_SM90_JOIN_HALF_ROWS,
    CUDA_SCHEDULES
};

/* The format that stands for all formats of bytes, where a kernel takes them all; of sparse operations also beside a cache of another. */
#define CUDA_BYTES KV_FP8_656

/* Variants of Hopper's dense decode over bytes, by the rows of a tile. */
enum { DENSE_DECODE_FP8_64 = 0, DENSE_DECODE_FP8_32 = 4, DENSE_DECODE_FP8_16 = 8 };

/* What tells a kernel from the others; what a schedule does not tell apart is 0. */
struct cuda_key {
    enum cuda_schedule schedule;
    enum element element;
    enum kv_format format;
    int variant; /* as the table says */
};

/* One that the table has; NULL for any other key. */
struct cuda_kernel *cuda_kernel_of(struct cuda_key key);

/* Row `index` of the table; NULL past the end. */
struct cuda_kernel *cuda_kernel_at(int index);

/* Is it one of the device's? Hopper's own are so where the build has their machine code. */
bool cuda_can_have(const struct cuda_device *device, const struct cuda_kernel *kernel);

/* Launches the planner in a scope that is open. (plan.c) */
fmla_status cuda_launch_plan(const char *operation, const struct cuda_scope *scope,
                             const struct plan_problem *problem);

#endif
