/* SPDX-License-Identifier: MIT
 *
 * Dense decode on a GPU: the host part that all its kernels share.
 *
 * Workspace: that of attention.h | ready flags | with FP8 products, room for the queries as bf16 values
 * (every kernel may use it)
 */
#include "attention.h"

#include <string.h>

bool cuda_of_bytes(const struct attention_problem *p)
{
    return kv_layout_of(p->format, 0).element == KV_ELEMENT_E4M3;
}

static size_t ready_flag_bytes(int64_t tiles)
{
    return cuda_line_up((size_t)tiles * READY_FLAGS_OF_TILE * sizeof(uint32_t));
}

/* Lays out the workspace of any call up to these sizes with the default number of partitions. The default
 * gives each SM one tile of PLAN_ROW_TILE rows of a key head, so `tiles` tiles have workers / tiles partitions
 * and at most tiles · PLAN_ROW_TILE rows: one tile needs the most partitions and the most rows of parts. With
 * other numbers of partitions, or in even splits, larger sizes need more. */
static fmla_status lay_out_most(const struct attention_problem *p, struct cuda_work *w)
{
    const int64_t rows_of_head = p->s_q * (p->h_q / p->h_kv), workers = w->device->sms / p->h_kv;
    struct cuda_most most = {.partitions = 1};
    if (rows_of_head && workers)
        cuda_most_add(&most, (int32_t)workers,
                      p->h_kv * (rows_of_head < PLAN_ROW_TILE ? rows_of_head : PLAN_ROW_TILE));
    const fmla_status status = cuda_lay_out_most(p, &most, w);
    _Static_assert((int)ROWS_OF_READY_TILE == (int)PLAN_ROW_TILE,
                   "there are the most flags where a head is one tile");
    w->bytes += ready_flag_bytes(workers > 1 ? p->h_kv * workers : 0);
    return status;
}

/* Adds the room for the queries of FP8 products, which is the same for all kernels of a GPU. */
static fmla_status place_queries(const struct attention_problem *p, struct cuda_work *w)
{
    int64_t bytes;
    w->dense.queries_offset = w->bytes;
    if (p->products != FMLA_PRODUCTS_FP8) return FMLA_OK;
    if (__builtin_mul_overflow(p->b * p->s_q, p->h_q * p->d_qk * (int64_t)sizeof(uint16_t), &bytes) ||
        bytes > INT64_MAX / 4)
        return fail(FMLA_UNSUPPORTED, "%s: q: the queries of %lld requests exceed the address space",
                    operation_name(p->operation), (long long)p->b);
    w->bytes += cuda_line_up((size_t)bytes);
    return FMLA_OK;
}

/* The rows of a tile change the number of workers, not the workspace that they need. */
fmla_status cuda_dense_prepare(const struct attention_problem *p, int64_t rows, struct cuda_work *w)
{
    const int64_t rows_of_head = p->s_q * (p->h_q / p->h_kv);
    w->launch.tiles = p->h_kv * cuda_ceil_div(rows_of_head, rows);
    w->split.keys = p->splitting == SPLIT_BATCH_INVARIANT ? INVARIANT_SPLIT_KEYS : 0;
    w->split.num_partitions = p->num_partitions
                                  ? p->num_partitions
                                  : plan_default_partitions(w->device->sms, p->s_q, p->h_q, p->h_kv);
    const fmla_status status = cuda_lay_out(p, w);
    if (status) return status;
    if (!w->split.keys && w->split.num_partitions > 1)
        w->dense.ready_tiles =
            p->h_kv * cuda_ceil_div(rows_of_head, ROWS_OF_READY_TILE); /* below the number of rows */
    w->dense.ready_flags_offset = w->bytes;
    w->bytes += ready_flag_bytes(w->dense.ready_tiles * w->split.num_partitions);
    const bool bound = p->bound && !w->split.keys && !p->num_partitions;
    const fmla_status most = bound ? lay_out_most(p, w) : FMLA_OK;
    return most ? most : place_queries(p, w);
}

static uint16_t *queries_of(const struct attention_problem *p, const struct cuda_work *w)
{
    return (uint16_t *)(void *)((char *)p->workspace + w->dense.queries_offset);
}

fmla_status cuda_dense_quantise(const struct cuda_scope *scope, const struct attention_problem *p,
                                const struct cuda_work *w)
{
    const int64_t shape[] = {p->b, p->s_q, p->h_q}, element = p->q_codes ? 1 : (int64_t)sizeof(uint16_t);
    const void *const q = p->q_codes ? (const void *)p->q_codes : p->q;
    struct quantise_params params = {
        .q = p->q,
        .codes = p->q_codes,
        .scale = p->q_scale,
        .to = queries_of(p, w),
        .rows = p->b * p->s_q * p->h_q,
        .s_q = (int32_t)p->s_q,
        .h_q = (int32_t)p->h_q,
        .quantised = query_quantised(p->format),
        .pairs_aligned = cuda_rows_aligned(q, shape, p->q_stride, 3, element, 2 * element),
    };
    memcpy(params.q_stride, p->q_stride, sizeof params.q_stride);
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of((struct cuda_key){CUDA_QUANTISE_QUERIES, .element = ELEMENT_BF16}),
        .blocks = cuda_ceil_div(params.rows, QUANTISE_WARPS), /* any number of CTAs covers all rows */
        .stream = p->stream,
    };
    return cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){&params});
}

struct attention_problem cuda_dense_quantised(const struct attention_problem *p, const struct cuda_work *w)
{
    struct attention_problem made = *p;
    made.q = queries_of(p, w), made.q_codes = NULL;
    made.q_stride[2] = p->d_qk, made.q_stride[1] = p->h_q * p->d_qk;
    made.q_stride[0] = p->s_q * made.q_stride[1];
    return made;
}

struct dense_decode_params cuda_dense_params(const struct attention_problem *p, const struct cuda_work *w)
{
    const struct key_source *keys = &p->keys[0];
    const int64_t q_shape[] = {p->b, p->s_q, p->h_q}, kv_shape[] = {keys->pages, keys->page_size, p->h_kv};
    const int64_t kv_bytes[] = {keys->k.page_bytes, keys->k.slot_bytes, keys->k.head_bytes};
    const int32_t group = (int32_t)(p->h_q / p->h_kv);
    struct dense_decode_params params = {
        .b = (int32_t)p->b,
        .s_q = (int32_t)p->s_q,
        .h_q = (int32_t)p->h_q,
        .h_kv = (int32_t)p->h_kv,
        .group = group,
        .d_qk = (int32_t)p->d_qk,
        .rows = (int32_t)p->s_q * group,
        .page_size = (int32_t)keys->page_size,
        .page_divisor = divisor_of((uint32_t)keys->page_size),
        .group_divisor = divisor_of((uint32_t)group),
        .capacity = (int32_t)p->capacity,
        .causal = p->causal,
        .vectors_aligned = cuda_rows_aligned(p->q, q_shape, p->q_stride, 3, 2, 16) &&
                           cuda_rows_aligned(keys->k.data, kv_shape, kv_bytes, 3, 1, 16),
        .stages = w->launch.stages,
        .scale_log2 = cuda_scale_log2(p->scale),
        .q = p->q,
        .kv = (const uint16_t *)(const void *)keys->k.data,
        .block_table = keys->table,
        .seqlens = keys->lengths,
        .block_table_stride = keys->table_stride[0],
        .split = cuda_split_params(p, w),
        .output = cuda_output_params(p),
        .kv_format = (int32_t)p->format,
        .kv_scale = p->kv_scale,
    };
    memcpy(params.q_stride, p->q_stride, sizeof params.q_stride);
    const int64_t unit = cuda_of_bytes(p) ? 1 : (int64_t)sizeof(uint16_t);
    for (int i = 0; i < 3; i++) params.kv_stride[i] = kv_bytes[i] / unit;
    return params;
}
