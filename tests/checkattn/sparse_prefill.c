/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill: the grid, and what is checked in each case. Cases are run twice through the real dispatch and compared
 * with the oracle.
 */
#include "grid.h"
#include "prefill_case.h"
#include "prefill_device.h"
#include "timing.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MANY_TOKENS = 70000 };

static struct axis axes[P_AXES] = {
    {"shape", PREFILL_SHAPES, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}},
    {"s_q", 6, {0, 1, 62, 213, 1234, MANY_TOKENS}},
    {"h_q", 5, {1, 16, 64, 80, 128}},
    {"h_kv", 2, {1, 2}},
    {"d_qk", 2, {512, 576}},
    {"source", P_SOURCES, {P_FLAT, P_FLAT_GAPS, P_FP8_656, P_FP8_584, P_PAGES}},
    {"page_size", 4, {64, 1, 61, 576}},
    {"lengths", 3, {S_LENGTHS_NONE, S_LENGTHS_VARIED, S_LENGTHS_BEYOND}},
    {"indices",
     6,
     {S_INDICES_SOME, S_INDICES_ALL, S_INDICES_NONE, S_INDICES_TWICE, S_INDICES_BLOCKS, S_INDICES_ANY}},
    {"codes", 4, {S_CODES_WRITTEN, S_CODES_SCALES, S_CODES_EXTREME, S_CODES_NAN}},
    {"inputs", 4, {S_NORMAL, S_SPIKED, S_STEEP, P_EXTREME}},
    {"sink", 3, {S_SINK_NONE, S_SINK_FINITE, S_SINK_INFINITE}},
    {"lse_empty", 2, {0, 1}},
    {"log_base", 2, {0, 2}},
    {"results", 4, {P_RESULTS_BOTH, P_RESULTS_LSE, P_RESULTS_MAX, P_RESULTS_NONE}},
    {"layout", 4, {LAYOUT_CONTIGUOUS, LAYOUT_PADDED, LAYOUT_SWAPPED, LAYOUT_ODD}},
    {"threads", 3, {THREADS_BUILT_IN, THREADS_ONE, THREADS_OWN}},
};

/* What the kernel under test leaves to others: sources of a width, two key heads, and what is not aligned to 16 bytes. */
static struct {
    bool source[P_SOURCES][2], two_heads, unaligned;
} leaves;

static int64_t value_of(const int *choice, int axis)
{
    return choice[axis] < 0 ? -1 : axes[axis].values[choice[axis]];
}

static bool is_fp8(int64_t source)
{
    return source == P_FP8_656 || source == P_FP8_584;
}

static bool has_pages(int64_t source)
{
    return is_fp8(source) || source == P_PAGES;
}

/* FP8 has a width of its own; pages have one key head, and a group of heads is whole. h_q is -1 where it is not chosen yet. */
static bool is_sound(int64_t source, int64_t d_qk, int64_t h_q, int64_t h_kv)
{
    if ((source == P_FP8_656 && d_qk == 512) || (source == P_FP8_584 && d_qk == 576)) return false;
    if (leaves.source[source][d_qk == 576]) return false;
    return h_kv == 1 || (!has_pages(source) && h_q != 1 && !leaves.two_heads);
}

/* A page of FP8_584 has 584 · page_size bytes. */
static bool is_unaligned(int64_t layout, int64_t source, int64_t page_size)
{
    return layout == LAYOUT_ODD || (source == P_FP8_584 && page_size % 2 == 1);
}

/* May the choice have this source? Where it is still open, it is one in which all that is chosen plays a part. */
static bool may_be_of(const int *choice, int64_t source)
{
    const int64_t codes = value_of(choice, P_CODES), page_size = value_of(choice, P_PAGE);
    if (choice[P_SOURCE] >= 0) return value_of(choice, P_SOURCE) == source;
    if (page_size >= 0 && !has_pages(source)) return false;
    if (page_size >= 0 && leaves.unaligned && is_unaligned(LAYOUT_CONTIGUOUS, source, page_size))
        return false;
    return codes < 0 || codes == S_CODES_NAN || is_fp8(source);
}

/* Of few keys with values of ±1 some sums are all but 0, and tolerances are not for the rounded weights of those. */
static bool possible(const int *choice)
{
    if (value_of(choice, P_INPUTS) == P_EXTREME && value_of(choice, P_CODES) == S_CODES_EXTREME) return false;
    for (int64_t source = 0; source < P_SOURCES; source++)
        for (int64_t d_qk = 512; may_be_of(choice, source) && d_qk <= 576; d_qk += 64)
            for (int64_t h_kv = 1; h_kv <= 2; h_kv++) {
                if (choice[P_DQK] >= 0 && value_of(choice, P_DQK) != d_qk) continue;
                if (choice[P_HKV] >= 0 && value_of(choice, P_HKV) != h_kv) continue;
                if (is_sound(source, d_qk, value_of(choice, P_HQ), h_kv)) return true;
            }
    return false;
}

/* Without a token nothing plays a part; pages and codes do where there are such; conventions where they can be seen. What the
 * kernel refuses for its alignment is seen to be refused, and no more. */
static bool counts(const int *choice, int i, int j)
{
    const int64_t source = value_of(choice, P_SOURCE), results = value_of(choice, P_RESULTS);
    const bool codes = i == P_CODES || j == P_CODES, inputs = i == P_INPUTS || j == P_INPUTS;
    const bool base = i == P_BASE || j == P_BASE, empty = i == P_EMPTY || j == P_EMPTY;
    const bool with_results = i == P_RESULTS || j == P_RESULTS;
    if (leaves.unaligned && value_of(choice, P_LAYOUT) == LAYOUT_ODD) return i == P_LAYOUT || j == P_LAYOUT;
    if (leaves.unaligned && is_unaligned(LAYOUT_CONTIGUOUS, source, value_of(choice, P_PAGE)))
        return i == P_SOURCE && j == P_PAGE;
    if (!value_of(choice, P_SQ)) return i == P_SQ || j == P_SQ;
    if (value_of(choice, P_INDICES) == S_INDICES_NONE && (codes || inputs))
        return i == P_INDICES || j == P_INDICES;
    if ((i == P_PAGE || j == P_PAGE) && !has_pages(source)) return i == P_SOURCE;
    if (codes && !is_fp8(source) && i != P_SOURCE && value_of(choice, P_CODES) != S_CODES_NAN) return false;
    if (base && results == P_RESULTS_NONE) return with_results;
    if (empty && (results == P_RESULTS_NONE || results == P_RESULTS_MAX)) return with_results;
    return true;
}

/* Row-keys that the generic kernel computes: its vectors hold 16 rows. */
static double cost_on_cpu(const int *choice)
{
    const int64_t *shape = prefill_shapes[value_of(choice, P_SHAPE)];
    const bool twice = value_of(choice, P_INDICES) == S_INDICES_TWICE;
    const int64_t most = shape[0] * (1 + twice), keys = shape[1] < most ? shape[1] : most;
    const int64_t h_kv = value_of(choice, P_HKV), group = value_of(choice, P_HQ) / h_kv;
    const bool none = value_of(choice, P_INDICES) == S_INDICES_NONE;
    const int64_t tiles = h_kv * ((group + 15) / 16);
    return 16.0 * (double)(value_of(choice, P_SQ) * tiles * (none ? 1 : keys));
}

/* Bytes: a GPU is not the slow part. */
static double cost_on_gpu(const int *choice)
{
    const int64_t topk = prefill_shapes[value_of(choice, P_SHAPE)][1];
    return (double)value_of(choice, P_SQ) *
           (double)(2200 * value_of(choice, P_HQ) + 4 * topk * value_of(choice, P_HKV));
}

/* ---- Faults ---------------------------------------------------------------------------------- */

/* What an input was before a defect was planted there. */
struct patch {
    void *at;
    unsigned char before[16];
    size_t size;
};

static bool plant(struct patch *patch, void *at, const void *bytes, size_t size)
{
    patch->at = at, patch->size = size;
    memcpy(patch->before, at, size);
    memcpy(at, bytes, size);
    return memcmp(patch->before, bytes, size) != 0;
}

static bool plant_index(struct patch *patch, int32_t *entry, int64_t index)
{
    const int32_t value = (int32_t)index;
    return plant(patch, entry, &value, sizeof value);
}

/* Into entry i of a token's list; false where there is no place for it. */
static bool plant_entry(struct prefill_case *c, enum defect fault, int64_t token, int64_t i,
                        struct patch *patch)
{
    struct sparse_pool *pool = &c->pool;
    int32_t *entry = prefill_case_entry(c, token, 0, i);
    const int64_t count = prefill_case_count(c, token);
    const bool counted = i < count, key = sparse_pool_is_key(pool, *entry);
    switch (fault) {
    case FAULT_DROPPED_KEY: return counted && key && plant_index(patch, entry, -1);
    case FAULT_SWAPPED_PAGE:
        return counted && key &&
               plant_index(patch, entry, (*entry + pool->page_size) % sparse_pool_slots(pool));
    case FAULT_INVALID_KEY: return counted && !key && plant_index(patch, entry, 0);
    case FAULT_LATE_KEY: {
        const int32_t later = (int32_t)count + 1;
        return i == count && pool->has_length && key &&
               plant(patch, guarded_at(&pool->length, token, 0, 0, 0), &later, sizeof later);
    }
    case FAULT_WRONG_SCALE: {
        if (!counted || !key || c->v[P_SOURCE] == P_FLAT) return false;
        uint8_t *scales = sparse_pool_scales(pool, *entry);
        const size_t size = pool->format == KV_FP8_656 ? 4 : 1;
        return plant(patch, scales, scales + size, size); /* the group after it */
    }
    default: return false;
    }
}

static bool plant_before(struct prefill_case *c, enum defect fault, struct patch *patch)
{
    for (int64_t token = 0; token < c->s_q; token++)
        for (int64_t i = 0; i < c->pool.topk; i++)
            if (plant_entry(c, fault, token, i, patch)) return true;
    return false;
}

/* Four times as far from the oracle's as the rounding of products lets one be that the tolerance alone does not. */
static bool plant_cancelled(struct prefill_case *c)
{
    for (int64_t t = 0; t < c->s_q; t++)
        for (int64_t h = 0; h < c->h_q; h++) {
            float *lse = prefill_case_lse(c, t, h);
            const double bound = prefill_compare_bound(c, t, h);
            if (!compare_misses(&tolerance_prefill_lse, (double)*lse + bound, (double)*lse)) continue;
            *lse += (float)(4.0 * bound);
            return true;
        }
    return false;
}

static bool plant_after(struct prefill_case *c, enum defect fault)
{
    unsigned char *end =
        c->out.memory + c->out.bytes + GUARDED_FRONT; /* the first byte of the canary behind */
    const int64_t last = c->s_q - 1;
    int64_t seeing = 0, blind = 0, nan = 0; /* tokens */
    while (nan < last && !isnan(*prefill_case_lse(c, nan, 0))) nan++;
    while (seeing < last && prefill_case_first_key(c, seeing, 0) < 0) seeing++;
    while (blind < last && prefill_case_first_key(c, blind, 0) >= 0) blind++;
    switch (fault) {
    case FAULT_OUT_OF_BOUNDS: *end = 0; return true;
    case FAULT_GAP: prefill_case_out(c, 0, 0)[S_D_V] = 0; return true;
    case FAULT_UNWRITTEN:
        memset(prefill_case_out(c, last, c->h_q - 1), 0xff, S_D_V * sizeof(uint16_t));
        return true;
    case FAULT_NAN: prefill_case_out(c, 0, 0)[S_D_V - 1] = 0x7fff; return true;
    case FAULT_LSE: *prefill_case_lse(c, blind, 0) *= -1.0f; return prefill_case_first_key(c, blind, 0) < 0;
    case FAULT_LSE_CANCELLED: return plant_cancelled(c);
    case FAULT_LSE_BASE: *prefill_case_lse(c, seeing, 0) *= 1.44269504f; return true;
    case FAULT_MAX_SCALE: *prefill_case_max(c, seeing, 0) /= c->args.softmax_scale; return true;
    case FAULT_MAX_NAN: *prefill_case_max(c, nan, 0) = -6.9e29f; return isnan(*prefill_case_lse(c, nan, 0));
    default: return false;
    }
}

/* ---- A case ---------------------------------------------------------------------------------- */

/* Every row was written: none starts and ends with the bytes it was filled with. */
static bool all_written(const struct prefill_case *c)
{
    static const uint32_t filled = 0xffffffff;
    for (int64_t t = 0; t < c->s_q; t++)
        for (int64_t h = 0; h < c->h_q; h++) {
            const uint16_t *row = prefill_case_out(c, t, h);
            if (row[0] == 0xffff && row[S_D_V - 1] == 0xffff) return false;
            if (c->args.lse && !memcmp(prefill_case_lse(c, t, h), &filled, sizeof filled)) return false;
            if (c->args.max_logits && !memcmp(prefill_case_max(c, t, h), &filled, sizeof filled))
                return false;
        }
    return true;
}

/* What was not asked for was left alone. */
static bool unwanted_untouched(const struct prefill_case *c)
{
    const struct guarded *unwanted[] = {c->args.lse ? NULL : &c->lse,
                                        c->args.max_logits ? NULL : &c->max_logits};
    for (int i = 0; i < 2; i++)
        for (size_t at = 0; unwanted[i] && at < unwanted[i]->bytes; at++)
            if (unwanted[i]->memory[GUARDED_FRONT + at] != 0xff) return false;
    return true;
}

static void name_case(struct prefill_case *c)
{
    size_t used = 0;
    for (int i = 0; i < P_AXES && used < sizeof c->name; i++)
        used += (size_t)snprintf(c->name + used, sizeof c->name - used, "%s%s %lld", i ? ", " : "",
                                 axes[i].name, (long long)c->v[i]);
}

/* Twice, with other garbage in the workspace the second time. */
static void run_twice(struct prefill_case *c, const struct run *run, struct tally *tally)
{
    struct patch patch = {0};
    const char *kernel = "";
    bool planted = run->fault != FAULT_NONE && plant_before(c, run->fault, &patch);
    prefill_case_to_device(c, NULL);
    if (prefill_case_kernel(c, &kernel) || !is_tested(run, kernel))
        report(tally, run, c->name, "the library says that another kernel would run");
    const uint64_t inputs = prefill_hash_inputs(c);
    fmla_status status = prefill_case_run(c, &c->args, 0xff);
    unsigned char *before = prefill_results_copy(c);
    prefill_results_reset(c);
    if (!status) status = prefill_case_run(c, &c->args, 0x00);
    prefill_case_from_device(c);
    if (prefill_hash_inputs(c) != inputs) report(tally, run, c->name, "the call changed its inputs");
    if (patch.at) memcpy(patch.at, patch.before, patch.size);
    if (run->fault == FAULT_UNSTABLE) *prefill_case_out(c, 0, 0) ^= 1, planted = true;
    if (!prefill_results_same(c, before))
        report(tally, run, c->name, "two runs with different garbage in the workspace differ in their bits");
    free(before);
    if (status) {
        report(tally, run, c->name, fmla_last_error());
        return;
    }
    if (!all_written(c)) report(tally, run, c->name, "a row was not written");
    if (!unwanted_untouched(c)) report(tally, run, c->name, "a result that was not asked for was written");
    planted |= plant_after(c, run->fault);
    tally->planted |= planted;
    prefill_compare_intact(c, run, tally);
    prefill_compare(c, run, tally);
}

/* Which kernel the library says would run the case, or why none. */
static fmla_status kernel_of(struct prefill_case *c, const char **kernel)
{
    prefill_case_to_device(c, NULL);
    const fmla_status status = prefill_case_kernel(c, kernel);
    device_free(&c->blocks);
    return status;
}

void prefill_case_check(const struct run *run, const int64_t v[P_AXES], uint64_t seed, struct tally *tally)
{
    struct prefill_case c;
    const char *kernel;
    prefill_case_make(&c, run, v, seed);
    if (run->fault == FAULT_LSE_CANCELLED) prefill_case_leave_one(&c);
    name_case(&c);
    tally->cases++;
    const bool may_refuse = leaves.unaligned && is_unaligned(v[P_LAYOUT], v[P_SOURCE], v[P_PAGE]);
    if (may_refuse && kernel_of(&c, &kernel)) {
        if (!strstr(fmla_last_error(), run->kernel))
            report(tally, run, c.name, "the kernel should refuse this case by its name");
        tally->refused++;
    } else {
        use_threads(run, v[P_THREADS]);
        run_twice(&c, run, tally);
        use_threads(run, THREADS_BUILT_IN);
    }
    prefill_case_free(&c);
}

/* ---- What is run ----------------------------------------------------------------------------- */

/* What pairs do not reach: no keys, no lists, as many tokens as take a GPU with long lists, offsets of more than 32 bits, scores beyond
 * fp32, and the oracle's own strides and tokens against its rows. */
static void check_special(const struct run *run, struct tally *tally)
{
    enum { FEW = 9 };
    static const int64_t special[][P_AXES] = {
        {[P_SHAPE] = P_SHAPE_FEW, [P_SQ] = MANY_TOKENS, [P_HQ] = 1},
        {[P_SHAPE] = P_SHAPE_NO_KEYS, [P_SQ] = FEW, [P_LENGTHS] = S_LENGTHS_VARIED},
        {[P_SHAPE] = P_SHAPE_NO_KEYS, [P_SQ] = FEW, [P_SOURCE] = P_FP8_656, [P_INDICES] = S_INDICES_ANY},
        {[P_SHAPE] = P_SHAPE_NO_LISTS, [P_SQ] = FEW, [P_LENGTHS] = S_LENGTHS_BEYOND},
        {[P_SHAPE] = P_SHAPE_NO_LISTS, [P_SQ] = FEW, [P_DQK] = 512, [P_SOURCE] = P_FP8_584},
        {[P_SHAPE] = P_SHAPE_BLOCKS, [P_SQ] = FEW, [P_LENGTHS] = S_LENGTHS_VARIED, [P_INPUTS] = S_BEYOND},
        {[P_SHAPE] = P_SHAPE_BLOCKS,
         [P_SQ] = FEW,
         [P_SOURCE] = P_FP8_656,
         [P_LENGTHS] = S_LENGTHS_VARIED,
         [P_INPUTS] = S_BEYOND},
        {[P_SHAPE] = P_SHAPE_FAR, [P_SQ] = FEW, [P_INPUTS] = S_SPIKED, [P_LAYOUT] = P_LAYOUT_FAR},
        {[P_SHAPE] = P_SHAPE_FAR, [P_SQ] = FEW, [P_HKV] = 2, [P_DQK] = 512, [P_LAYOUT] = P_LAYOUT_FAR},
        {[P_SHAPE] = P_SHAPE_FAR_PAGES,
         [P_SQ] = FEW,
         [P_SOURCE] = P_PAGES,
         [P_PAGE] = 53,
         [P_LAYOUT] = P_LAYOUT_FAR},
        {[P_SHAPE] = P_SHAPE_FAR_PAGES,
         [P_SQ] = FEW,
         [P_SOURCE] = P_FP8_656,
         [P_PAGE] = 53,
         [P_LAYOUT] = P_LAYOUT_FAR},
        {[P_SHAPE] = P_SHAPE_FAR_PAGES,
         [P_SQ] = FEW,
         [P_DQK] = 512,
         [P_SOURCE] = P_FP8_584,
         [P_PAGE] = 54,
         [P_LAYOUT] = P_LAYOUT_FAR},
    };
    const size_t far_memory = (size_t)64 << 30;
    const bool no_far = on_gpu(run) && device_memory() < far_memory;
    if (no_far) printf("  not on this GPU: keys 2^31 bytes apart\n");
    for (size_t i = 0; i < sizeof special / sizeof special[0]; i++) {
        int64_t v[P_AXES];
        memcpy(v, special[i], sizeof v);
        prefill_case_complete(v);
        if (is_sound(v[P_SOURCE], v[P_DQK], v[P_HQ], v[P_HKV]) && !(no_far && v[P_LAYOUT] == P_LAYOUT_FAR))
            prefill_case_check(run, v, run->seed + i, tally);
    }
    if (on_gpu(run)) return;
    struct run oracle = *run;
    oracle.kernel = "ref";
    for (int64_t source = 0; source < P_SOURCES; source++) {
        const int64_t v[P_AXES] = {[P_SHAPE] = P_SHAPE_FEW,
                                   [P_SQ] = 3,
                                   [P_HQ] = 6,
                                   [P_HKV] = has_pages(source) ? 1 : 2,
                                   [P_DQK] = source == P_FP8_584 ? 512 : 576,
                                   [P_SOURCE] = source,
                                   [P_PAGE] = 7,
                                   [P_LENGTHS] = S_LENGTHS_VARIED,
                                   [P_SINK] = S_SINK_FINITE,
                                   [P_LAYOUT] = LAYOUT_ODD};
        prefill_case_check(&oracle, v, run->seed, tally);
    }
}

/* Extreme scores in every format, all rows compared: two full tiles of 64 heads; one and a quarter; such and lists that are long
 * enough for a GPU to cut them, into six pieces, and, of various lengths, into three; and so few tokens that the CPU cuts their
 * lists for three threads. */
static void check_extreme(const struct run *run, struct tally *tally)
{
    enum { FORMATS = 4, CASES = 4 * FORMATS, TOKENS = 16, FEW = 9, MORE = 20, CUT = 7 };
    static const int64_t formats[FORMATS][2] = {
        {P_FLAT, 576}, {P_FLAT, 512}, {P_FP8_656, 576}, {P_FP8_584, 512}};
    for (uint64_t i = 0; i <= CASES; i++) {
        const bool two_tiles = i < FORMATS, cut = i == CASES, long_lists = i >= 2 * FORMATS && !cut;
        const int64_t v[P_AXES] = {[P_SHAPE] = long_lists ? P_SHAPE_PIECES : P_SHAPE_BLOCKS,
                                   [P_SQ] = cut                ? CUT
                                            : two_tiles        ? TOKENS
                                            : i >= 3 * FORMATS ? MORE
                                                               : FEW,
                                   [P_HQ] = cut         ? 64
                                            : two_tiles ? 128
                                                        : 80,
                                   [P_HKV] = 1,
                                   [P_DQK] = formats[i % FORMATS][1],
                                   [P_SOURCE] = formats[i % FORMATS][0],
                                   [P_PAGE] = 64,
                                   [P_INPUTS] = P_EXTREME,
                                   [P_INDICES] = S_INDICES_ALL,
                                   [P_LENGTHS] = i >= 3 * FORMATS && !cut ? S_LENGTHS_VARIED : S_LENGTHS_NONE,
                                   [P_THREADS] = cut ? THREADS_OWN : THREADS_BUILT_IN};
        if (is_sound(v[P_SOURCE], v[P_DQK], v[P_HQ], 1)) prefill_case_check(run, v, run->seed + i, tally);
    }
}

/* Does the kernel under test refuse such a case? */
static bool refuses(const struct run *run, const int64_t v[P_AXES])
{
    struct prefill_case c;
    const char *kernel;
    prefill_case_make(&c, run, v, 1);
    const bool refused = kernel_of(&c, &kernel) == FMLA_UNSUPPORTED;
    prefill_case_free(&c);
    return refused;
}

/* The kernels of the CPU and the portable one of GPUs take everything; a tuned one is asked, and what it leaves is told. */
static void choose_axes(const struct run *run)
{
    static const char *const names[P_SOURCES] = {"flat keys", "flat keys with gaps", "FP8_656", "FP8_584",
                                                 "BF16 pages"};
    memset(&leaves, 0, sizeof leaves);
    axes[P_THREADS].count = on_gpu(run) ? 1 : 3;
    /* The portable kernel would take minutes for them. */
    const bool tuned = on_gpu(run) && strcmp(run->kernel, "cuda") != 0;
    const bool many = tuned && device_memory() >= (size_t)40 << 30;
    axes[P_SQ].count = many ? 6 : 5;
    if (!many && run->fault == FAULT_NONE)
        printf("  not of this kernel, or not on this device: s_q %d, but for one case of 8 entries\n",
               MANY_TOKENS);
    if (!on_gpu(run) || !strcmp(run->kernel, "cuda")) return;
    int64_t v[P_AXES] = {[P_SQ] = 1, [P_HQ] = 128};
    prefill_case_complete(v);
    for (int64_t source = 0; source < P_SOURCES; source++)
        for (int64_t d_qk = 512; d_qk <= 576; d_qk += 64) {
            v[P_SOURCE] = source, v[P_DQK] = d_qk;
            if (!is_sound(source, d_qk, 128, 1) || !refuses(run, v)) continue;
            leaves.source[source][d_qk == 576] = true;
            printf("  not of this kernel: %s, d_qk %lld\n", names[source], (long long)d_qk);
        }
    v[P_SOURCE] = P_FLAT, v[P_DQK] = leaves.source[P_FLAT][1] ? 512 : 576;
    v[P_LAYOUT] = LAYOUT_ODD, leaves.unaligned = refuses(run, v);
    v[P_LAYOUT] = LAYOUT_CONTIGUOUS, v[P_HKV] = 2, leaves.two_heads = refuses(run, v);
    if (leaves.unaligned) printf("  not of this kernel: what is not aligned to 16 bytes\n");
    if (leaves.two_heads) printf("  not of this kernel: two key heads\n");
}

/* A case with room for every fault. An lse is small where one key stands alone. */
static void check_fault(const struct run *run, struct tally *tally)
{
    const bool alone = run->fault == FAULT_LSE_CANCELLED;
    static const int64_t sources[] = {P_FP8_656, P_FP8_584, P_FLAT_GAPS};
    for (uint64_t i = 0; i < 9 && !tally->planted; i++) {
        const int64_t source = sources[i % 3];
        const int64_t v[P_AXES] = {[P_SQ] = 9,
                                   [P_HQ] = 8,
                                   [P_DQK] = source == P_FP8_584 ? 512 : 576,
                                   [P_SOURCE] = source,
                                   [P_LENGTHS] = S_LENGTHS_VARIED,
                                   [P_CODES] = alone ? S_CODES_WRITTEN : S_CODES_SCALES,
                                   [P_INPUTS] = run->fault == FAULT_MAX_NAN ? P_EXTREME
                                                : alone                     ? S_STEEP
                                                                            : S_NORMAL,
                                   [P_LAYOUT] = LAYOUT_PADDED};
        if (is_sound(source, v[P_DQK], v[P_HQ], 1)) prefill_case_check(run, v, run->seed + i, tally);
    }
}

void check_sparse_prefill(const struct run *run, struct tally *tally)
{
    enum { CASES_OF_A_MEAN = 16 };
    prefill_case_draw(run->seed);
    choose_axes(run);
    if (run->fault != FAULT_NONE) {
        check_fault(run, tally);
        return;
    }
    if (!wants_grid_only(run)) {
        if (on_gpu(run)) check_prefill_device(run, tally);
        check_special(run, tally);
        check_extreme(run, tally);
    }
    struct grid grid = {.axes = P_AXES,
                        .axis = axes,
                        .possible = possible,
                        .cost = on_gpu(run) ? cost_on_gpu : cost_on_cpu,
                        .counts = counts,
                        .dear = on_gpu(run) ? 4e8 : 4e5,
                        .random = {run->seed}};
    grid_begin(&grid);
    int choice[GRID_AXES];
    for (uint64_t i = 1; grid_next(&grid, choice); i++) {
        int64_t v[P_AXES];
        for (int a = 0; a < P_AXES; a++) v[a] = value_of(choice, a);
        if (i % CASES_OF_A_MEAN == 0) prefill_case_draw(run->seed * 1000003 + i);
        if (wants_case(run, tally, i)) prefill_case_check(run, v, run->seed * 1000003 + i, tally);
        if (run->most_cases && (int64_t)i >= run->most_cases) break;
    }
    tally->pairs += grid.pairs, tally->covered += grid.covered;
    grid_end(&grid);
    tally->number = 0;
}

/* ---- Timing ---------------------------------------------------------------------------------- */

void time_sparse_prefill(const struct run *run)
{
    static const struct {
        int64_t source, d_qk, h_q;
        const char *name;
    } shapes[] = {{P_FLAT, 576, 128, "flat"},
                  {P_FLAT, 576, 16, "flat"},
                  {P_FP8_656, 576, 128, "FP8_656"},
                  {P_FP8_584, 512, 128, "FP8_584"}};
    enum { WIDE = 4 /* prefill_shapes: 512 keys */, REPEATS = 3 };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const int64_t v[P_AXES] = {[P_SHAPE] = WIDE,
                                   [P_SQ] = 32,
                                   [P_HQ] = shapes[i].h_q,
                                   [P_DQK] = shapes[i].d_qk,
                                   [P_SOURCE] = shapes[i].source,
                                   [P_INDICES] = S_INDICES_ALL};
        struct prefill_case c;
        double best = 1e9;
        prefill_case_make(&c, run, v, run->seed);
        for (int repeat = 0; repeat < REPEATS; repeat++) {
            const double start = timing_now();
            if (prefill_case_call(&c.args, 0)) break;
            const double time = timing_now() - start;
            if (time < best) best = time;
        }
        const double flop = 2.0 * (double)(c.d_qk + S_D_V) * (double)(c.s_q * c.h_q * c.pool.topk);
        printf("  time: %s sparse_prefill s_q %lld, topk %lld, h_q %lld, keys %s: %.2f ms, %.1f GFLOP/s\n",
               run->kernel, (long long)c.s_q, (long long)c.pool.topk, (long long)c.h_q, shapes[i].name,
               best * 1e3, flop / best * 1e-9);
        prefill_case_free(&c);
    }
}
