/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill over FP8 pages: sparse decode's kernel, with the largest scores. Its blocks of threads stay and take tokens in turns,
 * or, of few tokens, each has a part of a token's list.
 */
#include "sparse_prefill_fp8.cuh"

SPARSE_PREFILL_FP8_KERNELS(sm90_sparse_prefill_fp8_656, Fp8_656)
SPARSE_PREFILL_FP8_KERNELS(sm90_sparse_prefill_fp8_584, Fp8_584)
