/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill over FP8 pages: the kernel of sparse decode, which also returns the largest scores. Its CTAs
 * are persistent and take token after token; with few tokens each CTA takes a split of a token's list.
 */
#include "../sparse_decode/mainloop.cuh"

using namespace sparse_decode;

/* Two kernels a format: PrefillFormat takes whole lists, PrefillPartFormat splits of them. */
DEFINE_KERNEL(sm90_sparse_prefill_fp8_656, sparse_prefill_fp8_params, (THREADS, 1),
              kernel<PrefillFormat<Fp8_656>>(p.decode.call))
DEFINE_KERNEL(sm90_sparse_prefill_fp8_656_together, sparse_prefill_fp8_params, (THREADS, 1),
              kernel<PrefillPartFormat<Fp8_656>>(p.decode.call))
DEFINE_KERNEL(sm90_sparse_prefill_fp8_584, sparse_prefill_fp8_params, (THREADS, 1),
              kernel<PrefillFormat<Fp8_584>>(p.decode.call))
DEFINE_KERNEL(sm90_sparse_prefill_fp8_584_together, sparse_prefill_fp8_params, (THREADS, 1),
              kernel<PrefillPartFormat<Fp8_584>>(p.decode.call))
