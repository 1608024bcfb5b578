/* SPDX-License-Identifier: MIT */
#ifndef FMLA_SUPPORT_TIMING_H
#define FMLA_SUPPORT_TIMING_H

#include <time.h>

/* Returns the seconds of a monotonic clock. */
static inline double timing_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif
