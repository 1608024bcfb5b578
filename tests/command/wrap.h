/* SPDX-License-Identifier: MIT
 *
 * For a flashmla of the tests' own in which ld's --wrap puts functions in the place of the library's: each calls around(),
 * of the file that includes this, with the library's function.
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

/* The tensor that the member of an argument struct is; NULL if it is not there. */
static inline const fmla_tensor *wrapped_tensor(const void *args, const struct member *member)
{
    return *(fmla_tensor *const *)((const char *)args + member->offset);
}

#endif
