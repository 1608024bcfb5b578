/* SPDX-License-Identifier: MIT
 *
 * Draws a call: an operation, the forced kernel, and values of the axes of checkattn's cases, of any size
 * and not from a grid. Plants defects that a kernel could have around calls: stress must detect each and
 * name the call.
 */
#ifndef STRESS_H
#define STRESS_H

#include "../checkattn/case.h"

/* Draws a case for kernels that take `types`. A case for a GPU avoids behaviour that is unspecified there. */
void draw_case(struct random_state *random, enum operation operation, int32_t types, bool gpu,
               int64_t v[GRID_AXES]);

struct fault_kind {
    const char *name;
    struct device_stress hooks;
    enum defect defect; /* one of checkattn's defects */
    int only;           /* 1 + the only operation that can have it; 0: any operation */
};

/* Returns the fault of that name; NULL: none. */
const struct fault_kind *fault_of(const char *name);

/* Runs `program` once for each fault; returns 1 if one was not detected. */
int faults_check(const char *program, uint64_t seed);

#endif
