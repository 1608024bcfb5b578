// Merges the parts of split requests, in split order.
//
// Grid: partitions x any. Up to 8 parts: a warp a row. More: CTA (k, y) merges rows y, y + gridDim.y, ... of the request whose first part ends partition k
// (at most one). 256 threads a row: two groups of 128 take even and odd parts, a thread four columns; all loads of a
// round of 8 parts are in flight together. Launched with programmatic serialisation, it stands ready when decode ends.
#pragma once
#include "decode.h"
#include "ptx.cuh"
#include <cuda_bf16.h>
#include <math_constants.h>

enum { MERGE_THREADS = 256, MERGE_MAX_PARTS = 256, MERGE_ROUND = 4, MERGE_WARP_PARTS = 8 };

// Few parts (the rule when many requests are in flight): a warp a row, no barrier, two parts' loads together.
DEVICE void merge_row_by_warp(const decode_params &p, int request, int first, int parts, int row, int lane)
{
    float mine = lane < parts ? __ldcg(p.part_lse + (int64_t)(first + lane) * p.rows + row) : -CUDART_INF_F;
    float most = mine;
    for (int o = 4; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
    float w = mine == -CUDART_INF_F ? 0 : exp2f(mine - most), sum = w;
    for (int o = 4; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    w *= sum > 0 ? 1 / sum : 0;
    const float4 *from = (const float4 *)(p.part_out + ((int64_t)first * p.rows + row) * D_V) + lane;
    const int64_t step = (int64_t)p.rows * (D_V / 4);
    float4 acc[4] = {};
    for (int i = 0; i < parts; i += 2) {
        float4 v[2][4];
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (i + j < parts) v[j][c] = __ldcg(from + (i + j) * step + c * 32);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float weight = __shfl_sync(~0u, w, i + j); // 0 for a part without keys, which was never written
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (weight > 0)
                    acc[c].x += weight * v[j][c].x, acc[c].y += weight * v[j][c].y,
                        acc[c].z += weight * v[j][c].z, acc[c].w += weight * v[j][c].w;
        }
    }
#pragma unroll
    for (int c = 0; c < 4; c++)
        ((uint2 *)p.out)[((int64_t)request * p.rows + row) * (D_V / 4) + c * 32 + lane] =
            make_uint2(pack_bf16(acc[c].x, acc[c].y), pack_bf16(acc[c].z, acc[c].w));
    most = __shfl_sync(~0u, most, 0), sum = __shfl_sync(~0u, sum, 0);
    if (lane == 0)
        p.lse[((int64_t)request * p.h_q + row % p.h_q) * p.s_q + row / p.h_q] =
            sum > 0 ? (most + log2f(sum)) * 0.693147180559945309f : CUDART_INF_F;
}

__global__ void __launch_bounds__(MERGE_THREADS) merge_kernel(const __grid_constant__ decode_params p)
{
    __shared__ float weight[MERGE_MAX_PARTS];
    __shared__ float4 other[128];
    partition part = p.plan[blockIdx.x];
    if (part.end_request < part.begin_request || !part.last_is_split) return;
    if (part.end_request == part.begin_request && part.begin_split > 0) return;
    int request = part.end_request, first = p.num_splits[request], parts = p.num_splits[request + 1] - first;
    int group = threadIdx.x >> 7, lane = threadIdx.x & 31, column = threadIdx.x & 127;
    griddepcontrol_wait();
    if (parts <= MERGE_WARP_PARTS) {
        for (int row = blockIdx.y * 8 + (threadIdx.x >> 5); row < p.rows; row += gridDim.y * 8)
            merge_row_by_warp(p, request, first, parts, row, lane);
        return;
    }
    for (int row = blockIdx.y; row < p.rows; row += gridDim.y) {
        const float4 *from = (const float4 *)(p.part_out + ((int64_t)first * p.rows + row) * D_V) + column;
        const int64_t step = (int64_t)p.rows * (D_V / 4);
        float4 v[MERGE_ROUND];
#pragma unroll
        for (int i = 0; i < MERGE_ROUND; i++)
            if (group + 2 * i < parts) v[i] = __ldcg(from + (group + 2 * i) * step);
        if (threadIdx.x < 32) {
            float most = -CUDART_INF_F, sum = 0;
            for (int i = lane; i < parts; i += 32) {
                float x = __ldcg(p.part_lse + (int64_t)(first + i) * p.rows + row);
                weight[i] = x;
                most = fmaxf(most, x);
            }
            for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
            for (int i = lane; i < parts; i += 32) {
                float w = weight[i] == -CUDART_INF_F ? 0 : exp2f(weight[i] - most);
                weight[i] = w;
                sum += w;
            }
            for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
            float inv = sum > 0 ? 1 / sum : 0;
            for (int i = lane; i < parts; i += 32) weight[i] *= inv;
            if (lane == 0)
                p.lse[((int64_t)request * p.h_q + row % p.h_q) * p.s_q + row / p.h_q] =
                    sum > 0 ? (most + log2f(sum)) * 0.693147180559945309f : CUDART_INF_F;
        }
        __syncthreads();
        float4 acc = make_float4(0, 0, 0, 0);
        for (int i0 = group; i0 < parts; i0 += 2 * MERGE_ROUND) {
            if (i0 != group) {
#pragma unroll
                for (int i = 0; i < MERGE_ROUND; i++)
                    if (i0 + 2 * i < parts) v[i] = __ldcg(from + (i0 + 2 * i) * step);
            }
#pragma unroll
            for (int i = 0; i < MERGE_ROUND; i++) {
                float w = i0 + 2 * i < parts ? weight[i0 + 2 * i] : 0;
                if (w > 0) { // a part without keys was never written
                    acc.x += w * v[i].x, acc.y += w * v[i].y, acc.z += w * v[i].z, acc.w += w * v[i].w;
                }
            }
        }
        if (group == 1) other[column] = acc;
        __syncthreads();
        if (group == 0) {
            float4 x = other[column];
            uint2 packed =
                make_uint2(pack_bf16(acc.x + x.x, acc.y + x.y), pack_bf16(acc.z + x.z, acc.w + x.w));
            ((uint2 *)p.out)[((int64_t)request * p.rows + row) * (D_V / 4) + column] = packed;
        }
        __syncthreads();
    }
}
