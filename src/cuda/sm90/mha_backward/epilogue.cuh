/* SPDX-License-Identifier: MIT
 *
 * Epilogue: writes sums that a warpgroup holds: dK and dV of a work tile, dq of a tile.
 */
#pragma once

#include "layout.cuh"

#include "../../device/backward_rows.cuh"
#include "../../device/quad.cuh"
#include "../../device/result.cuh"

namespace mha_backward {

/* Writes 64 rows of a consumer times `factor`, 16 bytes per store. `rows`: those that belong to the
 * request. */
template <typename Element, int N>
DEVICE void store_rows(uint16_t *to, int64_t stride, int rows, float factor, const float (&d)[N])
{
    const int thread = (int)fresh_thread() % WARPGROUP_THREADS, row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < N; i += 16) { /* 32 columns */
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                words[j] =
                    Element::pack(d[i + 4 * j + 2 * half] * factor, d[i + 4 * j + 2 * half + 1] * factor);
            const uint4 eight = quad_gather_eight(words);
            store_global_16(to + (row + 8 * half) * stride + i * 2 + thread % 4 * 8, eight,
                            row + 8 * half < rows);
        }
}

/* Write dK or dV of 64 keys, from key `first` of the work tile on. */
template <typename Element, int D_QK>
DEVICE void store_dk(const mha_backward_params &call, const WorkKeys &work, int first, const float (&dk)[D_QK])
{
    const int64_t key = (int64_t)(uint32_t)work.key + first; /* of an unsigned word, for shorter code */
    store_rows<Element>(call.dk.data + work.request * call.dk.request + key * call.dk.token +
                            work.head * call.dk.head,
                        call.dk.token, work.keys - first, call.scale * DS_UNSCALE<Element>, dk);
}

template <typename Element, int D_V>
DEVICE void store_dv(const mha_backward_params &call, const WorkKeys &work, int first, const float (&dv)[D_V])
{
    const int64_t key = (int64_t)(uint32_t)work.key + first;
    store_rows<Element>(call.dv.data + work.request * call.dv.request + key * call.dv.token +
                            work.head * call.dv.head,
                        call.dv.token, work.keys - first, 1.0f / P_SCALE, dv);
}

} // namespace mha_backward
