/* SPDX-License-Identifier: MIT */
#include "ptx_text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void ptx_add(struct ptx_text *text, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(text->at + text->used, text->size - text->used, format, arguments);
    va_end(arguments);
    text->used += (size_t)length;
    if (text->used >= text->size) abort();
}

void ptx_add_list(struct ptx_text *text, const char *name, int from, int count)
{
    for (int i = 0; i < count; i++) ptx_add(text, "%s%s%d", i ? ", " : "{", name, from + i);
    ptx_add(text, "}");
}
