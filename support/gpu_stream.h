/* SPDX-License-Identifier: MIT
 *
 * A bare stream kernel: it reads vectors from anywhere in device memory, once each and in the order of a
 * list, and discards them. It bounds every kernel that needs these bytes. On compute capability 9 one
 * thread per SM copies them into a ring in shared memory (cp.async.bulk); elsewhere warps load them, 16
 * bytes a thread.
 */
#ifndef FMLA_SUPPORT_GPU_STREAM_H
#define FMLA_SUPPORT_GPU_STREAM_H

#include "gpu.h"

/* Consecutive vectors. No vector is in two chunks. */
struct gpu_stream_chunk {
    uint32_t first, count;
};

/* The kernel. Zero-initialise it. */
struct gpu_stream {
    void *module, *kernel;
    unsigned blocks, threads, shared;
    bool bulk; /* cp.async.bulk, else loads */
};

/* The list of vectors to read. Zero-initialise it. */
struct gpu_stream_list {
    const void *base; /* of vector 0, 16-byte aligned, on the device */
    uint32_t vector_bytes, count;
    void *chunks; /* on the device */
};

bool gpu_stream_kernel_open(struct gpu_stream *stream, const struct gpu_description *gpu,
                            struct reason *reason);
void gpu_stream_kernel_close(struct gpu_stream *stream);

/* Returns the most vectors per chunk that still give every SM work when `vectors` are read in all. A
 * vector is a multiple of 16 bytes, at most 1152. */
uint32_t gpu_stream_most(const struct gpu_stream *stream, uint32_t vector_bytes, int64_t vectors);

/* Copies the list to the device. The caller frees list->chunks with gpu_free, also after a reason. */
bool gpu_stream_list_open(struct gpu_stream_list *list, const void *base, uint32_t vector_bytes,
                          const struct gpu_stream_chunk *chunks, int64_t count, struct reason *reason);

/* Launches the kernel on `to`, a stream of the driver. If `sum` is not NULL, the kernel also reads what it
 * copied and adds the sum of all 32-bit words modulo 2³² to the word at `sum`, on the device. */
bool gpu_stream_send(const struct gpu_stream *stream, const struct gpu_stream_list *list, void *sum, void *to,
                     struct reason *reason);

#endif
