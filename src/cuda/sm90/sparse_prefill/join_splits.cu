/* SPDX-License-Identifier: MIT */
#include "join_splits.cuh"

DEFINE_KERNEL(sm90_sparse_prefill_join, sparse_prefill_sm90_params, (32 * PREFILL_JOIN_WARPS),
              sparse_prefill::join_splits(p))
