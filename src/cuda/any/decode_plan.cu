/* SPDX-License-Identifier: MIT
 *
 * The split plan on the device, bit-equal to plan_build (src/plan.c), by one block of threads.
 *
 * Lay the requests end to end on a line, each as long as its cost (blocks + PLAN_OVERHEAD), the first at 0; start[r] is
 * where request r begins. A partition that begins at X has room up to Y = X + payload: it finishes every request that
 * ends at or before Y. Of the request e that holds Y it takes what leaves room for the overhead, up to Y - PLAN_OVERHEAD,
 * unless that is nothing. So the next partition begins at
 *
 *      X' = max(Y - PLAN_OVERHEAD, start[e])          and e was cut if the first is the larger
 *
 * (a point inside request e stands for "start + blocks done"). That chain is the only thing in the plan that must be done
 * one after the other; a warp does it with two looks at 32 numbers a partition, over tiles of PLAN_THREADS requests
 * whose starts all threads have summed into shared memory.
 */
#include "../params.h"

static constexpr int TILE = PLAN_THREADS, WARPS = PLAN_THREADS / 32;
static_assert(WARPS == 32 && TILE == 32 * 32, "a tile is searched in two looks of a warp");

__device__ __forceinline__ int64_t blocks_of(const struct plan_params &p, int64_t request)
{
    if (request >= p.b) return -PLAN_OVERHEAD; /* no cost */
    int64_t length = p.seqlens[request];
    length = length < 0 ? 0 : length > p.capacity ? p.capacity : length;
    return length > PLAN_BLOCK ? (length + PLAN_BLOCK - 1) / PLAN_BLOCK : 1;
}

template <typename Int> __device__ __forceinline__ Int warp_inclusive_sum(Int x)
{
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const Int other = __shfl_up_sync(~0u, x, lanes);
        if ((int)threadIdx.x % 32 >= lanes) x += other;
    }
    return x;
}

/* Inclusive sum over the block of threads; sums has WARPS + 1 elements, and afterwards the whole in the last. */
template <typename Int> __device__ __forceinline__ Int block_inclusive_sum(Int x, Int *sums)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    x = warp_inclusive_sum(x);
    __syncthreads();
    if (lane == 31) sums[warp + 1] = x;
    __syncthreads();
    if (warp == 0) {
        const Int sum = warp_inclusive_sum(sums[lane + 1]);
        sums[lane + 1] = sum;
        if (lane == 0) sums[0] = 0;
    }
    __syncthreads();
    return x + sums[warp];
}

/* The partition that is being filled, as all lanes of the first warp know it. */
struct Walk {
    int32_t partition;
    int32_t request, block, split; /* where it begins */
    int64_t room_end;              /* Y, on the line */
    int32_t last_blocks;           /* of the last request before the tile in hand */
};

struct Tile {
    int64_t base;            /* where the tile begins on the line */
    int64_t start[TILE + 1]; /* of its requests, relative to base */
    int32_t cuts[TILE];      /* of its requests */
    int64_t sums[WARPS + 1];
    int32_t cut_sums[WARPS + 1];
};

/* Row `partition` of the plan. */
__device__ __forceinline__ void write_row(struct plan_partition *rows, int32_t partition, int32_t begin_request,
                                          int32_t begin_block, int32_t begin_split, int32_t end_request,
                                          int32_t end_block, bool cut)
{
    const bool idle = end_request < begin_request, alone = end_request == begin_request;
    struct plan_partition row;
    row.begin_request = begin_request;
    row.end_request = end_request;
    row.begin_block = begin_block;
    row.end_block = end_block;
    row.begin_split = begin_split;
    row.first_is_split = !idle && (begin_split > 0 || (alone && cut));
    row.last_is_split = !idle && (cut || (alone && begin_split > 0));
    row.zero = 0;
    rows[partition] = row;
}

/* Where partitions begin, one a lane (partition % 32), until their rows are written together. */
struct Begun {
    int32_t request, block, split;
};

/* Writes the rows of the partitions first … walk.partition - 1, which ended in this tile. A partition ends where the next
 * begins: within a request that it cut, or after the request before. */
__device__ __forceinline__ void write_rows(const struct plan_params &p, int32_t first, int64_t first_request, Tile &tile,
                                           const Walk &walk, const Begun &begun)
{
    const int lane = (int)threadIdx.x % 32;
    const int32_t partition = walk.partition - 1 - (walk.partition - 1 - lane) % 32; /* of this lane, the last one */
    int32_t next_request = __shfl_sync(~0u, begun.request, (lane + 1) % 32);
    int32_t next_block = __shfl_sync(~0u, begun.block, (lane + 1) % 32);
    if (partition == walk.partition - 1) next_request = walk.request, next_block = walk.block;
    if (partition < first || partition >= walk.partition) return;
    const bool cut = next_block > 0;
    const int local = (int)(next_request - first_request);
    const int32_t before =
        local ? (int32_t)(tile.start[local] - tile.start[local - 1]) - PLAN_OVERHEAD : walk.last_blocks;
    write_row(plan_partitions(p.plan), partition, begun.request, begun.block, begun.split,
              cut ? next_request : next_request - 1, cut ? next_block : before, cut);
    if (cut) atomicAdd(&tile.cuts[local], 1);
}

/* The largest of the lanes' numbers, none of them negative. */
__device__ __forceinline__ int32_t largest(int32_t x)
{
    return __reduce_max_sync(~0u, x);
}

__device__ __forceinline__ int64_t largest(int64_t x)
{
    for (int lanes = 16; lanes; lanes /= 2) {
        const int64_t other = __shfl_xor_sync(~0u, x, lanes);
        x = other > x ? other : x;
    }
    return x;
}

/* Fills partitions as long as they end within the tile. By the first warp. The lanes hold the starts of 32 neighbouring
 * requests, and look for Y among them; every step waits for the one before, so its latency is what the plan costs.
 * Int: int32_t where the numbers of the tile fit. */
template <typename Int>
__device__ __forceinline__ void walk_tile(const struct plan_params &p, int64_t payload, int64_t first_request, Tile &tile,
                                          Walk &walk, Begun &begun)
{
    const int lane = (int)threadIdx.x % 32;
    const Int coarse = (Int)tile.start[32 * lane + 32]; /* where 32 requests end */
    const Int end = (Int)tile.start[TILE];
    Int room_end = (Int)(walk.room_end - tile.base);
    int32_t first_unwritten = walk.partition;
    int window = 0;
    Int start = (Int)tile.start[lane];
    while (room_end < end && walk.partition < p.num_partitions) {
        unsigned begun_before = __ballot_sync(~0u, start <= room_end);
        if (begun_before == ~0u) { /* beyond the window, or in its last request */
            window = 32 * __popc(__ballot_sync(~0u, coarse <= room_end));
            start = (Int)tile.start[window + lane];
            begun_before = __ballot_sync(~0u, start <= room_end);
        }
        const Int its_start = largest(start <= room_end ? start : (Int)0);
        const Int next = max(room_end - PLAN_OVERHEAD, its_start);
        if (lane == walk.partition % 32) begun.request = walk.request, begun.block = walk.block, begun.split = walk.split;
        const int32_t request = (int32_t)first_request + window + __popc(begun_before) - 1;
        room_end = next + (Int)payload;
        walk.block = (int32_t)(next - its_start);
        walk.split = !walk.block ? 0 : request == walk.request ? walk.split + 1 : 1;
        walk.request = request;
        walk.partition++;
        if (walk.partition % 32 == 0) {
            write_rows(p, first_unwritten, first_request, tile, walk, begun);
            first_unwritten = walk.partition;
        }
    }
    write_rows(p, first_unwritten, first_request, tile, walk, begun);
    walk.room_end = tile.base + room_end;
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) decode_plan(const __grid_constant__ struct plan_params p)
{
    __shared__ Tile tile;
    const int thread = (int)threadIdx.x;

    /* The first tile, and the cost of what is beyond it. */
    int64_t end = block_inclusive_sum(blocks_of(p, thread) + PLAN_OVERHEAD, tile.sums);
    int64_t total = tile.sums[WARPS];
    if (p.b > TILE) {
        int64_t cost = 0;
        for (int64_t r = TILE + thread; r < p.b; r += PLAN_THREADS) cost += blocks_of(p, r) + PLAN_OVERHEAD;
        block_inclusive_sum(cost, tile.sums);
        total += tile.sums[WARPS];
    }
    const int64_t payload = (total + p.num_partitions - 1) / p.num_partitions + PLAN_OVERHEAD;
    int32_t *num_splits = plan_num_splits_of(p.plan, p.num_partitions);
    if (thread == 0) {
        p.plan->magic = PLAN_MAGIC;
        p.plan->num_partitions = p.num_partitions;
        p.plan->batch = p.b;
        p.plan->payload = payload;
        p.plan->zero = 0;
        num_splits[0] = 0;
        tile.base = 0;
    }

    Walk walk = {};
    Begun begun = {};
    walk.room_end = payload;
    int32_t cuts_before = 0;
    for (int64_t first = 0; first < p.b; first += TILE) {
        if (first) end = block_inclusive_sum(blocks_of(p, first + thread) + PLAN_OVERHEAD, tile.sums);
        tile.start[thread + 1] = end;
        if (thread == 0) tile.start[0] = 0;
        tile.cuts[thread] = 0;
        __syncthreads();
        if (thread < 32) {
            if (tile.start[TILE] < (1 << 29) && payload < (1 << 29))
                walk_tile<int32_t>(p, payload, first, tile, walk, begun);
            else
                walk_tile<int64_t>(p, payload, first, tile, walk, begun);
        }
        __syncthreads();
        const int32_t cuts = block_inclusive_sum(tile.cuts[thread], tile.cut_sums);
        if (first + thread < p.b) num_splits[first + thread + 1] = (int32_t)(first + thread + 1) + cuts_before + cuts;
        cuts_before += tile.cut_sums[WARPS];
        const int64_t last = min(p.b - first, (int64_t)TILE) - 1;
        walk.last_blocks = (int32_t)(tile.start[last + 1] - tile.start[last]) - PLAN_OVERHEAD;
        __syncthreads();
        if (thread == 0) tile.base += tile.start[TILE];
    }

    /* The partition in hand takes what is left; those after it are idle. */
    if (thread < 32) {
        struct plan_partition *rows = plan_partitions(p.plan);
        for (int32_t i = walk.partition + thread; i < p.num_partitions; i += 32) {
            const bool last = i == walk.partition;
            write_row(rows, i, last ? walk.request : (int32_t)p.b, last ? walk.block : 0, last ? walk.split : 0,
                      (int32_t)p.b - 1, walk.last_blocks, false);
        }
    }
}
