/* SPDX-License-Identifier: MIT
 *
 * How the error tests spoil a call. Each test has a call that is good in every respect; one thing is changed,
 * the call must fail with the right status and a message that opens "operation: argument: " and holds the
 * words given, and no output may have changed.
 */
#ifndef FMLA_ARGUMENTS_H
#define FMLA_ARGUMENTS_H

#include "check.h"
#include "flashmla/flashmla.h"

#include <stdlib.h>

static const fmla_dtype bf16 = {FMLA_TYPE_BFLOAT, 16, 1}, fp16 = {FMLA_TYPE_FLOAT, 16, 1},
                        f32 = {FMLA_TYPE_FLOAT, 32, 1}, i32 = {FMLA_TYPE_INT, 32, 1};

/* A tensor with its shape and strides; more of them than any rank that is right, for the ranks that are not.
 */
struct held {
    fmla_tensor tensor;
    int64_t shape[8], strides[8];
};

static inline void held_set(struct held *held, void *data, fmla_dtype dtype, int ndim, const int64_t *shape)
{
    memset(held, 0, sizeof *held);
    held->tensor = (fmla_tensor){.data = data,
                                 .device = {FMLA_DEVICE_CPU, 0},
                                 .ndim = ndim,
                                 .dtype = dtype,
                                 .shape = held->shape,
                                 .strides = held->strides};
    for (int i = 0; i < 8; i++) held->shape[i] = held->strides[i] = 1;
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        held->shape[i] = shape[i], held->strides[i] = stride;
        stride *= shape[i];
    }
}

#define HELD(held, data, dtype, ndim, ...) held_set(held, data, dtype, ndim, (const int64_t[]){__VA_ARGS__})

/* A tensor argument of the operation under test. */
struct argument {
    const char *name;
    struct held *held;
    const fmla_tensor **member; /* of the argument struct */
    const char *dtypes;         /* as the message lists what is allowed */
    int optional, output;
};

/* The words, separated by |, that a message must hold; each after the other. */
static inline int has_words(const char *message, const char *words)
{
    while (*words) {
        const size_t length = strcspn(words, "|");
        char word[96];
        snprintf(word, sizeof word, "%.*s", (int)length, words);
        message = strstr(message, word);
        if (!message) return 0;
        message += strlen(word);
        words += length + (words[length] == '|');
    }
    return 1;
}

static inline void check_rejected(const char *label, fmla_status status, fmla_status expected,
                                  const char *operation, const char *argument, const char *words)
{
    char begin[96];
    snprintf(begin, sizeof begin, "%s: %s: ", operation, argument);
    CHECK(status == expected, "%s: status is %s, expected %s (%s)", label, fmla_status_name(status),
          fmla_status_name(expected), fmla_last_error());
    if (status != expected) return;
    CHECK(!strncmp(fmla_last_error(), begin, strlen(begin)), "%s: message is \"%s\", must begin with \"%s\"",
          label, fmla_last_error(), begin);
    CHECK(has_words(fmla_last_error(), words), "%s: message is \"%s\", must hold \"%s\"", label,
          fmla_last_error(), words);
}

/* ---- What may be wrong with any tensor --------------------------------------------------------------- */

enum {
    FAULT_NULL,
    FAULT_DATA_NULL,
    FAULT_CODE,
    FAULT_CODE_UNKNOWN,
    FAULT_BITS,
    FAULT_LANES,
    FAULT_RANK_0,
    FAULT_RANK_LESS,
    FAULT_RANK_MORE,
    FAULT_RANK_NEGATIVE,
    FAULT_RANK_HUGE,
    FAULT_SHAPE_NULL,
    FAULT_SIZE_NEGATIVE,
    FAULT_SIZE_LEAST,
    FAULT_SIZE_OVERFLOW,
    FAULT_SIZE_OVERFLOW_CONTIGUOUS,
    FAULT_STRIDE_OVERFLOW,
    FAULT_BYTES_OVERFLOW,
    FAULT_DATA_MISALIGNED,
    FAULT_OFFSET_MISALIGNED,
    FAULT_INNER_STRIDE,
    FAULT_INNER_STRIDE_0,
    FAULT_DEVICE_UNKNOWN,
    FAULT_DEVICE_0,
    FAULT_DEVICE_ID,
    FAULT_OUTPUT_STRIDE_0,
    FAULT_OUTPUT_OVERLAP,
    FAULTS
};

/* Spoils a good argument. Returns what the fault is called, or NULL where the argument cannot have it;
 * `words` are those that the message must hold. */
static inline const char *spoil(const struct argument *argument, int fault, char words[160])
{
    enum { WORDS = 160 };
    struct held *h = argument->held;
    fmla_tensor *t = &h->tensor;
    const int inner = t->ndim - 1, rank = t->ndim;
    const int several = h->shape[inner] > 1;
    words[0] = 0;
#define SAY(...)        snprintf(words, WORDS, __VA_ARGS__)
#define SAY_DTYPE(came) SAY("dtype is " came "|must be|%s", argument->dtypes)
#define SAY_RANK(came)  SAY("has %d dimensions|must have %d", came, rank)
    switch (fault) {
    case FAULT_NULL:
        if (argument->optional) return NULL;
        *argument->member = NULL;
        SAY("is NULL|must be");
        return "tensor is NULL";
    case FAULT_DATA_NULL: t->data = NULL, SAY("data is NULL"); return "data is NULL";
    case FAULT_CODE:
        t->dtype.code = t->dtype.code == FMLA_TYPE_INT ? FMLA_TYPE_UINT : FMLA_TYPE_INT;
        SAY("dtype is |int%d|must be|%s", t->dtype.bits, argument->dtypes);
        return "dtype code";
    case FAULT_CODE_UNKNOWN: t->dtype.code = 77, SAY_DTYPE("|77"); return "unknown dtype code";
    case FAULT_BITS: t->dtype.bits = 64, SAY_DTYPE("|64"); return "dtype bits";
    case FAULT_LANES: t->dtype.lanes = 4, SAY_DTYPE("|4 lanes"); return "dtype lanes";
    case FAULT_RANK_0: t->ndim = 0, SAY_RANK(0); return "rank 0";
    case FAULT_RANK_LESS: t->ndim--, SAY_RANK(rank - 1); return "rank too small";
    case FAULT_RANK_MORE: t->ndim++, SAY_RANK(rank + 1); return "rank too large";
    case FAULT_RANK_NEGATIVE: t->ndim = -1, SAY_RANK(-1); return "negative rank";
    case FAULT_RANK_HUGE: t->ndim = INT32_MAX, SAY_RANK(INT32_MAX); return "huge rank";
    case FAULT_SHAPE_NULL: t->shape = NULL, SAY("shape is NULL"); return "shape is NULL";
    case FAULT_SIZE_NEGATIVE: h->shape[0] = -1, SAY("dimension 0|-1|≥ 0"); return "negative size";
    case FAULT_SIZE_LEAST:
        h->shape[inner] = INT64_MIN, SAY("dimension %d|-9223372036854775808", inner);
        return "the least size";
    case FAULT_SIZE_OVERFLOW:
        if (rank < 2) return NULL;
        h->shape[0] = INT64_MAX, SAY("overflow|2^63 bytes");
        return "size times stride overflows";
    case FAULT_SIZE_OVERFLOW_CONTIGUOUS:
        h->shape[0] = INT64_MAX, t->strides = NULL, SAY("overflow|2^63 bytes");
        return "contiguous size overflows";
    case FAULT_STRIDE_OVERFLOW:
        if (rank < 2) return NULL;
        h->strides[0] = INT64_MAX, SAY("overflow|2^63 bytes");
        return "stride overflows";
    case FAULT_BYTES_OVERFLOW: /* elements fit 63 bits, bytes do not */
        if (rank < 2) return NULL;
        h->strides[0] = INT64_MAX / 2 / (h->shape[0] - 1), SAY("overflow|2^63 bytes");
        return "bytes overflow";
    case FAULT_DATA_MISALIGNED: t->data = (char *)t->data + 1, SAY("multiple of"); return "odd data";
    case FAULT_OFFSET_MISALIGNED: t->byte_offset = 1, SAY("byte_offset|multiple of"); return "odd offset";
    case FAULT_INNER_STRIDE:
        if (!several) return NULL;
        h->strides[inner] = 2, SAY("stride|innermost|2|must be 1");
        return "inner stride 2";
    case FAULT_INNER_STRIDE_0:
        if (!several) return NULL;
        h->strides[inner] = 0, SAY("stride|innermost|0|must be 1");
        return "inner stride 0";
    case FAULT_DEVICE_UNKNOWN: t->device.device_type = 99, SAY("device|99|cpu|cuda"); return "unknown device";
    case FAULT_DEVICE_0: t->device.device_type = 0, SAY("device|0|cpu|cuda"); return "device type 0";
    case FAULT_DEVICE_ID: t->device.id = -1, SAY("device id|-1|≥ 0"); return "negative device id";
    case FAULT_OUTPUT_STRIDE_0:
        if (!argument->output || rank < 2) return NULL;
        h->strides[0] = 0, SAY("share memory");
        return "output stride 0";
    case FAULT_OUTPUT_OVERLAP:
        if (!argument->output || rank < 2) return NULL;
        h->strides[0]--, SAY("share memory");
        return "output overlaps itself";
    default: return NULL;
    }
#undef SAY
#undef SAY_DTYPE
#undef SAY_RANK
}

/* Something else that is wrong with a call. */
struct mutation {
    const char *label;
    void (*apply)(void);
    fmla_status status;
    const char *argument, *words;
};

#endif
