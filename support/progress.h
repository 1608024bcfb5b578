/* SPDX-License-Identifier: MIT
 *
 * One line on a terminal that says how far a long task is. Nothing is written in its first two seconds, nor where
 * stderr is no terminal.
 */
#ifndef FMLA_SUPPORT_PROGRESS_H
#define FMLA_SUPPORT_PROGRESS_H

#include <stdint.h>

struct progress {
    const char *what; /* "computing" */
    double start, shown;
};

void progress_begin(struct progress *progress, const char *what);

/* `done` of `total` parts are done. Cheap enough for an inner loop of milliseconds. */
void progress_update(struct progress *progress, int64_t done, int64_t total);

/* Wipes the line, if there is one: before other output, and at the end. */
void progress_wipe(struct progress *progress);

#endif
