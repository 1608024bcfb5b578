/* SPDX-License-Identifier: MIT
 *
 * Dense decode on a GPU: the workspace, and the launches of a call: plan, if none is given | decode | join, where
 * requests may be cut. All on the caller's stream; nothing here waits or reads device memory.
 *
 * Workspace: that of split.h | marks
 */
#include "cuda.h"
#include "split.h"

#include "../plan.h"

#include <string.h>

static const char op[] = "dense_decode";

/* ---- The workspace -------------------------------------------------------------------------- */

struct work {
    struct dense_decode_choice choice;
    struct cuda_cut cut;
    struct cuda_split split;
    int64_t mark_tiles; /* of a request, as marks count them; 0: no marks */
    size_t marks_offset, bytes;
};

/* `rows_of_tile`: of Hopper's kernel, or 0: of the portable one's choice. What it changes is how many workers there are, not
 * what they need. */
static fmla_status lay_out(const struct dense_decode_problem *p, int64_t rows_of_tile, struct work *w)
{
    const struct cuda_device *device = cuda_device(p->device.id);
    memset(w, 0, sizeof *w);
    const int64_t rows_of_head = p->s_q * (p->h_q / p->h_kv);
    w->choice = dense_decode_choose(rows_of_head, device->shared_bytes);
    if (!rows_of_tile) rows_of_tile = dense_decode_shapes[w->choice.shape].rows;
    w->cut = (struct cuda_cut){
        .operation = op,
        .b = p->b,
        .rows = p->h_q * p->s_q,
        .d_v = p->d_v,
        .capacity = p->capacity,
        .tiles = p->h_kv * cuda_ceil_div(rows_of_head, rows_of_tile),
        .sms = device->sms,
        .chunk_keys = p->batch_invariant ? INVARIANT_CHUNK : 0,
        .plan = p->plan,
        .plan_size = p->plan_size,
        .plan_in_tables = p->plan_in_tables,
        .num_partitions = p->num_partitions ? p->num_partitions
                                            : plan_default_partitions(device->sms, p->s_q, p->h_q, p->h_kv),
    };
    const fmla_status status = cuda_split_lay_out(&w->cut, &w->split);
    if (status) return status;
    if (w->split.num_partitions > 1)
        w->mark_tiles = p->h_kv * cuda_ceil_div(rows_of_head, ROWS_OF_MARK); /* fewer than rows */
    w->marks_offset = w->split.bytes;
    w->bytes = w->marks_offset + cuda_line_up((size_t)(w->mark_tiles * w->split.num_partitions) *
                                              MARKS_OF_TILE * sizeof(uint32_t));
    return FMLA_OK;
}

/* Any call up to these sizes, with the partitions of the default: as many as leave the SMs a tile of PLAN_ROW_TILE rows each, so
 * every number of tiles of a key head is tried, with as many rows as they hold. With others, or in chunks, larger sizes take
 * more. */
static fmla_status bound(const struct dense_decode_problem *p, size_t *bytes)
{
    struct work w;
    fmla_status status = lay_out(p, 0, &w);
    *bytes = w.bytes;
    if (status || p->batch_invariant || p->num_partitions) return status;
    const int64_t rows_of_head = p->s_q * (p->h_q / p->h_kv),
                  most_tiles = cuda_ceil_div(rows_of_head, PLAN_ROW_TILE);
    const int64_t workers = w.cut.sms / p->h_kv;
    struct cuda_most most = {.partitions = 1};
    for (int64_t tiles = 1; tiles <= most_tiles && tiles <= workers; tiles++) {
        const int64_t rows = rows_of_head < tiles * PLAN_ROW_TILE ? rows_of_head : tiles * PLAN_ROW_TILE;
        cuda_most_add(&most, (int32_t)(workers / tiles), p->h_kv * rows);
    }
    status = cuda_split_bound(&w.cut, &most, &w.split);
    _Static_assert((int)ROWS_OF_MARK == (int)PLAN_ROW_TILE,
                   "there are the most marks where a head is one tile");
    const int64_t marks = workers > 1 ? p->h_kv * workers : 0;
    *bytes = w.split.bytes + cuda_line_up((size_t)marks * MARKS_OF_TILE * sizeof(uint32_t));
    return status;
}

fmla_status cuda_dense_decode_size(const struct kernel *kernel, const struct dense_decode_problem *p,
                                   size_t *bytes, size_t *alignment)
{
    (void)kernel;
    struct work w;
    *alignment = CUDA_WORKSPACE_ALIGNMENT;
    if (p->bound) return bound(p, bytes);
    const fmla_status status = lay_out(p, 0, &w);
    *bytes = w.bytes;
    return status;
}

/* ---- The launches --------------------------------------------------------------------------- */

static struct dense_decode_params parameters(const struct dense_decode_problem *p, const struct work *w)
{
    const int64_t q_shape[] = {p->b, p->s_q, p->h_q}, kv_shape[] = {p->pages, p->page_size, p->h_kv};
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
        .scale_log2 = cuda_scale_log2(p->scale),
        .q = p->q,
        .kv = p->kv,
        .block_table = p->block_table,
        .seqlens = p->seqlens,
        .block_table_stride = p->block_table_stride,
        .split = cuda_split_params(&w->cut, &w->split, p->partitions, p->num_splits, p->workspace),
        .output = {.out = p->out,
                   .lse = p->lse,
                   .rules = cuda_result_params(&p->rules),
                   .pairs_aligned = cuda_rows_aligned(p->out, q_shape, p->out_stride, 3, 2, 4)},
    };
    memcpy(params.q_stride, p->q_stride, sizeof params.q_stride);
    memcpy(params.kv_stride, p->kv_stride, sizeof params.kv_stride);
    memcpy(params.output.out_stride, p->out_stride, sizeof params.output.out_stride);
    memcpy(params.output.lse_stride, p->lse_stride, sizeof params.output.lse_stride);
    return params;
}

static fmla_status launch_plan(const struct cuda_scope *scope, const struct dense_decode_problem *p,
                               const struct work *w)
{
    if (p->batch_invariant || p->plan || p->plan_in_tables) return FMLA_OK;
    const struct plan_tables plan =
        plan_tables_of((char *)p->workspace + w->split.plan_offset, w->split.num_partitions);
    struct plan_params params = {
        .seqlens = p->seqlens,
        .b = p->b,
        .capacity = p->capacity,
        .header = plan.header,
        .partitions = plan.partitions,
        .num_splits = plan.num_splits,
        .num_partitions = w->split.num_partitions,
    };
    if (cuda_has_plan_costs(scope->device)) params.costs = plan_costs_of(p->s_q, p->h_q, p->h_kv);
    return cuda_launch_plan(op, scope, &params, p->stream);
}

static fmla_status launch_decode(const struct cuda_scope *scope, const struct dense_decode_problem *p,
                                 const struct work *w, struct dense_decode_params *params)
{
    const struct cuda_launch launch = {
        .kernel = &cuda_kernel_dense_decode[p->element][w->choice.shape],
        .blocks = cuda_split_workers(&w->cut, &w->split) * w->cut.tiles,
        .threads = 32 * dense_decode_shapes[w->choice.shape].warps,
        .shared_bytes = w->choice.shared_bytes,
        .stream = p->stream,
    };
    return cuda_launch(op, scope, &launch, (void *[]){params});
}

static fmla_status launch_decode_sm90(const struct cuda_scope *scope, const struct dense_decode_problem *p,
                                      const struct work *w, const struct dense_decode_params *call)
{
    struct dense_decode_sm90_params params = {
        .call = *call,
        .q_heads = (int32_t)sm90_dense_decode_q_heads(p),
        .tiles_of_head = (int32_t)(w->cut.tiles / p->h_kv),
        .tiles_of_head_divisor = divisor_of((uint32_t)(w->cut.tiles / p->h_kv)),
        .tiles_divisor = divisor_of((uint32_t)w->cut.tiles),
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
        .blocks = cuda_split_workers(&w->cut, &w->split) * w->cut.tiles,
        .threads = SM90_DENSE_DECODE_THREADS,
        .shared_bytes = SM90_DENSE_DECODE_SHARED_BYTES,
        .flags = LAUNCH_OVERLAP,
        .stream = p->stream,
    };
    return cuda_launch(op, scope, &launch, (void *[]){&params});
}

static struct join_params join_parameters(const struct dense_decode_params *call)
{
    return (struct join_params){
        .b = call->b,
        .s_q = call->s_q,
        .h_q = call->h_q,
        .group = call->group,
        .rows = call->rows,
        .group_divisor = call->group_divisor,
        .seqlens = call->seqlens,
        .capacity = call->capacity,
        .split = call->split,
        .output = call->output,
    };
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
    const struct join_params join = join_parameters(&params);
    if (!status)
        status = cuda_launch_join(op, &scope, p->element, &join, sm90 ? LAUNCH_OVERLAP : 0, p->stream);
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
