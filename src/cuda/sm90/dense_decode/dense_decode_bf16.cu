/* SPDX-License-Identifier: MIT */
#include "dense_decode.cuh"

#include "../../variants.h"

#define VARIANT(variant, d_qk, shared_keys, join_in_kernel)                                                  \
    DENSE_DECODE_KERNEL(sm90_dense_decode_bf16_##variant, Bf16, d_qk, shared_keys, join_in_kernel)
SM90_DENSE_DECODE_VARIANTS(VARIANT)
