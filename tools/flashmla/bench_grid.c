/* SPDX-License-Identifier: MIT */
#include "bench_grid.h"

#include "policy.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 12, PRODUCTS = 5 };

/* Members are in the order of the rows below. Lists end with 0; an axis without a list has its usual
 * value. page_size 0 is 64, but in sparse prefill keys without pages. A second cache has as many keys;
 * with extra_varlen the lengths of its lists range from 0 to all of their entries. For MHA, s_k sets s_q,
 * h_q sets h_kv, and d_v is that of usual_d_v. */
struct product {
    int64_t b[MOST], s_q[MOST], s_k[MOST], h_q[MOST], topk[MOST];
    int64_t page_size, extra_topk, extra_page_size, extra_varlen;
    enum { NO, YES, BOTH } causal, varying;
    int64_t d_qk[MOST], h_kv[MOST];
    int64_t format, extra_format; /* extra_format 0: format */
};

/* Grids: h20 is the one that FlashMLA's authors published for that GPU. peers has the shapes on which
 * other kernels were measured, with two more over bytes in sparse prefill; latency is its part of small
 * batches, varlen the one of large batches with varying lengths. formats has as many keys in one format as
 * in another, in one cache or in two. The largest rows need a server's memory. Merge uses the grids of
 * dense decode. */
static const struct grid {
    enum operation op;
    const char *name;
    struct product products[PRODUCTS];
} grids[] = {
    {OP_DENSE_DECODE,
     "cpu",
     {{.b = {1, 8}, .s_q = {1}, .s_k = {1024, 4096, 16384}, .h_q = {16, 128}},
      {.b = {128}, .s_q = {1}, .s_k = {512}, .h_q = {16, 128}}}},
    {OP_DENSE_DECODE,
     "h20",
     {{{128}, {1, 2}, {4096, 8192}, {16, 32, 64, 128}, .causal = YES, .varying = BOTH}}},
    {OP_DENSE_DECODE, "latency", {{{1, 2, 4}, {1}, {1024, 8192, 65536}, {16, 64, 128}, .causal = YES}}},
    {OP_DENSE_DECODE,
     "peers",
     {{{1, 2, 4, 16, 32}, {1}, {1024, 8192, 65536}, {16, 64, 128}, .causal = YES},
      {{128}, {1, 2}, {4096, 8192, 32768}, {16, 32, 64, 128}, .causal = YES}}},
    {OP_DENSE_DECODE,
     "varlen",
     {{{128}, {1, 2}, {4096, 8192, 32768}, {16, 32, 64, 128}, .causal = YES, .varying = YES}}},
    {OP_DENSE_DECODE, "quick", {{{1}, {1}, {256, 512, 1024}, .h_q = {16}}}},
    {OP_SPARSE_DECODE,
     "cpu",
     {{{1, 8}, {1}, {16384}, {16, 128}, {2048}, .format = FMLA_KV_BF16},
      {{1, 8}, {1}, {16384}, {16, 128}, {2048}, .format = FMLA_KV_FP8_656},
      {{1, 8}, {1}, {16384}, {16, 128}, {128}, 256, 1024, 64, .format = FMLA_KV_FP8_584}}},
    {OP_SPARSE_DECODE,
     "peers",
     {{{1, 2, 16, 64, 128}, {1, 2}, {32768}, {64, 128}, {2048}, .format = FMLA_KV_FP8_656},
      {{2, 64, 128}, {2}, {16384}, {64}, {128}, 256, 512, 64, .format = FMLA_KV_FP8_584},
      {{2, 64, 128}, {2}, {16384}, {128}, {128}, 256, 1024, 64, .format = FMLA_KV_FP8_584},
      {{2, 64, 128}, {2}, {16384}, {128}, {128}, 256, 1024, 2, 1, .format = FMLA_KV_FP8_584},
      {{148}, {2}, {32768}, {128}, {16384}, .format = FMLA_KV_FP8_656}}},
    {OP_SPARSE_DECODE,
     "formats",
     {{{2, 64, 128}, {1}, {16384}, {16, 64, 128}, {1152}, .format = FMLA_KV_FP8_584},
      {{2, 64, 128}, {1}, {16384}, {16, 64, 128}, {1152}, .format = FMLA_KV_FP8_528},
      {{2, 64, 128}, {1}, {16384}, {16, 64, 128}, {1152}, .format = FMLA_KV_FP4_288},
      {{2, 64, 128}, {1}, {16384}, {16, 64, 128}, {128}, 64, 1024, 64, .format = FMLA_KV_FP8_584},
      {{2, 64, 128},
       {1},
       {16384},
       {16, 64, 128},
       {128},
       64,
       1024,
       64,
       .format = FMLA_KV_FP8_528,
       .extra_format = FMLA_KV_FP4_288}}},
    {OP_SPARSE_DECODE, "quick", {{{1}, {1}, {1024}, {16}, {64, 256}, .format = FMLA_KV_FP8_656}}},
    {OP_SPARSE_PREFILL,
     "cpu",
     {{{0}, {64}, {16384}, {16, 128}, {2048}, .d_qk = {576, 512}, .format = FMLA_KV_BF16},
      {{0}, {64}, {16384}, {16, 128}, {2048}, 64, .format = FMLA_KV_FP8_656},
      {{0}, {64}, {16384}, {16, 128}, {2048}, 64, .format = FMLA_KV_FP8_584}}},
    {OP_SPARSE_PREFILL,
     "peers",
     {{{0}, {4096}, {8192, 32768, 131072}, {128}, {2048}, .d_qk = {576}, .format = FMLA_KV_BF16},
      {{0}, {4096}, {32768}, {64}, {512}, .d_qk = {512}, .format = FMLA_KV_BF16},
      {{0}, {4096}, {32768}, {128}, {1024}, .d_qk = {512}, .format = FMLA_KV_BF16},
      {{0}, {4096}, {32768}, {128}, {2048}, 64, .format = FMLA_KV_FP8_656},
      {{0}, {4096}, {32768}, {128}, {2048}, 64, .format = FMLA_KV_FP8_584}}},
    {OP_SPARSE_PREFILL,
     "quick",
     {{{0}, {8}, {1024}, {16}, {64, 256}, .d_qk = {576}, .format = FMLA_KV_BF16},
      {{0}, {8}, {1024}, {16}, {256}, 64, .format = FMLA_KV_FP8_656}}},
    {OP_MHA_FORWARD, "cpu", {{{1}, {0}, {2048}, {16}, .causal = BOTH, .d_qk = {192, 128, 64}}}},
    {OP_MHA_FORWARD,
     "mha",
     {{{8}, {0}, {2048}, {16}, .causal = BOTH, .d_qk = {192, 128, 64}},
      {{2}, {0}, {8192}, {16}, .causal = BOTH, .d_qk = {192, 128, 64}},
      {{1}, {0}, {16384}, {16}, .causal = BOTH, .d_qk = {192, 128, 64}},
      {{2}, {0}, {8192}, {32}, .causal = YES, .d_qk = {128}, .h_kv = {4}},
      {{16}, {0}, {8000}, {16}, .causal = BOTH, .varying = YES, .d_qk = {192, 128, 64}}}},
    {OP_MHA_FORWARD, "quick", {{{1}, {0}, {512}, {16}, .causal = BOTH, .d_qk = {192}}}},
    {OP_MHA_BACKWARD, "cpu", {{{1}, {0}, {2048}, {16}, .causal = BOTH, .d_qk = {192, 128, 64}}}},
    {OP_MHA_BACKWARD,
     "mha",
     {{{8}, {0}, {2048}, {16}, .causal = BOTH, .d_qk = {192, 128, 64}},
      {{2}, {0}, {8192}, {16}, .causal = BOTH, .d_qk = {192, 128, 64}},
      {{1}, {0}, {16384}, {16}, .causal = BOTH, .d_qk = {192, 128, 64}}}},
    {OP_MHA_BACKWARD, "quick", {{{1}, {0}, {512}, {16}, .causal = BOTH, .d_qk = {192}}}},
    {OP_CACHE_APPEND, "cpu", {{.s_q = {1}}}},
    {OP_CACHE_APPEND, "quick", {{.s_q = {1}}}},
};
enum { GRIDS = sizeof grids / sizeof *grids };

/* Returns the operation whose grids this one uses; an operation without grids uses those of dense decode if
 * it takes lengths, else those of cache append. */
static enum operation grids_of(enum operation op)
{
    if (op == OP_MERGE) return OP_DENSE_DECODE;
    for (int i = 0; i < GRIDS; i++)
        if (grids[i].op == op) return op;
    return takes_lengths(op) ? OP_DENSE_DECODE : OP_CACHE_APPEND;
}

void bench_grid_names(enum operation op, char *names, size_t room)
{
    *names = '\0';
    for (int i = 0; i < GRIDS; i++) {
        const size_t used = strlen(names);
        if (grids[i].op == grids_of(op))
            snprintf(names + used, room - used, "%s%s", used ? ", " : "", grids[i].name);
    }
}

static bool is_sparse(enum operation op)
{
    return op == OP_SPARSE_DECODE || op == OP_SPARSE_PREFILL;
}

/* Returns true if the axis distinguishes rows of the operation. Sparse operations on bytes have the sizes
 * of their format. Dense decode has one product for keys of every format. */
static bool is_axis(enum operation op, const struct product *p, enum bench_axis axis)
{
    enum {
        ALL = 1 << AXIS_HEADS | 1 << AXIS_QUERY_TOKENS,
        CACHES = 1 << AXIS_TOKENS | 1 << AXIS_DTYPE, /* and operations on tokens */
        LENGTHS = 1 << AXIS_HEADS | 1 << AXIS_BATCH | 1 << AXIS_SEQ_LEN | 1 << AXIS_PAGE_SIZE,
        KEYS = 1 << AXIS_KV_HEADS | 1 << AXIS_D_QK,
        MHA = ALL | KEYS | 1 << AXIS_D_V | 1 << AXIS_DTYPE | 1 << AXIS_CAUSAL | 1 << AXIS_VARLEN |
              1 << AXIS_BATCH | 1 << AXIS_SEQ_LEN | 1 << AXIS_USED
    };
    static const int axes[OPERATIONS] = {
        [OP_DENSE_DECODE] = ALL | KEYS | 1 << AXIS_PAGE_SIZE | 1 << AXIS_DTYPE | 1 << AXIS_FORMAT |
                            1 << AXIS_PRODUCTS | 1 << AXIS_CAUSAL | 1 << AXIS_VARLEN | 1 << AXIS_BATCH |
                            1 << AXIS_SEQ_LEN,
        [OP_MERGE] = ALL | 1 << AXIS_DTYPE | 1 << AXIS_BATCH | 1 << AXIS_PARTS | 1 << AXIS_LAST,
        [OP_SPARSE_DECODE] = ALL | 1 << AXIS_PAGE_SIZE | 1 << AXIS_BATCH | 1 << AXIS_SEQ_LEN |
                             1 << AXIS_TOPK | 1 << AXIS_FORMAT,
        [OP_SPARSE_PREFILL] = ALL | 1 << AXIS_SEQ_LEN | 1 << AXIS_TOPK | 1 << AXIS_FORMAT,
        [OP_MHA_FORWARD] = MHA,
        [OP_MHA_BACKWARD] = MHA,
        [OP_CACHE_APPEND] =
            CACHES | 1 << AXIS_FORMAT | 1 << AXIS_PAGE_SIZE | 1 << AXIS_NORM | 1 << AXIS_TURNS,
        [OP_CACHE_GATHER] = CACHES | 1 << AXIS_FORMAT | 1 << AXIS_PAGE_SIZE,
        [OP_CACHE_CONVERT] = 1 << AXIS_TOKENS | 1 << AXIS_FORMAT | 1 << AXIS_PAGE_SIZE,
    };
    const int others = takes_lengths(op) ? LENGTHS : CACHES;
    const int of_keys = p->page_size ? 1 << AXIS_PAGE_SIZE : KEYS,
              of_extra = p->extra_topk ? 1 << AXIS_EXTRA_FORMAT : 0,
              of_sink = operation_has(op, "attn_sink") ? 1 << AXIS_SINK : 0;
    return ((axes[op] ? axes[op] : others) | (op == OP_SPARSE_PREFILL ? of_keys : 0) | of_extra | of_sink) &
           1 << axis;
}

/* Returns the product's values of an axis. */
static struct option_counts list_of(enum operation op, const struct product *p, enum bench_axis axis)
{
    static const int64_t usual[BENCH_AXES][MOST] = {[AXIS_TOKENS] = {128, 4096, 65536},
                                                    [AXIS_KV_HEADS] = {1},
                                                    [AXIS_D_QK] = {576},
                                                    [AXIS_PARTS] = {2, 8},
                                                    [AXIS_PAGE_SIZE] = {64}};
    static const int64_t no_yes[2] = {0, 1};
    static int64_t formats[MOST];
    _Static_assert((int)KV_FORMATS <= (int)MOST, "a list has every format");
    for (int32_t i = FMLA_KV_BF16; i <= KV_FORMATS; i++) formats[i - FMLA_KV_BF16] = i;
    const int64_t *const lists[BENCH_AXES] = {
        [AXIS_BATCH] = p->b,   [AXIS_QUERY_TOKENS] = p->s_q, [AXIS_SEQ_LEN] = p->s_k,  [AXIS_HEADS] = p->h_q,
        [AXIS_TOPK] = p->topk, [AXIS_D_QK] = p->d_qk,        [AXIS_KV_HEADS] = p->h_kv};
    const bool own = lists[axis] && (*lists[axis] || (axis == AXIS_KV_HEADS && operation_is_mha(op)));
    const int64_t *items = own ? lists[axis] : usual[axis];
    int64_t count = 0;
    if (axis == AXIS_FORMAT) items = formats;
    while (count < MOST && items[count]) count++;
    if (axis == AXIS_PAGE_SIZE && (p->page_size || op == OP_SPARSE_PREFILL)) items = &p->page_size, count = 1;
    if (axis == AXIS_FORMAT && op == OP_DENSE_DECODE) items = no_yes, count = 1; /* q's type */
    if (axis == AXIS_FORMAT && is_sparse(op)) items = &p->format, count = 1;
    if (axis == AXIS_EXTRA_FORMAT) items = &p->extra_format, count = 1;
    if (axis == AXIS_CAUSAL || axis == AXIS_VARLEN) {
        const int which = axis == AXIS_CAUSAL ? p->causal : p->varying;
        items = no_yes + (which == YES), count = which == BOTH ? 2 : 1;
    }
    return (struct option_counts){(int64_t *)items,
                                  count ? count : 1}; /* read only; an empty list is a single 0 */
}

static struct shape row_of(enum operation op, const struct product *p, const struct option_counts *lists,
                           int64_t index)
{
    int64_t v[BENCH_AXES];
    for (int a = BENCH_AXES - 1; a >= 0; a--) {
        v[a] = lists[a].items[index % lists[a].count];
        index /= lists[a].count;
    }
    const bool of_caches = is_axis(op, p, AXIS_FORMAT), tokens = is_axis(op, p, AXIS_TOKENS),
               dense = op == OP_DENSE_DECODE, mha = operation_is_mha(op);
    struct shape shape = {.op = op,
                          .b = v[AXIS_BATCH],
                          .s_q = v[AXIS_QUERY_TOKENS],
                          .s_k = v[AXIS_SEQ_LEN],
                          .h_q = v[AXIS_HEADS],
                          .h_kv = v[AXIS_KV_HEADS] ? v[AXIS_KV_HEADS] : v[AXIS_HEADS],
                          .d_qk = v[AXIS_D_QK],
                          .page_size = mha ? 0 : v[AXIS_PAGE_SIZE],
                          .topk = v[AXIS_TOPK],
                          .extra_topk = p->extra_topk,
                          .extra_page_size = p->extra_page_size,
                          .tokens = tokens ? v[AXIS_TOKENS] : 0,
                          .parts = op == OP_MERGE ? v[AXIS_PARTS] : 0,
                          .format = (int32_t)(of_caches ? v[AXIS_FORMAT] : p->format),
                          .extra_format = (int32_t)v[AXIS_EXTRA_FORMAT],
                          .products = dense ? (int32_t)v[AXIS_PRODUCTS] : MADE_BF16,
                          .type = (enum element)v[AXIS_DTYPE],
                          .d_v = v[AXIS_D_V],
                          .causal = (dense || mha) && v[AXIS_CAUSAL],
                          .varlen = (dense || mha) && v[AXIS_VARLEN],
                          .used = v[AXIS_USED],
                          .sink = v[AXIS_SINK],
                          .last = v[AXIS_LAST],
                          .extra_varlen = p->extra_varlen,
                          .norm = v[AXIS_NORM],
                          .turns = (int32_t)v[AXIS_TURNS],
                          .no_lse = op == OP_MERGE};
    if (of_caches && !shape.format) shape.format = shape.type == ELEMENT_FP16 ? FMLA_KV_FP16 : FMLA_KV_BF16;
    if (!shape.format) shape.format = first_format(op);
    if (mha && !shape.d_v) shape.d_v = usual_d_v(shape.d_qk);
    if (cache_formats[shape.format].token && !shape.page_size && is_sparse(op)) shape.page_size = 64;
    if (op == OP_CACHE_CONVERT) { /* into the usual format of the width, or back from it */
        const bool wide = cache_formats[shape.format].d_qk != 512;
        shape.extra_page_size = shape.page_size;
        shape.extra_format = shape.format == FMLA_KV_FP8_656   ? FMLA_KV_FP8_576
                             : shape.format == FMLA_KV_FP8_528 ? FMLA_KV_FP4_288
                             : wide                            ? FMLA_KV_FP8_656
                                                               : FMLA_KV_FP8_528;
    }
    if (cache_formats[shape.format].d_qk)
        shape.d_qk = cache_formats[shape.format].d_qk, shape.h_kv = 1;
    else if (shape.extra_topk && cache_formats[shape.extra_format].d_qk)
        shape.d_qk = cache_formats[shape.extra_format].d_qk;
    return shape;
}

/* Returns true if the operation takes the formats of a row's caches, and two caches have keys of one size. */
static bool caches_fit(const struct shape *row, const struct bench_axes *chosen)
{
    const int64_t d_qk = row->extra_topk ? cache_formats[row->extra_format].d_qk : 0;
    if (row->format && !takes_format(row->op, row->format)) return false;
    if (chosen->axis[AXIS_EXTRA_FORMAT].count && !row->extra_topk) return false;
    return !d_qk || d_qk == row->d_qk;
}

/* Returns true if both have two caches and differ only in their formats. */
static bool alike(const struct product *a, const struct product *b)
{
    return !memcmp(a, b, offsetof(struct product, page_size)) && a->extra_topk &&
           a->page_size == b->page_size && a->extra_topk == b->extra_topk &&
           a->extra_page_size == b->extra_page_size && a->extra_varlen == b->extra_varlen;
}

/* Appends the rows of a product; returns false if memory runs out. */
static bool append(enum operation op, const struct product *p, const struct bench_axes *chosen,
                   struct shape **rows, int64_t *count)
{
    struct option_counts lists[BENCH_AXES];
    int64_t more = 1;
    for (int a = 0; a < BENCH_AXES; a++) {
        lists[a] = list_of(op, p, (enum bench_axis)a);
        if (!is_axis(op, p, (enum bench_axis)a))
            lists[a].count = 1;
        else if (chosen->axis[a].count)
            lists[a] = chosen->axis[a];
        if (__builtin_mul_overflow(more, lists[a].count, &more)) return false;
    }
    if (more > INT32_MAX) return false;
    struct shape *grown = realloc(*rows, (size_t)(*count + more) * sizeof **rows);
    if (!grown) return false;
    *rows = grown;
    for (int64_t i = 0; i < more; i++) {
        const struct shape row = row_of(op, p, lists, i);
        if (caches_fit(&row, chosen) && products_fit(row.products, row.format, row.type))
            grown[(*count)++] = row;
    }
    return true;
}

struct shape *bench_grid(enum operation op, const char *name, const struct bench_axes *chosen, int64_t *count)
{
    const struct grid *grid = NULL;
    for (int i = 0; i < GRIDS; i++)
        if (grids[i].op == grids_of(op) && !strcmp(grids[i].name, name)) grid = &grids[i];
    *count = -1;
    if (!grid) return NULL;
    /* The axes in which products differ. */
    const int of_mha =
        1 << AXIS_BATCH | 1 << AXIS_SEQ_LEN | 1 << AXIS_HEADS | 1 << AXIS_KV_HEADS | 1 << AXIS_VARLEN;
    const int apart = operation_is_mha(op) ? of_mha
                      : is_sparse(op)      ? 1 << AXIS_FORMAT
                      : grid->op == OP_DENSE_DECODE
                          ? ~(1 << AXIS_FORMAT | 1 << AXIS_PRODUCTS | 1 << AXIS_SINK)
                          : 0;
    const bool of_two = chosen->axis[AXIS_EXTRA_FORMAT].count > 0;
    bool any = false;
    for (int a = 0; a < BENCH_AXES; a++) any |= chosen->axis[a].count > 0 && apart >> a & 1;
    struct shape *rows = NULL;
    *count = 0;
    for (int i = 0; i < PRODUCTS && (*grid->products[i].s_q || *grid->products[i].s_k); i++) {
        bool repeated = false;
        for (int k = 0; any && k < i; k++)
            repeated |= !of_two || alike(&grid->products[k], &grid->products[i]);
        if (repeated) continue;
        if (append(op, &grid->products[i], chosen, &rows, count)) continue;
        free(rows);
        *count = 0;
        return NULL;
    }
    return rows;
}
