/* SPDX-License-Identifier: MIT
 *
 * Fills the inputs of any operation with valid values, according to its descriptor.
 */
#ifndef FMLA_FILLED_H
#define FMLA_FILLED_H

#include "named_calls.h"

#include "num.h"
#include "random.h"

#include <stdlib.h>

static inline int64_t elements_of(const struct held *held)
{
    int64_t count = 1;
    for (int i = 0; i < held->tensor.ndim; i++) count *= held->shape[i];
    return count;
}

static inline size_t bytes_of(const struct held *held)
{
    return (size_t)elements_of(held) * held->tensor.dtype.bits / 8;
}

/* Fills in codes of queries and caches, finite and, for e4m3, below 2; scales of 0.01 to 0.04, or 2^-7 to
 * 2^-4, or, for FP4, such codes. */
static inline void fill_codes(const struct held *held, const struct member *m, const struct layout *l,
                              struct random_state *random)
{
    uint8_t *const at = held->tensor.data;
    const size_t bytes = bytes_of(held);
    for (size_t i = 0; i < bytes; i++) at[i] = (uint8_t)random_between(random, 0x20, 0x3d);
    if (!(m->allowed & IS_CACHE)) return;
    const struct kv_layout layout = kv_layout_of(described_format(m, l)->format, 0);
    const int64_t pages = held->shape[0], page_size = held->shape[1], of_page = page_size * held->shape[3];
    for (int64_t slot = 0; slot < pages * page_size; slot++) {
        uint8_t *const scales =
            at + slot / page_size * of_page + kv_scales_at(&layout, page_size, slot % page_size);
        for (int32_t g = 0; g < layout.scales; g++) {
            if (layout.scale == KV_SCALE_F32)
                memcpy(scales + 4 * g, &(float){0.01f * (float)(1 + g)}, sizeof(float));
            if (layout.scale == KV_SCALE_UE8M0) scales[g] = (uint8_t)(120 + g % 4);
        }
    }
}

/* Returns lengths: the most, one or none, and values between. */
static inline int32_t length_of(int64_t i, int64_t most, int32_t least)
{
    return (int32_t)(i % 3 == 0 ? most : i % 3 == 1 ? least : most * 3 / 5);
}

/* Returns the first token of request i of b; later requests are longer. */
static inline int64_t start_of(int64_t i, int64_t b, int64_t tokens)
{
    return b ? i * i * tokens / (b * b) : 0;
}

/* Returns an integer element: some indices are invalid, some slots occur twice. */
static inline int64_t integer_of(const struct member *m, const struct layout *l, int64_t i,
                                 struct random_state *random)
{
    const int64_t keys = l->flat ? l->s_kv : l->pages * l->page_size;
    if (!strcmp(m->name, "seqlens"))
        return l->max_pages ? length_of(i, l->max_pages * l->page_size, 1) : 1 + i * 37 % 5000;
    if (!strcmp(m->name, "topk_length")) return length_of(i, l->topk, 0);
    if (!strcmp(m->name, "extra_topk_length")) return length_of(i, l->extra_topk, 0);
    if (!strcmp(m->name, "block_table")) return i % l->pages;
    if (!strcmp(m->name, "cu_seqlens_q")) return start_of(i, l->splits - 1, l->tokens_q);
    if (!strcmp(m->name, "cu_seqlens_k")) return start_of(i, l->splits - 1, l->tokens_k);
    if (!strncmp(m->name, "seqused", 7)) return length_of(i, i % 2 ? INT32_MAX : 5, i % 4 == 1 ? 0 : -1);
    if (!strcmp(m->name, "positions")) return l->max_positions ? i * 5 % l->max_positions : 0; /* absent */
    if (m->allowed & ALLOW_I64) return i % 5 == 4 ? -1 : i * 3 % keys;
    return random_between(random, -20, keys - 1);
}

static inline void fill_input(const struct held *held, const struct member *m, const struct layout *l,
                              struct random_state *random)
{
    const fmla_dtype dtype = held->tensor.dtype;
    const size_t width = dtype.bits / 8;
    char *at = held->tensor.data;
    if (width == 1) fill_codes(held, m, l, random);
    for (int64_t i = 0; width > 1 && i < elements_of(held); i++, at += width) {
        const float x = dtype.code == FMLA_TYPE_INT ? 0.0f : random_input(random, 0.0f, 0.3f);
        const uint16_t narrow = dtype.code == FMLA_TYPE_BFLOAT ? num_to_bf16(x) : num_to_fp16(x);
        const int64_t wide = dtype.code == FMLA_TYPE_INT ? integer_of(m, l, i, random) : 0;
        if (dtype.code == FMLA_TYPE_INT)
            memcpy(at, width == 8 ? (const void *)&wide : &(int32_t){(int32_t)wide}, width);
        else
            memcpy(at, width == 4 ? (const void *)&x : &narrow, width);
    }
}

static inline void *room_for(size_t bytes)
{
    void *const memory = aligned_alloc(64, bytes / 64 * 64 + 64);
    if (!memory) abort();
    return memory;
}

/* Runs the call in a workspace of the queried size with arbitrary contents. If the size query is refused,
 * returns its status. */
static inline fmla_status run_in_room(enum operation operation, void *args)
{
    struct answer answer = {0};
    if (!described_member(operation, "workspace")) return described_run(operation, args);
    fmla_status status = described_ask(operation, ASK_BYTES, args, &answer);
    if (status) return status;
    void *const room = memset(room_for(answer.bytes), 0xff, answer.bytes);
    *(void **)option_at(operation, args, "workspace") = room;
    *(size_t *)option_at(operation, args, "workspace_size") = answer.bytes;
    status = described_run(operation, args);
    free(room);
    return status;
}

/* For named_make: contiguous CPU tensors, each in its own memory. Inputs are filled. */
static inline void place_filled(struct held *held, const struct member *m, int which,
                                const struct layout *layout)
{
    int64_t shape[MAX_DIMENSIONS];
    struct random_state random = {(uint64_t)(5 + which)};
    const int rank = described_shape(m, layout, shape);
    held_set(held, NULL, described_dtype(m, layout), rank, shape);
    held->tensor.data = room_for(bytes_of(held));
    memset(held->tensor.data, 0, bytes_of(held));
    if (!(m->allowed & IS_OUTPUT)) fill_input(held, m, layout, &random);
}

/* ---- Elsewhere ------------------------------------------------------------------------------- */

/* Copies rows between `rows` and `held`, whose rows (all but the last dimension; contiguous pages) may
 * have gaps. */
static inline void copy_rows(const struct held *held, bool contiguous, char *rows, bool out)
{
    const int ndim = held->tensor.ndim, inner = contiguous ? 1 : ndim - 1;
    const size_t element = held->tensor.dtype.bits / 8;
    int64_t count = 1, row = 1;
    for (int i = 0; i < ndim; i++) *(i < inner ? &count : &row) *= held->shape[i];
    const size_t bytes = (size_t)row * element;
    for (int64_t i = 0; i < count; i++) {
        char *const at =
            (char *)held->tensor.data + (size_t)(inner ? i * held->strides[inner - 1] : 0) * element;
        memcpy(out ? rows + (size_t)i * bytes : at, out ? at : rows + (size_t)i * bytes, bytes);
    }
}

/* Lays the same tensor out elsewhere: at an address `shift` elements off, with equally large gaps between
 * rows. Bytes are shifted by the alignment of their scales. Everything else up to the end is 0xff; returns
 * the end. */
static inline char *lay_out_apart(struct held *held, const struct member *m, const struct layout *layout,
                                  char *to, int64_t shift)
{
    const bool contiguous = described_contiguous_pages(m, layout), bytes = held->tensor.dtype.bits == 8;
    const int64_t gap = m->allowed & IN_ROWS ? 0 : bytes ? described_format(m, layout)->unit * shift : shift;
    char *const from = held->tensor.data;
    const int inner = contiguous ? 1 : held->tensor.ndim - 1;
    for (int i = inner - 1; i >= 0; i--)
        held->strides[i] =
            i == inner - 1 ? held->strides[i] + gap : held->strides[i + 1] * held->shape[i + 1];
    const int64_t elements = gap + held->shape[0] * held->strides[0];
    char *const end = to + (size_t)elements * held->tensor.dtype.bits / 8;
    memset(to, 0xff, (size_t)(end - to));
    held->tensor.data = to + (size_t)gap * held->tensor.dtype.bits / 8;
    if (!(m->allowed & IS_OUTPUT)) copy_rows(held, contiguous, from, false);
    return end;
}

#endif
