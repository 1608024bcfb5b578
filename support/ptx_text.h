/* SPDX-License-Identifier: MIT
 *
 * PTX that is written line by line: kernels whose loops are unrolled, and whose registers have numbers.
 */
#ifndef FMLA_SUPPORT_PTX_TEXT_H
#define FMLA_SUPPORT_PTX_TEXT_H

#include <stddef.h>

/* Allocated by whoever owns it, for texts whose length is known. */
struct ptx_text {
    char *at;
    size_t size, used;
};

/* Ends the process if the text is longer than its memory. */
void ptx_add(struct ptx_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* {name<from>, …}, `count` of them. */
void ptx_add_list(struct ptx_text *text, const char *name, int from, int count);

#endif
