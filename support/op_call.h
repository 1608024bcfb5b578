/* SPDX-License-Identifier: MIT
 *
 * The library's functions, and their arguments other than tensors, by operation number (src/operations.h).
 */
#ifndef FMLA_SUPPORT_OP_CALL_H
#define FMLA_SUPPORT_OP_CALL_H

#include "operations.h"

union call_args {
#define OPERATION(op, OP) fmla_##op##_args op;
#include "operations.def"
};

/* NULL: the operation has no such function. */
struct op_functions {
    fmla_status (*run)(const union call_args *args);
    fmla_status (*workspace)(const union call_args *args, size_t *bytes, size_t *alignment);
    fmla_status (*kernel)(const union call_args *args, const char **name);
};
extern const struct op_functions op_functions[OPERATIONS];

/* Returns the member `name`, which is not a tensor, as void *; NULL if the operation has no such member. */
void *op_option(enum operation op, const union call_args *args, const char *name);

#endif
