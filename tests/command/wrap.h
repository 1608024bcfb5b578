/* SPDX-License-Identifier: MIT
 *
 * For a flashmla for tests in which ld's --wrap replaces the library's functions: each calls around(),
 * which the including file defines, with the library's function.
 */
#ifndef TESTS_COMMAND_WRAP_H
#define TESTS_COMMAND_WRAP_H

#include "call.h"

typedef fmla_status real_function(const void *args);
static fmla_status around(enum operation op, const void *args, real_function *real);

#define OPERATION(op, OP)                                                                                    \
    fmla_status __real_fmla_##op(const fmla_##op##_args *args);                                              \
    fmla_status __wrap_fmla_##op(const fmla_##op##_args *args);                                              \
    static fmla_status real_##op(const void *args)                                                           \
    {                                                                                                        \
        return __real_fmla_##op(args);                                                                       \
    }                                                                                                        \
    fmla_status __wrap_fmla_##op(const fmla_##op##_args *args)                                               \
    {                                                                                                        \
        return around(OP_##OP, args, real_##op);                                                             \
    }
#include "operations.def"

/* Returns the tensor that a member of an argument struct points to; NULL if absent. */
static inline const fmla_tensor *wrapped_tensor(const void *args, const struct member *member)
{
    return *(fmla_tensor *const *)((const char *)args + member->offset);
}

#endif
