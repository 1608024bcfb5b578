/* SPDX-License-Identifier: MIT
 *
 * Calls of attention from layouts, whose options rotate: random tensors at odd addresses, with gaps of NaN
 * between their rows.
 */
#ifndef FMLA_ATTENTION_CALLS_H
#define FMLA_ATTENTION_CALLS_H

#include "values.h"

enum { MOST_KEYS = 2048, MOST_ROWS = 1024, WIDEST = 576, MOST_V = 512, MEMORY = 1 << 21 };

/* ---- A call ---------------------------------------------------------------------------------- */

/* Settings of a call beside its layout; they rotate from call to call. */
struct options {
    float scale; /* 0: the default */
    bool base_2, minus;
};

/* The call, and its number among all. */
static struct {
    enum operation operation;
    struct layout layout;
    struct options options;
    struct held held[MAX_TENSORS];
    char *end[MAX_TENSORS];
    _Alignas(16) char args[512];
} call;
static unsigned number;

static char memory[MAX_TENSORS][MEMORY];
static const float cache_scale = 1.0f + 0x1p-8f + 0x1p-9f; /* of a format with one for the whole cache */

/* Returns a tensor; NULL: the call has none of that name. */
static inline struct held *tensor(const char *name)
{
    const int which = described_index(call.operation, name);
    return which >= 0 && layout_has(&call.layout, described_tensor(call.operation, which)) ? &call.held[which]
                                                                                           : NULL;
}

static inline void place(struct held *held, const struct member *m, int which, const struct layout *layout)
{
    place_filled(held, m, which, layout);
    void *const contiguous = held->tensor.data;
    call.end[which] = lay_out_apart(held, m, layout, memory[which], number % 3);
    if (call.end[which] > memory[which] + MEMORY) abort();
    free(contiguous);
}

static inline void make(enum operation operation, const struct layout *layout)
{
    static const float scales[] = {0.0f, 0.125f, 0.5f, 0.0f};
    call.operation = operation, call.layout = *layout;
    call.options = (struct options){scales[number / 3 % 4], number / 2 % 2, number / 5 % 2};
    named_make(operation, call.args, call.held, &call.layout, place);
    *(float *)option_at(operation, call.args, "softmax_scale") = call.options.scale;
    put_number(operation, call.args, "log_base", call.options.base_2 ? FMLA_LOG_BASE_2 : FMLA_LOG_NATURAL);
    put_number(operation, call.args, "lse_empty", call.options.minus);
    number++;
}

/* Puts integers into a tensor of one dimension, if the call has it. */
static inline void put_integers(const char *name, const int32_t *integers, size_t count)
{
    const struct held *const t = tensor(name);
    if (t) memcpy(t->tensor.data, integers, count * sizeof *integers);
}

/* ---- Numbers of tensors ---------------------------------------------------------------------- */

/* Returns the offset, in elements, of the vector of a head; of three dimensions the first is the token. */
static inline int64_t offset_of(const struct held *t, int64_t request, int64_t token, int64_t head)
{
    const int64_t *s = t->strides;
    return t->tensor.ndim == 4 ? request * s[0] + token * s[1] + head * s[2] : token * s[0] + head * s[1];
}

static inline double element(const struct held *t, int64_t offset)
{
    const char *const at = (const char *)t->tensor.data + offset * t->tensor.dtype.bits / 8;
    float wide;
    uint16_t narrow;
    if (t->tensor.dtype.bits == 32) return memcpy(&wide, at, sizeof wide), (double)wide;
    memcpy(&narrow, at, sizeof narrow);
    return (double)(t->tensor.dtype.code == FMLA_TYPE_BFLOAT ? num_from_bf16(narrow) : num_from_fp16(narrow));
}

static inline int32_t integer(const struct held *t, int64_t offset)
{
    return ((const int32_t *)t->tensor.data)[offset];
}

/* Empties the outputs and runs the call. */
static inline void run_call(const char *kernel)
{
    const struct member *m;
    for (int which = 0; (m = described_tensor(call.operation, which)); which++)
        if (m->allowed & IS_OUTPUT) memset(memory[which], 0xff, (size_t)(call.end[which] - memory[which]));
    *(const char **)option_at(call.operation, call.args, "kernel") = kernel;
    CHECK(run_in_room(call.operation, call.args) == FMLA_OK, "%s, call %u: %s", kernel, number,
          fmla_last_error());
}

/* The sizes of decode. */
enum { B = 3, S_Q = 2, H_Q = 6 };
#define DECODE .b = B, .s_q = S_Q, .h_q = H_Q, .d_v = 512, .one = 1, .one_head = 1

#endif
