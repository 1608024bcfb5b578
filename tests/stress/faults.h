/* SPDX-License-Identifier: MIT
 *
 * Defects that a kernel could have, planted beside its calls: stress must see each, and name the call.
 */
#ifndef STRESS_FAULTS_H
#define STRESS_FAULTS_H

#include "../checkattn/checkattn.h"
#include "../checkattn/device.h"
#include "draw.h"

struct fault_kind {
    const char *name;
    void (*after)(const struct device_blocks *blocks, const fmla_tensor *out, const fmla_tensor *input,
                  struct device_scratch *workspace);
    void (*refused)(const struct device_blocks *blocks, const fmla_tensor *out);
    enum defect defect; /* of checkattn's own */
    int only;           /* 1 + the operation that can have it; 0: all are drawn */
};

/* NULL: no fault has that name. */
const struct fault_kind *fault_of(const char *name);

/* Runs `program` once for each; 1 if one went unseen. */
int faults_check(const char *program, uint64_t seed);

#endif
