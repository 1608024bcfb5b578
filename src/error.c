/* SPDX-License-Identifier: MIT */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MOST_BYTES = 512 };
static _Thread_local char message[MOST_BYTES];

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

/* Ends a text at its first `mark` and returns what follows; "" if it has none. */
static char *cut(char *text, const char *mark)
{
    char *at = strstr(text, mark);
    if (!at) return text + strlen(text);
    *at = '\0';
    return at + strlen(mark);
}

/* Returns the last word if one of these stands before it, else the end of the text. */
static const char *word_after(const char *text, const char *mark)
{
    const char *end = text + strlen(text), *word = end;
    while (word > text && word[-1] != ' ') word--;
    const size_t bytes = strlen(mark);
    return (size_t)(word - text) >= bytes && !memcmp(word - bytes, mark, bytes) ? word : end;
}

void error_parts(fmla_error *error)
{
    static _Thread_local char parts[MOST_BYTES];
    memcpy(parts, message, sizeof parts);
    char *argument = cut(parts, ": "), *actual = strstr(argument, ": ");
    const char *end = argument + strlen(argument);
    error->operation = parts;
    error->argument = error->allowed = end;
    if (actual && !memchr(argument, ' ', (size_t)(actual - argument))) {
        error->argument = argument;
        actual = cut(argument, ": ");
    } else {
        actual = argument;
    }
    error->actual = actual;
    char *allowed = strstr(actual, ", must ");
    if (allowed) {
        *allowed = '\0';
        error->allowed = allowed + strlen(", ");
    }
    error->other = word_after(error->allowed, " as in ");
    if (!*error->other) error->other = word_after(error->allowed, " with ");
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
