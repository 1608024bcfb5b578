/* SPDX-License-Identifier: MIT
 *
 * What a GPU's memory and matrix units can do at best, measured with small kernels of their own (PTX, compiled by the
 * driver): what a benchmark holds its figures against. Works on the device that is open on this thread (gpu.h).
 */
#ifndef FMLA_SUPPORT_GPU_PEAK_H
#define FMLA_SUPPORT_GPU_PEAK_H

#include "gpu.h"

/* Zero-initialised. */
struct gpu_peak {
    struct gpu_description gpu;
    void *module, *module_of_matrix;
    void *read, *nothing, *matrix; /* kernels */
    void *memory, *sink;           /* what is read, 0 everywhere; 256 bytes for results that nobody wants */
    size_t bytes;
    bool wgmma; /* the matrix units are used through wgmma, else mma.sync */
};

/* Allocates several times the L2, and at least 512 MB. */
bool gpu_peak_open(struct gpu_peak *peak, int32_t id, struct fault *fault);
void gpu_peak_close(struct gpu_peak *peak);

/* Sends a read of all the memory to the stream: afterwards the L2 holds clean lines of nobody else. */
bool gpu_peak_flush(const struct gpu_peak *peak, void *stream, struct fault *fault);

/* Sends a kernel that does nothing. */
bool gpu_peak_nothing(const struct gpu_peak *peak, void *stream, struct fault *fault);

/* Bytes/s and FLOP/s, the best of several tries on one stream; dense bf16 products with sums in fp32. */
bool gpu_peak_bandwidth(const struct gpu_peak *peak, double *bandwidth, struct fault *fault);
bool gpu_peak_flops(const struct gpu_peak *peak, double *flops, struct fault *fault);

#endif
