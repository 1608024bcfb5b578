/* SPDX-License-Identifier: MIT
 *
 * Tests cache convert against the oracle, byte by byte, from every format to every other of equal d_qk.
 * Both caches are random bytes, NaN included.
 */
#include "cache_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONVERT(member) TENSOR_cache_convert_##member

/* Returns the width of a format; 0: any, -1: not known yet. */
static int64_t width_of(int64_t format)
{
    if (format < 0) return -1;
    return is_16_bit(format) ? 0
                             : kv_layout_of((enum kv_format)(format - 1), 0).nope +
                                   kv_layout_of((enum kv_format)(format - 1), 0).rope;
}

/* bf16 and fp16 allow any size; byte formats have a fixed one. */
static bool possible(const int64_t *v)
{
    const int64_t from = width_of(v[V_FROM]), to = width_of(v[V_TO]), d_qk = v[V_D_QK];
    if (from > 0 && to > 0 && from != to) return false;
    const int64_t width = from > 0 ? from : to > 0 ? to : 0;
    if (width && d_qk >= 0 && d_qk != width) return false;
    const bool scaled = v[V_FROM] == FMLA_KV_FP8_576 || v[V_TO] == FMLA_KV_FP8_576,
               may_be = v[V_FROM] < 0 || v[V_TO] < 0;
    if (v[V_SCALE] > 0 && !scaled && !may_be) return false;
    if (v[V_SCALE] > 0 && (width == 512 || (d_qk >= 0 && d_qk != 576))) return false;
    return !(contiguous_pages(v[V_FROM]) && v[V_FROM_CACHE] == CACHE_SPREAD) &&
           !(contiguous_pages(v[V_TO]) && v[V_TO_CACHE] == CACHE_SPREAD);
}

static void choose(struct subject *op, const struct run *run)
{
    op->axis[V_GRAPH].count = on_gpu(run) ? 2 : 1;
    /* On a GPU it is unspecified which of several tokens in one slot remains. */
    op->axis[V_SLOTS].count = on_gpu(run) ? 2 : 3;
}

static float scale_of(const int64_t *v, int64_t format)
{
    return format == FMLA_KV_FP8_576 ? cache_scales[v[V_SCALE]] : 0.0f;
}

static void make(struct test_case *c)
{
    struct made_pages *pages = ((struct cache_case *)c)->pages;
    const int64_t *v = c->v;
    const struct cache_shape from = {v[V_FROM], v[V_D_QK], v[V_FROM_PAGE], v[V_FROM_CACHE]},
                             to = {v[V_TO], v[V_D_QK], v[V_TO_PAGE], v[V_TO_CACHE]};
    fmla_cache_convert_args *args = &c->args.cache_convert;
    c->captured = v[V_GRAPH] && v[V_TOKENS]; /* otherwise nothing is launched */
    args->src_format = (int32_t)v[V_FROM], args->dst_format = (int32_t)v[V_TO];
    args->src_scale = scale_of(v, v[V_FROM]), args->dst_scale = scale_of(v, v[V_TO]);
    cache_make_pages(c, CONVERT(src_cache), &from, &pages[0]);
    cache_make_pages(c, CONVERT(dst_cache), &to, &pages[1]);
    ((struct cache_case *)c)->caches = 2, c->d_qk = kv_width(&pages[1].layout);
    /* A source slot may be read twice; another list says which tokens are skipped. */
    cache_make_slots(c, CONVERT(src_slots), LAYOUT_CONTIGUOUS, &pages[0],
                     v[V_SLOTS] == SLOTS_DISTINCT ? SLOTS_TWICE : v[V_SLOTS], on_gpu(c->run));
    cache_make_slots(c, CONVERT(dst_slots), LAYOUT_CONTIGUOUS, &pages[1], v[V_SLOTS], on_gpu(c->run));
    int64_t *slot = guarded_at(&c->tensor[CONVERT(src_slots)], 0, 0, 0, 0);
    for (int64_t t = 0; v[V_SLOTS] == SLOTS_SKIPPED && t + 1 < v[V_TOKENS]; t += 6) slot[t] = -1;
}

/* ---- Faults ---------------------------------------------------------------------------------- */

static bool plant_after(struct test_case *c, enum defect fault)
{
    const struct guarded *g = &c->tensor[CONVERT(dst_cache)];
    const struct made_pages *to = &((const struct cache_case *)c)->pages[1];
    const int64_t element = is_16_bit(c->v[V_TO]) ? 2 : 1;
    const bool gap = fault == FAULT_CACHE_GAP;
    if (gap && c->v[V_TO_CACHE] != CACHE_PADDED) return false;
    if (!gap && (fault != FAULT_CACHE_VALUE || to->slots < 2)) return false;
    g->memory[GUARDED_FRONT + (gap ? g->strides[0] * element - 1 : to->layout.token_bytes / 2)] ^= 1;
    return true;
}

/* Swaps two tokens. */
static bool plant_before(struct test_case *c, enum defect fault, struct patch *patch)
{
    if (fault != FAULT_CACHE_SLOT || c->v[V_TOKENS] < 3 || c->v[V_SLOTS] != SLOTS_DISTINCT) return false;
    int64_t *slot = guarded_at(&c->tensor[CONVERT(dst_slots)], 1, 0, 0, 0);
    const int64_t swapped[2] = {slot[1], slot[0]};
    return plant(patch, slot, swapped, sizeof swapped);
}

/* ---- Cases beside the grid ------------------------------------------------------------------- */

/* Every pair of formats of one d_qk, and far pages on either side. */
static void more(struct suite *suite)
{
    for (int64_t from = FMLA_KV_BF16; from <= FMLA_KV_FP8_528_F32; from++)
        for (int64_t to = FMLA_KV_BF16; to <= FMLA_KV_FP8_528_F32; to++) {
            const uint64_t seed = suite->run[0].seed + (uint64_t)(from * 16 + to);
            const int64_t of_from = width_of(from), of_to = width_of(to);
            const int64_t d_qk = of_from ? of_from : of_to ? of_to : 576;
            if (of_from && of_to && of_from != of_to) continue;
            suite_case(suite, seed, false,
                       "from %d, to %d, tokens 131, page_size from 64, page_size to 64, d_qk %d, scale %d, "
                       "source %s, cache %s",
                       (int)from, (int)to, (int)d_qk, d_qk == 576 ? 2 : 0, "dense",
                       (from + to) % 3 ? "dense" : "far");
            suite_case(suite, seed, false,
                       "from %d, to %d, tokens 29, page_size from 61, page_size to 2, d_qk %d, source %s, "
                       "slots skipped",
                       (int)from, (int)to, (int)d_qk, (from + to) % 3 ? "dense" : "far");
        }
}

static bool has(const struct run *run, const int64_t *v)
{
    return (v[V_FROM_CACHE] != CACHE_FAR && v[V_TO_CACHE] != CACHE_FAR) || has_far_memory(run, 16);
}

static const struct maker maker = {.size = sizeof(struct cache_case), .make = make, .compare = cache_compare};

struct subject cache_convert = {
    .of = OP_CACHE_CONVERT,
    .maker = &maker,
    .values = CONVERT_AXES(AXIS_TEXT),
    .choose = choose,
    .grid = {.possible = possible, .counts = cache_counts, .cost = cache_cost, .dear = 5000},
    .has = has,
    .more = more,
    .faults = FAULT(CACHE_SLOT) | FAULT(CACHE_VALUE) | FAULT(CACHE_GAP),
    .plant_after = plant_after,
    .plant_before = plant_before};
