/* SPDX-License-Identifier: MIT */
#define _GNU_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "decode_case.h"

#include "magnitude.h"
#include "num.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Values are drawn once and copied from random places. */
enum { DRAWN = 1 << 18, WIDEST = 576 };
static uint16_t drawn[2][DRAWN]; /* [dtype] */

void decode_case_draw(uint64_t seed)
{
    struct random_state random = {seed};
    for (int i = 0; i < DRAWN; i++) {
        const float x = random_input(&random, 0.0f, 0.1f);
        drawn[0][i] = num_to_bf16(x);
        drawn[1][i] = num_to_fp16(x);
    }
}

/* A spike: the last values of a vector are 1/2. Two vectors with spikes have a product larger by SPIKE / 4, and the
 * values keep their size, so that the tolerance keeps its meaning. */
enum { SPIKE = 32 };

static void copy_drawn(struct decode_case *c, void *to, bool spike)
{
    static const uint16_t half[2] = {0x3f00, 0x3800};
    const int64_t from = random_between(&c->random, 0, DRAWN - c->d_qk);
    const int64_t dtype = c->v[A_DTYPE];
    memcpy(to, drawn[dtype] + from, (size_t)c->d_qk * sizeof(uint16_t));
    if (!spike) return;
    for (int64_t d = c->d_qk - SPIKE; d < c->d_qk; d++)
        memcpy((uint16_t *)to + d, &half[dtype], sizeof(uint16_t));
}

/* Scores of +inf, by the last two columns: every third row has only such, and every other request one key that
 * is one for all rows. */
static void make_infinite(const struct decode_case *c, uint16_t *vector, bool of_key, bool special)
{
    static const uint16_t infinity[2] = {0x7f80, 0x7c00}, half[2] = {0x3f00, 0x3800};
    const uint16_t large = infinity[c->v[A_DTYPE]], small = half[c->v[A_DTYPE]];
    vector[c->d_qk - 1] = of_key ? small : special ? large : 0;
    vector[c->d_qk - 2] = !of_key ? small : special ? large : 0;
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

/* Writes every slot that some request reads once: pages and memory that requests share belong to the first. */
static void fill_cache(struct decode_case *c, bool aliased)
{
    unsigned char *filled = calloc((size_t)c->pages + 1, 1);
    int64_t shared = 0; /* keys of the aliased cache that are there */
    for (int64_t r = 0; r < c->b; r++) {
        for (int64_t t = aliased ? shared : 0; t < c->length[r]; t++) {
            const int64_t page = page_of(c, r, t);
            if (c->paged && t % c->page_size == 0 && filled[page]) {
                t += c->page_size - 1; /* shared, so a whole one */
                continue;
            }
            filled[page] = 1;
            for (int64_t h = 0; h < c->h_kv; h++) {
                copy_drawn(c, key_at(c, r, t, h),
                           c->v[A_INPUTS] == INPUTS_SPIKED && is_border(c, t, c->length[r]));
                if (c->v[A_INPUTS] == INPUTS_INFINITE)
                    make_infinite(c, key_at(c, r, t, h), true, r % 2 && t == c->length[r] / 2);
            }
        }
        if (c->length[r] > shared) shared = c->length[r];
    }
    free(filled);
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
    fill_cache(c, aliased);
    const bool nan_ends = c->v[A_INPUTS] == INPUTS_NAN_ENDS && c->v[A_CAUSAL] && c->s_q > 1;
    for (int64_t r = 0; nan_ends && r < c->b; r++)
        for (int64_t h = 0; c->length[r] && h < c->h_kv; h++) {
            uint16_t *key = key_at(c, r, c->length[r] - 1, h);
            for (int64_t d = 0; d < c->d_qk; d++)
                key[d] = 0x7fff; /* NaN in both types; not what outputs are filled with */
        }
}

/* An offset that is cut to 32 bits leads to the first page, or into the 2^31 elements before it, which hold zeros: the
 * result is wrong, and the process lives to say so. */
static void spread_pages(struct decode_case *c)
{
    enum { BETWEEN = (1 << 30) + 64 /* elements; a multiple of 16 bytes */ };
    const size_t element = sizeof(uint16_t), front = element << 31;
    const size_t page_bytes = (size_t)c->kv_strides[0] * element;
    c->far_bytes = front + (size_t)c->pages * BETWEEN * element;
    c->far =
        mmap(NULL, c->far_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (c->far == MAP_FAILED) {
        fprintf(stderr, "checkattn: no address space for %zu bytes\n", c->far_bytes);
        exit(1);
    }
    char *pages = (char *)c->far + front;
    for (int64_t i = 0; i < c->pages; i++)
        memcpy(pages + (size_t)i * BETWEEN * element,
               (char *)c->kv.tensor.data + c->kv.tensor.byte_offset + (size_t)i * page_bytes, page_bytes);
    mprotect(c->far, c->far_bytes, PROT_READ);
    c->kv_strides[0] = BETWEEN;
    c->kv_view.data = pages, c->kv_view.byte_offset = 0, c->kv_view.strides = c->kv_strides;
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

/* The plan of lengths on the device, made there; true if it is that of the host, bit by bit. */
static bool same_on_device(const struct decode_case *c, const struct guarded *lengths,
                           const fmla_decode_plan_args *on_host, fmla_status *status)
{
    struct device_blocks blocks = {0};
    struct device_scratch plan;
    fmla_tensor seqlens;
    fmla_decode_plan_args args = *on_host;
    device_add_guarded(&blocks, lengths);
    device_scratch_make(&plan, args.plan_size, 0xa7);
    args.seqlens = device_tensor(&blocks, &lengths->tensor, &seqlens);
    args.plan = plan.memory;
    if (device_stress) {
        args.plan_size--;
        if (fmla_decode_plan(&args) != FMLA_BUFFER_TOO_SMALL)
            device_stress->wrong("memory for a plan that is too short by a byte was taken");
        args.plan_size++;
    }
    *status = fmla_decode_plan(&args);
    bool same = *status != FMLA_OK; /* which is told apart from a difference */
    if (!same) {
        device_wait(NULL);
        same = device_scratch_is(&plan, c->plan) && device_scratch_intact(&plan);
    }
    device_free(&blocks), device_scratch_free(&plan);
    return same;
}

static bool holds(const struct guarded *guarded, const void *bytes)
{
    return !memcmp(guarded->memory + GUARDED_FRONT, bytes, guarded->bytes);
}

static bool are_tables_of(const struct decode_case *c, const fmla_plan_view *view)
{
    return holds(&c->partitions, view->partitions) && holds(&c->num_splits, view->num_splits) &&
           guarded_intact(&c->partitions) && guarded_intact(&c->num_splits);
}

/* Makes the tables of the plan by themselves, as it was made on the host, and on a GPU there again, where they stay. */
static fmla_status make_tables(struct decode_case *c, const struct guarded *lengths,
                               const fmla_decode_plan_args *whole, bool *same)
{
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    fmla_decode_plan_args args = *whole;
    fmla_status status = fmla_plan_describe(args.plan, args.plan_size, &view);
    if (status) return status;
    guarded_make(&c->partitions, dtype_i32, 2, (int64_t[]){view.num_partitions, FMLA_PARTITION_FIELDS},
                 LAYOUT_CONTIGUOUS);
    guarded_make(&c->num_splits, dtype_i32, 1, (int64_t[]){c->b + 1}, LAYOUT_CONTIGUOUS);
    args.plan = NULL, args.plan_size = 0;
    args.partitions = &c->partitions.tensor, args.num_splits = &c->num_splits.tensor;
    status = fmla_decode_plan(&args);
    *same &= status || are_tables_of(c, &view);
    if (status || !is_apart(c->device)) return status;

    struct device_blocks blocks = {0};
    fmla_tensor seqlens, partitions, num_splits;
    guarded_reset(&c->partitions), guarded_reset(&c->num_splits);
    device_add_guarded(&blocks, lengths);
    device_add_guarded(&c->blocks, &c->partitions), device_add_guarded(&c->blocks, &c->num_splits);
    args.seqlens = device_tensor(&blocks, args.seqlens, &seqlens);
    args.partitions = device_tensor(&c->blocks, args.partitions, &partitions);
    args.num_splits = device_tensor(&c->blocks, args.num_splits, &num_splits);
    status = fmla_decode_plan(&args);
    if (!status) {
        device_wait(NULL);
        device_down(&c->blocks, c->partitions.tensor.data),
            device_down(&c->blocks, c->num_splits.tensor.data);
        *same &= are_tables_of(c, &view);
    }
    device_free(&blocks);
    return status;
}

fmla_status decode_case_plan(struct decode_case *c, bool *same)
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
    args.target = c->device;
    args.num_partitions = (int32_t)c->v[A_PARTITIONS];
    fmla_status status = fmla_decode_plan_size(&args, &args.plan_size);
    c->plan = args.plan = aligned_bytes(args.plan_size);
    if (!status) status = fmla_decode_plan(&args);
    *same = true;
    if (!status && is_apart(c->device)) {
        *same = same_on_device(c, &other, &args, &status);
        device_add(&c->blocks, c->plan, args.plan_size);
    }
    c->args.plan = c->plan, c->args.plan_size = args.plan_size;
    if (!status) status = make_tables(c, &other, &args, same);
    guarded_free(&other);
    return status;
}

void decode_case_use_tables(struct decode_case *c)
{
    if (!c->args.plan) return;
    c->args.plan = NULL;
    c->args.partitions = &c->partitions.tensor, c->args.num_splits = &c->num_splits.tensor;
}

void decode_case_make(struct decode_case *c, const struct run *run, const int64_t v[AXES], uint64_t seed)
{
    memset(c, 0, sizeof *c);
    memcpy(c->v, v, sizeof c->v);
    c->random.state = seed;
    c->device = run->device;
    c->b = v[A_B], c->s_q = v[A_SQ], c->h_q = v[A_HQ], c->h_kv = v[A_HKV], c->d_qk = v[A_DQK],
    c->s_k = v[A_SK];
    c->paged = v[A_PAGE] != 0;
    c->page_size = c->paged ? v[A_PAGE] : c->s_k + 3;
    c->max_pages =
        c->paged ? (c->s_k + c->page_size - 1) / c->page_size + (v[A_LENGTHS] == LENGTHS_BEYOND ? 0 : 2) : 1;

    const fmla_dtype dtype = v[A_DTYPE] ? dtype_fp16 : dtype_bf16;
    const bool far = v[A_LAYOUT] == LAYOUT_FAR;
    const enum layout layout = far ? LAYOUT_CONTIGUOUS : (enum layout)v[A_LAYOUT];
    guarded_make(&c->q, dtype, 4, (int64_t[]){c->b, c->s_q, c->h_q, c->d_qk}, layout);
    guarded_make(&c->seqlens, dtype_i32, 1, &c->b, LAYOUT_CONTIGUOUS);
    guarded_make(&c->out, dtype, 4, (int64_t[]){c->b, c->s_q, c->h_q, D_V}, layout);
    guarded_make(&c->lse, dtype_f32, 3, (int64_t[]){c->b, c->h_q, c->s_q}, layout);
    guarded_make(&c->table, dtype_i32, 2, (int64_t[]){c->b, c->max_pages}, layout);
    make_lengths(c);
    make_cache(c, layout);
    if (far) spread_pages(c);
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++)
            for (int64_t h = 0; h < c->h_q; h++) {
                copy_drawn(c, guarded_at(&c->q, r, j, h, 0), v[A_INPUTS] == INPUTS_SPIKED);
                if (v[A_INPUTS] == INPUTS_INFINITE)
                    make_infinite(c, guarded_at(&c->q, r, j, h, 0), false, (j + h) % 3 == 0);
            }

    fmla_dense_decode_args *args = &c->args;
    *args = FMLA_INIT(fmla_dense_decode_args);
    args->q = &c->q.tensor, args->kv_cache = &c->kv_view, args->seqlens = &c->seqlens.tensor;
    args->block_table = c->paged ? &c->table.tensor : NULL;
    args->out = &c->out.tensor, args->lse = v[A_LSE] ? &c->lse.tensor : NULL;
    if (v[A_SINK] != SINK_NONE) {
        make_sink(c);
        args->attn_sink = &c->sink.tensor;
    }
    args->kernel = forced_kernel(run);
    args->softmax_scale = v[A_INPUTS] == INPUTS_SPIKED   ? 0.5f
                          : v[A_INPUTS] == INPUTS_STEEP  ? 300.0f
                          : v[A_INPUTS] == INPUTS_BEYOND ? 3e38f
                                                         : 0.0f;
    args->causal = (int32_t)v[A_CAUSAL];
    args->lse_empty = (int32_t)v[A_EMPTY];
    args->log_base = (int32_t)v[A_BASE];
    args->batch_invariant = (int32_t)v[A_INVARIANT];
    args->num_partitions = (int32_t)v[A_PARTITIONS];
}

void decode_case_free(struct decode_case *c)
{
    if (c->far) munmap(c->far, c->far_bytes);
    struct guarded *all[] = {&c->q,   &c->kv,  &c->table,      &c->seqlens,   &c->sink,
                             &c->out, &c->lse, &c->partitions, &c->num_splits};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) guarded_free(all[i]);
    free(c->plan), free(c->length);
    device_free(&c->blocks);
}

/* ---- Running it ----------------------------------------------------------------------------- */

fmla_status decode_case_call(fmla_dense_decode_args *args, int fill)
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

void decode_case_to_device(struct decode_case *c, const struct decode_case *like)
{
    if (!is_apart(c->device)) return;
    const struct guarded *all[] = {&c->q, &c->kv, &c->table, &c->seqlens, &c->sink, &c->out, &c->lse};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (like && all[i]->memory)
            device_add_in_place(&c->blocks, all[i]->memory, all[i]->whole, &like->blocks);
        else
            device_add_guarded(&c->blocks, all[i]);
}

fmla_status decode_case_run(const struct decode_case *c, fmla_dense_decode_args *args, int fill)
{
    return is_apart(c->device) ? device_decode_call(&c->blocks, args, fill) : decode_case_call(args, fill);
}

bool decode_case_taken(const char *kernel, const int64_t v[AXES])
{
    if (strcmp(kernel, "cuda-sm90") != 0 || !v[A_B]) return true;
    if (v[A_LAYOUT] == LAYOUT_ODD || (v[A_PAGE] > 0 && v[A_PAGE] % 64)) return false;
    if (v[A_SQ] <= 1 || v[A_HQ] < 0 || v[A_HKV] < 1 || v[A_LAYOUT] < 0) return true;
    const int64_t group = v[A_HQ] / v[A_HKV];
    const bool rows_follow = v[A_HKV] == 1 && (v[A_HQ] == 1 || v[A_LAYOUT] == LAYOUT_CONTIGUOUS);
    return rows_follow || group % 64 == 0 || 64 % group == 0;
}

void decode_case_refused(struct decode_case *c, const struct run *run, struct tally *tally)
{
    const char *kernel;
    decode_case_to_device(c, NULL);
    const fmla_status status = decode_case_kernel(c, &kernel);
    if (status != FMLA_UNSUPPORTED || !strstr(fmla_last_error(), run->kernel))
        report(tally, run, c->name, "the kernel should refuse this case, by its name");
}

fmla_status decode_case_kernel(const struct decode_case *c, const char **name)
{
    struct device_decode_args on_device;
    if (!is_apart(c->device)) return fmla_dense_decode_kernel(&c->args, name);
    device_decode_args_make(&on_device, &c->blocks, &c->args);
    return fmla_dense_decode_kernel(&on_device.args, name);
}

int64_t decode_case_seen(const struct decode_case *c, int64_t request, int64_t token)
{
    const int64_t seen = c->args.causal ? c->length[request] - c->s_q + token + 1 : c->length[request];
    return seen < 0 ? 0 : seen;
}

void decode_case_request(const struct decode_case *c, int64_t request, struct request_view *v)
{
    *v = (struct request_view){
        .args = c->args,
        .q = c->q.tensor,
        .kv = c->kv_view,
        .table = c->table.tensor,
        .seqlens = c->seqlens.tensor,
        .sink = c->sink.tensor,
        .q_shape = {1, c->s_q, c->h_q, c->d_qk},
        .kv_shape = {c->kv_view.shape[0], c->page_size, c->h_kv, c->d_qk},
        .table_shape = {1, c->max_pages},
        .seqlens_shape = {1},
        .sink_shape = {c->h_q},
    };
    v->q.shape = v->q_shape, v->q.data = guarded_at(&c->q, request, 0, 0, 0), v->q.byte_offset = 0;
    v->kv.shape = v->kv_shape, v->kv.strides = c->kv_strides;
    v->table.shape = v->table_shape;
    if (c->paged)
        v->table.data = guarded_at(&c->table, request, 0, 0, 0), v->table.byte_offset = 0;
    else
        v->kv.data = (uint16_t *)v->kv.data + request * c->kv_strides[0];
    v->seqlens.shape = v->seqlens_shape, v->seqlens.data = guarded_at(&c->seqlens, request, 0, 0, 0);
    v->sink.shape = v->sink_shape;
    v->args.q = &v->q, v->args.kv_cache = &v->kv, v->args.seqlens = &v->seqlens;
    if (c->paged) v->args.block_table = &v->table;
    if (c->args.attn_sink) v->args.attn_sink = &v->sink;
    v->args.plan = NULL, v->args.partitions = v->args.num_splits = NULL;
}

fmla_status decode_case_row(const struct decode_case *c, const char *kernel, int64_t request, int64_t token,
                            int64_t head, int64_t seen, uint16_t *out, float *lse)
{
    static const int64_t one[3] = {1, 1, 1}, out_shape[4] = {1, 1, 1, D_V};
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    const fmla_tensor out_tensor = {out, cpu, 4, c->q.tensor.dtype, out_shape, NULL, 0};
    const fmla_tensor lse_tensor = {lse, cpu, 3, dtype_f32, one, NULL, 0};
    int32_t length = (int32_t)seen;
    struct request_view v;
    decode_case_request(c, request, &v);
    v.q.data = guarded_at(&c->q, request, token, head, 0), v.q_shape[1] = v.q_shape[2] = 1;
    /* Rows are taken from pages where they were made, so that no kernel and oracle share a defect of far ones. */
    if (c->far) v.kv.data = c->kv.tensor.data, v.kv.strides = c->kv.strides;
    v.kv.data = (uint16_t *)v.kv.data + head / (c->h_q / c->h_kv) * v.kv.strides[2], v.kv_shape[2] = 1;
    v.seqlens.data = &length, v.seqlens.byte_offset = 0;
    if (c->args.attn_sink) v.sink.data = guarded_at(&c->sink, head, 0, 0, 0), v.sink_shape[0] = 1;
    v.args.out = &out_tensor, v.args.lse = &lse_tensor;
    v.args.kernel = kernel, v.args.causal = 0, v.args.batch_invariant = 0;
    return decode_case_call(&v.args, 0xff);
}

/* Elements of the case's type as floats. */
static void to_floats(const struct decode_case *c, const void *from, float values[WIDEST])
{
    for (int64_t d = 0; d < c->d_qk; d++) values[d] = (float)guarded_value(&c->q, (const uint16_t *)from + d);
}

double decode_case_bound(const struct decode_case *c, int64_t request, int64_t token, int64_t head)
{
    const double scale =
        c->args.softmax_scale == 0.0f ? 1.0 / sqrt((double)c->d_qk) : (double)c->args.softmax_scale;
    struct magnitude magnitude = {0};
    float q[WIDEST], key[WIDEST];
    to_floats(c, guarded_at(&c->q, request, token, head, 0), q);
    for (int64_t t = 0; t < decode_case_seen(c, request, token); t++) {
        to_floats(c, key_at(c, request, t, head / (c->h_q / c->h_kv)), key);
        magnitude_add(&magnitude, scale, q, key, c->d_qk);
    }
    return magnitude_bound(&magnitude, c->args.log_base);
}
