/* SPDX-License-Identifier: MIT
 *
 * Measures peak memory bandwidth and peak throughput of the matrix units with small kernels (PTX, compiled
 * by the driver). Benchmarks compare their figures with these peaks. Works on the device that is open on
 * this thread (gpu.h).
 */
#ifndef FMLA_SUPPORT_GPU_PEAK_H
#define FMLA_SUPPORT_GPU_PEAK_H

#include "gpu.h"

/* Zero-initialised. */
struct gpu_peak {
    struct gpu_description gpu;
    void *module, *module_of_matrix;
    void *read, *nothing, *matrix; /* kernels */
    void *memory, *sink;           /* read buffer, all 0; 256 bytes for unused results */
    size_t bytes;
    bool wgmma; /* measured with wgmma, else with mma.sync */
};

/* Allocates several times the L2 size, and at least 512 MB. */
bool gpu_peak_open(struct gpu_peak *peak, int32_t id, struct reason *reason);
void gpu_peak_close(struct gpu_peak *peak);

/* Enqueues a read of the whole buffer: afterwards the L2 holds only clean lines of this buffer. */
bool gpu_peak_flush(const struct gpu_peak *peak, void *stream, struct reason *reason);

/* Enqueues an empty kernel. */
bool gpu_peak_nothing(const struct gpu_peak *peak, void *stream, struct reason *reason);

/* Set bytes/s and FLOP/s, the best of several tries on one stream; the products are dense bf16 with fp32
 * accumulation. */
bool gpu_peak_bandwidth(const struct gpu_peak *peak, double *bandwidth, struct reason *reason);
bool gpu_peak_flops(const struct gpu_peak *peak, double *flops, struct reason *reason);

#endif
