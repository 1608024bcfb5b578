/* SPDX-License-Identifier: MIT
 *
 * Softmax of a side. References are scaled scores in base 2. From a row's first key on its reference is some
 * key's score, so the largest score has to be sought only among scores above it.
 */
#pragma once

#include "layout.cuh"

#include "../latent/softmax.cuh"

namespace sparse_prefill {

/* Softmax state of a thread's two rows. */
struct RowState {
    float reference[2]; /* LEAST_REFERENCE before the row's first key */
    float sum[2];       /* over this thread's keys of the side's blocks */
    int excess[2];      /* float bits of the largest score minus the reference; 0 if not above it */
    int slack[2];       /* float bits: a score above the reference by more moves those of the warp's rows */
    bool special; /* some row of the warp saw no key yet, or its reference is beyond CAREFUL_REFERENCE */

    DEVICE void set_slack()
    {
#pragma unroll
        for (int i = 0; i < 2; i++) slack[i] = __float_as_int(slack_of(sum[i]));
    }
};

/* Moves the reference and rescales the sums that are relative to the old one. `first`: nothing was summed
 * yet. */
DEVICE void move_reference(RowState &state, const float (&to)[2], float (&left)[64], float (&right)[64],
                           bool first)
{
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        factor[i] = exp2_approx(state.reference[i] - to[i]);
        const float excess = __int_as_float(state.excess[i]) + (state.reference[i] - to[i]);
        state.excess[i] = __float_as_int(fmaxf(excess, 0.0f));
        state.reference[i] = to[i], state.sum[i] *= factor[i];
    }
    state.special = __any_sync(~0u, fmaxf(fabsf(to[0]), fabsf(to[1])) > CAREFUL_REFERENCE);
    if (!first) rescale(left, factor), rescale(right, factor);
}

/* Returns for each row the bits of its largest element, or 0 if none is above 0. Bits of positive floats are
 * ordered as integers, and three integers are compared at a time. */
DEVICE void positive_maxima(const float (&x)[32], int (&most)[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int m[2] = {0, 0};
#pragma unroll
        for (int e = 2 * i; e < 32; e += 4)
            m[e / 4 % 2] = __vimax3_s32(m[e / 4 % 2], __float_as_int(x[e]), __float_as_int(x[e + 1]));
        most[i] = max(m[0], m[1]);
    }
}

/* Computes P = 2^x in place for keys 16 k … 16 k + 15. */
DEVICE void exponentials(float (&x)[32], int k)
{
#pragma unroll
    for (int e = 8 * k; e < 8 * k + 8; e++) x[e] = exp2_approx(x[e]);
}

/* Adds the weights to the sum, keeps them as A fragments, and writes them to shared memory for the other
 * side. */
template <typename Element>
DEVICE void keep_weights(const float (&x)[32], uint32_t (&a)[4][4], int k, uint32_t p_line, RowState &state)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int e = 8 * k + 2 * j;
        state.sum[j % 2] += x[e] + x[e + 1];
        a[k][j] = Element::pack(x[e], x[e + 1]);
    }
    store_weights(p_line, k, threadIdx.x % 32, a[k]);
}

} // namespace sparse_prefill
