/* SPDX-License-Identifier: MIT
 *
 * The portable dense MHA forward on tensor cores, host side: which problems it takes, its tile shape on a device, and
 * how the keys of tiles are split.
 */
#ifndef FMLA_SM80_MHA_FORWARD_CHOICE_H
#define FMLA_SM80_MHA_FORWARD_CHOICE_H

#include "../../device.h"
#include "../../mha_tiles.h"

/* Returns NULL if the kernel takes the problem; else states its condition and sets `argument` to the argument
 * that violates it. */
const char *sm80_mha_forward_refuses(const struct attention_problem *problem, const char **argument);

/* The kernel's shape on a device, a row of shape.h. */
struct sm80_mha_shape {
    int32_t d_qk, d_v, keys, ctas, bytes; /* keys of a block; CTAs an SM; shared memory of one */
    int variant;                          /* enum mha_sm80_shape */
};

/* Returns the widest shape of which as many CTAs as it says fit an SM, including the memory that the system reserves
 * per CTA; NULL if there is none of these head sizes. Of a small one every GPU has room for one. */
const struct sm80_mha_shape *sm80_mha_forward_shape(const struct attention_problem *problem,
                                                    const struct cuda_device *device);

/* Returns what it splits for; zeros if there is no shape. */
struct mha_tiling sm80_mha_forward_tiling(const struct attention_problem *problem,
                                          const struct cuda_device *device);

/* Returns the splits for this tiling; of requests of one shape their number, which the kernel does not compute. */
struct mha_splitting sm80_mha_forward_splitting(const struct attention_problem *problem,
                                                const struct mha_tiling *tiling);

#endif
