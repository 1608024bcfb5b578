/* SPDX-License-Identifier: MIT
 *
 * A row of bench, a call made of a shape and timed with what stands beside it (bench_row.c); and what is said of it: a line of
 * the table, and a line of JSON.
 */
#ifndef FLASHMLA_TOOL_BENCH_REPORT_H
#define FLASHMLA_TOOL_BENCH_REPORT_H

#include "bench_time.h"
#include "make.h"
#include "policy.h"

#include "outfile.h"

/* One timed row; times in seconds, 0 where that was not timed. */
struct bench_row {
    const struct shape *shape;
    const char *kernel;
    struct bench_timed timed;
    double plan;   /* on a GPU */
    double stream; /* of the bare stream beside it */
    double fixed;  /* of a batch of fixed length with as many keys */
    struct work work;
    double floor;
};

struct bench_report {
    const struct bench_timer *timer;
    enum operation op;
    bool stream;
};

/* Does the operation only move data, which is held against a copy? */
bool bench_only_copies(enum operation op);

void bench_report_head(const struct bench_report *report);
void bench_report_row(const struct bench_report *report, const struct bench_row *row);
void bench_report_skipped(const struct bench_row *row, const char *why);

/* What does not apply to the operation is left out. */
bool bench_report_json(const struct bench_report *report, const struct bench_row *row, struct outfile *file,
                       struct fault *fault);

/* The SHA-256 of the machine code of a GPU kernel, from `path`, a list by scripts/kernel-hashes.sh; of one that chooses
 * between two, both, with a space between. False where the list has not all of it for this GPU. */
enum { BENCH_SOURCES = 2, BENCH_CODE = 65 * BENCH_SOURCES };
bool bench_report_code(const char *path, const struct bench_row *row, int major, int minor,
                       char code[BENCH_CODE]);

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
