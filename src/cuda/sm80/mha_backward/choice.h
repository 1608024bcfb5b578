/* SPDX-License-Identifier: MIT
 *
 * The portable gradients of dense MHA on tensor cores, the host's part: which problems they take, and where the workspace has what.
 *
 * Workspace:  numbers of rows | sums of dQ | a counter | counters of tiles
 */
#ifndef FMLA_SM80_MHA_BACKWARD_CHOICE_H
#define FMLA_SM80_MHA_BACKWARD_CHOICE_H

#include "../../params.h"

#include "../../../problem.h"

/* NULL if they take the problem; else what they take, and which argument differs. */
const char *sm80_mha_backward_refuses(const struct backward_problem *p, const char **argument);

/* Numbers of tiles of rows, and of blocks of keys, of all requests: the most that they may use, whatever their lengths
 * (device/backward_requests.cuh). */
int64_t sm80_mha_backward_row_tiles(const struct backward_problem *p);
int64_t sm80_mha_backward_key_blocks(const struct backward_problem *p);

/* Key heads whose blocks of keys are taken together: as many as keep all SMs busy to the end, and as L2 holds. */
int32_t sm80_mha_backward_heads(const struct backward_problem *p, int32_t sms);

struct sm80_mha_backward_layout {
    size_t rows, dq_sums, taken, added; /* where they begin */
    size_t bytes;
};
struct sm80_mha_backward_layout sm80_mha_backward_layout(const struct backward_problem *p);

#endif
