/* SPDX-License-Identifier: MIT
 *
 * A bare stream: reads vectors that lie anywhere in device memory, once each and in the order of a list, and does nothing
 * with them. No kernel that needs these bytes is faster. On compute capability 9 one thread a multiprocessor copies them
 * into a ring in shared memory (cp.async.bulk); elsewhere warps load them, 16 bytes a thread.
 */
#ifndef FMLA_SUPPORT_GPU_STREAM_H
#define FMLA_SUPPORT_GPU_STREAM_H

#include "gpu.h"

/* Vectors that lie one after another, none of them in two chunks. */
struct gpu_stream_chunk {
    uint32_t first, count;
};

/* The kernel. Zero-initialised. */
struct gpu_stream {
    void *module, *kernel;
    unsigned blocks, threads, shared;
    bool bulk; /* cp.async.bulk, else loads */
};

/* What is read. Zero-initialised. */
struct gpu_stream_list {
    const void *base; /* of vector 0, 16-byte aligned, on the device */
    uint32_t vector_bytes, count;
    void *chunks; /* on the device */
};

bool gpu_stream_kernel_open(struct gpu_stream *stream, const struct gpu_description *gpu,
                            struct fault *fault);
void gpu_stream_kernel_close(struct gpu_stream *stream);

/* How many vectors a chunk may have, such that all multiprocessors have work where `vectors` are read in all. Vectors
 * are of a multiple of 16 bytes, at most 1152. */
uint32_t gpu_stream_most(const struct gpu_stream *stream, uint32_t vector_bytes, int64_t vectors);

/* Copies the list to the device; list->chunks is the caller's to free by gpu_free, also after a fault. */
bool gpu_stream_list_open(struct gpu_stream_list *list, const void *base, uint32_t vector_bytes,
                          const struct gpu_stream_chunk *chunks, int64_t count, struct fault *fault);

/* Sends the kernel to `to`, a stream of the driver. Where `sum` is not NULL, the sum of all 32-bit words modulo 2³² is
 * added to the word there, on the device: the same kernel, which then reads what it copied. */
bool gpu_stream_send(const struct gpu_stream *stream, const struct gpu_stream_list *list, void *sum, void *to,
                     struct fault *fault);

#endif
