/* SPDX-License-Identifier: MIT */
#include "make_sparse.h"

#include "input.h"
#include "sparse_batch.h"

#include "safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

const char *sparse_options_given(const struct sparse_options *o)
{
    return o->cache_given        ? "--cache"
           : o->topk_given       ? "--topk"
           : o->extra_topk_given ? "--extra-topk"
           : o->extra_page_given ? "--extra-page-size"
           : o->short_lists      ? "--short-lists"
                                 : NULL;
}

static struct sparse_shape shape_of(const struct sparse_options *o)
{
    static const int32_t bytes[] = {0, FMLA_KV_FP8_656, FMLA_KV_FP8_584};
    struct sparse_shape shape = {.b = o->batch,
                                 .s_q = o->query_tokens,
                                 .h_q = o->heads,
                                 .d_qk = o->cache == 2 ? 512 : 576,
                                 .format = o->cache  ? bytes[o->cache]
                                           : o->fp16 ? FMLA_KV_FP16
                                                     : FMLA_KV_BF16,
                                 .cache = {{o->seq_len, o->topk, o->page_size}},
                                 .sink = o->sink,
                                 .holes = o->short_lists,
                                 .varlen = o->short_lists,
                                 .seed = o->seed};
    if (!o->cache && o->d_qk) shape.d_qk = o->d_qk;
    if (o->extra_topk)
        shape.cache[1] = (struct sparse_cache_shape){o->seq_len, o->extra_topk, o->extra_page_size};
    return shape;
}

static size_t bytes_of(const fmla_tensor *tensor)
{
    size_t bytes = tensor->dtype.bits / 8;
    for (int i = 0; i < tensor->ndim; i++) bytes *= (size_t)tensor->shape[i];
    return bytes;
}

bool sparse_write(const char *path, const struct sparse_member *members, int member_count, int32_t kv_format,
                  uint64_t seed, const char *scale, struct fault *fault)
{
    struct safetensors_declaration tensors[SPARSE_MEMBERS];
    const fmla_tensor *written[SPARSE_MEMBERS];
    size_t count = 0;
    for (int i = 0; i < member_count; i++) {
        const fmla_tensor *tensor = members[i].tensor;
        if (!tensor) continue;
        tensors[count] = (struct safetensors_declaration){members[i].name, tensor->dtype, tensor->ndim, {0}};
        memcpy(tensors[count].shape, tensor->shape, (size_t)tensor->ndim * sizeof *tensor->shape);
        written[count++] = tensor;
    }
    char number[32];
    snprintf(number, sizeof number, "%" PRIu64, seed);
    const struct safetensors_note notes[] = {
        {"kv_format", input_format_name(kv_format)}, {"seed", number}, {"softmax_scale", scale}};
    struct safetensors_writer *writer = safetensors_create(path, tensors, count, notes, scale ? 3 : 2, fault);
    if (!writer) return false;
    bool good = true;
    for (size_t i = 0; good && i < count; i++)
        good = safetensors_write(writer, written[i]->data, bytes_of(written[i]), fault);
    if (good) return safetensors_commit(writer, fault);
    safetensors_abandon(writer);
    return false;
}

static bool write_file(const struct sparse_batch *batch, const char *path, uint64_t seed, struct fault *fault)
{
    const fmla_sparse_decode_args *args = &batch->args;
    const struct sparse_member members[] = {
        {"indices", args->indices},         {"extra_indices", args->extra_indices},
        {"topk_length", args->topk_length}, {"extra_topk_length", args->extra_topk_length},
        {"attn_sink", args->attn_sink},     {"q", args->q},
        {"kv_cache", args->kv_cache},       {"extra_kv_cache", args->extra_kv_cache}};
    return sparse_write(path, members, SPARSE_MEMBERS, args->kv_format, seed, NULL, fault);
}

static void print_summary(const struct sparse_shape *s, const struct sparse_batch *batch, const char *path)
{
    printf("%s: %" PRId64 " requests, %" PRId64 " query tokens, %" PRId64 " heads, d_qk %" PRId64
           ", %s cache of %" PRId64 " pages of %" PRId64 ", %" PRId64 " indices%s%s\n",
           path, s->b, s->s_q, s->h_q, s->d_qk, input_format_name(s->format), batch->cache[0].cache_shape[0],
           s->cache[0].page_size, s->cache[0].topk, s->cache[1].page_size ? ", extra cache" : "",
           s->sink ? ", sink" : "");
}

int sparse_check_options(const struct command *command, const struct sparse_options *o, int64_t d_qk)
{
    if (d_qk != 512 && d_qk != 576)
        return complain(command, EXIT_USAGE, "--d-qk: %" PRId64 " must be 512 or 576", d_qk);
    if (o->cache && o->d_qk && o->d_qk != d_qk)
        return complain(command, EXIT_USAGE, "--d-qk: %" PRId64 " must be the %" PRId64 " of that cache",
                        o->d_qk, d_qk);
    if (o->cache && o->fp16) return complain(command, EXIT_USAGE, "--dtype: fp16 only with --cache plain");
    return EXIT_GOOD;
}

int make_sparse(const struct command *command, const struct sparse_options *o, const char *path)
{
    struct fault fault = {""};
    const struct sparse_shape shape = shape_of(o);
    if (o->dense_given || o->kv_heads_given)
        return complain(command, EXIT_USAGE, "%s: not with --op sparse_decode",
                        o->dense_given ? o->dense_given : "--kv-heads");
    const int contradiction = sparse_check_options(command, o, shape.d_qk);
    if (contradiction) return contradiction;
    struct sparse_batch batch;
    const bool good = sparse_batch_make(&batch, &shape, &fault) && write_file(&batch, path, o->seed, &fault);
    if (good) print_summary(&shape, &batch, path);
    sparse_batch_free(&batch);
    return good ? EXIT_GOOD : complain(command, EXIT_FAILED, "%s", fault.text);
}
