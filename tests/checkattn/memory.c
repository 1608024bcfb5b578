/* SPDX-License-Identifier: MIT */
#define _GNU_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "memory.h"

#include "elements.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

const fmla_dtype dtype_bf16 = {FMLA_TYPE_BFLOAT, 16, 1}, dtype_fp16 = {FMLA_TYPE_FLOAT, 16, 1},
                 dtype_f32 = {FMLA_TYPE_FLOAT, 32, 1}, dtype_i32 = {FMLA_TYPE_INT, 32, 1},
                 dtype_i64 = {FMLA_TYPE_INT, 64, 1};

enum { CANARY_BYTES = GUARDED_FRONT, CANARY = 0xc5, FILL = 0xff };

static void no_memory(const char *of, size_t bytes)
{
    fprintf(stderr, "checkattn: out of %s for %zu bytes\n", of, bytes);
    exit(1);
}

void *must_alloc(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!memory) no_memory("memory", bytes);
    return memory;
}

void guarded_make(struct guarded *g, fmla_dtype dtype, int ndim, const int64_t *shape, enum layout layout)
{
    const int64_t gap = layout == LAYOUT_CONTIGUOUS ? 0
                        : layout == LAYOUT_ODD      ? 3
                                                    : 128 / dtype.bits; /* 16 bytes */
    const int swapped = layout == LAYOUT_SWAPPED_FIRST ? 0 : layout == LAYOUT_SWAPPED && ndim >= 4 ? 1 : -2;
    const size_t element = dtype.bits / 8;
    memset(g, 0, sizeof *g);
    int64_t span = 1;
    for (int place = ndim - 1; place >= 0; place--) { /* from the innermost dimension outward */
        const int i = place == swapped ? place + 1 : place == swapped + 1 ? swapped : place;
        g->shape[i] = shape[i];
        g->strides[i] = span;
        span = span * shape[i] + gap;
    }
    const size_t shift = layout == LAYOUT_ODD ? element : 0;
    g->bytes = (size_t)span * element + shift;
    g->whole = (g->bytes + 2 * CANARY_BYTES + 63) / 64 * 64;
    g->memory = must_alloc(g->whole);
    memset(g->memory, CANARY, g->whole);
    g->tensor = (fmla_tensor){.data = g->memory + CANARY_BYTES,
                              .device = {FMLA_DEVICE_CPU, 0},
                              .ndim = ndim,
                              .dtype = dtype,
                              .shape = g->shape,
                              .byte_offset = shift,
                              .strides = layout == LAYOUT_CONTIGUOUS ? NULL : g->strides};
    guarded_reset(g);
}

void guarded_reset(struct guarded *g)
{
    if (g->initial)
        memcpy(g->memory, g->initial, g->whole);
    else
        memset(g->memory + CANARY_BYTES, FILL, g->bytes);
    guarded_move(g, true);
}

void guarded_move(const struct guarded *g, bool out)
{
    for (int64_t i = 0; g->far && i < g->pages; i++) {
        char *near = (char *)g->tensor.data + g->tensor.byte_offset + (size_t)i * g->page_bytes,
             *far = (char *)g->far + g->far_front + (size_t)i * g->far_between;
        memcpy(out ? far : near, out ? near : far, g->page_bytes);
    }
}

void guarded_spread(struct guarded *g, int64_t pages, size_t page_bytes, size_t front, size_t between,
                    bool written)
{
    g->pages = pages, g->page_bytes = page_bytes, g->far_front = front, g->far_between = between;
    g->far_bytes = front + (size_t)pages * between;
    g->far =
        mmap(NULL, g->far_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (g->far == MAP_FAILED) no_memory("address space", g->far_bytes);
    guarded_move(g, true);
    if (!written) mprotect(g->far, g->far_bytes, PROT_READ);
}

void guarded_free(struct guarded *g)
{
    if (g->far) munmap(g->far, g->far_bytes);
    free(g->memory), free(g->initial);
    memset(g, 0, sizeof *g);
}

void *guarded_at(const struct guarded *g, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    const int64_t *s = g->strides;
    const int ndim = g->tensor.ndim;
    const int64_t at =
        i0 * s[0] + (ndim > 1 ? i1 * s[1] : 0) + (ndim > 2 ? i2 * s[2] : 0) + (ndim > 3 ? i3 * s[3] : 0);
    return (char *)g->tensor.data + g->tensor.byte_offset + at * (g->tensor.dtype.bits / 8);
}

size_t guarded_extent(const struct guarded *g)
{
    int64_t last = 0;
    for (int i = 0; i < g->tensor.ndim; i++) {
        if (!g->shape[i]) return (size_t)g->tensor.byte_offset;
        last += (g->shape[i] - 1) * g->strides[i];
    }
    return (size_t)g->tensor.byte_offset + (size_t)(last + 1) * (g->tensor.dtype.bits / 8);
}

/* Marks the elements below dimension `dim` in a copy of the memory. */
static void mark(const struct guarded *g, unsigned char *copy, size_t at, int dim)
{
    const size_t element = g->tensor.dtype.bits / 8;
    if (dim == GUARDED_DIMS - 1 || dim == g->tensor.ndim - 1) {
        memset(copy + at, FILL, (size_t)g->shape[dim] * element);
        return;
    }
    for (int64_t i = 0; i < g->shape[dim]; i++)
        mark(g, copy, at + (size_t)(i * g->strides[dim]) * element, dim + 1);
}

bool guarded_intact(const struct guarded *g)
{
    if (!g->memory || g->initial) return true;
    const unsigned char *after = g->memory + CANARY_BYTES + g->bytes;
    for (int i = 0; i < CANARY_BYTES; i++)
        if (g->memory[i] != CANARY || after[i] != CANARY) return false;
    if (!g->tensor.strides) return true; /* no gaps */
    unsigned char *copy = malloc(g->bytes + 1);
    memcpy(copy, g->memory + CANARY_BYTES, g->bytes);
    mark(g, copy, (size_t)g->tensor.byte_offset, 0);
    bool intact = true;
    for (size_t i = 0; i < g->bytes; i++) intact &= copy[i] == FILL;
    free(copy);
    return intact;
}

double guarded_value(const struct guarded *g, const void *address)
{
    return (double)element_load(address, g->tensor.dtype, 0);
}
