/* SPDX-License-Identifier: MIT
 *
 * Defects that a kernel could have, planted around its calls: stress must detect each and name the call.
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
    enum defect defect; /* one of checkattn's defects */
    int only;           /* 1 + the only operation that can have it; 0: any operation */
};

/* Returns the fault of that name; NULL: none. */
const struct fault_kind *fault_of(const char *name);

/* Runs `program` once for each fault; returns 1 if one was not detected. */
int faults_check(const char *program, uint64_t seed);

#endif
