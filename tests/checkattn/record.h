/* SPDX-License-Identifier: MIT
 *
 * The processes of a run on a GPU, and what it leaves in bench/results/<gpu>/checkattn.json.
 */
#ifndef CHECKATTN_RECORD_H
#define CHECKATTN_RECORD_H

#include "checkattn.h"
#include "gpu.h"

/* A GPU kernel under test has a process of its own: this program, started anew for one kernel. */
struct child_report {
    struct tally tally;
    double seconds;
};

/* Runs the check of one kernel; its lines go to this process's output. True if it passed. `why` is set if it ended
 * otherwise than by telling. */
bool child_run(const struct run *like, const char *operation, const char *kernel, fmla_device device,
               struct child_report *told, char *why, size_t size);

/* In the child: what it found, for the parent. */
void child_tell(int fd, const struct child_report *told);

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
