/* SPDX-License-Identifier: MIT */
#include "json_memory.h"

#include <jansson.h>
#include <stdlib.h>

static bool failed;

static void *watched_malloc(size_t size)
{
    void *memory = malloc(size);
    failed |= !memory;
    return memory;
}

void json_memory_watch(void)
{
    failed = false;
    json_set_alloc_funcs(watched_malloc, free);
}

bool json_memory_failed(void)
{
    return failed;
}
