/* SPDX-License-Identifier: MIT */
#include "dense_decode.cuh"

/* Arguments: element, d_qk, whether several tiles of rows read the same keys, whether CTAs join their
 * results themselves. */
DENSE_DECODE_KERNEL(sm90_dense_decode_fp16_576, Fp16, 576, false, false)
DENSE_DECODE_KERNEL(sm90_dense_decode_fp16_576_shared, Fp16, 576, true, false)
DENSE_DECODE_KERNEL(sm90_dense_decode_fp16_512, Fp16, 512, false, false)
DENSE_DECODE_KERNEL(sm90_dense_decode_fp16_512_shared, Fp16, 512, true, false)
DENSE_DECODE_KERNEL(sm90_dense_decode_fp16_576_together, Fp16, 576, false, true)
DENSE_DECODE_KERNEL(sm90_dense_decode_fp16_576_shared_together, Fp16, 576, true, true)
DENSE_DECODE_KERNEL(sm90_dense_decode_fp16_512_together, Fp16, 512, false, true)
DENSE_DECODE_KERNEL(sm90_dense_decode_fp16_512_shared_together, Fp16, 512, true, true)
