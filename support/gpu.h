/* SPDX-License-Identifier: MIT
 *
 * GPU memory, streams, graphs and events for tools, tests and benchmarks, through the driver, which is loaded
 * at first use. Device memory is a void * that the host never dereferences.
 *
 * All functions work on the device that the calling thread opened last; on failure they return false and
 * the reason holds the driver's message. Copies and fills return when they are complete, whichever stream
 * reads the memory next; none of them may be called during stream capture.
 */
#ifndef FMLA_SUPPORT_GPU_H
#define FMLA_SUPPORT_GPU_H

#include "reason.h"

#include <stddef.h>
#include <stdint.h>

/* Makes the primary context of device `id` current on this thread; call it in every thread that uses the
 * GPU. The context stays until the process ends. Fails with a reason where there is no driver or no GPU. */
bool gpu_open(int32_t id, struct reason *reason);

struct gpu_description {
    char name[96];    /* "NVIDIA H200" */
    char driver[64];  /* driver version, or the newest CUDA version it supports if only that is known */
    int major, minor; /* compute capability */
    int multiprocessors;
    int sm_mhz;           /* maximum SM clock */
    size_t memory, cache; /* bytes; cache: the L2 */
};

bool gpu_describe(int32_t id, struct gpu_description *description, struct reason *reason);

/* Returns the current SM clock; 0 if it is unknown. */
int gpu_sm_mhz(int32_t id);

/* ---- Memory --------------------------------------------------------------------------------- */

/* Aligned to at least 256 bytes; 0 bytes are allowed. */
bool gpu_alloc(void **memory, size_t bytes, struct reason *reason);
void gpu_free(void *memory); /* NULL is allowed */

bool gpu_upload(void *to, const void *from, size_t bytes, struct reason *reason);
bool gpu_download(void *to, const void *from, size_t bytes, struct reason *reason);
bool gpu_fill(void *to, unsigned char byte, size_t bytes, struct reason *reason);

/* ---- Streams and events --------------------------------------------------------------------- */

/* Opens a stream that does not synchronise with the default stream. All functions here also take NULL, the
 * default stream. */
bool gpu_stream_open(void **stream, struct reason *reason);
void gpu_stream_close(void *stream);

/* Waits for all work on the stream and reports errors of the GPU since the last wait. */
bool gpu_stream_wait(void *stream, struct reason *reason);

bool gpu_event_open(void **event, struct reason *reason);
void gpu_event_close(void *event);
bool gpu_event_record(void *event, void *stream, struct reason *reason);

/* Waits for the second event and sets *seconds to the time between both. */
bool gpu_event_seconds(void *first, void *second, double *seconds, struct reason *reason);

/* ---- Kernels -------------------------------------------------------------------------------- */

/* Loads a module from PTX, which the driver compiles. */
bool gpu_module_open(void **module, const char *ptx, struct reason *reason);
void gpu_module_close(void *module);
bool gpu_kernel(void **kernel, void *module, const char *name, struct reason *reason);

/* Allows launches with up to `bytes` of dynamic shared memory; the default limit is 48 KiB. */
bool gpu_kernel_shared(void *kernel, unsigned bytes, struct reason *reason);

/* `shared`: bytes of dynamic shared memory per CTA. */
bool gpu_launch(void *kernel, unsigned blocks, unsigned threads, unsigned shared, void *stream,
                void **parameters, struct reason *reason);

/* A launch to time. */
struct gpu_load {
    void *kernel;
    unsigned blocks, threads;
    void **parameters;
};

/* Sets *best to the shortest of several runs in seconds, after one warm-up run. */
bool gpu_best_time(const struct gpu_load *load, double *best, struct reason *reason);

/* ---- Graphs --------------------------------------------------------------------------------- */

/* Captures the work sent to a stream (not the default one) into a graph that can be launched repeatedly.
 * During a capture, calls that could wait for the GPU are errors in every thread. */
bool gpu_capture_begin(void *stream, struct reason *reason);
bool gpu_capture_end(void *stream, void **graph, struct reason *reason);
bool gpu_graph_launch(void *graph, void *stream, struct reason *reason);
void gpu_graph_close(void *graph);

#endif
