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
    /* The library would refuse it on a CPU; of what is copied to a GPU it sees the copy, and the command reads this one. */
    const uintptr_t bytes = found->type->dtype.bits / 8;
    if (found->begin < found->end && (uintptr_t)found->data % bytes)
        return fault_set(fault, "%s: tensor \"%s\": does not begin at a multiple of %d bytes", path, name,
                         (int)bytes);
    *tensor = (fmla_tensor){.data = (void *)found->data, /* the library writes to out and lse alone */
                            .device = {FMLA_DEVICE_CPU, 0},
                            .ndim = ndim,
                            .dtype = found->type->dtype,
                            .shape = found->shape};
    return true;
}

static bool read_scale(const struct safetensors_file *file, const char *path, double *to, struct fault *fault)
{
    const char *scale = safetensors_metadata(file, "softmax_scale");
    if (!scale) return true;
    char *end;
    *to = strtod(scale, &end);
    if (end != scale && !*end && isfinite((float)*to) && (float)*to != 0.0f) return true;
    return fault_set(fault,
                     "%s: __metadata__: softmax_scale is '%s', must be a finite number that is not 0 in fp32",
                     path, scale);
}

static bool read_options(struct input *input, const struct safetensors_file *file, const char *path,
                         struct fault *fault)
{
    const char *causal = safetensors_metadata(file, "causal");
    input->causal = causal && !strcmp(causal, "true");
    if (causal && !input->causal && strcmp(causal, "false") != 0)
        return fault_set(fault, "%s: __metadata__: causal is '%s', must be true or false", path, causal);
    return read_scale(file, path, &input->softmax_scale, fault);
}

static bool check_lengths(const struct input *input, const struct safetensors_file *file, const char *path,
                          struct fault *fault)
{
    return dtype_is(input->seqlens.dtype, FMLA_TYPE_INT, 32) ||
           fault_set(fault, "%s: tensor \"seqlens\": dtype is %s, must be I32", path,
                     safetensors_find(file, "seqlens")->type->name);
}

bool input_view(struct input *input, const struct safetensors_file *file, const char *path,
                struct fault *fault)
{
    memset(input, 0, sizeof *input);
    return view(file, path, "q", 4, true, &input->q, fault) &&
           view(file, path, "kv_cache", 4, true, &input->kv_cache, fault) &&
           view(file, path, "seqlens", 1, true, &input->seqlens, fault) &&
           view(file, path, "block_table", 2, false, &input->block_table, fault) &&
           view(file, path, "attn_sink", 1, false, &input->attn_sink, fault) &&
           check_lengths(input, file, path, fault) && read_options(input, file, path, fault);
}

/* ---- Sparse decode --------------------------------------------------------------------------- */

static const char *const format_names[] = {
    [FMLA_KV_BF16] = "BF16",
    [FMLA_KV_FP16] = "FP16",
    [FMLA_KV_FP8_656] = "FP8_656",
    [FMLA_KV_FP8_584] = "FP8_584",
};
enum { FORMATS = sizeof format_names / sizeof *format_names };

const char *input_format_name(int32_t kv_format)
{
    return kv_format > 0 && kv_format < FORMATS ? format_names[kv_format] : NULL;
}

enum input_operation input_operation(const struct safetensors_file *file)
{
    if (!safetensors_find(file, "indices")) return INPUT_DENSE_DECODE;
    const bool prompt = safetensors_find(file, "kv") && !safetensors_find(file, "kv_cache");
    return prompt ? INPUT_SPARSE_PREFILL : INPUT_SPARSE_DECODE;
}

static bool read_format(const struct safetensors_file *file, const char *path, int32_t *format,
                        struct fault *fault)
{
    const char *name = safetensors_metadata(file, "kv_format");
    for (int32_t i = 1; name && i < FORMATS; i++)
        if (!strcmp(name, format_names[i])) *format = i;
    if (!name || *format) return true;
    return fault_set(fault, "%s: __metadata__: kv_format is '%s', must be BF16, FP16, FP8_656 or FP8_584",
                     path, name);
}

bool sparse_input_view(struct sparse_input *input, const struct safetensors_file *file, const char *path,
                       struct fault *fault)
{
    memset(input, 0, sizeof *input);
    return view(file, path, "q", 4, true, &input->q, fault) &&
           view(file, path, "kv_cache", 4, true, &input->kv_cache, fault) &&
           view(file, path, "indices", 3, true, &input->indices, fault) &&
           view(file, path, "topk_length", 1, false, &input->topk_length, fault) &&
           view(file, path, "extra_kv_cache", 4, false, &input->extra_kv_cache, fault) &&
           view(file, path, "extra_indices", 3, false, &input->extra_indices, fault) &&
           view(file, path, "extra_topk_length", 1, false, &input->extra_topk_length, fault) &&
           view(file, path, "attn_sink", 1, false, &input->attn_sink, fault) &&
           read_format(file, path, &input->kv_format, fault) &&
           read_scale(file, path, &input->softmax_scale, fault);
}

/* ---- Sparse prefill -------------------------------------------------------------------------- */

bool prefill_input_view(struct prefill_input *input, const struct safetensors_file *file, const char *path,
                        struct fault *fault)
{
    memset(input, 0, sizeof *input);
    const struct safetensors_tensor *kv = safetensors_find(file, "kv");
    const int32_t of_kv = kv && kv->ndim == 4 ? 4 : 3; /* pages have one more */
    return view(file, path, "q", 3, true, &input->q, fault) &&
           view(file, path, "kv", of_kv, true, &input->kv, fault) &&
           view(file, path, "indices", 3, true, &input->indices, fault) &&
           view(file, path, "topk_length", 1, false, &input->topk_length, fault) &&
           view(file, path, "attn_sink", 1, false, &input->attn_sink, fault) &&
           read_format(file, path, &input->kv_format, fault) &&
           read_scale(file, path, &input->softmax_scale, fault);
}

/* ---- Dense decode ---------------------------------------------------------------------------- */

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
