/* SPDX-License-Identifier: MIT */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "pages.h"

#include "random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PATTERN = 0x3b };

static _Thread_local struct random_state ends;

void pages_draw(uint64_t seed)
{
    ends.state = seed;
}

static size_t page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* Returns `bytes` rounded up to whole pages. */
static size_t whole_pages(size_t bytes)
{
    return (bytes + page_size() - 1) / page_size() * page_size();
}

/* Returns the start of a buffer's pages. The guard page in front differs from the page of the buffer's
 * address, even if the buffer has no bytes and its address is the guard page behind. */
static unsigned char *begin_of(const void *memory)
{
    return (unsigned char *)((uintptr_t)memory / page_size() * page_size());
}

void *pages_alloc(size_t bytes, size_t alignment)
{
    const size_t guard = page_size(), inner = whole_pages(bytes);
    unsigned char *all =
        mmap(NULL, inner + 2 * guard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || mprotect(all, guard, PROT_NONE) ||
        mprotect(all + guard + inner, guard, PROT_NONE)) {
        fprintf(stderr, "checkattn: no pages for %zu bytes\n", bytes);
        exit(1);
    }
    unsigned char *begin = all + guard, *memory = begin;
    if (random_between(&ends, 0, 2)) memory += (inner - bytes) / alignment * alignment;
    memset(begin, PATTERN, inner);
    return memory;
}

bool pages_intact(const void *memory, size_t bytes)
{
    const unsigned char *begin = begin_of(memory), *end = begin + whole_pages(bytes), *at = begin;
    for (; at < (const unsigned char *)memory; at++)
        if (*at != PATTERN) return false;
    for (at += bytes; at < end; at++)
        if (*at != PATTERN) return false;
    return true;
}

void pages_free(void *memory, size_t bytes)
{
    if (memory) munmap(begin_of(memory) - page_size(), whole_pages(bytes) + 2 * page_size());
}
