/* SPDX-License-Identifier: MIT
 *
 * The results of dense MHA's padding, behind the tokens or keys in use of each request: vectors of zeros, and the lse of
 * rows without keys. A request has `slices` CTAs; their warps take vectors in turn.
 */
#include "../device/kernel.cuh"
#include "../device/used.cuh"

#include "../params.h"

#include <stdint.h>

/* Returns the first token, or key, of a ragged request: the largest start up to its own. All threads call. */
DEVICE int begin_of(const mha_padding_params &p, int request)
{
    __shared__ int begin;
    int most = 0;
    for (int i = (int)threadIdx.x; i <= request; i += (int)blockDim.x) most = max(most, p.starts[i]);
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x == 0) begin = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicMax(&begin, most);
    __syncthreads();
    return min(begin, p.tokens);
}

DEVICE void clear_vector(uint16_t *to, int width, bool aligned)
{
    const int lane = (int)threadIdx.x % 32;
    if (aligned)
        for (int d = 8 * lane; d < width; d += 8 * 32) *(uint4 *)(to + d) = make_uint4(0, 0, 0, 0);
    else
        for (int d = lane; d < width; d += 32) to[d] = 0;
}

DEVICE void write_padding(const mha_padding_params &p)
{
    const int request = (int)blockIdx.x / p.slices, slice = (int)blockIdx.x - request * p.slices;
    int begin = 0, extent = p.extent;
    if (p.starts) {
        begin = begin_of(p, request);
        extent = min(max(p.starts[request + 1], begin), p.tokens) - begin;
    }
    const int used = length_in_use(p.used, request, extent), number = p.starts ? 0 : request;
    const int64_t vectors = (int64_t)(extent - used) * p.heads;
    for (int64_t i = slice * MHA_WARPS + (int)threadIdx.x / 32; i < vectors; i += p.slices * MHA_WARPS) {
        const int64_t token = begin + used + i / p.heads, head = i % p.heads;
        for (int of = 0; of < MHA_PADDED; of++) {
            const mha_vectors &to = p.to[of];
            if (to.data)
                clear_vector(to.data + number * to.request + token * to.token + head * to.head, p.width[of],
                             p.aligned);
        }
        if (p.lse && threadIdx.x % 32 == 0)
            p.lse[number * p.lse_stride[0] + head * p.lse_stride[1] + token] = p.lse_of_empty;
    }
}

DEFINE_KERNEL(mha_padding, mha_padding_params, (32 * MHA_WARPS, 2), write_padding(p))
