/* SPDX-License-Identifier: MIT
 *
 * Defines the kernels of sparse prefill over pages of bytes.
 */
#pragma once

#include "../sparse_decode/sparse_decode.cuh"

#define SPARSE_PREFILL_FP8_KERNEL(NAME, FORMAT)                                                              \
    DEFINE_KERNEL(NAME, sparse_prefill_fp8_params, (sparse_decode::THREADS, 1),                              \
                  sparse_decode::kernel<sparse_decode::FORMAT>(p.decode.call))

/* Both kernels of a format: tokens in turns, and parts of lists. */
#define SPARSE_PREFILL_FP8_KERNELS(NAME, FORMAT)                                                             \
    SPARSE_PREFILL_FP8_KERNEL(NAME, PrefillFormat<sparse_decode::FORMAT>)                                    \
    SPARSE_PREFILL_FP8_KERNEL(NAME##_together, PrefillPartFormat<sparse_decode::FORMAT>)
