/* SPDX-License-Identifier: MIT
 *
 * Sparse decode on a GPU: plan, if none is given | decode | join, where requests may be cut. A query token's keys are its own:
 * a partition of the plan is taken by as many blocks of threads as the tokens of a request have tiles of heads.
 */
#include "cuda.h"
#include "split.h"

#include <string.h>

static const char op[] = "sparse_decode";

struct work {
    struct cuda_cut cut;
    struct cuda_split split;
    int64_t tiles_of_token; /* Hopper's kernel; else 0 */
    int tile_heads;         /* PORTABLE, HOPPER, HOPPER_SMALL */
};

/* The kernel that takes a call, by the heads of its tiles. */
enum { PORTABLE = 0, HOPPER = SM90_SPARSE_DECODE_HEADS, HOPPER_SMALL = SM90_SPARSE_DECODE_SMALL_HEADS };

/* Blocks of threads that take a worker's pieces together. */
static int64_t tiles_of(const struct sparse_decode_problem *p, int heads)
{
    return heads ? p->s_q * cuda_ceil_div(p->h_q, heads) : cuda_ceil_div(p->s_q * p->h_q, SPARSE_WARPS);
}

static struct sm90_sparse_shape shape_of(const struct sparse_decode_problem *p)
{
    return (struct sm90_sparse_shape){.b = p->b,
                                      .s_q = p->s_q,
                                      .h_q = p->h_q,
                                      .topk = p->topk.topk,
                                      .extra_topk = p->topk.extra_topk,
                                      .sms = cuda_device(p->device.id)->sms,
                                      .lengths = p->topk.length || p->topk.extra_length};
}

/* Caches of the queries' type: there is no kernel of small tiles for them. */
static bool has_rows(const struct sparse_decode_problem *p)
{
    return p->format == KV_BF16 || p->format == KV_FP16;
}

static bool has_hoppers(const struct cuda_device *device)
{
    return device->capability == 90 &&
           cuda_build_has(&cuda_build, cuda_kernel_sparse_decode_sm90[1][0].image);
}

/* The same function of the shape for every format: a plan may be made before one is named. */
static int32_t partitions_of(const struct cuda_device *device, const struct sm90_sparse_shape *shape)
{
    return has_hoppers(device) ? sm90_sparse_decode_partitions(shape)
                               : plan_default_partitions(shape->sms, 1, shape->s_q * shape->h_q, shape->s_q);
}

int32_t cuda_sparse_partitions(int32_t id, int64_t b, int64_t s_q, int64_t h_q, int64_t topk,
                               int64_t extra_topk)
{
    const struct cuda_device *device = cuda_device(id);
    return partitions_of(device,
                         &(struct sm90_sparse_shape){b, s_q, h_q, topk, extra_topk, device->sms, true});
}

/* Keys of a chunk; 0: by a plan, which evens out what lengths differ in. Partitions that the caller names are followed. */
static int32_t chunk_of(const struct sparse_decode_problem *p, int heads, int32_t partitions)
{
    if (p->batch_invariant) return INVARIANT_CHUNK;
    if (!heads || (p->num_partitions && p->num_partitions != partitions)) return 0;
    if (p->topk.length || p->topk.extra_length) return 0;
    const struct sm90_sparse_shape shape = shape_of(p);
    const int64_t keys = sm90_sparse_decode_chunk(&shape, heads);
    if (!keys) return 0;
    /* The workspace, the same for all kernels, has two slots a partition, if there are several: no more chunks than that.
     * Where it has fewer slots than there are requests, each request is one chunk, which needs none. */
    const int64_t fit = partitions > 1 ? 2 * (int64_t)partitions / p->b : 1, most = fit > 1 ? fit : 1,
                  least_keys = cuda_ceil_div(cuda_ceil_div(p->capacity, PLAN_BLOCK), most) * PLAN_BLOCK;
    return (int32_t)(keys > least_keys ? keys : least_keys);
}

static fmla_status lay_out(const struct sparse_decode_problem *p, int heads, struct work *w)
{
    const struct cuda_device *device = cuda_device(p->device.id);
    const struct sm90_sparse_shape shape = shape_of(p);
    const int32_t partitions = partitions_of(device, &shape);
    w->tile_heads = heads;
    w->tiles_of_token = heads ? cuda_ceil_div(p->h_q, heads) : 0;
    w->cut = (struct cuda_cut){
        .operation = op,
        .b = p->b,
        .rows = p->h_q * p->s_q,
        .d_v = p->d_v,
        .capacity = p->capacity,
        .tiles = tiles_of(p, heads),
        .sms = device->sms,
        .chunk_keys = chunk_of(p, heads, partitions),
        .chunks_at_once = !p->batch_invariant,
        .plan = p->plan,
        .plan_size = p->plan_size,
        .plan_in_tables = p->plan_in_tables,
        .num_partitions = p->num_partitions ? p->num_partitions : partitions,
    };
    return cuda_split_lay_out(&w->cut, &w->split);
}

/* Any call up to these sizes, with the partitions of the default: every number of tiles of a request is tried, with as many rows as
 * they hold. With others, or in chunks, larger sizes take more. */
static fmla_status bound(const struct sparse_decode_problem *p, size_t *bytes)
{
    struct work w;
    const fmla_status status = lay_out(p, PORTABLE, &w);
    *bytes = w.split.bytes;
    if (status || p->batch_invariant || p->num_partitions) return status;
    const struct cuda_device *device = cuda_device(p->device.id);
    const struct sm90_sparse_shape shape = shape_of(p);
    struct cuda_most most = {.partitions = 1};
    static const int heads[] = {HOPPER, HOPPER_SMALL};
    for (int i = 0; i < (has_hoppers(device) ? 2 : 1); i++) {
        const int64_t most_tiles = p->s_q * cuda_ceil_div(p->h_q, heads[i]), all_rows = p->s_q * p->h_q;
        if (has_hoppers(device) && heads[i] == HOPPER && p->h_q <= HOPPER_SMALL) continue;
        for (int64_t tiles = 1; tiles <= most_tiles; tiles++) {
            const int32_t partitions = has_hoppers(device)
                                           ? sm90_sparse_decode_most_partitions(&shape, tiles, heads[i])
                                           : (int32_t)(device->sms / tiles);
            if (partitions < 2) break; /* and so with more tiles */
            cuda_most_add(&most, partitions, all_rows < tiles * heads[i] ? all_rows : tiles * heads[i]);
        }
    }
    const fmla_status fits = cuda_split_bound(&w.cut, &most, &w.split);
    *bytes = w.split.bytes;
    return fits;
}

fmla_status cuda_sparse_decode_size(const struct kernel *kernel, const struct sparse_decode_problem *p,
                                    size_t *bytes, size_t *alignment)
{
    (void)kernel;
    struct work w;
    *alignment = CUDA_WORKSPACE_ALIGNMENT;
    if (p->bound) return bound(p, bytes);
    const fmla_status status = lay_out(p, PORTABLE, &w);
    *bytes = w.split.bytes;
    return status;
}

/* Keys are counted in 32 bits, and so are blocks of threads, with room for the lanes of batch-invariant mode. */
static const char *refuses_size(const struct sparse_decode_problem *p, int heads, const char **argument)
{
    enum { MOST_LANES = 1 << 20, MOST_KEYS = INT32_MAX - INVARIANT_CHUNK };
    const int64_t workers = p->b > p->num_partitions ? p->b : p->num_partitions;
    *argument = p->topk.extra_topk ? "extra_indices" : "indices";
    if (p->capacity > MOST_KEYS) return "takes fewer than 2^31 - 2048 entries of all caches of a token";
    *argument = "q";
    if (workers && tiles_of(p, heads) > (INT32_MAX - MOST_LANES) / workers)
        return "takes fewer than 2^31 tiles of heads and partitions";
    return NULL;
}

const char *cuda_sparse_decode_refuses(const struct sparse_decode_problem *p, const char **argument)
{
    return refuses_size(p, PORTABLE, argument);
}

const char *cuda_sm90_sparse_decode_refuses(const struct sparse_decode_problem *p, const char **argument)
{
    const char *const why = refuses_size(p, HOPPER_SMALL, argument);
    return why ? why : sm90_sparse_decode_refuses(p, argument);
}

static struct sparse_decode_params parameters(const struct sparse_decode_problem *p, const struct work *w)
{
    const int64_t out_shape[] = {p->b, p->s_q, p->h_q};
    struct sparse_decode_params params = {
        .b = (int32_t)p->b,
        .s_q = (int32_t)p->s_q,
        .h_q = (int32_t)p->h_q,
        .d_qk = (int32_t)p->d_qk,
        .tiles = (int32_t)w->cut.tiles,
        .tiles_of_token = (int32_t)w->tiles_of_token,
        .tiles_divisor = divisor_of((uint32_t)w->cut.tiles),
        .token_divisor = divisor_of((uint32_t)w->tiles_of_token),
        .heads_divisor = divisor_of((uint32_t)p->h_q),
        .scale = p->scale,
        .scale_log2 = cuda_scale_log2(p->scale),
        .q = p->q,
        .cache = {cuda_sparse_cache_params(&p->cache[0]), cuda_sparse_cache_params(&p->cache[1])},
        .topk = p->topk,
        .chunks_divisor = divisor_of((uint32_t)w->split.chunks),
        .split = cuda_split_params(&w->cut, &w->split, p->partitions, p->num_splits, p->workspace),
        .output = {.out = p->out,
                   .lse = p->lse,
                   .rules = cuda_result_params(&p->rules),
                   .pairs_aligned = cuda_rows_aligned(p->out, out_shape, p->out_stride, 3, 2, 4)},
    };
    params.split.slots_in_halves = w->tile_heads != PORTABLE;
    memcpy(params.q_stride, p->q_stride, sizeof params.q_stride);
    memcpy(params.output.out_stride, p->out_stride, sizeof params.output.out_stride);
    memcpy(params.output.lse_stride, p->lse_stride, sizeof params.output.lse_stride);
    return params;
}

static fmla_status launch_plan(const struct cuda_scope *scope, const struct sparse_decode_problem *p,
                               const struct work *w)
{
    if (w->cut.chunk_keys || p->plan || p->plan_in_tables) return FMLA_OK;
    const struct plan_tables plan =
        plan_tables_of((char *)p->workspace + w->split.plan_offset, w->split.num_partitions);
    const struct plan_params params = {
        .b = p->b,
        .topk = p->topk,
        .header = plan.header,
        .partitions = plan.partitions,
        .num_splits = plan.num_splits,
        .num_partitions = w->split.num_partitions,
    };
    return cuda_launch_plan(op, scope, &params, p->stream);
}

static struct cuda_kernel *kernel_of(const struct sparse_decode_problem *p, int heads)
{
    if (!heads) return &cuda_kernel_sparse_decode[p->element][p->format];
    if (has_rows(p)) return &cuda_kernel_sparse_decode_sm90_rows[p->element][p->d_qk == 576];
    return &cuda_kernel_sparse_decode_sm90[heads == HOPPER_SMALL][p->format == KV_FP8_584];
}

static fmla_status launch_decode(const struct cuda_scope *scope, const struct sparse_decode_problem *p,
                                 const struct work *w, int heads, struct sparse_decode_params *params)
{
    const bool small = heads == HOPPER_SMALL;
    const struct cuda_launch launch = {
        .kernel = kernel_of(p, heads),
        .blocks = cuda_split_workers(&w->cut, &w->split) * w->cut.tiles,
        .threads = !heads  ? 32 * SPARSE_WARPS
                   : small ? SM90_SPARSE_DECODE_SMALL_THREADS
                           : SM90_SPARSE_DECODE_THREADS,
        .shared_bytes = !heads  ? 0
                        : small ? SM90_SPARSE_DECODE_SMALL_SHARED_BYTES
                                : SM90_SPARSE_DECODE_SHARED_BYTES,
        .flags = heads ? LAUNCH_OVERLAP : 0,
        .stream = p->stream,
    };
    return cuda_launch(op, scope, &launch, (void *[]){params});
}

static struct join_params join_parameters(const struct sparse_decode_params *call)
{
    return (struct join_params){
        .b = call->b,
        .s_q = call->s_q,
        .h_q = call->h_q,
        .group = call->h_q,
        .rows = call->s_q * call->h_q,
        .group_divisor = call->heads_divisor,
        .topk = call->topk,
        .split = call->split,
        .output = call->output,
    };
}

static fmla_status sparse_decode(const struct sparse_decode_problem *p, int heads)
{
    struct work w;
    struct cuda_scope scope;
    fmla_status status = lay_out(p, heads, &w);
    if (status || !p->b) return status;
    struct sparse_decode_params params = parameters(p, &w);
    const struct join_params join = join_parameters(&params);
    status = cuda_enter(op, "q", p->device.id, &scope);
    if (status) return status;
    status = launch_plan(&scope, p, &w);
    if (!status) status = launch_decode(&scope, p, &w, heads, &params);
    if (!status)
        status = cuda_launch_join(op, &scope, p->element, &join, heads ? LAUNCH_OVERLAP : 0, p->stream);
    cuda_leave(&scope);
    return status;
}

fmla_status cuda_sparse_decode(const struct kernel *kernel, const struct sparse_decode_problem *p)
{
    (void)kernel;
    return sparse_decode(p, PORTABLE);
}

fmla_status cuda_sm90_sparse_decode(const struct kernel *kernel, const struct sparse_decode_problem *p)
{
    (void)kernel;
    const struct sm90_sparse_shape shape = shape_of(p);
    const bool small = !has_rows(p) && sm90_sparse_decode_is_small(&shape, p->batch_invariant);
    return sparse_decode(p, small ? HOPPER_SMALL : HOPPER);
}

fmla_status cuda_sm90_sparse_decode_64(const struct kernel *kernel, const struct sparse_decode_problem *p)
{
    (void)kernel;
    return sparse_decode(p, HOPPER);
}

fmla_status cuda_sm90_sparse_decode_16(const struct kernel *kernel, const struct sparse_decode_problem *p)
{
    (void)kernel;
    return sparse_decode(p, HOPPER_SMALL);
}
