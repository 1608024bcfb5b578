/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill over FP8 pages: sparse decode's kernel, with the largest scores. Its blocks of threads stay and take tokens in turns,
 * or, of few tokens, each has a part of a token's list.
 */
#include "../sparse_decode/sparse_decode.cuh"

#define SPARSE_PREFILL_FP8_KERNEL(NAME, FORMAT)                                                              \
    DEFINE_KERNEL(NAME, sparse_prefill_fp8_params, (THREADS, 1), sparse_decode<FORMAT>(p.decode.call))

SPARSE_PREFILL_FP8_KERNEL(sm90_sparse_prefill_fp8_656, PrefillFormat<KV_FP8_656>)
SPARSE_PREFILL_FP8_KERNEL(sm90_sparse_prefill_fp8_584, PrefillFormat<KV_FP8_584>)
SPARSE_PREFILL_FP8_KERNEL(sm90_sparse_prefill_fp8_656_together, PrefillPartFormat<KV_FP8_656>)
SPARSE_PREFILL_FP8_KERNEL(sm90_sparse_prefill_fp8_584_together, PrefillPartFormat<KV_FP8_584>)
