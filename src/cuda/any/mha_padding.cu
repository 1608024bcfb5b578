/* SPDX-License-Identifier: MIT
 *
 * The results of dense MHA's padding, behind the tokens or keys in use of each request: vectors of zeros, and the lse of
 * rows without keys. Some requests have `slices` CTAs; their warps take vectors in turn.
 */
#include "../device/kernel.cuh"
#include "../device/used.cuh"

#include "../params.h"

#include <stdint.h>

/* Returns the largest of the starts up to a ragged request's own. All threads call. */
DEVICE int start_of(const mha_padding_params &p, int request)
{
    __shared__ int begin;
    int most = 0;
    for (int i = (int)threadIdx.x; i <= request; i += (int)blockDim.x) most = max(most, p.starts[i]);
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x == 0) begin = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicMax(&begin, most);
    __syncthreads();
    return begin;
}

DEVICE void clear_vector(uint16_t *to, int width, bool aligned)
{
    const int lane = (int)threadIdx.x % 32;
    if (aligned)
        for (int d = 8 * lane; d < width; d += 8 * 32) *(uint4 *)(to + d) = make_uint4(0, 0, 0, 0);
    else
        for (int d = lane; d < width; d += 32) to[d] = 0;
}

/* Writes the padding of a request whose tokens, or keys, are `extent` from `begin` on. */
DEVICE void write_padding_of(const mha_padding_params &p, int request, int slice, int begin, int extent)
{
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

/* A CTA takes `requests` consecutive requests, so that the starts before them are read once for all of these. */
DEVICE void write_padding(const mha_padding_params &p)
{
    const int group = (int)blockIdx.x / p.slices, slice = (int)blockIdx.x - group * p.slices;
    const int first = group * p.requests, last = min(first + p.requests, p.b);
    int start = p.starts ? start_of(p, first) : 0;
    for (int request = first; request < last; request++) {
        int begin = 0, extent = p.extent;
        if (p.starts) {
            const int end = max(p.starts[request + 1], start);
            begin = min(start, p.tokens), extent = min(end, p.tokens) - begin;
            start = end;
        }
        write_padding_of(p, request, slice, begin, extent);
    }
}

DEFINE_KERNEL(mha_padding, mha_padding_params, (32 * MHA_WARPS, 2), write_padding(p))
