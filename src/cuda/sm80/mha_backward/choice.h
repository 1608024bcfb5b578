/* SPDX-License-Identifier: MIT
 *
 * The portable gradients of dense MHA on tensor cores, the host's part: which problems they take, and how they cut them.
 */
#ifndef FMLA_SM80_MHA_BACKWARD_CHOICE_H
#define FMLA_SM80_MHA_BACKWARD_CHOICE_H

#include "../../backward_tiles.h"

/* NULL if they take the problem; else what they take, and which argument differs. */
const char *sm80_mha_backward_refuses(const struct backward_problem *p, const char **argument);

struct backward_tiles sm80_mha_backward_tiles(void);

#endif
