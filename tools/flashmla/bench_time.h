/* SPDX-License-Identifier: MIT
 *
 * Timing of calls on a device whose peaks are measured first: the same for every operation, and for all that times one. On a
 * GPU a call is captured in a graph, and each run is one launch of it between two events, after what --between says.
 * What the launch itself takes is measured too, on a graph that holds one kernel that does nothing.
 */
#ifndef FLASHMLA_TOOL_BENCH_TIME_H
#define FLASHMLA_TOOL_BENCH_TIME_H

#include "call.h"

#include "gpu_peak.h"
#include "gpu_products.h"
#include "gpu_stream.h"
#include "peak.h"
#include "progress.h"

/* ---- What this machine's processor and memory can do at best (bench_cpu.c) --------------------- */

struct bench_cpu {
    char cpu[128];
    int threads;
    double flops[PEAK_UNITS], bandwidth; /* on `threads` threads */
    struct peak_memory memory;
};

/* Measures, and prints what it found. */
bool bench_cpu_measure(struct bench_cpu *cpu, bool warm, struct fault *fault);

/* The instructions that do the work of a kernel. */
enum peak_unit bench_cpu_unit(const char *kernel);

/* What comes before each run. */
enum bench_between {
    BENCH_PRODUCTS, /* on a GPU: two matrix products (gpu_products.h) */
    BENCH_READ,     /* of more memory than the caches have */
    BENCH_NOTHING,  /* caches stay as the run before left them */
    BENCH_HOST /* nothing: what a call takes on the host, until it returns, is timed; the GPU is idle then */
};
const char *bench_between_name(enum bench_between between);

/* ---- On a GPU (bench_gpu.c) ------------------------------------------------------------------- */

/* Zero-initialised. */
struct bench_gpu {
    struct gpu_peak peak;
    struct gpu_products products; /* open where they come between */
    struct gpu_stream bare;       /* the caller's to open */
    double bandwidth, flops;      /* bytes/s, FLOP/s */
    void *first, *second;         /* events */
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
bool bench_gpu_open(struct bench_gpu *bench, fmla_device device, enum bench_between between,
                    struct fault *fault);
void bench_gpu_close(struct bench_gpu *bench);

/* Times `runs` launches of each, in turns, so that all see the same clocks; with nothing between, which is about what the run
 * before left in the caches, one after another. A first launch is not counted. *status is the library's; false with a
 * fault where it or the GPU refused. */
bool bench_gpu_time(const struct bench_gpu *bench, const struct bench_timed *timed, int count,
                    enum bench_between between, int64_t runs, fmla_status *status, struct fault *fault);

/* ---- On either (bench_time.c) ----------------------------------------------------------------- */

/* Zero-initialised. */
struct bench_timer {
    fmla_device device;
    enum bench_between between;
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
