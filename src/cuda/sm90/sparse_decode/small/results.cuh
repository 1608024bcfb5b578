/* SPDX-License-Identifier: MIT
 *
 * O of 16 heads and 64 columns a warp, += P V; rows to `out`, or to the piece's slot.
 */
#pragma once

#include "layout.cuh"

struct SmallSums {
    const struct sparse_decode_params &p;
    Shared &shared;
    float o[8][4]; /* of 8 columns each: C of mma */

    __device__ __forceinline__ SmallSums(const struct sparse_decode_params &params, Shared &memory)
        : p(params), shared(memory)
    {
    }

    __device__ __forceinline__ void begin()
    {
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[j][e] = 0.0f;
    }

    __device__ __forceinline__ void shrink()
    {
        const float factor[2] = {shared.factor[lane() / 4], shared.factor[lane() / 4 + 8]};
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[j][e] *= factor[e / 2];
    }

    template <typename Element> __device__ __forceinline__ void multiply(uint32_t base)
    {
        const uint32_t line = (uint32_t)ldmatrix_tile_row(lane()),
                       chunk = (uint32_t)ldmatrix_tile_chunk(lane());
        uint32_t v = SHARED_AT(base, v) + (uint32_t)warp() * V_TILE_BYTES + swizzle_128(line, chunk);
        const uint32_t weights = SHARED_AT(base, p) + swizzle_128(line, chunk);
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

    __device__ __forceinline__ void end_row(int i) const
    {
        const Place place(p);
        const int head = place.tile * SMALL_HEADS + lane() / 4 + 8 * i, column = LINE_ELEMENTS * warp(),
                  t = lane() % 4;
        if (head >= p.h_q) return;
        const float factor = shared.last_factor[lane() / 4 + 8 * i];
        float x[8][2];
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) x[j][e] = factor < 0.0f ? 0.0f : o[j][2 * i + e] * factor;
        if (shared.piece.slot == DIRECT) {
            uint16_t *to = p.output.out + out_offset(p.output, shared.piece.request, {place.token, head}) +
                           column + 2 * t;
#pragma unroll
            for (int j = 0; j < 8; j++) *(uint32_t *)(to + 8 * j) = Bf16::pack(x[j][0], x[j][1]);
        } else {
            const int64_t row =
                shared.piece.slot * ((int64_t)p.h_q * p.s_q) + (int64_t)place.token * p.h_q + head;
            float *to = p.split.slot_out + row * D_V + column + slot_position_of_lane(lane());
#pragma unroll
            for (int j = 0; j < 4; j++)
                *(float4 *)(to + 16 * j) =
                    make_float4(x[2 * j][0], x[2 * j][1], x[2 * j + 1][0], x[2 * j + 1][1]);
        }
    }

    __device__ __forceinline__ void end() const
    {
        end_row(0), end_row(1);
    }
};
