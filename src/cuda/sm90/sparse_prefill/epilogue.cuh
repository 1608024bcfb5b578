/* SPDX-License-Identifier: MIT
 *
 * Epilogue: writes the rows of a tile to `out`, lse and max_logits.
 */
#pragma once

#include "softmax.cuh"

#include "../../device/half_rows.cuh"
#include "../../device/part.cuh"
#include "../latent/epilogue.cuh"

namespace sparse_prefill {

/* Returns the lse of a finished row in base 2; -inf: it saw no key. `sum`: of its weights. */
DEVICE float row_lse(float reference, float sum)
{
    return sum == 0.0f ? -INFINITY : reference + log2_approx(sum);
}

/* Returns the row's largest score, which is `excess` above the reference. From the first key on the reference
 * is a key's score; if all scores are NaN it is still LEAST_REFERENCE. */
DEVICE float row_largest(float reference, float excess)
{
    return reference <= LEAST_REFERENCE ? -INFINITY : reference + excess;
}

/* Returns the factor that normalizes O, including the sink. */
DEVICE float row_factor(const struct sparse_prefill_params &p, int head, float lse, float sum)
{
    return sum == 0.0f ? 0.0f : result_sink_factor(p.rules, head, lse * LN_2) * reciprocal_approx(sum);
}

DEVICE void store_lse(const struct sparse_prefill_params &p, int token, int head, float lse)
{
    if (p.lse) p.lse[token * p.lse_stride + head] = result_lse(p.rules, lse * LN_2);
}

DEVICE void store_largest(const struct sparse_prefill_params &p, int token, int head, float largest)
{
    if (p.max_logits) p.max_logits[token * p.max_stride + head] = largest * LN_2 * p.rules.lse_factor;
}

template <typename Tile> DEVICE Part *part_of(const struct sparse_prefill_sm90_params &p, const Tile &split)
{
    return (Part *)p.splits.parts + split.part;
}

/* Stages the warp's 16 rows of a unit's columns in shared memory, from the unit's line `lines` on. */
template <typename Element>
DEVICE void stage_rows(const float (&o)[64], const float (&factor)[2], uint32_t lines)
{
    const uint32_t lane = fresh_thread() % 32;
    const Scaled scaled = {factor};
    stage_group<Element, 0>(o, scaled, 0, lines, lane);
    stage_group<Element, 32>(o, scaled, 0, lines + TILE_BYTES, lane);
}

/* Stages 64 columns of these rows in the format of a part. `scales`: Part::scale of the thread's first row
 * and these columns. */
template <int FIRST>
DEVICE void stage_half_group(const float (&o)[64], const float (&factor)[2], float *scales, uint32_t lines)
{
    float up[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float most = 0.0f;
#pragma unroll
        for (int e = FIRST + 2 * i; e < FIRST + 32; e += 4)
            most = fmaxf(most, fmaxf(fabsf(o[e]), fabsf(o[e + 1])));
        const HalfScale scale(quad_max(most) * factor[i]);
        up[i] = factor[i] * scale.up;
        if (fresh_thread() % 4 == 0) scales[8 * i * GROUPS] = scale.down;
    }
    stage_group<Fp16, FIRST>(o, Scaled{up}, 0, lines, fresh_thread() % 32);
}

/* Writes the part of a split without keys. */
DEVICE void store_empty_part(Part *part)
{
    const int thread = (int)(fresh_thread() - WARPGROUP_THREADS);
    if (thread < ROWS) part->end[thread] = {-INFINITY, 0.0f};
}

/* Writes the results of a tile without keys; called by the threads of both sides. */
template <typename Tile> DEVICE void store_empty(const struct sparse_prefill_params &p, const Tile &tile)
{
    enum { CHUNKS = D_V / CHUNK_ELEMENTS };
    const int thread = (int)(fresh_thread() - WARPGROUP_THREADS);
    const int first = tile.head_tile * ROWS, heads = min((int)ROWS, p.h_q - first);
    if (thread < heads) {
        store_lse(p, tile.token, first + thread, -INFINITY);
        store_largest(p, tile.token, first + thread, -INFINITY);
    }
#pragma unroll 1
    for (int i = thread; i < heads * CHUNKS; i += 2 * WARPGROUP_THREADS) {
        uint16_t *to = p.out + tile.token * p.out_stride[0] + (first + i / CHUNKS) * p.out_stride[1];
        ((uint4 *)to)[i % CHUNKS] = make_uint4(0, 0, 0, 0);
    }
}

} // namespace sparse_prefill
