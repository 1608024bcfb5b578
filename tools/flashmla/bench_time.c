/* SPDX-License-Identifier: MIT */
#include "bench_time.h"

#include "policy.h"

#include "gpu_copy.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

const char *bench_between_name(enum bench_between between)
{
    static const char *const names[] = {"products", "read", "nothing", "host"};
    return names[between];
}

bool bench_timer_open(struct bench_timer *t, bool copies, bool streams, struct reason *reason)
{
    if (device_is_gpu(t->device)) {
        if (!bench_gpu_open(&t->gpu, t->device, t->between, reason) ||
            (streams && !gpu_stream_kernel_open(&t->gpu.bare, &t->gpu.peak.gpu, reason)) ||
            (copies && !gpu_copy_bandwidth(&t->gpu.peak.gpu, &t->copy, reason)))
            return false;
        if (copies) printf("memory %-27s %8.1f GB/s\n", "copied, read and written", 1e-9 * t->copy);
    } else if (!bench_cpu_measure(&t->cpu, !copies, t->kernel, t->between == BENCH_NOTHING, reason)) {
        return false;
    }
    if (!device_is_gpu(t->device)) t->copy = t->cpu.bandwidth;
    progress_begin(&t->progress, "this row's runs");
    return true;
}

void bench_timer_close(struct bench_timer *t)
{
    progress_wipe(&t->progress);
    peak_memory_close(&t->cpu.memory);
    if (device_is_gpu(t->device)) bench_gpu_close(&t->gpu);
}

double bench_peak(const struct bench_timer *t, const char *kernel)
{
    return device_is_gpu(t->device) ? t->gpu.flops : t->cpu.flops[peak_unit_of(kernel)];
}

double bench_bandwidth(const struct bench_timer *t)
{
    return device_is_gpu(t->device) ? t->gpu.bandwidth : t->cpu.bandwidth;
}

static bool time_on_cpu(struct bench_timer *timer, struct bench_timed *timed, int count, int64_t runs,
                        fmla_status *status, struct reason *reason)
{
    const bool warm = timer->between == BENCH_NOTHING;
    bool good = true;
    for (int64_t i = 0; good && i < runs * count; i++) {
        const int64_t t = warm ? i / runs : i % count, run = warm ? i % runs : i / count;
        if (!warm)
            peak_memory_read(&timer->cpu.memory, timer->cpu.threads);
        else if (t && !run)
            good = call_time(timed[t].call, &timed[t].seconds[run], status, reason);
        good = good && call_time(timed[t].call, &timed[t].seconds[run], status, reason);
        progress_update(&timer->progress, i + 1, runs * count);
    }
    return good;
}

/* Runs each once, the first item last, because it is timed next. */
static bool try_on_cpu(const struct bench_timed *timed, int count, int64_t *runs, fmla_status *status,
                       struct reason *reason)
{
    enum { LEAST_RUNS = 3 };
    double seconds;
    for (int t = count - 1; t >= 0; t--) {
        if (!call_time(timed[t].call, &seconds, status, reason)) return false;
        if (seconds > 2.0 && *runs > LEAST_RUNS) *runs = LEAST_RUNS;
    }
    return true;
}

bool bench_time(struct bench_timer *timer, struct bench_timed *timed, int count, fmla_status *status,
                struct reason *reason)
{
    const bool gpu = device_is_gpu(timer->device);
    int64_t runs = timer->repeat;
    *status = FMLA_OK;
    if (!gpu && !try_on_cpu(timed, count, &runs, status, reason)) return false;
    double *seconds = calloc((size_t)(runs * count), sizeof *seconds);
    if (!seconds) return reason_set(reason, "no memory for %" PRId64 " times", runs * count);
    for (int t = 0; t < count; t++) timed[t].seconds = seconds + t * runs, timed[t].runs = runs;
    const bool good = gpu ? bench_gpu_time(&timer->gpu, timed, count, timer->between, runs, status, reason)
                          : time_on_cpu(timer, timed, count, runs, status, reason);
    for (int t = 0; good && t < count; t++) {
        qsort(timed[t].seconds, (size_t)runs, sizeof *seconds, double_by_value);
        timed[t].median = timed[t].seconds[runs / 2];
        timed[t].least = timed[t].seconds[0], timed[t].most = timed[t].seconds[runs - 1];
    }
    free(seconds);
    return good;
}
