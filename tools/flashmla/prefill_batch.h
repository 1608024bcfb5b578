/* SPDX-License-Identifier: MIT
 *
 * A prompt of sparse prefill made in memory: keys drawn for every token, ready to call.
 */
#ifndef FLASHMLA_TOOL_PREFILL_BATCH_H
#define FLASHMLA_TOOL_PREFILL_BATCH_H

#include "sparse_batch.h"

#include "flashmla/flashmla.h"

/* Of the inputs that docs/semantics.md ("Tolerances") names. */
#define PREFILL_SCALE 0.5f

struct prefill_shape {
    int64_t s_q, s_kv, topk, h_q, d_qk;
    int64_t h_kv;      /* 1 with pages */
    int64_t page_size; /* 0: kv has no pages, which is for FMLA_KV_BF16 alone */
    int32_t format;    /* FMLA_KV_BF16, FMLA_KV_FP8_656, FMLA_KV_FP8_584 */
    bool sink;
    bool holes;  /* one index in eight names no key */
    bool varlen; /* topk_length between 0 and topk; else none is given */
    uint64_t seed;
};

struct prefill_batch {
    int64_t q_shape[3], kv_shape[4], indices_shape[3], out_shape[3], row_shape[2], s_q[1], h_q[1];
    fmla_tensor q, kv, indices, length, sink, out, max_logits, lse;
    fmla_sparse_prefill_args args; /* without workspace */
};

/* Bytes of the tensors, to within the rounding of pages. */
double prefill_batch_bytes(const struct prefill_shape *shape);

/* Values N(m, 0.1²), clamped to [-1, 1], m of q and of kv drawn in [-0.05, 0.05]; softmax_scale is PREFILL_SCALE. */
bool prefill_batch_make(struct prefill_batch *batch, const struct prefill_shape *shape, struct fault *fault);

/* Also frees args.workspace. */
void prefill_batch_free(struct prefill_batch *batch);

/* ---- A call (of any tensors in host memory, without gaps) ------------------------------------ */

/* As call_workspace. */
fmla_status prefill_call_workspace(fmla_sparse_prefill_args *args);

/* Tokens that kv has room for. */
int64_t prefill_keys(const fmla_tensor *kv);

/* How many entries of a token's lists count. */
int64_t prefill_count(const fmla_sparse_prefill_args *args, int64_t token);

struct prefill_work {
    double keys; /* that tokens name, each once a token and key head */
    double flop;
    double bytes; /* of Q, the lists, all of kv that so many names can reach, and the results; each once */
};

struct prefill_work prefill_work(const fmla_sparse_prefill_args *args);

#endif
