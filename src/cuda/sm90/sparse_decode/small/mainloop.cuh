/* SPDX-License-Identifier: MIT
 *
 * Sparse decode over FP8 keys on Hopper for few tokens, where only latency counts: tiles of 16 heads instead
 * of 64, so that all SMs take part, and every warp has the same role.
 *
 * A CTA takes a tile of 16 heads of one query token through the keys that the splits of its partition name,
 * 64 keys at a time:
 *
 *      all 8 warps     raw keys to registers, a block ahead
 *      warp w          16 keys (w % 4), half of their columns (w / 4): to fp16; S = K Qᵀ from registers; V to
 *                      shared memory
 *      warp w          softmax of heads 2 w, 2 w + 1; P to shared memory
 *      warp w          O of columns 64 w … 64 w + 63 += P V
 *
 * with a barrier after each phase. The matrix instructions are mma: a tile of 16 heads and 64 keys takes
 * some hundred clocks, and there is no asynchronous product to wait for, as with wgmma.
 *
 * The time is a chain of latencies: the split, indices, keys, scores, weights, results. So little is
 * computed before the first index is requested, and loops are not unrolled. Two CTAs fit an SM (128
 * registers, 93 KB).
 */
#pragma once

#include "../../../device/half_rows.cuh"
#include "../../../device/quad.cuh"
#include "../scheduler.cuh"
#include "layout.cuh"
#include "producer.cuh"
#include "scores.cuh"

namespace sparse_decode::small {

/* ---- The end of a split ---------------------------------------------------------------------- */

/* Stores the sums that SmallSums, which is derived from it, has made. */
template <bool ONE_SPLIT> struct SmallEpilogue : SmallPhase {
    using SmallPhase::SmallPhase;
    using Sums = float[8][4]; /* of 8 columns each: C of mma */

    /* Stores row i of the lane's two, from the warp's first column on. `scale`: of the part's row; unused
     * otherwise. */
    template <typename Stored, bool TO_PART>
    static DEVICE void store_row(const Sums &o, uint16_t *to, float *scale, int i, float factor, bool valid)
    {
        float by = factor;
        if (TO_PART) {
            float most = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) most = fmaxf(most, fmaxf(fabsf(o[j][2 * i]), fabsf(o[j][2 * i + 1])));
            const HalfScale of_row(quad_max(most) * factor);
            by *= of_row.up;
            if (valid && lane() % 4 == 0) *scale = of_row.down;
        }
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            uint32_t words[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                words[e] = factor < 0.0f ? 0 : Stored::pack(o[j + e][2 * i] * by, o[j + e][2 * i + 1] * by);
            const uint4 eight = quad_gather_eight(words);
            if (valid) *(uint4 *)(to + 8 * (j + lane() % 4)) = eight;
        }
    }

    /* Stores row i; called by all lanes, also those past the last head. */
    DEVICE void end_row(const Sums &o, int i) const
    {
        const CtaCoord cta(p);
        const int row = lane() / 4 + 8 * i, asked = cta.tile * SMALL_HEADS + row,
                  head = min(asked, p.h_q - 1);
        const int column = LINE_ELEMENTS * warp();
        const bool valid = asked < p.h_q;
        const float factor = shared.last_factor[row];
        if (!ONE_SPLIT && __any_sync(~0u, shared.split.part == DIRECT)) {
            store_row<Bf16, false>(
                o, p.output.out + out_offset(p.output, shared.split.request, {cta.token, head}) + column,
                NULL, i, factor, valid);
        } else {
            const int64_t part_row =
                shared.split.part * ((int64_t)p.h_q * p.s_q) + (int64_t)cta.token * p.h_q + head;
            store_row<Fp16, true>(o, half_row(p.split, part_row) + column,
                                  half_row_scales(p.split, part_row) + warp(), i, factor, valid);
        }
    }

    DEVICE void end(const Sums &o) const
    {
        end_row(o, 0), end_row(o, 1);
    }
};

/* ---- The main loop --------------------------------------------------------------------------- */

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

/* ---- The kernel ------------------------------------------------------------------------------ */

template <typename F> DEVICE void kernel(const struct sparse_decode_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    wait_for_kernels_before();
    let_next_kernel_start();
    SmallDecode<F>(p, *(Shared *)memory).run();
}

} // namespace sparse_decode::small

/* Defines both kernels of a format: the general one, and the one with one split per CTA. */
#define SPARSE_DECODE_SMALL_KERNELS(NAME, FORMAT)                                                            \
    DEFINE_KERNEL(NAME, sparse_decode_params, (sparse_decode::small::SMALL_THREADS, 2),                      \
                  sparse_decode::small::kernel<sparse_decode::FORMAT>(p))                                    \
    DEFINE_KERNEL(                                                                                           \
        NAME##_together, sparse_decode_sm90_params, (sparse_decode::small::SMALL_THREADS, 2),                \
        sparse_decode::small::kernel<sparse_decode::OneSplitFormat<sparse_decode::FORMAT>>(p.call))
