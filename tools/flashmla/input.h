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
