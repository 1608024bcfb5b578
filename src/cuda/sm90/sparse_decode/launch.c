/* SPDX-License-Identifier: MIT
 *
 * Launch of Hopper's sparse decode: choice of the kernel, and even splits of requests in place of a plan.
 */
#include "../../attention.h"
#include "choice.h"

enum { LARGE = SM90_SPARSE_DECODE_HEADS, SMALL = SM90_SPARSE_DECODE_SMALL_HEADS };

static int64_t tiles_of(const struct attention_problem *p, int heads)
{
    return p->s_q * cuda_ceil_div(p->h_q, heads);
}

static const char *refuses(const struct attention_problem *p, const char **argument)
{
    const char *const why = cuda_sparse_refuses(p, tiles_of(p, SMALL), argument);
    return why ? why : sm90_sparse_decode_refuses(p, argument);
}

static bool has_rows(const struct attention_problem *p) /* of the queries' type */
{
    return p->format == KV_BF16 || p->format == KV_FP16;
}

/* Returns the keys of a split, or 0 for a call by a plan, which balances lengths. If the caller names a
 * number of partitions it is followed, unless it is the default, or the rows of a plan by the default. */
static int32_t split_keys_of(const struct attention_problem *p, const struct sm90_sparse_shape *shape,
                             int heads)
{
    const int32_t partitions = sm90_sparse_decode_partitions(shape);
    if (p->num_partitions && p->num_partitions != partitions &&
        p->num_partitions != sm90_sparse_decode_rows(shape))
        return 0;
    const int64_t keys = sm90_sparse_decode_split_keys(shape, heads);
    if (!keys) return 0;
    if (shape->lengths && (has_rows(p) || keys > SM90_SPARSE_DECODE_FEW_KEYS)) return 0;
    /* The workspace, the same for all kernels, has two parts per partition if there are several
     * partitions, so there are no more splits than that. If it has fewer parts than requests, each request
     * is one split, which needs none. */
    const int64_t fit = partitions > 1 ? 2 * (int64_t)partitions / p->b : 1, most = fit > 1 ? fit : 1,
                  least_keys = cuda_ceil_div(cuda_ceil_div(p->capacity, PLAN_BLOCK), most) * PLAN_BLOCK;
    return (int32_t)(keys > least_keys ? keys : least_keys);
}

static int variant_of(const struct attention_problem *p, bool some_fp4, bool join_in_kernel)
{
    if (has_rows(p)) return p->d_qk > p->d_v ? SM90_SPARSE_DECODE_ROWS_576 : SM90_SPARSE_DECODE_ROWS_512;
    if (some_fp4) return join_in_kernel ? SM90_SPARSE_DECODE_FP4_JOIN_IN_KERNEL : SM90_SPARSE_DECODE_FP4;
    return join_in_kernel ? SM90_SPARSE_DECODE_BYTES_JOIN_IN_KERNEL : SM90_SPARSE_DECODE_BYTES;
}

static struct cuda_kernel *kernel_of(const struct attention_problem *p, int heads, bool join_in_kernel)
{
    const struct sm90_sparse_formats formats = sm90_sparse_decode_formats(p);
    return cuda_kernel_of(
        (struct cuda_key){heads == SMALL ? CUDA_SM90_SPARSE_DECODE_SMALL : CUDA_SM90_SPARSE_DECODE,
                          p->element, formats.format, variant_of(p, formats.some_fp4, join_in_kernel)});
}

/* If all CTAs run at the same time, those that have the parts of a tile join them. */
static void join_in_kernel(const struct attention_problem *p, int heads, struct cuda_work *w)
{
    const int64_t of_sm = heads == SMALL ? SM90_SPARSE_DECODE_SMALL_BLOCKS_OF_SM : 1,
                  most = heads == SMALL ? MOST_SMALL_PARTS_JOINED_IN_KERNEL : MOST_PARTS_JOINED_IN_KERNEL;
    if (w->ctas_must_not_wait || !w->split.parts || !w->split.cta_group_barriers_offset ||
        w->split.even_splits > most || cuda_blocks(p, w) > of_sm * w->device->sms)
        return;
    w->split.join = JOIN_IN_KERNEL;
    w->launch.flags |= LAUNCH_COOPERATIVE;
    w->launch.kernel = kernel_of(p, heads, true);
}

static fmla_status prepare_tiles(const struct attention_problem *p, int heads, struct cuda_work *w)
{
    const struct sm90_sparse_shape shape = sm90_sparse_shape_of(p, w->device->sms);
    fmla_status status = cuda_sparse_prepare(p, tiles_of(p, heads), w);
    w->launch.kernel = kernel_of(p, heads, false);
    w->launch.flags = LAUNCH_OVERLAP, w->split.parts_in_halves = true;
    if (status || w->split.keys || p->bound) return status;
    const size_t bytes = w->bytes; /* with a plan, which other kernels of the device would use */
    w->split.keys = split_keys_of(p, &shape, heads);
    w->split.at_once = true;
    if (w->split.keys) status = cuda_lay_out(p, w);
    if (w->split.keys && !has_rows(p)) join_in_kernel(p, heads, w);
    w->bytes = bytes;
    return status;
}

static fmla_status prepare_large(const struct attention_problem *p, struct cuda_work *w)
{
    return prepare_tiles(p, LARGE, w);
}

static fmla_status prepare_small(const struct attention_problem *p, struct cuda_work *w)
{
    return prepare_tiles(p, SMALL, w);
}

/* Caches of the queries' type have no kernel of small tiles. */
static fmla_status prepare(const struct attention_problem *p, struct cuda_work *w)
{
    const struct sm90_sparse_shape shape = sm90_sparse_shape_of(p, w->device->sms);
    const bool small =
        !has_rows(p) && sm90_sparse_decode_is_small(&shape, p->splitting == SPLIT_BATCH_INVARIANT);
    return prepare_tiles(p, small ? SMALL : LARGE, w);
}

static fmla_status launch(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *w)
{
    struct sparse_decode_sm90_params params = {.call = cuda_sparse_params(p, w, w->launch.tiles / p->s_q)};
    if (w->split.join == JOIN_IN_KERNEL) {
        params.cta_group_barriers = cuda_cta_group_barriers(p, w);
        params.ticket = cuda_ticket();
    }
    const struct cuda_launch launch = {.kernel = w->launch.kernel,
                                       .blocks = cuda_blocks(p, w),
                                       .flags = w->launch.flags,
                                       .stream = p->stream};
    return cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){&params});
}

const struct cuda_attention cuda_sm90_sparse_decode = {.driver = CUDA_ATTENTION_DRIVER,
                                                       .refuses = refuses,
                                                       .prepare = prepare,
                                                       .launch = launch,
                                                       .leaves = sm90_sparse_decode_leaves};
const struct cuda_attention cuda_sm90_sparse_decode_64 = {
    .driver = CUDA_ATTENTION_DRIVER, .refuses = refuses, .prepare = prepare_large, .launch = launch};
const struct cuda_attention cuda_sm90_sparse_decode_16 = {
    .driver = CUDA_ATTENTION_DRIVER, .refuses = refuses, .prepare = prepare_small, .launch = launch};
