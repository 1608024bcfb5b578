/* SPDX-License-Identifier: MIT
 *
 * Dense decode on a GPU: the workspace, and the launches of a call: plan, if none is given | decode | join, where
 * requests may be cut. All on the caller's stream; nothing here waits or reads device memory.
 *
 * Workspace:  plan, if made inside the call | out of the slots | lse of the slots | marks
 * with two slots a partition of the plan, or, batch-invariant, one a chunk of a request (src/cuda/params.h).
 */
#include "cuda.h"
#include "kernels.h"

#include "../plan.h"

#include <string.h>

enum {
    ALIGNMENT = 256,       /* what the driver's allocations have */
    WORKERS_PER_SM = 16,   /* batch-invariant: chunks in hand at a time; lengths differ, so more than SMs */
    JOIN_BLOCKS_PER_SM = 2 /* enough to keep the memory busy; they take turns at the rows */
};

static const char op[] = "dense_decode";

static size_t line_up(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

/* ---- The workspace -------------------------------------------------------------------------- */

struct work {
    struct dense_decode_choice choice;
    int64_t tiles; /* of a request: key heads × row tiles of one */
    int32_t num_partitions;
    int64_t chunks, chunk_lanes; /* batch-invariant; else 0 */
    int64_t slots;
    int64_t mark_tiles; /* of a request, as marks count them; 0: no marks */
    size_t plan_offset, slot_out_offset, slot_lse_offset, marks_offset, bytes;
};

/* A plan in device memory is not read here. What is known of it must do: how large it is, and the number of partitions
 * that the caller gives or that the planner takes for this device. */
static fmla_status check_plan(const struct dense_decode_problem *p, int32_t num_partitions)
{
    const size_t needed = plan_bytes(p->b, num_partitions);
    if (p->plan_size < needed)
        return fail(FMLA_BUFFER_TOO_SMALL,
                    "%s: plan_size: is %zu, must be at least %zu bytes for %d partitions of %lld requests",
                    op, p->plan_size, needed, num_partitions, (long long)p->b);
    if ((uintptr_t)p->plan % 16)
        return fail(FMLA_INVALID_ARGUMENT, "%s: plan: is not aligned to 16 bytes", op);
    return FMLA_OK;
}

/* `rows_of_tile`: of Hopper's kernel, or 0: of the portable one's choice. What it changes is how many workers there are, not
 * what they need. */
static fmla_status lay_out(const struct dense_decode_problem *p, int64_t rows_of_tile, struct work *w)
{
    const struct cuda_device *device = cuda_device(p->device.id);
    memset(w, 0, sizeof *w);
    const int64_t rows_of_head = p->s_q * (p->h_q / p->h_kv);
    w->choice = dense_decode_choose(rows_of_head, device->shared_bytes);
    if (!rows_of_tile) rows_of_tile = dense_decode_shapes[w->choice.shape].rows;
    w->tiles = p->h_kv * ceil_div(rows_of_head, rows_of_tile);
    size_t at = 0;
    if (p->batch_invariant) {
        /* Who takes which chunk changes no bit; how many there are depends on the capacity alone. */
        w->chunks = p->capacity > INVARIANT_CHUNK ? ceil_div(p->capacity, INVARIANT_CHUNK) : 1;
        const int64_t wanted = ceil_div((int64_t)WORKERS_PER_SM * device->sms, (p->b ? p->b : 1) * w->tiles);
        w->chunk_lanes = wanted < 1 ? 1 : wanted < w->chunks ? wanted : w->chunks;
        if (w->chunks > 1) w->slots = p->b * w->chunks; /* < 2^31 · 2^20 */
    } else {
        w->num_partitions = p->num_partitions ? p->num_partitions
                                              : plan_default_partitions(device->sms, p->s_q, p->h_q, p->h_kv);
        if (p->plan) {
            const fmla_status status = check_plan(p, w->num_partitions);
            if (status) return status;
        } else if (!p->plan_in_tables) {
            at += line_up(plan_bytes(p->b, w->num_partitions));
        }
        if (w->num_partitions > 1) {
            w->slots = 2 * (int64_t)w->num_partitions;
            w->mark_tiles = p->h_kv * ceil_div(rows_of_head, ROWS_OF_MARK); /* fewer than rows */
        }
    }
    w->slot_out_offset = at;
    int64_t rows, floats, bytes;
    if (__builtin_mul_overflow(w->slots, p->h_q * p->s_q, &rows) ||
        __builtin_mul_overflow(rows, p->d_v + 1, &floats) ||
        __builtin_mul_overflow(floats, (int64_t)sizeof(float), &bytes) || bytes > INT64_MAX / 4)
        return fail(
            FMLA_UNSUPPORTED,
            "%s: q: the partial results of %lld requests of up to %lld keys would not fit into memory that "
            "can be addressed",
            op, (long long)p->b, (long long)p->capacity);
    at += line_up((size_t)rows * (size_t)p->d_v * sizeof(float));
    w->slot_lse_offset = at;
    at += line_up((size_t)rows * sizeof(float));
    w->marks_offset = at;
    at += line_up((size_t)(w->mark_tiles * w->num_partitions) * MARKS_OF_TILE * sizeof(uint32_t));
    w->bytes = at;
    return FMLA_OK;
}

fmla_status cuda_dense_decode_size(const struct kernel *kernel, const struct dense_decode_problem *p,
                                   size_t *bytes, size_t *alignment)
{
    (void)kernel;
    struct work w;
    const fmla_status status = lay_out(p, 0, &w);
    *bytes = w.bytes, *alignment = ALIGNMENT;
    return status;
}

/* ---- The launches --------------------------------------------------------------------------- */

static struct dense_decode_params parameters(const struct dense_decode_problem *p, const struct work *w)
{
    const int64_t q_shape[] = {p->b, p->s_q, p->h_q}, kv_shape[] = {p->pages, p->page_size, p->h_kv};
    char *workspace = p->workspace;
    const int32_t group = (int32_t)(p->h_q / p->h_kv);
    struct dense_decode_params params = {
        .b = (int32_t)p->b,
        .s_q = (int32_t)p->s_q,
        .h_q = (int32_t)p->h_q,
        .h_kv = (int32_t)p->h_kv,
        .group = group,
        .d_qk = (int32_t)p->d_qk,
        .rows = (int32_t)p->s_q * group,
        .page_size = (int32_t)p->page_size,
        .page_divisor = divisor_of((uint32_t)p->page_size),
        .group_divisor = divisor_of((uint32_t)group),
        .capacity = (int32_t)p->capacity,
        .causal = p->causal,
        .vectors_aligned = cuda_rows_aligned(p->q, q_shape, p->q_stride, 3, 2, 16) &&
                           cuda_rows_aligned(p->kv, kv_shape, p->kv_stride, 3, 2, 16),
        .stages = w->choice.stages,
        .scale_log2 = (float)((double)p->scale * 1.44269504088896340736),
        .q = p->q,
        .kv = p->kv,
        .block_table = p->block_table,
        .seqlens = p->seqlens,
        .block_table_stride = p->block_table_stride,
        .split = {.num_partitions = w->num_partitions,
                  .chunks = (int32_t)w->chunks,
                  .chunk_lanes = (int32_t)w->chunk_lanes},
        .output = {.out = p->out,
                   .lse = p->lse,
                   .rules = cuda_result_params(&p->rules),
                   .pairs_aligned = cuda_rows_aligned(p->out, q_shape, p->out_stride, 3, 2, 4)},
    };
    memcpy(params.q_stride, p->q_stride, sizeof params.q_stride);
    memcpy(params.kv_stride, p->kv_stride, sizeof params.kv_stride);
    memcpy(params.output.out_stride, p->out_stride, sizeof params.output.out_stride);
    memcpy(params.output.lse_stride, p->lse_stride, sizeof params.output.lse_stride);
    if (w->slots) {
        params.split.slot_out = (float *)(void *)(workspace + w->slot_out_offset);
        params.split.slot_lse = (float *)(void *)(workspace + w->slot_lse_offset);
    }
    if (p->plan_in_tables) {
        params.split.partitions = p->partitions, params.split.num_splits = p->num_splits;
    } else if (!p->batch_invariant) {
        const struct plan_header *plan = p->plan ? p->plan : (const void *)(workspace + w->plan_offset);
        params.split.header = plan, params.split.partitions = plan_partitions(plan);
        params.split.num_splits = (const int32_t *)(params.split.partitions + w->num_partitions);
    }
    return params;
}

static fmla_status launch_plan(const struct cuda_scope *scope, const struct dense_decode_problem *p,
                               const struct work *w)
{
    if (p->batch_invariant || p->plan || p->plan_in_tables) return FMLA_OK;
    const struct plan_tables plan = plan_tables_of((char *)p->workspace + w->plan_offset, w->num_partitions);
    struct plan_params params = {
        .seqlens = p->seqlens,
        .b = p->b,
        .capacity = p->capacity,
        .header = plan.header,
        .partitions = plan.partitions,
        .num_splits = plan.num_splits,
        .num_partitions = w->num_partitions,
    };
    if (cuda_has_plan_costs(scope->device)) params.costs = plan_costs_of(p->s_q, p->h_q, p->h_kv);
    return cuda_launch_plan(op, scope, &params, p->stream);
}

static fmla_status launch_decode(const struct cuda_scope *scope, const struct dense_decode_problem *p,
                                 const struct work *w, struct dense_decode_params *params)
{
    const int64_t workers = p->batch_invariant ? p->b * w->chunk_lanes : w->num_partitions;
    const struct cuda_launch launch = {
        .kernel = &cuda_kernel_dense_decode[p->element][w->choice.shape],
        .blocks = workers * w->tiles,
        .threads = 32 * dense_decode_shapes[w->choice.shape].warps,
        .shared_bytes = w->choice.shared_bytes,
        .stream = p->stream,
    };
    return cuda_launch(op, scope, &launch, (void *[]){params});
}

static fmla_status launch_decode_sm90(const struct cuda_scope *scope, const struct dense_decode_problem *p,
                                      const struct work *w, const struct dense_decode_params *call)
{
    const int64_t workers = p->batch_invariant ? p->b * w->chunk_lanes : w->num_partitions;
    struct dense_decode_sm90_params params = {
        .call = *call,
        .q_heads = (int32_t)sm90_dense_decode_q_heads(p),
        .tiles_of_head = (int32_t)(w->tiles / p->h_kv),
        .tiles_of_head_divisor = divisor_of((uint32_t)(w->tiles / p->h_kv)),
        .tiles_divisor = divisor_of((uint32_t)w->tiles),
        .request_step = p->q_stride[0] != 0,
        .page_step = p->kv_stride[0] != 0,
    };
    const struct tensor_view keys = sm90_dense_decode_key_view(p, 2), rope = sm90_dense_decode_key_view(p, 1),
                             queries = sm90_dense_decode_q_view(p);
    fmla_status status = tensor_map_make(op, scope, "kv_cache", &keys, &params.keys);
    if (!status) status = tensor_map_make(op, scope, "kv_cache", &rope, &params.rope);
    if (!status) status = tensor_map_make(op, scope, "q", &queries, &params.queries);
    if (status) return status;
    const struct cuda_launch launch = {
        .kernel = &cuda_kernel_dense_decode_sm90[p->element][p->d_qk > p->d_v][params.tiles_of_head > 1],
        .blocks = workers * w->tiles,
        .threads = SM90_DENSE_DECODE_THREADS,
        .shared_bytes = SM90_DENSE_DECODE_SHARED_BYTES,
        .flags = LAUNCH_OVERLAP,
        .stream = p->stream,
    };
    return cuda_launch(op, scope, &launch, (void *[]){&params});
}

/* `flags`: LAUNCH_…; the join waits itself for what it reads. */
static fmla_status launch_join(const struct cuda_scope *scope, const struct dense_decode_problem *p,
                               const struct work *w, struct dense_decode_params *params, unsigned flags)
{
    if (!w->slots) return FMLA_OK;
    /* Requests that may be cut: a partition cuts one at most. */
    const int64_t requests = p->batch_invariant || p->b < w->num_partitions ? p->b : w->num_partitions;
    const int64_t parts = p->batch_invariant ? w->chunks : w->num_partitions / p->b;
    int32_t rows_per_block = parts > MANY_PARTS ? 1 : JOIN_WARPS;
    const int64_t row_blocks = ceil_div(p->h_q * p->s_q, rows_per_block);
    const int64_t most = (int64_t)JOIN_BLOCKS_PER_SM * scope->device->sms;
    /* Rows are cut into columns, as long as there are threads for it: 1, 2 or 4 pieces. */
    int cuts = 0;
    while (cuts < 2 && (requests * row_blocks) << (cuts + 1) <= most) cuts++;
    const int64_t most_rows = most >> cuts;
    int32_t row_lanes = (int32_t)(row_blocks < most_rows ? row_blocks : most_rows);
    const int64_t request_lanes = requests < most_rows / row_lanes ? requests : most_rows / row_lanes;
    const struct cuda_launch launch = {
        .kernel = &cuda_kernel_join[p->element][cuts],
        .blocks = (request_lanes * row_lanes) << cuts,
        .threads = 32 * JOIN_WARPS,
        .flags = flags,
        .stream = p->stream,
    };
    return cuda_launch(op, scope, &launch, (void *[]){params, &rows_per_block, &row_lanes});
}

static fmla_status dense_decode(const struct dense_decode_problem *p, bool sm90)
{
    struct work w;
    struct cuda_scope scope;
    fmla_status status = lay_out(p, sm90 ? SM90_DENSE_DECODE_ROWS : 0, &w);
    if (status || !p->b) return status;
    struct dense_decode_params params = parameters(p, &w);
    if (sm90 && w.mark_tiles) {
        params.split.marks = (uint32_t *)(void *)((char *)p->workspace + w.marks_offset);
        params.split.tiles = (int32_t)w.mark_tiles,
        params.split.tiles_of_head = (int32_t)(w.mark_tiles / p->h_kv);
    }
    status = cuda_enter(op, "q", p->device.id, &scope);
    if (status) return status;
    status = launch_plan(&scope, p, &w);
    if (!status)
        status = sm90 ? launch_decode_sm90(&scope, p, &w, &params) : launch_decode(&scope, p, &w, &params);
    if (!status) status = launch_join(&scope, p, &w, &params, sm90 ? LAUNCH_OVERLAP : 0);
    cuda_leave(&scope);
    return status;
}

fmla_status cuda_dense_decode(const struct kernel *kernel, const struct dense_decode_problem *p)
{
    (void)kernel;
    return dense_decode(p, false);
}

const char *cuda_sm90_dense_decode_refuses(const struct dense_decode_problem *p, const char **argument)
{
    return sm90_dense_decode_refuses(p, argument);
}

fmla_status cuda_sm90_dense_decode(const struct kernel *kernel, const struct dense_decode_problem *p)
{
    (void)kernel;
    return dense_decode(p, true);
}
