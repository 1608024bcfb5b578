/* SPDX-License-Identifier: MIT
 *
 * The warpgroups of the sums: O of 256 columns each += P V; at the end of a split they store rows to `out`,
 * or to the split's slot. A thread has, in its two rows, 16 neighbouring columns of every 64 (layout.cuh).
 */
#pragma once

#include "../../device/half_rows.cuh"
#include "../../device/quad.cuh"
#include "fp4_keys.cuh"
#include "join_share.cuh"
#include "queries.cuh"

static_assert(share_bytes(MOST_PARTS_TOGETHER / SHARE_WARPS) <= offsetof(Shared, p),
              "the join has the place of V and Q");

template <typename F> struct Sums {
    const struct sparse_decode_params &p;
    Shared &shared;
    const uint32_t base;
    float o[128];

    DEVICE Sums(const struct sparse_decode_params &params, Shared &memory)
        : p(params), shared(memory), base(shared_address(&memory))
    {
    }

    DEVICE Split &split() const { return shared.split[fresh_thread() / 32 - 4]; }

    /* Adds P·V of a block. The tensor cores are idle during a softmax, so the second warpgroup keeps its
     * product for the softmax of the following block, until the products of that block's scores are done
     * (`late`). */
    DEVICE void add_block(uint32_t count, uint32_t half, bool first, bool late)
    {
        const uint32_t buffer = count & 1;
        mbarrier_wait(SHARED_AT(base, full) + 8 * buffer, count >> 1 & 1);
        if (__any_sync(~0u, late && side() == 1))
            mbarrier_wait(SHARED_AT(base, products_done), (count + 1) & 1);
        const uint32_t block = shared.block[buffer];
        if (__any_sync(~0u, block & BLOCK_MOVED)) {
            const float factor[2] = {shared.factor[buffer][row()], shared.factor[buffer][row() + 8]};
#pragma unroll
            for (int i = 0; i < 128; i++) o[i] *= factor[i / 2 % 2];
        }
        if (SELDOM(__any_sync(~0u, block & BLOCK_BF16)))
            multiply<Bf16>(buffer, half, first);
        else
            multiply<Fp16>(buffer, half, first);
        if (lane() == 0) mbarrier_arrive(SHARED_AT(base, empty) + 8 * half);
    }

    template <typename Element> DEVICE void multiply(uint32_t buffer, uint32_t half, bool first)
    {
        const uint32_t v = SHARED_AT(base, v) + half * HALF_BYTES;
        hold(o);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_256_columns<Element>(o, wgmma_lines(SHARED_AT(base, p) + buffer * TILE_BYTES, k),
                                       wgmma_columns(v, k), k > 0 || !first);
        wgmma_commit();
        wgmma_wait<0>();
        hold(o);
    }

    /* Takes the thread's 16 columns of tile c of the side, in one of its two rows. */
    DEVICE void take_row(float (&x)[16], int c, bool second) const
    {
#pragma unroll
        for (int e = 0; e < 16; e++) {
            const int at = 32 * c + 4 * (e / 2) + e % 2;
            x[e] = second ? o[at + 2] : o[at];
        }
    }

    DEVICE void clear_row(int i, bool clears)
    {
        asm volatile(
            "" ::
                : "memory"); /* keeps the branch: nvcc would make selects, which all splits would execute */
#pragma unroll
        for (int e = 0; e < 64; e++) {
            float &x = o[4 * (e / 2) + 2 * i + e % 2];
            x = clears ? 0.0f : x;
        }
    }

    /* ---- Stores, of whole lines ------------------------------------------------------------------- */

    /* Four lanes have 128 consecutive bytes of a row, 32 each, and four others those of the next row. They
     * exchange halves: eight lanes write a line of the first row, then one of the second, since the cost
     * of a store depends on the lines that it touches. */
    struct LinePair {
        char *to[2]; /* destination of the lane's 16 bytes of either line, in the first tile */
        bool there[2];
    };

    /* Returns the lines of the lane's row and its partner's. `first`: the first row's columns of the side.
     * `rows`: how many rows exist from the first on. */
    static DEVICE LinePair line_pair(uint16_t *first, int64_t row_elements, int rows)
    {
        uint16_t *const own = first + 2 * CHUNK_ELEMENTS * (lane() % 4) + (odd_row() ? CHUNK_ELEMENTS : 0);
        return {{(char *)own, (char *)(own + row_elements)}, {rows > 0, rows > 1}};
    }

    static DEVICE bool odd_row()
    {
        return lane() & 4;
    }

    /* Selects in registers: for a select between the operands of two stores nvcc makes two stores, of half
     * of the lanes each. */
    static DEVICE uint4 select(bool first, const uint4 &x, const uint4 &y)
    {
        uint4 z;
        asm("{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %12, 0;\n"
            "selp.b32 %0, %4, %8, p;\n"
            "selp.b32 %1, %5, %9, p;\n"
            "selp.b32 %2, %6, %10, p;\n"
            "selp.b32 %3, %7, %11, p;\n"
            "}\n"
            : "=r"(z.x), "=r"(z.y), "=r"(z.z), "=r"(z.w)
            : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(y.x), "r"(y.y), "r"(y.z), "r"(y.w),
              "r"((int)first));
        return z;
    }

    /* Stores x and y, which are adjacent. */
    static DEVICE void store_lines(const LinePair &lines, int at, const uint4 &x, const uint4 &y)
    {
        const bool odd = odd_row();
        const uint4 send = select(odd, x, y);
        uint4 got;
        got.x = __shfl_xor_sync(~0u, send.x, 4), got.y = __shfl_xor_sync(~0u, send.y, 4);
        got.z = __shfl_xor_sync(~0u, send.z, 4), got.w = __shfl_xor_sync(~0u, send.w, 4);
        const uint4 low = select(odd, got, x), high = select(odd, y, got);
        if (lines.there[0]) *(uint4 *)(lines.to[0] + at) = low;
        if (lines.there[1]) *(uint4 *)(lines.to[1] + at) = high;
    }

    /* ---- Rows of `out` and of slots: decode has one copy of the code for both and for both rows, since a
     * call executes it once ---- */

    /* Stores a row to `out`, or, scaled, to a slot. `scales`: the side's, of a slot's row; NULL otherwise,
     * and for rows past the last head. `empty`: the row saw no key, and is 0 whatever weights of 0 made of
     * V. */
    DEVICE void store_row(const LinePair &lines, bool slot, float *scales, bool second, float factor,
                          bool empty) const
    {
        float down = 0.0f; /* scale of the lane's tile of four */
#pragma unroll
        for (int c = 0; c < HALF_TILES; c++) {
            float x[16];
            uint32_t words[8];
            take_row(x, c, second);
            if (!F::PREFILL && __any_sync(~0u, slot)) {
                const HalfScale scale(quad_magnitude(x) * factor);
                const float by = factor * scale.up;
                if (lane() % 4 == c) down = scale.down;
#pragma unroll
                for (int w = 0; w < 8; w++) words[w] = Fp16::pack(x[2 * w] * by, x[2 * w + 1] * by);
            } else {
#pragma unroll
                for (int w = 0; w < 8; w++) words[w] = Bf16::pack(x[2 * w] * factor, x[2 * w + 1] * factor);
            }
#pragma unroll
            for (int w = 0; w < 8; w++) words[w] = empty ? 0u : words[w];
            store_lines(lines, LINE_BYTES * c, make_uint4(words[0], words[1], words[2], words[3]),
                        make_uint4(words[4], words[5], words[6], words[7]));
        }
        if (scales) scales[lane() % 4] = down;
    }

    /* Returns the value of row i. It is read only when the row is stored, since O leaves few registers. */
    DEVICE float of_row(const float (&of)[HEADS], int i) const
    {
        return __uint_as_float(load_shared_4(shared_address(&of[row() + 8 * i])));
    }

    /* Stores row i; called by all lanes, also those past the last head. */
    DEVICE void end_row(int i) const
    {
        const float sum = of_row(shared.sum, i), below = of_row(shared.below, i);
        const Place place(p);
        const int asked = place.tile * HEADS + row() + 8 * i, head = min(asked, p.h_q - 1);
        const int first = asked & ~1, rows = p.h_q - first; /* of two rows that are stored together */
        const int column = side() * (D_V / 2), request = split().request;
        const int64_t slot = split().slot;
        const bool stores_end = asked < p.h_q && side() == 0 && lane() % 4 == 0;
        const bool empty = sum == 0.0f;
        float factor = empty ? 0.0f : reciprocal_approx(sum);
        float *scales = NULL;
        uint16_t *to;
        int64_t row_elements;
        const bool direct = F::PREFILL || __any_sync(~0u, slot == DIRECT);
        if (direct) {
            const float lse = score_lse(-below, sum);
            if (stores_end) store_lse(p.output, request, {place.token, head}, lse);
            if (F::PREFILL && stores_end) store_largest(p, request, head, of_row(shared.largest, i));
            to = p.output.out + out_offset(p.output, request, {place.token, first});
            row_elements = p.output.out_stride[2];
            factor *= result_sink_factor(p.output.rules, head, lse);
        } else {
            const int64_t slot_row = slot * ((int64_t)p.h_q * p.s_q) + (int64_t)place.token * p.h_q;
            if (stores_end) p.split.slot_end[slot_row + head] = {-below, sum};
            if (asked < p.h_q) scales = half_row_scales(p.split, slot_row + head) + column / HALF_ROW_TILE;
            to = half_row(p.split, slot_row + first);
            row_elements = 2 * D_V;
        }
        store_row(line_pair(to + column, row_elements, rows), !direct, scales, i == 1, factor, empty);
    }

    /* ---- Rows of a part that the CTAs join themselves ---------------------------------------------- */

    /* Returns the row of the split's slot for a head; if CTAs join, there are fewer than 2^31 rows. */
    DEVICE int part_row(int head) const
    {
        return ((int)split().slot * p.s_q + Place(p).token) * p.h_q + head;
    }

    /* Stores both rows to the split's slot, by one copy of the code, since a call executes it once. A row
     * that saw no key is 0 whatever weights of 0 made of V. `most`: the largest scores, for prefill. */
    DEVICE void end_part(const float (&sum)[2], const float (&below)[2], const float (&most)[2])
    {
        const int first = Place(p).tile * HEADS + row();
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool empty = sum[i] == 0.0f;
            if (SELDOM(__any_sync(~0u, empty))) clear_row(i, empty);
            if (first + 8 * i < p.h_q && side() == 0 && lane() % 4 == 0) {
                part_end end = {-below[i], sum[i]};
                if constexpr (F::PREFILL) end = end_above(end, most[i]);
                p.split.slot_end[part_row(first + 8 * i)] = end;
            }
            factor[i] = empty ? 0.0f : reciprocal_approx(sum[i]);
        }
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            const int head = first + 8 * i, column = side() * (D_V / 2);
            const bool stores = head < p.h_q;
            const int at = part_row(head);
            uint16_t *const to = half_row(p.split, at) + column + CHUNK_ELEMENTS * (lane() % 4);
            float down[HALF_TILES];
#pragma unroll
            for (int c = 0; c < HALF_TILES; c++) {
                float x[16];
                take_row(x, c, i == 1);
                down[c] = store_half_tile(to + HALF_ROW_TILE * c, x, i ? factor[1] : factor[0], stores);
            }
            if (stores && lane() % 4 == 0)
                *(float4 *)(half_row_scales(p.split, at) + column / HALF_ROW_TILE) =
                    make_float4(down[0], down[1], down[2], down[3]);
        }
    }

    DEVICE void end_split(uint32_t parity)
    {
        mbarrier_wait(SHARED_AT(base, sum_full), parity);
        if constexpr (F::ONE_SPLIT) {
            float sum[2], below[2], most[2];
#pragma unroll
            for (int i = 0; i < 2; i++)
                sum[i] = shared.sum[row() + 8 * i], below[i] = shared.below[row() + 8 * i],
                most[i] = F::PREFILL ? shared.largest[row() + 8 * i] : 0.0f;
            __syncwarp();
            end_part(sum, below, most);
        } else {
            if constexpr (F::PREFILL) {
                end_row(0), end_row(1);
            } else {
#pragma unroll 1
                for (int i = 0; i < 2; i++) end_row(i);
            }
            __syncwarp();
            if (lane() == 0) mbarrier_arrive(SHARED_AT(base, sum_empty));
        }
        __syncwarp();
    }

    DEVICE int begin_split(int i)
    {
        const Split now = split_of<F>(p, shared.list, i);
        if (lane() == 0) split() = now;
        __syncwarp();
        return blocks_of(now);
    }

    /* Prefetches the queries of the next split to L2 some blocks before the end of a split, and loads them
     * to shared memory during the scores of its last block: the product before that is not kept. Votes: as
     * in Scores. */
    DEVICE void prepare_queries(int i, int k, int blocks, uint32_t split)
    {
        const bool first = k < 0, more = shared.list.last - i >= shared.list.step;
        const bool near = more && k == max(0, blocks - PREFETCH_BLOCKS),
                   now = first || (more && k == blocks - 1);
        if (__any_sync(~0u, near | now)) {
            const int request = request_of<F>(p, shared.list, first ? i : i + shared.list.step);
            if (__any_sync(~0u, near)) prefetch_queries<F>(p, request);
            if (__any_sync(~0u, now)) load_queries<F>(p, request, shared, base, split + !first);
        }
    }

    DEVICE void run_splits()
    {
        uint32_t count = 0, splits = 0 /* that have ended */, half = (uint32_t)side();
        if constexpr (F::ONE_SPLIT) {
            load_only_queries<F>(p, request_of<F>(p, shared.list, shared.list.first), shared, base);
            begin_to_meet(); /* while the first keys are in flight */
        }
#pragma unroll
        for (int i = 0; i < 128; i++) o[i] = 0.0f;
        for (int i = shared.list.first; F::ONE_SPLIT ? splits == 0 : __any_sync(~0u, i <= shared.list.last);
             i += shared.list.step) {
            int blocks = F::ONE_SPLIT ? begin_split(i) : 1;
            /* Block -1: the code that loads the next queries also loads the first, and the code that
             * converts the keys of the next block also converts the first. */
            constexpr bool BEGINS_BEFORE = !F::ONE_SPLIT || F::FP4 != NO_BLOCKS;
            for (int k = !BEGINS_BEFORE || splits ? 0 : -1; __any_sync(~0u, k < blocks); k++) {
                if constexpr (!F::ONE_SPLIT) {
                    if (__any_sync(~0u, k == 0)) blocks = begin_split(i);
                    prepare_queries(i, k, blocks, splits);
                }
                if constexpr (F::FP4 != NO_BLOCKS) convert_fp4<F>(shared, base, k < 0 ? 0 : count + 1);
                if constexpr (BEGINS_BEFORE)
                    if (__any_sync(~0u, k < 0)) continue;
                add_block(count, half, k == 0, k + 2 < blocks);
                count++, half += 2;
                if (half >= HALVES) half -= HALVES;
            }
            end_split(splits & 1);
            splits++;
        }
    }

    DEVICE void begin_to_meet() const
    {
        if (fresh_thread() == WARPGROUP_THREADS) begin_meeting(p, shared.list.request);
        __syncwarp();
    }

    /* A CTA without a part takes its share of the join all the same. */
    DEVICE void run()
    {
        if (__any_sync(~0u, shared.list.first <= shared.list.last))
            run_splits();
        else if (F::ONE_SPLIT)
            begin_to_meet();
        if constexpr (F::ONE_SPLIT) {
            const HeadShare<true, F::PREFILL> share(p, shared.list, HEADS);
            join_together<Bf16, MOST_PARTS_TOGETHER / SHARE_WARPS>(
                share, meeting_of(p, Place(p), share.request), base, WARPGROUP_THREADS, SUMS_BARRIER);
        }
    }
};
