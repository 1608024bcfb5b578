/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill over pages of the formats with 512 columns and no rope values.
 */
#include "../sparse_decode/mainloop.cuh"

using namespace sparse_decode;

/* Two kernels a format: PrefillFormat takes whole lists, PrefillPartFormat splits of them. */
DEFINE_KERNEL(sm90_sparse_prefill_fp8_528, sparse_prefill_fp8_params, (THREADS, 1),
              kernel<PrefillFormat<Fp8_528>>(p.decode.call))
DEFINE_KERNEL(sm90_sparse_prefill_fp8_528_together, sparse_prefill_fp8_params, (THREADS, 1),
              kernel<PrefillPartFormat<Fp8_528>>(p.decode.call))
DEFINE_KERNEL(sm90_sparse_prefill_fp8_528_f32, sparse_prefill_fp8_params, (THREADS, 1),
              kernel<PrefillFormat<Fp8_528_F32>>(p.decode.call))
DEFINE_KERNEL(sm90_sparse_prefill_fp8_528_f32_together, sparse_prefill_fp8_params, (THREADS, 1),
              kernel<PrefillPartFormat<Fp8_528_F32>>(p.decode.call))
DEFINE_KERNEL(sm90_sparse_prefill_fp4_288, sparse_prefill_fp8_params, (THREADS, 1),
              kernel<PrefillFormat<Fp4_288>>(p.decode.call))
DEFINE_KERNEL(sm90_sparse_prefill_fp4_288_together, sparse_prefill_fp8_params, (THREADS, 1),
              kernel<PrefillPartFormat<Fp4_288>>(p.decode.call))
