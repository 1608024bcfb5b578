/* SPDX-License-Identifier: MIT
 *
 * Why something failed, in one line: the file, the item in it, the value found and the values allowed.
 */
#ifndef FMLA_SUPPORT_REASON_H
#define FMLA_SUPPORT_REASON_H

#include <stdbool.h>

struct reason {
    char text[768];
};

/* Sets the text and returns false, so that a check reads `return reason_set(…)`. Control characters, which
 * names from files and users may hold, become '?', so that the text stays one line. */
bool reason_set(struct reason *reason, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
