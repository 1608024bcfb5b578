/* SPDX-License-Identifier: MIT */
#define _POSIX_C_SOURCE 200809L /* open_memstream */
#include "ptx_text.h"

#include "gpu.h"

#include <stdlib.h>

void ptx_list(FILE *text, const char *name, int from, int count)
{
    for (int i = 0; i < count; i++) fprintf(text, "%s%s%d", i ? ", " : "{", name, from + i);
    fprintf(text, "}");
}

bool ptx_open(void **module, void (*write)(FILE *text, const void *of), const void *of, struct reason *reason)
{
    char *made = NULL;
    size_t bytes;
    FILE *text = open_memstream(&made, &bytes);
    if (text) write(text, of);
    const bool whole = text && !ferror(text), closed = text && !fclose(text);
    const bool good = whole && closed ? gpu_module_open(module, made, reason)
                                      : reason_set(reason, "no memory for a kernel's text");
    free(made);
    return good;
}
