/* SPDX-License-Identifier: MIT
 *
 * A decode batch in a tensor file, as `make-input` writes it, seen as the library's tensors.
 */
#ifndef FLASHMLA_TOOL_INPUT_H
#define FLASHMLA_TOOL_INPUT_H

#include "safetensors.h"

struct input {
    struct safetensors_file *file;
    /* Views of the mapped file; data is NULL where the file has no such (optional) tensor. */
    fmla_tensor q, kv_cache, block_table, seqlens, attn_sink;
    bool causal;          /* "causal" of the metadata; false without */
    double softmax_scale; /* "softmax_scale" of the metadata; 0 without */
};

/* Opens `path` and finds the tensors; ranks and types are checked as far as input_… below rely on them, the
 * rest is the library's to check. */
bool input_open(struct input *input, const char *path, struct fault *fault);
void input_close(struct input *input);

/* The same of sparse decode: a file is one that has indices. */
struct sparse_input {
    struct safetensors_file *file;
    fmla_tensor q, kv_cache, indices, topk_length, extra_kv_cache, extra_indices, extra_topk_length,
        attn_sink;
    int32_t kv_format;    /* "kv_format" of the metadata; 0 without */
    double softmax_scale; /* as above */
};

bool sparse_input_open(struct sparse_input *input, const char *path, struct fault *fault);
void sparse_input_close(struct sparse_input *input);

/* The same of sparse prefill: a file that has indices and kv. */
struct prefill_input {
    struct safetensors_file *file;
    fmla_tensor q, kv, indices, topk_length, attn_sink;
    int32_t kv_format;
    double softmax_scale;
};

bool prefill_input_open(struct prefill_input *input, const char *path, struct fault *fault);
void prefill_input_close(struct prefill_input *input);

enum input_operation { INPUT_DENSE_DECODE, INPUT_SPARSE_DECODE, INPUT_SPARSE_PREFILL };

/* What the file holds; of one that is no tensor file: INPUT_DENSE_DECODE. */
enum input_operation input_operation(const char *path);

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
