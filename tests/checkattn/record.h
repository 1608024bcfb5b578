/* SPDX-License-Identifier: MIT
 *
 * What a run on a GPU leaves in bench/results/<gpu>/checkattn.json.
 */
#ifndef CHECKATTN_RECORD_H
#define CHECKATTN_RECORD_H

#include "child.h"
#include "gpu.h"

enum { RECORDED = 64 };

struct record {
    struct gpu_description gpu;
    bool complete; /* every kernel, over its whole grid */
    int count;
    struct {
        const char *operation, *kernel; /* static */
        struct child_report told;
        bool passed;
    } row[RECORDED];
};

void record_add(struct record *record, const char *operation, const char *kernel,
                const struct child_report *told, bool passed);

/* Writes it. Hashes of machine code come from kernels.sha256 in the folder of `program`, which scripts/kernel-hashes.sh
 * makes; without that file the list is empty, and a warning says so. False if no kernel was run or the file cannot be
 * written. */
bool record_write(const struct record *record, uint64_t seed, const char *program, const char *path);

#endif
