/* SPDX-License-Identifier: MIT
 *
 * The portable dense MHA backward on tensor cores, host side: which problems the kernels take, and their tile
 * sizes.
 */
#ifndef FMLA_SM80_MHA_BACKWARD_CHOICE_H
#define FMLA_SM80_MHA_BACKWARD_CHOICE_H

#include "../../backward_tiles.h"

/* Returns NULL if the kernels take the problem; else states their condition and sets `argument` to the
 * argument that violates it. */
const char *sm80_mha_backward_refuses(const struct backward_problem *p, const char **argument);

/* Returns the sizes of the row tiles, and of the blocks with the fewest keys, which are the most. */
struct backward_tiles sm80_mha_backward_tiles(const struct backward_problem *p);

/* Returns the keys of a block on a device with `sms` SMs and `shared_bytes` of shared memory per CTA. */
int32_t sm80_mha_backward_keys(const struct backward_problem *p, int32_t sms, int32_t shared_bytes);

#endif
