/* SPDX-License-Identifier: MIT
 *
 * The rows of a query token depend on its queries, its lists and nothing else. So the oracle can be asked for single tokens,
 * by views.
 */
#include "sparse_check.h"

#include "sparse_batch.h"

#include "elements.h"
#include "progress.h"
#include "random.h"

#include <stdlib.h>

/* The oracle takes about 2 ns a product; this is a few seconds at most. */
#define BUDGET 1e9

enum { SAMPLED_ROWS = 64 };

static void *element_at(const fmla_tensor *tensor, int64_t index)
{
    return (char *)tensor->data + index * (tensor->dtype.bits / 8);
}

/* A list of one token. */
struct list {
    fmla_tensor indices, length;
    int64_t shape[3], one[1];
    int32_t count;
};

static void make_list(struct list *list, const fmla_tensor *indices, const fmla_tensor *length, int64_t token,
                      int64_t s_q)
{
    const int64_t topk = indices->shape[2];
    list->indices = *indices, list->indices.data = element_at(indices, token * topk);
    list->shape[0] = list->shape[1] = list->one[0] = 1, list->shape[2] = topk;
    list->indices.shape = list->shape;
    list->count = (int32_t)sparse_count(indices, length, token / s_q);
    list->length = (fmla_tensor){&list->count, indices->device, 1, indices->dtype, list->one, NULL, 0};
}

static bool ask_oracle(fmla_sparse_decode_args *args, struct fault *fault)
{
    args->kernel = "ref", args->plan = NULL, args->plan_size = 0;
    args->partitions = args->num_splits = NULL;
    if (sparse_call_workspace(args) != FMLA_OK) return fault_set(fault, "oracle: %s", fmla_last_error());
    if (!args->workspace)
        return fault_set(fault, "no memory for %zu bytes of the oracle's workspace", args->workspace_size);
    const fmla_status status = fmla_sparse_decode(args);
    free(args->workspace);
    return status == FMLA_OK || fault_set(fault, "oracle: %s", fmla_last_error());
}

/* All heads of a token; out and lse have room for them. */
static bool check_token(const fmla_sparse_decode_args *args, int64_t token, void *out_memory,
                        float *lse_memory, struct check_result *result, struct fault *fault)
{
    const int64_t s_q = args->q->shape[1], h_q = args->q->shape[2], d_qk = args->q->shape[3];
    const int64_t d_v = args->out->shape[3];
    const int64_t q_shape[] = {1, 1, h_q, d_qk}, out_shape[] = {1, 1, h_q, d_v}, lse_shape[] = {1, h_q, 1};
    fmla_sparse_decode_args again = *args;
    fmla_tensor q = *args->q, out = *args->out, lse = *args->lse;
    struct list lists[SPARSE_CACHES];
    q.data = element_at(args->q, token * h_q * d_qk), q.shape = q_shape;
    out.data = out_memory, out.shape = out_shape, lse.data = lse_memory, lse.shape = lse_shape;
    make_list(&lists[0], args->indices, args->topk_length, token, s_q);
    again.q = &q, again.out = &out, again.lse = &lse;
    again.indices = &lists[0].indices, again.topk_length = &lists[0].length;
    if (args->extra_indices) {
        make_list(&lists[1], args->extra_indices, args->extra_topk_length, token, s_q);
        again.extra_indices = &lists[1].indices, again.extra_topk_length = &lists[1].length;
    }
    if (!ask_oracle(&again, fault)) return false;
    for (int64_t i = 0; i < h_q * d_v; i++)
        compare_add(&result->out, &tolerance_sparse_decode_out,
                    element_load(args->out->data, out.dtype, token * h_q * d_v + i),
                    element_load(out_memory, out.dtype, i));
    for (int64_t h = 0; h < h_q; h++)
        compare_add(&result->lse, &tolerance_decode_lse,
                    element_load(args->lse->data, lse.dtype, (token / s_q * h_q + h) * s_q + token % s_q),
                    lse_memory[h]);
    result->rows += h_q;
    return true;
}

bool sparse_check_against_oracle(const fmla_sparse_decode_args *args, struct check_result *result,
                                 struct fault *fault)
{
    const int64_t tokens = args->q->shape[0] * args->q->shape[1], h_q = args->q->shape[2];
    const double products = 0.5 * sparse_work(args).flop; /* multiplications */
    const bool whole = products <= BUDGET;
    struct random_state random = {2025};
    struct progress progress;
    *result = (struct check_result){.all_rows = tokens * h_q};
    void *out = malloc((size_t)(h_q * args->out->shape[3]) * 2 + 1);
    float *lse = malloc((size_t)h_q * sizeof *lse + 1);
    bool good = true;
    if (!out || !lse) {
        free(out), free(lse);
        return fault_set(fault, "no memory for the oracle's result");
    }
    progress_begin(&progress, "comparing with the oracle");
    for (int64_t i = 0; good && i < tokens && (whole || i < 2 || result->rows < SAMPLED_ROWS); i++) {
        const int64_t token = whole || !i ? i : i == 1 ? tokens - 1 : random_between(&random, 0, tokens - 1);
        good = check_token(args, token, out, lse, result, fault);
        progress_update(&progress, i, whole ? tokens : SAMPLED_ROWS);
    }
    progress_wipe(&progress);
    free(out), free(lse);
    result->passed = good && compare_passed(&result->out, &tolerance_sparse_decode_out) &&
                     compare_passed(&result->lse, &tolerance_decode_lse);
    return good;
}
