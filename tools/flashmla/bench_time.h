/* SPDX-License-Identifier: MIT
 *
 * Timing of calls on a device whose peaks are measured first: the same for every operation, and for all that times one. On a
 * GPU a call is captured in a graph, and each run is one launch of it between two events (bench_gpu.h).
 */
#ifndef FLASHMLA_TOOL_BENCH_TIME_H
#define FLASHMLA_TOOL_BENCH_TIME_H

#include "bench_cpu.h"
#include "bench_gpu.h"

#include "progress.h"

/* Zero-initialised. */
struct bench_timer {
    fmla_device device;
    bool warm;      /* caches stay as the run before left them; else they are emptied by reading */
    int64_t repeat; /* runs of each */
    struct bench_cpu cpu;
    struct bench_gpu gpu; /* where the device is one */
    double
        copy; /* bytes/s of what only moves data: on a GPU of a copy, read and written; on the CPU of a read */
    struct progress progress;
};

/* Measures the device, and prints what it found. `copies`: also how fast a GPU copies; `streams`: bare streams will be timed. */
bool bench_timer_open(struct bench_timer *timer, bool copies, bool streams, struct fault *fault);
void bench_timer_close(struct bench_timer *timer);

/* Times calls that are where the device is, each after a first run that is not counted, in turns, so that all see the same
 * clocks; with warm caches one after the other. On the CPU what takes over 2 s is run 3 times. *status is the library's; false
 * with a fault where it or the GPU refused. */
bool bench_time(struct bench_timer *timer, struct bench_timed *timed, int count, fmla_status *status,
                struct fault *fault);

/* The FLOP/s and bytes/s that a kernel is held against. */
double bench_peak(const struct bench_timer *timer, const char *kernel);
double bench_bandwidth(const struct bench_timer *timer);

#endif
