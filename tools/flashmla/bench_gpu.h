/* SPDX-License-Identifier: MIT
 *
 * Timing on a GPU: a call is captured in a graph, and each run is one launch of it between two events, after the L2 was
 * emptied by reading. What the launch itself takes is measured too, on a graph that holds one kernel that does nothing.
 */
#ifndef FLASHMLA_TOOL_BENCH_GPU_H
#define FLASHMLA_TOOL_BENCH_GPU_H

#include "gpu_peak.h"

#include "flashmla/flashmla.h"

/* Zero-initialised. */
struct bench_gpu {
    struct gpu_peak peak;
    double bandwidth, flops; /* bytes/s, FLOP/s */
    void *first, *second;    /* events */
};

/* What is timed: sends a call to the stream that its arguments name. */
typedef fmla_status (*bench_call)(const void *args);

/* Measures the GPU, and prints what it found. */
bool bench_gpu_open(struct bench_gpu *bench, fmla_device device, bool warm, struct fault *fault);
void bench_gpu_close(struct bench_gpu *bench);

/* Times `runs` launches of the call into `seconds`, after one that is not counted. *status is the library's; false with a
 * fault where it or the GPU refused. */
bool bench_gpu_time(const struct bench_gpu *bench, bench_call call, const void *args, void *stream, bool warm,
                    int64_t runs, double *seconds, fmla_status *status, struct fault *fault);

#endif
