/* SPDX-License-Identifier: MIT
 *
 * What bench says of a row: a line of the table, and a line of JSON.
 */
#ifndef FLASHMLA_TOOL_BENCH_REPORT_H
#define FLASHMLA_TOOL_BENCH_REPORT_H

#include "batch.h"
#include "bench_cpu.h"
#include "bench_gpu.h"

#include "prefill_batch.h"
#include "sparse_batch.h"

#include "outfile.h"

#include <jansson.h>

/* One timed row; times in seconds, 0 where that was not timed. */
struct bench_row {
    const struct batch_shape *shape;
    int64_t parts;                       /* merge; 0 = decode */
    const struct sparse_shape *sparse;   /* of sparse decode; else NULL */
    const struct prefill_shape *prefill; /* of sparse prefill, whose shape->b is 0; else NULL */
    const char *kernel;
    double median, least, most;
    double plan;   /* on a GPU */
    double stream; /* of the bare stream beside it */
    double fixed;  /* of a batch of fixed length with as many keys */
    double flop, bytes, floor;
    double peak, bandwidth; /* FLOP/s, bytes/s: the floor's */
    int64_t runs;
};

struct bench_report {
    fmla_device device;
    const struct bench_cpu *cpu; /* the one that device is */
    const struct bench_gpu *gpu;
    bool merge, stream, warm;
    int64_t repeat; /* runs that were asked for */
};

void bench_report_head(const struct bench_report *report);
void bench_report_row(const struct bench_report *report, const struct bench_row *row);
void bench_report_skipped(const struct bench_row *row, const char *why);

/* What does not apply to the operation is left out. */
bool bench_report_json(const struct bench_report *report, const struct bench_row *row, struct outfile *file,
                       struct fault *fault);

/* The .cu files that a kernel is made of; "" after the last one. */
enum { BENCH_SOURCES = 2, BENCH_CODE = 65 * BENCH_SOURCES };
struct bench_sources {
    char file[BENCH_SOURCES][80];
};

/* {"gpu", "driver", "sm_mhz", "code_sha"} of a row whose kernel is of these sources; NULL without memory. */
json_t *bench_report_gpu(const struct gpu_description *gpu, fmla_device device,
                         const struct bench_sources *sources);

/* The SHA-256 of the machine code of a GPU kernel, from `path`, a list by scripts/kernel-hashes.sh; of one that chooses
 * between two, both, with a space between. False where the list has not all of it for this GPU. */
bool bench_report_code(const char *path, const struct bench_row *row, int major, int minor,
                       char code[BENCH_CODE]);

#endif
