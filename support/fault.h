/* SPDX-License-Identifier: MIT
 *
 * One line of text that says what went wrong: the file, the thing in it, what came and what is allowed.
 */
#ifndef FMLA_SUPPORT_FAULT_H
#define FMLA_SUPPORT_FAULT_H

#include <stdbool.h>

struct fault {
    char text[768];
};

/* Sets the text and returns false, so that a check reads `return fault_set(…)`. Names come from files and
 * from users: control characters in them are shown as '?', so that the text stays one line. */
bool fault_set(struct fault *fault, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
