/* SPDX-License-Identifier: MIT
 *
 * What a GPU's memory does at best when as much is written as is read, measured with a kernel of its own: what operations
 * that only move data are held against. Works on the device that is open on this thread (gpu.h).
 */
#ifndef FMLA_SUPPORT_GPU_COPY_H
#define FMLA_SUPPORT_GPU_COPY_H

#include "gpu.h"

/* Bytes/s, those read and those written together; the best of several copies of 2 GiB, or of less on a small GPU. */
bool gpu_copy_bandwidth(const struct gpu_description *gpu, double *bandwidth, struct fault *fault);

#endif
