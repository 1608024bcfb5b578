/* SPDX-License-Identifier: MIT
 *
 * The gradients of dense MHA without tensor cores, for any alignment, any strides and any GPU; not fast. A
 * warp takes a row of dq, or a key of dk and dv, and adds in a fixed order, so that all three have the same
 * bits in every run. The warp computes the weight P and dS = P (dout·v - delta) = P (dout·(v - out)) of 32
 * keys or rows together, one key or row after the other; each lane keeps those of one. Then it adds their
 * vectors. The warp of a token or key that is padding or belongs to no request writes zeros.
 * device/backward_rows.cuh says how the sink and the gradient of lse enter.
 *
 * The gradient of the sink: a CTA a head adds what the rows, or the tiles of rows of the kernels on tensor cores,
 * have left.
 */
#include "../device/backward_rows.cuh"
#include "../device/element.cuh"
#include "../device/kernel.cuh"
#include "../device/warp.cuh"

#include "../params.h"
#include "mha_request.cuh"

#include <math.h>

enum { MOST_OF_LANE = 8 /* elements of a vector: lane, lane + 32, … */ };

/* A vector distributed over the lanes; elements past its width are 0. */
struct Vector {
    float of[MOST_OF_LANE];
};

template <typename Element> DEVICE Vector load_vector(const uint16_t *from, int width)
{
    Vector x;
#pragma unroll
    for (int i = 0; i < MOST_OF_LANE; i++)
        x.of[i] = 32 * i < width ? Element::to_float(from[32 * i + (int)threadIdx.x % 32]) : 0.0f;
    return x;
}

template <typename Element> DEVICE void store_vector(uint16_t *to, int width, const Vector &x, float factor)
{
#pragma unroll
    for (int i = 0; i < MOST_OF_LANE; i++)
        if (32 * i < width) to[32 * i + (int)threadIdx.x % 32] = Element::from_float(x.of[i] * factor);
}

DEVICE void clear_vector(uint16_t *to, int width)
{
    for (int d = (int)threadIdx.x % 32; d < width; d += 32) to[d] = 0;
}

DEVICE float dot_of(const Vector &a, const Vector &b)
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < MOST_OF_LANE; i++) sum = fmaf(a.of[i], b.of[i], sum);
    return warp_sum(sum);
}

DEVICE void add_vector(Vector &sum, float factor, const Vector &x)
{
#pragma unroll
    for (int i = 0; i < MOST_OF_LANE; i++) sum.of[i] = fmaf(factor, x.of[i], sum.of[i]);
}

DEVICE Vector difference_of(const Vector &a, const Vector &b)
{
    Vector x;
#pragma unroll
    for (int i = 0; i < MOST_OF_LANE; i++) x.of[i] = a.of[i] - b.of[i];
    return x;
}

DEVICE uint16_t *address_of(const mha_vectors &of, int request, int token, int head)
{
    return of.data + request * of.request + token * of.token + head * of.head;
}

template <typename Element> DEVICE void backward_row(const mha_backward_params &p)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t row = blockIdx.x * (int64_t)MHA_WARPS + threadIdx.x / 32;
    const int64_t tokens = p.starts_q ? p.tokens_q : (int64_t)p.b * p.s_q, at = row / p.h_q;
    const int head = (int)(row - at * p.h_q), key_head = head / p.group;
    if (at >= tokens) return; /* the whole warp */
    float *const of_dsink = p.of_dsink && lane == 0 ? p.of_dsink + head * tokens + at : NULL;
    RowRequest r;
    if (of_dsink) *of_dsink = 0.0f;
    int token;
    if (!find_request<false>(p, at, r, token))
        return clear_vector(address_of(p.dq, r.number, token, head), p.d_qk);
    const RowNumbers numbers = row_numbers(p, r.number, token, head);
    const int visible = numbers.lse == INFINITY ? 0
                        : p.causal              ? min(r.keys, r.keys - r.tokens + (token - r.token) + 1)
                                                : r.keys;
    const Vector q = load_vector<Element>(address_of(p.q, r.number, token, head), p.d_qk),
                 out = load_vector<Element>(address_of(p.out, r.number, token, head), p.d_v),
                 dout = load_vector<Element>(address_of(p.dout, r.number, token, head), p.d_v);
    const float of_out = dot_of(dout, out), delta = of_out - numbers.off_delta;
    if (of_dsink && visible > 0) *of_dsink = numbers.dsink * of_out;
    Vector dq = {};
    for (int first = 0; first < visible; first += 32) {
        const int count = min(visible - first, 32);
        float score = 0.0f, dp = 0.0f;
#pragma unroll 2
        for (int j = 0; j < count; j++) {
            const int key = r.key + first + j;
            const float s = dot_of(q, load_vector<Element>(address_of(p.k, r.number, key, key_head), p.d_qk));
            const float d =
                dot_of(dout, load_vector<Element>(address_of(p.v, r.number, key, key_head), p.d_v));
            if (lane == j) score = s, dp = d;
        }
        const float ds = exp2f(fmaf(score, p.scale_log2, -numbers.lse)) * (dp - delta);
#pragma unroll 2
        for (int j = 0; j < count; j++)
            add_vector(dq, __shfl_sync(~0u, ds, j),
                       load_vector<Element>(address_of(p.k, r.number, r.key + first + j, key_head), p.d_qk));
    }
    store_vector<Element>(address_of(p.dq, r.number, token, head), p.d_qk, dq, p.scale);
}

/* Adds the contributions of a head's rows, from token `first` to the request's last, to the gradients of the
 * key. */
template <typename Element>
DEVICE void add_rows(const mha_backward_params &p, const RowRequest &r, int head, int first, const Vector &k,
                     const Vector &v, Vector &dk, Vector &dv)
{
    const int lane = (int)threadIdx.x % 32, end = r.token + r.tokens;
    for (; first < end; first += 32) {
        const int count = min(end - first, 32);
        RowNumbers numbers = {INFINITY, 0.0f, 0.0f};
        if (lane < count) numbers = row_numbers(p, r.number, first + lane, head);
        const unsigned empty = __ballot_sync(~0u, numbers.lse == INFINITY);
        float score = 0.0f, dp = 0.0f;
#pragma unroll 2
        for (int j = 0; j < count; j++) {
            if (empty >> j & 1) continue;
            const Vector out = load_vector<Element>(address_of(p.out, r.number, first + j, head), p.d_v);
            const Vector dout = load_vector<Element>(address_of(p.dout, r.number, first + j, head), p.d_v);
            const float s =
                dot_of(load_vector<Element>(address_of(p.q, r.number, first + j, head), p.d_qk), k);
            const float d = dot_of(dout, difference_of(v, out));
            if (lane == j) score = s, dp = d;
        }
        const float weight = exp2f(fmaf(score, p.scale_log2, -numbers.lse)),
                    ds = weight * (dp + numbers.off_delta);
#pragma unroll 2
        for (int j = 0; j < count; j++) {
            const float w = __shfl_sync(~0u, weight, j), d = __shfl_sync(~0u, ds, j);
            if (empty >> j & 1) continue;
            add_vector(dk, d, load_vector<Element>(address_of(p.q, r.number, first + j, head), p.d_qk));
            add_vector(dv, w, load_vector<Element>(address_of(p.dout, r.number, first + j, head), p.d_v));
        }
    }
}

template <typename Element> DEVICE void backward_key(const mha_backward_params &p)
{
    const int64_t row = blockIdx.x * (int64_t)MHA_WARPS + threadIdx.x / 32;
    const int64_t keys = p.starts_k ? p.tokens_k : (int64_t)p.b * p.s_k, at = row / p.h_kv;
    const int key_head = (int)(row - at * p.h_kv);
    if (at >= keys) return; /* the whole warp */
    RowRequest r;
    int key;
    if (!find_request<true>(p, at, r, key)) {
        clear_vector(address_of(p.dk, r.number, key, key_head), p.d_qk);
        clear_vector(address_of(p.dv, r.number, key, key_head), p.d_v);
        return;
    }
    /* With a causal mask, keys up to keys - tokens + j are visible to token j of the request. */
    const int first = p.causal ? max(0, key - r.key - (r.keys - r.tokens)) : 0;
    const Vector k = load_vector<Element>(address_of(p.k, r.number, key, key_head), p.d_qk),
                 v = load_vector<Element>(address_of(p.v, r.number, key, key_head), p.d_v);
    Vector dk = {}, dv = {};
    for (int head = key_head * p.group; head < (key_head + 1) * p.group; head++)
        add_rows<Element>(p, r, head, r.token + first, k, v, dk, dv);
    store_vector<Element>(address_of(p.dk, r.number, key, key_head), p.d_qk, dk, p.scale);
    store_vector<Element>(address_of(p.dv, r.number, key, key_head), p.d_v, dv, 1.0f);
}

/* The sum of a head's parts, in an order that follows from their number. */
DEVICE void add_dsinks(const mha_backward_params &p)
{
    const float *parts = p.of_dsink + blockIdx.x * p.dsink_parts;
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < p.dsink_parts; i += DSINK_THREADS) sum += parts[i];
    sum = cta_sum<DSINK_THREADS>(sum);
    if (threadIdx.x == 0) p.d_attn_sink[blockIdx.x] = sum;
}

DEFINE_KERNEL(mha_backward_rows_bf16, mha_backward_params, (32 * MHA_WARPS, 2), backward_row<Bf16>(p))
DEFINE_KERNEL(mha_backward_rows_fp16, mha_backward_params, (32 * MHA_WARPS, 2), backward_row<Fp16>(p))
DEFINE_KERNEL(mha_backward_keys_bf16, mha_backward_params, (32 * MHA_WARPS, 2), backward_key<Bf16>(p))
DEFINE_KERNEL(mha_backward_keys_fp16, mha_backward_params, (32 * MHA_WARPS, 2), backward_key<Fp16>(p))
DEFINE_KERNEL(mha_backward_dsinks, mha_backward_params, (DSINK_THREADS, 2), add_dsinks(p))
