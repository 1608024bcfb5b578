/* SPDX-License-Identifier: MIT
 *
 * A row depends on its query, its request's keys and nothing else. So the oracle can be asked for single
 * rows, by views: one request, one token, one head, and the key head that it reads. What the mask leaves of
 * the keys of a causal row is a shorter request.
 */
#include "check.h"

#include "call.h"

#include "elements.h"
#include "progress.h"
#include "random.h"

#include <math.h>
#include <stdlib.h>

/* The oracle takes about 1 ns a product; this is a few seconds at most. */
#define BUDGET ((int64_t)2000000000)

enum { SAMPLED_ROWS = 64 };

/* Calls the oracle with args as they are, but for workspace and kernel. */
static bool ask_oracle(fmla_dense_decode_args *args, struct fault *fault)
{
    args->kernel = "ref", args->plan = NULL, args->plan_size = 0;
    if (call_workspace(args) != FMLA_OK) return fault_set(fault, "oracle: %s", fmla_last_error());
    if (!args->workspace)
        return fault_set(fault, "no memory for %zu bytes of the oracle's workspace", args->workspace_size);
    const fmla_status status = fmla_dense_decode(args);
    free(args->workspace);
    return status == FMLA_OK || fault_set(fault, "oracle: %s", fmla_last_error());
}

static bool check_whole(const fmla_dense_decode_args *args, struct check_result *result, struct fault *fault)
{
    const int64_t rows = result->all_rows, d_v = args->out->shape[3];
    fmla_tensor out = *args->out, lse = *args->lse;
    fmla_dense_decode_args again = *args;
    out.data = malloc((size_t)(rows * d_v) * out.dtype.bits / 8 + 1);
    lse.data = malloc((size_t)rows * sizeof(float) + 1);
    again.out = &out, again.lse = &lse;
    bool good = (out.data && lse.data) || fault_set(fault, "no memory for the oracle's result");
    if (good) good = ask_oracle(&again, fault);
    for (int64_t i = 0; good && i < rows * d_v; i++)
        compare_add(&result->out, &tolerance_dense_decode_out, element_load(args->out->data, out.dtype, i),
                    element_load(out.data, out.dtype, i));
    for (int64_t i = 0; good && i < rows; i++)
        compare_add(&result->lse, &tolerance_decode_lse, element_load(args->lse->data, lse.dtype, i),
                    element_load(lse.data, lse.dtype, i));
    free(out.data), free(lse.data);
    result->rows = rows;
    return good;
}

static void *element_at(const fmla_tensor *tensor, int64_t index)
{
    return (char *)tensor->data + index * (tensor->dtype.bits / 8);
}

/* Row (r, j, h): all tensors of args are contiguous. */
static bool check_row(const fmla_dense_decode_args *args, int64_t r, int64_t j, int64_t h, float *out_row,
                      struct check_result *result, struct fault *fault)
{
    const int64_t s_q = args->q->shape[1], h_q = args->q->shape[2], d_qk = args->q->shape[3];
    const int64_t pages = args->kv_cache->shape[0], page_size = args->kv_cache->shape[1];
    const int64_t h_kv = args->kv_cache->shape[2], d_v = args->out->shape[3];
    const int64_t row = (r * s_q + j) * h_q + h, lse_row = (r * h_q + h) * s_q + j;
    const int64_t first_page = args->block_table ? 0 : r;
    const int64_t max_pages = args->block_table ? args->block_table->shape[1] : 1;

    const int64_t q_shape[] = {1, 1, 1, d_qk}, out_shape[] = {1, 1, 1, d_v}, one[] = {1, 1, 1};
    const int64_t cache_shape[] = {pages - first_page, page_size, 1, d_qk};
    const int64_t cache_strides[] = {page_size * h_kv * d_qk, h_kv * d_qk, d_qk, 1};
    const int64_t table_shape[] = {1, max_pages};
    int32_t length = (int32_t)call_visible(args, r, j);
    float lse_value = NAN;

    fmla_tensor q = *args->q, cache = *args->kv_cache, out = *args->out, lse = *args->lse;
    fmla_tensor seqlens = *args->seqlens, table = {0}, sink = {0};
    q.data = element_at(args->q, row * d_qk), q.shape = q_shape;
    cache.data = element_at(args->kv_cache, first_page * cache_strides[0] + h / (h_q / h_kv) * d_qk);
    cache.shape = cache_shape, cache.strides = cache_strides;
    out.data = out_row, out.shape = out_shape;
    lse.data = &lse_value, lse.shape = one;
    seqlens.data = &length, seqlens.shape = one;
    fmla_dense_decode_args again = *args;
    again.q = &q, again.kv_cache = &cache, again.seqlens = &seqlens, again.out = &out, again.lse = &lse;
    again.causal = 0;
    if (args->block_table) {
        table = *args->block_table;
        table.data = element_at(args->block_table, r * max_pages), table.shape = table_shape;
        again.block_table = &table;
    }
    if (args->attn_sink) {
        sink = *args->attn_sink;
        sink.data = element_at(args->attn_sink, h), sink.shape = one;
        again.attn_sink = &sink;
    }
    if (!ask_oracle(&again, fault)) return false;
    for (int64_t i = 0; i < d_v; i++)
        compare_add(&result->out, &tolerance_dense_decode_out,
                    element_load(args->out->data, out.dtype, row * d_v + i),
                    element_load(out_row, out.dtype, i));
    compare_add(&result->lse, &tolerance_decode_lse, element_load(args->lse->data, lse.dtype, lse_row),
                lse_value);
    result->rows++;
    return true;
}

/* The first row, the last, and others at random until there are enough or the time is spent. */
static bool check_sample(const fmla_dense_decode_args *args, struct check_result *result, struct fault *fault)
{
    const int64_t s_q = args->q->shape[1], h_q = args->q->shape[2];
    struct random_state random = {2025};
    struct progress progress;
    int64_t spent = 0;
    bool good = true;
    float *out_row = malloc((size_t)args->out->shape[3] * sizeof *out_row);
    if (!out_row) return fault_set(fault, "no memory for the oracle's result");
    progress_begin(&progress, "comparing with the oracle");
    for (int i = 0; good && i < SAMPLED_ROWS && (i < 2 || spent < BUDGET); i++) {
        const int64_t row = i == 0   ? 0
                            : i == 1 ? result->all_rows - 1
                                     : random_between(&random, 0, result->all_rows - 1);
        const int64_t r = row / (s_q * h_q), j = row / h_q % s_q;
        spent += call_visible(args, r, j) * check_row_cost(args);
        good = check_row(args, r, j, row % h_q, out_row, result, fault);
        progress_update(&progress, i, SAMPLED_ROWS);
    }
    progress_wipe(&progress);
    free(out_row);
    return good;
}

bool check_against_oracle(const fmla_dense_decode_args *args, struct check_result *result,
                          struct fault *fault)
{
    const int64_t b = args->q->shape[0], s_q = args->q->shape[1], h_q = args->q->shape[2];
    double products = 0.0; /* may be more than 64 bits count */
    for (int64_t r = 0; r < b; r++)
        for (int64_t j = 0; j < s_q; j++)
            products += (double)call_visible(args, r, j) * (double)(check_row_cost(args) * h_q);
    *result = (struct check_result){.all_rows = b * s_q * h_q};
    const bool whole = products <= (double)BUDGET;
    if (!(whole ? check_whole(args, result, fault) : check_sample(args, result, fault))) return false;
    result->passed = compare_passed(&result->out, &tolerance_dense_decode_out) &&
                     compare_passed(&result->lse, &tolerance_decode_lse);
    return true;
}
