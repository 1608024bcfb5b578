// The reference for memory-bound rows: pages of 73,728 bytes streamed into shared memory and dropped, nothing else.
#pragma once
#include "decode.h"
#include "ptx.cuh"

enum { STREAM_CHUNK = 18432, STREAM_SLOTS = 12, STREAM_SMEM = STREAM_CHUNK * STREAM_SLOTS };

// CTA c takes pages [c n / grid, (c + 1) n / grid) of the list.
__global__ void __launch_bounds__(32, 1) stream_kernel(const uint8_t *cache, const int *pages, int n) {
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ __align__(8) uint64_t full[STREAM_SLOTS];
    if (threadIdx.x != 0) return;
    for (int i = 0; i < STREAM_SLOTS; i++) mbarrier_init(smem_address(&full[i]), 1);
    fence_mbarrier_init();
    fence_proxy_async();
    int64_t begin = (int64_t)n * blockIdx.x / gridDim.x, end = (int64_t)n * (blockIdx.x + 1) / gridDim.x;
    int chunks = (int)(end - begin) * 4, slot = 0, parity = 1, page = begin < end ? pages[begin] : 0;
    for (int i = 0; i < chunks; i++) {
        uint32_t bar = smem_address(&full[slot]);
        if (i >= STREAM_SLOTS) mbarrier_wait_thread(bar, parity);
        mbarrier_arrive_expect_tx(bar, STREAM_CHUNK);
        bulk_load(smem_address(shared) + slot * STREAM_CHUNK, cache + ((int64_t)page * 4 + (i & 3)) * STREAM_CHUNK, STREAM_CHUNK,
                  bar);
        if ((i & 3) == 3 && i + 1 < chunks) page = pages[begin + (i + 1) / 4];
        if (++slot == STREAM_SLOTS) slot = 0, parity ^= 1;
    }
    for (int i = max(0, chunks - STREAM_SLOTS); i < chunks; i++)
        mbarrier_wait_thread(smem_address(&full[i % STREAM_SLOTS]), i / STREAM_SLOTS & 1);
}
