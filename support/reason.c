/* SPDX-License-Identifier: MIT */
#include "reason.h"

#include <stdarg.h>
#include <stdio.h>

bool reason_set(struct reason *reason, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(reason->text, sizeof reason->text, format, values);
    va_end(values);
    for (char *c = reason->text; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    return false;
}
