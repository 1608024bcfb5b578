/* SPDX-License-Identifier: MIT
 *
 * A GPU seen from tools, tests and benchmarks: memory, streams, graphs, events, through the driver that is loaded at
 * first use. Device memory is a void * that the host never reads through.
 *
 * All functions work on the device that the calling thread opened last, and return false with a fault that has the
 * driver's words. Copies and fills return when they are done, whatever stream reads the memory next; none of them may
 * be called while a stream is being captured.
 */
#ifndef FMLA_SUPPORT_GPU_H
#define FMLA_SUPPORT_GPU_H

#include "fault.h"

#include <stddef.h>
#include <stdint.h>

/* Makes the primary context of device `id` current on this thread; to be called in every thread that uses the GPU. The
 * context stays until the process ends. A fault is also what a machine without a driver or without a GPU gives. */
bool gpu_open(int32_t id, struct fault *fault);

struct gpu_description {
    char name[96];    /* "NVIDIA H200" */
    char driver[64];  /* its version, or the newest CUDA that it runs where only that is told */
    int major, minor; /* compute capability */
    int multiprocessors;
    int sm_mhz;           /* the clock that the device is allowed at most */
    size_t memory, cache; /* bytes; cache: the L2 */
};

bool gpu_describe(int32_t id, struct gpu_description *description, struct fault *fault);

/* The clock of the SMs at this moment; 0 where it is not told. */
int gpu_sm_mhz(int32_t id);

/* ---- Memory --------------------------------------------------------------------------------- */

/* At least 256-byte aligned; 0 bytes are allowed. */
bool gpu_alloc(void **memory, size_t bytes, struct fault *fault);
void gpu_free(void *memory); /* NULL is allowed */

bool gpu_upload(void *to, const void *from, size_t bytes, struct fault *fault);
bool gpu_download(void *to, const void *from, size_t bytes, struct fault *fault);
bool gpu_fill(void *to, unsigned char byte, size_t bytes, struct fault *fault);

/* ---- Streams and events --------------------------------------------------------------------- */

/* A stream that does not wait for the default one (NULL, which all of these take too). */
bool gpu_stream_open(void **stream, struct fault *fault);
void gpu_stream_close(void *stream);

/* Waits for all that was sent to the stream; what went wrong on the GPU since then is told here. */
bool gpu_stream_wait(void *stream, struct fault *fault);

bool gpu_event_open(void **event, struct fault *fault);
void gpu_event_close(void *event);
bool gpu_event_record(void *event, void *stream, struct fault *fault);

/* Waits for the second event. */
bool gpu_event_seconds(void *first, void *second, double *seconds, struct fault *fault);

/* ---- Kernels -------------------------------------------------------------------------------- */

/* From PTX, which the driver compiles. */
bool gpu_module_open(void **module, const char *ptx, struct fault *fault);
void gpu_module_close(void *module);
bool gpu_kernel(void **kernel, void *module, const char *name, struct fault *fault);

/* Allows launches with up to so many bytes of dynamic shared memory; without it they have at most 48 KiB. */
bool gpu_kernel_shared(void *kernel, unsigned bytes, struct fault *fault);

/* `shared`: bytes of dynamic shared memory a block. */
bool gpu_launch(void *kernel, unsigned blocks, unsigned threads, unsigned shared, void *stream,
                void **parameters, struct fault *fault);

/* A launch that is timed. */
struct gpu_load {
    void *kernel;
    unsigned blocks, threads;
    void **parameters;
};

/* Seconds: the shortest of several, after one that is not counted. */
bool gpu_best_time(const struct gpu_load *load, double *best, struct fault *fault);

/* ---- Graphs --------------------------------------------------------------------------------- */

/* Captures what is sent to a stream (not the default one) into a graph that can be launched again and again. While a
 * capture runs, calls that could wait for the GPU are errors in every thread. */
bool gpu_capture_begin(void *stream, struct fault *fault);
bool gpu_capture_end(void *stream, void **graph, struct fault *fault);
bool gpu_graph_launch(void *graph, void *stream, struct fault *fault);
void gpu_graph_close(void *graph);

#endif
