/* SPDX-License-Identifier: MIT */
#include "make_sparse.h"

#include "input.h"
#include "prefill_batch.h"

#include <inttypes.h>
#include <stdio.h>

static struct prefill_shape shape_of(const struct sparse_options *o)
{
    static const int32_t formats[] = {FMLA_KV_BF16, FMLA_KV_FP8_656, FMLA_KV_FP8_584};
    struct prefill_shape shape = {.s_q = o->query_tokens,
                                  .s_kv = o->seq_len,
                                  .topk = o->topk,
                                  .h_q = o->heads,
                                  .d_qk = o->cache == 2 ? 512 : 576,
                                  .h_kv = o->kv_heads,
                                  .page_size = o->cache || o->page_given ? o->page_size : 0,
                                  .format = formats[o->cache],
                                  .sink = o->sink,
                                  .holes = o->short_lists,
                                  .varlen = o->short_lists,
                                  .seed = o->seed};
    if (!o->cache && o->d_qk) shape.d_qk = o->d_qk;
    return shape;
}

/* What sparse prefill has not, of what was given; NULL = none. */
static const char *needless(const struct sparse_options *o)
{
    return o->dense_given        ? o->dense_given
           : o->batch_given      ? "--batch"
           : o->extra_topk_given ? "--extra-topk"
           : o->extra_page_given ? "--extra-page-size"
           : o->fp16             ? "--dtype fp16"
                                 : NULL;
}

static bool write_file(const struct prefill_batch *batch, const char *path, uint64_t seed,
                       struct fault *fault)
{
    const fmla_sparse_prefill_args *args = &batch->args;
    const struct sparse_member members[] = {{"indices", args->indices},
                                            {"topk_length", args->topk_length},
                                            {"attn_sink", args->attn_sink},
                                            {"q", args->q},
                                            {"kv", args->kv}};
    char scale[32];
    snprintf(scale, sizeof scale, "%g", (double)args->softmax_scale);
    return sparse_write(path, members, sizeof members / sizeof *members, args->kv_format, seed, scale, fault);
}

static void print_summary(const struct prefill_shape *s, const struct prefill_batch *batch, const char *path)
{
    printf("%s: %" PRId64 " tokens, %" PRId64 " heads over %" PRId64 ", d_qk %" PRId64 ", %s, ", path, s->s_q,
           s->h_q, s->h_kv, s->d_qk, input_format_name(s->format));
    if (s->page_size)
        printf("%" PRId64 " pages of %" PRId64, batch->kv_shape[0], s->page_size);
    else
        printf("%" PRId64 " keys", s->s_kv);
    printf(", %" PRId64 " indices%s\n", s->topk, s->sink ? ", sink" : "");
}

int make_prefill(const struct command *command, const struct sparse_options *o, const char *path)
{
    struct fault fault = {""};
    const struct prefill_shape shape = shape_of(o);
    if (needless(o)) return complain(command, EXIT_USAGE, "%s: not with --op sparse_prefill", needless(o));
    const int contradiction = sparse_check_options(command, o, shape.d_qk);
    if (contradiction) return contradiction;
    if (shape.page_size && shape.h_kv != 1)
        return complain(command, EXIT_USAGE, "--kv-heads: %" PRId64 " must be 1 with pages", shape.h_kv);
    if (shape.h_q % shape.h_kv)
        return complain(command, EXIT_USAGE, "--kv-heads: %" PRId64 " must divide --heads %" PRId64,
                        shape.h_kv, shape.h_q);
    struct prefill_batch batch;
    const bool good = prefill_batch_make(&batch, &shape, &fault) && write_file(&batch, path, o->seed, &fault);
    if (good) print_summary(&shape, &batch, path);
    prefill_batch_free(&batch);
    return good ? EXIT_GOOD : complain(command, EXIT_FAILED, "%s", fault.text);
}
