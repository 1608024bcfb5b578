/* SPDX-License-Identifier: MIT
 *
 * What the files of `flashmla bench` share: the options, the state of a run, and how a row is timed and told.
 */
#ifndef FLASHMLA_TOOL_BENCH_SESSION_H
#define FLASHMLA_TOOL_BENCH_SESSION_H

#include "bench_cpu.h"
#include "bench_gpu.h"
#include "bench_grid.h"
#include "bench_report.h"

#include "outfile.h"
#include "progress.h"

enum {
    BENCH_DENSE,
    BENCH_MERGE,
    BENCH_SPARSE,
    BENCH_SPARSE_PREFILL,
    BENCH_CACHE_APPEND,
    BENCH_CACHE_GATHER
}; /* the choices of --op */

struct bench_options {
    const char *grid, *kernel, *json, *device;
    int op, dtype, causal, varlen; /* indices of the choices */
    int64_t repeat, threads;
    bool warm, no_stream, fixed;
    struct option_counts parts, topk, tokens;
    struct bench_axes axes;
};

struct session {
    const struct bench_options *options;
    fmla_device device;
    struct bench_cpu machine; /* the CPU */
    struct bench_gpu gpu;     /* where the device is one */
    struct bench_report report;
    struct outfile *json;
    struct progress progress;
    int64_t timed;
    struct fault passed_over; /* why the first such row was */
    int exit_code;
};

/* Times one or two calls on the CPU after a first one of each that is not counted; in turns, but with warm caches one
 * after the other. The first one's times are the row's. */
fmla_status bench_time_calls(struct session *s, struct bench_timed *timed, int count, struct bench_row *row);

/* The same on a GPU, into the median of each. *status is the library's; false where it or the GPU refused. */
bool bench_time_on_gpu(struct session *s, struct bench_timed *timed, int count, struct bench_row *row,
                       double *medians, fmla_status *status, struct fault *fault);

/* Tells a timed row. */
bool bench_finish_row(struct session *s, const struct bench_row *row, struct fault *fault);

/* A row that cannot run here is told and passed over; other refusals end the command. */
bool bench_pass_over(struct session *s, const struct bench_row *row, const char *why);
bool bench_library_fault(struct session *s, const struct bench_row *row, fmla_status status,
                         struct fault *fault);
bool bench_too_large(const struct session *s, double bytes);

/* ---- Merge (bench_merge.c) ------------------------------------------------------------------- */

bool bench_merge(struct session *s, const struct batch_shape *shape, int64_t parts, struct fault *fault);

/* ---- Sparse decode (bench_sparse.c) ---------------------------------------------------------- */

/* The rows of a grid, allocated, as bench_grid gives them; their `sparse` is set. */
struct bench_row *bench_sparse_grid(const char *name, const struct bench_axes *chosen,
                                    const struct option_counts *topk, int64_t *count);
void bench_free_rows(struct bench_row *rows, int64_t count);

bool bench_sparse(struct session *s, struct bench_row *row, struct fault *fault);

/* ---- Sparse prefill (bench_prefill.c) -------------------------------------------------------- */

/* The same; their `prefill` is set. bench_free_rows frees them. */
struct bench_row *bench_prefill_grid(const char *name, const struct bench_axes *chosen,
                                     const struct option_counts *topk, int64_t *count);

bool bench_prefill(struct session *s, struct bench_row *row, struct fault *fault);

#endif
