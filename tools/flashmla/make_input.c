/* SPDX-License-Identifier: MIT
 *
 * flashmla make-input: a decode batch as a serving system has it. Pages lie shuffled, so no request is
 * contiguous; unused table entries and unused slots hold what a kernel must never read: -1 and NaN.
 */
#include "commands.h"
#include "lengths.h"
#include "make_sparse.h"
#include "options.h"
#include "pages.h"

#include "elements.h"
#include "progress.h"
#include "random.h"
#include "safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct command make_input = {
    "make-input",
    "FILE",
    "write a decode batch over a paged cache to a file",
    "\n"
    "Writes the tensors q [b, s_q, h_q, d_qk], kv_cache [pages, page_size, h_kv, d_qk], block_table and "
    "seqlens (int32), "
    "and attn_sink [h_q] (fp32) with --sink. Values are N(0, 0.1^2), clamped to [-1, 1]. Without --seq-len "
    "or --seq-lens "
    "the lengths are random. The same options give the same bytes.\n"
    "\n"
    "--op sparse_decode writes q, kv_cache in the format of --cache, indices [b, s_q, topk], and with "
    "--extra-topk the "
    "tensors of an extra cache; then --seq-len is the keys that a request's tokens choose from. --op "
    "sparse_prefill writes "
    "a prompt: q [s_q, h_q, d_qk], kv [--seq-len, h_kv, d_qk], or pages with --page-size or --cache, and "
    "indices [s_q, "
    "h_kv, topk]; values are around means, and softmax_scale is 0.5.\n"
    "\n"
    "Examples\n"
    "  flashmla make-input batch.safetensors --batch 4 --min-len 100 --max-len 2000\n"
    "  flashmla make-input mtp.safetensors --seq-lens 0,1,64,5000 --query-tokens 2 --causal --dtype fp16\n"
    "  flashmla make-input sparse.safetensors --op sparse_decode --cache fp8_656 --topk 2048 --seq-len "
    "8192\n",
    OPERAND_OUTPUT,
    NULL};

enum { TENSOR_CACHE, TENSOR_Q, TENSOR_TABLE, TENSOR_SEQLENS, TENSOR_SINK, TENSORS };

struct made_input {
    struct lengths lengths;
    int64_t query_tokens, heads, kv_heads, d_qk;
    int dtype; /* 0 = bf16, 1 = fp16 */
    bool causal, sink;

    int32_t *seqlens;
    int64_t batch;
    struct pages pages;
};

/* `count` random values, then `unused` NaN, in pieces: a cache need not fit in memory. */
static bool write_values(struct safetensors_writer *writer, struct random_state *random, fmla_dtype dtype,
                         int64_t count, int64_t unused, struct fault *fault)
{
    enum { PIECE = 16384 };
    float piece[PIECE];
    for (int64_t done = 0; done < count + unused;) {
        const int64_t left = count + unused - done;
        const int64_t now = left < PIECE ? left : PIECE;
        for (int64_t i = 0; i < now; i++) {
            const float value = done + i < count ? random_input(random, 0.0f, 0.1f) : (float)NAN;
            element_store(piece, dtype, i, value);
        }
        if (!safetensors_write(writer, piece, (size_t)now * dtype.bits / 8, fault)) return false;
        done += now;
    }
    return true;
}

static bool write_tensors(const struct made_input *made, struct safetensors_writer *writer,
                          const struct safetensors_declaration *tensors, struct random_state *random,
                          struct fault *fault)
{
    const fmla_dtype dtype = tensors[TENSOR_Q].dtype;
    const int64_t token = made->kv_heads * made->d_qk;
    struct progress progress;
    progress_begin(&progress, "writing");
    for (int64_t page = 0; page < made->pages.count; page++) {
        const int64_t keys = made->pages.page_keys[page];
        progress_update(&progress, page, made->pages.count);
        if (!write_values(writer, random, dtype, keys * token, (made->pages.page_size - keys) * token,
                          fault)) {
            progress_wipe(&progress);
            return false;
        }
    }
    progress_wipe(&progress);
    const int64_t q_count = made->batch * made->query_tokens * made->heads * made->d_qk;
    const size_t entries = (size_t)(made->batch * made->pages.max_pages);
    return write_values(writer, random, dtype, q_count, 0, fault) &&
           safetensors_write(writer, made->pages.block_table, entries * sizeof(int32_t), fault) &&
           safetensors_write(writer, made->seqlens, (size_t)made->batch * sizeof(int32_t), fault) &&
           (!made->sink ||
            write_values(writer, random, dtype_of(FMLA_TYPE_FLOAT, 32), made->heads, 0, fault));
}

static bool write_file(const struct made_input *made, const char *path, struct random_state *random,
                       struct fault *fault)
{
    const fmla_dtype dtype = dtype_of(made->dtype ? FMLA_TYPE_FLOAT : FMLA_TYPE_BFLOAT, 16);
    const fmla_dtype int32 = dtype_of(FMLA_TYPE_INT, 32);
    const struct safetensors_declaration tensors[TENSORS] = {
        [TENSOR_CACHE] = {"kv_cache",
                          dtype,
                          4,
                          {made->pages.count, made->pages.page_size, made->kv_heads, made->d_qk}},
        [TENSOR_Q] = {"q", dtype, 4, {made->batch, made->query_tokens, made->heads, made->d_qk}},
        [TENSOR_TABLE] = {"block_table", int32, 2, {made->batch, made->pages.max_pages}},
        [TENSOR_SEQLENS] = {"seqlens", int32, 1, {made->batch}},
        [TENSOR_SINK] = {"attn_sink", dtype_of(FMLA_TYPE_FLOAT, 32), 1, {made->heads}},
    };
    char seed[32];
    snprintf(seed, sizeof seed, "%" PRId64, made->lengths.seed);
    const struct safetensors_note notes[] = {{"causal", made->causal ? "true" : "false"}, {"seed", seed}};
    struct safetensors_writer *writer =
        safetensors_create(path, tensors, made->sink ? TENSORS : TENSOR_SINK, notes, 2, fault);
    if (!writer) return false;
    if (write_tensors(made, writer, tensors, random, fault)) return safetensors_commit(writer, fault);
    safetensors_abandon(writer);
    return false;
}

static void print_summary(const struct made_input *made, const char *path)
{
    int64_t keys = 0;
    for (int64_t r = 0; r < made->batch; r++) keys += made->seqlens[r];
    printf("%s: %" PRId64 " requests, %" PRId64 " keys in %" PRId64 " pages of %" PRId64 ", %" PRId64
           " query tokens, %" PRId64 " heads over %" PRId64 ", d_qk %" PRId64 ", %s%s%s\n",
           path, made->batch, keys, made->pages.count, made->pages.page_size, made->query_tokens, made->heads,
           made->kv_heads, made->d_qk, made->dtype ? "fp16" : "bf16", made->causal ? ", causal" : "",
           made->sink ? ", sink" : "");
}

static int make(struct made_input *made, const char *path)
{
    struct random_state random = {
        ~(uint64_t)made->lengths.seed}; /* not the numbers the lengths were drawn from */
    struct fault fault = {""};
    if (made->d_qk != 512 && made->d_qk != 576)
        return complain(&make_input, EXIT_USAGE, "--d-qk: %" PRId64 " must be 512 or 576", made->d_qk);
    if (made->heads % made->kv_heads)
        return complain(&make_input, EXIT_USAGE, "--kv-heads: %" PRId64 " must divide --heads %" PRId64,
                        made->kv_heads, made->heads);
    made->seqlens = lengths_make(&made->lengths, &made->batch, &fault);
    if (!made->seqlens) return complain(&make_input, EXIT_USAGE, "%s", fault.text);
    if (!pages_deal(&made->pages, made->seqlens, made->batch, &random, &fault) ||
        !write_file(made, path, &random, &fault))
        return complain(&make_input, EXIT_FAILED, "%s", fault.text);
    print_summary(made, path);
    return EXIT_GOOD;
}

int command_make_input(int argc, char **argv)
{
    struct made_input made = {.lengths = LENGTHS_DEFAULTS,
                              .query_tokens = 1,
                              .heads = 16,
                              .kv_heads = 1,
                              .d_qk = 576,
                              .pages = {.page_size = 64}};
    struct sparse_options sparse = {.topk = 2048, .extra_page_size = 64};
    int op = 0; /* index of the choice */
    bool kv_heads_given = false, d_qk_given = false;
    const char *path = NULL;
    const struct option options[] = {
        {"--op",
         OPTION_CHOICE,
         &op,
         "OPERATION",
         "dense_decode (the default), sparse_decode or sparse_prefill",
         0,
         0,
         {"dense_decode", "sparse_decode", "sparse_prefill", NULL},
         NULL},
        LENGTHS_OPTIONS(made.lengths),
        {"--query-tokens",
         OPTION_COUNT,
         &made.query_tokens,
         "N",
         "query tokens of a request; default 1",
         1,
         4096,
         {NULL},
         NULL},
        {"--heads", OPTION_COUNT, &made.heads, "N", "query heads; default 16", 1, 4096, {NULL}, NULL},
        {"--kv-heads",
         OPTION_COUNT,
         &made.kv_heads,
         "N",
         "key heads; default 1",
         1,
         4096,
         {NULL},
         &kv_heads_given},
        {"--d-qk",
         OPTION_COUNT,
         &made.d_qk,
         "N",
         "head size, 512 or 576; default 576",
         512,
         576,
         {NULL},
         &d_qk_given},
        {"--page-size",
         OPTION_COUNT,
         &made.pages.page_size,
         "N",
         "keys of a page; default 64",
         1,
         65536,
         {NULL},
         &sparse.page_given},
        {"--dtype",
         OPTION_CHOICE,
         &made.dtype,
         "TYPE",
         "bf16 (the default) or fp16",
         0,
         0,
         {"bf16", "fp16", NULL},
         NULL},
        {"--causal", OPTION_ON, &made.causal, NULL, "later query tokens see more keys", 0, 0, {NULL}, NULL},
        {"--sink", OPTION_ON, &made.sink, NULL, "add attn_sink", 0, 0, {NULL}, NULL},
        SPARSE_OPTIONS(sparse),
        {0}};
    int status = EXIT_GOOD;
    switch (options_parse(&make_input, options, argc, argv, &path)) {
    case OPTIONS_HELPED: break;
    case OPTIONS_WRONG: status = EXIT_USAGE; break;
    case OPTIONS_PARSED:
        sparse.batch = made.lengths.batch,
        sparse.seq_len = made.lengths.seq_len_given ? made.lengths.seq_len : 4096;
        sparse.query_tokens = made.query_tokens, sparse.heads = made.heads,
        sparse.page_size = made.pages.page_size;
        sparse.d_qk = d_qk_given ? made.d_qk : 0, sparse.fp16 = made.dtype, sparse.sink = made.sink;
        sparse.seed = (uint64_t)made.lengths.seed;
        sparse.kv_heads = made.kv_heads, sparse.kv_heads_given = kv_heads_given;
        sparse.batch_given = made.lengths.batch_given;
        sparse.dense_given = made.causal               ? "--causal"
                             : made.lengths.list_given ? "--seq-lens"
                             : made.lengths.min_given  ? "--min-len"
                             : made.lengths.max_given  ? "--max-len"
                                                       : NULL;
        status = op == 2 ? make_prefill(&make_input, &sparse, path)
                 : op    ? make_sparse(&make_input, &sparse, path)
                 : sparse_options_given(&sparse)
                     ? complain(&make_input, EXIT_USAGE, "%s: only with --op sparse_decode or sparse_prefill",
                                sparse_options_given(&sparse))
                     : make(&made, path);
        break;
    }
    free(made.lengths.list.items), free(made.seqlens);
    pages_free(&made.pages);
    return status;
}
