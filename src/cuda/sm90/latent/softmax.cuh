/* SPDX-License-Identifier: MIT
 *
 * From scores to probabilities on one side: a thread has the scores of two rows of the tile, row and row +
 * 8, in the D fragment of wgmma; four neighbouring lanes share these rows.
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/quad.cuh"
#include "../../device/reference.cuh"
#include "../../device/result.cuh"
#include "../../device/shared.cuh"
#include "../../device/wgmma.cuh"

namespace latent {

DEVICE void rescale(float (&o)[64], const float factor[2])
{
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] *= factor[i / 2 % 2];
}

/* Returns the maximum of this thread's scores of either row, computed in four chains each. */
DEVICE void row_maxima(const float (&s)[32], float (&most)[2])
{
    float m[8];
#pragma unroll
    for (int e = 0; e < 32; e++) m[e % 8] = e < 8 ? s[e] : fmaxf(m[e % 8], s[e]);
    most[0] = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[4], m[5]));
    most[1] = fmaxf(fmaxf(m[2], m[3]), fmaxf(m[6], m[7]));
}

/* Returns the address of a lane's row in its side's P. `warp`: index in the side. */
DEVICE uint32_t weights_line(uint32_t p, int warp, int lane)
{
    return p + (uint32_t)(16 * warp + ldmatrix_tile_row(lane)) * LINE_BYTES;
}

/* Stores the fragment of keys 16 k … 16 k + 15 to the row's line. */
DEVICE void store_weights(uint32_t line, int k, uint32_t lane, const uint32_t (&a)[4])
{
    store_matrices(line + (((2 * (uint32_t)k + lane / 16) ^ (lane % 8)) * CHUNK_BYTES), a);
}

} // namespace latent
