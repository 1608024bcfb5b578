/* SPDX-License-Identifier: MIT
 *
 * A row of bench: a call made of a shape, timed with what stands beside it, and told.
 */
#ifndef FLASHMLA_TOOL_BENCH_ROW_H
#define FLASHMLA_TOOL_BENCH_ROW_H

#include "bench_report.h"

/* What rows of a run share. */
struct bench_session {
    struct bench_timer timer;
    struct bench_report report;
    const char *kernel;       /* forced, or NULL */
    bool fixed;               /* beside varying lengths those of fixed length */
    struct outfile *json;     /* NULL: none */
    int64_t timed;            /* rows */
    struct fault passed_over; /* why the first such row was */
};

/* A row that cannot run here is told and passed over; false with a fault where something else went wrong. */
bool bench_row(struct bench_session *session, const struct shape *shape, struct fault *fault);

#endif
