// bench.cu - checks and times Hopper's dense MHA forward: bench check | time [s,b,h,h_kv,causal ...]
#include "mha.cuh"
#ifdef SLACK
#define SET_SLACK p.slack = SLACK / p.scale_log2,
#else
#define SET_SLACK
#endif

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <unistd.h>
#include <vector>

static void ok(cudaError_t error, int line)
{
    if (error != cudaSuccess) printf("bench.cu:%d: %s\n", line, cudaGetErrorString(error)), exit(1);
}
#define OK(call) ok((call), __LINE__)

#ifndef SIZES // bits: 192/128, 128/128, 64/64
#define SIZES 7
#endif
#if SIZES & 1
MHA_KERNEL(mha_192_128, Bf16, 192, 128)
#endif
#if SIZES & 2
MHA_KERNEL(mha_128_128, Bf16, 128, 128)
#endif
#if SIZES & 4
MHA_KERNEL(mha_64_64, Bf16, 64, 64)
#endif

__device__ __forceinline__ uint32_t mix(uint64_t x)
{
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
    return (uint32_t)x;
}
// N(0, size²).
__global__ void make_values(uint16_t *to, int64_t n, uint64_t seed, float size)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        const float u = (mix((i + seed) * 2 + 1) + 1.0f) * 2.3283e-10f, v = mix((i + seed) * 2 + 2) * 2.3283e-10f;
        to[i] = Bf16::from_float(size * sqrtf(-2.0f * logf(u)) * cospif(2.0f * v));
    }
}
// A row a block, in double: out [d_v], then lse.
__global__ void reference(const uint16_t *q, const uint16_t *k, const uint16_t *v, mha_params p, int h_kv, int d_qk, int d_v, const int *rows, double *to)
{
    extern __shared__ double weight[];
    __shared__ double most, sum;
    const int token = rows[2 * blockIdx.x], head = rows[2 * blockIdx.x + 1];
    int request = 0;
    while (token >= p.cu_q[request + 1]) request++;
    const int own = token - p.cu_q[request], tokens = p.cu_q[request + 1] - p.cu_q[request];
    const int first = p.cu_k[request], keys = p.cu_k[request + 1] - first;
    const int seen = p.causal ? min(keys, keys - tokens + own + 1) : keys;
    const uint16_t *row = q + ((int64_t)token * p.h_q + head) * d_qk;
    for (int t = threadIdx.x; t < seen; t += blockDim.x) {
        const uint16_t *key = k + ((int64_t)(first + t) * h_kv + head / p.group) * d_qk;
        double s = 0;
        for (int d = 0; d < d_qk; d++) s += (double)Bf16::to_float(row[d]) * (double)Bf16::to_float(key[d]);
        weight[t] = s * p.scale;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        most = -INFINITY, sum = 0;
        for (int t = 0; t < seen; t++) most = fmax(most, weight[t]);
        for (int t = 0; t < seen; t++) sum += exp(weight[t] - most);
        to[(int64_t)blockIdx.x * (d_v + 1) + d_v] = seen > 0 ? most + log(sum) : INFINITY;
    }
    __syncthreads();
    for (int d = threadIdx.x; d < d_v; d += blockDim.x) {
        double o = 0;
        for (int t = 0; t < seen; t++)
            o += exp(weight[t] - most) * (double)Bf16::to_float(v[((int64_t)(first + t) * h_kv + head / p.group) * d_v + d]);
        to[(int64_t)blockIdx.x * (d_v + 1) + d] = seen > 0 ? o / sum : 0;
    }
}

static tensor_map map_of(void *data, uint64_t inner, uint64_t heads, uint64_t tokens, uint32_t box_tokens)
{
    typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                               const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                               CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    void *f;
    cudaDriverEntryPointQueryResult found;
    OK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
    const cuuint64_t sizes[5] = {64, tokens, heads, inner / 64, 1};
    const cuuint64_t strides[4] = {heads * inner * 2, inner * 2, 128, tokens * heads * inner * 2};
    const cuuint32_t box[5] = {64, box_tokens, 1, (cuuint32_t)(inner / 64), 1}, steps[5] = {1, 1, 1, 1, 1};
    tensor_map map;
    const CUresult e = ((Encode)f)((CUtensorMap *)&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, data, sizes, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (e) printf("map: %d\n", (int)e), exit(1);
    return map;
}

struct Problem {
    mha_params p;
    int d_qk, d_v, h_kv;
    double flop;
    std::vector<int> cu_q, cu_k;
    uint16_t *q, *k, *v;
    Problem(const std::vector<int> &n_q, const std::vector<int> &n_k, int h_q, int h_kv_, int d_qk_, int d_v_, int causal)
        : d_qk(d_qk_), d_v(d_v_), h_kv(h_kv_), flop(0), cu_q{0}, cu_k{0}
    {
        for (size_t r = 0; r < n_q.size(); r++) {
            cu_q.push_back(cu_q.back() + n_q[r]), cu_k.push_back(cu_k.back() + n_k[r]);
            for (int j = 0; j < n_q[r]; j++) flop += 2.0 * h_q * (d_qk + d_v) * (causal ? std::max(0, std::min(n_k[r], n_k[r] - n_q[r] + j + 1)) : n_k[r]);
        }
        const int64_t t_q = cu_q.back(), t_k = cu_k.back();
        memset(&p, 0, sizeof p);
        int *starts;
        OK(cudaMalloc(&q, (t_q * h_q * d_qk + 8) * 2)), OK(cudaMalloc(&k, (t_k * h_kv * d_qk + 8) * 2)), OK(cudaMalloc(&v, (t_k * h_kv * d_v + 8) * 2));
        OK(cudaMalloc(&p.out, (t_q * h_q * d_v + 8) * 2)), OK(cudaMalloc(&p.lse, (t_q * h_q + 8) * 4));
        OK(cudaMalloc(&starts, cu_q.size() * 8)), OK(cudaMalloc(&p.counters, 8)), OK(cudaMemset(p.counters, 0, 8));
        OK(cudaMemcpy(starts, cu_q.data(), cu_q.size() * 4, cudaMemcpyHostToDevice));
        OK(cudaMemcpy(starts + cu_q.size(), cu_k.data(), cu_q.size() * 4, cudaMemcpyHostToDevice));
        OK(cudaMemset(p.out, 0xff, t_q * h_q * d_v * 2)), OK(cudaMemset(p.lse, 0xff, t_q * h_q * 4));
        make_values<<<1024, 256>>>(q, t_q * h_q * d_qk, 1, 1.0f), make_values<<<1024, 256>>>(k, t_k * h_kv * d_qk, 1u << 30, 1.0f);
        make_values<<<1024, 256>>>(v, t_k * h_kv * d_v, 2u << 30, 1.0f);
        p.q = map_of(q, d_qk, h_q, std::max<int64_t>(t_q, 1), MHA_ROWS), p.k = map_of(k, d_qk, h_kv, std::max<int64_t>(t_k, 1), MHA_KEYS);
        p.v = map_of(v, d_v, h_kv, std::max<int64_t>(t_k, 1), MHA_KEYS);
        p.b = (int)n_q.size(), p.h_q = h_q, p.group = h_q / h_kv, p.causal = causal;
        p.s_q = *std::max_element(n_q.begin(), n_q.end()), p.s_k = *std::max_element(n_k.begin(), n_k.end());
        p.cu_q = starts, p.cu_k = starts + cu_q.size(), p.tokens_q = (int)t_q, p.tokens_k = (int)t_k;
        p.tiles_of_request = (p.s_q + MHA_ROWS - 1) / MHA_ROWS;
        const double head_bytes = 2.0 * p.s_k * (d_qk + d_v) / (h_q / h_kv), most = (getenv("L2_MB") ? atof(getenv("L2_MB")) : 24) * 1e6;
        p.heads_at_once = (int)std::max(1.0, std::min((double)p.b * h_q, most / head_bytes));
        p.out_stride[1] = h_q * d_v, p.out_stride[2] = d_v, p.lse_stride[1] = t_q;
        p.scale = 1.0f / sqrtf((float)d_qk), p.scale_log2 = p.scale * 1.44269504f, SET_SLACK p.lse_of_empty = INFINITY, p.lse_factor = 1.0f;
    }
    ~Problem() { cudaFree(q), cudaFree(k), cudaFree(v), cudaFree(p.out), cudaFree(p.lse), cudaFree((void *)p.cu_q); }
    void run()
    {
        void (*kernel)(mha_params) = NULL;
        uint32_t bytes = 0;
#if SIZES & 1
        if (d_qk == 192) kernel = mha_192_128, bytes = Mha<Bf16, 192, 128>::SHARED_BYTES;
#endif
#if SIZES & 2
        if (d_qk == 128) kernel = mha_128_128, bytes = Mha<Bf16, 128, 128>::SHARED_BYTES;
#endif
#if SIZES & 4
        if (d_qk == 64) kernel = mha_64_64, bytes = Mha<Bf16, 64, 64>::SHARED_BYTES;
#endif
        OK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
        kernel<<<std::min(132, p.b * p.h_q * p.tiles_of_request), MHA_THREADS, bytes>>>(p);
        OK(cudaGetLastError());
    }
};

static int check(const std::vector<int> &n_q, const std::vector<int> &n_k, int h_q, int h_kv, int d_qk, int d_v, int causal)
{
    Problem x(n_q, n_k, h_q, h_kv, d_qk, d_v, causal);
    const int tokens = x.cu_q.back();
    std::vector<int> rows;
    for (int i = 0; i < std::min(tokens * h_q, 600); i++) {
        const int64_t row = tokens * h_q <= 600 ? i : (int64_t)i * 7919 * 31 % ((int64_t)tokens * h_q);
        rows.push_back((int)(row / h_q)), rows.push_back((int)(row % h_q));
    }
    for (size_t r = 0; r < n_q.size(); r++)
        if (n_q[r]) rows.insert(rows.end(), {x.cu_q[r], 0, x.cu_q[r + 1] - 1, h_q - 1});
    const int count = (int)rows.size() / 2;
    int *on_device;
    double *to;
    OK(cudaMalloc(&on_device, rows.size() * 4 + 4)), OK(cudaMalloc(&to, (size_t)count * (d_v + 1) * 8 + 8));
    OK(cudaMemcpy(on_device, rows.data(), rows.size() * 4, cudaMemcpyHostToDevice));
    OK(cudaFuncSetAttribute(reference, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
    if (count) reference<<<count, 128, 200 << 10>>>(x.q, x.k, x.v, x.p, h_kv, d_qk, d_v, on_device, to);
    x.run();
    OK(cudaDeviceSynchronize());
    std::vector<double> theirs((size_t)count * (d_v + 1));
    std::vector<uint16_t> out((size_t)tokens * h_q * d_v);
    std::vector<float> lse((size_t)tokens * h_q);
    OK(cudaMemcpy(theirs.data(), to, theirs.size() * 8, cudaMemcpyDeviceToHost));
    OK(cudaMemcpy(out.data(), x.p.out, out.size() * 2, cudaMemcpyDeviceToHost)), OK(cudaMemcpy(lse.data(), x.p.lse, lse.size() * 4, cudaMemcpyDeviceToHost));
    double ab = 0, aabb = 0, worst = 0;
    int wrong = 0;
    for (int i = 0; i < count; i++) {
        const int64_t row = (int64_t)rows[2 * i] * h_q + rows[2 * i + 1];
        for (int d = 0; d < d_v; d++) {
            uint32_t bits = (uint32_t)out[row * d_v + d] << 16;
            float a;
            memcpy(&a, &bits, 4);
            const double b = theirs[(size_t)i * (d_v + 1) + d];
            ab += a * b, aabb += a * a + b * b, worst = std::max(worst, fabs(a - b));
            wrong += !(fabs(a - b) < 1e-2 || fabs(a - b) < 8.01 / 128 * fabs(b));
        }
        const double a = lse[(size_t)rows[2 * i + 1] * tokens + rows[2 * i]], b = theirs[(size_t)i * (d_v + 1) + d_v];
        wrong += std::isinf(b) ? a != b : !(fabs(a - b) < 1e-5 + 3e-5 * fabs(b));
    }
    const double cosine = aabb > 0 ? 1 - 2 * ab / aabb : 0;
    printf("%s %d/%d h %d/%d causal %d b %zu first %d x %d: %d rows, %d wrong, worst %.2e, cosine %.1e\n", wrong || !(cosine < 7e-6) ? "FAILED" : "ok", d_qk, d_v,
           h_q, h_kv, causal, n_q.size(), n_q[0], n_k[0], count, wrong, worst, cosine);
    cudaFree(on_device), cudaFree(to);
    return wrong || !(cosine < 7e-6);
}

int main(int argc, char **argv)
{
    static const int sizes[3][2] = {{192, 128}, {128, 128}, {64, 64}};
    int failed = 0;
    if (argc > 1 && !strcmp(argv[1], "check")) {
        for (auto &d : sizes)
            for (int causal = 0; causal < 2; causal++) {
                if (!(SIZES & (d[0] == 192 ? 1 : d[0] == 128 ? 2 : 4))) continue;
                failed += check({128}, {128}, 1, 1, d[0], d[1], causal), failed += check({1000}, {1000}, 4, 4, d[0], d[1], causal);
                failed += check({63, 0, 1, 300, 5}, {65, 3, 4096, 2000, 0}, 5, 5, d[0], d[1], causal);
                failed += check({2000, 300}, {300, 2000}, 32, 4, d[0], d[1], causal), failed += check({1, 7}, {1, 5}, 16, 1, d[0], d[1], causal);
            }
        printf("%d failed\n", failed);
        return failed != 0;
    }
    for (int i = 2; i < argc; i++) {
        int s, b, h, h_kv, causal;
        if (sscanf(argv[i], "%d,%d,%d,%d,%d", &s, &b, &h, &h_kv, &causal) != 5) return 2;
        for (auto &d : sizes) {
            if (!(SIZES & (d[0] == 192 ? 1 : d[0] == 128 ? 2 : 4))) continue;
            Problem x(std::vector<int>(b, s), std::vector<int>(b, s), h, h_kv, d[0], d[1], causal);
            std::vector<float> us;
            cudaEvent_t from, to;
            OK(cudaEventCreate(&from)), OK(cudaEventCreate(&to));
            for (int run = 0; run < 15; run++) {
                if (getenv("PAUSE")) usleep(atoi(getenv("PAUSE")));
                OK(cudaEventRecord(from)), x.run(), OK(cudaEventRecord(to)), OK(cudaDeviceSynchronize());
                float ms;
                OK(cudaEventElapsedTime(&ms, from, to)), us.push_back(ms * 1e3f);
            }
            std::sort(us.begin(), us.end());
            printf("%d/%d s %d b %d h %d/%d causal %d: %.1f us, %.0f TFLOP/s\n", d[0], d[1], s, b, h, h_kv, causal, us[7], x.flop / us[7] * 1e-6);
        }
    }
    return 0;
}
