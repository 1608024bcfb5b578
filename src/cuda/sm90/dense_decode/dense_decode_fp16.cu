/* SPDX-License-Identifier: MIT */
#include "dense_decode.cuh"

/* Element, d_qk, whether several tiles of rows read the same keys. */
DENSE_DECODE_KERNEL(sm90_dense_decode_fp16_576, Fp16, 576, false)
DENSE_DECODE_KERNEL(sm90_dense_decode_fp16_576_shared, Fp16, 576, true)
DENSE_DECODE_KERNEL(sm90_dense_decode_fp16_512, Fp16, 512, false)
DENSE_DECODE_KERNEL(sm90_dense_decode_fp16_512_shared, Fp16, 512, true)
