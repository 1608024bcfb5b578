/* SPDX-License-Identifier: MIT
 *
 * Tensors that a test owns, and the check of a refused call's message: it begins with "operation:
 * argument: " and contains the words given.
 */
#ifndef FMLA_ARGUMENTS_H
#define FMLA_ARGUMENTS_H

#include "check.h"
#include "flashmla/flashmla.h"

#include <stdlib.h>

static const fmla_dtype bf16 = {FMLA_TYPE_BFLOAT, 16, 1}, fp16 = {FMLA_TYPE_FLOAT, 16, 1},
                        f32 = {FMLA_TYPE_FLOAT, 32, 1}, i32 = {FMLA_TYPE_INT, 32, 1};

/* A tensor with its shape and strides, with room for ranks larger than any valid one. */
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
        if (__builtin_mul_overflow(stride, shape[i], &stride)) stride = INT64_MAX; /* the call is refused */
    }
}

#define HELD(held, data, dtype, ndim, ...) held_set(held, data, dtype, ndim, (const int64_t[]){__VA_ARGS__})

/* Checks that a message contains the words, separated by |, in order. */
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
    fmla_error error = FMLA_INIT(fmla_error);
    char whole[1024];
    CHECK_OK(fmla_last_error_describe(&error));
    snprintf(whole, sizeof whole, "%s: %s: %s%s%s", error.operation, error.argument, error.actual,
             *error.allowed ? ", " : "", error.allowed);
    CHECK(!strcmp(whole, fmla_last_error()), "%s: message is \"%s\", its parts make \"%s\"", label,
          fmla_last_error(), whole);
    CHECK(!strcmp(error.operation, operation) && !strncmp(error.argument, argument, strlen(error.argument)),
          "%s: operation is %s, argument %s, expected %s, %s", label, error.operation, error.argument,
          operation, argument);
    CHECK(!*error.allowed || !strncmp(error.allowed, "must ", strlen("must ")), "%s: allowed is \"%s\"",
          label, error.allowed);
}

#endif
