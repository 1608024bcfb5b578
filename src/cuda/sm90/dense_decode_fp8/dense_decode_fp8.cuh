/* SPDX-License-Identifier: MIT
 *
 * Dense decode on Hopper over caches of FP8_576 and FP8_656 (docs/kernels/dense-decode.md, "Over FP8
 * caches"). In mode fp8 e4m3 products compute S, over FP8_656 line by line (ByLines); in mode bf16 keys
 * are converted on their way through registers (ConvertedKeys). P·V is computed in 16 bits, with V converted
 * likewise: in fp16, except for blocks of FP8_656 whose scales do not fit (convert.cuh). e4m3 products
 * of P and V would take the tensor cores half as long, but their sums lose terms below 2^-13 of the largest
 * one, and P in e4m3 has three bits (docs/fp8-accuracy.md).
 *
 *      who                    task                                                               registers
 *      warpgroup 0, producer  one thread issues TMA loads of keys, one of queries                       24
 *      warpgroup 1, scores    S of a block, and softmax, which stores P to one of three stages         120
 *      warpgroups 2, 3        O^T of 256 columns of V each: += V^T P^T, V^T as A in registers          184
 *
 * If keys are the first factor (always except in mode fp8 over FP8_576), softmax has warps of its own:
 *
 *      warpgroup 0, softmax   P of a block, 16 rows a warp (softmax.cuh); below 64 rows a warp    64 to 80
 *                             is the producer
 *      warpgroup 1, scores    S^T of a block, to shared memory (key_scores.cuh)                   80 to 96
 *      warpgroups 2, 3        as above; with 64 rows the last warp that needs a stage requests         176
 *                             its next keys (Mainloop)
 *
 * If a CTA has one split, warpgroups 1 to 3 convert its queries before they take their roles (queries.cuh);
 * else the warpgroup with the scores does so at the beginning of each split.
 *
 * A stage of P also carries the factors that rescale earlier sums if references have moved, and with the last
 * block of a split the final factors of its rows. The warpgroups with the values know nothing else of the
 * scores, which may be up to three blocks ahead, and in the next split while the rows of this one are
 * stored.
 *
 * Shared memory (struct SharedOf), for FP8_576 and 64 rows: four blocks of keys 147456 bytes, Q as codes
 * 36864, P 24576, rows on their way out 18432. Q as values takes 73728, and then there are three blocks of
 * keys. A block of FP8_656 takes 41984 bytes.
 */
#pragma once

#include "key_products.cuh"
#include "key_scores.cuh"
#include "layout.cuh"
#include "mainloop.cuh"
#include "producer.cuh"
#include "queries.cuh"
#include "scores.cuh"
#include "softmax.cuh"

namespace dense_decode_fp8 {

template <typename V> DEVICE void prepare(const struct dense_decode_fp8_params &p, uint32_t smem)
{
    using Shared = SharedOf<V>;
    constexpr int VALUES_WARPS = 2 * WARPGROUP_THREADS / 32;
    tma_prefetch_map(&p.dense.keys), tma_prefetch_map(&p.dense.rope);
    if (p.q_given) tma_prefetch_map(&p.dense.queries), tma_prefetch_map(&p.queries_end);
    for (int i = 0; i < V::KV_STAGES; i++)
        mbarrier_init(barrier_at(SHARED_AT(smem, keys_full), i), 1),
            mbarrier_init(barrier_at(SHARED_AT(smem, keys_empty), i), VALUES_WARPS);
    for (int i = 0; i < V::KV_STAGES && V::SCALED; i++)
        mbarrier_init(barrier_at(SHARED_AT(smem, scales_full), i), WARPGROUP_THREADS / 32);
    for (int i = 0; i < V::KV_STAGES; i++) store_shared_4(SHARED_AT(smem, released) + 4 * (uint32_t)i, 0);
    for (int i = 0; i < V::P_STAGES; i++)
        mbarrier_init(barrier_at(SHARED_AT(smem, p_full), i), V::ROW_WARPS),
            mbarrier_init(barrier_at(SHARED_AT(smem, done), i), V::ROW_WARPS),
            mbarrier_init(barrier_at(SHARED_AT(smem, p_empty), i), VALUES_WARPS);
    mbarrier_init(SHARED_AT(smem, q_full), 1),
        mbarrier_init(SHARED_AT(smem, q_empty), WARPGROUP_THREADS / 32);
    mbarrier_init(SHARED_AT(smem, s_full), WARPGROUP_THREADS / 32),
        mbarrier_init(SHARED_AT(smem, s_empty), V::ROW_WARPS);
    mbarrier_fence_init();
    fence_async_shared();
}

/* Loads the queries of a CTA that has one split; called by the warpgroups that wait for its first keys. */
template <typename V>
DEVICE void load_queries_of_one_split(const struct dense_decode_fp8_params &p, SharedOf<V> &shared,
                                      const CtaCoord &cta, int role)
{
    constexpr int LOADERS = THREADS - WARPGROUP_THREADS;
    const WorkTile work(p.dense, shared.one, cta.kv_head, cta.tile * V::ROWS, V::ROWS);
    const int warp = __shfl_sync(~0u, (int)(threadIdx.x / 32), 0) - WARPGROUP_THREADS / 32;
    load_queries<V>(p, work.task, {warp, LOADERS / 32}, shared_address(&shared), 0);
    if (role == SCORES)
        barrier_sync(QUERIES_BARRIER, LOADERS);
    else
        barrier_arrive(QUERIES_BARRIER, LOADERS);
}

template <typename V> DEVICE void kernel(const struct dense_decode_fp8_params &p)
{
    using Shared = SharedOf<V>;
    static_assert(sizeof(Shared) <= 227 * 1024, "exceeds the shared memory of a CTA");
    static_assert(join_range_bytes(MOST_PARTS_JOINED_IN_KERNEL / JOIN_RANGE_WARPS) <= sizeof(Shared::keys),
                  "it lies where the keys were");
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    const uint32_t smem = shared_address(memory);
    if (threadIdx.x == 0) prepare<V>(p, smem);
    if (threadIdx.x < V::P_STAGES)
        shared.flags[threadIdx.x] = {}; /* small tiles have fewer warps with rows */
    wait_for_kernels_before();
    let_next_kernel_start();
    const CtaCoord cta(p.dense);
    if constexpr (V::JOIN_IN_KERNEL) {
        if (threadIdx.x / 32 == 1)
            shared.one.parts = 0, __syncwarp(), share_out(p.dense, cta.worker, shared.one);
        if (threadIdx.x == 0) shared.list.first = shared.list.last = 0, shared.list.step = 1;
        __syncthreads();
        if (!__any_sync(~0u, shared.one.parts)) return;
    } else {
        if (threadIdx.x == 0) shared.list = split_list(p.dense.call, (unsigned)cta.worker);
        __syncthreads();
    }
    const int role = __shfl_sync(~0u, (int)(threadIdx.x / WARPGROUP_THREADS), 0);
    const int warp = __shfl_sync(~0u, (int)(threadIdx.x / 32), 0);
    if (V::REFILLS && warp == KEYS_WARP) ask_for_first_keys<V>(p, shared);
    if constexpr (V::JOIN_IN_KERNEL)
        if (role != PRODUCER && !p.q_given) load_queries_of_one_split<V>(p, shared, cta, role);
    if (role == PRODUCER) {
        give_registers<V::FIRST_REGISTERS>();
        /* The producer's code comes first: keys are requested before there are scores. */
        if (V::KEYS_FIRST && (V::REFILLS || SELDOM(warp < V::ROW_WARPS)))
            Softmax<V>(p, shared).run();
        else if (!V::REFILLS && warp == KEYS_WARP)
            produce_keys<V>(p, shared, smem);
        else if (!V::KEYS_FIRST && warp == 1 && p.q_given && elect_one())
            produce_queries<V>(p, shared, cta, smem);
    } else if (role == SCORES) {
        give_registers<V::SCORES_REGISTERS>();
        if constexpr (V::BY_LINES)
            KeyScores<V, ByLines<V>>(p, shared).run();
        else if constexpr (V::KEYS_FIRST)
            KeyScores<V, ConvertedKeys<V>>(p, shared).run();
        else
            Scores<V>(p, shared).run();
    } else {
        take_registers<V::VALUES_REGISTERS>();
        Mainloop<V>(p, shared, role - VALUES).run();
    }
}

} // namespace dense_decode_fp8

#define DENSE_DECODE_FP8_KERNEL(NAME, ROWS, JOIN_IN_KERNEL, PRODUCTS, CACHE)                                 \
    DEFINE_KERNEL(                                                                                           \
        NAME, dense_decode_fp8_params, (dense_decode_fp8::THREADS, 1),                                       \
        dense_decode_fp8::kernel<dense_decode_fp8::Variant<ROWS, JOIN_IN_KERNEL, dense_decode_fp8::PRODUCTS, \
                                                           dense_decode_fp8::CACHE>>(p))
