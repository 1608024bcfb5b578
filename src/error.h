/* SPDX-License-Identifier: MIT */
#ifndef FMLA_ERROR_H
#define FMLA_ERROR_H

#include "flashmla/flashmla.h"

/* Sets this thread's message and returns `status`, so that a check reads `return fail(…)`. */
fmla_status fail(fmla_status status, const char *format, ...) __attribute__((cold, format(printf, 2, 3)));

/* Appends to a text of `size` bytes; what does not fit is left out. */
void text_append(char *text, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* This is memset to 0, for the large structs of every call: where a compiler knows the size it may write
 * `rep stos`, which takes longer to begin than all of the other takes. */
void clear_struct(void *at, size_t size);

#endif
