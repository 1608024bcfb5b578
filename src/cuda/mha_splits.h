/* SPDX-License-Identifier: MIT
 *
 * Into how many splits the keys of dense MHA's tiles are cut, where the tiles alone would leave SMs idle. C and
 * CUDA: the host decides for requests of one shape, or for a whole batch; the kernel for a ragged request by its
 * own lengths.
 */
#ifndef FMLA_CUDA_MHA_SPLITS_H
#define FMLA_CUDA_MHA_SPLITS_H

#include "../plan.h"

enum {
    MHA_MOST_SPLITS = 64,           /* a lane of the join's warps has the weights of two parts */
    MHA_MOST_INVARIANT_SPLITS = 16, /* of a request by itself: its parts need memory beside those of others */
    MHA_MOST_PART_ROWS_OF_REQUEST = 1 << 24, /* rows times splits; a request of more is not split */
    MHA_MOST_PART_ROWS = 1 << 30,
    MHA_WAVES_OF_SPLITS = 2, /* splits that a request has at most, over the SMs */
    MHA_WAVES_OF_PARTS = 8,  /* the same of all requests that are split by the batch */
    MHA_LEAST_BLOCKS = 4,    /* of a split */
    MHA_SHORT_SPLITS = 16,   /* by the batch up to so many splits may have a block each */
    MHA_BLOCKS_OF_FILL = 4,  /* the time of a split beside its blocks: the first loads, the epilogue */
    MHA_BLOCKS_OF_JOIN = 5   /* the time of the join */
};

enum { MHA_LARGEST_DIVIDED = 1 << 20 };

/* Returns a / b for small numbers, a below 2^21. a + 0.5 is at least 0.5 / b away from every multiple of b, which is
 * more than any rounding: the quotient is exact, also by an approximate reciprocal, which takes a few instructions
 * where a division of integers takes many. */
PLAN_FN int32_t mha_div(int32_t a, int32_t b)
{
    const float n = (float)a + 0.5f;
#if defined(__CUDA_ARCH__)
    return (int32_t)__fdividef(n, (float)b);
#else
    return (int32_t)(n / (float)b);
#endif
}

/* Returns a / b, rounded up; a counts as at most MHA_LARGEST_DIVIDED. b is at most as large. */
PLAN_FN int32_t mha_ceil_div(int32_t a, int32_t b)
{
    return mha_div((a < MHA_LARGEST_DIVIDED ? a : MHA_LARGEST_DIVIDED) + b - 1, b);
}

/* Returns the tiles of `rows` rows of a request alone: of one head each, or of all that share a key head, whichever are
 * fewer. A request's splits follow from them, however the batch's tiles are made. */
PLAN_FN int32_t mha_tiles_alone(int32_t tokens, int32_t rows, int32_t h_kv, int32_t group)
{
    const int32_t packed_tokens = mha_div(rows, group),
                  packed = packed_tokens ? mha_ceil_div(tokens, packed_tokens) : tokens;
    const int32_t apart = mha_ceil_div(tokens, rows) * group;
    return (packed < apart ? packed : apart) * h_kv;
}

/* Returns the splits, at most `most`, of each of `tiles` tiles of `blocks` key blocks that take the least time on
 * `sms` SMs: that of the SM with most splits, and of the join. Of the numbers that take one wave of the SMs the
 * largest is the best, and so of those that take two; of numbers whose splits have as many blocks, the least.
 * of_batch: the tiles are all of the batch, not of a request beside which others may run. */
PLAN_FN int32_t mha_splits(int32_t tiles, int32_t blocks, int32_t sms, int32_t most, bool of_batch)
{
    if (tiles > MHA_WAVES_OF_SPLITS * sms) return 1;
    int32_t best = 1, least = mha_ceil_div(tiles, sms) * (blocks + MHA_BLOCKS_OF_FILL);
    const int32_t few = blocks < MHA_SHORT_SPLITS ? blocks : MHA_SHORT_SPLITS, brief = of_batch ? few : 0,
                  usual = blocks / MHA_LEAST_BLOCKS, sensible = brief > usual ? brief : usual;
    if (sensible < most) most = sensible;
    for (int32_t waves = 1; waves <= MHA_WAVES_OF_SPLITS; waves++) {
        const int32_t room = mha_div(waves * sms, tiles), at_most = room < most ? room : most;
        if (at_most < 2) continue;
        const int32_t of_split = mha_ceil_div(blocks, at_most), n = mha_ceil_div(blocks, of_split),
                      time =
                          mha_ceil_div(tiles * n, sms) * (of_split + MHA_BLOCKS_OF_FILL) + MHA_BLOCKS_OF_JOIN;
        if (time < least) least = time, best = n;
    }
    return best;
}

#endif
