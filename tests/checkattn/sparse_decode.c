/* SPDX-License-Identifier: MIT
 *
 * Sparse decode: its grid, its faults, and cases beside the grid.
 */
#include "sparse_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- The grid -------------------------------------------------------------------------------- */

/* Lengths and format of an absent extra cache do not matter, nor does a plan in batch-invariant mode;
 * codes matter if either cache has some, except for NaN. */
static bool counts(const int64_t *v, int i, int j)
{
    const bool plan = i == S_PLAN || j == S_PLAN || i == S_PARTITIONS || j == S_PARTITIONS;
    const bool of_codes = sparse_formats[v[S_FORMAT]].format >= KV_FP8_656 ||
                          (v[S_EXTRA] && sparse_extra_format(v) >= KV_FP8_656);
    const bool of_extra =
        i == S_EXTRA_LENGTHS || i == S_EXTRA_FORMAT || j == S_EXTRA_LENGTHS || j == S_EXTRA_FORMAT;
    if (of_extra && !v[S_EXTRA]) return i == S_EXTRA;
    if (plan && v[S_INVARIANT]) return i == S_INVARIANT || j == S_INVARIANT;
    if ((i == S_CODES || j == S_CODES) && !of_codes && i != S_FORMAT) return v[S_CODES] == S_CODES_NAN;
    return true;
}

/* Row-keys in groups of 16 rows, which a kernel computes that skips no vector. */
static double cost(const int64_t *v)
{
    const int64_t shape = v[S_SHAPE], extra = v[S_EXTRA];
    int64_t keys = 0;
    for (int64_t k = 0; k < SPARSE_SHAPES; k++)
        keys += (shape == k ? sparse_shapes[k][1] : 0) + (extra == k + 1 ? sparse_shapes[k][1] : 0);
    const int64_t tiles = v[S_B] * v[S_SQ] * ((v[S_HQ] + 15) / 16);
    return 16.0 * (double)(tiles * keys);
}

/* On a CPU the rows also cost time, as does the workspace: two slots per partition. */
static double cost_on_cpu(const int64_t *v)
{
    return cost(v) + case_cost_of_rows(v[S_B], v[S_SQ] * v[S_HQ], v[S_INVARIANT] ? 0 : 2 * v[S_PARTITIONS]);
}

/* Returns true for cases that kernels with tensor cores refuse: fp16 queries with a cache of bytes, and on
 * Hopper odd layouts. The bytes of a page of FP8_584 are any multiple of 8; far pages are aligned. */
static bool leaves(const struct test_case *c, bool *must)
{
    const struct sparse_case *s = (const struct sparse_case *)c;
    const struct sparse_format *first = &sparse_formats[c->v[S_FORMAT]];
    const bool of_bytes =
        first->format >= KV_FP8_656 || (c->v[S_EXTRA] && sparse_extra_format(c->v) >= KV_FP8_656);
    *must = true;
    if (strncmp(c->run->kernel, "cuda-sm", 7) != 0) return false;
    if (first->fp16 && of_bytes) return true;
    if (strncmp(c->run->kernel, "cuda-sm90", 9) != 0) return false;
    if (c->v[S_LAYOUT] == LAYOUT_ODD) return true;
    for (int k = 0; k < S_CACHES; k++) {
        const int64_t size = kv_is_quantised(&s->pool[k].layout) ? 1 : 2;
        if (s->pool[k].memory && s->pool[k].pages > 1 && s->pool[k].view->strides[0] * size % 16) return true;
    }
    return false;
}

/* The format pairs of the two caches that the current kernel supports; a second format equal to the first
 * is only called `same`. */
static bool taken[S_FORMATS][S_EXTRA_FORMATS];

static bool possible(const int64_t *v)
{
    if (v[S_FORMAT] < 0 || v[S_EXTRA_FORMAT] < 0) return true;
    return sparse_is_sound(v) && taken[v[S_FORMAT]][v[S_EXTRA_FORMAT]];
}

/* Only cases that the kernel supports are in its grid. CPU kernels and the GPU's portable one support all
 * formats, except those of a query type that they lack; a tuned kernel is asked, and its refusals are
 * reported. */
static void choose(struct subject *op, const struct run *run)
{
    struct axis *format = &op->axis[S_FORMAT], *extra = &op->axis[S_EXTRA_FORMAT];
    const bool tuned = on_gpu(run) && strcmp(run->kernel, "cuda") != 0;
    int64_t v[GRID_AXES];
    op->grid.cost = on_gpu(run) ? cost : cost_on_cpu, op->grid.dear = on_gpu(run) ? 4e5 : 2e5;
    format->count = extra->count = 0;
    memset(taken, 0, sizeof taken);
    for (int i = 0; i < S_FORMATS; i++) {
        case_values(op, "shape 0, b 1, h_q 16", v);
        v[S_FORMAT] = i;
        if (sparse_formats[i].fp16 && !(run->types & FMLA_TAKES_FP16)) continue;
        if (tuned && case_asked(op, run, v) == FMLA_UNSUPPORTED)
            sparse_tell_left(format, 1, &v[S_FORMAT]);
        else
            format->values[format->count++] = i;
    }
    for (int j = 0; j < S_EXTRA_FORMATS; j++) {
        bool beside_any = false;
        case_values(op, "shape 0, b 1, h_q 16, extra 1", v);
        v[S_EXTRA_FORMAT] = j;
        for (int i = 0; i < format->count; i++) {
            const int64_t first = v[S_FORMAT] = format->values[i];
            const bool twice = j != S_EXTRA_SAME && sparse_extra_format(v) == sparse_formats[first].format;
            taken[first][j] =
                !twice && sparse_is_sound(v) && !(tuned && case_asked(op, run, v) == FMLA_UNSUPPORTED);
            beside_any |= taken[first][j];
        }
        if (beside_any)
            extra->values[extra->count++] = j;
        else
            sparse_tell_left(extra, 1, &v[S_EXTRA_FORMAT]);
    }
}
/* ---- Faults ---------------------------------------------------------------------------------- */

static bool plant_before(struct test_case *c, enum defect fault, struct patch *patch)
{
    static const int32_t none;
    const struct sparse_pool *pool = ((const struct sparse_case *)c)->pool;
    if (fault == FAULT_NO_EXTRA) {
        for (int64_t r = 0; r < c->b && pool[1].topk; r++)
            if (pool[1].count[r] && pool[1].has_length)
                return plant(patch, guarded_at(pool[1].length, r, 0, 0, 0), &none, sizeof none);
        return false;
    }
    return sparse_plant(c, fault, patch);
}

/* Cases that suit every fault. An lse is small if a key is alone. */
static void fault_cases(struct suite *suite)
{
    const struct run *run = &suite->run[0];
    const bool alone = run->fault == FAULT_LSE_CANCELLED;
    for (uint64_t i = 0; i < 8; i++)
        suite_case(
            suite, run->seed + i, false,
            "shape 2, b 8, s_q 2, h_q 8, format %s, lengths varied, extra %d, extra_lengths varied, layout "
            "padded, batch_invariant %d, %s",
            i % 2 ? "fp8_584" : "fp8_656", !alone, run->fault == FAULT_BATCH,
            alone ? "inputs steep" : "codes scales");
}
/* ---- Cases beside the grid ------------------------------------------------------------------- */

/* Returns true if these formats are in the kernel's grid. */
static bool has(const struct run *run, const int64_t *v)
{
    return possible(v) && (v[S_LAYOUT] != LAYOUT_FAR || has_far_memory(run, 64));
}

/* Scores of +inf or beyond fp32; and the oracle's own strides and batches against its rows. */
#define MANY                                                                                                 \
    "shape 2, b 5, s_q 2, h_q 16, lengths varied, extra 3, extra_lengths varied, num_partitions 7, "         \
    "sink finite, "
static void more(struct suite *suite)
{
    const uint64_t seed = suite->run[0].seed;
    for (int f = 0; f < S_FORMATS; f++) suite_case(suite, seed, false, MANY "inputs infinite, format %d", f);
    for (int f = 0; f < S_FORMATS; f++) suite_case(suite, seed, false, MANY "inputs beyond, format %d", f);
    for (int f = 0; f < S_FORMATS; f++)
        suite_case(
            suite, seed, true,
            "b 3, s_q 3, h_q 5, format %d, lengths varied, extra 3, extra_lengths varied, sink finite, "
            "layout odd",
            f);
}

#define WIDE       "shape 5, " /* row of sparse_shapes: 2048 named */
#define BUSY_EXTRA "extra 4, " /* 1024 keys, 576 named */

struct subject sparse_decode = {
    .of = OP_SPARSE_DECODE,
    .maker = &sparse_maker,
    .values = SPARSE_AXES(AXIS_TEXT),
    .grid = {.possible = possible, .counts = counts},
    .choose = choose,
    .has = has,
    .leaves = leaves,
    /* Cases that pairs do not cover: many splits of one request, a split inside the extra cache, more than
     * two splits in batch-invariant mode, and offsets of more than 32 bits in every format. */
    .special =
        {"shape 4, b 1, s_q 3, h_q 16, format fp8_656, extra 7, inputs spiked, plan given, num_partitions 78",
         "shape 0, b 2, h_q 8, format fp8_584, lengths zero, extra 4, num_partitions 7",
         "shape 5, b 2, h_q 2, format fp8_584, extra 5, extra_lengths full, inputs steep, batch_invariant 1",
         "shape 5, h_q 2, format bf16, extra 6, inputs spiked, layout far",
         "shape 6, h_q 2, format fp8_656, extra 6, inputs spiked, layout far",
         "shape 6, h_q 2, format fp8_584, extra 6, inputs spiked, layout far",
         "shape 6, h_q 2, format fp8_528, extra 6, extra_format fp4_288, inputs spiked, layout far",
         "shape 6, h_q 2, format fp4_288_split, extra 6, extra_format fp8_528_split, layout far",
         "shape 6, h_q 2, format fp8_528_f32, extra 6, extra_format half, inputs spiked, layout far"},
    .more = more,
    .faults = ((FAULT(CACHE_SLOT) - 1) & ~(FAULT(MASK)) & ~(FAULT(MERGE_BASE))) | FAULT(BATCH),
    .fault_cases = fault_cases,
    .plant_before = plant_before,
    /* Every kernel supports FP8, so most cases use it. */
    .gpu =
        {.graph = {WIDE BUSY_EXTRA
                   "b 6, s_q 2, h_q 16, format fp8_656, lengths full, extra_lengths varied, layout padded"},
         .next = {"lengths varied", "lengths varied", "lengths varied"},
         .repeats = {WIDE "b 6, s_q 2, h_q 64, format fp8_656, lengths varied, codes scales",
                     "shape 1, b 128, h_q 128, format fp8_584, extra 6",
                     WIDE "b 7, s_q 3, h_q 11, format fp8_656, extra 6, batch_invariant 1",
                     WIDE BUSY_EXTRA "b 20, s_q 2, h_q 96, format bf16, lengths varied"},
         .positions = {WIDE
                       "b 64, s_q 2, h_q 16, format fp8_584, lengths varied, extra 6, extra_lengths varied"},
         .busy = WIDE "b 16, s_q 2, h_q 64, format fp8_656, lengths varied, plan given",
         .foreign = "shape 3, " BUSY_EXTRA
                    "b 9, s_q 2, h_q 64, format fp8_656, lengths varied, plan given, num_partitions 13"},
    .timed = {"shape 5, h_q 128, format bf16, indices all", "shape 5, h_q 128, format fp8_656, indices all",
              "shape 5, h_q 16, format fp8_656, indices all", "shape 5, h_q 128, format fp8_584, indices all",
              "shape 5, h_q 16, format fp8_584, indices all", "shape 5, h_q 128, format fp8_528, indices all",
              "shape 5, h_q 16, format fp8_528, indices all", "shape 5, h_q 128, format fp4_288, indices all",
              "shape 5, h_q 16, format fp4_288, indices all"},
};
