/* SPDX-License-Identifier: MIT */
#include "../device/join.cuh"

JOIN_KERNEL(join_splits_bf16, Bf16, PartsOfLane, 4)
JOIN_KERNEL(join_splits_bf16_halves, Bf16, PartsOfLane, 2)
JOIN_KERNEL(join_splits_bf16_quarters, Bf16, PartsOfLane, 1)
JOIN_KERNEL(join_splits_fp16, Fp16, PartsOfLane, 4)
JOIN_KERNEL(join_splits_fp16_halves, Fp16, PartsOfLane, 2)
JOIN_KERNEL(join_splits_fp16_quarters, Fp16, PartsOfLane, 1)
