/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill over FP8 pages: sparse decode's kernel, whose blocks of threads stay and take tokens in turns, with the largest
 * scores.
 */
#include "../sparse_decode/sparse_decode.cuh"

#define SPARSE_PREFILL_FP8_KERNEL(NAME, FORMAT)                                                              \
    DEFINE_KERNEL(NAME, sparse_prefill_fp8_params, (THREADS, 1), sparse_decode<PrefillFormat<FORMAT>>(p.call))

SPARSE_PREFILL_FP8_KERNEL(sm90_sparse_prefill_fp8_656, KV_FP8_656)
SPARSE_PREFILL_FP8_KERNEL(sm90_sparse_prefill_fp8_584, KV_FP8_584)
