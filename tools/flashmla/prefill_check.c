/* SPDX-License-Identifier: MIT
 *
 * The rows of a token depend on its queries, its lists and nothing else. So the oracle can be asked for single tokens, by
 * views.
 */
#include "prefill_check.h"

#include "prefill_batch.h"

#include "elements.h"
#include "progress.h"
#include "random.h"

#include <stdlib.h>

/* The oracle takes about 2 ns a product; this is a few seconds at most. */
#define BUDGET 1e9

enum { SAMPLED_ROWS = 64 };

/* Room for a token's results. */
struct room {
    void *out;
    float *max_logits, *lse;
};

static void *element_at(const fmla_tensor *tensor, int64_t index)
{
    return (char *)tensor->data + index * (tensor->dtype.bits / 8);
}

static bool ask_oracle(fmla_sparse_prefill_args *args, struct fault *fault)
{
    args->kernel = "ref";
    if (prefill_call_workspace(args) != FMLA_OK) return fault_set(fault, "oracle: %s", fmla_last_error());
    if (!args->workspace)
        return fault_set(fault, "no memory for %zu bytes of the oracle's workspace", args->workspace_size);
    const fmla_status status = fmla_sparse_prefill(args);
    free(args->workspace);
    return status == FMLA_OK || fault_set(fault, "oracle: %s", fmla_last_error());
}

/* All heads of a token. */
static bool check_token(const fmla_sparse_prefill_args *args, int64_t token, const struct room *room,
                        struct check_result *result, struct fault *fault)
{
    const int64_t h_q = args->q->shape[1], d_qk = args->q->shape[2], d_v = args->out->shape[2];
    const int64_t h_kv = args->indices->shape[1], topk = args->indices->shape[2];
    const int64_t q_shape[] = {1, h_q, d_qk}, out_shape[] = {1, h_q, d_v}, row_shape[] = {1, h_q};
    const int64_t list_shape[] = {1, h_kv, topk}, one[] = {1};
    int32_t count = (int32_t)prefill_count(args, token);
    fmla_sparse_prefill_args again = *args;
    fmla_tensor q = *args->q, indices = *args->indices, out = *args->out, max_logits = *args->max_logits,
                lse = *args->lse;
    fmla_tensor length = {&count, indices.device, 1, indices.dtype, one, NULL, 0};
    q.data = element_at(args->q, token * h_q * d_qk), q.shape = q_shape;
    indices.data = element_at(args->indices, token * h_kv * topk), indices.shape = list_shape;
    out.data = room->out, out.shape = out_shape;
    max_logits.data = room->max_logits, lse.data = room->lse, max_logits.shape = lse.shape = row_shape;
    again.q = &q, again.indices = &indices, again.topk_length = &length;
    again.out = &out, again.max_logits = &max_logits, again.lse = &lse;
    if (!ask_oracle(&again, fault)) return false;
    for (int64_t i = 0; i < h_q * d_v; i++)
        compare_add(&result->out, &tolerance_sparse_prefill_out,
                    element_load(args->out->data, out.dtype, token * h_q * d_v + i),
                    element_load(room->out, out.dtype, i));
    for (int64_t h = 0; h < h_q; h++) {
        compare_add(&result->max_logits, &tolerance_prefill_lse,
                    element_load(args->max_logits->data, lse.dtype, token * h_q + h), room->max_logits[h]);
        compare_add(&result->lse, &tolerance_prefill_lse,
                    element_load(args->lse->data, lse.dtype, token * h_q + h), room->lse[h]);
    }
    result->rows += h_q;
    return true;
}

bool prefill_check_against_oracle(const fmla_sparse_prefill_args *args, struct check_result *result,
                                  struct fault *fault)
{
    const int64_t tokens = args->q->shape[0], h_q = args->q->shape[1];
    const double products = 0.5 * prefill_work(args).flop; /* multiplications */
    const bool whole = products <= BUDGET;
    struct random_state random = {2025};
    struct progress progress;
    *result = (struct check_result){.all_rows = tokens * h_q};
    const struct room room = {malloc((size_t)(h_q * args->out->shape[2]) * 2 + 1),
                              malloc((size_t)h_q * sizeof(float) + 1),
                              malloc((size_t)h_q * sizeof(float) + 1)};
    bool good = true;
    if (!room.out || !room.max_logits || !room.lse) {
        free(room.out), free(room.max_logits), free(room.lse);
        return fault_set(fault, "no memory for the oracle's result");
    }
    progress_begin(&progress, "comparing with the oracle");
    for (int64_t i = 0; good && i < tokens && (whole || i < 2 || result->rows < SAMPLED_ROWS); i++) {
        const int64_t token = whole || !i ? i : i == 1 ? tokens - 1 : random_between(&random, 0, tokens - 1);
        good = check_token(args, token, &room, result, fault);
        progress_update(&progress, i, whole ? tokens : SAMPLED_ROWS);
    }
    progress_wipe(&progress);
    free(room.out), free(room.max_logits), free(room.lse);
    result->passed = good && compare_passed(&result->out, &tolerance_sparse_prefill_out) &&
                     compare_passed(&result->max_logits, &tolerance_prefill_lse) &&
                     compare_passed(&result->lse, &tolerance_prefill_lse);
    return good;
}
