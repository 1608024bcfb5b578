/* SPDX-License-Identifier: MIT
 *
 * Dense decode: the grid, and what is checked in each case. Cases are run twice through the real dispatch and compared
 * row by row with the oracle.
 */
#include "decode_case.h"
#include "decode_device.h"
#include "grid.h"
#include "timing.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The values of a GPU; a CPU leaves out the last ones of `b` and `s_k`, a GPU all but the first of `threads`. */
static struct axis axes[AXES] = {
    {"b", 7, {0, 1, 2, 6, 64, 128, 1000}},
    {"s_q", 6, {1, 2, 3, 4, 7, 64}},
    {"s_k", 9, {0, 1, 20, 63, 64, 65, 140, 4096, 131072}},
    {"h_q", 9, {1, 3, 9, 11, 16, 63, 64, 126, 128}},
    {"h_kv", 4, {1, 2, 3, 8}},
    {"page_size", 8, {1, 2, 16, 61, 64, 128, 256, 0 /* contiguous */}},
    {"causal", 2, {0, 1}},
    {"dtype", 2, {0 /* bf16 */, 1 /* fp16 */}},
    {"d_qk", 2, {576, 512}},
    {"lengths", 3, {LENGTHS_FIXED, LENGTHS_VARIED, LENGTHS_BEYOND}},
    {"sink", 3, {SINK_NONE, SINK_FINITE, SINK_INFINITE}},
    {"lse_empty", 2, {0, 1}},
    {"log_base", 2, {0, 2}},
    {"batch_invariant", 2, {0, 1}},
    {"plan", 3, {PLAN_INSIDE, PLAN_GIVEN, PLAN_STALE}},
    {"partitions", 4, {0, 1, 3, 78}},
    {"layout", 4, {LAYOUT_CONTIGUOUS, LAYOUT_PADDED, LAYOUT_SWAPPED, LAYOUT_ODD}},
    {"inputs", 4, {INPUTS_NORMAL, INPUTS_SPIKED, INPUTS_STEEP, INPUTS_NAN_ENDS}},
    {"lse", 2, {1, 0 /* not wanted */}},
    {"threads", 3, {THREADS_BUILT_IN, THREADS_ONE, THREADS_OWN}},
};

static int64_t value_of(const int *choice, int axis)
{
    return choice[axis] < 0 ? -1 : axes[axis].values[choice[axis]];
}

static bool possible(const int *choice)
{
    const int64_t h_q = value_of(choice, A_HQ), h_kv = value_of(choice, A_HKV);
    return h_q <= 0 || h_kv <= 0 || h_q % h_kv == 0;
}

/* A batch or a cache of nothing computes nothing, batch-invariant mode reads no plan, and an end is NaN only where some
 * row may not see it. */
static bool counts(const int *choice, int i, int j)
{
    const bool plan = i == A_PLAN || j == A_PLAN || i == A_PARTITIONS || j == A_PARTITIONS;
    const bool inputs = i == A_INPUTS || j == A_INPUTS;
    const bool some_unseen = value_of(choice, A_CAUSAL) && value_of(choice, A_SQ) > 1;
    if (!value_of(choice, A_B) && i != A_B) return false;
    if (!value_of(choice, A_SK) && i != A_SK && j != A_SK) return false;
    if (plan && value_of(choice, A_INVARIANT) && i != A_INVARIANT && j != A_INVARIANT) return false;
    return !inputs || value_of(choice, A_INPUTS) != INPUTS_NAN_ENDS || some_unseen || i == A_SQ ||
           i == A_CAUSAL;
}

/* Row-keys that the generic kernel computes: its vectors hold 16 rows. */
static double cpu_cost(const int *choice)
{
    const int64_t rows = value_of(choice, A_SQ) * value_of(choice, A_HQ) / value_of(choice, A_HKV);
    const int64_t row_tiles = value_of(choice, A_B) * value_of(choice, A_HKV) * ((rows + 15) / 16);
    return 16.0 * (double)(row_tiles * value_of(choice, A_SK));
}

/* What a GPU computes: its tiles hold 64 rows at most, and the fewest are 16. */
static double gpu_cost(const int *choice)
{
    const int64_t rows = value_of(choice, A_SQ) * value_of(choice, A_HQ) / value_of(choice, A_HKV);
    const int64_t row_tiles = value_of(choice, A_B) * value_of(choice, A_HKV) * ((rows + 63) / 64);
    return 64.0 * (double)(row_tiles * value_of(choice, A_SK));
}

/* Bytes of a GPU's case on the host: cache, queries and results, table. */
static double host_bytes(const int *choice)
{
    const double b = (double)value_of(choice, A_B), s_k = (double)value_of(choice, A_SK);
    const double page = (double)value_of(choice, A_PAGE),
                 row = 2.0 * (double)(value_of(choice, A_DQK) + 2 * D_V);
    const double rows = b * (double)(value_of(choice, A_SQ) * value_of(choice, A_HQ));
    const double shared = b * s_k < 8192 ? b * s_k : 8192, alone = b * s_k > 65536 ? s_k : b * s_k;
    const double slots = page > 0 ? shared + b * page : alone;
    const double table = page > 0 ? 4.0 * b * (s_k / page + 3.0) : 0.0;
    return 2.0 * slots * (double)(value_of(choice, A_HKV) * value_of(choice, A_DQK)) + rows * row + table;
}

/* Partial results of a batch-invariant call: one a chunk of 2048 keys that the table has room for. */
static double device_bytes(const int *choice)
{
    const double rows = (double)(value_of(choice, A_B) * value_of(choice, A_SQ) * value_of(choice, A_HQ));
    const double chunks = (double)value_of(choice, A_SK) / 2048.0 + 1.0;
    return value_of(choice, A_INVARIANT) ? rows * chunks * 4.0 * (D_V + 1) : 0.0;
}

static const char *grid_kernel; /* that the grid at hand is of */

static bool gpu_possible(const int *choice)
{
    if (!possible(choice)) return false;
    int64_t v[AXES];
    bool whole = true;
    for (int i = 0; i < AXES; i++) v[i] = value_of(choice, i), whole &= choice[i] >= 0;
    if (!decode_case_taken(grid_kernel, v)) return false;
    if (!whole) return true;
    return host_bytes(choice) <= 0x1p30 && device_bytes(choice) <= 0x1p34 && gpu_cost(choice) <= 5e10;
}

/* ---- Faults --------------------------------------------------------------------------------- */

static uint16_t *out_at(const struct decode_case *c, int64_t r, int64_t j, int64_t h)
{
    return guarded_at(&c->out, r, j, h, 0);
}

/* Recomputes a row over `change` keys more or fewer than it sees: what a kernel with that defect would write.
 */
static bool plant_row(struct decode_case *c, int64_t change)
{
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++) {
            const int64_t seen = decode_case_seen(c, r, j) + change;
            if (seen < 1 || seen > c->length[r]) continue;
            return decode_case_row(c, "ref", r, j, 0, seen, out_at(c, r, j, 0),
                                   guarded_at(&c->lse, r, 0, j, 0)) == FMLA_OK;
        }
    return false;
}

/* Four times as far from the oracle's as the rounding of products lets one be that the tolerance alone does not. */
static bool plant_cancelled(struct decode_case *c)
{
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++)
            for (int64_t h = 0; h < c->h_q; h++) {
                float *lse = guarded_at(&c->lse, r, h, j, 0);
                const double bound = decode_case_bound(c, r, j, h);
                if (!compare_misses(&tolerance_decode_lse, (double)*lse + bound, (double)*lse)) continue;
                *lse += (float)(4.0 * bound);
                return true;
            }
    return false;
}

/* Planted where every row is compared and one key shows. */
static bool can_plant(const int64_t v[AXES])
{
    return v[A_B] && v[A_LSE] && v[A_SK] <= 140 && v[A_B] * v[A_SQ] * v[A_HQ] * v[A_SK] <= 40000;
}

static bool plant_before(struct decode_case *c, enum defect fault)
{
    if (fault != FAULT_SWAPPED_PAGE || !c->paged || c->page_size < 16 || !can_plant(c->v)) return false;
    for (int64_t r = 0; r < c->b; r++) {
        if (c->length[r] < 2 * c->page_size) continue;
        /* Not against the oracle's row: an order of keys does not matter. A page of another request does. */
        int32_t *entry = guarded_at(&c->table, r, 0, 0, 0);
        *entry = (int32_t)((*entry + 1) % c->pages);
        return true;
    }
    return false;
}

static void undo_before(struct decode_case *c)
{
    for (int64_t r = 0; r < c->b; r++) {
        if (c->length[r] < 2 * c->page_size) continue;
        int32_t *entry = guarded_at(&c->table, r, 0, 0, 0);
        *entry = (int32_t)((*entry + c->pages - 1) % c->pages);
        return;
    }
}

static bool plant_after(struct decode_case *c, enum defect fault)
{
    if (!can_plant(c->v)) return false;
    if (fault == FAULT_LSE_CANCELLED) return plant_cancelled(c);
    unsigned char *end =
        c->out.memory + c->out.bytes + GUARDED_FRONT; /* the first byte of the canary behind */
    switch (fault) {
    case FAULT_DROPPED_KEY: return plant_row(c, -1);
    case FAULT_MASK: return c->args.causal && plant_row(c, 1);
    case FAULT_OUT_OF_BOUNDS: *end = 0; return true;
    case FAULT_GAP:
        if (c->v[A_LAYOUT] == LAYOUT_CONTIGUOUS) return false;
        out_at(c, 0, 0, 0)[D_V] = 0;
        return true;
    case FAULT_UNWRITTEN:
        memset(out_at(c, c->b - 1, c->s_q - 1, c->h_q - 1), 0xff, D_V * sizeof(uint16_t));
        return true;
    case FAULT_NAN: out_at(c, 0, 0, 0)[D_V - 1] = 0x7fff; return true;
    case FAULT_LSE:
        for (int64_t r = 0; r < c->b; r++) {
            if (decode_case_seen(c, r, 0)) continue;
            *(float *)guarded_at(&c->lse, r, 0, 0, 0) *= -1.0f;
            return true;
        }
        return false;
    default: return false;
    }
}

/* Every row was written: none starts and ends with the bytes it was filled with. */
static bool all_written(const struct decode_case *c)
{
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++)
            for (int64_t h = 0; h < c->h_q; h++) {
                const uint16_t *row = out_at(c, r, j, h);
                if (row[0] == 0xffff && row[D_V - 1] == 0xffff) return false;
            }
    return true;
}

static void name_case(struct decode_case *c)
{
    size_t used = 0;
    for (int i = 0; i < AXES && used < sizeof c->name; i++)
        used += (size_t)snprintf(c->name + used, sizeof c->name - used, "%s%s %lld", i ? ", " : "",
                                 axes[i].name, (long long)c->v[i]);
}

void decode_case_check(const struct run *run, const int64_t v[AXES], uint64_t seed, struct tally *tally)
{
    struct decode_case c;
    decode_case_make(&c, run, v, seed);
    name_case(&c);
    tally->cases++;
    if (!decode_case_taken(run->kernel, v)) {
        decode_case_refused(&c, run, tally);
        decode_case_free(&c);
        return;
    }
    use_threads(run, v[A_THREADS]);
    fmla_status status = FMLA_OK;
    bool same_plan = true;
    const char *kernel = "";
    if (v[A_PLAN] != PLAN_INSIDE) status = decode_case_plan(&c, &same_plan);
    if (!same_plan) report(tally, run, c.name, "plans of the same lengths have different bits");
    const bool planted_before = plant_before(&c, run->fault);
    decode_case_to_device(&c, NULL);
    if (decode_case_kernel(&c, &kernel) || !is_tested(run, kernel))
        report(tally, run, c.name, "the library says that another kernel would run");
    const uint64_t inputs = decode_hash_inputs(&c);
    unsigned char *before = malloc(c.out.bytes + c.lse.bytes + 1);
    if (!status) status = decode_case_run(&c, &c.args, 0xff);
    memcpy(before, c.out.memory + GUARDED_FRONT, c.out.bytes);
    memcpy(before + c.out.bytes, c.lse.memory + GUARDED_FRONT, c.lse.bytes);
    guarded_reset(&c.out), guarded_reset(&c.lse);
    decode_case_use_tables(&c); /* where the first run was given the plan in one piece */
    if (!status) status = decode_case_run(&c, &c.args, 0x00);
    device_down(&c.blocks, NULL);
    if (decode_hash_inputs(&c) != inputs) report(tally, run, c.name, "the call changed its inputs");
    if (planted_before) undo_before(&c);
    if (status) report(tally, run, c.name, fmla_last_error());

    bool planted = planted_before;
    if (run->fault == FAULT_UNSTABLE && can_plant(c.v)) *out_at(&c, 0, 0, 0) ^= 1, planted = true;
    if (memcmp(before, c.out.memory + GUARDED_FRONT, c.out.bytes) ||
        memcmp(before + c.out.bytes, c.lse.memory + GUARDED_FRONT, c.lse.bytes))
        report(
            tally, run, c.name,
            v[A_PLAN] == PLAN_INSIDE
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
    if (!status && c.b) {
        decode_compare_oracle(&c, run, tally);
        for (int i = 0; c.args.batch_invariant && i < (on_gpu(run) ? 4 : 1); i++)
            decode_compare_elsewhere(&c, run, tally);
    }
    use_threads(run, THREADS_BUILT_IN);
    decode_case_free(&c);
}

/* The whole of a small case by the oracle, and row by row by the oracle: its own causal masking, head groups
 * and strides against problems that have none. */
static void check_oracle(const struct run *run, struct tally *tally)
{
    struct run oracle = *run;
    oracle.kernel = "ref";
    oracle.device = (fmla_device){FMLA_DEVICE_CPU, 0};
    const int64_t v[AXES] = {[A_B] = 3,
                             [A_SQ] = 3,
                             [A_SK] = 70,
                             [A_HQ] = 6,
                             [A_HKV] = 2,
                             [A_PAGE] = 16,
                             [A_CAUSAL] = 1,
                             [A_DQK] = 576,
                             [A_LENGTHS] = LENGTHS_VARIED,
                             [A_SINK] = SINK_FINITE,
                             [A_LAYOUT] = LAYOUT_ODD,
                             [A_LSE] = 1};
    decode_case_check(&oracle, v, run->seed, tally);
}

/* What pairs do not reach: many splits of one request, a cut among the keys that only some rows see, lengths that pass
 * 2^16, more than two chunks in batch-invariant mode, offsets into the cache of more than 32 bits, and scores of +inf. */
static void check_special(const struct run *run, struct tally *tally)
{
    static const int64_t special[][AXES] = {
        {[A_B] = 1,
         [A_SQ] = 3,
         [A_SK] = 4096,
         [A_HQ] = 16,
         [A_HKV] = 1,
         [A_PAGE] = 64,
         [A_CAUSAL] = 1,
         [A_DQK] = 576,
         [A_PLAN] = PLAN_GIVEN,
         [A_PARTITIONS] = 78,
         [A_INPUTS] = INPUTS_SPIKED,
         [A_LSE] = 1},
        {[A_B] = 2,
         [A_SQ] = 64,
         [A_SK] = 140,
         [A_HQ] = 3,
         [A_HKV] = 1,
         [A_PAGE] = 16,
         [A_CAUSAL] = 1,
         [A_DQK] = 512,
         [A_PARTITIONS] = 3,
         [A_INPUTS] = INPUTS_NAN_ENDS,
         [A_LSE] = 1},
        {[A_B] = 1,
         [A_SQ] = 2,
         [A_SK] = 70000,
         [A_HQ] = 2,
         [A_HKV] = 1,
         [A_PAGE] = 64,
         [A_CAUSAL] = 1,
         [A_DQK] = 576,
         [A_PARTITIONS] = 3,
         [A_INPUTS] = INPUTS_SPIKED,
         [A_LSE] = 1},
        {[A_B] = 2,
         [A_SQ] = 1,
         [A_SK] = 9000,
         [A_HQ] = 2,
         [A_HKV] = 1,
         [A_DQK] = 576,
         [A_LENGTHS] = LENGTHS_VARIED,
         [A_INVARIANT] = 1,
         [A_INPUTS] = INPUTS_STEEP,
         [A_LSE] = 1},
        {[A_B] = 2,
         [A_SQ] = 1,
         [A_SK] = 5000,
         [A_HQ] = 16,
         [A_HKV] = 1,
         [A_PAGE] = 64,
         [A_DQK] = 576,
         [A_INVARIANT] = 1,
         [A_LSE] = 1},
        {[A_B] = 2,
         [A_SQ] = 2,
         [A_SK] = 200,
         [A_HQ] = 4,
         [A_HKV] = 2,
         [A_PAGE] = 64,
         [A_CAUSAL] = 1,
         [A_DQK] = 576,
         [A_PARTITIONS] = 3,
         [A_LAYOUT] = LAYOUT_FAR,
         [A_LSE] = 1},
        {[A_B] = 3,
         [A_SQ] = 3,
         [A_SK] = 200,
         [A_HQ] = 16,
         [A_HKV] = 1,
         [A_PAGE] = 64,
         [A_CAUSAL] = 1,
         [A_DQK] = 576,
         [A_PARTITIONS] = 5,
         [A_INPUTS] = INPUTS_INFINITE,
         [A_SINK] = SINK_FINITE,
         [A_LSE] = 1},
        {[A_B] = 4,
         [A_SQ] = 1,
         [A_SK] = 65,
         [A_HQ] = 64,
         [A_HKV] = 1,
         [A_PAGE] = 64,
         [A_DQK] = 512,
         [A_LENGTHS] = LENGTHS_VARIED,
         [A_INPUTS] = INPUTS_INFINITE,
         [A_LSE] = 1},
        {[A_B] = 6,
         [A_SQ] = 2,
         [A_SK] = 140,
         [A_HQ] = 16,
         [A_HKV] = 1,
         [A_PAGE] = 64,
         [A_CAUSAL] = 1,
         [A_DQK] = 576,
         [A_LENGTHS] = LENGTHS_VARIED,
         [A_PARTITIONS] = 3,
         [A_INPUTS] = INPUTS_BEYOND,
         [A_LSE] = 1},
    };
    for (size_t i = 0; i < sizeof special / sizeof special[0]; i++) {
        if (on_gpu(run) && special[i][A_LAYOUT] == LAYOUT_FAR)
            continue; /* decode_device.c has a case of its own */
        int64_t v[AXES];
        memcpy(v, special[i], sizeof v);
        v[A_DTYPE] = axes[A_DTYPE].values[0];
        decode_case_check(run, v, run->seed + i, tally);
    }
}

/* Only types that the kernel takes are in its grid, and only what the device has to do with. */
static void choose_axes(const struct run *run)
{
    struct axis *dtype = &axes[A_DTYPE];
    dtype->count = 0;
    if (strstr(run->dtypes, "bf16")) dtype->values[dtype->count++] = 0;
    if (strstr(run->dtypes, "fp16")) dtype->values[dtype->count++] = 1;
    axes[A_B].count = on_gpu(run) ? 7 : 6;
    axes[A_SK].count = on_gpu(run) ? 9 : 8;
    axes[A_THREADS].count = on_gpu(run) ? 1 : 3;
}

/* A case with room for every fault: pages, empty requests, gaps, causal. An lse is small where one key stands alone. */
static void check_fault(const struct run *run, struct tally *tally)
{
    const bool alone = run->fault == FAULT_LSE_CANCELLED;
    const int64_t v[AXES] = {[A_B] = 6,
                             [A_SQ] = 3,
                             [A_SK] = alone ? 1 : 140,
                             [A_HQ] = 8,
                             [A_HKV] = 1,
                             [A_PAGE] = strcmp(run->kernel, "cuda-sm90") ? 16 : 64,
                             [A_CAUSAL] = 1,
                             [A_DQK] = 576,
                             [A_LENGTHS] = alone ? LENGTHS_FIXED : LENGTHS_VARIED,
                             [A_INPUTS] = alone ? INPUTS_STEEP : INPUTS_NORMAL,
                             [A_LAYOUT] = LAYOUT_PADDED,
                             [A_LSE] = 1};
    for (uint64_t i = 0; i < 8 && !tally->planted; i++) decode_case_check(run, v, run->seed + i, tally);
}

void check_dense_decode(const struct run *run, struct tally *tally)
{
    decode_case_draw(run->seed);
    choose_axes(run);
    grid_kernel = run->kernel;
    if (run->fault != FAULT_NONE) {
        check_fault(run, tally);
        return;
    }
    if (!wants_grid_only(run)) {
        if (on_gpu(run)) check_device_first_use(run, tally);
        check_oracle(run, tally);
        check_special(run, tally);
    }
    struct grid grid = {.axes = AXES,
                        .axis = axes,
                        .possible = on_gpu(run) ? gpu_possible : possible,
                        .cost = on_gpu(run) ? gpu_cost : cpu_cost,
                        .counts = counts,
                        .dear = on_gpu(run) ? 5e8 : 4e5,
                        .random = {run->seed}};
    grid_begin(&grid);
    int choice[GRID_AXES];
    for (uint64_t i = 1; grid_next(&grid, choice); i++) {
        int64_t v[AXES];
        for (int a = 0; a < AXES; a++) v[a] = value_of(choice, a);
        if (wants_case(run, tally, i)) decode_case_check(run, v, run->seed * 1000003 + i, tally);
        if (run->most_cases && (int64_t)i >= run->most_cases) break;
    }
    tally->pairs += grid.pairs, tally->covered += grid.covered;
    grid_end(&grid);
    tally->number = 0;
    if (on_gpu(run) && !wants_grid_only(run)) check_device_decode(run, tally);
}

/* ---- Timing --------------------------------------------------------------------------------- */

void time_dense_decode(const struct run *run)
{
    static const int64_t shapes[][3] = {{1, 16, 4096}, {1, 128, 4096}, {32, 16, 512}}; /* b, h_q, s_k */
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const int64_t v[AXES] = {
            [A_B] = shapes[i][0], [A_SQ] = 1,    [A_SK] = shapes[i][2], [A_HQ] = shapes[i][1],
            [A_HKV] = 1,          [A_PAGE] = 64, [A_DQK] = 576,         [A_LSE] = 1};
        struct decode_case c;
        decode_case_make(&c, run, v, run->seed);
        double best = 1e30;
        for (int repeat = 0; repeat < 3; repeat++) {
            const double start = timing_now();
            if (decode_case_call(&c.args, 0)) break;
            const double time = timing_now() - start;
            if (time < best) best = time;
        }
        const double flop = 2.0 * (double)(c.d_qk + D_V) * (double)(c.b * c.s_q * c.h_q * c.s_k);
        printf("  time: %s dense_decode b %lld, s_k %lld, h_q %lld: %.2f ms, %.1f GFLOP/s\n", run->kernel,
               (long long)c.b, (long long)c.s_k, (long long)c.h_q, best * 1e3, flop / best * 1e-9);
        decode_case_free(&c);
    }
}
