/* SPDX-License-Identifier: MIT
 *
 * Generates PTX line by line, for kernels with unrolled loops and numbered registers.
 */
#ifndef FMLA_SUPPORT_PTX_TEXT_H
#define FMLA_SUPPORT_PTX_TEXT_H

#include "reason.h"

#include <stdio.h>

/* Writes {name<from>, …}, `count` names. */
void ptx_list(FILE *text, const char *name, int from, int count);

/* Opens a module from the text that write(text, of) makes. */
bool ptx_open(void **module, void (*write)(FILE *text, const void *of), const void *of,
              struct reason *reason);

#endif
