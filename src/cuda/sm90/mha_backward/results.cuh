/* SPDX-License-Identifier: MIT
 *
 * What consumers write: dK and dV of an item, and what it adds to dQ.
 *
 * Sums of dQ, fp32, stand in the order in which threads hold them, so that a warp adds 512 bytes in a row: of each consumer's part of a
 * tile, the four values that every thread has of eight columns. rows.cuh brings them in the order of dq.
 */
#pragma once

#include "layout.cuh"

/* Adds floats from shared memory; it counts towards the thread's next group. */
DEVICE void bulk_add(float *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}

/* One thread adds what a consumer hands over. Deterministic: a counter a tile and consumer says how many blocks of keys have. */
template <typename Layout>
DEVICE void add_queries(const mha_backward_sm90_params &p, const Layout &l, int consumer)
{
    for (uint32_t n = 0;; n++) {
        mbarrier_wait(l.barrier(Layout::DQ_FULL, consumer), n % 2);
        fence_async_shared();
        const int at = (int)load_shared_4(l.where(consumer));
        if (at >= 0) {
            uint32_t *const counter = p.turns + (int64_t)at * Layout::CONSUMERS + consumer;
            const uint32_t turn = load_shared_4(l.where(consumer) + 4);
            if (p.turns) {
                uint32_t now;
                do {
                    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
                } while (now != turn);
            }
            bulk_add(p.dq_sums + (int64_t)at * Layout::DQ_TILE + consumer * Layout::DQ_OF_CONSUMER,
                     l.dq(consumer), Layout::DQ_BYTES);
            bulk_commit();
            bulk_wait_read<0>();
            if (p.turns) {
                asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
                asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(counter), "r"(turn + 1) : "memory");
            }
        }
        mbarrier_arrive(l.barrier(Layout::DQ_EMPTY, consumer));
        if (at < 0) break;
    }
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
