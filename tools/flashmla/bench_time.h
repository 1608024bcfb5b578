/* SPDX-License-Identifier: MIT
 *
 * Times calls on a device after measuring its peaks; shared by all operations and all commands that time
 * one. On a GPU a call is captured in a graph, and each run is one launch of it between two events, after
 * the work that --between selects. Launch overhead is measured too, on a graph of one empty kernel.
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

/* Measures the CPU and prints the results: memory and, for `arithmetic`, the instructions of `kernel` (NULL:
 * of every kernel). */
bool bench_cpu_measure(struct bench_cpu *cpu, bool arithmetic, const char *kernel, bool warm,
                       struct reason *reason);

/* The work before each run. */
enum bench_between {
    BENCH_PRODUCTS, /* on a GPU: two matrix products (gpu_products.h) */
    BENCH_READ,     /* a read of more memory than the caches hold */
    BENCH_NOTHING,  /* caches stay as the previous run left them */
    BENCH_HOST      /* nothing; time the call on the host until it returns, with the GPU idle */
};
const char *bench_between_name(enum bench_between between);

/* ---- On a GPU (bench_gpu.c) ------------------------------------------------------------------- */

/* Zero-initialised. */
struct bench_gpu {
    struct gpu_peak peak;
    struct gpu_products products; /* open if they run in between */
    struct gpu_stream bare;       /* opened by the caller */
    double bandwidth, flops;      /* bytes/s, FLOP/s */
    void *first, *second;         /* events */
};

/* A timed item and its times. */
struct bench_timed {
    const struct call *call;            /* on the device */
    bool plan;                          /* time the plan of the call instead */
    const struct gpu_stream_list *bare; /* on a GPU, instead: the bare stream's list, on the call's stream */
    double *seconds;                    /* [runs], during timing */
    int64_t runs;
    double median, least, most;
};

enum { BENCH_TIMED = 3 /* most items at once */ };

/* Measures the GPU and prints the results. */
bool bench_gpu_open(struct bench_gpu *bench, fmla_device device, enum bench_between between,
                    struct reason *reason);
void bench_gpu_close(struct bench_gpu *bench);

/* Times `runs` launches of each item. Items take turns, so that all see the same clocks; with nothing in
 * between, which times what the previous run left in the caches, they run one after another. The first
 * launch is not counted. *status is the library's; returns false with a reason if the library or the GPU
 * refused. */
bool bench_gpu_time(const struct bench_gpu *bench, const struct bench_timed *timed, int count,
                    enum bench_between between, int64_t runs, fmla_status *status, struct reason *reason);

/* ---- On either (bench_time.c) ----------------------------------------------------------------- */

/* Zero-initialised. */
struct bench_timer {
    fmla_device device;
    enum bench_between between;
    int64_t repeat;     /* runs of each */
    const char *kernel; /* forced, or NULL */
    struct bench_cpu cpu;
    struct bench_gpu gpu; /* if the device is a GPU */
    double copy; /* bytes/s of data movement: on a GPU a copy, reads and writes added; on the CPU a read */
    struct progress progress;
};

/* Measures the device and prints the results. `copies`: also measure GPU copies; `streams`: bare streams
 * will be timed. */
bool bench_timer_open(struct bench_timer *timer, bool copies, bool streams, struct reason *reason);
void bench_timer_close(struct bench_timer *timer);

/* Times calls whose tensors are on the device. Items take turns after an uncounted first run each, so that
 * all see the same clocks; with warm caches they run one after another. On the CPU, items over 2 s run 3
 * times. *status is the library's; returns false with a reason if the library or the GPU refused. */
bool bench_time(struct bench_timer *timer, struct bench_timed *timed, int count, fmla_status *status,
                struct reason *reason);

/* Return the peak FLOP/s and bytes/s that a kernel is compared with. */
double bench_peak(const struct bench_timer *timer, const char *kernel);
double bench_bandwidth(const struct bench_timer *timer);

#endif
