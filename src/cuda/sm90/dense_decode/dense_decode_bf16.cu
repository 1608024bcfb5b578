/* SPDX-License-Identifier: MIT */
#include "dense_decode.cuh"

/* Element, d_qk, whether several tiles of rows read the same keys. */
DENSE_DECODE_KERNEL(sm90_dense_decode_bf16_576, Bf16, 576, false)
DENSE_DECODE_KERNEL(sm90_dense_decode_bf16_576_shared, Bf16, 576, true)
DENSE_DECODE_KERNEL(sm90_dense_decode_bf16_512, Bf16, 512, false)
DENSE_DECODE_KERNEL(sm90_dense_decode_bf16_512_shared, Bf16, 512, true)
