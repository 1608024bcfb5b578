/* SPDX-License-Identifier: MIT */
#ifndef FMLA_ERROR_H
#define FMLA_ERROR_H

#include "flashmla/flashmla.h"

/* Sets this thread's message and returns `status`, so that a check reads `return fail(…)`. */
fmla_status fail(fmla_status status, const char *format, ...) __attribute__((cold, format(printf, 2, 3)));

/* Sets every part of the last message. */
void error_parts(fmla_error *error);

/* Appends to a text in a buffer of `size` bytes; truncates what does not fit. */
void text_append(char *text, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Sets to 0 the large structs of every call. The size is not known to the compiler here; with a known size it
 * may emit `rep stos`, whose startup takes longer than the whole memset. */
void clear_struct(void *at, size_t size);

#endif
