/* SPDX-License-Identifier: MIT
 *
 * What makes figures of bench doubtful: a machine with other work, and rows faster than the machine was
 * measured to be.
 */
#ifndef FLASHMLA_TOOL_BENCH_WARN_H
#define FLASHMLA_TOOL_BENCH_WARN_H

#include "bench_time.h"

/* ---- Other work ------------------------------------------------------------------------------- */

struct bench_load {
    double others;  /* threads of other processes that run or want to, on average */
    int processors; /* of the machine */
    int allowed;    /* processors that this process may use */
    int threads;    /* that bench will use */
};

/* Looks at the machine for a tenth of a second. What the system does not say counts as idle. */
struct bench_load bench_load_now(int threads);

/* Returns true if threads will wait for each other, and sets text[BENCH_WARNING] to the reason. */
enum { BENCH_WARNING = 256 };
bool bench_is_busy(const struct bench_load *load, char *text);

/* ---- Rows that cannot be ----------------------------------------------------------------------- */

/* Rows that took less time than their bytes and FLOP take at the measured peaks; zero-initialised. */
struct bench_beaten {
    int64_t rows;
    char kernel[32]; /* of the first; its time and the time that it needs at least: */
    double seconds, needed;
};

/* Counts a row of a kernel. Keys of warm caches are not read from memory, and the host's time has no such
 * bound. `memory` and `arithmetic` are the seconds of the row's bytes and FLOP at the peaks. */
void bench_beaten_add(struct bench_beaten *beaten, const char *kernel, enum bench_between between,
                      double seconds, double memory, double arithmetic);

/* Returns true if there was such a row, and sets text[BENCH_WARNING]; `timed`: all rows. */
bool bench_beaten_says(const struct bench_beaten *beaten, int64_t timed, char *text);

#endif
