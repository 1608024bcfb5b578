/* SPDX-License-Identifier: MIT
 *
 * Generates PTX line by line, for kernels with unrolled loops and numbered registers.
 */
#ifndef FMLA_SUPPORT_PTX_TEXT_H
#define FMLA_SUPPORT_PTX_TEXT_H

#include <stddef.h>

/* A buffer that the owner allocates; the length of the text is known in advance. */
struct ptx_text {
    char *at;
    size_t size, used;
};

/* Appends formatted text; ends the process if the buffer is too small. */
void ptx_add(struct ptx_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Appends {name<from>, …}, `count` names. */
void ptx_add_list(struct ptx_text *text, const char *name, int from, int count);

#endif
