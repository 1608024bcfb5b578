/* SPDX-License-Identifier: MIT
 *
 * Dense decode against the oracle. A case is made in guarded memory with everything unused poisoned, run
 * twice through the real dispatch, and compared row by row: small cases whole, large ones in chosen rows,
 * each recomputed by the oracle as a problem of its own (one token, one head, the keys it sees).
 */
#include "checkattn.h"
#include "grid.h"
#include "num.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    A_B,
    A_SQ,
    A_SK,
    A_HQ,
    A_HKV,
    A_PAGE,
    A_CAUSAL,
    A_DTYPE,
    A_DQK,
    A_LENGTHS,
    A_SINK,
    A_EMPTY,
    A_BASE,
    A_INVARIANT,
    A_PLAN,
    A_PARTITIONS,
    A_LAYOUT,
    A_INPUTS,
    A_THREADS,
    AXES
};
enum { LENGTHS_FIXED, LENGTHS_VARIED, LENGTHS_BEYOND };
enum { SINK_NONE, SINK_FINITE, SINK_INFINITE };
enum { PLAN_INSIDE, PLAN_GIVEN, PLAN_STALE };
enum { INPUTS_NORMAL, INPUTS_SPIKED };
enum { THREADS_BUILT_IN, THREADS_ONE, THREADS_OWN };
enum { D_V = 512 };

static const struct axis axes[AXES] = {
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
    {"layout", 3, {LAYOUT_CONTIGUOUS, LAYOUT_PADDED, LAYOUT_ODD}},
    {"inputs", 2, {INPUTS_NORMAL, INPUTS_SPIKED}},
    {"threads", 3, {THREADS_BUILT_IN, THREADS_ONE, THREADS_OWN}},
};

static int64_t value_of(const int *choice, int axis)
{
    return choice[axis] < 0 ? -1 : axes[axis].values[choice[axis]];
}

static bool possible(const int *choice)
{
    const int64_t h_q = value_of(choice, A_HQ), h_kv = value_of(choice, A_HKV);
    return h_q < 0 || h_kv < 0 || h_q % h_kv == 0;
}

/* Row-keys that the generic kernel computes: its vectors hold 16 rows. */
static double cost(const int *choice)
{
    const double rows = (double)(value_of(choice, A_SQ) * value_of(choice, A_HQ) / value_of(choice, A_HKV));
    return (double)(value_of(choice, A_B) * value_of(choice, A_SK) * value_of(choice, A_HKV)) *
           ceil(rows / 16) * 16;
}

/* ---- A case --------------------------------------------------------------------------------- */

struct decode_case {
    int64_t v[AXES]; /* the values of the axes */
    struct random_state random;
    char name[256];
    int64_t b, s_q, h_q, h_kv, d_qk, s_k, page_size, max_pages, pages;
    int64_t *length; /* of each request, clamped */
    struct guarded q, kv, table, seqlens, sink, out, lse;
    fmla_tensor kv_view; /* of kv; requests of a contiguous cache may share memory */
    int64_t kv_strides[4];
    bool paged;
    void *plan, *workspace;
    fmla_dense_decode_args args;
};

/* Cached values: drawn once, copied from random places. */
enum { DRAWN = 1 << 18 };
static uint16_t drawn[2][2][DRAWN]; /* [dtype][deviation 0.1 or 1] */

static void draw_values(uint64_t seed)
{
    struct random_state random = {seed};
    for (int i = 0; i < DRAWN; i++) {
        const float x = random_normal(&random);
        for (int wide = 0; wide < 2; wide++) {
            const float y = fmaxf(-1.0f, fminf(1.0f, wide ? x : 0.1f * x));
            drawn[0][wide][i] = num_to_bf16(y);
            drawn[1][wide][i] = num_to_fp16(y);
        }
    }
}

static void copy_drawn(struct decode_case *c, void *to, bool wide)
{
    const int64_t from = random_between(&c->random, 0, DRAWN - c->d_qk);
    memcpy(to, drawn[c->v[A_DTYPE]][wide] + from, (size_t)c->d_qk * sizeof(uint16_t));
}

/* With spiked inputs, keys beside a border of a block of 64, a page or the request weigh more than others, so
 * that losing one shows even among thousands. */
static bool is_border(const struct decode_case *c, int64_t key, int64_t length)
{
    return key % 64 == 0 || key % 64 == 63 || key % c->page_size == 0 || (key + 1) % c->page_size == 0 ||
           key + 1 == length;
}

static void make_lengths(struct decode_case *c)
{
    const int64_t capacity = c->max_pages * c->page_size;
    c->length = calloc((size_t)c->b + 1, sizeof *c->length);
    for (int64_t r = 0; r < c->b; r++) {
        int64_t length = c->s_k;
        if (c->v[A_LENGTHS] == LENGTHS_VARIED)
            length = random_between(&c->random, 0, 3) ? random_between(&c->random, 0, c->s_k) : 0;
        if (c->v[A_LENGTHS] == LENGTHS_BEYOND && r % 2)
            length = r % 4 == 1 ? -7 : 2147483647; /* to be clamped */
        *(int32_t *)guarded_at(&c->seqlens, r, 0, 0, 0) = (int32_t)length;
        c->length[r] = length < 0 ? 0 : length > capacity ? capacity : length;
    }
}

/* Gives every request its pages: the last one its own (so that its tail can be poisoned), the others from a
 * pool that requests share when the batch would need much memory. Table entries that are not used hold
 * garbage. */
static void make_table(struct decode_case *c, int64_t shared)
{
    int32_t *own = malloc(sizeof(int32_t) * (size_t)(c->b + 1));
    for (int64_t r = 0; r < c->b; r++) own[r] = (int32_t)(shared + r);
    random_shuffle(&c->random, own, c->b);
    int64_t next = 0;
    for (int64_t r = 0; r < c->b; r++) {
        const int64_t used = (c->length[r] + c->page_size - 1) / c->page_size;
        for (int64_t i = 0; i < c->max_pages; i++) {
            static const int32_t garbage[] = {-1, 2147480000, -2147483647 - 1};
            int32_t page = garbage[(r + i) % 3];
            if (i + 1 < used) page = (int32_t)(next++ * 7919 % shared);
            if (i + 1 == used) page = own[r];
            *(int32_t *)guarded_at(&c->table, r, i, 0, 0) = page;
        }
    }
    free(own);
}

static int64_t page_of(const struct decode_case *c, int64_t request, int64_t key)
{
    return c->paged ? *(const int32_t *)guarded_at(&c->table, request, key / c->page_size, 0, 0) : request;
}

static void *key_at(const struct decode_case *c, int64_t request, int64_t key, int64_t head)
{
    const int64_t at = page_of(c, request, key) * c->kv_strides[0] + key % c->page_size * c->kv_strides[1] +
                       head * c->kv_strides[2];
    return (char *)c->kv.tensor.data + c->kv.tensor.byte_offset + at * (int64_t)sizeof(uint16_t);
}

static void make_cache(struct decode_case *c, enum layout layout)
{
    const fmla_dtype dtype = c->v[A_DTYPE] ? dtype_fp16 : dtype_bf16;
    int64_t shared = 1;
    if (c->paged) { /* at most 8192 slots to share */
        for (int64_t r = 0; r < c->b; r++) shared += c->length[r] / c->page_size;
        if (shared > 8192 / c->page_size + 1) shared = 8192 / c->page_size + 1;
        make_table(c, shared);
    }
    c->pages = c->paged ? shared + c->b : c->b;
    /* A contiguous cache of many long requests: all read the same memory, through a stride of 0. */
    const bool aliased = !c->paged && c->b * c->s_k > 65536;
    const int64_t shape[4] = {aliased ? 1 : c->pages, c->page_size, c->h_kv, c->d_qk};
    guarded_make(&c->kv, dtype, 4, shape, layout); /* NaN everywhere */
    memcpy(c->kv_strides, c->kv.strides, sizeof c->kv_strides);
    c->kv_view = c->kv.tensor;
    if (aliased) {
        c->kv_strides[0] = 0;
        c->kv.shape[0] = c->b;
        c->kv_view.strides = c->kv_strides;
    }
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t t = 0; t < c->length[r]; t++)
            for (int64_t h = 0; h < c->h_kv; h++)
                copy_drawn(c, key_at(c, r, t, h),
                           c->v[A_INPUTS] == INPUTS_SPIKED && is_border(c, t, c->length[r]));
}

static void make_sink(struct decode_case *c)
{
    guarded_make(&c->sink, dtype_f32, 1, &c->h_q, LAYOUT_CONTIGUOUS);
    for (int64_t h = 0; h < c->h_q; h++) {
        float sink = random_normal(&c->random) * 3.0f;
        if (c->v[A_SINK] == SINK_INFINITE && h % 3 < 2) sink = h % 3 ? INFINITY : -INFINITY;
        *(float *)guarded_at(&c->sink, h, 0, 0, 0) = sink;
    }
}

static void *aligned_bytes(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!memory) exit(1);
    return memory;
}

static fmla_status make_plan(struct decode_case *c)
{
    struct guarded other;
    guarded_make(&other, dtype_i32, 1, &c->b, LAYOUT_CONTIGUOUS);
    for (int64_t r = 0; r < c->b; r++)
        *(int32_t *)guarded_at(&other, r, 0, 0, 0) =
            c->v[A_PLAN] == PLAN_STALE ? (int32_t)random_between(&c->random, 0, 2 * c->s_k + 1)
                                       : (int32_t)c->length[r];
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &other.tensor;
    args.s_q = c->s_q, args.h_q = c->h_q, args.h_kv = c->h_kv;
    args.num_partitions = (int32_t)c->v[A_PARTITIONS];
    fmla_status status = fmla_decode_plan_size(&args, &args.plan_size);
    c->plan = args.plan = aligned_bytes(args.plan_size);
    if (!status) status = fmla_decode_plan(&args);
    c->args.plan = c->plan, c->args.plan_size = args.plan_size;
    guarded_free(&other);
    return status;
}

static void name_case(struct decode_case *c)
{
    size_t used = 0;
    for (int i = 0; i < AXES && used < sizeof c->name; i++)
        used += (size_t)snprintf(c->name + used, sizeof c->name - used, "%s%s %lld", i ? ", " : "",
                                 axes[i].name, (long long)c->v[i]);
}

static void make_case(struct decode_case *c, const struct run *run, const int64_t v[AXES], uint64_t seed)
{
    memset(c, 0, sizeof *c);
    memcpy(c->v, v, sizeof c->v);
    name_case(c);
    c->random.state = seed;
    c->b = v[A_B], c->s_q = v[A_SQ], c->h_q = v[A_HQ], c->h_kv = v[A_HKV], c->d_qk = v[A_DQK],
    c->s_k = v[A_SK];
    c->paged = v[A_PAGE] != 0;
    c->page_size = c->paged ? v[A_PAGE] : c->s_k + 3;
    c->max_pages =
        c->paged ? (c->s_k + c->page_size - 1) / c->page_size + (v[A_LENGTHS] == LENGTHS_BEYOND ? 0 : 2) : 1;

    const fmla_dtype dtype = v[A_DTYPE] ? dtype_fp16 : dtype_bf16;
    const enum layout layout = (enum layout)v[A_LAYOUT];
    guarded_make(&c->q, dtype, 4, (int64_t[]){c->b, c->s_q, c->h_q, c->d_qk}, layout);
    guarded_make(&c->seqlens, dtype_i32, 1, &c->b, LAYOUT_CONTIGUOUS);
    guarded_make(&c->out, dtype, 4, (int64_t[]){c->b, c->s_q, c->h_q, D_V}, layout);
    guarded_make(&c->lse, dtype_f32, 3, (int64_t[]){c->b, c->h_q, c->s_q}, layout);
    guarded_make(&c->table, dtype_i32, 2, (int64_t[]){c->b, c->max_pages}, layout);
    make_lengths(c);
    make_cache(c, layout);
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++)
            for (int64_t h = 0; h < c->h_q; h++) copy_drawn(c, guarded_at(&c->q, r, j, h, 0), false);

    fmla_dense_decode_args *args = &c->args;
    *args = FMLA_INIT(fmla_dense_decode_args);
    args->q = &c->q.tensor, args->kv_cache = &c->kv_view, args->seqlens = &c->seqlens.tensor;
    args->block_table = c->paged ? &c->table.tensor : NULL;
    args->out = &c->out.tensor, args->lse = &c->lse.tensor;
    if (v[A_SINK] != SINK_NONE) {
        make_sink(c);
        args->attn_sink = &c->sink.tensor;
    }
    args->kernel = run->kernel;
    args->softmax_scale = v[A_INPUTS] == INPUTS_SPIKED ? 0.5f : 0.0f;
    args->causal = (int32_t)v[A_CAUSAL];
    args->lse_empty = (int32_t)v[A_EMPTY];
    args->log_base = (int32_t)v[A_BASE];
    args->batch_invariant = (int32_t)v[A_INVARIANT];
    args->num_partitions = (int32_t)v[A_PARTITIONS];
}

static void free_case(struct decode_case *c)
{
    struct guarded *all[] = {&c->q, &c->kv, &c->table, &c->seqlens, &c->sink, &c->out, &c->lse};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) guarded_free(all[i]);
    free(c->plan), free(c->workspace), free(c->length);
}

/* ---- Running it ----------------------------------------------------------------------------- */

/* With a workspace of exactly the size that was answered, full of `fill`. */
static fmla_status call(fmla_dense_decode_args *args, int fill)
{
    size_t bytes = 0, alignment = 0;
    fmla_status status = fmla_dense_decode_workspace_size(args, &bytes, &alignment);
    if (status) return status;
    char *memory = aligned_bytes(bytes + 64);
    memset(memory, fill, bytes);
    memset(memory + bytes, 0x5a, 64);
    args->workspace = memory, args->workspace_size = bytes;
    status = fmla_dense_decode(args);
    for (int i = 0; i < 64; i++)
        if (memory[bytes + (size_t)i] != 0x5a) {
            fprintf(stderr, "checkattn: the call wrote past the end of its workspace\n");
            exit(1);
        }
    free(memory);
    return status;
}

/* The keys that a row sees. */
static int64_t seen_by(const struct decode_case *c, int64_t request, int64_t token)
{
    const int64_t seen = c->args.causal ? c->length[request] - c->s_q + token + 1 : c->length[request];
    return seen < 0 ? 0 : seen;
}

/* One row by `kernel`, as a problem of its own over its first `seen` keys; out has D_V elements. */
static fmla_status one_row(const struct decode_case *c, const char *kernel, int64_t request, int64_t token,
                           int64_t head, int64_t seen, uint16_t *out, float *lse)
{
    static const int64_t one[3] = {1, 1, 1};
    const int64_t group = c->h_q / c->h_kv;
    const int64_t q_shape[4] = {1, 1, 1, c->d_qk}, out_shape[4] = {1, 1, 1, D_V};
    const int64_t kv_shape[4] = {c->kv_view.shape[0], c->page_size, 1, c->d_qk},
                  table_shape[2] = {1, c->max_pages};
    const int32_t length = (int32_t)seen;
    fmla_tensor q = c->q.tensor, kv = c->kv_view, table = c->table.tensor, sink = c->sink.tensor;
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    const fmla_tensor seqlens = {(void *)&length, cpu, 1, dtype_i32, one, NULL, 0};
    const fmla_tensor out_tensor = {out, cpu, 4, c->q.tensor.dtype, out_shape, NULL, 0};
    const fmla_tensor lse_tensor = {lse, cpu, 3, dtype_f32, one, NULL, 0};
    q.data = guarded_at(&c->q, request, token, head, 0), q.byte_offset = 0, q.shape = q_shape;
    kv.shape = kv_shape, kv.strides = c->kv_strides;
    kv.data =
        (uint16_t *)kv.data + head / group * c->kv_strides[2] + (c->paged ? 0 : request * c->kv_strides[0]);
    table.shape = table_shape;
    if (c->paged) table.data = guarded_at(&c->table, request, 0, 0, 0), table.byte_offset = 0;
    if (c->args.attn_sink) sink.data = guarded_at(&c->sink, head, 0, 0, 0), sink.shape = one;

    fmla_dense_decode_args args = c->args;
    args.q = &q, args.kv_cache = &kv, args.seqlens = &seqlens, args.out = &out_tensor, args.lse = &lse_tensor;
    args.block_table = c->paged ? &table : NULL;
    args.attn_sink = c->args.attn_sink ? &sink : NULL;
    args.kernel = kernel, args.plan = NULL, args.causal = 0, args.batch_invariant = 0;
    return call(&args, 0xff);
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
            const int64_t seen = seen_by(c, r, j) + change;
            if (seen < 1 || seen > c->length[r]) continue;
            return one_row(c, c->args.kernel, r, j, 0, seen, out_at(c, r, j, 0),
                           guarded_at(&c->lse, r, 0, j, 0)) == FMLA_OK;
        }
    return false;
}

/* Planted where every row is compared and one key shows. */
static bool can_plant(const struct decode_case *c)
{
    return c->b && c->s_k <= 140 && c->b * c->s_q * c->h_q * c->s_k <= 40000;
}

static bool plant_before(struct decode_case *c, enum fault fault)
{
    if (fault != FAULT_SWAPPED_PAGE || !c->paged || c->page_size < 16 || !can_plant(c)) return false;
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
    if (!can_plant(c)) return false;
    unsigned char *end = c->out.memory + c->out.bytes + 256; /* the first byte of the canary behind */
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
            if (seen_by(c, r, 0)) continue;
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

static void compare_with_oracle(struct decode_case *c, const struct run *run, struct tally *tally)
{
    enum { MOST = 4096, CHOSEN = 84 };
    static struct row rows[MOST];
    static uint16_t out[MOST][D_V];
    static float lse[MOST];
    const int64_t all = c->b * c->s_q * c->h_q;
    const int64_t count = choose_rows(c, rows, all * c->s_k <= 40000 && all <= MOST ? MOST : CHOSEN);
    int failures = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : failures)
    for (int64_t i = 0; i < count; i++)
        failures += one_row(c, "ref", rows[i].request, rows[i].token, rows[i].head,
                            seen_by(c, rows[i].request, rows[i].token), out[i], &lse[i]) != FMLA_OK;
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
        compare_add(&lses, &tolerance_decode_lse, (double)*my_lse, (double)lse[i]);
        if (wrong == 0 && outs.wrong + lses.wrong)
            snprintf(first, sizeof first, "first in request %lld, token %lld, head %lld (lse %g, oracle %g)",
                     (long long)rows[i].request, (long long)rows[i].token, (long long)rows[i].head,
                     (double)*my_lse, (double)lse[i]);
    }
    tally->rows += count;
    char what[320];
    if (!compare_passed(&outs, &tolerance_dense_decode_out)) {
        snprintf(what, sizeof what,
                 "out: %lld of %lld elements off, worst |Δ| %.3g, cosine difference %.3g; %s",
                 (long long)outs.wrong, (long long)outs.count, outs.worst_abs, compare_cosine(&outs), first);
        report(tally, run, c->name, what);
    } else if (!compare_passed(&lses, &tolerance_decode_lse)) {
        snprintf(what, sizeof what, "lse: %lld of %lld off, worst |Δ| %.3g; %s", (long long)lses.wrong,
                 (long long)lses.count, lses.worst_abs, first);
        report(tally, run, c->name, what);
    }
}

/* Batch-invariant: a request alone has the bits that it has in the batch. */
static void compare_alone(struct decode_case *c, const struct run *run, struct tally *tally)
{
    if (!c->args.batch_invariant || !c->b) return;
    const int64_t r = random_between(&c->random, 0, c->b - 1);
    struct guarded out, lse;
    const int64_t kv_shape[4] = {c->kv_view.shape[0], c->page_size, c->h_kv, c->d_qk},
                  table_shape[2] = {1, c->max_pages};
    const int64_t q_shape[4] = {1, c->s_q, c->h_q, c->d_qk}, one = 1;
    guarded_make(&out, c->out.tensor.dtype, 4, (int64_t[]){1, c->s_q, c->h_q, D_V}, LAYOUT_CONTIGUOUS);
    guarded_make(&lse, dtype_f32, 3, (int64_t[]){1, c->h_q, c->s_q}, LAYOUT_CONTIGUOUS);
    fmla_tensor q = c->q.tensor, kv = c->kv_view, table = c->table.tensor, seqlens = c->seqlens.tensor;
    q.shape = q_shape, q.data = guarded_at(&c->q, r, 0, 0, 0), q.byte_offset = 0;
    kv.shape = kv_shape, kv.strides = c->kv_strides;
    if (!c->paged) kv.data = (uint16_t *)kv.data + r * c->kv_strides[0];
    table.shape = table_shape;
    if (c->paged) table.data = guarded_at(&c->table, r, 0, 0, 0), table.byte_offset = 0;
    seqlens.shape = &one, seqlens.data = guarded_at(&c->seqlens, r, 0, 0, 0);
    fmla_dense_decode_args args = c->args;
    args.q = &q, args.kv_cache = &kv, args.seqlens = &seqlens, args.out = &out.tensor, args.lse = &lse.tensor;
    args.block_table = c->paged ? &table : NULL;
    args.plan = NULL;
    if (call(&args, 0x11)) report(tally, run, c->name, fmla_last_error());
    bool same = true;
    for (int64_t j = 0; j < c->s_q; j++)
        for (int64_t h = 0; h < c->h_q; h++) {
            same &= !memcmp(guarded_at(&out, 0, j, h, 0), guarded_at(&c->out, r, j, h, 0),
                            D_V * sizeof(uint16_t));
            same &= !memcmp(guarded_at(&lse, 0, h, j, 0), guarded_at(&c->lse, r, h, j, 0), sizeof(float));
        }
    if (!same)
        report(tally, run, c->name, "batch-invariant: a request alone has other bits than in the batch");
    guarded_free(&out), guarded_free(&lse);
}

static void set_threads(int64_t threads)
{
    fmla_set_parallel_for(threads == THREADS_OWN ? pthread_for : NULL, NULL, PTHREAD_WORKERS);
    fmla_set_num_threads(threads == THREADS_ONE ? 1 : 0);
}

static void run_case(const struct run *run, const int64_t v[AXES], uint64_t seed, struct tally *tally)
{
    struct decode_case c;
    make_case(&c, run, v, seed);
    tally->cases++;
    set_threads(v[A_THREADS]);
    fmla_status status = FMLA_OK;
    if (v[A_PLAN] != PLAN_INSIDE) status = make_plan(&c);
    const bool planted_before = plant_before(&c, run->fault);
    unsigned char *before = malloc(c.out.bytes + c.lse.bytes + 1);
    if (!status) status = call(&c.args, 0xff);
    memcpy(before, c.out.memory + 256, c.out.bytes);
    memcpy(before + c.out.bytes, c.lse.memory + 256, c.lse.bytes);
    guarded_reset(&c.out), guarded_reset(&c.lse);
    if (!status) status = call(&c.args, 0x00);
    if (planted_before) undo_before(&c);
    if (status) report(tally, run, c.name, fmla_last_error());

    bool planted = planted_before;
    if (run->fault == FAULT_UNSTABLE && can_plant(&c)) *out_at(&c, 0, 0, 0) ^= 1, planted = true;
    if (memcmp(before, c.out.memory + 256, c.out.bytes) ||
        memcmp(before + c.out.bytes, c.lse.memory + 256, c.lse.bytes))
        report(tally, run, c.name, "two runs with different garbage in the workspace differ in their bits");
    free(before);
    planted |= plant_after(&c, run->fault);
    tally->planted |= planted;
    if (!guarded_intact(&c.out))
        report(tally, run, c.name, "out: bytes outside the tensor's elements were written");
    if (!guarded_intact(&c.lse))
        report(tally, run, c.name, "lse: bytes outside the tensor's elements were written");
    if (!status && c.b) {
        compare_with_oracle(&c, run, tally);
        compare_alone(&c, run, tally);
    }
    set_threads(THREADS_BUILT_IN);
    free_case(&c);
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
                             [A_LAYOUT] = LAYOUT_ODD};
    run_case(&oracle, v, run->seed, tally);
}

static bool takes(const struct run *run, int64_t dtype)
{
    return strstr(run->dtypes, dtype ? "fp16" : "bf16") != NULL;
}

void check_dense_decode(const struct run *run, struct tally *tally)
{
    draw_values(run->seed);
    if (run->fault == FAULT_NONE) check_oracle(run, tally);
    struct grid grid = {
        .axes = AXES, .axis = axes, .possible = possible, .cost = cost, .dear = 4e5, .random = {run->seed}};
    grid_begin(&grid);
    int choice[GRID_AXES];
    for (uint64_t i = 1; grid_next(&grid, choice); i++) {
        int64_t v[AXES];
        for (int a = 0; a < AXES; a++) v[a] = value_of(choice, a);
        if (!takes(run, v[A_DTYPE])) continue;
        const int64_t failed = tally->failed;
        run_case(run, v, run->seed * 1000003 + i, tally);
        if (run->fault != FAULT_NONE && (tally->planted || tally->failed > failed)) break;
    }
    tally->pairs += grid.pairs, tally->covered += grid.covered;
    grid_end(&grid);
}

/* ---- Timing --------------------------------------------------------------------------------- */

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void time_dense_decode(const struct run *run)
{
    static const int64_t shapes[][3] = {{1, 16, 4096}, {1, 128, 4096}, {32, 16, 512}}; /* b, h_q, s_k */
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const int64_t v[AXES] = {
            [A_B] = shapes[i][0], [A_SQ] = 1,    [A_SK] = shapes[i][2], [A_HQ] = shapes[i][1],
            [A_HKV] = 1,          [A_PAGE] = 64, [A_DQK] = 576};
        struct decode_case c;
        make_case(&c, run, v, run->seed);
        double best = 1e30;
        for (int repeat = 0; repeat < 3; repeat++) {
            const double start = seconds();
            if (call(&c.args, 0)) break;
            const double time = seconds() - start;
            if (time < best) best = time;
        }
        const double flop = 2.0 * (double)(c.d_qk + D_V) * (double)(c.b * c.s_q * c.h_q * c.s_k);
        printf("  time: %s dense_decode b %lld, s_k %lld, h_q %lld: %.2f ms, %.1f GFLOP/s\n", run->kernel,
               (long long)c.b, (long long)c.s_k, (long long)c.h_q, best * 1e3, flop / best * 1e-9);
        free_case(&c);
    }
}
