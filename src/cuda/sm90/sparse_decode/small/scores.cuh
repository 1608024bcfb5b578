/* SPDX-License-Identifier: MIT
 *
 * The scores and the softmax of a block. A warp converts raw keys to fp16 or bf16 in registers, computes
 * S = K Qᵀ from there for its 16 keys and its half of the columns, and stores V to shared memory.
 */
#pragma once

#include "../../../device/reference.cuh"
#include "layout.cuh"
#include "producer.cuh"

namespace sparse_decode::small {

/* ---- Scores ---------------------------------------------------------------------------------- */

/* Multiplies two steps of 16 columns, whose B comes from 16 bytes of a head. y: of both keys. */
template <typename Element> DEVICE void multiply_steps(float (&s)[2][4], const uint4 (&y)[2], uint32_t q)
{
    const uint32_t a[2][4] = {{y[0].x, y[1].x, y[0].y, y[1].y}, {y[0].z, y[1].z, y[0].w, y[1].w}};
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint4 b = load_shared_16(q + (uint32_t)j * 8 * LINE_BYTES);
        mma_16816<Element>(s[j], a[0], b.x, b.y);
        mma_16816<Element>(s[j], a[1], b.z, b.w);
    }
}

/* Stores 16 neighbours, or the rope's 8, of both keys to V. */
DEVICE void store_values(uint32_t to, const uint4 (&y)[2])
{
    store_shared_16(to, y[0]), store_shared_16(to + 8 * LINE_BYTES, y[1]);
}

template <typename F, typename Element>
DEVICE void score_block(SmallKeys<F> &keys, float (&s)[2][4], uint32_t smem)
{
    const uint32_t of_half = (uint32_t)(HALF_CHUNKS * side()),
                   of_group = (uint32_t)key_group() * 16 * LINE_BYTES;
    uint32_t q = SHARED_AT(smem, q) + of_half * Q_TILE_BYTES + own_line(),
             v = SHARED_AT(smem, v) + of_half * V_TILE_BYTES + of_group + own_line();
#pragma unroll
    for (int i = 0; i < 8; i++) s[i / 4][i % 4] = 0.0f;
    uint4 y[2];
    if constexpr (F::HAS_ROPE) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 &x = keys.rope[i];
            y[i] = make_uint4(convert_bf16x2<Element>(x.x), convert_bf16x2<Element>(x.y),
                              convert_bf16x2<Element>(x.z), convert_bf16x2<Element>(x.w));
        }
        multiply_steps<Element>(s, y, SHARED_AT(smem, q[F::HAS_ROPE ? F::ROPE_TILE : 0]) + own_rope());
    }
    if (F::ROPE_IS_V) store_values(SHARED_AT(smem, v[V_TILES - 1]) + of_group + own_rope(), y);
    const int chunks = min((int)HALF_CHUNKS, F::CODE_CHUNKS - HALF_CHUNKS * side());
#pragma unroll 1
    for (int c = 0; __any_sync(~0u, c < chunks); c++) {
        keys.expand_now();
#pragma unroll
        for (int part = 0; part < 2; part++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const auto by = keys.template scale_now<Element>(i);
                const uint4 &x = keys.code[0][i];
                convert_codes(part ? x.z : x.x, by, y[i].x, y[i].y);
                convert_codes(part ? x.w : x.y, by, y[i].z, y[i].w);
            }
            store_values(v ^ (uint32_t)(part * CHUNK_BYTES), y);
            multiply_steps<Element>(s, y, q ^ (uint32_t)(part * CHUNK_BYTES));
        }
        keys.advance(c);
        q += Q_TILE_BYTES, v += V_TILE_BYTES;
    }
}

/* Stores the scores; those of entries that name no key become -inf. */
template <typename F>
DEVICE void store_scores(Shared &shared, const SmallKeys<F> &keys, const float (&s)[2][4])
{
    float *to = &shared.s[side()][2 * (lane() % 4)][16 * key_group() + lane() / 4];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            to[(8 * j + e % 2) * SCORE_LINE + 8 * (e / 2)] = keys.valid[e / 2] ? s[j][e] : -INFINITY;
}

/* ---- Softmax --------------------------------------------------------------------------------- */

/* A warp has two heads, and a lane four keys of one of them. */
struct SmallSoftmax : SmallPhase {
    using SmallPhase::SmallPhase;
    float sum,
        below; /* sum: of the lane's keys; below: minus the head's reference, to which weights are relative */

    static DEVICE int head() { return 2 * warp() + lane() / 16; }
    static DEVICE int column() { return lane() % 16; }

    DEVICE void begin() { sum = 0.0f, below = -LEAST_REFERENCE; }

    DEVICE void block(uint32_t smem, bool bf16)
    {
        const float4 a = *(const float4 *)&shared.s[0][head()][4 * column()],
                     b = *(const float4 *)&shared.s[1][head()][4 * column()];
        const float x[4] = {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
        float most = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) * p.scale_log2;
#pragma unroll
        for (int lanes = 1; lanes < 16; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
        const float to = fminf(-most, below), factor = exp2_approx(to - below);
        below = to;
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = exp2_approx(fmaf(x[i], p.scale_log2, to));
        sum = fmaf(sum, factor, (w[0] + w[1]) + (w[2] + w[3]));
        if (column() == 0) shared.factor[head()] = factor;
        const uint2 words = bf16 ? make_uint2(Bf16::pack(w[0], w[1]), Bf16::pack(w[2], w[3]))
                                 : make_uint2(Fp16::pack(w[0], w[1]), Fp16::pack(w[2], w[3]));
        const uint32_t to_p = SHARED_AT(smem, p) + swizzle_128((uint32_t)head(), (uint32_t)column() / 2) +
                              8 * ((uint32_t)column() % 2);
        store_shared_4(to_p, words.x), store_shared_4(to_p + 4, words.y);
    }

    /* Stores the head's lse or part_end, and the final factor of O; called after the last block. */
    DEVICE void end()
    {
#pragma unroll
        for (int lanes = 1; lanes < 16; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
        const CtaCoord cta(p);
        const int row = cta.tile * SMALL_HEADS + head();
        if (column() != 0 || row >= p.h_q) return;
        float factor = 1.0f / sum;
        if (shared.split.part == DIRECT) {
            const float lse = score_lse(-below, sum);
            store_lse(p.output, shared.split.request, {cta.token, row}, lse);
            factor *= result_sink_factor(p.output.rules, row, lse);
        } else {
            const int64_t part_row =
                shared.split.part * ((int64_t)p.h_q * p.s_q) + (int64_t)cta.token * p.h_q + row;
            p.split.part_ends[part_row] = {-below, sum};
        }
        shared.last_factor[head()] = sum == 0.0f ? -1.0f : factor;
    }
};

} // namespace sparse_decode::small
