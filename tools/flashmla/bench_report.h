/* SPDX-License-Identifier: MIT
 *
 * A row of bench: a call of one shape, timed with its comparison runs (bench_row.c); and its report, a
 * line of the table and a line of JSON.
 */
#ifndef FLASHMLA_TOOL_BENCH_REPORT_H
#define FLASHMLA_TOOL_BENCH_REPORT_H

#include "bench_time.h"
#include "bench_warn.h"
#include "make.h"
#include "policy.h"

#include "outfile.h"

/* One timed row; times in seconds, 0 if not timed. */
struct bench_row {
    const struct shape *shape;
    const char *kernel;
    struct bench_timed timed;
    double plan;   /* on a GPU */
    double stream; /* of the bare stream */
    double fixed;  /* of a fixed-length batch with as many keys */
    struct work work;
    double floor;
};

/* State shared by the rows of a run. */
struct bench_session {
    enum operation op;
    struct bench_timer timer;
    bool stream, fixed;   /* also time a bare stream; fixed lengths beside varying ones */
    struct outfile *json; /* NULL: none */
    int64_t timed;        /* rows */
    struct bench_beaten beaten;
    struct reason passed_over; /* of the first such row */
};

/* Returns true if the operation only moves data; it is then compared with a copy. */
bool bench_only_copies(enum operation op);

void bench_report_head(enum operation op);
void bench_report_row(const struct bench_timer *timer, const struct bench_row *row);
void bench_report_skipped(const struct bench_row *row, const char *why);

/* Writes the row; members that do not apply to the operation are omitted. */
bool bench_report_json(const struct bench_timer *timer, const struct bench_row *row, struct outfile *file,
                       struct reason *reason);

/* Sets `code` to the SHA-256 of a GPU kernel's machine code from `path`, the build's
 * kernels.sha256; for a kernel that chooses between two, to both, separated by a space. Returns false if the
 * list lacks one of them for this GPU. */
enum { BENCH_SOURCES = 2, BENCH_CODE = 65 * BENCH_SOURCES };
bool bench_report_code(const char *path, const struct bench_row *row, int major, int minor,
                       char code[BENCH_CODE]);

/* Times and reports one row. A row that cannot run here is reported and skipped; other errors return false
 * with a reason. */
bool bench_row(struct bench_session *session, const struct shape *shape, struct reason *reason);

#endif
