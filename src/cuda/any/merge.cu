/* SPDX-License-Identifier: MIT
 *
 * Merges n results over disjoint keys (fmla_merge). A CTA takes a row and adds the parts in order. The
 * weights of MERGE_THREADS parts at a time are computed once, in shared memory; each thread has ELEMENTS
 * elements of PARTS_AT_ONCE parts in flight.
 */
#include "../device/element.cuh"
#include "../device/result.cuh"
#include "../device/warp.cuh"

static constexpr int PARTS_AT_ONCE = 4, ELEMENTS = 4;

enum { BF16 = 0, FP16 = 1, F32 = 2 }; /* enum element */

DEVICE float load_element(const void *values, int64_t at, int element)
{
    return element == BF16   ? Bf16::to_float(__ldg((const uint16_t *)values + at))
           : element == FP16 ? Fp16::to_float(__ldg((const uint16_t *)values + at))
                             : __ldg((const float *)values + at);
}

DEVICE void store_element(void *values, int64_t at, int element, float x)
{
    if (element == BF16)
        ((uint16_t *)values)[at] = Bf16::from_float(x);
    else if (element == FP16)
        ((uint16_t *)values)[at] = Fp16::from_float(x);
    else
        ((float *)values)[at] = x;
}

struct MergeRow {
    int64_t request, token, head;
};

/* Returns the natural lse of a part; -inf if it saw no key (either convention). */
DEVICE float part_lse(const struct merge_params &p, const MergeRow &row, int64_t part)
{
    const float lse = __ldg(p.lse_parts + part * p.lse_parts_stride[0] + row.request * p.lse_parts_stride[1] +
                            row.head * p.lse_parts_stride[2] + row.token);
    return isinf(lse) ? -INFINITY : lse / p.rules.lse_factor;
}

/* Returns the natural lse over all parts; every thread of the warp gets the same. */
DEVICE float total_lse(const struct merge_params &p, const MergeRow &row)
{
    const int lane = (int)threadIdx.x % 32;
    float most = -INFINITY, sum = 0.0f;
    for (int64_t part = lane; part < p.n; part += 32) most = fmaxf(most, part_lse(p, row, part));
    most = warp_max(most);
    if (most == -INFINITY) most = 0.0f;
    for (int64_t part = lane; part < p.n; part += 32) sum += expf(part_lse(p, row, part) - most);
    sum = warp_sum(sum);
    return sum == 0.0f ? -INFINITY : most + logf(sum);
}

/* Loads `count` elements, at most ELEMENTS, from `at` on, and fills up with zeros. */
DEVICE void load_elements(const struct merge_params &p, int64_t at, int count, float value[ELEMENTS])
{
    if (p.vectors_aligned && count == ELEMENTS) {
        if (p.part_element == F32) {
            const float4 four = __ldg((const float4 *)((const float *)p.out_parts + at));
            value[0] = four.x, value[1] = four.y, value[2] = four.z, value[3] = four.w;
        } else {
            const uint2 four = __ldg((const uint2 *)((const uint16_t *)p.out_parts + at));
            const uint16_t bits[ELEMENTS] = {(uint16_t)four.x, (uint16_t)(four.x >> 16), (uint16_t)four.y,
                                             (uint16_t)(four.y >> 16)};
#pragma unroll
            for (int j = 0; j < ELEMENTS; j++)
                value[j] = p.part_element == BF16 ? Bf16::to_float(bits[j]) : Fp16::to_float(bits[j]);
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < ELEMENTS; j++)
        value[j] = j < count ? load_element(p.out_parts, at + j, p.part_element) : 0.0f;
}

/* Adds `elements` elements of `count` parts from part `begin`; `from` is the first element, of part 0. A
 * negative weight means that the part saw no key; its out is not read. */
DEVICE void add_parts(const struct merge_params &p, int64_t from, int elements, int64_t begin, int count,
                      const float *weights, float sum[ELEMENTS])
{
    for (int part = 0; part < count; part += PARTS_AT_ONCE) {
        float value[PARTS_AT_ONCE][ELEMENTS];
#pragma unroll
        for (int i = 0; i < PARTS_AT_ONCE; i++) {
            const bool some = part + i < count && !(weights[part + i] < 0.0f);
            load_elements(p, (begin + part + i) * p.out_parts_stride[0] + from, some ? elements : 0,
                          value[i]);
        }
#pragma unroll
        for (int i = 0; i < PARTS_AT_ONCE; i++)
#pragma unroll
            for (int j = 0; j < ELEMENTS; j++)
                if (part + i < count && !(weights[part + i] < 0.0f))
                    sum[j] += weights[part + i] * value[i][j];
    }
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS, 8)
    merge(const __grid_constant__ struct merge_params p)
{
    __shared__ float weights[MERGE_THREADS];
    for (int64_t index = blockIdx.x; index < p.b * p.s_q * p.h_q; index += gridDim.x) {
        const MergeRow row = {index / p.h_q / p.s_q, index / p.h_q % p.s_q, index % p.h_q};
        const float lse = total_lse(p, row);
        const float factor = result_sink_factor(p.rules, row.head, lse);
        const int64_t from = row.request * p.out_parts_stride[1] + row.token * p.out_parts_stride[2] +
                             row.head * p.out_parts_stride[3];
        const int64_t to =
            row.request * p.out_stride[0] + row.token * p.out_stride[1] + row.head * p.out_stride[2];
        for (int64_t first = 0; first < p.d_v; first += ELEMENTS * MERGE_THREADS) {
            const int64_t d = first + ELEMENTS * threadIdx.x;
            const int elements = (int)max(min(p.d_v - d, (int64_t)ELEMENTS), (int64_t)0);
            float sum[ELEMENTS] = {};
            for (int64_t begin = 0; begin < p.n; begin += MERGE_THREADS) {
                __syncthreads(); /* all threads are done with the previous weights */
                if (begin + threadIdx.x < p.n) {
                    const float own = part_lse(p, row, begin + threadIdx.x);
                    weights[threadIdx.x] = own == -INFINITY ? -1.0f : expf(own - lse);
                }
                __syncthreads();
                const int count = (int)min(p.n - begin, (int64_t)MERGE_THREADS);
                add_parts(p, from + d, elements, begin, count, weights, sum);
            }
#pragma unroll
            for (int j = 0; j < ELEMENTS; j++)
                if (j < elements) store_element(p.out, to + d + j, p.out_element, sum[j] * factor);
        }
        if (p.lse && threadIdx.x == 0)
            p.lse[row.request * p.lse_stride[0] + row.head * p.lse_stride[1] + row.token] =
                result_lse(p.rules, lse);
    }
}
