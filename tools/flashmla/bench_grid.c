/* SPDX-License-Identifier: MIT */
#include "bench_grid.h"

#include <stdlib.h>
#include <string.h>

enum { MOST = 8, PRODUCTS = 2 };

/* Lists end with 0; an axis without one has its usual value. */
struct product {
    int64_t b[MOST], s_q[MOST], s_k[MOST], h_q[MOST], causal;
    enum { FIXED, FIXED_AND_VARYING, VARYING } lengths;
};

/* h20 is the grid whose figures FlashMLA's authors published for that GPU; peers the one on which the kernels of others
 * were measured, of which latency is the part of small batches, and varlen the one of large batches with varying lengths. Their largest rows ask for a server's memory. */
static const struct grid {
    const char *name;
    struct product products[PRODUCTS];
} grids[] = {
    {"cpu",
     {{.b = {1, 8}, .s_q = {1}, .s_k = {1024, 4096, 16384}, .h_q = {16, 128}},
      {.b = {128}, .s_q = {1}, .s_k = {512}, .h_q = {16, 128}}}},
    {"h20",
     {{.b = {128},
       .s_q = {1, 2},
       .s_k = {4096, 8192},
       .h_q = {16, 32, 64, 128},
       .causal = 1,
       .lengths = FIXED_AND_VARYING}}},
    {"peers",
     {{.b = {1, 2, 4, 16, 32}, .s_q = {1}, .s_k = {1024, 8192, 65536}, .h_q = {16, 64, 128}, .causal = 1},
      {.b = {128}, .s_q = {1, 2}, .s_k = {4096, 8192, 32768}, .h_q = {16, 32, 64, 128}, .causal = 1}}},
    {"latency",
     {{.b = {1, 2, 4}, .s_q = {1}, .s_k = {1024, 8192, 65536}, .h_q = {16, 64, 128}, .causal = 1}}},
    {"varlen",
     {{.b = {128},
       .s_q = {1, 2},
       .s_k = {4096, 8192, 32768},
       .h_q = {16, 32, 64, 128},
       .causal = 1,
       .lengths = VARYING}}},
    {"quick", {{.b = {1}, .s_q = {1}, .s_k = {256, 512, 1024}, .h_q = {16}}}},
};
enum { GRIDS = sizeof grids / sizeof *grids };

const char *bench_grid_names(void)
{
    return "cpu, h20, latency, peers, varlen, quick";
}

struct lists {
    const int64_t *items[BENCH_AXES];
    int64_t count[BENCH_AXES];
};

static void take(struct lists *lists, enum bench_axis axis, const int64_t *items)
{
    lists->items[axis] = items;
    lists->count[axis] = 0;
    while (lists->count[axis] < MOST && items[lists->count[axis]]) lists->count[axis]++;
}

static int64_t lists_of(const struct product *product, const struct bench_axes *chosen, struct lists *lists)
{
    static const int64_t usual[BENCH_AXES] = {[AXIS_KV_HEADS] = 1, [AXIS_D_QK] = 576, [AXIS_PAGE_SIZE] = 64};
    int64_t rows = 1;
    for (int a = 0; a < BENCH_AXES; a++) lists->items[a] = &usual[a], lists->count[a] = 1;
    static const int64_t no_yes[2] = {0, 1};
    lists->items[AXIS_CAUSAL] = &product->causal;
    lists->items[AXIS_VARLEN] = no_yes + (product->lengths == VARYING);
    lists->count[AXIS_VARLEN] = product->lengths == FIXED_AND_VARYING ? 2 : 1;
    take(lists, AXIS_BATCH, product->b);
    take(lists, AXIS_QUERY_TOKENS, product->s_q);
    take(lists, AXIS_SEQ_LEN, product->s_k);
    take(lists, AXIS_HEADS, product->h_q);
    for (int a = 0; a < BENCH_AXES; a++) {
        if (chosen->axis[a].count)
            lists->items[a] = chosen->axis[a].items, lists->count[a] = chosen->axis[a].count;
        if (__builtin_mul_overflow(rows, lists->count[a], &rows)) return 0;
    }
    return rows;
}

static struct batch_shape row_of(const struct lists *lists, int64_t index)
{
    int64_t v[BENCH_AXES];
    for (int a = BENCH_AXES - 1; a >= 0; a--) {
        v[a] = lists->items[a][index % lists->count[a]];
        index /= lists->count[a];
    }
    return (struct batch_shape){.b = v[AXIS_BATCH],
                                .s_q = v[AXIS_QUERY_TOKENS],
                                .s_k = v[AXIS_SEQ_LEN],
                                .h_q = v[AXIS_HEADS],
                                .h_kv = v[AXIS_KV_HEADS],
                                .d_qk = v[AXIS_D_QK],
                                .page_size = v[AXIS_PAGE_SIZE],
                                .fp16 = v[AXIS_DTYPE],
                                .causal = v[AXIS_CAUSAL],
                                .varlen = v[AXIS_VARLEN]};
}

struct batch_shape *bench_grid(const char *name, const struct bench_axes *chosen, int64_t *count)
{
    const struct grid *grid = NULL;
    for (int i = 0; i < GRIDS; i++)
        if (!strcmp(grids[i].name, name)) grid = &grids[i];
    *count = -1;
    if (!grid) return NULL;
    bool any = false;
    for (int a = 0; a < BENCH_AXES; a++) any |= chosen->axis[a].count > 0;
    struct batch_shape *rows = NULL;
    *count = 0;
    for (int p = 0; p < (any ? 1 : PRODUCTS) && grid->products[p].b[0]; p++) {
        struct lists lists;
        const int64_t more = lists_of(&grid->products[p], chosen, &lists);
        struct batch_shape *grown = realloc(rows, (size_t)(*count + more) * sizeof *rows);
        if (!grown || !more) {
            free(grown ? grown : rows);
            *count = 0;
            return NULL;
        }
        rows = grown;
        for (int64_t i = 0; i < more; i++) rows[(*count)++] = row_of(&lists, i);
    }
    return rows;
}
