/* SPDX-License-Identifier: MIT
 *
 * An error message of one line: the file, the item in it, the value found and the values allowed.
 */
#ifndef FMLA_SUPPORT_FAULT_H
#define FMLA_SUPPORT_FAULT_H

#include <stdbool.h>

struct fault {
    char text[768];
};

/* Sets the text and returns false, so that a check reads `return fault_set(…)`. Control characters, which
 * names from files and users may hold, become '?', so that the text stays one line. */
bool fault_set(struct fault *fault, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
