/* SPDX-License-Identifier: MIT
 *
 * The end of a split: the warpgroups of the sums store rows to `out`, or to the split's part. A thread has,
 * in its two rows, 16 neighbouring columns of every 64 (layout.cuh).
 */
#pragma once

#include "../../device/half_rows.cuh"
#include "../../device/quad.cuh"
#include "layout.cuh"
#include "scheduler.cuh"

namespace sparse_decode {

/* Stores the sums `o` that Mainloop, which is derived from it, has made. */
template <typename F> struct Epilogue {
    const struct sparse_decode_params &p;
    Shared &shared;
    const uint32_t smem;

    DEVICE Epilogue(const struct sparse_decode_params &params, Shared &memory)
        : p(params), shared(memory), smem(shared_address(&memory))
    {
    }

    /* The current split, in shared memory; every warp has its own copy. */
    DEVICE Split &split() const { return shared.split[fresh_thread() / 32 - 4]; }

    /* Takes the thread's 16 columns of tile c of the side, in one of its two rows. */
    static DEVICE void take_row(float (&x)[16], const float (&o)[128], int c, bool second)
    {
#pragma unroll
        for (int e = 0; e < 16; e++) {
            const int at = 32 * c + 4 * (e / 2) + e % 2;
            x[e] = second ? o[at + 2] : o[at];
        }
    }

    static DEVICE void clear_row(float (&o)[128], int i, bool clears)
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
        bool valid[2];
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
        if (lines.valid[0]) *(uint4 *)(lines.to[0] + at) = low;
        if (lines.valid[1]) *(uint4 *)(lines.to[1] + at) = high;
    }

    /* ---- Rows of `out` and of parts: decode has one copy of the code for both and for both rows, since a
     * call executes it once ---- */

    /* Stores a row to `out`, or, scaled, to a part. `scales`: the side's, of a part's row; NULL otherwise,
     * and for rows past the last head. `empty`: the row saw no key, and is 0 whatever weights of 0 made of
     * V. */
    static DEVICE void store_row(const float (&o)[128], const LinePair &lines, bool to_part, float *scales,
                                 bool second, float factor, bool empty)
    {
        float tile_scale = 0.0f; /* scale of the lane's tile of four */
#pragma unroll
        for (int c = 0; c < HALF_TILES; c++) {
            float x[16];
            uint32_t words[8];
            take_row(x, o, c, second);
            if (!F::PREFILL && __any_sync(~0u, to_part)) {
                const HalfScale scale(quad_magnitude(x) * factor);
                const float by = factor * scale.up;
                if (lane() % 4 == c) tile_scale = scale.down;
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
        if (scales) scales[lane() % 4] = tile_scale;
    }

    /* Returns the value of row i. It is read only when the row is stored, since O leaves few registers. */
    DEVICE float of_row(const float (&of)[HEADS], int i) const
    {
        return __uint_as_float(load_shared_4(shared_address(&of[row() + 8 * i])));
    }

    /* Stores row i; called by all lanes, also those past the last head. */
    DEVICE void end_row(const float (&o)[128], int i) const
    {
        const float sum = of_row(shared.sum, i), below = of_row(shared.below, i);
        const CtaCoord cta(p);
        const int asked = cta.tile * HEADS + row() + 8 * i, head = min(asked, p.h_q - 1);
        const int first = asked & ~1, rows = p.h_q - first; /* of two rows that are stored together */
        const int column = side() * (D_V / 2), request = split().request;
        const int64_t part = split().part;
        const bool stores_end = asked < p.h_q && side() == 0 && lane() % 4 == 0;
        const bool empty = sum == 0.0f;
        float factor = empty ? 0.0f : reciprocal_approx(sum);
        float *scales = NULL;
        uint16_t *to;
        int64_t row_elements;
        const bool direct = F::PREFILL || __any_sync(~0u, part == DIRECT);
        if (direct) {
            const float lse = score_lse(-below, sum);
            if (stores_end) store_lse(p.output, request, {cta.token, head}, lse);
            if (F::PREFILL && stores_end) store_largest(p, request, head, of_row(shared.largest, i));
            to = p.output.out + out_offset(p.output, request, {cta.token, first});
            row_elements = p.output.out_stride[2];
            factor *= result_sink_factor(p.output.rules, head, lse);
        } else {
            const int64_t first_row = part * ((int64_t)p.h_q * p.s_q) + (int64_t)cta.token * p.h_q;
            if (stores_end) p.split.part_ends[first_row + head] = {-below, sum};
            if (asked < p.h_q) scales = half_row_scales(p.split, first_row + head) + column / HALF_ROW_TILE;
            to = half_row(p.split, first_row + first);
            row_elements = 2 * D_V;
        }
        store_row(o, line_pair(to + column, row_elements, rows), !direct, scales, i == 1, factor, empty);
    }

    /* ---- Rows of a part that the CTAs join themselves ---------------------------------------------- */

    /* Returns the row of the split's part for a head; if CTAs join, there are fewer than 2^31 rows. */
    DEVICE int part_row(int head) const
    {
        return ((int)split().part * p.s_q + CtaCoord(p).token) * p.h_q + head;
    }

    /* Stores both rows to the split's part, by one copy of the code, since a call executes it once. A row
     * that saw no key is 0 whatever weights of 0 made of V. `most`: the largest scores, for prefill. */
    DEVICE void end_part(float (&o)[128], const float (&sum)[2], const float (&below)[2],
                         const float (&most)[2])
    {
        const int first = CtaCoord(p).tile * HEADS + row();
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool empty = sum[i] == 0.0f;
            if (SELDOM(__any_sync(~0u, empty))) clear_row(o, i, empty);
            if (first + 8 * i < p.h_q && side() == 0 && lane() % 4 == 0) {
                part_end end = {-below[i], sum[i]};
                if constexpr (F::PREFILL) end = end_above(end, most[i]);
                p.split.part_ends[part_row(first + 8 * i)] = end;
            }
            factor[i] = empty ? 0.0f : reciprocal_approx(sum[i]);
        }
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            const int head = first + 8 * i, column = side() * (D_V / 2);
            const bool stores = head < p.h_q;
            const int at = part_row(head);
            uint16_t *const to = half_row(p.split, at) + column + CHUNK_ELEMENTS * (lane() % 4);
            float scale[HALF_TILES];
#pragma unroll
            for (int c = 0; c < HALF_TILES; c++) {
                float x[16];
                take_row(x, o, c, i == 1);
                scale[c] = store_half_tile(to + HALF_ROW_TILE * c, x, i ? factor[1] : factor[0], stores);
            }
            if (stores && lane() % 4 == 0)
                *(float4 *)(half_row_scales(p.split, at) + column / HALF_ROW_TILE) =
                    make_float4(scale[0], scale[1], scale[2], scale[3]);
        }
    }

    DEVICE void end_split(float (&o)[128], uint32_t parity)
    {
        mbarrier_wait(SHARED_AT(smem, sum_full), parity);
        if constexpr (F::ONE_SPLIT) {
            float sum[2], below[2], most[2];
#pragma unroll
            for (int i = 0; i < 2; i++)
                sum[i] = shared.sum[row() + 8 * i], below[i] = shared.below[row() + 8 * i],
                most[i] = F::PREFILL ? shared.largest[row() + 8 * i] : 0.0f;
            __syncwarp();
            end_part(o, sum, below, most);
        } else {
            if constexpr (F::PREFILL) {
                end_row(o, 0), end_row(o, 1);
            } else {
#pragma unroll 1
                for (int i = 0; i < 2; i++) end_row(o, i);
            }
            __syncwarp();
            if (lane() == 0) mbarrier_arrive(SHARED_AT(smem, sum_empty));
        }
        __syncwarp();
    }
};

} // namespace sparse_decode
