/* SPDX-License-Identifier: MIT */
#include "fault.h"

#include <stdarg.h>
#include <stdio.h>

bool fault_set(struct fault *fault, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(fault->text, sizeof fault->text, format, values);
    va_end(values);
    for (char *c = fault->text; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    return false;
}
