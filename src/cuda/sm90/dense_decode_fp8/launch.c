/* SPDX-License-Identifier: MIT
 *
 * Launch of Hopper's dense decode over FP8 caches.
 */
#include "choice.h"

#include "../dense_decode/launch.h"

static int variant_of(bool converted, int32_t rows_of_tile, bool join_in_kernel)
{
#define VARIANT(products, variant, rows, join)                                                               \
    if (rows_of_tile == (rows) && join_in_kernel == (join)) return SM90_DENSE_DECODE_##products##_##variant;
    if (converted) {
        SM90_DENSE_DECODE_FP8_VARIANTS(VARIANT, CONVERTED)
    } else {
        SM90_DENSE_DECODE_FP8_VARIANTS(VARIANT, CODES)
    }
#undef VARIANT
    return 0; /* every kind has one */
}

static fmla_status prepare(const struct attention_problem *p, struct cuda_work *w)
{
    int32_t rows = sm90_dense_decode_fp8_rows(p);
    w->launch.flags = LAUNCH_OVERLAP, w->split.parts_in_halves = true;
    const fmla_status status = cuda_dense_prepare(p, rows, w);
    if (status) return status;
    w->dense.ready_tiles = 0;
    if (p->b) sm90_dense_decode_join_in_kernel(p, w);
    if (w->split.join == JOIN_IN_KERNEL) {
        rows = sm90_dense_decode_fp8_rows_join_in_kernel(p, w->device->sms);
        w->launch.tiles = cuda_ceil_div(p->s_q * p->h_q, rows);
        w->split.num_partitions = w->device->sms / (int32_t)w->launch.tiles;
    }
    w->dense.rows = rows;
    const bool converted = p->products == FMLA_PRODUCTS_BF16;
    w->launch.kernel = cuda_kernel_of(
        (struct cuda_key){CUDA_SM90_DENSE_DECODE_FP8, ELEMENT_BF16, p->format,
                          .variant = variant_of(converted, rows, w->split.join == JOIN_IN_KERNEL)});
    return FMLA_OK;
}

static fmla_status launch(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *w)
{
    const char *op = operation_name(p->operation);
    struct dense_decode_fp8_params params = {
        .dense = sm90_dense_decode_params(p, w),
        .q_scale = p->q_scale,
        .q_given = p->q_codes != NULL,
    };
    fmla_status status = FMLA_OK;
    for (int end = 0; end < 2 && !status; end++) {
        const struct tensor_view keys = sm90_dense_decode_fp8_key_view(p, end),
                                 queries = sm90_dense_decode_fp8_q_view(p, w->dense.rows, end);
        status = tensor_map_make(op, scope, "kv_cache", &keys, end ? &params.dense.rope : &params.dense.keys);
        if (!status && p->q_codes)
            status =
                tensor_map_make(op, scope, "q", &queries, end ? &params.queries_end : &params.dense.queries);
    }
    if (!status && p->format == KV_FP8_656) {
        const struct tensor_view scales = sm90_dense_decode_fp8_scale_view(p);
        status = tensor_map_make(op, scope, "kv_cache", &scales, &params.scales);
    }
    if (status) return status;
    const struct cuda_launch launch = {.kernel = w->launch.kernel,
                                       .blocks = cuda_blocks(p, w),
                                       .flags = w->launch.flags,
                                       .stream = p->stream};
    return cuda_launch(op, scope, &launch, (void *[]){&params});
}

const struct cuda_attention cuda_sm90_dense_decode_fp8 = {.driver = CUDA_ATTENTION_DRIVER,
                                                          .refuses = sm90_dense_decode_fp8_refuses,
                                                          .prepare = prepare,
                                                          .launch = launch};
