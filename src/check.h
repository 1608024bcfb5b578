/* SPDX-License-Identifier: MIT
 *
 * Checks of public arguments. Every function returns FMLA_OK or a failure whose message is
 * "operation: argument: what came, what is allowed".
 */
#ifndef FMLA_CHECK_H
#define FMLA_CHECK_H

#include "error.h"
#include "problem.h"

enum { CHECK_MAX_DIMS = 5 };

/* A tensor that passed: byte offset applied, strides given. */
struct checked_tensor {
    const char *name;
    char *data;
    int64_t shape[CHECK_MAX_DIMS];
    int64_t stride[CHECK_MAX_DIMS];
    enum element element; /* floating types */
    fmla_device device;   /* pinned host memory counts as cpu */
};

enum { /* types a check may allow */
       ALLOW_BF16 = 1 << ELEMENT_BF16,
       ALLOW_FP16 = 1 << ELEMENT_FP16,
       ALLOW_F32 = 1 << ELEMENT_F32,
       ALLOW_I32 = 1 << 3,
       ALLOW_NULL = 1 << 4,       /* the tensor may be absent: FMLA_OK and data = NULL, name = NULL */
       CHECK_OUTPUT = 1 << 5,     /* no two elements may share memory */
       CHECK_SHAPE_ONLY = 1 << 6, /* a size is asked: data is not looked at, and may be NULL */
       ALLOW_I64 = 1 << 7,
       ALLOW_BYTES = 1 << 8 /* any type of one byte */
};

/* operation and name are kept by reference. */
fmla_status check_tensor(const char *operation, const char *name, const fmla_tensor *tensor, int ndim,
                         unsigned allow, struct checked_tensor *checked);

/* Dimension `dim` of a tensor (of meaning `symbol`) must have `size`, as in `other`. */
fmla_status check_size(const char *operation, const struct checked_tensor *tensor, int dim,
                       const char *symbol, int64_t size, const char *other);

fmla_status check_same_device(const char *operation, const struct checked_tensor *tensor,
                              const struct checked_tensor *other);

/* An integer option in [low, high]. */
fmla_status check_range(const char *operation, const char *name, int64_t value, int64_t low, int64_t high);

/* Copies a caller's struct of any published size into `copy` (size bytes, the newest version). sizes: the
 * published ones, ascending, zero-terminated. */
fmla_status check_struct(const char *operation, const char *name, const void *args, void *copy, size_t size,
                         const size_t *sizes);

#endif
