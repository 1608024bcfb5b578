/* SPDX-License-Identifier: MIT
 *
 * The end of a split: stores the sums of a warpgroup with values, half of the columns and 64 a warp, to `out`
 * or to the split's part.
 */
#pragma once

#include "../../device/half_rows.cuh"
#include "../../device/result.cuh"
#include "../../device/shared.cuh"
#include "layout.cuh"

namespace dense_decode_fp8 {

enum { GROUPS = 4 /* of 16 columns, of a warp */ };

/* Stores the sums that Mainloop, which is derived from it, has made. `p_stage`: of the last block's
 * weights. */
template <typename V> struct Epilogue {
    using Shared = SharedOf<V>;
    using Sums = float[GROUPS][V::ROWS / 2];
    const struct dense_decode_fp8_params &p;
    Shared &shared;
    const uint32_t smem;
    const int side;

    DEVICE Epilogue(const struct dense_decode_fp8_params &params, Shared &memory, int which)
        : p(params), shared(memory), smem(shared_address(&memory)), side(which)
    {
    }

    /* Computed again each time: the sums take nearly all registers. */
    DEVICE static int lane() { return (int)(fresh_thread() % 32); }
    /* Returns which 64 of the 512 columns the warp has. */
    DEVICE int column_tile() const { return 4 * side + (int)(fresh_thread() / 32 % 4); }

    /* The task of the current split, in shared memory; every warp has its own copy. */
    DEVICE Task &task() const { return shared.task[4 + column_tile()]; }

    /* Over FP8_656 sums may have any magnitude: 64 of a row, from element e on, are multiplied by a power
     * of two of their own, which is stored. `row`: the lane's first. Returns the factors of the lane's two
     * rows. */
    DEVICE float2 scale_for_part(const Sums &o, int e, float2 factor, int row)
    {
        float most[2] = {0.0f, 0.0f};
        const float by[2] = {factor.x, factor.y};
        float scaled[2];
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int m = 0; m < GROUPS; m++)
                most[j] = fmaxf(most[j], fmaxf(fabsf(o[m][e + j]), fabsf(o[m][e + 2 + j])));
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2)
#pragma unroll
            for (int j = 0; j < 2; j++) most[j] = fmaxf(most[j], __shfl_xor_sync(~0u, most[j], lanes));
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const HalfScale scale(most[j] * by[j]);
            scaled[j] = by[j] * scale.up;
            if (lane() / 4 == 0 && row + j < p.dense.call.rows)
                half_row_scales(p.dense.call.split, part_row(p.dense.call, task(), row + j))[column_tile()] =
                    scale.down;
        }
        return make_float2(scaled[0], scaled[1]);
    }

    /* Stages rows of the tile from `first` on in the warp's lines of shared memory. Their sums are the
     * first of the lane's. */
    DEVICE void stage_rows(const Sums &o, int p_stage, int first, uint32_t out, bool direct)
    {
        const int row = first + 2 * (lane() % 4);
        const uint32_t at = out + (uint32_t)(2 * (lane() % 4) * OUT_LINE_BYTES + lane() / 4 * 4);
#pragma unroll
        for (int i = 0; i < V::OUT_ROWS / 8; i++) {
            float2 factor = *(const float2 *)&shared.finish[p_stage][row + 8 * i];
            if (V::SCALED && !direct)
                factor = scale_for_part(o, 4 * i, factor, task().first_row + row + 8 * i);
#pragma unroll
            for (int m = 0; m < GROUPS; m++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float by = j ? factor.y : factor.x, even = o[m][4 * i + j] * by,
                                odd = o[m][4 * i + 2 + j] * by;
                    store_shared_4(at + (uint32_t)((8 * i + j) * OUT_LINE_BYTES + 32 * m),
                                   direct ? Bf16::pack(even, odd) : Fp16::pack(even, odd));
                }
        }
    }

    /* Stores the staged rows: eight lanes write 128 bytes of a row. */
    DEVICE void store_staged(int first, uint32_t out, bool direct)
    {
        const struct dense_decode_params &call = p.dense.call;
        const Task &task = this->task();
        const float unit = (call.kv_scale ? __ldg(call.kv_scale) : 1.0f) / PART_UNIT;
#pragma unroll(V::LONG ? 1 : V::OUT_ROWS / 4)
        for (int i = 0; i < V::OUT_ROWS / 4; i++) {
            const int line = lane() / 8 + 4 * i, row = task.first_row + first + line;
            const uint4 chunk =
                load_shared_16(out + (uint32_t)(line * OUT_LINE_BYTES + lane() % 8 * CHUNK_BYTES));
            uint16_t *const to =
                direct ? call.output.out + out_offset(call.output, task.split.request,
                                                      row_coord(call, min(row, call.rows - 1), task.kv_head))
                       : half_row(call.split, part_row(call, task, row));
            store_global_16(to + HALF_ROW_TILE * column_tile() + 8 * (lane() % 8), chunk, row < call.rows);
            if (!V::SCALED && !direct && lane() % 8 == 0 && row < call.rows)
                half_row_scales(call.split, part_row(call, task, row))[column_tile()] = unit;
        }
    }

    /* Stores the sums of a split. The loop is not unrolled, since it runs once per split: the sums of
     * further rows move down to the first registers. */
    DEVICE void store(Sums &o, int p_stage)
    {
        const bool direct = __any_sync(~0u, task().split.part == DIRECT);
        const uint32_t out = shared_address(shared.out[side][column_tile() % 4]);
#pragma unroll 1
        for (int first = 0; first < V::ROWS; first += V::OUT_ROWS) {
            stage_rows(o, p_stage, first, out, direct);
            __syncwarp();
            store_staged(first, out, direct);
            __syncwarp();
#pragma unroll
            for (int m = 0; m < GROUPS; m++)
#pragma unroll
                for (int i = 0; i + V::OUT_ROWS / 2 < V::ROWS / 2; i++) o[m][i] = o[m][i + V::OUT_ROWS / 2];
        }
    }
};

} // namespace dense_decode_fp8
