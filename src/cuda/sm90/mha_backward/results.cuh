/* SPDX-License-Identifier: MIT
 *
 * What consumers write: dK and dV of an item, and what it adds to dQ.
 *
 * Sums of dQ, fp32, stand in the order in which threads hold them, so that a warp adds 512 bytes in a row: of each consumer's part of a
 * tile, the four values that every thread has of eight columns. rows.cuh brings them in the order of dq.
 */
#pragma once

#include "layout.cuh"

/* Adds four floats. */
DEVICE void add_global_16(float *to, float a, float b, float c, float d)
{
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b),
                 "f"(c), "f"(d)
                 : "memory");
}

template <typename Layout, int N>
DEVICE void add_queries(const mha_backward_sm90_params &p, int group, int64_t head_and_tile,
                        const float (&dq)[N])
{
    float *to = p.dq_sums + head_and_tile * Layout::DQ_TILE + group * Layout::DQ_OF_CONSUMER +
                (int)fresh_thread() % WARPGROUP_THREADS * 4;
#pragma unroll
    for (int i = 0; i < N; i += 4)
        add_global_16(to + i * WARPGROUP_THREADS, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
}

/* 64 rows of a consumer, times `factor`, by 16 bytes. `rows`: those that are the request's. */
template <typename Element, int N>
DEVICE void write_keys(uint16_t *to, int64_t stride, int rows, float factor, const float (&d)[N])
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
