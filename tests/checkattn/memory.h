/* SPDX-License-Identifier: MIT
 *
 * Tensors in guarded memory: canaries before and after, all bytes in between preset, and a check that a
 * call wrote only the tensor's elements.
 */
#ifndef CHECKATTN_MEMORY_H
#define CHECKATTN_MEMORY_H

#include "flashmla/flashmla.h"

#include <stdbool.h>

/* The memory layout of a tensor. */
enum layout {
    LAYOUT_CONTIGUOUS,
    LAYOUT_PADDED,  /* gaps after every dimension; everything a multiple of 16 bytes */
    LAYOUT_SWAPPED, /* as padded, with dimensions 1 and 2 of four or more stored in swapped order */
    LAYOUT_ODD,     /* gaps of odd size, base at an odd element, byte_offset used */
    LAYOUTS,
    LAYOUT_FAR = LAYOUTS, /* contiguous; pages of keys over 2^31 bytes apart, in address space only */
    LAYOUT_SWAPPED_FIRST  /* as LAYOUT_SWAPPED for dimensions 0 and 1; not in a grid */
};

/* Returns the layout of tensors other than the keys. */
static inline enum layout near_layout(int64_t layout)
{
    return layout == LAYOUT_FAR ? LAYOUT_CONTIGUOUS : (enum layout)layout;
}

enum { GUARDED_DIMS = 5, GUARDED_FRONT = 256 /* bytes of canary before and after the tensor */ };

struct guarded {
    fmla_tensor tensor; /* shape and strides point into this struct: do not copy it */
    int64_t shape[GUARDED_DIMS], strides[GUARDED_DIMS];
    unsigned char *memory;
    size_t bytes; /* between the canaries */
    size_t whole; /* canaries included */
    /* Contents that guarded_reset restores, owned, where all bytes are compared and there are no
     * canaries; NULL: bytes of 0xff between the canaries. */
    unsigned char *initial;
    /* Copies of the pages, far apart (guarded_spread), and their layout there. */
    unsigned char *far;
    size_t far_bytes, far_front, far_between, page_bytes;
    int64_t pages;
};

extern const fmla_dtype dtype_bf16, dtype_fp16, dtype_f32, dtype_i32, dtype_i64;

/* Returns memory aligned to 64 bytes; ends the process if there is none. */
void *must_alloc(size_t bytes);

/* Makes the tensor and fills its memory with bytes of 0xff: NaN in every float format here, -1 in int32. */
void guarded_make(struct guarded *guarded, fmla_dtype dtype, int ndim, const int64_t *shape,
                  enum layout layout);
void guarded_free(struct guarded *guarded);
void guarded_reset(struct guarded *guarded);

/* Copies contiguous pages to addresses `between` bytes apart, after `front` bytes of zeros. They cost
 * address space, not memory, and are read-only unless `written`. A truncated offset leads to the first
 * page or to the zeros: the result is wrong, but the process survives to report it. */
void guarded_spread(struct guarded *guarded, int64_t pages, size_t page_bytes, size_t front, size_t between,
                    bool written);

/* Copies the pages to their far addresses or back; does nothing without far pages. */
void guarded_move(const struct guarded *guarded, bool out);

/* Returns the bytes up to the last element, which a call may touch. */
size_t guarded_extent(const struct guarded *guarded);

void *guarded_at(const struct guarded *guarded, int64_t i0, int64_t i1, int64_t i2, int64_t i3);

/* Returns true if canaries and gaps are as guarded_reset left them. */
bool guarded_intact(const struct guarded *guarded);

/* Returns the value of an element of a float tensor at `address`. */
double guarded_value(const struct guarded *guarded, const void *address);

#endif
