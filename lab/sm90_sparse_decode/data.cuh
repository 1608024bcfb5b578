// data.cuh - inputs, a reference in double precision, and a reader that empties L2, for the benches of sparse decode over FP8_656.
// After a kernel's header, which has sparse_params and TOKEN_BYTES.
#pragma once

__device__ __forceinline__ uint32_t mix(uint64_t x)
{
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
    return (uint32_t)x;
}
__device__ float normal(uint64_t seed)
{
    const float u = (mix(seed * 2 + 1) + 1.0f) * 2.3283e-10f, v = mix(seed * 2 + 2) * 2.3283e-10f;
    return fminf(fmaxf(sqrtf(-2.0f * logf(u)) * cospif(2.0f * v), -10.0f), 10.0f);
}
__device__ float e4m3_value(uint8_t b)
{
    const int e = b >> 3 & 15, m = b & 7;
    const float x = e ? ldexpf(1.0f + m / 8.0f, e - 7) : ldexpf(m / 8.0f, -6);
    return b & 0x80 ? -x : x;
}
__global__ void make_q(uint16_t *q, int64_t n)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        q[i] = Bf16::from_float(fminf(fmaxf(normal(i + 77), -1.0f), 1.0f));
}
// Any codes but NaN's, their magnitudes as those of N(0, 0.1²) scaled to 448; the scale a power of two, or not (`odd`).
__global__ void make_cache(uint8_t *cache, int64_t tokens, int odd)
{
    for (int64_t n = blockIdx.x; n < tokens; n += gridDim.x) {
        uint8_t *token = cache + n * TOKEN_BYTES;
        for (int i = threadIdx.x; i < 512; i += blockDim.x) {
            const float want = fabsf(normal(n * 576 + i)) * 100.0f;
            int code = 0;
            while (code < 126 && e4m3_value(code + 1) <= want) code++;
            token[i] = (uint8_t)(code | (mix(n * 576 + i + 12345) & 1 ? 0x80 : 0));
        }
        if (threadIdx.x < 4) {
            const float s = odd ? 0.001f * (1.0f + (mix(n * 4 + threadIdx.x) % 1000) / 1000.0f) : 0.0009765625f;
            memcpy(token + 512 + 4 * threadIdx.x, &s, 4);
        }
        if (threadIdx.x < 64) {
            const uint16_t r = Bf16::from_float(0.1f * normal(n * 576 + 512 + threadIdx.x));
            memcpy(token + 528 + 2 * threadIdx.x, &r, 2);
        }
    }
}
// Token t takes keys of request t / s_q, of s_k each; 1 in `invalid` is no key.
__global__ void make_indices(int32_t *indices, int64_t n, int topk, int s_q, int s_k, int invalid)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        const uint32_t r = mix(i + 999);
        indices[i] = invalid && r % invalid == 0 ? (r & 64 ? -1 : 2147483647) : (int32_t)(i / topk / s_q * s_k + mix(i * 3 + 5) % s_k);
    }
}
// A row a block: out [512], lse, in double.
__global__ void reference(sparse_params p, const int *rows, double *out, double *lse)
{
    __shared__ double weight[4096];
    __shared__ double most, sum;
    const int row = rows[blockIdx.x], token = row / p.heads;
    const uint16_t *q = p.q + (int64_t)row * 576;
    auto value = [&](int64_t key, int i) {
        const uint8_t *t = p.cache + key * TOKEN_BYTES;
        if (i >= 512) { uint16_t r; memcpy(&r, t + 528 + 2 * (i - 512), 2); return Bf16::to_float(r); }
        float s; memcpy(&s, t + 512 + 4 * (i / 128), 4);
        return Bf16::to_float(Bf16::from_float(e4m3_value(t[i]) * s));
    };
    for (int j = threadIdx.x; j < p.topk; j += blockDim.x) {
        const int key = p.indices[(int64_t)token * p.topk + j];
        double s = -INFINITY;
        if ((uint32_t)key < (uint32_t)p.keys) {
            s = 0;
            for (int i = 0; i < 576; i++) s += (double)Bf16::to_float(q[i]) * value(key, i);
            s *= p.scale_log2 * 0.69314718055994531;
        }
        weight[j] = s;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        most = -INFINITY, sum = 0;
        for (int j = 0; j < p.topk; j++) most = fmax(most, weight[j]);
        for (int j = 0; j < p.topk; j++) sum += most > -INFINITY ? exp(weight[j] - most) : 0;
        lse[blockIdx.x] = sum > 0 ? most + log(sum) : INFINITY;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 512; i += blockDim.x) {
        double o = 0;
        for (int j = 0; j < p.topk; j++) {
            const int key = p.indices[(int64_t)token * p.topk + j];
            if ((uint32_t)key < (uint32_t)p.keys) o += exp(weight[j] - most) * value(key, i);
        }
        out[(int64_t)blockIdx.x * 512 + i] = sum > 0 ? o / sum : 0;
    }
}
__global__ void read_all(const uint4 *from, size_t n, uint32_t *to)
{
    uint32_t x = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) x ^= from[i].x ^ from[i].w;
    if (x == 0x12345) *to = x;
}
