/* SPDX-License-Identifier: MIT */
#include "bench_time.h"

#include "policy.h"

#include "timing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool send_between(const struct bench_gpu *b, enum bench_between between, void *stream,
                         struct reason *reason)
{
    if (between == BENCH_PRODUCTS) return gpu_products_send(&b->products, stream, reason);
    return between >= BENCH_NOTHING || gpu_peak_flush(&b->peak, stream, reason);
}

/* The events are enqueued around the launch, so host time of the launch does not count while the GPU is
 * busy with the work before it. */
static bool time_launch(const struct bench_gpu *b, void *graph, void *stream, enum bench_between between,
                        double *seconds, struct reason *reason)
{
    return send_between(b, between, stream, reason) && gpu_event_record(b->first, stream, reason) &&
           gpu_graph_launch(graph, stream, reason) && gpu_event_record(b->second, stream, reason) &&
           gpu_event_seconds(b->first, b->second, seconds, reason);
}

static bool launch(void *graph, void *stream, struct reason *reason)
{
    return gpu_graph_launch(graph, stream, reason) && gpu_stream_wait(stream, reason);
}

static void *stream_of(const struct bench_timed *t)
{
    return *(void **)call_option(t->call, "stream");
}

static bool send(const struct bench_gpu *b, const struct bench_timed *t, fmla_status *status,
                 struct reason *reason)
{
    if (t->bare) return gpu_stream_send(&b->bare, t->bare, NULL, stream_of(t), reason);
    return !call_refused(status, t->plan ? call_plan(t->call) : call_run(t->call), reason);
}

static bool capture(const struct bench_gpu *b, const struct bench_timed *t, void **graph, fmla_status *status,
                    struct reason *reason)
{
    struct reason why;
    if (!send(b, t, status, reason) || !gpu_stream_wait(stream_of(t), reason) || /* loads the kernels */
        !gpu_capture_begin(stream_of(t), reason))
        return false;
    const bool sent = send(b, t, status, reason), captured = gpu_capture_end(stream_of(t), graph, &why);
    if (sent && !captured) *reason = why;
    return sent && captured;
}

/* Times the host's launch of each item with the GPU idle. The first launch is not counted. */
static bool time_on_host(const struct bench_gpu *b, const struct bench_timed *timed, int count, int64_t runs,
                         fmla_status *status, struct reason *reason)
{
    for (int t = 0; t < count; t++)
        for (int64_t run = -1; run < runs; run++) {
            if (!gpu_stream_wait(stream_of(&timed[t]), reason)) return false;
            const double start = timing_now();
            if (!send(b, &timed[t], status, reason)) return false;
            if (run >= 0) timed[t].seconds[run] = timing_now() - start;
        }
    return gpu_stream_wait(stream_of(&timed[count - 1]), reason);
}

bool bench_gpu_time(const struct bench_gpu *b, const struct bench_timed *timed, int count,
                    enum bench_between between, int64_t runs, fmla_status *status, struct reason *reason)
{
    void *graph[BENCH_TIMED] = {NULL};
    const bool warm = between == BENCH_NOTHING;
    bool good = true;
    *status = FMLA_OK;
    if (between == BENCH_HOST) return time_on_host(b, timed, count, runs, status, reason);
    for (int t = 0; good && t < count; t++)
        good = capture(b, &timed[t], &graph[t], status, reason) &&
               (warm || launch(graph[t], stream_of(&timed[t]), reason));
    for (int64_t i = 0; good && i < runs * count; i++) {
        const int64_t t = warm ? i / runs : i % count, run = warm ? i % runs : i / count;
        good = (!warm || run || launch(graph[t], stream_of(&timed[t]), reason)) &&
               time_launch(b, graph[t], stream_of(&timed[t]), between, &timed[t].seconds[run], reason);
    }
    for (int t = 0; t < count; t++) gpu_graph_close(graph[t]);
    return good;
}

/* Times an empty graph, a lower bound for every call. */
static bool time_nothing(const struct bench_gpu *b, enum bench_between between, double *median,
                         struct reason *reason)
{
    enum { RUNS = 15 };
    double seconds[RUNS];
    void *stream = NULL, *graph = NULL;
    bool good = gpu_stream_open(&stream, reason) && gpu_capture_begin(stream, reason) &&
                gpu_peak_nothing(&b->peak, stream, reason) && gpu_capture_end(stream, &graph, reason) &&
                launch(graph, stream, reason);
    for (int i = 0; good && i < RUNS; i++) good = time_launch(b, graph, stream, between, &seconds[i], reason);
    gpu_graph_close(graph), gpu_stream_close(stream);
    if (!good) return false;
    qsort(seconds, RUNS, sizeof *seconds, double_by_value);
    *median = seconds[RUNS / 2];
    return true;
}

bool bench_gpu_open(struct bench_gpu *b, fmla_device device, enum bench_between between,
                    struct reason *reason)
{
    double nothing = 0.0;
    if (!gpu_open(device.id, reason) || !gpu_peak_open(&b->peak, device.id, reason) ||
        !gpu_event_open(&b->first, reason) || !gpu_event_open(&b->second, reason) ||
        !gpu_peak_bandwidth(&b->peak, &b->bandwidth, reason) ||
        !gpu_peak_flops(&b->peak, &b->flops, reason) ||
        (between == BENCH_PRODUCTS && !gpu_products_open(&b->products, reason)) ||
        !time_nothing(b, between >= BENCH_NOTHING ? BENCH_READ : between, &nothing, reason))
        return false;
    const struct gpu_description *gpu = &b->peak.gpu;
    printf("flashmla %s, %s, compute capability %d.%d, %d SMs, driver %s\n", fmla_version_string(), gpu->name,
           gpu->major, gpu->minor, gpu->multiprocessors, gpu->driver);
    printf("peak   %-27s %8.1f TFLOP/s\n", b->peak.wgmma ? "wgmma m64n256k16 bf16" : "mma.sync m16n8k16 bf16",
           1e-12 * b->flops);
    printf("memory %-27s %8.1f GB/s\n", "read", 1e-9 * b->bandwidth);
    printf("launch %-27s %8.1f us\n", "graph of an empty kernel", 1e6 * nothing);
    if (between == BENCH_PRODUCTS)
        printf("between runs two matrix products, of %d tokens with %zu MB of weights each\n",
               GPU_PRODUCT_TOKENS, gpu_product_weights_bytes(&b->products.of[0]) / 1000000);
    else if (between == BENCH_READ)
        printf("L2 emptied between runs by reading %zu MB (L2: %zu MB)\n", b->peak.bytes / 1000000,
               gpu->cache / 1000000);
    else if (between == BENCH_HOST)
        puts("host: what a call takes until it returns, while the GPU is idle");
    else
        puts("caches warm: not emptied between runs");
    return true;
}

void bench_gpu_close(struct bench_gpu *b)
{
    gpu_event_close(b->first), gpu_event_close(b->second);
    gpu_stream_kernel_close(&b->bare);
    gpu_products_close(&b->products);
    if (b->peak.sink) gpu_peak_close(&b->peak);
    memset(b, 0, sizeof *b);
}
