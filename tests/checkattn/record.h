/* SPDX-License-Identifier: MIT
 *
 * The child processes of a run on a GPU, and the record of the run in bench/results/<gpu>/checkattn.json.
 */
#ifndef CHECKATTN_RECORD_H
#define CHECKATTN_RECORD_H

#include "checkattn.h"
#include "gpu.h"

/* Runs the check of one kernel in a process of its own: this program, restarted for that kernel. Its
 * output goes to this process's output. Returns true if it passed. Sets `why` if the child ended without
 * reporting. */
bool child_run(const struct run *like, const char *operation, const char *kernel, fmla_device device,
               struct tally *told, char *why, size_t size);

/* In the child: reports the results to the parent. */
void child_tell(int fd, const struct tally *told);

enum { RECORDED = 64 };

struct record {
    struct gpu_description gpu;
    bool complete; /* every kernel over its whole grid */
    int count;
    struct record_row {
        const char *operation, *kernel; /* static */
        struct tally tally;
        bool passed;
    } row[RECORDED];
};

/* Writes the record. Hashes of machine code come from kernels.sha256 in the folder of `program`, which
 * the build makes; without that file the list is empty and a warning says so. Returns false
 * if no kernel was run or the file cannot be written. */
bool record_write(const struct record *record, uint64_t seed, const char *program, const char *path);

#endif
