/* SPDX-License-Identifier: MIT
 *
 * Sparse decode: the grid, and what is checked in each case. Cases are run twice through the real dispatch and compared
 * with the oracle.
 */
#include "grid.h"
#include "sparse_case.h"
#include "sparse_device.h"
#include "timing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct axis axes[S_AXES] = {
    {"shape", SPARSE_SHAPES, {0, 1, 2, 3, 4, 5, 6}},
    {"b", 4, {1, 4, 74, 321}},
    {"s_q", 2, {1, 3}},
    {"h_q", 7, {1, 8, 16, 48, 64, 96, 128}},
    {"format", S_FORMATS, {S_BF16, S_BF16_512, S_FP8_656, S_FP8_584, S_FP16, S_FP8_656_Q16}},
    {"lengths", 5, {S_LENGTHS_NONE, S_LENGTHS_FULL, S_LENGTHS_VARIED, S_LENGTHS_ZERO, S_LENGTHS_BEYOND}},
    {"extra", SPARSE_SHAPES + 1, {0, 1, 2, 3, 4, 5, 6, 7}},
    {"extra_lengths",
     5,
     {S_LENGTHS_NONE, S_LENGTHS_FULL, S_LENGTHS_VARIED, S_LENGTHS_ZERO, S_LENGTHS_BEYOND}},
    {"indices", 4, {S_INDICES_SOME, S_INDICES_ALL, S_INDICES_NONE, S_INDICES_TWICE}},
    {"codes", 5, {S_CODES_WRITTEN, S_CODES_SCALES, S_CODES_EXTREME, S_CODES_BEYOND, S_CODES_NAN}},
    {"inputs", 3, {S_NORMAL, S_SPIKED, S_STEEP}},
    {"sink", 3, {S_SINK_NONE, S_SINK_FINITE, S_SINK_INFINITE}},
    {"lse_empty", 2, {0, 1}},
    {"log_base", 2, {0, 2}},
    {"batch_invariant", 2, {0, 1}},
    {"plan", 3, {S_PLAN_INSIDE, S_PLAN_GIVEN, S_PLAN_STALE}},
    {"partitions", 4, {0, 1, 3, 78}},
    {"layout", 4, {LAYOUT_CONTIGUOUS, LAYOUT_PADDED, LAYOUT_SWAPPED, LAYOUT_ODD}},
    {"lse", 2, {1, 0 /* not wanted */}},
    {"threads", 3, {THREADS_BUILT_IN, THREADS_ONE, THREADS_OWN}},
};

static int64_t value_of(const int *choice, int axis)
{
    return choice[axis] < 0 ? -1 : axes[axis].values[choice[axis]];
}

static bool possible(const int *choice)
{
    (void)choice;
    return true;
}

/* Lengths of an extra cache that is not there play no part, nor does a plan in batch-invariant mode; codes do in FP8, but
 * for NaN. */
static bool counts(const int *choice, int i, int j)
{
    const bool plan = i == S_PLAN || j == S_PLAN || i == S_PARTITIONS || j == S_PARTITIONS;
    const bool fp8 = value_of(choice, S_FORMAT) == S_FP8_656 || value_of(choice, S_FORMAT) == S_FP8_584 ||
                     value_of(choice, S_FORMAT) == S_FP8_656_Q16;
    if ((i == S_EXTRA_LENGTHS || j == S_EXTRA_LENGTHS) && !value_of(choice, S_EXTRA)) return i == S_EXTRA;
    if (plan && value_of(choice, S_INVARIANT)) return i == S_INVARIANT || j == S_INVARIANT;
    if ((i == S_CODES || j == S_CODES) && !fp8 && i != S_FORMAT)
        return value_of(choice, S_CODES) == S_CODES_NAN;
    return true;
}

/* Row-keys that the generic kernel computes: its vectors hold 16 rows. */
static double cost(const int *choice)
{
    const int64_t shape = value_of(choice, S_SHAPE), extra = value_of(choice, S_EXTRA);
    int64_t keys = 0;
    for (int64_t k = 0; k < SPARSE_SHAPES; k++)
        keys += (shape == k ? sparse_shapes[k][1] : 0) + (extra == k + 1 ? sparse_shapes[k][1] : 0);
    const int64_t tiles =
        value_of(choice, S_B) * value_of(choice, S_SQ) * ((value_of(choice, S_HQ) + 15) / 16);
    return 16.0 * (double)(tiles * keys);
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
static bool plant_entry(struct sparse_case *c, enum defect fault, int64_t r, int64_t j, int64_t i,
                        struct patch *patch)
{
    struct sparse_pool *pool = &c->pool[0];
    int32_t *entry = sparse_case_entry(pool, r, j, i);
    const bool counted = i < pool->count[r], key = sparse_pool_is_key(pool, *entry);
    switch (fault) {
    case FAULT_DROPPED_KEY: return counted && key && plant_index(patch, entry, -1);
    case FAULT_SWAPPED_PAGE:
        return counted && key &&
               plant_index(patch, entry, (*entry + pool->page_size) % (pool->pages * pool->page_size));
    case FAULT_INVALID_KEY: return counted && !key && plant_index(patch, entry, 0);
    case FAULT_LATE_KEY: {
        const int32_t later = (int32_t)pool->count[r] + 1;
        return i == pool->count[r] && pool->has_length && key &&
               plant(patch, guarded_at(&pool->length, r, 0, 0, 0), &later, sizeof later);
    }
    case FAULT_WRONG_SCALE: {
        if (!counted || !key) return false;
        uint8_t *scales = sparse_pool_scales(pool, *entry);
        const size_t size = c->format == KV_FP8_656 ? 4 : 1;
        return plant(patch, scales, scales + size, size); /* the group after it */
    }
    default: return false;
    }
}

static bool plant_before(struct sparse_case *c, enum defect fault, struct patch *patch)
{
    static const int32_t none;
    if (fault == FAULT_NO_EXTRA) {
        for (int64_t r = 0; r < c->b && c->pool[1].topk; r++)
            if (c->pool[1].count[r] && c->pool[1].has_length)
                return plant(patch, guarded_at(&c->pool[1].length, r, 0, 0, 0), &none, sizeof none);
        return false;
    }
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++)
            for (int64_t i = 0; i < c->pool[0].topk; i++)
                if (plant_entry(c, fault, r, j, i, patch)) return true;
    return false;
}

static uint16_t *out_at(const struct sparse_case *c, int64_t r, int64_t j, int64_t h)
{
    return guarded_at(&c->out, r, j, h, 0);
}

/* Four times as far from the oracle's as the rounding of products lets one be that the tolerance alone does not. */
static bool plant_cancelled(struct sparse_case *c)
{
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++)
            for (int64_t h = 0; h < c->h_q; h++) {
                float *lse = guarded_at(&c->lse, r, h, j, 0);
                const double bound = sparse_compare_bound(c, r, j, h);
                if (!compare_misses(&tolerance_decode_lse, (double)*lse + bound, (double)*lse)) continue;
                *lse += (float)(4.0 * bound);
                return true;
            }
    return false;
}

static bool plant_after(struct sparse_case *c, enum defect fault)
{
    unsigned char *end =
        c->out.memory + c->out.bytes + GUARDED_FRONT; /* the first byte of the canary behind */
    switch (fault) {
    case FAULT_OUT_OF_BOUNDS: *end = 0; return true;
    case FAULT_GAP: out_at(c, 0, 0, 0)[S_D_V] = 0; return true;
    case FAULT_UNWRITTEN:
        memset(out_at(c, c->b - 1, c->s_q - 1, c->h_q - 1), 0xff, S_D_V * sizeof(uint16_t));
        return true;
    case FAULT_NAN: out_at(c, 0, 0, 0)[S_D_V - 1] = 0x7fff; return true;
    case FAULT_LSE_CANCELLED: return plant_cancelled(c);
    case FAULT_LSE:
        for (int64_t r = 0; r < c->b; r++) {
            if (!sparse_case_sees_none(c, r, 0)) continue;
            *(float *)guarded_at(&c->lse, r, 0, 0, 0) *= -1.0f;
            return true;
        }
        return false;
    default: return false;
    }
}

/* ---- A case ---------------------------------------------------------------------------------- */

/* Every row was written: none starts and ends with the bytes it was filled with. */
static bool all_written(const struct sparse_case *c)
{
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++)
            for (int64_t h = 0; h < c->h_q; h++) {
                const uint16_t *row = out_at(c, r, j, h);
                if (row[0] == 0xffff && row[S_D_V - 1] == 0xffff) return false;
            }
    return true;
}

static void name_case(struct sparse_case *c)
{
    size_t used = 0;
    for (int i = 0; i < S_AXES && used < sizeof c->name; i++)
        used += (size_t)snprintf(c->name + used, sizeof c->name - used, "%s%s %lld", i ? ", " : "",
                                 axes[i].name, (long long)c->v[i]);
}

void sparse_case_check(const struct run *run, const int64_t v[S_AXES], uint64_t seed, struct tally *tally)
{
    struct sparse_case c;
    struct patch patch = {0};
    sparse_case_make(&c, run, v, seed);
    if (run->fault == FAULT_LSE_CANCELLED) sparse_case_leave_one(&c);
    name_case(&c);
    tally->cases++;
    if (!sparse_case_taken(&c, run)) {
        sparse_case_refused(&c, run, tally);
        sparse_case_free(&c);
        return;
    }
    use_threads(run, v[S_THREADS]);
    fmla_status status = FMLA_OK;
    bool same_plan = true;
    const char *kernel = "";
    if (v[S_PLAN] != S_PLAN_INSIDE) status = sparse_case_plan(&c, &same_plan);
    if (!same_plan) report(tally, run, c.name, "plans of the same lengths have different bits");
    bool planted = run->fault != FAULT_NONE && plant_before(&c, run->fault, &patch);
    sparse_case_to_device(&c, NULL);
    if (sparse_case_kernel(&c, &kernel) || !is_tested(run, kernel))
        report(tally, run, c.name, "the library says that another kernel would run");
    const uint64_t inputs = sparse_hash_inputs(&c);
    unsigned char *before = malloc(c.out.bytes + c.lse.bytes + 1);
    if (!status) status = sparse_case_run(&c, &c.args, 0xff);
    memcpy(before, c.out.memory + GUARDED_FRONT, c.out.bytes);
    memcpy(before + c.out.bytes, c.lse.memory + GUARDED_FRONT, c.lse.bytes);
    guarded_reset(&c.out), guarded_reset(&c.lse);
    sparse_case_use_tables(&c); /* where the first run was given the plan in one piece */
    if (!status) status = sparse_case_run(&c, &c.args, 0x00);
    sparse_case_from_device(&c);
    if (sparse_hash_inputs(&c) != inputs) report(tally, run, c.name, "the call changed its inputs");
    if (patch.at) memcpy(patch.at, patch.before, patch.size);
    if (status) report(tally, run, c.name, fmla_last_error());

    if (run->fault == FAULT_UNSTABLE) *out_at(&c, 0, 0, 0) ^= 1, planted = true;
    if (memcmp(before, c.out.memory + GUARDED_FRONT, c.out.bytes) ||
        memcmp(before + c.out.bytes, c.lse.memory + GUARDED_FRONT, c.lse.bytes))
        report(
            tally, run, c.name,
            v[S_PLAN] == S_PLAN_INSIDE
                ? "two runs with different garbage in the workspace differ in their bits"
                : "two runs, the second by the plan's tables and with other garbage, differ in their bits");
    if (!status && !all_written(&c)) report(tally, run, c.name, "a row of out was not written");
    free(before);
    planted |= plant_after(&c, run->fault);
    tally->planted |= planted;
    if (!guarded_intact(&c.out))
        report(tally, run, c.name, "out: bytes outside the tensor's elements were written");
    if (!guarded_intact(&c.lse))
        report(tally, run, c.name, "lse: bytes outside the tensor's elements were written");
    if (!status) {
        sparse_compare_oracle(&c, run, tally);
        if (c.args.batch_invariant && c.b) sparse_compare_alone(&c, run, tally);
    }
    use_threads(run, THREADS_BUILT_IN);
    sparse_case_free(&c);
}

/* Is that format in the kernel's grid? */
static bool has_format(int64_t format)
{
    for (int i = 0; i < axes[S_FORMAT].count; i++)
        if (axes[S_FORMAT].values[i] == format) return true;
    return false;
}

/* Pages far apart take memory on a GPU. */
static bool has_room(const struct run *run, const int64_t v[S_AXES])
{
    const size_t needed = (size_t)64 << 30;
    if (v[S_LAYOUT] != S_LAYOUT_FAR || !on_gpu(run) || device_memory() > needed) return true;
    printf("  not on this GPU: pages of a cache 2^31 bytes apart\n");
    return false;
}

/* What pairs do not reach: the oracle's own strides and batches against its rows, many splits of one request, a cut inside
 * the extra cache, more than two chunks in batch-invariant mode, offsets of more than 32 bits in every format, and scores of +inf or
 * beyond fp32. */
static void check_special(const struct run *run, struct tally *tally)
{
    static const int64_t special[][S_AXES] = {
        {[S_SHAPE] = 4,
         [S_B] = 1,
         [S_SQ] = 3,
         [S_HQ] = 16,
         [S_FORMAT] = S_FP8_656,
         [S_EXTRA] = 7,
         [S_INPUTS] = S_SPIKED,
         [S_PLAN] = S_PLAN_GIVEN,
         [S_PARTITIONS] = 78,
         [S_LSE] = 1},
        {[S_SHAPE] = 0,
         [S_B] = 2,
         [S_SQ] = 1,
         [S_HQ] = 8,
         [S_FORMAT] = S_FP8_584,
         [S_LENGTHS] = S_LENGTHS_ZERO,
         [S_EXTRA] = 4,
         [S_PARTITIONS] = 7,
         [S_LSE] = 1},
        {[S_SHAPE] = 5,
         [S_B] = 2,
         [S_SQ] = 1,
         [S_HQ] = 2,
         [S_FORMAT] = S_FP8_584,
         [S_EXTRA] = 5,
         [S_EXTRA_LENGTHS] = S_LENGTHS_FULL,
         [S_INPUTS] = S_STEEP,
         [S_INVARIANT] = 1,
         [S_LSE] = 1},
        {[S_SHAPE] = 5,
         [S_B] = 1,
         [S_SQ] = 1,
         [S_HQ] = 2,
         [S_FORMAT] = S_BF16,
         [S_EXTRA] = 6,
         [S_INPUTS] = S_SPIKED,
         [S_LAYOUT] = S_LAYOUT_FAR,
         [S_LSE] = 1},
        {[S_SHAPE] = 6,
         [S_B] = 1,
         [S_SQ] = 1,
         [S_HQ] = 2,
         [S_FORMAT] = S_FP8_656,
         [S_EXTRA] = 6,
         [S_INPUTS] = S_SPIKED,
         [S_LAYOUT] = S_LAYOUT_FAR,
         [S_LSE] = 1},
        {[S_SHAPE] = 6,
         [S_B] = 1,
         [S_SQ] = 1,
         [S_HQ] = 2,
         [S_FORMAT] = S_FP8_584,
         [S_EXTRA] = 6,
         [S_INPUTS] = S_SPIKED,
         [S_LAYOUT] = S_LAYOUT_FAR,
         [S_LSE] = 1},
    };
    for (int64_t format = 0; format < 2 * S_FORMATS; format++) {
        const int64_t v[S_AXES] = {[S_SHAPE] = 2,
                                   [S_B] = 5,
                                   [S_SQ] = 2,
                                   [S_HQ] = 16,
                                   [S_FORMAT] = format % S_FORMATS,
                                   [S_LENGTHS] = S_LENGTHS_VARIED,
                                   [S_EXTRA] = 3,
                                   [S_EXTRA_LENGTHS] = S_LENGTHS_VARIED,
                                   [S_INPUTS] = format < S_FORMATS ? S_INFINITE : S_BEYOND,
                                   [S_PARTITIONS] = 7,
                                   [S_SINK] = S_SINK_FINITE,
                                   [S_LSE] = 1};
        if (has_format(v[S_FORMAT])) sparse_case_check(run, v, run->seed, tally);
    }
    for (size_t i = 0; i < sizeof special / sizeof special[0]; i++)
        if (has_format(special[i][S_FORMAT]) && has_room(run, special[i]))
            sparse_case_check(run, special[i], run->seed + i, tally);
    if (on_gpu(run)) return;
    struct run oracle = *run;
    oracle.kernel = "ref";
    for (int64_t format = 0; format < S_FORMATS; format++) {
        const int64_t v[S_AXES] = {[S_B] = 3,
                                   [S_SQ] = 3,
                                   [S_HQ] = 5,
                                   [S_FORMAT] = format,
                                   [S_LENGTHS] = S_LENGTHS_VARIED,
                                   [S_EXTRA] = 3,
                                   [S_EXTRA_LENGTHS] = S_LENGTHS_VARIED,
                                   [S_SINK] = S_SINK_FINITE,
                                   [S_LAYOUT] = LAYOUT_ODD,
                                   [S_LSE] = 1};
        sparse_case_check(&oracle, v, run->seed, tally);
    }
}

/* Only what the kernel takes is in its grid. */
static void choose_axes(const struct run *run)
{
    struct axis *format = &axes[S_FORMAT];
    const bool fp8_alone = !strcmp(run->kernel, "cuda-sm90-16"),
               hopper = !strncmp(run->kernel, "cuda-sm90", 9);
    format->count = 0;
    for (int i = 0; i < S_FORMATS; i++) {
        const bool fp16 = i == S_FP16 || i == S_FP8_656_Q16, fp8 = i == S_FP8_656 || i == S_FP8_584;
        if (hopper && i == S_FP8_656_Q16) continue;
        if ((!fp16 || strstr(run->dtypes, "fp16")) && (fp8 || !fp8_alone))
            format->values[format->count++] = i;
    }
    axes[S_THREADS].count = on_gpu(run) ? 1 : 3;
}

/* A case with room for every fault. An lse is small where one key stands alone. */
static void check_fault(const struct run *run, struct tally *tally)
{
    const bool alone = run->fault == FAULT_LSE_CANCELLED;
    for (uint64_t i = 0; i < 8 && !tally->planted; i++) {
        const int64_t v[S_AXES] = {[S_SHAPE] = 2,
                                   [S_B] = 8,
                                   [S_SQ] = 2,
                                   [S_HQ] = 8,
                                   [S_FORMAT] = i % 2 ? S_FP8_584 : S_FP8_656,
                                   [S_LENGTHS] = S_LENGTHS_VARIED,
                                   [S_EXTRA] = !alone,
                                   [S_EXTRA_LENGTHS] = S_LENGTHS_VARIED,
                                   [S_CODES] = alone ? S_CODES_WRITTEN : S_CODES_SCALES,
                                   [S_INPUTS] = alone ? S_STEEP : S_NORMAL,
                                   [S_LAYOUT] = LAYOUT_PADDED,
                                   [S_LSE] = 1};
        sparse_case_check(run, v, run->seed + i, tally);
    }
}

void check_sparse_decode(const struct run *run, struct tally *tally)
{
    sparse_case_draw(run->seed);
    choose_axes(run);
    if (run->fault != FAULT_NONE) {
        check_fault(run, tally);
        return;
    }
    if (!wants_grid_only(run)) {
        if (on_gpu(run)) check_sparse_device(run, tally);
        check_special(run, tally);
    }
    struct grid grid = {.axes = S_AXES,
                        .axis = axes,
                        .possible = possible,
                        .cost = cost,
                        .counts = counts,
                        .dear = 4e5,
                        .random = {run->seed}};
    grid_begin(&grid);
    int choice[GRID_AXES];
    for (uint64_t i = 1; grid_next(&grid, choice); i++) {
        int64_t v[S_AXES];
        for (int a = 0; a < S_AXES; a++) v[a] = value_of(choice, a);
        if (wants_case(run, tally, i)) sparse_case_check(run, v, run->seed * 1000003 + i, tally);
        if (run->most_cases && (int64_t)i >= run->most_cases) break;
    }
    tally->pairs += grid.pairs, tally->covered += grid.covered;
    grid_end(&grid);
    tally->number = 0;
}

/* ---- Timing ---------------------------------------------------------------------------------- */

void time_sparse_decode(const struct run *run)
{
    static const int64_t shapes[][3] = {
        {1, 128, S_BF16}, {1, 128, S_FP8_656}, {1, 16, S_FP8_656}, {1, 128, S_FP8_584}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const int64_t v[S_AXES] = {[S_SHAPE] = 5,
                                   [S_B] = shapes[i][0],
                                   [S_SQ] = 1,
                                   [S_HQ] = shapes[i][1],
                                   [S_FORMAT] = shapes[i][2],
                                   [S_INDICES] = S_INDICES_ALL,
                                   [S_LSE] = 1};
        struct sparse_case c;
        sparse_case_make(&c, run, v, run->seed);
        double best = 1e30;
        for (int repeat = 0; repeat < 3; repeat++) {
            const double start = timing_now();
            if (sparse_case_call(&c.args, 0)) break;
            const double time = timing_now() - start;
            if (time < best) best = time;
        }
        const double flop = 2.0 * (double)(c.d_qk + S_D_V) * (double)(c.b * c.h_q * c.pool[0].topk);
        printf("  time: %s sparse_decode b %lld, topk %lld, h_q %lld, cache %s: %.2f ms, %.1f GFLOP/s\n",
               run->kernel, (long long)c.b, (long long)c.pool[0].topk, (long long)c.h_q,
               shapes[i][2] == S_BF16      ? "BF16"
               : shapes[i][2] == S_FP8_656 ? "FP8_656"
                                           : "FP8_584",
               best * 1e3, flop / best * 1e-9);
        sparse_case_free(&c);
    }
}
