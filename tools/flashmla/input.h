/* SPDX-License-Identifier: MIT
 *
 * A decode batch in a tensor file, as `make-input` writes it, seen as the library's tensors.
 */
#ifndef FLASHMLA_TOOL_INPUT_H
#define FLASHMLA_TOOL_INPUT_H

#include "safetensors.h"

/* What such a file has of an operation: views, valid while the file is open. data is NULL where it has no such (optional)
 * tensor. */
struct input {
    fmla_tensor q, kv_cache, block_table, seqlens, attn_sink;
    bool causal;          /* "causal" of the metadata; false without */
    double softmax_scale; /* "softmax_scale" of the metadata; 0 without */
};

/* Finds the tensors; ranks and types are checked as far as input_… below rely on them, the rest is the library's to check.
 * `path` is the file's name in messages. */
bool input_view(struct input *input, const struct safetensors_file *file, const char *path,
                struct fault *fault);

/* The same of sparse decode: a file is one that has indices. */
struct sparse_input {
    fmla_tensor q, kv_cache, indices, topk_length, extra_kv_cache, extra_indices, extra_topk_length,
        attn_sink;
    int32_t kv_format;    /* "kv_format" of the metadata; 0 without */
    double softmax_scale; /* as above */
};

bool sparse_input_view(struct sparse_input *input, const struct safetensors_file *file, const char *path,
                       struct fault *fault);

/* The same of sparse prefill: a file that has indices and kv. */
struct prefill_input {
    fmla_tensor q, kv, indices, topk_length, attn_sink;
    int32_t kv_format;
    double softmax_scale;
};

bool prefill_input_view(struct prefill_input *input, const struct safetensors_file *file, const char *path,
                        struct fault *fault);

enum input_operation { INPUT_DENSE_DECODE, INPUT_SPARSE_DECODE, INPUT_SPARSE_PREFILL };

/* What the file is of. */
enum input_operation input_operation(const struct safetensors_file *file);

/* "FP8_656" and so on; NULL for a format that has no name. */
const char *input_format_name(int32_t kv_format);

/* Keys that the cache has room for, of one request. */
int64_t input_capacity(const struct input *input);

/* Keys of request r, clamped to the capacity. */
int64_t input_length(const struct input *input, int64_t r);

/* The tensor, or NULL if the file has none. */
static inline const fmla_tensor *input_optional(const fmla_tensor *tensor)
{
    return tensor->data ? tensor : NULL;
}

#endif
