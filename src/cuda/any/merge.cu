/* SPDX-License-Identifier: MIT
 *
 * Merges n results over disjoint keys (fmla_merge). A CTA takes a row and adds the parts in order. The
 * weights of MERGE_THREADS parts at a time are computed once, in shared memory; each thread has ELEMENTS
 * elements of PARTS_AT_ONCE parts in flight.
 *
 * The result may replace a part, so loads are not of the read-only path. A thread writes the elements that it
 * alone reads, after it read them of all parts; a row's lse is written after the last barrier, before which all
 * threads read those of the parts.
 */
#include "../device/element.cuh"
#include "../device/result.cuh"
#include "../device/warp.cuh"

static constexpr int PARTS_AT_ONCE = 4, ELEMENTS = 4;

enum { BF16 = 0, FP16 = 1, F32 = 2 }; /* enum element */

DEVICE int bytes_of(int element)
{
    return element == F32 ? 4 : 2;
}

DEVICE float load_element(const void *values, int64_t at, int element)
{
    return element == BF16   ? Bf16::to_float(((const uint16_t *)values)[at])
           : element == FP16 ? Fp16::to_float(((const uint16_t *)values)[at])
                             : ((const float *)values)[at];
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

/* Where a row begins: of the first part at out_parts, of the part at out_last, and of the result; and where its
 * lse is. */
struct MergeRow {
    const char *parts, *last;
    int64_t out;
    const float *lse_parts, *lse_last;
    float *lse; /* NULL: not wanted */
};

DEVICE MergeRow merge_row(const struct merge_params &p, int64_t request, int64_t token, int64_t head)
{
    MergeRow row;
    const int bytes = bytes_of(p.part_element);
    row.parts =
        (const char *)p.out_parts + bytes * (request * p.out_parts_stride[1] + token * p.out_parts_stride[2] +
                                             head * p.out_parts_stride[3]);
    row.last =
        (const char *)p.out_last +
        bytes * (request * p.out_last_stride[0] + token * p.out_last_stride[1] + head * p.out_last_stride[2]);
    row.out = request * p.out_stride[0] + token * p.out_stride[1] + head * p.out_stride[2];
    row.lse_parts = p.lse_parts + request * p.lse_parts_stride[1] + head * p.lse_parts_stride[2] + token;
    row.lse_last = p.lse_last + request * p.lse_last_stride[0] + head * p.lse_last_stride[1] + token;
    row.lse = p.lse ? p.lse + request * p.lse_stride[0] + head * p.lse_stride[1] + token : NULL;
    return row;
}

/* Returns the natural lse of a part; -inf if it saw no key (either convention). */
DEVICE float part_lse(const struct merge_params &p, const MergeRow &row, int64_t part)
{
    const float lse = *(part == p.last ? row.lse_last : row.lse_parts + part * p.lse_parts_stride[0]);
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

/* ELEMENTS neighbouring elements of a part. */
struct Vector {
    uint2 halves; /* of 16-bit types */
    float4 words;
};

template <int ELEMENT> DEVICE void load_vector(Vector &vector, const void *values)
{
    if (ELEMENT == F32)
        vector.words = *(const float4 *)values;
    else
        vector.halves = *(const uint2 *)values;
}

template <int ELEMENT> DEVICE void vector_values(const Vector &vector, float value[ELEMENTS])
{
    const uint2 two = vector.halves;
    const uint16_t bits[ELEMENTS] = {(uint16_t)two.x, (uint16_t)(two.x >> 16), (uint16_t)two.y,
                                     (uint16_t)(two.y >> 16)};
    const float words[ELEMENTS] = {vector.words.x, vector.words.y, vector.words.z, vector.words.w};
#pragma unroll
    for (int j = 0; j < ELEMENTS; j++)
        value[j] = ELEMENT == BF16   ? Bf16::to_float(bits[j])
                   : ELEMENT == FP16 ? Fp16::to_float(bits[j])
                                     : words[j];
}

/* Returns where element d of a part's row is. */
DEVICE const void *part_out(const struct merge_params &p, const MergeRow &row, int64_t part, int64_t d)
{
    const int bytes = bytes_of(p.part_element);
    const char *const first = part == p.last ? row.last : row.parts + bytes * (part * p.out_parts_stride[0]);
    return first + bytes * d;
}

/* Adds ELEMENTS elements from element d on, of `count` parts from `begin` on. A negative weight means that the
 * part saw no key; its out is not read. */
template <int ELEMENT>
DEVICE void add_vectors(const struct merge_params &p, const MergeRow &row, int64_t d, int64_t begin,
                        int count, const float *weights, float sum[ELEMENTS])
{
    for (int part = 0; part < count; part += PARTS_AT_ONCE) {
        Vector vector[PARTS_AT_ONCE];
        float weight[PARTS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < PARTS_AT_ONCE; i++) {
            weight[i] = part + i < count ? weights[part + i] : -1.0f;
            if (!(weight[i] < 0.0f)) load_vector<ELEMENT>(vector[i], part_out(p, row, begin + part + i, d));
        }
#pragma unroll
        for (int i = 0; i < PARTS_AT_ONCE; i++) {
            float value[ELEMENTS];
            vector_values<ELEMENT>(vector[i], value);
#pragma unroll
            for (int j = 0; j < ELEMENTS; j++)
                if (!(weight[i] < 0.0f)) sum[j] += weight[i] * value[j];
        }
    }
}

/* Adds likewise `elements` elements, at most ELEMENTS, of any alignment. */
DEVICE void add_elements(const struct merge_params &p, const MergeRow &row, int64_t d, int elements,
                         int64_t begin, int count, const float *weights, float sum[ELEMENTS])
{
    for (int part = 0; part < count; part++) {
        if (weights[part] < 0.0f) continue;
        const void *const values = part_out(p, row, begin + part, d);
#pragma unroll
        for (int j = 0; j < ELEMENTS; j++)
            if (j < elements) sum[j] += weights[part] * load_element(values, j, p.part_element);
    }
}

DEVICE void add_parts(const struct merge_params &p, const MergeRow &row, int64_t d, int elements,
                      int64_t begin, int count, const float *weights, float sum[ELEMENTS])
{
    if (!p.vectors_aligned || elements < ELEMENTS)
        add_elements(p, row, d, elements, begin, count, weights, sum);
    else if (p.part_element == BF16)
        add_vectors<BF16>(p, row, d, begin, count, weights, sum);
    else if (p.part_element == FP16)
        add_vectors<FP16>(p, row, d, begin, count, weights, sum);
    else
        add_vectors<F32>(p, row, d, begin, count, weights, sum);
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS, 8)
    merge(const __grid_constant__ struct merge_params p)
{
    __shared__ float weights[MERGE_THREADS];
    for (int64_t index = blockIdx.x; index < p.b * p.s_q * p.h_q; index += gridDim.x) {
        const int64_t head = index % p.h_q;
        const MergeRow row = merge_row(p, index / p.h_q / p.s_q, index / p.h_q % p.s_q, head);
        const float lse = total_lse(p, row);
        const float factor = result_sink_factor(p.rules, head, lse);
        for (int64_t first = 0; first < p.d_v; first += ELEMENTS * MERGE_THREADS) {
            const int64_t d = first + ELEMENTS * threadIdx.x;
            const int elements = (int)max(min(p.d_v - d, (int64_t)ELEMENTS), (int64_t)0);
            float sum[ELEMENTS] = {};
            for (int64_t begin = 0; begin < p.out_count; begin += MERGE_THREADS) {
                __syncthreads(); /* all threads are done with the previous weights */
                if (begin + threadIdx.x < p.out_count) {
                    const float own = part_lse(p, row, p.out_first + begin + threadIdx.x);
                    weights[threadIdx.x] = own == -INFINITY ? -1.0f : expf(own - lse);
                }
                __syncthreads();
                const int count = (int)min(p.out_count - begin, (int64_t)MERGE_THREADS);
                add_parts(p, row, d, elements, begin, count, weights, sum);
            }
#pragma unroll
            for (int j = 0; j < ELEMENTS; j++)
                if (j < elements) store_element(p.out, row.out + d + j, p.out_element, sum[j] * factor);
        }
        if (row.lse && threadIdx.x == 0) *row.lse = result_lse(p.rules, lse);
    }
}
