/* SPDX-License-Identifier: MIT
 *
 * Shows the progress of a long task as one line on the terminal. Writes nothing in the first two seconds,
 * nor if stderr is not a terminal.
 */
#ifndef FMLA_SUPPORT_PROGRESS_H
#define FMLA_SUPPORT_PROGRESS_H

#include <stdint.h>

struct progress {
    const char *what; /* "computing" */
    double start, shown;
};

void progress_begin(struct progress *progress, const char *what);

/* Reports that `done` of `total` parts are complete. Cheap enough for an inner loop of milliseconds. */
void progress_update(struct progress *progress, int64_t done, int64_t total);

/* Erases the line if there is one: call it before other output and at the end. */
void progress_wipe(struct progress *progress);

#endif
