/* SPDX-License-Identifier: MIT */
#include "join_pieces.cuh"

extern "C" __global__ void __launch_bounds__(32 * PREFILL_JOIN_WARPS)
    sm90_sparse_prefill_join(const __grid_constant__ struct sparse_prefill_sm90_params p)
{
    join_pieces(p);
}
