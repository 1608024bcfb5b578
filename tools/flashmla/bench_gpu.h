/* SPDX-License-Identifier: MIT
 *
 * Timing on a GPU: a call is captured in a graph, and each run is one launch of it between two events, after the L2 was
 * emptied by reading. What the launch itself takes is measured too, on a graph that holds one kernel that does nothing.
 */
#ifndef FLASHMLA_TOOL_BENCH_GPU_H
#define FLASHMLA_TOOL_BENCH_GPU_H

#include "call.h"

#include "gpu_peak.h"
#include "gpu_stream.h"

/* Zero-initialised. */
struct bench_gpu {
    struct gpu_peak peak;
    struct gpu_stream bare;  /* the caller's to open */
    double bandwidth, flops; /* bytes/s, FLOP/s */
    void *first, *second;    /* events */
};

/* What is timed, and its times. */
struct bench_timed {
    const struct call *call; /* on the device */
    bool plan;               /* the plan of the call in place of it */
    const struct gpu_stream_list
        *bare;       /* on a GPU, instead: what the bare stream reads, on the call's stream */
    double *seconds; /* [runs], while it is timed */
    int64_t runs;
    double median, least, most;
};

enum { BENCH_TIMED = 3 /* at once, at most */ };

/* Measures the GPU, and prints what it found. */
bool bench_gpu_open(struct bench_gpu *bench, fmla_device device, bool warm, struct fault *fault);
void bench_gpu_close(struct bench_gpu *bench);

/* Times `runs` launches of each, in turns, so that all see the same clocks; with `warm`, which is about what the run
 * before left in the caches, one after another. A first launch is not counted. *status is the library's; false with a
 * fault where it or the GPU refused. */
bool bench_gpu_time(const struct bench_gpu *bench, const struct bench_timed *timed, int count, bool warm,
                    int64_t runs, fmla_status *status, struct fault *fault);

#endif
