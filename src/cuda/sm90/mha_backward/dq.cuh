/* SPDX-License-Identifier: MIT
 *
 * dQ of a tile: its producer, a consumer or a warpgroup of its own, stores it in a stage of shared memory,
 * and one thread, the adder, adds it to the sums in global memory.
 *
 * The sums are fp32 and keep the accumulator layout: per producer's part of a tile, the four values that each
 * thread has of eight columns, thread after thread. rows.cuh brings them into the order of dq.
 *
 * A counter per tile and producer counts the key blocks that have added. The first one stores, so that the
 * sums need not be cleared. Without fixed order the first one is the one that claims the tile; others wait
 * until it has stored. Deterministic: the order depends on the sizes and the number of SMs, and a key block
 * waits for those before it:
 *
 *   causal   the last key block first, as it reaches the tile first: each begins at its own diagonal; in the last heads
 *            of a long request the first key block first (scheduler.cuh)
 *   full     group after group; within a group as they reach the tile, see order_in_group
 *
 * Work tiles are taken in that order (scheduler.cuh), so that a CTA waits only for those that are being processed, or,
 * of its group, will be before any CTA takes a number behind the group.
 */
#pragma once

#include "epilogue.cuh"
#include "gradient.cuh"
#include "scheduler.cuh"

namespace mha_backward {

/* Returns the order of a work tile among those that add to the row tile: how many key blocks add before
 * it. */
template <typename Layout>
DEVICE uint32_t dq_order(const mha_backward_sm90_params &p, const RowTiles<Layout> &t, uint32_t work)
{
    if (!p.in_order) return 0;
    const int before = load_uniform(work + offsetof(WorkTile, order));
    if (MHA_BACKWARD_SM90_HAS_GROUPS(Layout::D_QK) && !p.call.causal) {
        const uint32_t packed = (uint32_t)load_uniform(work + offsetof(WorkTile, q.phase));
        return (uint32_t)(before + order_in_group(packed, -(t.diagonal + Layout::KEYS) / Layout::ROWS));
    }
    if (p.call.causal)
        return (uint32_t)(before < 0 ? ~before : min((Layout::ROWS - 1 - t.diagonal) / Layout::KEYS, before));
    return (uint32_t)before;
}

/* Computes dQ: its part of the columns, over all keys of the work tile. */
template <typename Element, typename Layout> struct DqProducer {
    const mha_backward_sm90_params &p;
    const Layout l;
    const int producer; /* index of its part of the columns */

    /* Issues dQ of tile `n`, whose dS is complete, with the keys of stage `key_stage`. */
    DEVICE void issue(float (&dq)[Layout::DQ_VALUES], uint32_t n, int key_stage = 0) const
    {
        const uint32_t ds = l.ds((int)(n % 2)),
                       k = l.k(key_stage) +
                           (uint32_t)producer * (Layout::DQ_COLUMNS / Layout::K_COLUMNS * Layout::K_TILE);
#pragma unroll
        for (int i = 0; i < Layout::KEYS / 16; i++)
            product_of_columns<Element>(
                dq, descriptor_of<SWIZZLE_128>(ds, Layout::DS_TILE, (uint32_t)i * 16 * LINE_BYTES),
                descriptor_of<Layout::K_SWIZZLE>(k, Layout::K_TILE, (uint32_t)i * 16 * Layout::K_LINE),
                i != 0);
        wgmma_commit();
    }

    DEVICE void wait_for_stage(uint32_t n) const
    {
        mbarrier_wait(l.barrier(Layout::DQ_EMPTY, Layout::dq_stage(producer, n)), Layout::dq_parity(n) ^ 1);
    }

    /* Notifies the adder of tile `n`; row_tile < 0: no more tiles. */
    DEVICE void publish(uint32_t n, int row_tile, uint32_t order) const
    {
        const int stage = Layout::dq_stage(producer, n), thread = (int)fresh_thread() % WARPGROUP_THREADS;
        if (thread == 0)
            store_shared_4(l.dq_tile(stage), (uint32_t)row_tile), store_shared_4(l.dq_tile(stage) + 4, order);
        __syncwarp();
        mbarrier_arrive_if(thread % 32 == 0, l.barrier(Layout::DQ_FULL, stage));
    }

    /* Stores dQ of the producer's tile `n` in the stage that its adder reads. */
    DEVICE void store(uint32_t n, int row_tile, uint32_t order, const float (&dq)[Layout::DQ_VALUES]) const
    {
        wait_for_stage(n);
        const uint32_t to = l.dq(Layout::dq_stage(producer, n)) + fresh_thread() % WARPGROUP_THREADS * 16;
#pragma unroll
        for (int i = 0; i < Layout::DQ_VALUES; i += 4)
            store_shared_16(to + (uint32_t)(i * WARPGROUP_THREADS * 4),
                            make_uint4(__float_as_uint(dq[i]), __float_as_uint(dq[i + 1]),
                                       __float_as_uint(dq[i + 2]), __float_as_uint(dq[i + 3])));
        publish(n, row_tile, order);
    }

    DEVICE void end(uint32_t n) const
    {
        wait_for_stage(n);
        publish(n, -1, 0);
    }

    /* Main loop of the warpgroup that computes dQ only. */
    DEVICE void run() const
    {
        uint32_t n = 0;
        float dq[Layout::DQ_VALUES];
        for (Ring<WORK_STAGES> work_stage;; work_stage.advance()) {
            const uint32_t work = l.work(work_stage.index);
            mbarrier_wait(l.barrier(Layout::WORK_FULL, work_stage.index), work_stage.parity);
            const int tiles = load_uniform(work + offsetof(WorkTile, q.tiles));
            if (tiles < 0) break;
            const int key_stage = l.key_stage(work_stage.index);
            if (tiles)
                mbarrier_wait(l.barrier(Layout::K_FULL, key_stage),
                              phase_of<Layout>((uint32_t)load_uniform(work + offsetof(WorkTile, q.phase))));
            RowTiles<Layout> t;
            t.begin(p, work);
            for (bool more = tiles; more; n++) {
#pragma unroll
                for (int i = 0; i < Layout::CONSUMERS; i++)
                    mbarrier_wait(l.barrier(Layout::DS_FULL + 2 * i, (int)(n % 2)), n / 2 % 2);
                fence_async_shared();
                wgmma_fence();
                issue(dq, n, key_stage);
                const int row_tile = t.index;
                const uint32_t order = dq_order(p, t, work);
                more = t.advance(p, work);
                wgmma_wait<0>();
                hold(dq);
                mbarrier_arrive_if(threadIdx.x % WARPGROUP_THREADS == 0,
                                   l.barrier(Layout::DS_EMPTY, (int)(n % 2)));
                store(n, row_tile, order, dq);
            }
            if (tiles)
                mbarrier_arrive_if(threadIdx.x % WARPGROUP_THREADS == 0,
                                   l.barrier(Layout::KEYS_EMPTY, key_stage));
            __syncwarp();
            mbarrier_arrive_if(threadIdx.x % 32 == 0, l.barrier(Layout::WORK_EMPTY, work_stage.index));
        }
        end(n), end(n + 1);
    }
};

/* Adds floats from shared to global memory; belongs to the thread's next bulk group. */
DEVICE void bulk_add(float *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}

DEVICE void wait_for_order(const uint32_t *added, uint32_t order)
{
    while (load_acquire(added) != order) {
    }
}

static constexpr uint32_t CLAIMED = 1u << 31; /* counter value while the first key block stores */

/* Without fixed order: returns whether this key block is the first. If not, the stored sums of the first one
 * are visible on return. */
DEVICE bool claim(uint32_t *added)
{
    uint32_t now;
    asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(now)
                 : "l"(added), "r"(0), "r"(CLAIMED)
                 : "memory");
    const bool first = now == 0;
    while (now == CLAIMED) now = load_acquire(added);
    return first;
}

/* Adds to the counter after this thread's additions are complete. */
DEVICE void count(uint32_t *added, uint32_t more)
{
    bulk_wait<0>();
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(added), "r"(more) : "memory");
}

/* Adder: one thread per stage adds the dQ that its producer stores. Only bulk operations touch the sums
 * meanwhile, so no fence is needed between the additions of different CTAs. */
template <typename Layout> DEVICE void add_dq(const mha_backward_sm90_params &p, const Layout &l, int stage)
{
    constexpr int STAGES = Layout::DQ_PRODUCERS == 1 ? 2 : 1; /* of a producer */
    const int producer = Layout::DQ_PRODUCERS == 1 ? 0 : stage;
    for (uint32_t n = STAGES == 2 ? (uint32_t)stage : 0;; n += STAGES) {
        mbarrier_wait_thread(l.barrier(Layout::DQ_FULL, stage), Layout::dq_parity(n));
        const int row_tile = (int)load_shared_4(l.dq_tile(stage));
        if (row_tile < 0) return;
        const uint32_t order = load_shared_4(l.dq_tile(stage) + 4);
        uint32_t *const added = p.added + (int64_t)row_tile * Layout::DQ_PRODUCERS + producer;
        fence_async_shared();
        if (p.in_order) wait_for_order(added, order);
        const bool claimed = !p.in_order && claim(added);
        float *const sums =
            p.dq_sums + (int64_t)row_tile * Layout::DQ_TILE + producer * Layout::DQ_OF_PRODUCER;
        if (p.in_order ? order == 0 : claimed)
            bulk_store(sums, l.dq(stage), Layout::DQ_BYTES);
        else
            bulk_add(sums, l.dq(stage), Layout::DQ_BYTES);
        bulk_commit();
        bulk_wait_read<0>();
        mbarrier_arrive(l.barrier(Layout::DQ_EMPTY, stage));
        count(added, claimed ? 1 - CLAIMED : 1);
    }
}

} // namespace mha_backward
