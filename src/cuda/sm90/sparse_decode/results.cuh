/* SPDX-License-Identifier: MIT
 *
 * The warpgroups of the sums: O of 256 columns each += P V, and the end of a piece: rows to `out`, or to the piece's slot. A
 * thread has, of its two rows, 16 neighbouring columns of every 64 (layout.cuh).
 */
#pragma once

#include "../../device/half_rows.cuh"
#include "../../device/quad.cuh"
#include "join_share.cuh"
#include "queries.cuh"

static_assert(share_bytes(MOST_PARTS_TOGETHER / SHARE_WARPS, true) <= offsetof(Shared, p),
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

    DEVICE Piece &piece() const { return shared.piece[fresh_thread() / 32 - 4]; }

    /* The tensor cores have nothing to do during a softmax, so the second warpgroup keeps its product for that of the block
     * after, until the products of those scores are done (`late`). */
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
        if (__any_sync(~0u, block & BLOCK_BF16))
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

    /* Columns 4 s … 4 s + 3 of the thread's 16 of tile c of the side, of row i of its two. `empty`: it saw no key, and
     * is 0 whatever weights of 0 made of V. */
    DEVICE float4 values(int c, int s, int i, float factor, bool empty) const
    {
        const float *low = o + 32 * c + 8 * s + 2 * i, *high = low + 4;
        return empty ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                     : make_float4(low[0] * factor, low[1] * factor, high[0] * factor, high[1] * factor);
    }

    /* All of them, of one of the two rows. */
    DEVICE void take_row(float (&x)[16], int c, bool second) const
    {
#pragma unroll
        for (int e = 0; e < 16; e++) {
            const int at = 32 * c + 4 * (e / 2) + e % 2;
            x[e] = second ? o[at + 2] : o[at];
        }
    }

    /* ---- Stores, of whole lines ------------------------------------------------------------------- */

    /* Four lanes have 128 bytes of a row that stand together, 32 each, and so have four of the next row. They exchange halves:
     * eight write a line of the first row, then one of the second: what a store takes goes by the lines that it touches. */
    struct LinePair {
        char *to[2]; /* where the lane's 16 bytes of either line go, of the first tile */
        bool there[2];
    };

    /* first: the first row's columns of the side; `rows`: how many there are from this row on, of the lane's row and its
     * partner's. */
    static DEVICE LinePair line_pair(uint16_t *first, int64_t row_elements, int rows)
    {
        uint16_t *const own = first + 2 * CHUNK_ELEMENTS * (lane() % 4) + (odd_row() ? CHUNK_ELEMENTS : 0);
        return {{(char *)own, (char *)(own + row_elements)}, {rows > 0, rows > 1}};
    }

    static DEVICE bool odd_row()
    {
        return lane() & 4;
    }

    /* x and y stand next to each other. */
    static DEVICE void store_lines(const LinePair &lines, int at, const uint4 &x, const uint4 &y)
    {
        const bool odd = odd_row();
        const uint4 send = odd ? x : y;
        uint4 got;
        got.x = __shfl_xor_sync(~0u, send.x, 4), got.y = __shfl_xor_sync(~0u, send.y, 4);
        got.z = __shfl_xor_sync(~0u, send.z, 4), got.w = __shfl_xor_sync(~0u, send.w, 4);
        if (lines.there[0]) *(uint4 *)(lines.to[0] + at) = odd ? got : x;
        if (lines.there[1]) *(uint4 *)(lines.to[1] + at) = odd ? y : got;
    }

    /* ---- Rows of prefill: a text for each, since a block of threads ends many tiles ------------------- */

    DEVICE void store_row(const LinePair &lines, int i, float factor, bool empty) const
    {
#pragma unroll
        for (int c = 0; c < HALF_TILES; c++) {
            uint4 words[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float4 a = values(c, 2 * h, i, factor, empty),
                             b = values(c, 2 * h + 1, i, factor, empty);
                words[h] = make_uint4(Bf16::pack(a.x, a.y), Bf16::pack(a.z, a.w), Bf16::pack(b.x, b.y),
                                      Bf16::pack(b.z, b.w));
            }
            store_lines(lines, LINE_BYTES * c, words[0], words[1]);
        }
    }

    /* All lanes, also those of heads that are none. */
    DEVICE void end_prefill_row(int i, float sum, float below, float most) const
    {
        const Place place(p);
        const int asked = place.tile * HEADS + row() + 8 * i, head = min(asked, p.h_q - 1);
        const int first = asked & ~1, rows = p.h_q - first; /* of two rows that are stored together */
        const int column = side() * (D_V / 2), request = piece().request;
        const bool stores_lse = asked < p.h_q && side() == 0 && lane() % 4 == 0;
        const float lse = sum == 0.0f ? -INFINITY : (log2f(sum) - below) * LN_2;
        const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (stores_lse) store_lse(p.output, request, {place.token, head}, lse);
        if (stores_lse) store_largest(p, request, head, most);
        uint16_t *to = p.output.out + out_offset(p.output, request, {place.token, first}) + column;
        store_row(line_pair(to, p.output.out_stride[2], rows), i,
                  factor * result_sink_factor(p.output.rules, head, lse), sum == 0.0f);
    }

    /* ---- Rows of decode: one text for `out` and slots and for both rows, since a call walks through it once ---- */

    static DEVICE uint32_t pack(bool slot, float low, float high)
    {
        return slot ? Fp16::pack(low, high) : Bf16::pack(low, high);
    }

    /* To `out`, or, scaled, to a slot. `scales`: of a slot's row, the side's; NULL otherwise, and where the row is of no head.
     * `empty`: it saw no key, and is 0 whatever weights of 0 made of V. */
    DEVICE void store_row(const LinePair &lines, bool slot, float *scales, bool second, float factor,
                          bool empty) const
    {
        float down = 0.0f; /* of the lane's of four tiles */
#pragma unroll
        for (int c = 0; c < HALF_TILES; c++) {
            float x[16], by = factor;
            take_row(x, c, second);
            if (__any_sync(~0u, slot)) {
                const HalfScale scale(quad_magnitude(x) * factor);
                by *= scale.up;
                if (lane() % 4 == c) down = scale.down;
            }
            uint32_t words[8];
#pragma unroll
            for (int w = 0; w < 8; w++) words[w] = empty ? 0u : pack(slot, x[2 * w] * by, x[2 * w + 1] * by);
            store_lines(lines, LINE_BYTES * c, make_uint4(words[0], words[1], words[2], words[3]),
                        make_uint4(words[4], words[5], words[6], words[7]));
        }
        if (scales) scales[lane() % 4] = down;
    }

    /* ---- Rows of a part that the blocks of threads join themselves -------------------------------------- */

    DEVICE void clear_row(int i, bool clears)
    {
        asm volatile(
            "" ::
                : "memory"); /* keeps the branch: without this nvcc turns it into selects, which all pieces would execute */
#pragma unroll
        for (int e = 0; e < 64; e++) {
            float &x = o[4 * (e / 2) + 2 * i + e % 2];
            x = clears ? 0.0f : x;
        }
    }

    /* The row of the piece's slot that a head has; where blocks of threads join, there are fewer than 2^31. */
    DEVICE int part_row(int head) const
    {
        return ((int)piece().slot * p.s_q + Place(p).token) * p.h_q + head;
    }

    /* Stores both rows to the piece's slot, by one text, since a call walks through it once. A row that saw no key is 0 whatever
     * weights of 0 made of V. `most`: of prefill, the largest scores. */
    DEVICE void end_part(const float (&sum)[2], const float (&below)[2], const float (&most)[2])
    {
        const int first = Place(p).tile * HEADS + row();
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool empty = sum[i] == 0.0f;
            if (SELDOM(__any_sync(~0u, empty))) clear_row(i, empty);
            if (first + 8 * i < p.h_q && side() == 0 && lane() % 4 == 0) {
                const int at = part_row(first + 8 * i);
                float lse = log2_approx(sum[i]);
                if constexpr (F::PREFILL) {
                    lse -= below[i] + most[i]; /* the reference is near the largest score: the sum is exact */
                    *half_row_largest(p.split, at) = most[i];
                } else {
                    lse = (lse - below[i]) * LN_2;
                }
                p.split.slot_lse[at] = empty ? -INFINITY : lse;
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

    /* All lanes, also those of heads that are none. */
    DEVICE void end_row(int i, float sum, float below) const
    {
        const Place place(p);
        const int asked = place.tile * HEADS + row() + 8 * i, head = min(asked, p.h_q - 1);
        const int first = asked & ~1, rows = p.h_q - first; /* of two rows that are stored together */
        const int column = side() * (D_V / 2), request = piece().request;
        const int64_t slot = piece().slot;
        const bool stores_lse = asked < p.h_q && side() == 0 && lane() % 4 == 0;
        const float lse = sum == 0.0f ? -INFINITY : (log2f(sum) - below) * LN_2;
        float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        float *scales = NULL;
        uint16_t *to;
        int64_t row_elements;
        const bool direct = __any_sync(~0u, slot == DIRECT);
        if (direct) {
            if (stores_lse) store_lse(p.output, request, {place.token, head}, lse);
            to = p.output.out + out_offset(p.output, request, {place.token, first});
            row_elements = p.output.out_stride[2];
            factor *= result_sink_factor(p.output.rules, head, lse);
        } else {
            const int64_t slot_row = slot * ((int64_t)p.h_q * p.s_q) + (int64_t)place.token * p.h_q;
            if (stores_lse) p.split.slot_lse[slot_row + head] = lse;
            if (asked < p.h_q) scales = half_row_scales(p.split, slot_row + head) + column / HALF_ROW_TILE;
            to = half_row(p.split, slot_row + first);
            row_elements = 2 * D_V;
        }
        store_row(line_pair(to + column, row_elements, rows), !direct, scales, i == 1, factor, sum == 0.0f);
    }

    DEVICE void end_piece(uint32_t parity)
    {
        mbarrier_wait(SHARED_AT(base, sum_full), parity);
        float sum[2], below[2];
        float most[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            sum[i] = shared.sum[row() + 8 * i], below[i] = shared.below[row() + 8 * i],
            most[i] = F::PREFILL ? shared.largest[row() + 8 * i] : 0.0f;
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(base, sum_empty));
        if constexpr (F::ONE_PIECE) {
            end_part(sum, below, most);
        } else if constexpr (F::PREFILL) {
#pragma unroll
            for (int i = 0; i < 2; i++) end_prefill_row(i, sum[i], below[i], most[i]);
        } else {
#pragma unroll 1
            for (int i = 0; i < 2; i++) end_row(i, i ? sum[1] : sum[0], i ? below[1] : below[0]);
        }
        __syncwarp();
    }

    DEVICE int begin_piece(int i)
    {
        const Piece now = piece_of<F>(p, shared.list, i);
        if (lane() == 0) piece() = now;
        __syncwarp();
        return blocks_of(now);
    }

    /* Votes: as in Scores. The queries of the next piece go to L2 some blocks before the end of a piece, and to shared memory
     * beside the scores of its last block: the product before that is not kept. */
    DEVICE void run_pieces()
    {
        uint32_t count = 0, pieces = 1 /* whose queries have been asked for */, half = (uint32_t)side();
        if constexpr (F::PREFILL && !F::ONE_PIECE)
            load_all_queries<F>(p, request_of<F>(p, shared.list, shared.list.first), shared, base);
        else
            load_first_queries<F>(p, request_of<F>(p, shared.list, shared.list.first), shared, base);
        if constexpr (F::ONE_PIECE) begin_to_meet(); /* while the first keys are on their way */
#pragma unroll
        for (int i = 0; i < 128; i++) o[i] = 0.0f;
        for (int i = shared.list.first; F::ONE_PIECE ? pieces == 1 : __any_sync(~0u, i <= shared.list.last);
             i += shared.list.step) {
            const bool more = shared.list.last - i >= shared.list.step;
            const int blocks = begin_piece(i);
            for (int k = 0; __any_sync(~0u, k < blocks); k++) {
                if (!F::ONE_PIECE && __any_sync(~0u, more && k == max(0, blocks - PREFETCH_BLOCKS)))
                    prefetch_queries<F>(p, request_of<F>(p, shared.list, i + shared.list.step));
                if (!F::ONE_PIECE && __any_sync(~0u, more && k == blocks - 1))
                    load_queries<F>(
                        p, [&] { return request_of<F>(p, shared.list, i + shared.list.step); }, shared, base,
                        pieces);
                add_block(count, half, k == 0, k + 2 < blocks);
                count++, half += 2;
                if (half >= HALVES) half -= HALVES;
            }
            end_piece((pieces & 1) ^ 1);
            pieces++;
        }
    }

    DEVICE void begin_to_meet() const
    {
        if (fresh_thread() == WARPGROUP_THREADS) begin_meeting(p, shared.list.request);
        __syncwarp();
    }

    /* A block of threads without a part takes its share of the join all the same. */
    DEVICE void run()
    {
        if (__any_sync(~0u, shared.list.first <= shared.list.last))
            run_pieces();
        else if (F::ONE_PIECE)
            begin_to_meet();
        if constexpr (F::ONE_PIECE) {
            const HeadShare<true, F::PREFILL> share(p, shared.list, HEADS);
            join_together<Bf16, MOST_PARTS_TOGETHER / SHARE_WARPS>(
                share, meeting_of(p, Place(p), share.request), base, WARPGROUP_THREADS, SUMS_BARRIER);
        }
    }
};
