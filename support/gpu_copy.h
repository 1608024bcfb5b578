/* SPDX-License-Identifier: MIT
 *
 * Measures the best memory bandwidth of a GPU when as much is written as is read, with a copy kernel. It
 * is the reference for operations that only move data. Works on the device that is open on this thread
 * (gpu.h).
 */
#ifndef FMLA_SUPPORT_GPU_COPY_H
#define FMLA_SUPPORT_GPU_COPY_H

#include "gpu.h"

/* Sets *bandwidth to bytes/s, reads and writes added: the best of several copies of 2 GiB, or of less on a
 * small GPU. */
bool gpu_copy_bandwidth(const struct gpu_description *gpu, double *bandwidth, struct reason *reason);

#endif
