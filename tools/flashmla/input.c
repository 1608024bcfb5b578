/* SPDX-License-Identifier: MIT */
#include "input.h"

#include "elements.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool missing(const struct safetensors_file *file, const char *path, const char *name,
                    struct fault *fault)
{
    char has[400] = "";
    for (size_t i = 0; i < safetensors_count(file); i++) {
        const size_t used = strlen(has);
        snprintf(has + used, sizeof has - used, "%s%s", i ? ", " : "", safetensors_at(file, i)->name);
    }
    return fault_set(fault, "%s: has no tensor \"%s\"; it has %s", path, name, *has ? has : "none");
}

/* Views the tensor `name` if it is there; its rank must be `ndim`. */
static bool view(const struct safetensors_file *file, const char *path, const char *name, int32_t ndim,
                 bool required, fmla_tensor *tensor, struct fault *fault)
{
    const struct safetensors_tensor *found = safetensors_find(file, name);
    if (!found) return !required || missing(file, path, name, fault);
    if (found->ndim != ndim)
        return fault_set(fault, "%s: tensor \"%s\": has %d dimensions, must have %d", path, name,
                         (int)found->ndim, (int)ndim);
    *tensor = (fmla_tensor){.data = (void *)found->data, /* the library writes to out and lse alone */
                            .device = {FMLA_DEVICE_CPU, 0},
                            .ndim = ndim,
                            .dtype = found->type->dtype,
                            .shape = found->shape};
    return true;
}

static bool read_options(struct input *input, const char *path, struct fault *fault)
{
    const char *causal = safetensors_metadata(input->file, "causal");
    const char *scale = safetensors_metadata(input->file, "softmax_scale");
    input->causal = causal && !strcmp(causal, "true");
    if (causal && !input->causal && strcmp(causal, "false") != 0)
        return fault_set(fault, "%s: __metadata__: causal is '%s', must be true or false", path, causal);
    if (scale) {
        char *end;
        input->softmax_scale = strtod(scale, &end);
        if (end == scale || *end || !isfinite((float)input->softmax_scale))
            return fault_set(fault, "%s: __metadata__: softmax_scale is '%s', must be a finite number", path,
                             scale);
    }
    return true;
}

static bool check_lengths(const struct input *input, const char *path, struct fault *fault)
{
    if (!dtype_is(input->seqlens.dtype, FMLA_TYPE_INT, 32))
        return fault_set(fault, "%s: tensor \"seqlens\": dtype is %s, must be I32", path,
                         safetensors_find(input->file, "seqlens")->type->name);
    if ((uintptr_t)input->seqlens.data % _Alignof(int32_t))
        return fault_set(fault, "%s: tensor \"seqlens\": does not begin at a multiple of 4 bytes", path);
    return true;
}

bool input_open(struct input *input, const char *path, struct fault *fault)
{
    memset(input, 0, sizeof *input);
    input->file = safetensors_open(path, fault);
    if (!input->file) return false;
    const struct safetensors_file *file = input->file;
    if (view(file, path, "q", 4, true, &input->q, fault) &&
        view(file, path, "kv_cache", 4, true, &input->kv_cache, fault) &&
        view(file, path, "seqlens", 1, true, &input->seqlens, fault) &&
        view(file, path, "block_table", 2, false, &input->block_table, fault) &&
        view(file, path, "attn_sink", 1, false, &input->attn_sink, fault) &&
        check_lengths(input, path, fault) && read_options(input, path, fault))
        return true;
    input_close(input);
    return false;
}

void input_close(struct input *input)
{
    safetensors_close(input->file);
    input->file = NULL;
}

int64_t input_capacity(const struct input *input)
{
    const int64_t pages = input->block_table.data ? input->block_table.shape[1] : 1;
    int64_t capacity;
    if (__builtin_mul_overflow(pages, input->kv_cache.shape[1], &capacity)) return INT64_MAX;
    return capacity;
}

int64_t input_length(const struct input *input, int64_t r)
{
    const int64_t capacity = input_capacity(input);
    const int32_t length = ((const int32_t *)input->seqlens.data)[r];
    return length < 0 ? 0 : length > capacity ? capacity : length;
}
