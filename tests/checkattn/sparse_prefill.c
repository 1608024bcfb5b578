/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill: its grid, its faults, and cases beside the grid.
 */
#include "sparse_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MANY_TOKENS = 70000 };

/* ---- The grid -------------------------------------------------------------------------------- */

/* What the kernel under test does not support: sources by width, two key heads, and data not aligned to 16
 * bytes. */
static struct {
    bool source[PREFILL_SOURCES][2], two_heads, unaligned;
} leaves;

static bool has_pages(int64_t source)
{
    return prefill_has_codes(source) || source == PREFILL_PAGES;
}

/* Byte formats have a fixed width; pages have one key head, and groups of heads are whole. h_q is -1 if
 * not chosen yet. */
static bool is_sound(int64_t source, int64_t d_qk, int64_t h_q, int64_t h_kv)
{
    if (prefill_has_codes(source) && d_qk != cache_formats[prefill_formats[source]].d_qk) return false;
    if (leaves.source[source][d_qk == 576]) return false;
    return h_kv == 1 || (!has_pages(source) && h_q != 1 && !leaves.two_heads);
}

/* A page of FP8_584 has 584 · page_size bytes. */
static bool is_unaligned(int64_t layout, int64_t source, int64_t page_size)
{
    return layout == LAYOUT_ODD || (prefill_formats[source] == FMLA_KV_FP8_584 && page_size % 2 == 1);
}

/* Returns true if the choice allows this source; if it is still open, one in which all chosen values
 * matter. */
static bool may_be_of(const int64_t *v, int64_t source)
{
    const int64_t codes = v[PREFILL_CODES], page_size = v[PREFILL_PAGE];
    if (v[PREFILL_SOURCE] >= 0) return v[PREFILL_SOURCE] == source;
    if (page_size >= 0 && !has_pages(source)) return false;
    if (page_size >= 0 && leaves.unaligned && is_unaligned(LAYOUT_CONTIGUOUS, source, page_size))
        return false;
    return codes < 0 || codes == S_CODES_NAN || prefill_has_codes(source);
}

/* With few keys of values ±1 some sums are almost 0, and tolerances do not cover the rounded weights of
 * those. */
static bool possible(const int64_t *v)
{
    if (v[PREFILL_INPUTS] == PREFILL_EXTREME && v[PREFILL_CODES] == S_CODES_EXTREME) return false;
    for (int64_t source = 0; source < PREFILL_SOURCES; source++)
        for (int64_t d_qk = 512; may_be_of(v, source) && d_qk <= 576; d_qk += 64)
            for (int64_t h_kv = 1; h_kv <= 2; h_kv++) {
                if (v[PREFILL_DQK] >= 0 && v[PREFILL_DQK] != d_qk) continue;
                if (v[PREFILL_HKV] >= 0 && v[PREFILL_HKV] != h_kv) continue;
                if (is_sound(source, d_qk, v[PREFILL_HQ], h_kv)) return true;
            }
    return false;
}

/* Without tokens no axis matters; pages and codes matter if there are any; conventions if they are
 * visible. Cases that the kernel refuses for their alignment only have to be refused. */
static bool counts(const int64_t *v, int i, int j)
{
    const int64_t source = v[PREFILL_SOURCE], results = v[PREFILL_RESULTS];
    const bool codes = i == PREFILL_CODES || j == PREFILL_CODES,
               inputs = i == PREFILL_INPUTS || j == PREFILL_INPUTS;
    const bool base = i == PREFILL_BASE || j == PREFILL_BASE,
               empty = i == PREFILL_EMPTY || j == PREFILL_EMPTY;
    const bool with_results = i == PREFILL_RESULTS || j == PREFILL_RESULTS;
    if (leaves.unaligned && v[PREFILL_LAYOUT] == LAYOUT_ODD)
        return i == PREFILL_LAYOUT || j == PREFILL_LAYOUT;
    if (leaves.unaligned && is_unaligned(LAYOUT_CONTIGUOUS, source, v[PREFILL_PAGE]))
        return i == PREFILL_SOURCE && j == PREFILL_PAGE;
    if (!v[PREFILL_SQ]) return i == PREFILL_SQ || j == PREFILL_SQ;
    if (v[PREFILL_INDICES] == S_INDICES_NONE && (codes || inputs))
        return i == PREFILL_INDICES || j == PREFILL_INDICES;
    if ((i == PREFILL_PAGE || j == PREFILL_PAGE) && !has_pages(source)) return i == PREFILL_SOURCE;
    if (codes && !prefill_has_codes(source) && i != PREFILL_SOURCE && v[PREFILL_CODES] != S_CODES_NAN)
        return false;
    if (base && results == PREFILL_RESULTS_NONE) return with_results;
    if (empty && (results == PREFILL_RESULTS_NONE || results == PREFILL_RESULTS_MAX)) return with_results;
    return true;
}

/* Row-keys of the generic kernel, whose vectors hold 16 rows; and the rows themselves. */
static double cost_on_cpu(const int64_t *v)
{
    const int64_t *shape = prefill_shapes[v[PREFILL_SHAPE]];
    const bool twice = v[PREFILL_INDICES] == S_INDICES_TWICE;
    const int64_t most = shape[0] * (1 + twice), keys = shape[1] < most ? shape[1] : most;
    const int64_t h_kv = v[PREFILL_HKV], group = v[PREFILL_HQ] / h_kv;
    const bool none = v[PREFILL_INDICES] == S_INDICES_NONE;
    const int64_t tiles = h_kv * ((group + 15) / 16);
    return 16.0 * (double)(v[PREFILL_SQ] * tiles * (none ? 1 : keys)) +
           case_cost_of_rows(1, v[PREFILL_SQ] * v[PREFILL_HQ], 0);
}

/* Bytes: the GPU is not the bottleneck. */
static double cost_on_gpu(const int64_t *v)
{
    const int64_t topk = prefill_shapes[v[PREFILL_SHAPE]][1];
    return (double)v[PREFILL_SQ] * (double)(2200 * v[PREFILL_HQ] + 4 * topk * v[PREFILL_HKV]);
}

static bool leaves_case(const struct test_case *c, bool *must)
{
    *must = false;
    return leaves.unaligned && is_unaligned(c->v[PREFILL_LAYOUT], c->v[PREFILL_SOURCE], c->v[PREFILL_PAGE]);
}

/* CPU kernels and the GPU's portable one support everything; a tuned kernel is asked, and its refusals are
 * reported. */
static void choose(struct subject *op, const struct run *run)
{
    memset(&leaves, 0, sizeof leaves);
    /* The portable kernel would need minutes. */
    const bool tuned = on_gpu(run) && strcmp(run->kernel, "cuda") != 0;
    const bool many = tuned && device_memory() >= (size_t)40 << 30;
    op->axis[PREFILL_SQ].count = many ? 6 : 5;
    if (!many && run->fault == FAULT_NONE)
        printf("  not of this kernel, or not on this device: s_q %d, but for one case of %d entries\n",
               MANY_TOKENS, on_gpu(run) ? 8 : 2);
    op->grid.cost = on_gpu(run) ? cost_on_gpu : cost_on_cpu, op->grid.dear = on_gpu(run) ? 4e8 : 4e5;
    if (!on_gpu(run) || !strcmp(run->kernel, "cuda")) return;
    int64_t v[GRID_AXES];
    case_values(&sparse_prefill, "s_q 1, h_q 128", v);
    for (int64_t source = 0; source < PREFILL_SOURCES; source++)
        for (int64_t d_qk = 512; d_qk <= 576; d_qk += 64) {
            v[PREFILL_SOURCE] = source, v[PREFILL_DQK] = d_qk;
            if (!is_sound(source, d_qk, 128, 1) || case_asked(&sparse_prefill, run, v) != FMLA_UNSUPPORTED)
                continue;
            leaves.source[source][d_qk == 576] = true;
            sparse_tell_left(&op->axis[PREFILL_DQK], 2, &v[PREFILL_DQK]);
        }
    v[PREFILL_SOURCE] = PREFILL_FLAT, v[PREFILL_DQK] = leaves.source[PREFILL_FLAT][1] ? 512 : 576;
    v[PREFILL_LAYOUT] = LAYOUT_ODD,
    leaves.unaligned = case_asked(&sparse_prefill, run, v) == FMLA_UNSUPPORTED;
    v[PREFILL_LAYOUT] = LAYOUT_CONTIGUOUS, v[PREFILL_HKV] = 2,
    leaves.two_heads = case_asked(&sparse_prefill, run, v) == FMLA_UNSUPPORTED;
    if (leaves.unaligned) printf("  not of this kernel: what is not aligned to 16 bytes\n");
    if (leaves.two_heads) printf("  not of this kernel: two key heads\n");
}

/* ---- Faults ---------------------------------------------------------------------------------- */

static bool plant_after(struct test_case *c, enum defect fault)
{
    const int64_t last = c->s_q - 1;
    int64_t seeing = 0, nan = 0; /* tokens */
    while (nan < last && !isnan(*(const float *)case_row(c, PREFILL(lse), 0, nan, 0))) nan++;
    while (seeing < last && !sparse_seen(c, 0, seeing, 0)) seeing++;
    switch (fault) {
    case FAULT_LSE_BASE: *(float *)case_row(c, PREFILL(lse), 0, seeing, 0) *= 1.44269504f; return true;
    case FAULT_MAX_SCALE:
        *(float *)case_row(c, PREFILL(max_logits), 0, seeing, 0) /= c->args.sparse_prefill.softmax_scale;
        return true;
    case FAULT_MAX_NAN:
        *(float *)case_row(c, PREFILL(max_logits), 0, nan, 0) = -6.9e29f;
        return isnan(*(const float *)case_row(c, PREFILL(lse), 0, nan, 0));
    default: return false;
    }
}

/* Cases that suit every fault. An lse is small if a key is alone. */
static void fault_cases(struct suite *suite)
{
    const struct run *run = &suite->run[0];
    static const char *const sources[] = {"fp8_656", "fp8_584, d_qk 512", "flat_gaps"};
    for (uint64_t i = 0; i < 9; i++)
        suite_case(suite, run->seed + i, false, "s_q 9, h_q 8, source %s, lengths varied, layout padded, %s",
                   sources[i % 3],
                   run->fault == FAULT_LSE_CANCELLED ? "inputs steep"
                   : run->fault == FAULT_MAX_NAN     ? "codes scales, inputs extreme"
                                                     : "codes scales");
}

/* ---- Cases beside the grid ------------------------------------------------------------------- */

/* Returns true if the kernel has that source. Of the two cases with many tokens the CPU runs the one with
 * shorter lists. */
static bool has(const struct run *run, const int64_t *v)
{
    if (v[PREFILL_SQ] == MANY_TOKENS && on_gpu(run) != (prefill_shapes[v[PREFILL_SHAPE]][1] > 2))
        return false;
    return is_sound(v[PREFILL_SOURCE], v[PREFILL_DQK], v[PREFILL_HQ], v[PREFILL_HKV]) &&
           (v[PREFILL_LAYOUT] != LAYOUT_FAR || has_far_memory(run, 64));
}

/* Compares the oracle's own strides and tokens with its rows. Then extreme scores in every format, all
 * rows compared: two full tiles of 64 heads; one and a quarter; the same with lists long enough for a GPU
 * to split them, into six splits and, of various lengths, into three; and so few tokens that the CPU
 * splits their lists for three threads. */
static void more(struct suite *suite)
{
    enum { FORMATS = 8 };
    static const char *const formats[FORMATS] = {"flat, d_qk 576", "flat",       "fp8_656, d_qk 576",
                                                 "fp8_584",        "fp8_528",    "fp4_288",
                                                 "fp4_288_split",  "fp8_528_f32"};
    static const char *const shapes[] = {
        "shape blocks, s_q 16, h_q 128", "shape blocks, s_q 9, h_q 80", "shape splits, s_q 9, h_q 80",
        "shape splits, s_q 20, h_q 80, lengths varied", "shape blocks, s_q 7, h_q 64, threads own"};
    const uint64_t seed = suite->run[0].seed;
    for (uint64_t i = 0; i <= 4 * FORMATS; i++) {
        suite_case(suite, seed + i, false, "d_qk 512, %s, source %s, inputs extreme, indices all",
                   shapes[i / FORMATS], formats[i % FORMATS]);
    }
    for (int i = 0; i < PREFILL_SOURCES; i++) {
        const int32_t d_qk = prefill_has_codes(i) && prefill_formats[i] != FMLA_KV_FP8_656 ? 512 : 576;
        suite_case(suite, seed, true,
                   "shape few, s_q 3, h_q 6, h_kv %d, d_qk %d, source %d, page_size 7, lengths varied, sink "
                   "finite, layout odd",
                   has_pages(i) ? 1 : 2, d_qk, i);
    }
}

#define WIDE "shape 4, " /* row of prefill_shapes: 1521 keys, 512 named */

struct subject sparse_prefill = {
    .of = OP_SPARSE_PREFILL,
    .maker = &prefill_maker,
    .values = PREFILL_AXES(AXIS_TEXT),
    .defaults = "h_q 16, d_qk 576",
    .grid = {.possible = possible, .counts = counts},
    .choose = choose,
    .has = has,
    .leaves = leaves_case,
    /* Cases that pairs do not cover: no keys, no lists, so many tokens that with long lists they need a
     * GPU, offsets of more than 32 bits, and scores beyond fp32. */
    .special = {"shape few, s_q 70000, h_q 1", "shape no_keys, s_q 9, lengths varied",
                "shape no_keys, s_q 9, source fp8_656, indices any", "shape no_lists, s_q 9, lengths beyond",
                "shape no_lists, s_q 9, d_qk 512, source fp8_584",
                "shape blocks, s_q 9, lengths varied, inputs beyond",
                "shape blocks, s_q 9, source fp8_656, lengths varied, inputs beyond",
                "shape far, s_q 9, inputs spiked, layout far",
                "shape far, s_q 9, h_kv 2, d_qk 512, layout far",
                "shape far_pages, s_q 9, source pages, page_size 53, layout far",
                "shape far_pages, s_q 9, source fp8_656, page_size 53, layout far",
                "shape far_pages, s_q 9, d_qk 512, source fp8_584, page_size 54, layout far",
                "shape far_pages, s_q 9, d_qk 512, source fp8_528, page_size 53, layout far",
                "shape far_pages, s_q 9, d_qk 512, source fp4_288_split, page_size 53, layout far",
                "shape pair, s_q 70000, h_q 1, d_qk 512"},
    .more = more,
    .faults = ((FAULT(CACHE_SLOT) - 1) & ~(FAULT(MASK) | FAULT(MERGE_BASE) | FAULT(NO_EXTRA))) |
              FAULT(LSE_BASE) | FAULT(MAX_SCALE) | FAULT(MAX_NAN),
    .fault_cases = fault_cases,
    .plant_before = sparse_plant,
    .plant_after = plant_after,
    .gpu = {.bases = {"h_q 128, source flat", "h_q 64, d_qk 512, source flat_gaps", "h_q 64, source fp8_656",
                      "h_q 128, d_qk 512, source fp8_584", "h_q 16, source pages"},
            .graph = {WIDE "s_q 70, lengths full"},
            .next = {"lengths beyond, indices blocks", "lengths varied, indices none",
                     "lengths varied, indices any"},
            .repeats = {WIDE "s_q 70, lengths varied", "shape 8, s_q 70, lengths varied, indices blocks"},
            .busy = WIDE "s_q 700, lengths varied, indices blocks"},
    .timed = {WIDE "s_q 32, h_q 128, source flat, indices all",
              WIDE "s_q 32, h_q 16, source flat, indices all",
              WIDE "s_q 32, h_q 128, source fp8_656, indices all",
              WIDE "s_q 32, h_q 128, source fp8_584, d_qk 512, indices all"},
};
