/* SPDX-License-Identifier: MIT
 *
 * Sparse decode over FP8 keys on Hopper for few tokens, where only latency counts: tiles of 16 heads instead
 * of 64, so that all SMs take part, and every warp has the same role.
 *
 * A CTA takes a tile of 16 heads of one query token through the keys that the splits of its partition name,
 * 64 keys at a time:
 *
 *      all 8 warps     raw keys to registers, a block ahead
 *      warp w          16 keys (w % 4), half of their columns (w / 4): to fp16; S = K Qᵀ from registers; V to
 *                      shared memory
 *      warp w          softmax of heads 2 w, 2 w + 1; P to shared memory
 *      warp w          O of columns 64 w … 64 w + 63 += P V
 *
 * with a barrier after each phase. The matrix instructions are mma: a tile of 16 heads and 64 keys takes
 * some hundred clocks, and there is no asynchronous product to wait for, as with wgmma.
 *
 * The time is a chain of latencies: the split, indices, keys, scores, weights, results. So little is
 * computed before the first index is requested, and loops are not unrolled. Two CTAs fit an SM (128
 * registers, 93 KB).
 */
#pragma once

#include "mainloop.cuh"

namespace sparse_decode::small {

template <typename F> DEVICE void kernel(const struct sparse_decode_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    wait_for_kernels_before();
    let_next_kernel_start();
    SmallDecode<F>(p, *(Shared *)memory).run();
}

} // namespace sparse_decode::small

/* Defines both kernels of a format: the general one, and the one with one split per CTA. */
#define SPARSE_DECODE_SMALL_KERNELS(NAME, FORMAT)                                                            \
    DEFINE_KERNEL(NAME, sparse_decode_params, (sparse_decode::small::SMALL_THREADS, 2),                      \
                  sparse_decode::small::kernel<sparse_decode::FORMAT>(p))                                    \
    DEFINE_KERNEL(                                                                                           \
        NAME##_together, sparse_decode_sm90_params, (sparse_decode::small::SMALL_THREADS, 2),                \
        sparse_decode::small::kernel<sparse_decode::OneSplitFormat<sparse_decode::FORMAT>>(p.call))
