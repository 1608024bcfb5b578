/* SPDX-License-Identifier: MIT
 *
 * What bench says of a row: a line of the table, and a line of JSON.
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

#endif
