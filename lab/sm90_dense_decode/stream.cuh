// The reference for memory-bound rows: pages of 73,728 bytes streamed into shared memory and dropped, nothing else.
#pragma once
#include "decode.h"
#include "ptx.cuh"

enum { STREAM_CHUNK = 18432, STREAM_SLOTS = 12, STREAM_SMEM = STREAM_CHUNK * STREAM_SLOTS };

// CTA c takes pages [c n / grid, (c + 1) n / grid) of the list.
__global__ void __launch_bounds__(32, 1) stream_kernel(const uint8_t *cache, const int *pages, int n)
{
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
        bulk_load(smem_address(shared) + slot * STREAM_CHUNK,
                  cache + ((int64_t)page * 4 + (i & 3)) * STREAM_CHUNK, STREAM_CHUNK, bar);
        if ((i & 3) == 3 && i + 1 < chunks) page = pages[begin + (i + 1) / 4];
        if (++slot == STREAM_SLOTS) slot = 0, parity ^= 1;
    }
    for (int i = max(0, chunks - STREAM_SLOTS); i < chunks; i++)
        mbarrier_wait_thread(smem_address(&full[i % STREAM_SLOTS]), i / STREAM_SLOTS & 1);
}

// The same through tensor maps, to price the box shape. A page is read as boxes of {64 columns, box_rows, groups};
// groups = 2 means four pairs of column groups and the rope group, as the decode kernel does.
__global__ void __launch_bounds__(32, 1)
    stream_boxes_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap rope_map,
                        int box_rows, int groups, int slot_bytes, int slots, const int *pages, int n)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ __align__(8) uint64_t full[32];
    if (threadIdx.x != 0) return;
    for (int i = 0; i < slots; i++) mbarrier_init(smem_address(&full[i]), 1);
    fence_mbarrier_init();
    fence_proxy_async();
    int64_t begin = (int64_t)n * blockIdx.x / gridDim.x, end = (int64_t)n * (blockIdx.x + 1) / gridDim.x;
    int per_page = groups == 2 ? 5 : PAGE / box_rows;
    int chunks = (int)(end - begin) * per_page, slot = 0, parity = 1, part = 0;
    const int *at = pages + begin;
    int page = begin < end ? *at : 0;
    for (int i = 0; i < chunks; i++) {
        uint32_t bar = smem_address(&full[slot]), to = smem_address(shared) + slot * slot_bytes;
        if (i >= slots) mbarrier_wait_thread(bar, parity);
        bool rope = groups == 2 && part == 4;
        mbarrier_arrive_expect_tx(bar, rope ? 8192 : box_rows * groups * 128);
        if (groups == 2)
            tma_load_3d(to, rope ? &rope_map : &map, bar, 0, page * PAGE, part * 2);
        else
            tma_load_3d(to, &map, bar, 0, page * PAGE + part * box_rows, 0);
        if (++part == per_page) {
            part = 0, at++;
            if (i + 1 < chunks) page = *at;
        }
        if (++slot == slots) slot = 0, parity ^= 1;
    }
    for (int i = max(0, chunks - slots); i < chunks; i++)
        mbarrier_wait_thread(smem_address(&full[i % slots]), i / slots & 1);
}
