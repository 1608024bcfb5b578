/* SPDX-License-Identifier: MIT
 *
 * Joins the partial results of requests that were cut, in split order.
 *
 * With few parts a request, a warp takes a row (rows_per_block = JOIN_WARPS); with many, all warps of a block share one
 * row (rows_per_block = 1), each taking every JOIN_WARPS-th part, and join in shared memory. A request of few parts among
 * ones of many is added by one warp all the same: in the same order, so with the same bits, whatever else is there.
 * Either way every lane has PARTS_AT_ONCE parts in flight: the latency of one part is paid once for four.
 *
 * Every block of threads first lists the cut requests, a thread a partition (batch-invariant: a request), and then takes
 * every gridDim-th row block of them: few blocks do, and where nothing was cut they have nothing to do.
 */
#include "../device/element.cuh"
#include "../device/pieces.cuh"
#include "../device/result.cuh"
#include "../device/warpgroup.cuh"

static constexpr int D_V = 512, LANE_VECTORS = D_V / (32 * 4), PARTS_AT_ONCE = 4;

/* Where the parts of a request are: slots first, second, second + step, … */
struct Parts {
    int request;
    int count; /* 0: nothing to join */
    int64_t first, second;
    int step;

    __device__ __forceinline__ int64_t slot(int part) const
    {
        return part == 0 ? first : second + (int64_t)(part - 1) * step;
    }
};

/* Of a partition: the request that is cut for the first time at its end. */
__device__ static Parts parts_of_partition(const struct dense_decode_params &p, int index)
{
    Parts parts = {};
    const Partition partition = partition_of(p.split, index, p.b);
    if (!plan_fits(p.split, p.b)) return parts;
    const bool begins_here = partition.last > partition.first || !partition.continued;
    if (!partition.goes_on || partition.last < partition.first || !begins_here) return parts;
    const int32_t *splits = plan_num_splits_of(p.split.plan, p.split.num_partitions) + partition.last;
    const int64_t planned = (int64_t)splits[1] - splits[0];
    parts.count = (int)min(max(planned, (int64_t)1), (int64_t)p.split.num_partitions - index);
    parts.request = partition.last;
    parts.first = 2 * (int64_t)index + (partition.last == partition.first ? 0 : 1);
    parts.second = 2 * (int64_t)(index + 1);
    parts.step = 2;
    return parts;
}

__device__ static Parts parts_of_request(const struct dense_decode_params &p, int request)
{
    Parts parts = {};
    const int chunks = chunks_of(request_length(p, request));
    parts.request = request;
    parts.count = chunks > 1 ? chunks : 0;
    parts.first = (int64_t)request * p.split.chunks;
    parts.second = parts.first + 1;
    parts.step = 1;
    return parts;
}

/* Sums over the parts begin, begin + stride, … of a row; weights are relative to `lse`. */
__device__ __forceinline__ void add_parts(const struct dense_decode_params &p, const Parts &parts,
                                          int64_t rows, int64_t row, int begin, int stride, float lse,
                                          float4 sum[LANE_VECTORS])
{
    const int lane = (int)threadIdx.x % 32;
    for (int part = begin; part < parts.count; part += PARTS_AT_ONCE * stride) {
        float weight[PARTS_AT_ONCE];
        float4 values[PARTS_AT_ONCE][LANE_VECTORS] = {};
#pragma unroll
        for (int i = 0; i < PARTS_AT_ONCE; i++) {
            weight[i] = 0.0f;
            if (part + i * stride >= parts.count) continue;
            const int64_t slot_row = parts.slot(part + i * stride) * rows + row;
            const float part_lse = __ldg(p.split.slot_lse + slot_row);
            if (isinf(part_lse)) continue; /* it saw no key */
            weight[i] = expf(part_lse - lse);
            const float4 *from = (const float4 *)(p.split.slot_out + slot_row * D_V) + lane;
#pragma unroll
            for (int v = 0; v < LANE_VECTORS; v++) values[i][v] = __ldg(from + 32 * v);
        }
#pragma unroll
        for (int i = 0; i < PARTS_AT_ONCE; i++)
#pragma unroll
            for (int v = 0; v < LANE_VECTORS; v++) {
                sum[v].x += weight[i] * values[i][v].x, sum[v].y += weight[i] * values[i][v].y;
                sum[v].z += weight[i] * values[i][v].z, sum[v].w += weight[i] * values[i][v].w;
            }
    }
}

/* The natural lse over all parts of a row; every warp finds the same. */
__device__ __forceinline__ float total_lse(const struct dense_decode_params &p, const Parts &parts,
                                           int64_t rows, int64_t row)
{
    const int lane = (int)threadIdx.x % 32;
    float most = -INFINITY, sum = 0.0f;
    for (int part = lane; part < parts.count; part += 32)
        most = fmaxf(most, __ldg(p.split.slot_lse + parts.slot(part) * rows + row));
    for (int lanes = 16; lanes; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    if (most == -INFINITY) most = 0.0f; /* no part saw a key, or all are NaN */
    for (int part = lane; part < parts.count; part += 32)
        sum += expf(__ldg(p.split.slot_lse + parts.slot(part) * rows + row) - most);
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    return sum == 0.0f ? -INFINITY : most + logf(sum);
}

template <typename Element>
__device__ __forceinline__ void write_row(const struct dense_decode_params &p, int request, int64_t row,
                                          float lse, const float4 sum[LANE_VECTORS])
{
    const int lane = (int)threadIdx.x % 32;
    const RowPlace place = row_place(p, (int)(row % p.rows), (int)(row / p.rows));
    const float factor = result_sink_factor(p.output.rules, place.head, lse);
    const int64_t at = out_offset(p.output, request, place) + 4 * lane;
#pragma unroll
    for (int v = 0; v < LANE_VECTORS; v++) {
        store_pair<Element>(p.output, at + 128 * v, sum[v].x * factor, sum[v].y * factor);
        store_pair<Element>(p.output, at + 128 * v + 2, sum[v].z * factor, sum[v].w * factor);
    }
    if (lane == 0) store_lse(p.output, request, place, lse);
}

/* Launched with LAUNCH_OVERLAP, it may be here before the kernel that makes the parts has ended. The plan and the lengths
 * are there already: that kernel has waited for them before it let this one start. */
__device__ __forceinline__ void wait_for_parts()
{
#if __CUDA_ARCH__ >= 900
    wait_for_kernels_before();
#endif
}

/* By all threads of the block: puts what they have to be joined (count > 0) into a list, in their order; returns its
 * length. */
__device__ __forceinline__ int list_parts(const Parts &mine, Parts list[32 * JOIN_WARPS],
                                          int counts[JOIN_WARPS])
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const uint32_t votes = __ballot_sync(~0u, mine.count > 0);
    if (lane == 0) counts[warp] = __popc(votes);
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < JOIN_WARPS; w++) {
        before += w < warp ? counts[w] : 0;
        all += counts[w];
    }
    if (mine.count) list[before + __popc(votes & ((1u << lane) - 1u))] = mine;
    __syncthreads();
    return all;
}

/* One row block of a request, by all threads of the block. */
template <typename Element>
__device__ __forceinline__ void join_rows(const struct dense_decode_params &p, const Parts &parts,
                                          int64_t row_block, int rows_per_block,
                                          float4 shared[JOIN_WARPS][D_V / 4])
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int64_t rows = (int64_t)p.h_q * p.s_q;
    const bool one_row = rows_per_block == 1, shares = one_row && parts.count > MANY_PARTS;
    if (one_row && !shares && warp) return;
    const int64_t row = row_block * rows_per_block + (one_row ? 0 : warp);
    if (row >= rows) return; /* never with a shared row: no barrier is left out by some */
    const float lse = total_lse(p, parts, rows, row);
    float4 sum[LANE_VECTORS] = {};
    add_parts(p, parts, rows, row, shares ? warp : 0, shares ? JOIN_WARPS : 1, lse, sum);
    if (shares) {
#pragma unroll
        for (int v = 0; v < LANE_VECTORS; v++) shared[warp][lane + 32 * v] = sum[v];
        __syncthreads();
        if (warp == 0) {
#pragma unroll
            for (int v = 0; v < LANE_VECTORS; v++)
                for (int w = 1; w < JOIN_WARPS; w++) {
                    const float4 other = shared[w][lane + 32 * v];
                    sum[v].x += other.x, sum[v].y += other.y, sum[v].z += other.z, sum[v].w += other.w;
                }
        }
        __syncthreads();
        if (warp) return;
    }
    write_row<Element>(p, parts.request, row, lse, sum);
}

template <typename Element>
__device__ __forceinline__ void join_splits(const struct dense_decode_params &p, int rows_per_block)
{
    __shared__ float4 shared[JOIN_WARPS][D_V / 4];
    __shared__ Parts list[32 * JOIN_WARPS];
    __shared__ int counts[JOIN_WARPS];
    const int64_t row_blocks = ((int64_t)p.h_q * p.s_q + rows_per_block - 1) / rows_per_block;
    const int units = p.split.plan ? p.split.num_partitions : p.b;
    int64_t item = blockIdx.x,
            first_item = 0; /* row blocks of all cut requests are numbered; of the first of the list */
    for (int first = 0; first < units; first += 32 * JOIN_WARPS) {
        const int unit = first + (int)threadIdx.x;
        Parts mine = {};
        if (unit < units) mine = p.split.plan ? parts_of_partition(p, unit) : parts_of_request(p, unit);
        const int64_t end_item = first_item + list_parts(mine, list, counts) * row_blocks;
        if (first == 0) wait_for_parts();
        for (; item < end_item; item += gridDim.x)
            join_rows<Element>(p, list[(item - first_item) / row_blocks], (item - first_item) % row_blocks,
                               rows_per_block, shared);
        first_item = end_item;
        __syncthreads(); /* the list has been read */
    }
}

extern "C" __global__ void __launch_bounds__(32 * JOIN_WARPS)
    join_splits_bf16(const __grid_constant__ struct dense_decode_params p, int32_t rows_per_block)
{
    join_splits<Bf16>(p, rows_per_block);
}

extern "C" __global__ void __launch_bounds__(32 * JOIN_WARPS)
    join_splits_fp16(const __grid_constant__ struct dense_decode_params p, int32_t rows_per_block)
{
    join_splits<Fp16>(p, rows_per_block);
}
