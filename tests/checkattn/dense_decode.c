/* SPDX-License-Identifier: MIT
 *
 * Dense decode against the oracle: cases are run twice through the real dispatch and compared row by row: small cases
 * whole, large ones in chosen rows, each recomputed by the oracle as a problem of its own (one token, one head, the
 * keys it sees).
 */
#include "decode_case.h"
#include "grid.h"
#include "timing.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct axis axes[AXES] = {
    {"b", 6, {0, 1, 2, 6, 64, 128}},
    {"s_q", 6, {1, 2, 3, 4, 7, 64}},
    {"s_k", 8, {0, 1, 20, 63, 64, 65, 140, 4096}},
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
static double cost(const int *choice)
{
    const int64_t rows = value_of(choice, A_SQ) * value_of(choice, A_HQ) / value_of(choice, A_HKV);
    const int64_t row_tiles = value_of(choice, A_B) * value_of(choice, A_HKV) * ((rows + 15) / 16);
    return 16.0 * (double)(row_tiles * value_of(choice, A_SK));
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
            return decode_case_row(c, c->args.kernel, r, j, 0, seen, out_at(c, r, j, 0),
                                   guarded_at(&c->lse, r, 0, j, 0)) == FMLA_OK;
        }
    return false;
}

/* Planted where every row is compared and one key shows. */
static bool can_plant(const int64_t v[AXES])
{
    return v[A_B] && v[A_LSE] && v[A_INPUTS] == INPUTS_NORMAL && v[A_SK] <= 140 &&
           v[A_B] * v[A_SQ] * v[A_HQ] * v[A_SK] <= 40000;
}

static bool plant_before(struct decode_case *c, enum fault fault)
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

static bool plant_after(struct decode_case *c, enum fault fault)
{
    if (!can_plant(c->v)) return false;
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

/* ---- Comparing ------------------------------------------------------------------------------ */

struct row {
    int64_t request, token, head;
};

/* Every row of a small case; of a large one the corners, rows that see nothing or little, and 64 drawn ones.
 */
static int64_t choose_rows(struct decode_case *c, struct row *rows, int64_t most)
{
    int64_t count = 0;
    const int64_t all = c->b * c->s_q * c->h_q;
    if (all <= most && all * c->s_k <= 40000) {
        for (int64_t i = 0; i < all; i++)
            rows[count++] = (struct row){i / c->h_q / c->s_q, i / c->h_q % c->s_q, i % c->h_q};
        return count;
    }
    rows[count++] = (struct row){0, 0, 0};
    rows[count++] = (struct row){c->b - 1, c->s_q - 1, c->h_q - 1};
    rows[count++] = (struct row){0, c->s_q - 1, c->h_q / c->h_kv - 1}; /* the last of a key head */
    rows[count++] = (struct row){c->b - 1, 0, c->h_q - c->h_q / c->h_kv};
    for (int64_t r = 0; r < c->b && count < most - 64; r++)
        if (c->length[r] < c->s_q + 1) rows[count++] = (struct row){r, (c->s_q - 1) / 2, 0};
    while (count < most)
        rows[count++] =
            (struct row){random_between(&c->random, 0, c->b - 1), random_between(&c->random, 0, c->s_q - 1),
                         random_between(&c->random, 0, c->h_q - 1)};
    return count;
}

struct oracle_rows {
    struct decode_case *c;
    const struct row *rows;
    uint16_t (*out)[D_V];
    float *lse;
    atomic_int failures;
};

static void oracle_row(void *data, int64_t i, int32_t worker)
{
    struct oracle_rows *o = data;
    const struct row *row = &o->rows[i];
    (void)worker;
    if (decode_case_row(o->c, "ref", row->request, row->token, row->head,
                        decode_case_seen(o->c, row->request, row->token), o->out[i], &o->lse[i]) != FMLA_OK)
        atomic_fetch_add(&o->failures, 1);
}

static void compare_with_oracle(struct decode_case *c, const struct run *run, struct tally *tally)
{
    enum { MOST = 4096, CHOSEN = 84 };
    static struct row rows[MOST];
    static uint16_t out[MOST][D_V];
    static float lse[MOST];
    const int64_t all = c->b * c->s_q * c->h_q;
    const int64_t count = choose_rows(c, rows, all * c->s_k <= 40000 && all <= MOST ? MOST : CHOSEN);
    struct oracle_rows oracle = {c, rows, out, lse, 0};
    if (run->own_threads) {
        pthread_for(NULL, count, oracle_row, &oracle);
    } else {
#pragma omp parallel for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++) oracle_row(&oracle, i, 0);
    }
    const int failures = atomic_load(&oracle.failures);
    if (failures) report(tally, run, c->name, "the oracle refused a row");

    struct comparison outs = {0}, lses = {0};
    char first[160] = "";
    for (int64_t i = 0; i < count; i++) {
        const uint16_t *mine = guarded_at(&c->out, rows[i].request, rows[i].token, rows[i].head, 0);
        const float *my_lse = guarded_at(&c->lse, rows[i].request, rows[i].head, rows[i].token, 0);
        const int64_t wrong = outs.wrong + lses.wrong;
        for (int d = 0; d < D_V; d++)
            compare_add(&outs, &tolerance_dense_decode_out, guarded_value(&c->out, mine + d),
                        guarded_value(&c->out, &out[i][d]));
        if (c->args.lse) compare_add(&lses, &tolerance_decode_lse, (double)*my_lse, (double)lse[i]);
        if (wrong == 0 && outs.wrong + lses.wrong)
            snprintf(first, sizeof first, "first in request %lld, token %lld, head %lld (lse %g, oracle %g)",
                     (long long)rows[i].request, (long long)rows[i].token, (long long)rows[i].head,
                     (double)*my_lse, (double)lse[i]);
    }
    tally->rows += count;
    tally->cosine_out = fmax(tally->cosine_out, compare_cosine(&outs));
    tally->cosine_lse = fmax(tally->cosine_lse, compare_cosine(&lses));
    char what[320];
    if (!compare_passed(&outs, &tolerance_dense_decode_out)) {
        snprintf(what, sizeof what,
                 "out: %lld of %lld elements off, worst |Δ| %.3g, cosine difference %.3g; %s",
                 (long long)outs.wrong, (long long)outs.count, outs.worst_abs, compare_cosine(&outs), first);
        report(tally, run, c->name, what);
    } else if (!compare_passed(&lses, &tolerance_decode_lse)) {
        snprintf(what, sizeof what, "lse: %lld of %lld off, worst |Δ| %.3g, cosine difference %.3g; %s",
                 (long long)lses.wrong, (long long)lses.count, lses.worst_abs, compare_cosine(&lses), first);
        report(tally, run, c->name, what);
    }
}

/* Batch-invariant: a request has the bits that it has in the batch also alone, or behind another one, and with room for
 * more keys. The others of the batch are left out by strides, so only lengths and table are copied. */
static void compare_elsewhere(struct decode_case *c, const struct run *run, struct tally *tally)
{
    if (!c->args.batch_invariant || !c->b) return;
    const int64_t r = random_between(&c->random, 0, c->b - 1);
    const int64_t n = 1 + random_between(&c->random, 0, 1); /* requests of the new batch; the last is r */
    const int64_t first = n == 1 ? r : random_between(&c->random, 0, r);
    const int64_t more = random_between(&c->random, 0, 3) ? random_between(&c->random, 1, 4500) : 0;
    const int64_t max_pages = c->max_pages + (more + c->page_size - 1) / c->page_size; /* keys more */
    const struct guarded *q = &c->q;
    int64_t q_strides[4] = {q->strides[0] * (r - first), q->strides[1], q->strides[2], q->strides[3]};
    int64_t kv_strides[4] = {c->kv_strides[0], c->kv_strides[1], c->kv_strides[2], c->kv_strides[3]};
    struct guarded out, lse, seqlens, table;
    guarded_make(&out, c->out.tensor.dtype, 4, (int64_t[]){n, c->s_q, c->h_q, D_V}, LAYOUT_CONTIGUOUS);
    guarded_make(&lse, dtype_f32, 3, (int64_t[]){n, c->h_q, c->s_q}, LAYOUT_CONTIGUOUS);
    guarded_make(&seqlens, dtype_i32, 1, &n, LAYOUT_CONTIGUOUS);
    guarded_make(&table, dtype_i32, 2, (int64_t[]){n, max_pages}, LAYOUT_PADDED);
    for (int64_t i = 0; i < n; i++) {
        const int64_t from = i ? r : first;
        /* Clamped already: to the old capacity. */
        *(int32_t *)guarded_at(&seqlens, i, 0, 0, 0) = (int32_t)c->length[from];
        memcpy(guarded_at(&table, i, 0, 0, 0), guarded_at(&c->table, from, 0, 0, 0),
               (size_t)c->max_pages * sizeof(int32_t));
    }
    struct request_view view;
    decode_case_request(c, first, &view);
    view.q_shape[0] = n, view.q.strides = q_strides;
    if (c->paged)
        view.args.block_table = &table.tensor;
    else
        kv_strides[0] *= r - first, view.kv_shape[0] = n, view.kv.strides = kv_strides;
    view.args.seqlens = &seqlens.tensor;
    view.args.out = &out.tensor, view.args.lse = c->args.lse ? &lse.tensor : NULL;
    if (decode_case_call(&view.args, 0x11)) report(tally, run, c->name, fmla_last_error());
    bool same = true;
    for (int64_t j = 0; j < c->s_q; j++)
        for (int64_t h = 0; h < c->h_q; h++) {
            same &= !memcmp(guarded_at(&out, n - 1, j, h, 0), guarded_at(&c->out, r, j, h, 0),
                            D_V * sizeof(uint16_t));
            same &= !memcmp(guarded_at(&lse, n - 1, h, j, 0), guarded_at(&c->lse, r, h, j, 0), sizeof(float));
        }
    if (!same) {
        char what[160];
        snprintf(what, sizeof what,
                 "batch-invariant: request %lld has other bits as the last of %lld, with room for %lld pages",
                 (long long)r, (long long)n, (long long)max_pages);
        report(tally, run, c->name, what);
    }
    struct guarded *all[] = {&out, &lse, &seqlens, &table};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) guarded_free(all[i]);
}

static void set_threads(const struct run *run, int64_t threads)
{
    fmla_set_parallel_for(run->own_threads || threads == THREADS_OWN ? pthread_for : NULL, NULL,
                          PTHREAD_WORKERS);
    fmla_set_num_threads(threads == THREADS_ONE ? 1 : 0);
}

/* FNV-1a over everything that the call only reads. */
static uint64_t hash_inputs(const struct decode_case *c)
{
    const struct guarded *all[] = {&c->q, &c->kv, &c->table, &c->seqlens, &c->sink};
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        for (size_t at = 0; at + 8 <= all[i]->bytes; at += 8) {
            uint64_t word;
            memcpy(&word, all[i]->memory + GUARDED_FRONT + at, sizeof word);
            hash = (hash ^ word) * 0x100000001b3u;
        }
    return hash;
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

static void run_case(const struct run *run, const int64_t v[AXES], uint64_t seed, struct tally *tally)
{
    struct decode_case c;
    decode_case_make(&c, run, v, seed);
    name_case(&c);
    tally->cases++;
    set_threads(run, v[A_THREADS]);
    fmla_status status = FMLA_OK;
    const char *kernel = "";
    if (fmla_dense_decode_kernel(&c.args, &kernel) || strcmp(kernel, run->kernel) != 0)
        report(tally, run, c.name, "the library says that another kernel would run");
    if (v[A_PLAN] != PLAN_INSIDE) status = decode_case_plan(&c);
    const bool planted_before = plant_before(&c, run->fault);
    const uint64_t inputs = hash_inputs(&c);
    unsigned char *before = malloc(c.out.bytes + c.lse.bytes + 1);
    if (!status) status = decode_case_call(&c.args, 0xff);
    memcpy(before, c.out.memory + GUARDED_FRONT, c.out.bytes);
    memcpy(before + c.out.bytes, c.lse.memory + GUARDED_FRONT, c.lse.bytes);
    guarded_reset(&c.out), guarded_reset(&c.lse);
    if (!status) status = decode_case_call(&c.args, 0x00);
    if (planted_before) undo_before(&c);
    if (status) report(tally, run, c.name, fmla_last_error());

    bool planted = planted_before;
    if (run->fault == FAULT_UNSTABLE && can_plant(c.v)) *out_at(&c, 0, 0, 0) ^= 1, planted = true;
    if (memcmp(before, c.out.memory + GUARDED_FRONT, c.out.bytes) ||
        memcmp(before + c.out.bytes, c.lse.memory + GUARDED_FRONT, c.lse.bytes))
        report(tally, run, c.name, "two runs with different garbage in the workspace differ in their bits");
    if (hash_inputs(&c) != inputs) report(tally, run, c.name, "the call changed its inputs");
    if (!status && !all_written(&c)) report(tally, run, c.name, "a row of out was not written");
    free(before);
    planted |= plant_after(&c, run->fault);
    tally->planted |= planted;
    if (!guarded_intact(&c.out))
        report(tally, run, c.name, "out: bytes outside the tensor's elements were written");
    if (!guarded_intact(&c.lse))
        report(tally, run, c.name, "lse: bytes outside the tensor's elements were written");
    if (!status && c.b) {
        compare_with_oracle(&c, run, tally);
        compare_elsewhere(&c, run, tally);
    }
    set_threads(run, THREADS_BUILT_IN);
    decode_case_free(&c);
}

/* The whole of a small case by the oracle, and row by row by the oracle: its own causal masking, head groups
 * and strides against problems that have none. */
static void check_oracle(const struct run *run, struct tally *tally)
{
    struct run oracle = *run;
    oracle.kernel = "ref";
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
    run_case(&oracle, v, run->seed, tally);
}

/* What pairs do not reach: many splits of one request, a cut among the keys that only some rows see, lengths that pass
 * 2^16, more than two chunks in batch-invariant mode, and offsets into the cache of more than 32 bits. */
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
    };
    for (size_t i = 0; i < sizeof special / sizeof special[0]; i++) {
        int64_t v[AXES];
        memcpy(v, special[i], sizeof v);
        v[A_DTYPE] = axes[A_DTYPE].values[0];
        run_case(run, v, run->seed + i, tally);
    }
}

/* Only types that the kernel takes are in its grid. */
static void choose_dtypes(const struct run *run)
{
    struct axis *dtype = &axes[A_DTYPE];
    dtype->count = 0;
    if (strstr(run->dtypes, "bf16")) dtype->values[dtype->count++] = 0;
    if (strstr(run->dtypes, "fp16")) dtype->values[dtype->count++] = 1;
}

/* A case with room for every fault: pages, empty requests, gaps, causal. */
static void check_fault(const struct run *run, struct tally *tally)
{
    const int64_t v[AXES] = {[A_B] = 6,
                             [A_SQ] = 3,
                             [A_SK] = 140,
                             [A_HQ] = 8,
                             [A_HKV] = 1,
                             [A_PAGE] = 16,
                             [A_CAUSAL] = 1,
                             [A_DQK] = 576,
                             [A_LENGTHS] = LENGTHS_VARIED,
                             [A_LAYOUT] = LAYOUT_PADDED,
                             [A_LSE] = 1};
    for (uint64_t i = 0; i < 8 && !tally->planted; i++) run_case(run, v, run->seed + i, tally);
}

void check_dense_decode(const struct run *run, struct tally *tally)
{
    decode_case_draw(run->seed);
    choose_dtypes(run);
    if (run->fault != FAULT_NONE) {
        check_fault(run, tally);
        return;
    }
    check_oracle(run, tally);
    check_special(run, tally);
    struct grid grid = {.axes = AXES,
                        .axis = axes,
                        .possible = possible,
                        .cost = cost,
                        .counts = counts,
                        .dear = 4e5,
                        .random = {run->seed}};
    grid_begin(&grid);
    int choice[GRID_AXES];
    for (uint64_t i = 1; grid_next(&grid, choice); i++) {
        int64_t v[AXES];
        for (int a = 0; a < AXES; a++) v[a] = value_of(choice, a);
        run_case(run, v, run->seed * 1000003 + i, tally);
        if (run->most_cases && (int64_t)i >= run->most_cases) break;
    }
    tally->pairs += grid.pairs, tally->covered += grid.covered;
    grid_end(&grid);
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
