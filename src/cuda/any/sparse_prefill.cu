/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill without tensor cores, for every format, any alignment and any GPU; not fast. A CTA takes
 * SPARSE_WARPS heads of a token. A warp takes one head through all keys of the token (sparse_row.cuh) and
 * writes its output: nothing is split, and there is no workspace.
 */
#include "sparse_row.cuh"

template <bool BYTES> DEVICE void sparse_prefill(const struct sparse_prefill_params &p)
{
    const int token = fast_divide((int)blockIdx.x, p.tiles_divisor);
    const unsigned tile = blockIdx.x - (unsigned)token * (unsigned)p.tiles;
    const unsigned head = tile * SPARSE_WARPS + threadIdx.x / 32;
    if (head >= (unsigned)p.h_q) return; /* the whole warp */
    const int count = topk_count(p.topk, p.topk_length, token);
    const int32_t *indices = p.kv.indices + token * p.kv.indices_stride[0];
    SparseRow<BYTES, Bf16> row(p.d_qk, p.scale_log2);
    row.begin(p.q + token * p.q_stride[0] + head * p.q_stride[1]);
    row.add_keys(0, count, [&](int at) { return row_key(p.kv, __ldg(indices + at)); });

    const float lse = row.lse(), factor = row.factor(result_sink_factor(p.rules, head, lse));
    uint16_t *out = p.out + token * p.out_stride[0] + head * p.out_stride[1];
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int e = 0; e < OF_LANE; e += 2)
            store_pair<Bf16>(out + column_of(g) + e, p.pairs_aligned, row.value(g, e, factor),
                             row.value(g, e + 1, factor));
    if (lane_of_warp()) return;
    if (p.max_logits) p.max_logits[token * p.max_stride + head] = row.most * LN_2 * p.rules.lse_factor;
    if (p.lse) p.lse[token * p.lse_stride + head] = result_lse(p.rules, lse);
}

/* From compute capability 10.0 on ptxas limits itself to 64 registers, and spills, unless its bounds name one CTA;
 * 0: they name none. */
#if __CUDA_ARCH__ >= 1000
enum { CTAS_OF_SM = 1 };
#else
enum { CTAS_OF_SM = 0 };
#endif

#define SPARSE_PREFILL_KERNEL(NAME, BYTES)                                                                   \
    DEFINE_KERNEL(NAME, sparse_prefill_params, (32 * SPARSE_WARPS, CTAS_OF_SM), sparse_prefill<BYTES>(p))

SPARSE_PREFILL_KERNEL(sparse_prefill_bf16, false)
SPARSE_PREFILL_KERNEL(sparse_prefill_bytes, true)
