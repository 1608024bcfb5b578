/* SPDX-License-Identifier: MIT */
#include "../device/join.cuh"

JOIN_KERNELS(join_splits_bf16, Bf16, PartsOfLane)
JOIN_KERNELS(join_splits_fp16, Fp16, PartsOfLane)
