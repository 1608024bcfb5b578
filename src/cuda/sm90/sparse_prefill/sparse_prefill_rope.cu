/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill over FP8 pages: the kernel of sparse decode, which also returns the largest scores. Its CTAs
 * are persistent and take token after token; with few tokens each CTA takes a split of a token's list.
 */
#include "../sparse_decode/mainloop.cuh"

SPARSE_PREFILL_BYTES_KERNELS(sm90_sparse_prefill_fp8_656, Fp8_656)
SPARSE_PREFILL_BYTES_KERNELS(sm90_sparse_prefill_fp8_584, Fp8_584)
