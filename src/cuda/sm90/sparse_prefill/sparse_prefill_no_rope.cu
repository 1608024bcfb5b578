/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill over pages of the formats with 512 columns and no rope values.
 */
#include "../sparse_decode/mainloop.cuh"

SPARSE_PREFILL_BYTES_KERNELS(sm90_sparse_prefill_fp8_528, Fp8_528)
SPARSE_PREFILL_BYTES_KERNELS(sm90_sparse_prefill_fp8_528_f32, Fp8_528_F32)
SPARSE_PREFILL_BYTES_KERNELS(sm90_sparse_prefill_fp4_288, Fp4_288)
