/* SPDX-License-Identifier: MIT
 *
 * flashmla make-input: a decode batch as in a serving system. Pages are shuffled, so no request is
 * contiguous; unused table entries are -1 and unused slots NaN, which a kernel must never read.
 */
#include "call_file.h"
#include "lengths.h"
#include "make.h"
#include "options.h"
#include "policy.h"

#include "elements.h"
#include "progress.h"
#include "tokens.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct command make_input = {
    "make-input",
    "FILE",
    "write a decode batch over a paged cache to a file",
    "\n"
    "Writes the tensors q [b, s_q, h_q, d_qk], kv_cache [pages, page_size, h_kv, d_qk], block_table "
    "and seqlens (int32), and attn_sink [h_q] (fp32) with --sink. Values are N(0, 0.1^2), clamped to "
    "[-1, 1]. Without --seq-len or --seq-lens the lengths are random. The same options give the same "
    "bytes. With --cache fp8_656, fp8_584 or fp8_576, kv_cache has one head of bytes in that format; "
    "fp8_576 adds the tensor kv_scale [1] (fp32). --products fp8 requests FP8 products over fp8_656 "
    "or fp8_576. --products codes requests them over fp8_576, with q as e4m3 codes and the tensor "
    "q_scale [1] (fp32).\n"
    "\n"
    "--op sparse_decode writes q, kv_cache in the format of --cache, indices [b, s_q, topk], and with "
    "--extra-topk the tensors of an extra cache in the format of --extra-cache. --seq-len is then the "
    "number of keys per request that its indices select from. --op sparse_prefill writes a prefill: q "
    "[s_q, h_q, d_qk], kv [--seq-len, h_kv, d_qk] (pages with --page-size or --cache), and indices "
    "[s_q, h_kv, topk]. Its values have means in [-0.05, 0.05], and softmax_scale is 0.5.\n"
    "\n"
    "--op mha_forward writes q [b, s_q, h_q, d_qk], k [b, s_k, h_kv, d_qk] and v [b, s_k, h_kv, d_v]; "
    "s_k is --seq-len, 1024 by default. With --varlen the requests are packed one after the other, "
    "with lengths as above: the tensors have no dimension b, and cu_seqlens_q and cu_seqlens_k "
    "(int32) give the start of each request. With --used, seqused_q and seqused_k [b] (int32) say how many "
    "tokens and keys of each request are in use, at random; those after them are NaN. softmax_scale is 1 / "
    "sqrt(d_qk + 100). --op mha_backward "
    "writes these tensors, out and lse as mha_forward computes them, dout and, with --dlse, dlse.\n"
    "\n"
    "Examples\n"
    "  flashmla make-input batch.safetensors --batch 4 --min-len 100 --max-len 2000\n"
    "  flashmla make-input mtp.safetensors --seq-lens 0,1,64,5000 --query-tokens 2 --causal --dtype "
    "fp16\n"
    "  flashmla make-input sparse.safetensors --op sparse_decode --cache fp8_656 --topk 2048 --seq-len "
    "8192\n"
    "  flashmla make-input two.safetensors --op sparse_decode --cache fp8_528 --topk 128 --extra-topk 512 "
    "--extra-cache fp4_288\n"
    "  flashmla make-input bytes.safetensors --cache fp8_576 --batch 4\n"
    "  flashmla make-input codes.safetensors --cache fp8_576 --products codes --heads 128\n"
    "  flashmla make-input mha.safetensors --op mha_forward --varlen --seq-lens 100,0,700 --causal\n",
    OPERAND_OUTPUT,
    NULL};

struct make_options {
    struct lengths lengths;
    int64_t query_tokens, heads, kv_heads, d_qk, d_v, page_size, topk, extra_topk, extra_page_size;
    int op, dtype, cache, extra_cache, products; /* indices in the choices; cache 0: q's type */
    const char *names[OPTION_CHOICES];           /* choices of op */
    bool causal, varlen, used, sink, dlse, short_lists;
    bool query_tokens_given, kv_heads_given, d_qk_given, d_v_given, page_given, cache_given, topk_given,
        extra_topk_given, extra_page_given, extra_cache_given, products_given;
};

/* ---- What each operation has of its own ------------------------------------------------------- */

/* In the order of --op's choices; every later one is LENGTHS, if it takes lengths, or PLAIN. */
enum { DENSE, SPARSE, PREFILL, MHA, BACKWARD, PLAIN, LENGTHS, MADE };
static int kind_of(const struct make_options *o)
{
    return o->op < PLAIN ? o->op : takes_lengths(operation_named(o->names[o->op])) ? LENGTHS : PLAIN;
}

static struct shape shape_of(const struct make_options *o)
{
    const int32_t plain = o->dtype ? FMLA_KV_FP16 : FMLA_KV_BF16;
    const int kind = kind_of(o);
    const bool mha = kind == MHA || kind == BACKWARD, dense = kind == DENSE || kind == LENGTHS,
               lengths = dense || mha;
    const uint64_t seed = (uint64_t)o->lengths.seed;
    struct shape shape = {.op = operation_named(o->names[o->op]),
                          .s_q = o->query_tokens,
                          .h_q = o->heads,
                          .h_kv = dense || kind == PREFILL ? o->kv_heads : 1,
                          .d_qk = o->d_qk,
                          .type = o->dtype ? ELEMENT_FP16 : ELEMENT_BF16,
                          .sink = o->sink,
                          .dlse = o->dlse,
                          .seed = lengths ? ~seed - 2025 : seed}; /* differs from the seed of the lengths */
    if (kind == PLAIN) shape.tokens = o->lengths.batch * o->query_tokens;
    if (kind == PLAIN) return shape;
    shape.causal = o->causal;
    if (mha) {
        shape.b = o->lengths.batch, shape.s_k = o->lengths.seq_len_given ? o->lengths.seq_len : 1024;
        shape.s_q = o->query_tokens_given ? o->query_tokens : 0;
        shape.h_kv = o->kv_heads_given ? o->kv_heads : o->heads, shape.d_qk = o->d_qk_given ? o->d_qk : 192;
        shape.d_v = o->d_v_given ? o->d_v : usual_d_v(shape.d_qk);
        shape.varlen = o->varlen, shape.used = o->used;
        return shape;
    }
    shape.page_size = kind == PREFILL && !o->cache && !o->page_given ? 0 : o->page_size;
    shape.format = o->cache ? format_chosen(o->cache) : first_format(shape.op);
    if (cache_formats[shape.format].d_qk) shape.d_qk = cache_formats[shape.format].d_qk;
    shape.products = o->products;
    if (dense) return shape;
    shape.b = kind == SPARSE ? o->lengths.batch : 0;
    shape.s_k = o->lengths.seq_len_given ? o->lengths.seq_len : 4096;
    shape.topk = o->topk, shape.extra_topk = o->extra_topk;
    shape.extra_page_size = o->extra_topk ? o->extra_page_size : 0;
    if (!o->cache) shape.format = plain;
    if (o->extra_cache_given) shape.extra_format = o->extra_cache ? format_chosen(o->extra_cache) : plain;
    shape.holes = shape.varlen = o->short_lists;
    return shape;
}

static void print_dense(const struct shape *s, const struct making *made)
{
    int64_t keys = 0;
    for (int64_t r = 0; r < s->b; r++) keys += made->lengths[r];
    printf("%" PRId64 " requests, %" PRId64 " keys in %" PRId64 " pages of %" PRId64 ", %" PRId64
           " query tokens, %" PRId64 " heads over %" PRId64 ", d_qk %" PRId64 ", %s%s%s%s%s%s",
           s->b, keys, made->pages.count, s->page_size, s->s_q, s->h_q, s->h_kv, s->d_qk,
           element_name(s->type), s->format ? ", " : "", s->format ? format_name(s->format) : "",
           s->products ? ", products " : "", s->products ? products_name(s->products) : "",
           s->causal ? ", causal" : "");
}

static void print_sparse(const struct shape *s, const struct making *made)
{
    printf("%" PRId64 " requests, %" PRId64 " query tokens, %" PRId64 " heads, d_qk %" PRId64
           ", %s cache of %" PRId64 " pages of %" PRId64 ", %" PRId64 " indices%s",
           s->b, s->s_q, s->h_q, s->d_qk, format_name(s->format), made->size[DIM_pages], s->page_size,
           s->topk, s->extra_topk ? ", extra cache" : "");
}

static void print_prefill(const struct shape *s, const struct making *made)
{
    printf("%" PRId64 " tokens, %" PRId64 " heads over %" PRId64 ", d_qk %" PRId64 ", %s, ", s->s_q, s->h_q,
           s->h_kv, s->d_qk, format_name(s->format));
    if (s->page_size)
        printf("%" PRId64 " pages of %" PRId64, made->size[DIM_pages], s->page_size);
    else
        printf("%" PRId64 " keys", s->s_k);
    printf(", %" PRId64 " indices", s->topk);
}

static void print_mha(const struct shape *s, const struct making *made)
{
    printf("%" PRId64 " requests%s, %" PRId64 " query tokens, %" PRId64 " keys, %" PRId64
           " heads over %" PRId64 ", d_qk %" PRId64 ", d_v %" PRId64 ", %s%s",
           s->b, s->varlen ? " one after the other" : "", made->size[DIM_tokens_q], made->size[DIM_tokens_k],
           s->h_q, s->h_kv, s->d_qk, s->d_v, element_name(s->type), s->causal ? ", causal" : "");
}

static void print_plain(const struct shape *s, const struct making *made)
{
    (void)made;
    printf("%s, %" PRId64 " tokens, d_qk %" PRId64 ", %s", descriptors[s->op].name, s->tokens, s->d_qk,
           element_name(s->type));
}

static const struct {
    void (*print)(const struct shape *shape, const struct making *made);
    /* Tensors of larger elements come before bytes, so that all are aligned. */
    const char *const names[CALL_FILE_NAMES];
} kinds[MADE] = {
    [DENSE] = {print_dense, {"kv_cache", "q", "block_table", "seqlens", "attn_sink", "kv_scale", "q_scale"}},
    [SPARSE] = {print_sparse,
                {"indices", "extra_indices", "topk_length", "extra_topk_length", "attn_sink", "q", "kv_cache",
                 "extra_kv_cache"}},
    [PREFILL] = {print_prefill, {"indices", "topk_length", "attn_sink", "q", "kv"}},
    [MHA] = {print_mha,
             {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "attn_sink", "q", "k", "v"}},
    [BACKWARD] = {print_mha,
                  {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "attn_sink", "dlse", "lse", "q",
                   "k", "v", "out", "dout"}},
    [PLAIN] = {print_plain, {NULL}}, /* all inputs */
    [LENGTHS] = {print_dense, {NULL}},
};

/* ---- Options that contradict each other ------------------------------------------------------- */

/* What an operation must have for an option to apply to it: one of the members, an input with one of the
 * sizes, or a first tensor that may be fp16. */
struct need {
    const char *members[2];
    enum dimension sizes[2];
    bool fp16;
};

static bool meets(enum operation op, const struct need *need)
{
    const struct member *m = descriptors[op].members;
    for (int i = 0; i < 2; i++)
        if (need->members[i] && operation_has(op, need->members[i])) return true;
    for (; m->name; m++)
        for (int i = 0; i < MAX_DIMENSIONS && m->kind == MEMBER_TENSOR && !(m->allowed & IS_OUTPUT); i++)
            if (m->dimensions[i] &&
                (m->dimensions[i] == need->sizes[0] || m->dimensions[i] == need->sizes[1]))
                return true;
    return need->fp16 && descriptors[op].members->allowed & ALLOW_FP16;
}

/* Returns the first given option that does not apply to the operation, and the operations that it applies
 * to; NULL if there is none. */
static const char *needless(const struct make_options *o, char *others, size_t room)
{
    const struct lengths *l = &o->lengths;
    const struct {
        const char *name;
        bool given;
        struct need needs;
    } options[] = {
        {"--causal", o->causal, {.members = {"causal"}}},
        {"--varlen", o->varlen, {.members = {"cu_seqlens_q"}}},
        {"--used", o->used, {.members = {"seqused_k"}}},
        {"--dlse", o->dlse, {.members = {"dlse"}}},
        {"--seq-lens", l->list_given, {.members = {"seqlens", "cu_seqlens_k"}}},
        {"--min-len", l->min_given, {.members = {"seqlens", "cu_seqlens_k"}}},
        {"--max-len", l->max_given, {.members = {"seqlens", "cu_seqlens_k"}}},
        {"--batch", l->batch_given, {.sizes = {DIM_b, DIM_tokens}}},
        {"--kv-heads", o->kv_heads_given, {.sizes = {DIM_h_kv}}},
        {"--d-v", o->d_v_given, {.sizes = {DIM_d_v}}},
        {"--page-size", o->page_given, {.sizes = {DIM_page_size}}},
        {"--cache", o->cache_given, {.members = {"kv_format"}}},
        {"--products", o->products_given, {.members = {"products"}}},
        {"--topk", o->topk_given, {.sizes = {DIM_topk}}},
        {"--extra-topk", o->extra_topk_given, {.sizes = {DIM_extra_topk}}},
        {"--extra-page-size", o->extra_page_given, {.sizes = {DIM_extra_topk}}},
        {"--extra-cache", o->extra_cache_given, {.sizes = {DIM_extra_topk}}},
        {"--short-lists", o->short_lists, {.sizes = {DIM_topk}}},
        {"--dtype fp16", o->dtype, {.fp16 = true}},
    };
    const enum operation op = operation_named(o->names[o->op]);
    size_t i = 0, used = 0;
    while (i < sizeof options / sizeof *options && (!options[i].given || meets(op, &options[i].needs))) i++;
    if (i == sizeof options / sizeof *options) return NULL;
    for (int other = 0; o->names[other]; other++)
        if (meets(operation_named(o->names[other]), &options[i].needs))
            used += (size_t)snprintf(others + used, room - used, "%s%s", used ? " or " : "", o->names[other]);
    return options[i].name;
}

/* Returns EXIT_GOOD if the options are consistent. */
static int check_options(const struct make_options *o, const struct shape *s)
{
    const struct lengths *l = &o->lengths;
    char others[100];
    const char *name = needless(o, others, sizeof others);
    if (name && o->op == DENSE)
        return complain(&make_input, EXIT_USAGE, "%s: applies only to --op %s", name, others);
    if (name)
        return complain(&make_input, EXIT_USAGE, "%s: does not apply to --op %s", name,
                        descriptors[s->op].name);
    if (operation_is_mha(s->op) && !o->varlen && (l->list_given || l->min_given || l->max_given))
        return complain(&make_input, EXIT_USAGE, "%s: needs --varlen with --op %s",
                        l->list_given  ? "--seq-lens"
                        : l->min_given ? "--min-len"
                                       : "--max-len",
                        descriptors[s->op].name);
    if (!operation_is_mha(s->op) && !cache_formats[s->format].token && s->d_qk != 512 && s->d_qk != 576)
        return complain(&make_input, EXIT_USAGE, "--d-qk: %" PRId64 " must be 512 or 576", s->d_qk);
    if (s->format && !takes_format(s->op, s->format))
        return complain(&make_input, EXIT_USAGE, "--cache: %s does not apply to --op %s",
                        format_name(s->format), descriptors[s->op].name);
    if (o->cache && o->d_qk_given && o->d_qk != s->d_qk)
        return complain(&make_input, EXIT_USAGE, "--d-qk: %" PRId64 " must be %" PRId64 " with this --cache",
                        o->d_qk, s->d_qk);
    if (o->extra_cache_given && !o->extra_topk)
        return complain(&make_input, EXIT_USAGE, "--extra-cache: needs --extra-topk");
    if (!takes_format(s->op, s->extra_format))
        return complain(&make_input, EXIT_USAGE, "--extra-cache: %s does not apply to --op %s",
                        format_name(s->extra_format), descriptors[s->op].name);
    const int64_t of_extra = cache_formats[s->extra_format].d_qk;
    if (of_extra && of_extra != s->d_qk)
        return complain(&make_input, EXIT_USAGE,
                        "--extra-cache: %s has d_qk %" PRId64 ", must have d_qk %" PRId64 " as in --cache",
                        format_name(s->extra_format), of_extra, s->d_qk);
    if (o->cache && o->dtype) return complain(&make_input, EXIT_USAGE, "--dtype: fp16 needs --cache plain");
    if (!products_fit(s->products, s->format, s->type))
        return complain(&make_input, EXIT_USAGE, "--products: %s needs --cache %s",
                        products_name(s->products),
                        s->products == MADE_CODES ? "fp8_576" : "fp8_656 or fp8_576");
    if (s->h_kv != 1 && (o->cache || s->op == OP_SPARSE_PREFILL) && s->page_size)
        return complain(&make_input, EXIT_USAGE, "--kv-heads: %" PRId64 " must be 1 with pages%s", s->h_kv,
                        s->op == OP_SPARSE_PREFILL ? "" : " of bytes");
    if (s->h_q % s->h_kv)
        return complain(&make_input, EXIT_USAGE, "--kv-heads: %" PRId64 " must divide --heads %" PRId64,
                        s->h_kv, s->h_q);
    return EXIT_GOOD;
}

/* ---- The file -------------------------------------------------------------------------------- */

/* Writes `count` random values times `scale`, then `unused` NaN. */
static bool write_values(struct safetensors_writer *writer, struct random_state *random, fmla_dtype dtype,
                         float scale, int64_t count, int64_t unused, struct reason *reason)
{
    enum { AT_ONCE = 16384 };
    float values[AT_ONCE];
    for (int64_t done = 0; done < count + unused;) {
        const int64_t left = count + unused - done;
        const int64_t now = left < AT_ONCE ? left : AT_ONCE;
        for (int64_t i = 0; i < now; i++) {
            const float value = done + i < count ? random_input(random, 0.0f, 0.1f) / scale : (float)NAN;
            element_store(values, dtype, i, value);
        }
        if (!safetensors_write(writer, values, (size_t)now * dtype.bits / 8, reason)) return false;
        done += now;
    }
    return true;
}

/* Writes a page of bytes; slots without a key are NaN in every format. */
static bool write_bytes(struct making *made, struct safetensors_writer *writer, uint8_t *page, size_t bytes,
                        int64_t keys, struct reason *reason)
{
    const struct shape *s = made->shape;
    float values[TOKENS_WIDTH];
    memset(page, 0xff, bytes);
    for (int64_t key = 0; key < keys; key++) {
        for (int d = 0; d < TOKENS_WIDTH; d++) values[d] = random_input(&made->random, 0.0f, 0.1f);
        tokens_store(s->format, page, s->page_size, key, values, made_cache_scale);
    }
    return safetensors_write(writer, page, bytes, reason);
}

static bool write_pages(struct making *made, struct safetensors_writer *writer, const fmla_tensor *cache,
                        struct reason *reason)
{
    const int64_t token = cache->shape[2] * cache->shape[3], page_size = cache->shape[1];
    const size_t bytes = cache_formats[made->shape->format].token ? (size_t)(page_size * token) : 0;
    uint8_t *of_bytes = bytes ? malloc(bytes) : NULL;
    struct progress progress;
    bool good = of_bytes || !bytes || reason_set(reason, "no memory for a page of %zu bytes", bytes);
    progress_begin(&progress, "writing");
    for (int64_t page = 0; good && page < cache->shape[0]; page++) {
        const int64_t keys = made->pages.page_keys[page];
        progress_update(&progress, page, cache->shape[0]);
        good = bytes ? write_bytes(made, writer, of_bytes, bytes, keys, reason)
                     : write_values(writer, &made->random, cache->dtype, 1.0f, keys * token,
                                    (page_size - keys) * token, reason);
    }
    progress_wipe(&progress);
    free(of_bytes);
    return good;
}

/* Draws values while writing: a cache need not fit in memory. */
static bool write_dense(struct making *made, struct safetensors_writer *writer,
                        const struct safetensors_declaration *tensors, size_t count, struct reason *reason)
{
    bool good = true;
    for (size_t i = 0; good && i < count; i++) {
        const fmla_tensor *tensor = call_tensor(made->call, tensors[i].name);
        const int64_t elements = (int64_t)(call_bytes(tensor) / (tensor->dtype.bits / 8));
        if (!strcmp(tensors[i].name, "kv_cache"))
            good = write_pages(made, writer, tensor, reason);
        else if (!strcmp(tensors[i].name, "block_table"))
            good = safetensors_write(writer, made->pages.block_table, call_bytes(tensor), reason);
        else if (!strcmp(tensors[i].name, "seqlens"))
            good = safetensors_write(writer, made->lengths, call_bytes(tensor), reason);
        else if (!strcmp(tensors[i].name, "kv_scale"))
            good = safetensors_write(writer, &made_cache_scale, call_bytes(tensor), reason);
        else if (!strcmp(tensors[i].name, "q_scale"))
            good = safetensors_write(writer, &made_q_scale, call_bytes(tensor), reason);
        else
            good = write_values(writer, &made->random, tensor->dtype,
                                tensor->dtype.bits == 8 ? made_q_scale : 1.0f, elements, 0, reason);
    }
    return good;
}

static bool write_file(struct making *made, const struct make_options *o, const char *path,
                       struct reason *reason)
{
    struct safetensors_declaration tensors[CALL_FILE_NAMES];
    const char *inputs[CALL_FILE_NAMES] = {NULL}, *real = NULL;
    const struct member *member;
    const bool plain = kind_of(o) >= PLAIN, causal = call_option(made->call, "causal");
    for (int caches = 0, n = 0; caches < 2; caches++) /* these last, as they may be bytes */
        for (int i = 0; (member = call_member(made->call->op, i)); i++)
            if (!(member->allowed & IS_OUTPUT) && !(member->allowed & IS_CACHE) == !caches)
                inputs[n++] = member->name;
    for (member = descriptors[made->call->op].members; member->name; member++)
        if (member->kind == MEMBER_REAL && !real) real = member->name;
    const float *scale = real ? call_option(made->call, real) : NULL;
    const size_t count = call_file_declare(made->call, plain ? inputs : kinds[o->op].names, tensors);
    char seed[32], number[32];
    snprintf(seed, sizeof seed, "%" PRId64, o->lengths.seed);
    snprintf(number, sizeof number, "%g", scale ? (double)*scale : 0.0);
    struct safetensors_note notes[7];
    size_t noted = 0;
    if (plain) notes[noted++] = (struct safetensors_note){"operation", o->names[o->op]};
    if (!plain && causal) notes[noted++] = (struct safetensors_note){"causal", o->causal ? "true" : "false"};
    if (made->shape->format)
        notes[noted++] = (struct safetensors_note){"kv_format", format_name(made->shape->format)};
    if (made->shape->extra_format)
        notes[noted++] = (struct safetensors_note){"extra_kv_format", format_name(made->shape->extra_format)};
    if (made->shape->products) notes[noted++] = (struct safetensors_note){"products", "fp8"};
    notes[noted++] = (struct safetensors_note){"seed", seed};
    if (scale && *scale != 0.0f) notes[noted++] = (struct safetensors_note){real, number};
    struct safetensors_writer *writer = safetensors_create(path, tensors, count, notes, noted, reason);
    if (!writer) return false;
    if (o->op == DENSE ? write_dense(made, writer, tensors, count, reason)
                       : call_file_write(made->call, tensors, count, writer, reason))
        return safetensors_commit(writer, reason);
    safetensors_abandon(writer);
    return false;
}

static int make(const struct make_options *o, const char *path)
{
    struct shape shape = shape_of(o);
    struct making made = {0};
    struct call call = {0};
    struct reason reason = {""};
    int32_t *lengths = NULL;
    const int contradiction = check_options(o, &shape);
    if (contradiction) return contradiction;
    if (takes_lengths(shape.op) || o->varlen) {
        lengths = lengths_make(&o->lengths, &shape.b, &reason);
        if (!lengths) return complain(&make_input, EXIT_USAGE, "%s", reason.text);
        shape.lengths = lengths;
    }
    const bool good = make_begin(&made, &call, &shape, &reason) &&
                      (o->op == DENSE || (make_memory(&made, &reason) && make_values(&made, &reason))) &&
                      write_file(&made, o, path, &reason);
    if (good) {
        printf("%s: ", path);
        kinds[kind_of(o)].print(&shape, &made);
        printf("%s%s%s\n", shape.used ? ", lengths in use" : "", shape.sink ? ", sink" : "",
               shape.dlse ? ", dlse" : "");
    }
    free(lengths), make_end(&made), call_close(&call);
    return good ? EXIT_GOOD : complain(&make_input, EXIT_FAILED, "%s", reason.text);
}

int command_make_input(int argc, char **argv)
{
    struct make_options o = {.lengths = LENGTHS_DEFAULTS,
                             .query_tokens = 1,
                             .heads = 16,
                             .kv_heads = 1,
                             .d_qk = 576,
                             .page_size = 64,
                             .topk = 2048,
                             .extra_page_size = 64};
    const char *path = NULL;
    char operations[200];
    struct option options[] = {
        OPTION_ONE_OF("--op", &o.op, "OPERATION", operations, NULL, NULL),
        LENGTHS_OPTIONS(o.lengths),
        OPTION_NUMBER("--query-tokens", &o.query_tokens, 1, 1 << 20,
                      "query tokens of a request; default 1, with mha_forward as many as keys",
                      &o.query_tokens_given),
        OPTION_NUMBER("--heads", &o.heads, 1, 4096, "query heads; default 16", NULL),
        OPTION_NUMBER("--kv-heads", &o.kv_heads, 1, 4096,
                      "key heads; default 1, with mha_forward that of --heads", &o.kv_heads_given),
        OPTION_NUMBER(
            "--d-qk", &o.d_qk, 1, 576,
            "head size: 512 or 576 (the default); with mha_forward and mha_backward any, default 192",
            &o.d_qk_given),
        OPTION_NUMBER("--d-v", &o.d_v, 1, 512,
                      "mha_forward: head size of values; default 128, with --d-qk 256 256, with 96 64, else "
                      "at most --d-qk",
                      &o.d_v_given),
        OPTION_NUMBER("--page-size", &o.page_size, 1, 65536, "keys of a page; default 64", &o.page_given),
        OPTION_ONE_OF("--dtype", &o.dtype, "TYPE", "bf16 (the default) or fp16", NULL, "bf16", "fp16"),
        OPTION_SWITCH("--causal", &o.causal, "later query tokens see more keys"),
        OPTION_SWITCH("--varlen", &o.varlen,
                      "mha_forward: pack requests of varying lengths one after the other"),
        OPTION_SWITCH("--used", &o.used,
                      "mha_forward and mha_backward: add seqused_q and seqused_k; padding is NaN"),
        OPTION_SWITCH("--sink", &o.sink, "add attn_sink"),
        OPTION_SWITCH("--dlse", &o.dlse, "mha_backward: add dlse, the gradient of lse"),
        OPTION_ONE_OF(
            "--cache", &o.cache, "FORMAT",
            "format of the cache: plain (q's type, the default), fp8_656, fp8_584; dense_decode also "
            "has fp8_576, sparse operations fp8_528, fp8_528_split, fp4_288, fp4_288_split, "
            "fp8_528_f32",
            &o.cache_given, "plain", "fp8_656", "fp8_584", "fp8_576", "fp8_528", "fp8_528_split", "fp4_288",
            "fp4_288_split", "fp8_528_f32"),
        OPTION_ONE_OF(
            "--products", &o.products, "WHICH",
            "dense_decode over fp8_656 or fp8_576: bf16 (the default), fp8, or codes (fp8 with q as "
            "codes)",
            &o.products_given, "bf16", "fp8", "codes"),
        OPTION_NUMBER("--topk", &o.topk, 0, INT32_MAX, "sparse: indices of a query token; default 2048",
                      &o.topk_given),
        OPTION_NUMBER("--extra-topk", &o.extra_topk, 1, INT32_MAX,
                      "sparse_decode: indices into an extra cache; default none", &o.extra_topk_given),
        OPTION_NUMBER("--extra-page-size", &o.extra_page_size, 1, 65536,
                      "sparse_decode: page size of the extra cache; default 64", &o.extra_page_given),
        OPTION_ONE_OF("--extra-cache", &o.extra_cache, "FORMAT",
                      "sparse_decode: format of the extra cache; default that of --cache",
                      &o.extra_cache_given, "plain", "fp8_656", "fp8_584", "fp8_576", "fp8_528",
                      "fp8_528_split", "fp4_288", "fp4_288_split", "fp8_528_f32"),
        OPTION_SWITCH("--short-lists", &o.short_lists, "sparse: lists of varying lengths, with holes"),
        {0}};
    operation_choices(true, o.names, operations, sizeof operations);
    memcpy(options[0].choices, o.names, sizeof o.names);
    int status = options_parse(&make_input, options, argc, argv, &path);
    if (status < 0) status = make(&o, path);
    free(o.lengths.list.items);
    return status;
}
