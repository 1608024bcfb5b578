/* SPDX-License-Identifier: MIT
 *
 * A GPU kernel under test has a process of its own: this program, started anew for one kernel.
 */
#ifndef CHECKATTN_CHILD_H
#define CHECKATTN_CHILD_H

#include "checkattn.h"

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

#endif
