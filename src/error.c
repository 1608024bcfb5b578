/* SPDX-License-Identifier: MIT */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char message[512];

fmla_status fail(fmla_status status, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    return status;
}

void text_append(char *text, size_t size, const char *format, ...)
{
    const size_t used = strlen(text);
    va_list values;
    va_start(values, format);
    vsnprintf(text + used, size - used, format, values);
    va_end(values);
}

void clear_struct(void *at, size_t size)
{
    memset(at, 0, size);
}

const char *fmla_last_error(void)
{
    return message;
}

const char *fmla_status_name(fmla_status status)
{
    switch (status) {
    case FMLA_OK: return "FMLA_OK";
    case FMLA_INVALID_ARGUMENT: return "FMLA_INVALID_ARGUMENT";
    case FMLA_UNSUPPORTED: return "FMLA_UNSUPPORTED";
    case FMLA_BUFFER_TOO_SMALL: return "FMLA_BUFFER_TOO_SMALL";
    case FMLA_DEVICE_ERROR: return "FMLA_DEVICE_ERROR";
    }
    return "unknown status";
}
