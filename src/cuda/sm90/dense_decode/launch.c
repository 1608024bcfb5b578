/* SPDX-License-Identifier: MIT
 *
 * Launch of Hopper's dense decode.
 */
#include "launch.h"

#include "choice.h"

enum { MOST_BLOCKS = 1 << 20 /* blocks of keys of all requests: the kernel divides this number in fp32 */ };

void sm90_dense_decode_join_in_kernel(const struct attention_problem *p, struct cuda_work *w)
{
    const int32_t workers = w->split.num_partitions,
                  usual = plan_default_partitions(w->device->sms, p->s_q, p->h_q, p->h_kv);
    const size_t words = (size_t)(p->b * w->launch.tiles) * sizeof(uint64_t);
    if (w->ctas_must_not_wait || p->bound || p->splitting == SPLIT_BATCH_INVARIANT || workers != usual ||
        workers < 2 * p->b || p->b > MOST_REQUESTS_JOINED_IN_KERNEL ||
        p->b * cuda_ceil_div(p->capacity, PLAN_BLOCK) > MOST_BLOCKS ||
        w->dense.ready_flags_offset + words > w->dense.queries_offset)
        return;
    w->split.join = JOIN_IN_KERNEL, w->split.makes_plan = false;
    w->split.cta_group_barriers_offset = w->dense.ready_flags_offset;
    w->launch.flags |= LAUNCH_COOPERATIVE;
}

struct dense_decode_sm90_params sm90_dense_decode_params(const struct attention_problem *p,
                                                         const struct cuda_work *w)
{
    const uint32_t tiles_of_head = (uint32_t)(w->launch.tiles / p->h_kv);
    struct dense_decode_sm90_params params = {
        .call = cuda_dense_params(p, w),
        .q_heads = (int32_t)sm90_dense_decode_q_heads(p),
        .tiles_of_head = (int32_t)tiles_of_head,
        .tiles_of_head_divisor = divisor_of(tiles_of_head),
        .tiles_divisor = divisor_of((uint32_t)w->launch.tiles),
        .request_step = p->q_stride[0] != 0,
        .page_step = p->keys[0].k.page_bytes != 0,
    };
    if (w->split.join == JOIN_IN_KERNEL) {
        params.cta_group_barriers = cuda_cta_group_barriers(p, w);
        params.ticket = cuda_ticket();
        params.workers = w->split.num_partitions, params.of_request = w->split.num_partitions / (int32_t)p->b;
        params.call.split.header = NULL, params.call.split.partitions = NULL;
        params.call.split.num_splits = NULL, params.call.split.ready_flags = NULL;
    }
    return params;
}

static int variant_of(int64_t d_qk, bool shared_keys, bool join_in_kernel)
{
#define VARIANT(variant, d, shared, join)                                                                    \
    if (d_qk == (d) && shared_keys == (shared) && join_in_kernel == (join))                                  \
        return SM90_DENSE_DECODE_##variant;
    SM90_DENSE_DECODE_VARIANTS(VARIANT)
#undef VARIANT
    return 0; /* every kind has one */
}

static fmla_status prepare(const struct attention_problem *p, struct cuda_work *w)
{
    const bool shared_keys = p->s_q * (p->h_q / p->h_kv) > SM90_DENSE_DECODE_ROWS;
    w->launch.flags = LAUNCH_OVERLAP;
    const fmla_status status = cuda_dense_prepare(p, SM90_DENSE_DECODE_ROWS, w);
    if (status) return status;
    /* Rows that see other keys than the tile's last row may have to be redone, which needs a plan. */
    if (p->b && !(p->causal && p->s_q > 1)) sm90_dense_decode_join_in_kernel(p, w);
    w->launch.kernel = cuda_kernel_of(
        (struct cuda_key){CUDA_SM90_DENSE_DECODE, .element = p->element,
                          .variant = variant_of(p->d_qk, shared_keys, w->split.join == JOIN_IN_KERNEL)});
    return FMLA_OK;
}

static fmla_status launch(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *w)
{
    const char *op = operation_name(p->operation);
    struct dense_decode_sm90_params params = sm90_dense_decode_params(p, w);
    const struct tensor_view keys = sm90_dense_decode_key_view(p, 2), rope = sm90_dense_decode_key_view(p, 1),
                             queries = sm90_dense_decode_q_view(p);
    fmla_status status = tensor_map_make(op, scope, "kv_cache", &keys, &params.keys);
    if (!status) status = tensor_map_make(op, scope, "kv_cache", &rope, &params.rope);
    if (!status) status = tensor_map_make(op, scope, "q", &queries, &params.queries);
    if (status) return status;
    const struct cuda_launch launch = {.kernel = w->launch.kernel,
                                       .blocks = cuda_blocks(p, w),
                                       .flags = w->launch.flags,
                                       .stream = p->stream};
    return cuda_launch(op, scope, &launch, (void *[]){&params});
}

const struct cuda_attention cuda_sm90_dense_decode = {.driver = CUDA_ATTENTION_DRIVER,
                                                      .refuses = sm90_dense_decode_refuses,
                                                      .prepare = prepare,
                                                      .launch = launch};
