/* SPDX-License-Identifier: MIT
 *
 * Tests cache append and gather against the oracle, byte by byte. A case's cache is one block of random
 * memory, including canaries and gaps between pages; every byte of it is compared with the oracle's result
 * on a copy, so that every byte that is wrong, missing or not the call's to write is detected. A gathered
 * NaN only has to be a NaN.
 */
#include "cache_case.h"
#include "elements.h"
#include "kvformat.h"
#include "norm_edge.h"
#include "num.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define APPEND(member) TENSOR_cache_append_##member
#define GATHER(member) TENSOR_cache_gather_##member

const float cache_scales[CACHE_SCALES] = {0.0f, 0.25f, 0.037f, 3.1e-33f, 2.7e31f};

/* ---- The grid ------------------------------------------------------------------------------- */

/* bf16 and fp16 allow any size, FP8_576 any scale; other formats use the first value of the list. */
static bool possible(const int64_t *v)
{
    const int64_t format = v[C_FORMAT];
    const bool known = format >= 0, sized = v[C_D_QK] >= 0 && v[C_D_QK] != 512, scaled = v[C_SCALE] > 0;
    if (sized && (scaled || (known && !is_16_bit(format)))) return false;
    if (scaled && known && format != FMLA_KV_FP8_576) return false;
    if (sized && v[C_D_QK] <= 64 && v[C_ROPE] == 1) return false;
    if (!v[C_TURN] && v[C_POSITIONS] > 0) return false;
    if (sized && v[C_D_QK] != 576 && (v[C_NORM] > 0 || v[C_TURN] > 0 || v[C_POSITIONS] > 0)) return false;
    return !(contiguous_pages(format) && v[C_CACHE] == CACHE_SPREAD);
}

bool cache_counts(const int64_t *v, int i, int j)
{
    return v[C_TOKENS] || i == C_TOKENS || j == C_TOKENS;
}

double cache_cost(const int64_t *v)
{
    return (double)v[C_TOKENS];
}

static void choose(struct subject *op, const struct run *run)
{
    const bool gather = op == &cache_gather;
    op->axis[C_GRAPH].count = on_gpu(run) ? 2 : 1;
    op->axis[C_ROPE].count = gather ? 1 : 2;
    for (int i = C_NORM; i <= C_POSITIONS; i++) op->axis[i].count = gather ? 1 : i == C_POSITIONS ? 2 : 3;
    /* On a GPU it is unspecified which of several tokens in one slot remains; reading a slot twice is
     * allowed. */
    op->axis[C_SLOTS].count = on_gpu(run) && !gather ? 2 : 3;
}

/* ---- A case --------------------------------------------------------------------------------- */

static const fmla_dtype dtype_u8 = {FMLA_TYPE_UINT, 8, 1};
static const fmla_dtype *const elements[] = {&dtype_bf16, &dtype_fp16, &dtype_f32};

static struct guarded *cache_of(struct test_case *c)
{
    return &c->tensor[((const struct cache_case *)c)->pages->cache];
}

static int64_t *slots_of(struct test_case *c)
{
    return guarded_at(&c->tensor[((const struct cache_case *)c)->pages->list], 0, 0, 0, 0);
}

void cache_make_pages(struct test_case *c, int which, const struct cache_shape *shape_of,
                      struct made_pages *made)
{
    struct guarded *g = &c->tensor[made->cache = which];
    const bool wide = is_16_bit(shape_of->format);
    const int64_t element = wide ? 2 : 1, kind = shape_of->kind, page_size = shape_of->page_size;
    made->layout = kv_layout_of((enum kv_format)(shape_of->format - 1), (int32_t)shape_of->d_qk);
    const int64_t pages = (c->tokens + c->tokens / 8 + page_size) / page_size + 1;
    made->slots = pages * page_size;
    const int64_t of_slot = made->layout.page_bytes_a_slot / element;
    const int64_t slot_stride = of_slot + (kind == CACHE_SPREAD ? 48 : 0);
    const int64_t gap = kind == CACHE_PADDED ? 64 : kind == CACHE_ODD ? 3 : kind == CACHE_SPREAD ? 16 : 0;
    const int64_t page_stride = page_size * slot_stride + gap;
    const int64_t shape[4] = {pages, page_size, 1, of_slot},
                  strides[4] = {page_stride, slot_stride, slot_stride, 1};
    const fmla_dtype dtype = !wide ? dtype_u8 : shape_of->format == FMLA_KV_BF16 ? dtype_bf16 : dtype_fp16;
    const int64_t shift = kind == CACHE_ODD ? element : 0;
    guarded_make(g, dtype, 1, &(int64_t){pages * page_stride}, LAYOUT_CONTIGUOUS);
    memcpy(g->shape, shape, sizeof shape), memcpy(g->strides, strides, sizeof strides);
    g->tensor.ndim = 4, g->tensor.byte_offset = (uint64_t)shift, g->tensor.strides = g->strides;
    const size_t drawn = g->bytes + 2 * (size_t)GUARDED_FRONT;
    for (size_t i = 0; i < g->whole; i++)
        g->memory[i] = i < drawn ? (unsigned char)random_u64(&c->random) : 0;
    for (int64_t s = 0; made->layout.scale == KV_SCALE_F32 && s < made->slots; s++)
        for (int i = 0; i < made->layout.scales; i++) {
            const float scale = num_float((uint32_t)random_between(&c->random, 1, 0x7f7fffff));
            memcpy(g->memory + GUARDED_FRONT + shift + s / page_size * page_stride +
                       s % page_size * slot_stride + made->layout.scale_offset + 4 * i,
                   &scale, sizeof scale);
        }
    if (is_result(c->op, which)) g->initial = memcpy(must_alloc(g->whole), g->memory, g->whole);
    c->view[which] = g->tensor;
    case_name(c, which);
    if (kind == CACHE_FAR) case_spread(c, which, (size_t)1 << 31, ((size_t)1 << 31) + 4096);
}

static float hostile(struct random_state *random)
{
    static const uint32_t bits[] = {0x7fc00000, 0xffc00000, 0x7f810000, 0xffbfffff, 0x7f800000, 0xff800000,
                                    0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x7f7fffff, 0xff7f0000,
                                    0x477ff000, 0x477fefff, 0x33000000, 0x33000001, 0x38800000, 0x387fffff,
                                    0x43e80000, 0xc3e80001, 0x43e00000, 0x3f600000, 0x3f600001, 0x3a800000};
    const int64_t which = random_between(random, 0, 3 * COUNT_OF(bits));
    return which < COUNT_OF(bits) ? num_float(bits[which]) : random_normal(random);
}

/* Sets element `number` of a case. VALUES_ALL: every 16-bit pattern in order, so that values of a group
 * have similar magnitudes. */
static void put_value(char *at, fmla_dtype dtype, int64_t values, int64_t number, float size,
                      struct random_state *random)
{
    const uint16_t pattern = (uint16_t)number;
    const uint32_t wide = (uint32_t)pattern << 16 | (uint32_t)(random_u64(random) & 0xffff);
    float x = size * random_normal(random);
    if (values == VALUES_HOSTILE) x = hostile(random);
    if (values == VALUES_ALL) x = num_float(wide);
    if (values == VALUES_ALL && dtype.bits == 16)
        memcpy(at, &pattern, sizeof pattern);
    else
        element_store(at, dtype, 0, x);
}

/* Returns the address of value i of a token, whose last values may be in a tensor of their own. */
static char *value_at(const struct test_case *c, int64_t token, int64_t i)
{
    const int64_t of_latent = c->tensor[APPEND(latent)].shape[1];
    return i < of_latent ? guarded_at(&c->tensor[APPEND(latent)], token, i, 0, 0)
                         : guarded_at(&c->tensor[APPEND(rope)], token, i - of_latent, 0, 0);
}

static void fill_vectors(struct test_case *c)
{
    const int64_t *v = c->v;
    for (int64_t t = 0; t < v[C_TOKENS]; t++) {
        float size = 1.0f;
        for (int64_t i = 0; i < c->d_qk; i++) {
            if (i % 64 == 0) size = ldexpf(1.0f, (int)random_between(&c->random, -20, 12));
            put_value(value_at(c, t, i), c->dtype, v[C_VALUES], t * c->d_qk + i, size, &c->random);
        }
    }
}

/* Makes the norm and rotation of the values. Positions are random, so some repeat; on a GPU, and for
 * skipped tokens, some are outside the table. */
static void make_norm(struct test_case *c, enum layout layout)
{
    const int64_t *v = c->v;
    const float eps = v[C_NORM] == NORM_EPS ? 1e-6f : 0.0f;
    c->normed = 512;
    case_tensor(c, APPEND(norm_weight), layout == LAYOUT_ODD ? LAYOUT_ODD : LAYOUT_CONTIGUOUS, true);
    *(float *)op_option(c->op->of, &c->args, "norm_eps") = eps;
    char *weight = guarded_at(&c->tensor[APPEND(norm_weight)], 0, 0, 0, 0);
    for (int64_t i = 0; i < c->normed; i++, weight += c->dtype.bits / 8)
        put_value(weight, c->dtype, v[C_VALUES] == VALUES_HOSTILE ? VALUES_HOSTILE : VALUES_NORMAL, i, 1.0f,
                  &c->random);
}

/* Replaces the first token, the weights and norm_eps by ones for which the order of the sum matters. */
static void make_norm_edge(struct test_case *c)
{
    float values[NORM_EDGE_WIDTH], weights[NORM_EDGE_WIDTH];
    const fmla_dtype cache = c->v[C_FORMAT] == FMLA_KV_BF16 ? dtype_bf16 : dtype_fp16;
    norm_edge_make(&c->random, c->dtype, cache, values, weights,
                   (float *)op_option(c->op->of, &c->args, "norm_eps"));
    char *const weight = guarded_at(&c->tensor[APPEND(norm_weight)], 0, 0, 0, 0);
    for (int64_t i = 0; i < NORM_EDGE_WIDTH; i++) {
        element_store(value_at(c, 0, i), c->dtype, 0, values[i]);
        element_store(weight, c->dtype, i, weights[i]);
    }
}

static int64_t position_outside(struct random_state *random, bool wide, int64_t positions)
{
    const int64_t outside[] = {positions, -1, wide ? INT64_MIN : INT32_MIN,
                               wide ? INT64_C(1) << 32 : INT32_MAX};
    return outside[random_between(random, 0, 3)];
}

static void make_turns(struct test_case *c, enum layout layout)
{
    const int64_t *v = c->v, *slot = slots_of(c);
    c->max_positions = 333, c->turned = 64, c->wide = v[C_POSITIONS];
    case_tensor(c, APPEND(positions), layout == LAYOUT_ODD ? LAYOUT_ODD : LAYOUT_CONTIGUOUS, true);
    case_tensor(c, APPEND(rope_table), layout, true);
    *(int32_t *)op_option(c->op->of, &c->args, "rope_pairs") = (int32_t)v[C_TURN];
    for (int64_t t = 0; t < c->max_positions; t++) {
        float *row = guarded_at(&c->tensor[APPEND(rope_table)], t, 0, 0, 0);
        fmla_rope_table(row, 1, 1e4); /* too regular for every position */
        for (int i = 0; t && i < 64; i++)
            row[i] = v[C_VALUES] == VALUES_HOSTILE ? hostile(&c->random) : 0.7f * random_normal(&c->random);
    }
    char *at = guarded_at(&c->tensor[APPEND(positions)], 0, 0, 0, 0);
    for (int64_t t = 0; t < v[C_TOKENS]; t++, at += c->wide ? 8 : 4) {
        int64_t position = random_between(&c->random, 0, c->max_positions - 1);
        if (slot[t] == -1 || (on_gpu(c->run) && v[C_SLOTS] == SLOTS_SKIPPED && t % 7 == 3))
            position = position_outside(&c->random, c->wide, c->max_positions);
        const int32_t narrow = (int32_t)position;
        memcpy(at, c->wide ? (const void *)&position : &narrow, c->wide ? 8 : 4);
    }
}

static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b) {
        const int64_t rest = a % b;
        a = b, b = rest;
    }
    return a;
}

void cache_make_slots(struct test_case *c, int which, enum layout layout, struct made_pages *pages,
                      int64_t kind, bool any)
{
    static const int64_t outside[] = {-2, INT64_MIN, INT64_MAX, INT64_C(1) << 32};
    const int64_t slots = pages->slots;
    case_tensor(c, pages->list = which, layout == LAYOUT_ODD ? LAYOUT_ODD : LAYOUT_CONTIGUOUS, true);
    int64_t step = random_between(&c->random, 1, slots);
    while (common_divisor(step, slots) != 1) step++;
    const int64_t first = random_between(&c->random, 0, slots - 1);
    int64_t *slot = guarded_at(&c->tensor[which], 0, 0, 0, 0);
    for (int64_t t = 0; t < c->tokens; t++) {
        slot[t] = (first + t * step) % slots;
        if (kind == SLOTS_SKIPPED && t % 3 == 1)
            slot[t] = any && t % 2 ? (t % 5 ? outside[t % 4] : slots) : -1;
        if (kind == SLOTS_TWICE && t % 2) slot[t] = slot[t / 2];
    }
}

static void make(struct test_case *c)
{
    struct cache_case *k = (struct cache_case *)c;
    const int64_t *v = c->v;
    const bool gather = c->op == &cache_gather;
    const enum layout layout = (enum layout)v[C_VECTORS];
    const float scale = v[C_FORMAT] == FMLA_KV_FP8_576 ? cache_scales[v[C_SCALE]] : 0.0f;
    c->captured = v[C_GRAPH] && v[C_TOKENS]; /* otherwise nothing is launched */
    *(int32_t *)op_option(c->op->of, &c->args, "kv_format") = (int32_t)v[C_FORMAT];
    *(float *)op_option(c->op->of, &c->args, "cache_scale") = scale;
    const struct cache_shape pages = {v[C_FORMAT], v[C_D_QK], c->page_size, v[C_CACHE]};
    cache_make_pages(c, gather ? (int)GATHER(kv_cache) : (int)APPEND(kv_cache), &pages, k->pages);
    k->caches = 1, c->d_qk = kv_width(&k->pages->layout);
    c->dtype = *elements[v[C_ELEMENT]], c->rope = 64, c->width = v[C_ROPE] ? c->d_qk - 64 : c->d_qk;
    cache_make_slots(c, gather ? (int)GATHER(slots) : (int)APPEND(slot_mapping), layout, k->pages, v[C_SLOTS],
                     gather || on_gpu(c->run));
    if (gather) {
        case_tensor(c, GATHER(out), layout, true);
        return;
    }
    case_tensor(c, APPEND(latent), layout, true);
    if (v[C_ROPE]) case_tensor(c, APPEND(rope), layout, true);
    fill_vectors(c);
    if (v[C_NORM]) make_norm(c, layout);
    if (v[C_NORM] == NORM_EDGE) make_norm_edge(c);
    if (v[C_TURN]) make_turns(c, layout);
}

/* ---- Faults ---------------------------------------------------------------------------------- */

/* Returns the address of a token of the call in the cache; NULL if there is none. */
static unsigned char *some_token(struct test_case *c)
{
    const struct made_pages *pages = ((const struct cache_case *)c)->pages;
    const struct guarded *g = cache_of(c);
    const int64_t slot = c->tokens ? slots_of(c)[c->tokens / 2] : -1;
    if (slot < 0 || slot >= pages->slots) return NULL;
    const int64_t element = is_16_bit(c->v[C_FORMAT]) ? 2 : 1, at = slot % c->page_size;
    return (unsigned char *)guarded_at(g, slot / c->page_size, 0, 0, 0) +
           at * (pages->layout.scale_bytes ? pages->layout.token_bytes : g->strides[1] * element);
}

static bool plant_after(struct test_case *c, enum defect fault)
{
    const struct kv_layout *layout = &((const struct cache_case *)c)->pages->layout;
    const int64_t *v = c->v;
    struct guarded *g = cache_of(c);
    unsigned char *token = some_token(c), *planted = NULL;
    switch (fault) {
    case FAULT_CACHE_VALUE: planted = token; break;
    case FAULT_CACHE_SCALE:
        if (token && layout->scale == KV_SCALE_F32) planted = token + layout->scale_offset + 3;
        break;
    case FAULT_CACHE_GAP:
        if (v[C_CACHE] == CACHE_PADDED)
            planted = g->memory + GUARDED_FRONT + g->strides[0] * (is_16_bit(v[C_FORMAT]) ? 2 : 1) - 1;
        break;
    case FAULT_GATHER_VALUE:
        if (v[C_TOKENS] > 1)
            planted = guarded_at(&c->tensor[GATHER(out)], v[C_TOKENS] / 2, c->d_qk / 2, 0, 0);
        break;
    case FAULT_GATHER_ZERO:
        if (v[C_TOKENS] > 1 && v[C_SLOTS] == SLOTS_SKIPPED)
            planted = guarded_at(&c->tensor[GATHER(out)], 1, 0, 0, 0);
        break;
    default: break;
    }
    if (planted) *planted ^= 1;
    return planted != NULL;
}

/* Swaps two tokens; with other values they might be equal. */
static bool plant_before(struct test_case *c, enum defect fault, struct patch *patch)
{
    const int64_t *v = c->v;
    if (fault != FAULT_CACHE_SLOT || v[C_TOKENS] < 2 || v[C_SLOTS] != SLOTS_DISTINCT ||
        v[C_VALUES] != VALUES_NORMAL)
        return false;
    int64_t *slot = slots_of(c);
    const int64_t swapped[2] = {slot[1], slot[0]};
    return plant(patch, slot, swapped, sizeof swapped);
}

/* ---- Comparison ------------------------------------------------------------------------------ */

/* Compares every vector with the oracle's, in separate memory. */
static void compare_gathered(struct test_case *c, uint64_t inputs, struct oracle *oracle)
{
    (void)inputs, (void)oracle;
    const int64_t *v = c->v, bytes = v[C_ELEMENT] == 2 ? 4 : 2;
    struct guarded *out = &c->tensor[GATHER(out)], theirs;
    union call_args args = c->args;
    guarded_make(&theirs, out->tensor.dtype, 2, out->shape, LAYOUT_CONTIGUOUS);
    args.cache_gather.out = &theirs.tensor, args.cache_gather.kernel = "ref";
    args.cache_gather.kv_cache = &cache_of(c)->tensor; /* the near copy */
    must(c, fmla_cache_gather(&args.cache_gather));
    int64_t wrong = 0, token = 0, value = 0;
    for (int64_t t = 0; t < v[C_TOKENS]; t++, c->tally->rows++)
        for (int64_t i = 0; i < c->d_qk; i++) {
            const char *mine = (const char *)guarded_at(out, t, 0, 0, 0) + i * bytes,
                       *expected = (const char *)guarded_at(&theirs, t, 0, 0, 0) + i * bytes;
            if (!memcmp(mine, expected, (size_t)bytes)) continue;
            if (isnan(guarded_value(out, mine)) && isnan(guarded_value(out, expected))) continue;
            if (!wrong++) token = t, value = i;
        }
    if (wrong)
        failed(c, "%lld values differ from the oracle's, the first is value %lld of token %lld",
               (long long)wrong, (long long)value, (long long)token);
    guarded_free(&theirs);
}

/* Returns false if append is to rotate a token by a position that does not exist. */
static bool is_turned(const struct test_case *c, int64_t token)
{
    if (c->op != &cache_append || !c->v[C_TURN]) return true;
    const char *at = guarded_at(&c->tensor[APPEND(positions)], 0, 0, 0, 0);
    int64_t position;
    int32_t narrow;
    memcpy(&narrow, at + 4 * token, sizeof narrow), position = narrow;
    if (c->wide) memcpy(&position, at + 8 * token, sizeof position);
    return position >= 0 && position < c->max_positions;
}

void cache_compare(struct test_case *c, uint64_t inputs, struct oracle *oracle)
{
    (void)inputs, (void)oracle;
    const struct cache_case *k = (const struct cache_case *)c;
    const int written = c->op->result[0];
    const struct guarded *g = &c->tensor[written];
    unsigned char *theirs = must_alloc(g->whole);
    int64_t *all = must_alloc(2 * (size_t)c->tokens * sizeof *all);
    union call_args args = c->args;
    fmla_tensor cache = g->tensor, lists[2];
    for (int i = 0; i < k->caches; i++) {
        const struct made_pages *pages = &k->pages[i];
        const int64_t *given = guarded_at(&c->tensor[pages->list], 0, 0, 0, 0);
        int64_t *slots = all + i * c->tokens;
        for (int64_t t = 0; t < c->tokens; t++)
            slots[t] = given[t] < 0 || given[t] >= pages->slots || !is_turned(c, t) ? -1 : given[t];
        lists[i] = c->view[pages->list], lists[i].data = slots, lists[i].byte_offset = 0;
        set_tensor(c->op, &args, pages->list, &lists[i]);
        set_tensor(c->op, &args, pages->cache, &c->tensor[pages->cache].tensor); /* the near copy */
    }
    memcpy(theirs, g->initial, g->whole);
    cache.data = theirs + GUARDED_FRONT;
    set_tensor(c->op, &args, written, &cache), set_pointer(c->op, &args, "kernel", "ref");
    must(c, op_functions[c->op->of].run(&args));
    c->tally->rows += c->tokens;
    int64_t wrong = 0;
    size_t first = 0;
    for (size_t i = 0; i < g->whole; i++)
        if (g->memory[i] != theirs[i] && !wrong++) first = i;
    if (wrong)
        failed(c,
               "%lld bytes of the cache and around it differ from the oracle's, the first is byte %lld: %#x, "
               "not %#x",
               (long long)wrong, (long long)first - GUARDED_FRONT, g->memory[first], theirs[first]);
    free(theirs), free(all);
}

/* ---- Cases beside the grid ------------------------------------------------------------------- */

/* Every pattern of bf16 and fp16, and as many of fp32, to (or from) every format; then far pages. */
static void more(struct suite *suite)
{
    const bool gather = suite->op == &cache_gather;
    const uint64_t seed = suite->run[0].seed;
    for (int format = FMLA_KV_BF16; format <= FMLA_KV_FP8_528_F32; format++)
        for (int element = 0; element < 3; element++)
            for (int scale = 0; scale < (format == FMLA_KV_FP8_576 ? CACHE_SCALES : 1); scale++) {
                suite_case(suite, seed + (uint64_t)format, false,
                           "format %d, vectors %d, tokens 129, page_size 64, d_qk 576, scale %d, rope apart "
                           "%d, values all",
                           format, element, scale, !gather && element);
            }
    static const char *const changed[] = {"norm with_eps", "turned interleaved", "turned halves",
                                          "norm without_eps, turned interleaved",
                                          "norm with_eps, turned halves, positions i64"};
    for (int format = FMLA_KV_BF16; !gather && format <= FMLA_KV_FP8_528_F32; format++)
        for (int i = 0; i < 30; i++) { /* few tokens, and enough that a warp may take several */
            suite_case(
                suite, seed + (uint64_t)format, false,
                "format %d, vectors %d, tokens %d, page_size 64, d_qk 576, rope apart %d, values all, %s",
                format, i % 3, i < 15 ? 131 : 4097, i % 2, changed[i % 15 / 3]);
        }
    for (int i = 0; !gather && i < 24; i++) { /* both sides of the sum are drawn several times */
        suite_case(suite, seed + (uint64_t)i, false,
                   "format %d, vectors %d, tokens %d, page_size 64, d_qk %d, rope apart %d, norm edge",
                   FMLA_KV_BF16 + i % 2, i / 2 % 3, i / 6 % 2 ? 4097 : 3, i / 12 ? 512 : 576, i / 12);
    }
    for (int format = FMLA_KV_FP8_656; format <= FMLA_KV_FP8_528_F32; format++) {
        suite_case(suite, seed + (uint64_t)format, false,
                   "format %d, tokens 128, page_size 64, cache far, slots skipped", format);
    }
}

static bool has(const struct run *run, const int64_t *v)
{
    return v[C_CACHE] != CACHE_FAR || has_far_memory(run, 16);
}

static const struct maker append_maker = {.size = sizeof(struct cache_case),
                                          .make = make,
                                          .compare = cache_compare},
                          gather_maker = {
                              .size = sizeof(struct cache_case), .make = make, .compare = compare_gathered};

#define CACHE_SUBJECT                                                                                        \
    .values = CACHE_AXES(AXIS_TEXT), .choose = choose,                                                       \
    .grid = {.possible = possible, .counts = cache_counts, .cost = cache_cost, .dear = 5000}, .has = has,    \
    .more = more, .plant_after = plant_after

struct subject cache_append = {CACHE_SUBJECT, .of = OP_CACHE_APPEND, .maker = &append_maker,
                               .faults = FAULT(CACHE_SLOT) | FAULT(CACHE_VALUE) | FAULT(CACHE_SCALE) |
                                         FAULT(CACHE_GAP),
                               .plant_before = plant_before};
struct subject cache_gather = {CACHE_SUBJECT, .of = OP_CACHE_GATHER, .maker = &gather_maker,
                               .faults = FAULT(GATHER_VALUE) | FAULT(GATHER_ZERO)};
