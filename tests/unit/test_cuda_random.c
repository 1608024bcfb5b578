/* SPDX-License-Identifier: MIT
 *
 * Drawn shapes of every operation on fake GPUs of many sizes, with every kernel that can be forced: what the workspace query
 * answers is what the launch takes, no kernel takes more, all that kernels are told to write lies inside it, and grids are in
 * range. A case that ends in a signal names its shape first.
 *
 *     test_cuda_random [SHAPES [SEED [FIRST]]]    of each operation and GPU; FIRST draws a case again that a failure names
 */
#include "fake_cuda/launches.h"

#include "cuda/sm90/sparse_decode/choice.h"

#include <signal.h>

static struct machine {
    int sms, capability, shared_bytes;
} machine;
static uint64_t seed = 1, number;
static int64_t refused_calls, calls;

/* What the drawn case is; of one operation at a time. */
static union {
    struct drawn_sparse sparse;
    struct drawn_dense dense;
    struct drawn_prefill prefill;
    struct {
        struct plan_call args;
        struct held length, rows, splits;
    } plan;
    struct {
        fmla_merge_args args;
        struct held parts, lse_parts, out, lse;
    } merge;
    struct {
        fmla_cache_append_args append;
        fmla_cache_gather_args gather;
        struct held latent, cache, slots;
    } cache;
} call;
static char shape_words[384];
static int shape_length;
static const char *forced; /* NULL: dispatch chooses */

/* In words that a signal's handler may write. */
#define SHAPE(format, ...)                                                                                   \
    shape_length = snprintf(                                                                                 \
        shape_words, sizeof shape_words, "\ncase %" PRIu64 " of seed %" PRIu64 ", %d SMs of %d.%d: " format, \
        number, seed, machine.sms, machine.capability / 10, machine.capability % 10, __VA_ARGS__)
#define HOLDS(condition)                                                                                     \
    CHECK(condition, "%s, %s: %s", shape_words, forced ? forced : "as chosen", fmla_last_error())

static void died(int signal_number)
{
    (void)signal_number;
    const size_t most = sizeof shape_words - 1, length = shape_length > 0 ? (size_t)shape_length : 0;
    const ssize_t written = write(STDERR_FILENO, shape_words, length < most ? length : most);
    _exit(written > 0 ? 98 : 97);
}

/* ---- What kernels are told --------------------------------------------------------------------- */

static char *const workspace = (char *)(UINT64_C(1) << 60);

static bool inside(const void *begin, int64_t size, int64_t needed, const void *end)
{
    int64_t bytes;
    return (const char *)begin >= workspace && !__builtin_mul_overflow(size, needed, &bytes) &&
           bytes <= (const char *)end - (const char *)begin;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static const struct fake_launch *launch_named(const char *begins)
{
    for (int i = 0; i < fake->launches; i++)
        if (!strncmp(fake->launch[i].kernel, begins, strlen(begins))) return &fake->launch[i];
    return NULL;
}

/* A call that may be cut: plan, slots and join; the decode launch's blocks of threads, a worker and tile each. `end`: of what
 * they have of the workspace. */
static void judge_split(const struct split_params *split, int64_t b, int64_t rows, int64_t capacity,
                        int64_t tiles, const struct fake_launch *decode, bool in_turns, const void *whole,
                        bool in_tables, const char *end)
{
    const bool planned = split->partitions != NULL;
    const int64_t workers = planned ? split->num_partitions : b * split->chunk_lanes;
    const int64_t blocks = workers * tiles;
    HOLDS(tiles >= 1 && tiles <= INT32_MAX && workers >= 1);
    HOLDS(decode->config.grid_x == (in_turns && blocks > INT32_MAX ? INT32_MAX : blocks));
    int64_t slots = planned && split->num_partitions > 1 ? 2 * (int64_t)split->num_partitions : 0;
    if (!planned) {
        const int64_t chunks = capacity > split->chunk_keys ? ceil_div(capacity, split->chunk_keys) : 1;
        HOLDS(split->chunk_keys > 0 && split->chunk_keys % PLAN_BLOCK == 0 && split->chunks == chunks);
        HOLDS(split->chunk_lanes >= 1 && split->chunk_lanes <= split->chunks);
        if (chunks > 1) slots = b * chunks;
    }
    const struct fake_launch *const join = launch_named("join"), *const planner = launch_named("decode_plan");
    HOLDS(!join == !slots && !split->slot_out == !slots && !split->slot_lse == !slots);
    if (slots) {
        HOLDS(inside(split->slot_out, slots * rows, 512 * (int64_t)sizeof(float), split->slot_lse));
        HOLDS(inside(split->slot_lse, slots * rows, sizeof(float), end));
    }
    HOLDS(!planner == (!planned || whole || in_tables));
    if (whole) HOLDS(!planned || (const void *)split->header == whole);
    if (planned && !in_tables)
        HOLDS((const void *)split->partitions == (const void *)(split->header + 1) &&
              split->num_splits == (const int32_t *)(split->partitions + split->num_partitions));
    if (!planner) return;
    const struct plan_params plan = plan_params_of(planner);
    HOLDS(plan.b == b && plan.header == split->header && plan.partitions == split->partitions &&
          plan.num_splits == split->num_splits && plan.num_partitions == split->num_partitions);
    HOLDS(divides(plan.partitions_divisor, split->num_partitions));
    HOLDS((char *)plan.header == workspace &&
          inside(plan.num_splits, b + 1, sizeof(int32_t), slots ? (const char *)split->slot_out : end));
}

static void judge_sparse(size_t bytes)
{
    const struct drawn_sparse *c = &call.sparse;
    const int64_t b = c->q.shape[0], s_q = c->q.shape[1], h_q = c->q.shape[2];
    const fmla_sparse_decode_args *a = &c->args;
    const int64_t topk = c->indices.shape[2], extra = a->extra_indices ? c->extra_indices.shape[2] : 0;
    const struct fake_launch *decode = launch_named("sm90_sparse_decode");
    const bool hopper = decode != NULL;
    const bool few = hopper && strstr(decode->kernel, "small");
    if (!hopper) decode = launch_named("sparse_decode");
    HOLDS(!decode == !b && (decode || !fake->launches));
    if (!decode) return;
    const struct sparse_decode_params p = sparse_decode_params_of(decode);
    const int64_t heads = few ? SM90_SPARSE_DECODE_SMALL_HEADS : SM90_SPARSE_DECODE_HEADS;
    const int64_t tiles = hopper ? s_q * ceil_div(h_q, heads) : ceil_div(s_q * h_q, SPARSE_WARPS);
    HOLDS(p.b == b && p.s_q == s_q && p.h_q == h_q && p.tiles == tiles);
    HOLDS(p.tiles_of_token == (hopper ? tiles / s_q : 0) && divides(p.heads_divisor, h_q));
    HOLDS(divides(p.tiles_divisor, tiles) && (!hopper || divides(p.token_divisor, tiles / s_q)));
    HOLDS(divides(p.chunks_divisor, p.split.chunks) && p.split.slots_in_halves == hopper && !p.split.marks);
    judge_split(&p.split, b, s_q * h_q, plan_topk_length(topk, extra, extra), tiles, decode, false,
                a->batch_invariant ? NULL : a->plan, a->partitions && !a->batch_invariant, workspace + bytes);
}

static void judge_dense(size_t bytes)
{
    const struct drawn_dense *c = &call.dense;
    const int64_t b = c->q.shape[0], s_q = c->q.shape[1], h_q = c->q.shape[2], h_kv = c->kv.shape[2];
    const fmla_dense_decode_args *a = &c->args;
    const int64_t rows = s_q * (h_q / h_kv);
    const struct fake_launch *decode = launch_named("sm90_dense_decode");
    const bool hopper = decode != NULL;
    if (!hopper) decode = launch_named("sm80_dense_decode");
    HOLDS(!decode == !b && (decode || !fake->launches));
    if (!decode) return;
    const struct dense_decode_sm90_params params =
        dense_decode_sm90_params_of(decode); /* which begin with those of the portable kernel */
    const struct dense_decode_params *const p = &params.call;
    int64_t rows_of_tile = 64;
    if (!hopper) sscanf(strrchr(decode->kernel, '_'), "_%" SCNd64, &rows_of_tile);
    const int64_t tiles_of_head = ceil_div(rows, rows_of_tile), tiles = h_kv * tiles_of_head;
    HOLDS(p->b == b && p->s_q == s_q && p->h_q == h_q && p->h_kv == h_kv && p->rows == rows);
    HOLDS(divides(p->group_divisor, h_q / h_kv) && divides(p->page_divisor, c->kv.shape[1]));
    if (hopper)
        HOLDS(params.tiles_of_head == tiles_of_head && divides(params.tiles_divisor, tiles) &&
              divides(params.tiles_of_head_divisor, tiles_of_head));
    const char *end = workspace + bytes;
    HOLDS(!p->split.marks == !(hopper && p->split.partitions && p->split.num_partitions > 1));
    if (p->split.marks) {
        const int64_t mark_tiles = h_kv * ceil_div(rows, ROWS_OF_MARK);
        HOLDS(p->split.tiles == mark_tiles && p->split.tiles_of_head == mark_tiles / h_kv);
        HOLDS(inside(p->split.marks, mark_tiles * p->split.num_partitions, MARKS_OF_TILE * 4, end));
        end = (const char *)p->split.marks;
    }
    const int64_t capacity = c->kv.shape[1] * (a->block_table ? c->table.shape[1] : 1);
    judge_split(&p->split, b, s_q * h_q, capacity < INT32_MAX ? capacity : INT32_MAX, tiles, decode, !hopper,
                a->batch_invariant ? NULL : a->plan, a->partitions && !a->batch_invariant, end);
}

/* One launch of the bf16 kernel, and the join of its pieces, if tiles are cut. */
static void judge_pieces(const struct fake_launch *launch, const struct fake_launch *next, size_t bytes)
{
    const struct sparse_prefill_sm90_params p = sparse_prefill_sm90_params_of(launch);
    const int64_t tiles = (int64_t)p.call.s_q * p.call.tiles, cut = tiles - p.cut.whole;
    HOLDS(p.cut.pieces >= 1 && p.cut.pieces <= MOST_PREFILL_PIECES && cut >= 0 && p.cut.whole >= 0);
    HOLDS(p.items == p.cut.whole + cut * p.cut.pieces && divides(p.cut.pieces_divisor, p.cut.pieces));
    HOLDS((int64_t)launch->config.grid_x == (p.items < machine.sms ? p.items : machine.sms));
    const bool joined = next && !strcmp(next->kernel, "sm90_sparse_prefill_join");
    HOLDS(joined == (p.cut.pieces > 1) && joined == (strstr(launch->kernel, "pieces") != NULL));
    if (!joined) return;
    HOLDS(inside(p.cut.slots, p.items - p.cut.whole, PREFILL_SLOT_BYTES, workspace + bytes));
    HOLDS(next->config.grid_x == cut * 64 / PREFILL_JOIN_WARPS);
}

static void judge_prefill(size_t bytes)
{
    const struct drawn_prefill *c = &call.prefill;
    const int64_t s_q = c->q.shape[0], h_q = c->q.shape[1], h_kv = c->indices.shape[1];
    int64_t tokens = 0;
    for (int i = 0; i < fake->launches; i++) {
        const struct fake_launch *const launch = &fake->launch[i];
        if (!strcmp(launch->kernel, "sm90_sparse_prefill_join")) continue;
        if (!strncmp(launch->kernel, "sm90_sparse_prefill_fp8", 23)) {
            const struct sparse_prefill_fp8_params p = sparse_prefill_fp8_params_of(launch);
            const int64_t workers = p.call.split.num_partitions;
            HOLDS(workers >= 1 && workers <= p.call.b && p.call.tiles == ceil_div(h_q, 64));
            HOLDS(launch->config.grid_x == workers * p.call.tiles && !p.call.split.slot_out);
            HOLDS(divides(p.call.tiles_divisor, p.call.tiles) && !bytes);
            tokens += p.call.b;
            continue;
        }
        const struct sparse_prefill_params p = sparse_prefill_params_of(launch);
        const bool hopper = !strncmp(launch->kernel, "sm90", 4);
        HOLDS(p.s_q >= 1 && p.h_q == h_q / h_kv && p.tiles == ceil_div(p.h_q, hopper ? 64 : SPARSE_WARPS));
        HOLDS((int64_t)p.s_q * p.tiles <= INT32_MAX && divides(p.tiles_divisor, p.tiles));
        if (hopper)
            judge_pieces(launch, i + 1 < fake->launches ? launch + 1 : NULL, bytes);
        else
            HOLDS(launch->config.grid_x == (int64_t)p.s_q * p.tiles);
        tokens += p.s_q;
    }
    HOLDS(tokens == s_q * h_kv);
}

/* ---- Operations with a workspace ---------------------------------------------------------------- */

/* Where the arguments of an operation have what is changed here. */
struct with_workspace {
    fmla_status (*size)(size_t *bytes, size_t *alignment);
    fmla_status (*run)(void);
    void (*judge)(size_t bytes);
    const char **kernel;
    void **workspace;
    size_t *workspace_size, *plan_size; /* NULL: it takes no plan */
    const char *kernels[6];             /* the first is NULL */
};

/* With every kernel: query and call agree, and what is asked is what is needed. */
static void try_kernels(const struct with_workspace *o)
{
    size_t answered = 0;
    *o->workspace = workspace;
    for (int k = 0; !k || o->kernels[k]; k++) {
        forced = *o->kernel = o->kernels[k];
        size_t bytes = 77, alignment = 0;
        const fmla_status status = o->size(&bytes, &alignment);
        fake->launches = 0;
        calls++;
        if (status) {
            HOLDS(status == FMLA_UNSUPPORTED);
            *o->workspace_size = SIZE_MAX;
            HOLDS(o->run() == status && !fake->launches);
            refused_calls++;
            continue;
        }
        HOLDS(alignment == 256 && (!answered || bytes == answered));
        answered = bytes;
        *o->workspace_size = bytes;
        HOLDS(o->run() == FMLA_OK);
        o->judge(bytes);
        if (!bytes) continue;
        fake->launches = 0;
        *o->workspace_size = bytes - 1;
        HOLDS(o->run() == FMLA_BUFFER_TOO_SMALL && !fake->launches);
    }
    forced = *o->kernel = NULL;
    if (!o->plan_size || !*o->plan_size) return;
    --*o->plan_size;
    fake->launches = 0, *o->workspace_size = SIZE_MAX;
    const fmla_status status = o->run();
    HOLDS(status == FMLA_BUFFER_TOO_SMALL || status == FMLA_UNSUPPORTED);
}

#define WITH_WORKSPACE(operation, member)                                                                    \
    static fmla_status ask_##member(size_t *bytes, size_t *alignment)                                        \
    {                                                                                                        \
        return fmla_##operation##_workspace_size(&call.member.args, bytes, alignment);                       \
    }                                                                                                        \
    static fmla_status call_##member(void)                                                                   \
    {                                                                                                        \
        return fmla_##operation(&call.member.args);                                                          \
    }
WITH_WORKSPACE(sparse_decode, sparse)
WITH_WORKSPACE(dense_decode, dense)
WITH_WORKSPACE(sparse_prefill, prefill)

#define TRY_KERNELS(member, plan, ...)                                                                       \
    try_kernels(&(struct with_workspace){ask_##member,                                                       \
                                         call_##member,                                                      \
                                         judge_##member,                                                     \
                                         &call.member.args.kernel,                                           \
                                         &call.member.args.workspace,                                        \
                                         &call.member.args.workspace_size,                                   \
                                         plan,                                                               \
                                         {NULL, __VA_ARGS__}})

static void try_sparse(const struct sparse_shape *s)
{
    fmla_sparse_decode_args *a = &call.sparse.args;
    SHAPE("sparse_decode b %" PRId64 ", s_q %" PRId64 ", h_q %" PRId64 ", topk %" PRId64 " + %" PRId64
          ", format %d%s%s%s, plan %d of %d partitions",
          s->b, s->s_q, s->h_q, s->topk, s->extra_topk, s->format, s->fp16 ? " of fp16" : "",
          s->lengths || s->extra_lengths ? ", with lengths" : "",
          s->options.batch_invariant ? ", batch-invariant" : "", s->options.plan, s->options.num_partitions);
    sparse_of_shape(&call.sparse, s, (fmla_device){FMLA_DEVICE_CUDA, 0});
    TRY_KERNELS(sparse, a->batch_invariant ? NULL : &a->plan_size, "cuda-sm90", "cuda-sm90-64",
                "cuda-sm90-16", "cuda");
}

static void sparse_drawn(void)
{
    const struct sparse_shape s = draw_sparse(machine.sms);
    try_sparse(&s);
}

/* Where Hopper's two kernels differ in how many requests they begin at once: more requests than slots for pieces of them. */
static void sparse_fixed(void)
{
    static const struct {
        int sms;
        int64_t b, s_q, h_q;
    } all[] = {{132, 33, 2, 128}, {132, 33, 4, 64},  {132, 13, 5, 128}, {132, 11, 6, 128},
               {132, 9, 7, 128},  {114, 57, 1, 128}, {78, 39, 1, 128}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        for (int64_t topk = 0; topk <= 65 && all[i].sms == machine.sms; topk++) {
            const struct sparse_shape s =
                SHAPE_OF(sparse_shape, .b = all[i].b, .s_q = all[i].s_q, .h_q = all[i].h_q, .topk = topk,
                         .page_size = 64, .format = FMLA_KV_FP8_656, .wide = true);
            try_sparse(&s);
        }
}

static void dense_drawn(void)
{
    const struct dense_shape s = draw_dense(machine.sms);
    fmla_dense_decode_args *a = &call.dense.args;
    SHAPE("dense_decode b %" PRId64 ", s_q %" PRId64 ", h_q %" PRId64 ", h_kv %" PRId64 ", pages %" PRId64
          " of %" PRId64 ", %" PRId64 " a request%s, plan %d of %d partitions",
          s.b, s.s_q, s.h_q, s.h_kv, s.pages, s.page_size, s.max_pages,
          s.options.batch_invariant ? ", batch-invariant" : "", s.options.plan, s.options.num_partitions);
    dense_of_shape(&call.dense, &s, (fmla_device){FMLA_DEVICE_CUDA, 0});
    TRY_KERNELS(dense, a->batch_invariant ? NULL : &a->plan_size, "cuda-sm90", "cuda-sm80");
}

static void prefill_drawn(void)
{
    const struct prefill_shape s = draw_prefill(machine.sms);
    SHAPE("sparse_prefill s_q %" PRId64 ", h_q %" PRId64 ", h_kv %" PRId64 ", topk %" PRId64 ", format %d",
          s.s_q, s.h_q, s.h_kv, s.topk, s.format);
    prefill_of_shape(&call.prefill, &s, (fmla_device){FMLA_DEVICE_CUDA, 0});
    TRY_KERNELS(prefill, NULL, "cuda-sm90", "cuda");
}

/* ---- Operations without ------------------------------------------------------------------------- */

/* A plan has exactly the bytes that were asked for, or its tables the rows. */
static void plan_drawn(void)
{
    struct plan_call *a = &call.plan.args;
    const bool sparse = draw_one_in(2), lengths = draw_one_in(2);
    const int64_t b = draw_size(INT32_MAX - 65537) - draw_one_in(8);
    size_t bytes = 0;
    int32_t partitions = 0;
    *a = (struct plan_call){.sparse = sparse};
    draw_heads(&a->s_q, &a->h_q);
    a->num_partitions = draw_one_in(2) ? 0 : (int32_t)draw_size(65536);
    a->num_workers = draw_one_in(2) ? 0 : (int32_t)draw_size(65536);
    a->target = (fmla_device){FMLA_DEVICE_CUDA, 0};
    REGION(&call.plan.length, 0, i32, 1, b);
    if (sparse) {
        a->b = b;
        a->topk = draw_size(INT32_MAX) - draw_one_in(2),
        a->extra_topk = draw_size(INT32_MAX) - draw_one_in(2);
        if (lengths) a->topk_length = &call.plan.length.tensor;
    } else {
        a->h_kv = draw_one_in(2) ? 1 : a->h_q, a->seqlens = &call.plan.length.tensor;
        a->capacity = draw_one_in(2) ? 0 : draw_size(INT64_MAX);
    }
    SHAPE("decode_plan b %" PRId64 ", s_q %" PRId64 ", h_q %" PRId64 ", topk %" PRId64 " + %" PRId64
          ", %d partitions, %d workers",
          b, a->s_q, a->h_q, a->topk, a->extra_topk, a->num_partitions, a->num_workers);
    calls++;
    HOLDS(plan_call_size(a, &bytes) == FMLA_OK);
    HOLDS(plan_call_partitions(a, &partitions) == FMLA_OK && partitions >= 1 && partitions <= 65536);
    const bool tables = draw_one_in(3);
    if (tables) {
        REGION(&call.plan.rows, 1, i32, 2, partitions, FMLA_PARTITION_FIELDS);
        REGION(&call.plan.splits, 2, i32, 1, b + 1);
        a->partitions = &call.plan.rows.tensor, a->num_splits = &call.plan.splits.tensor;
    } else {
        a->plan = workspace, a->plan_size = bytes;
    }
    fake->launches = 0;
    HOLDS(plan_call_run(a) == FMLA_OK && fake->launches == 1);
    const struct plan_params p = plan_params_of(&fake->launch[0]);
    HOLDS(fake->launch[0].config.grid_x == 1 && p.b == b && p.num_partitions == partitions);
    HOLDS(divides(p.partitions_divisor, partitions));
    if (tables) return;
    HOLDS((char *)p.header == workspace && (char *)(p.num_splits + b + 1) == workspace + bytes);
    a->plan_size--, fake->launches = 0;
    HOLDS(plan_call_run(a) == FMLA_BUFFER_TOO_SMALL && !fake->launches);
}

static int64_t size_or_none(int64_t most)
{
    return draw_one_in(8) ? 0 : draw_size(most);
}

static void merge_drawn(void)
{
    const fmla_dtype types[] = {bf16, fp16, f32}, type = types[draw_below(3)];
    const int64_t s_q = size_or_none(1 << 12), h_q = size_or_none(1 << 16), d_v = size_or_none(1 << 12);
    const int64_t n = draw_fit(size_or_none(1 << 12), (double)(s_q * h_q * (d_v + 1)) * 4.0 + 1.0);
    const int64_t b =
        draw_fit(size_or_none(INT32_MAX), (double)((n + 1) * s_q * h_q * (d_v + 1)) * 4.0 + 1.0);
    const bool odd = draw_one_in(8), lse = draw_one_in(2);
    fmla_merge_args *a = &call.merge.args;
    *a = FMLA_INIT(fmla_merge_args);
    DRAW_TENSOR(&call.merge.parts, 0, type, 5, odd, n, b, s_q, h_q, d_v);
    DRAW_TENSOR(&call.merge.lse_parts, 1, f32, 4, odd, n, b, h_q, s_q);
    DRAW_TENSOR(&call.merge.out, 2, types[draw_below(3)], 4, odd, b, s_q, h_q, d_v);
    DRAW_TENSOR(&call.merge.lse, 3, f32, 3, odd, b, h_q, s_q);
    a->out_parts = &call.merge.parts.tensor, a->lse_parts = &call.merge.lse_parts.tensor;
    a->out = &call.merge.out.tensor;
    if (lse) a->lse = &call.merge.lse.tensor;
    a->kernel = forced = draw_one_in(2) ? "cuda" : NULL;
    SHAPE("merge n %" PRId64 ", b %" PRId64 ", s_q %" PRId64 ", h_q %" PRId64 ", d_v %" PRId64, n, b, s_q,
          h_q, d_v);
    calls++, fake->launches = 0;
    HOLDS(fmla_merge(a) == FMLA_OK);
    const int64_t rows = b * s_q * h_q;
    HOLDS(fake->launches == (rows && (d_v || lse)));
    if (fake->launches) HOLDS(fake->launch[0].config.grid_x == (rows < INT32_MAX ? rows : INT32_MAX));
}

static void cache_drawn(bool append)
{
    static const int64_t widths[] = {0, 576, 576, 656, 584, 576};
    const int32_t format = (int32_t)(1 + draw_below(5));
    const bool bytes = format >= FMLA_KV_FP8_656, pieces = format == FMLA_KV_FP8_584;
    const int64_t width = bytes ? widths[format] : draw_one_in(2) ? 576 : draw_size(4096);
    const int64_t d_qk = !bytes ? width : pieces ? 512 : 576;
    const int64_t pages = size_or_none(1 << 20), page_size = draw_size(1 << 16);
    const fmla_dtype types[] = {bf16, fp16, f32}, type = types[draw_below(3)];
    const int64_t tokens = draw_fit(size_or_none(INT64_C(1) << 40), (double)d_qk * 8.0);
    const bool odd = draw_one_in(8);
    DRAW_TENSOR(&call.cache.latent, 0, type, 2, odd, tokens, d_qk);
    DRAW_TENSOR(&call.cache.cache, 1,
                bytes                    ? u8
                : format == FMLA_KV_FP16 ? fp16
                                         : bf16,
                4, odd && !pieces, pages, page_size, 1, width);
    REGION(&call.cache.slots, 2, i64, 1, tokens);
    fmla_cache_append_args *a = &call.cache.append;
    fmla_cache_gather_args *g = &call.cache.gather;
    *a = FMLA_INIT(fmla_cache_append_args), *g = FMLA_INIT(fmla_cache_gather_args);
    a->latent = g->out = &call.cache.latent.tensor, a->kv_cache = g->kv_cache = &call.cache.cache.tensor;
    a->slot_mapping = g->slots = &call.cache.slots.tensor, a->kv_format = g->kv_format = format;
    a->kernel = g->kernel = forced = draw_one_in(2) ? "cuda" : NULL;
    SHAPE("cache_%s tokens %" PRId64 ", pages %" PRId64 " of %" PRId64 ", d_qk %" PRId64 ", format %d",
          append ? "append" : "gather", tokens, pages, page_size, d_qk, format);
    calls++, fake->launches = 0;
    HOLDS((append ? fmla_cache_append(a) : fmla_cache_gather(g)) == FMLA_OK);
    const int64_t blocks = ceil_div(tokens, CACHE_WARPS);
    HOLDS(fake->launches == (tokens > 0));
    if (tokens) HOLDS(fake->launch[0].config.grid_x == (blocks < INT32_MAX ? blocks : INT32_MAX));
}

static void append_drawn(void)
{
    cache_drawn(true);
}

static void gather_drawn(void)
{
    cache_drawn(false);
}

/* ---- All of it ---------------------------------------------------------------------------------- */

static void on_machine(int64_t shapes, uint64_t first)
{
    static void (*const operations[])(void) = {plan_drawn,  dense_drawn,  sparse_drawn, prefill_drawn,
                                               merge_drawn, append_drawn, gather_drawn};
    fake_open();
    fake->sms = machine.sms, fake->capability = machine.capability, fake->shared_bytes = machine.shared_bytes;
    signal(SIGFPE, died), signal(SIGSEGV, died), signal(SIGABRT, died);
    sparse_fixed();
    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
        refused_calls = calls = 0;
        for (number = first; number < first + (uint64_t)shapes; number++) {
            draw_from(seed, number * 16 + i);
            operations[i]();
            forced = NULL;
        }
        /* Kernels of Hopper are refused elsewhere; shapes past what can be counted, everywhere. */
        if (shapes >= 1000)
            CHECK(calls - refused_calls >= shapes / 2, "%s: %" PRId64 " of %" PRId64 " calls refused",
                  shape_words, refused_calls, calls);
    }
}

int main(int argc, char **argv)
{
    static const struct machine machines[] = {{2, 90, 232448},   {66, 90, 232448},  {78, 90, 232448},
                                              {114, 90, 232448}, {132, 90, 232448}, {148, 90, 232448},
                                              {2, 120, 101376},  {66, 80, 166912},  {78, 86, 101376},
                                              {114, 89, 101376}, {132, 80, 166912}, {148, 100, 232448}};
    enum { MACHINES = sizeof machines / sizeof machines[0] };
    int64_t numbers[] = {2000, 1, 0};
    const int mine = fake_numbers(argc, argv, numbers, 3);
    seed = (uint64_t)numbers[1];
    if (mine >= 0) {
        machine = machines[mine % MACHINES];
        on_machine(numbers[0], (uint64_t)numbers[2]);
        return check_failures != 0;
    }
    for (int i = 0; i < MACHINES; i++) {
        const int status = fake_again(argv, "--machine", i);
        CHECK(!status, "%d SMs of %d.%d ended with %x", machines[i].sms, machines[i].capability / 10,
              machines[i].capability % 10, (unsigned)status);
    }
    return check_done("test_cuda_random");
}
