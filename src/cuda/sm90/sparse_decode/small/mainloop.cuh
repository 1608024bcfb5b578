/* SPDX-License-Identifier: MIT
 *
 * The main loop: all phases of a block, by all warps; O of 16 heads and 64 columns per warp, += P V.
 */
#pragma once

#include "../scheduler.cuh"
#include "epilogue.cuh"
#include "layout.cuh"
#include "producer.cuh"
#include "scores.cuh"
#include "softmax.cuh"

namespace sparse_decode::small {

template <bool ONE_SPLIT> struct SmallSums : SmallEpilogue<ONE_SPLIT> {
    using Base = SmallEpilogue<ONE_SPLIT>;
    using Base::Base, Base::shared;
    typename Base::Sums o;

    DEVICE void begin()
    {
#pragma unroll
        for (int i = 0; i < 32; i++) o[i / 4][i % 4] = 0.0f;
    }

    DEVICE void rescale()
    {
        const float factor[2] = {shared.factor[lane() / 4], shared.factor[lane() / 4 + 8]};
#pragma unroll
        for (int i = 0; i < 32; i++) o[i / 4][i % 4] *= factor[i % 4 / 2];
    }

    template <typename Element> DEVICE void multiply(uint32_t smem)
    {
        const uint32_t line = (uint32_t)ldmatrix_tile_row(lane()),
                       chunk = (uint32_t)ldmatrix_tile_chunk(lane());
        uint32_t v = SHARED_AT(smem, v) + (uint32_t)warp() * V_TILE_BYTES + swizzle_128(line, chunk);
        const uint32_t weights = SHARED_AT(smem, p) + swizzle_128(line, chunk);
#pragma unroll 1
        for (uint32_t k = 0; __any_sync(~0u, k < KEYS / 16); k++) {
            uint32_t a[4];
            ldmatrix_x4(a, weights ^ (2 * CHUNK_BYTES * k));
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, v ^ (2 * CHUNK_BYTES * j));
                mma_16816<Element>(o[2 * j], a, b[0], b[1]);
                mma_16816<Element>(o[2 * j + 1], a, b[2], b[3]);
            }
            v += 16 * LINE_BYTES;
        }
    }
};

template <typename F> struct SmallDecode {
    const struct sparse_decode_params &p;
    Shared &shared;
    const uint32_t smem;
    SmallKeys<F> keys;
    SmallSoftmax softmax;
    SmallSums<F::ONE_SPLIT> sums;

    DEVICE SmallDecode(const struct sparse_decode_params &params, Shared &memory)
        : p(params), shared(memory), smem(shared_address(&memory)), keys(params, memory),
          softmax(params, memory), sums(params, memory)
    {
    }

    /* Finds the next split of the list, if there is one; called by one thread. */
    DEVICE void find_split()
    {
        SmallSplit &to = shared.split;
        const SplitList &list = shared.list;
        const int i = shared.next_split;
        shared.next_split = F::ONE_SPLIT ? INT_MAX : i + list.step;
        to.valid = i <= list.last, to.beyond = false;
        if (i > list.last) return;
        const Split split = split_of<F>(p, list, i);
        const ListEnds ends = list_ends(p, split.request);
        const CtaCoord cta(p);
        to.request = split.request, to.part = split.part;
        to.begin = split.begin, to.end = split.end, to.blocks = blocks_of(split);
        to.count = ends.count, to.extra_begin = ends.extra_begin, to.extra_end = ends.extra_end;
#pragma unroll
        for (int c = 0; c < 2; c++)
            to.entries[c] = p.cache[c].indices + split.request * p.cache[c].indices_stride[0] +
                            cta.token * p.cache[c].indices_stride[1] - (c ? ends.extra_begin : 0);
    }

    template <typename Element> DEVICE void score_and_store()
    {
        float s[2][4];
        score_block<F, Element>(keys, s, smem);
        store_scores(shared, keys, s);
    }

    /* A split is multiplied in fp16 up to the first block that fp16 does not hold, and in bf16 from there
     * on. An iteration before the first block only requests its keys, so that one place in the code makes
     * requests. */
    DEVICE void take_split()
    {
        keys.at = shared.split.begin;
        keys.load_index();
        SmallQueries<F>::ask(p, shared.split.request, smem);
        bool bf16 = false;
#pragma unroll 1
        for (int k = -1, last = shared.split.blocks - 1; __any_sync(~0u, k <= last); k++) {
            if (__any_sync(~0u, k >= 0)) {
                /* V, P and the scores of the previous block are no longer needed; the queries have
                 * arrived. */
                keys.settle_scales();
                const bool beyond = __syncthreads_or(!keys.fits());
                if (!bf16 && (beyond || shared.split.beyond)) bf16 = true, reload_queries();
                if (bf16)
                    score_and_store<Bf16>();
                else
                    score_and_store<Fp16>();
            }
            if (__any_sync(~0u, k < last)) keys.ask(), keys.load_index();
            if (__any_sync(~0u, k < 0)) {
                /* The thread that will arrive at the group barrier prepares it while the first keys are in
                 * flight. */
                if (F::ONE_SPLIT && fresh_thread() == 0) prepare_group_barrier(p, shared.split.request);
                if (!SmallQueries<F>::convert(smem)) shared.split.beyond = true;
                softmax.begin(), sums.begin();
                continue;
            }
            __syncthreads();
            softmax.block(smem, bf16);
            if (__any_sync(~0u, k == last)) softmax.end();
            __syncthreads();
            if (__any_sync(~0u, k > 0)) sums.rescale();
            if (bf16)
                sums.template multiply<Bf16>(smem);
            else
                sums.template multiply<Fp16>(smem);
        }
        sums.end(sums.o);
    }

    /* Loads the queries again, as bf16. */
    DEVICE void reload_queries()
    {
        SmallQueries<F>::ask(p, shared.split.request, smem);
        cp_async_wait<0>();
        __syncthreads();
    }

    DEVICE void run()
    {
        if (threadIdx.x == 0) {
            shared.list = splits_of<F>(p, CtaCoord(p).worker);
            shared.next_split = shared.list.first;
        }
#pragma unroll 1
        for (;;) {
            if (threadIdx.x == 0) find_split();
            __syncthreads();
            if (!shared.split.valid) break;
            take_split();
            __syncthreads(); /* all threads have read the split */
        }
        if constexpr (F::ONE_SPLIT) {
            static_assert(join_range_bytes(MOST_SMALL_PARTS_JOINED_IN_KERNEL / JOIN_RANGE_WARPS) <=
                              sizeof(Shared::v),
                          "");
            if (fresh_thread() == 0 && shared.list.first > shared.list.last)
                prepare_group_barrier(p, shared.list.request);
            const JoinRange<false> range(p, shared.list, SMALL_HEADS);
            join_range<Bf16, MOST_SMALL_PARTS_JOINED_IN_KERNEL / JOIN_RANGE_WARPS>(
                range, cta_group_barrier(p, CtaCoord(p), range.request), smem, 0, 0);
        }
    }
};

} // namespace sparse_decode::small
