/* SPDX-License-Identifier: MIT
 *
 * Tensors in guarded memory: a canary before and after, every byte between preset, and a check that a call
 * wrote the tensor's elements and nothing else.
 */
#ifndef CHECKATTN_MEMORY_H
#define CHECKATTN_MEMORY_H

#include "flashmla/flashmla.h"

#include <stdbool.h>

/* How a tensor lies in memory. */
enum layout {
    LAYOUT_CONTIGUOUS,
    LAYOUT_PADDED, /* gaps after every dimension; everything a multiple of 16 bytes */
    LAYOUT_SWAPPED, /* the same, and dimensions 1 and 2 of a tensor of four or more stored the other way round */
    LAYOUT_ODD,     /* gaps of odd size, base at an odd element, byte_offset used */
    LAYOUTS,
    LAYOUT_FAR =
        LAYOUTS, /* contiguous but for keys, whose pages are more than 2^31 bytes apart; they cost address space, not memory */
    LAYOUT_SWAPPED_FIRST /* as LAYOUT_SWAPPED, of dimensions 0 and 1; not of a grid */
};

/* How tensors lie that are not the keys. */
static inline enum layout near_layout(int64_t layout)
{
    return layout == LAYOUT_FAR ? LAYOUT_CONTIGUOUS : (enum layout)layout;
}

enum { GUARDED_DIMS = 5, GUARDED_FRONT = 256 /* bytes of canary before the tensor, and behind it */ };

struct guarded {
    fmla_tensor tensor; /* shape and strides point into this struct: do not copy it */
    int64_t shape[GUARDED_DIMS], strides[GUARDED_DIMS];
    unsigned char *memory;
    size_t bytes; /* between the canaries */
    size_t whole; /* canaries included */
    unsigned char
        *initial; /* what guarded_reset makes of the whole, owned; NULL: bytes of 0xff between the canaries */
    /* Copies of the pages, far apart (guarded_spread), and how they lie there. */
    unsigned char *far;
    size_t far_bytes, far_front, far_between, page_bytes;
    int64_t pages;
};

extern const fmla_dtype dtype_bf16, dtype_fp16, dtype_f32, dtype_i32, dtype_i64;

/* Bytes at a multiple of 64, or the end of the process. */
void *must_alloc(size_t bytes);

/* Fills the whole with bytes of 0xff: NaN in every float format here, -1 in int32. */
void guarded_make(struct guarded *guarded, fmla_dtype dtype, int ndim, const int64_t *shape,
                  enum layout layout);
void guarded_free(struct guarded *guarded);
void guarded_reset(struct guarded *guarded);

/* Memory without gaps or canaries that are known: random bytes, say, of which every one is compared. Keeps a copy of the
 * whole as what guarded_reset makes of it. */
void guarded_keep(struct guarded *guarded);

/* Copies pages that lie next to each other to where there are `between` bytes from one to the next, behind `front` bytes of
 * zeros. They cost address space, not memory, and cannot be written there unless `written`. An offset that is cut leads to the
 * first page, or into the zeros: the result is wrong, and the process lives to say so. */
void guarded_spread(struct guarded *guarded, int64_t pages, size_t page_bytes, size_t front, size_t between,
                    bool written);

/* The pages again, out to where they are far apart or back; nothing without such. */
void guarded_move(const struct guarded *guarded, bool out);

/* Bytes up to the last element: what a call may touch. */
size_t guarded_extent(const struct guarded *guarded);

void *guarded_at(const struct guarded *guarded, int64_t i0, int64_t i1, int64_t i2, int64_t i3);

/* Are the canaries and the gaps as guarded_reset left them? */
bool guarded_intact(const struct guarded *guarded);

/* The value of an element of a float tensor at `address`. */
double guarded_value(const struct guarded *guarded, const void *address);

#endif
