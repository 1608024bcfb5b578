// bench.cu - checks and times Hopper's MHA backward: bench check | time [d_qk ...] | one d_qk b s h_q h_kv causal
#include "../../src/cuda/sm90/mha_backward/mha_backward.cuh"
#include "../../src/cuda/sm90/mha_backward/rows.cuh"

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

#ifndef ONLY
#define ONLY 0
#endif
#define KERNELS(ELEMENT, D_QK, D_V)                                                     \
    MHA_BACKWARD_KERNEL(backward_##ELEMENT##_##D_QK, ELEMENT, D_QK, D_V)                \
    MHA_BACKWARD_ROW_KERNELS(prepare_##ELEMENT##_##D_QK, finish_##ELEMENT##_##D_QK, ELEMENT, D_QK, D_V)
typedef void (*Kernel)(mha_backward_sm90_params);
struct Kernels {
    bool bf16;
    int d_qk, d_v;
    Kernel prepare, main, finish;
    int threads;
    uint32_t bytes;
    int dq_tile;
};
#define ENTRY(ELEMENT, D_QK, D_V)                                                                                    \
    {ELEMENT::IS_BF16, D_QK, D_V, prepare_##ELEMENT##_##D_QK, backward_##ELEMENT##_##D_QK, finish_##ELEMENT##_##D_QK, \
     BackwardLayout<D_QK, D_V>::THREADS, BackwardLayout<D_QK, D_V>::BYTES, BackwardLayout<D_QK, D_V>::DQ_TILE}
KERNELS(Bf16, 192, 128)
KERNELS(Bf16, 128, 128)
KERNELS(Bf16, 64, 64)
#if !ONLY
KERNELS(Fp16, 192, 128)
KERNELS(Fp16, 128, 128)
KERNELS(Fp16, 64, 64)
#endif
static const Kernels all_kernels[] = {ENTRY(Bf16, 192, 128), ENTRY(Bf16, 128, 128), ENTRY(Bf16, 64, 64),
#if !ONLY
                                      ENTRY(Fp16, 192, 128), ENTRY(Fp16, 128, 128),
                                      ENTRY(Fp16, 64, 64)
#endif
};

__host__ __device__ __forceinline__ uint32_t mix(uint64_t x)
{
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
    return (uint32_t)x;
}
__device__ uint16_t bits_of(float x, bool bf16) { return bf16 ? Bf16::from_float(x) : Fp16::from_float(x); }
__device__ float value_of(uint16_t x, bool bf16) { return bf16 ? Bf16::to_float(x) : Fp16::to_float(x); }
__global__ void make_values(uint16_t *to, int64_t n, uint64_t seed, float size, bool bf16)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        const float u = (mix((i + seed) * 2 + 1) + 1.0f) * 2.3283e-10f, v = mix((i + seed) * 2 + 2) * 2.3283e-10f;
        to[i] = bits_of(size * fminf(fmaxf(sqrtf(-2.0f * logf(u)) * cospif(2.0f * v), -10.0f), 10.0f), bf16);
    }
}
__global__ void make_lse(float *lse, int64_t n, int s, int causal, float more)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        lse[i] = logf(causal ? i % s + 1.0f : (float)s) + more;
}
__global__ void read_all(const uint4 *from, size_t n, uint32_t *to)
{
    uint32_t x = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) x ^= from[i].x ^ from[i].w;
    if (x == 0x12345) *to = x;
}

// ---- The reference, of one request: all pointers at its first token, heads side by side.
struct Ref {
    int s_q, s_k, h_q, h_kv, d_qk, d_v, causal;
    bool bf16;
    float scale;
    const uint16_t *q, *k, *v, *dout;
    uint16_t *out;
    float *lse; // [h_q] apart by lse_stride
    int64_t lse_stride;
    float *p, *ds; // [h_q][s_q][s_k]
    float *dq, *dk, *dv;
};
__global__ void ref_forward(Ref r)
{
    const int i = blockIdx.x, h = blockIdx.y, kh = h / (r.h_q / r.h_kv), seen = r.causal ? r.s_k - r.s_q + i + 1 : r.s_k;
    float *p = r.p + ((int64_t)h * r.s_q + i) * r.s_k;
    __shared__ double sum;
    __shared__ float part[256];
    float most = -INFINITY;
    for (int t = threadIdx.x; t < r.s_k; t += blockDim.x) {
        float s = 0;
        for (int d = 0; d < r.d_qk; d++)
            s += value_of(r.q[((int64_t)i * r.h_q + h) * r.d_qk + d], r.bf16) * value_of(r.k[((int64_t)t * r.h_kv + kh) * r.d_qk + d], r.bf16);
        p[t] = t < seen ? s * r.scale : -INFINITY;
        most = fmaxf(most, p[t]);
    }
    part[threadIdx.x] = most;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int t = 0; t < (int)blockDim.x; t++) most = fmaxf(most, part[t]);
        sum = 0;
        for (int t = 0; t < min(seen, r.s_k); t++) sum += exp((double)p[t] - most);
        part[0] = most;
        r.lse[h * r.lse_stride + i] = seen > 0 && r.s_k ? (float)(most + log(sum)) : (h % 2 ? INFINITY : -INFINITY);
    }
    __syncthreads();
    most = part[0];
    for (int t = threadIdx.x; t < r.s_k; t += blockDim.x) p[t] = t < seen ? (float)(exp((double)p[t] - most) / sum) : 0;
    __syncthreads();
    for (int d = threadIdx.x; d < r.d_v; d += blockDim.x) {
        double o = 0;
        for (int t = 0; t < min(seen, r.s_k); t++) o += (double)p[t] * value_of(r.v[((int64_t)t * r.h_kv + kh) * r.d_v + d], r.bf16);
        r.out[((int64_t)i * r.h_q + h) * r.d_v + d] = bits_of((float)o, r.bf16);
    }
}
__global__ void ref_ds(Ref r)
{
    const int i = blockIdx.x, h = blockIdx.y, kh = h / (r.h_q / r.h_kv);
    const int64_t row = ((int64_t)h * r.s_q + i) * r.s_k, o = ((int64_t)i * r.h_q + h) * r.d_v;
    float delta = 0;
    for (int d = 0; d < r.d_v; d++) delta += value_of(r.out[o + d], r.bf16) * value_of(r.dout[o + d], r.bf16);
    for (int t = threadIdx.x; t < r.s_k; t += blockDim.x) {
        float dp = 0;
        if (r.p[row + t] != 0)
            for (int d = 0; d < r.d_v; d++) dp += value_of(r.dout[o + d], r.bf16) * value_of(r.v[((int64_t)t * r.h_kv + kh) * r.d_v + d], r.bf16);
        r.ds[row + t] = r.p[row + t] * (dp - delta);
    }
}
__global__ void ref_dq(Ref r)
{
    const int i = blockIdx.x, h = blockIdx.y, kh = h / (r.h_q / r.h_kv), d = threadIdx.x;
    const float *ds = r.ds + ((int64_t)h * r.s_q + i) * r.s_k;
    if (d >= r.d_qk) return;
    double x = 0;
    for (int t = 0; t < r.s_k; t++) x += (double)ds[t] * value_of(r.k[((int64_t)t * r.h_kv + kh) * r.d_qk + d], r.bf16);
    r.dq[((int64_t)i * r.h_q + h) * r.d_qk + d] = (float)(x * r.scale);
}
__global__ void ref_dkv(Ref r)
{
    const int t = blockIdx.x, kh = blockIdx.y, group = r.h_q / r.h_kv, d = threadIdx.x;
    double k = 0, v = 0;
    for (int h = kh * group; h < kh * group + group; h++)
        for (int i = 0; i < r.s_q; i++) {
            const int64_t at = ((int64_t)h * r.s_q + i) * r.s_k + t;
            if (d < r.d_qk) k += (double)r.ds[at] * value_of(r.q[((int64_t)i * r.h_q + h) * r.d_qk + d], r.bf16);
            if (d < r.d_v) v += (double)r.p[at] * value_of(r.dout[((int64_t)i * r.h_q + h) * r.d_v + d], r.bf16);
        }
    if (d < r.d_qk) r.dk[((int64_t)t * r.h_kv + kh) * r.d_qk + d] = (float)(k * r.scale);
    if (d < r.d_v) r.dv[((int64_t)t * r.h_kv + kh) * r.d_v + d] = (float)v;
}

static tensor_map map_of(const void *data, bool bf16, int64_t d, int64_t heads, int64_t tokens, int64_t requests, int64_t request_stride, int rows,
                         int columns)
{
    typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                               const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                               CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static void *f;
    cudaDriverEntryPointQueryResult found;
    if (!f) OK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
    tensor_map map;
    memset(&map, 0, sizeof map);
    if (!tokens) tokens = 1;
    const cuuint64_t sizes[5] = {(cuuint64_t)columns, (cuuint64_t)tokens, (cuuint64_t)heads, (cuuint64_t)(d / columns), (cuuint64_t)requests},
                     strides[4] = {(cuuint64_t)(heads * d * 2), (cuuint64_t)(d * 2), (cuuint64_t)(columns * 2), (cuuint64_t)std::max<int64_t>(request_stride * 2, 16)};
    const cuuint32_t box[5] = {(cuuint32_t)columns, (cuuint32_t)rows, 1, (cuuint32_t)(d / columns), 1}, steps[5] = {1, 1, 1, 1, 1};
    const CUresult e = ((Encode)f)((CUtensorMap *)&map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5, (void *)data,
                                   sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (e) printf("map: %d\n", (int)e), exit(1);
    return map;
}

// As many heads as keep blocks of threads busy to the end, and as L2 holds.
static int set_size = getenv("SET") ? atoi(getenv("SET")) : 0;
static int heads_of_set(int s_k, int h_kv, int keys)
{
    return set_size ? std::min(set_size, h_kv) : std::min(std::max(1, 264 / ((s_k + keys - 1) / keys)), h_kv);
}

enum { Q, K, V, DOUT, OUT, LSE, DQ, DK, DV, ROWS_, SUMS, TAKEN, STARTS, MEMORIES };
struct Problem {
    const Kernels *kernels;
    mha_backward_sm90_params p;
    std::vector<int> start_q, start_k;
    bool ragged;
    int64_t tokens_q, tokens_k;
    char *memory[MEMORIES];
    size_t bytes[MEMORIES];
    int d_qk, d_v, h_q, h_kv, causal;

    Problem(int d, bool bf16, std::vector<int> s_q, std::vector<int> s_k, int h_q_, int h_kv_, int causal_, int deterministic, bool ragged_, float size)
        : ragged(ragged_), d_qk(d), h_q(h_q_), h_kv(h_kv_), causal(causal_)
    {
        kernels = NULL;
        for (const Kernels &k : all_kernels)
            if (k.d_qk == d && k.bf16 == bf16) kernels = &k;
        if (!kernels) printf("no such kernel\n"), exit(1);
        d_v = kernels->d_v;
        const int b = (int)s_q.size(), rows = MHA_BACKWARD_SM90_ROWS(d), keys = MHA_BACKWARD_SM90_KEYS(d);
        start_q = {0}, start_k = {0};
        for (int i = 0; i < b; i++) start_q.push_back(start_q[i] + s_q[i]), start_k.push_back(start_k[i] + s_k[i]);
        tokens_q = start_q[b], tokens_k = start_k[b];
        memset(&p, 0, sizeof p);
        mha_backward_params &c = p.call;
        p.row_tiles = ragged ? (int)(tokens_q / rows) + b + 2 : b * ((s_q[0] + rows - 1) / rows);
        p.key_blocks = ragged ? (int)(tokens_k / keys) + b + 2 : b * ((s_k[0] + keys - 1) / keys);
        p.items = p.key_blocks * h_kv, p.key_heads_divisor = divisor_of(h_kv);
        const int most_keys = *std::max_element(s_k.begin(), s_k.end());
        // Causal and deterministic: blocks wait for each other by heads, so that as many heads as there are take part at once.
        p.heads_of_set = heads_of_set(most_keys, h_kv, keys);
        if (deterministic && !set_size)
            p.heads_of_set = causal ? 1 : std::min(h_kv, std::max(1, (132 + p.row_tiles / b * (h_q / h_kv) - 1) / std::max(1, p.row_tiles / b * (h_q / h_kv))));
        const size_t sizes[MEMORIES] = {(size_t)tokens_q * h_q * d_qk * 2, (size_t)tokens_k * h_kv * d_qk * 2, (size_t)tokens_k * h_kv * d_v * 2,
                                        (size_t)tokens_q * h_q * d_v * 2, (size_t)tokens_q * h_q * d_v * 2, (size_t)tokens_q * h_q * 4,
                                        (size_t)tokens_q * h_q * d_qk * 2, (size_t)tokens_k * h_kv * d_qk * 2, (size_t)tokens_k * h_kv * d_v * 2,
                                        (size_t)p.row_tiles * h_q * 2 * rows * 4, (size_t)p.row_tiles * h_q * kernels->dq_tile * 4,
                                        32 + (size_t)p.row_tiles * h_q * 32, (size_t)(b + 1) * 8};
        for (int i = 0; i < MEMORIES; i++) {
            bytes[i] = sizes[i];
            OK(cudaMalloc(&memory[i], bytes[i] + 65536));
            OK(cudaMemset(memory[i], 0xff, bytes[i] + 65536)); // NaN
        }
        for (int i = 0; i < 4; i++)
            make_values<<<2048, 256>>>((uint16_t *)memory[i], bytes[i] / 2, (uint64_t)i * 1000003 * 977 + getpid() * 31337ull, size, bf16);
        OK(cudaMemcpy(memory[STARTS], start_q.data(), (b + 1) * 4, cudaMemcpyHostToDevice));
        OK(cudaMemcpy(memory[STARTS] + (b + 1) * 4, start_k.data(), (b + 1) * 4, cudaMemcpyHostToDevice));
        c.b = b, c.h_q = h_q, c.h_kv = h_kv, c.group = h_q / h_kv, c.s_q = s_q[0], c.s_k = s_k[0];
        if (ragged) c.starts_q = (int *)memory[STARTS], c.starts_k = c.starts_q + b + 1;
        c.tokens_q = (int)tokens_q, c.tokens_k = (int)tokens_k, c.causal = causal, c.d_qk = d_qk, c.d_v = d_v;
        c.scale = (float)pow(d_qk + 100, -0.5), c.scale_log2 = c.scale * 1.44269504f, c.lse_log2 = 1.44269504f;
        c.lse = (float *)memory[LSE];
        const auto view = [&](mha_vectors &to, int at, int64_t s, int64_t h, int64_t width) {
            to.data = (decltype(to.data))memory[at], to.request = s * h * width, to.token = h * width, to.head = width;
        };
        view(c.out, OUT, s_q[0], h_q, d_v), view(c.dout, DOUT, s_q[0], h_q, d_v), view(c.dq, DQ, s_q[0], h_q, d_qk);
        view(c.dk, DK, s_k[0], h_kv, d_qk), view(c.dv, DV, s_k[0], h_kv, d_v);
        c.lse_stride[0] = ragged ? 0 : (int64_t)h_q * s_q[0], c.lse_stride[1] = ragged ? tokens_q : s_q[0];
        const int requests = ragged ? 1 : b;
        const int64_t tq = ragged ? tokens_q : s_q[0], tk = ragged ? tokens_k : s_k[0];
        p.q = map_of(memory[Q], bf16, d_qk, h_q, tq, requests, tq * h_q * d_qk, rows, 64);
        p.dout = map_of(memory[DOUT], bf16, d_v, h_q, tq, requests, tq * h_q * d_v, rows, 64);
        p.k = map_of(memory[K], bf16, d_qk, h_kv, tk, requests, tk * h_kv * d_qk, keys, d_qk == 192 ? 32 : 64);
        p.v = map_of(memory[V], bf16, d_v, h_kv, tk, requests, tk * h_kv * d_v, keys, 64);
        p.rows = (float *)memory[ROWS_], p.dq_sums = (float *)memory[SUMS], p.taken = (uint32_t *)memory[TAKEN], p.added = p.taken + 8, p.in_order = deterministic;
        OK(cudaFuncSetAttribute((const void *)kernels->main, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)kernels->bytes));
    }
    ~Problem()
    {
        for (char *m : memory) cudaFree(m);
    }
    void prepare()
    {
        if (p.row_tiles) kernels->prepare<<<p.row_tiles * h_q, ROW_KERNEL_THREADS>>>(p);
        OK(cudaGetLastError());
    }
    void launch(Kernel kernel, int blocks, int threads, uint32_t bytes) // as the library does: it may begin before the one in front ends
    {
        cudaLaunchAttribute overlap;
        overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization, overlap.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = bytes, config.attrs = &overlap, config.numAttrs = 1;
        OK(cudaLaunchKernelEx(&config, kernel, p));
    }
    void main()
    {
        if (p.items) launch(kernels->main, std::min(p.items, 132), kernels->threads, kernels->bytes);
    }
    void finish()
    {
        if (p.row_tiles) launch(kernels->finish, p.row_tiles * h_q, ROW_KERNEL_THREADS, 0);
    }
    void run() { prepare(), main(), finish(); }
};

static float value_on_host(uint16_t x, bool bf16)
{
    if (bf16) {
        const uint32_t bits = (uint32_t)x << 16;
        float f;
        memcpy(&f, &bits, 4);
        return f;
    }
    return __half2float(__ushort_as_half(x));
}

// `poisoned`: this request's inputs are NaN, and its results are not looked at.
static bool check(int d, bool bf16, std::vector<int> s_q, std::vector<int> s_k, int h_q, int h_kv, int causal, int deterministic, bool ragged, int poisoned = -1)
{
    Problem x(d, bf16, s_q, s_k, h_q, h_kv, causal, deterministic, ragged, 0.1f);
    float *ref[3];
    for (int i = 0; i < 3; i++) {
        OK(cudaMalloc(&ref[i], x.bytes[DQ + i] * 2 + 16));
        OK(cudaMemset(ref[i], 0, x.bytes[DQ + i] * 2 + 16));
    }
    for (size_t i = 0; i < s_q.size(); i++) {
        const int64_t tq = x.start_q[i], tk = x.start_k[i];
        const size_t scores = (size_t)s_q[i] * s_k[i] * h_q * 4;
        Ref r = {s_q[i], s_k[i], h_q, h_kv, d, x.d_v, causal, bf16, x.p.call.scale};
        r.q = (uint16_t *)x.memory[Q] + tq * h_q * d, r.k = (uint16_t *)x.memory[K] + tk * h_kv * d, r.v = (uint16_t *)x.memory[V] + tk * h_kv * x.d_v;
        r.dout = (uint16_t *)x.memory[DOUT] + tq * h_q * x.d_v, r.out = (uint16_t *)x.memory[OUT] + tq * h_q * x.d_v;
        r.lse = (float *)x.memory[LSE] + (ragged ? tq : tq * h_q), r.lse_stride = ragged ? x.tokens_q : s_q[i];
        OK(cudaMalloc(&r.p, scores + 16)), OK(cudaMalloc(&r.ds, scores + 16));
        r.dq = ref[0] + tq * h_q * d, r.dk = ref[1] + tk * h_kv * d, r.dv = ref[2] + tk * h_kv * x.d_v;
        if ((int)i == poisoned) {
            OK(cudaMemset((void *)r.q, 0xff, (size_t)s_q[i] * h_q * d * 2)), OK(cudaMemset((void *)r.k, 0xff, (size_t)s_k[i] * h_kv * d * 2));
            OK(cudaMemset((void *)r.v, 0xff, (size_t)s_k[i] * h_kv * x.d_v * 2)), OK(cudaMemset((void *)r.dout, 0xff, (size_t)s_q[i] * h_q * x.d_v * 2));
        } else {
            if (s_q[i]) ref_forward<<<dim3(s_q[i], h_q), 256>>>(r), ref_ds<<<dim3(s_q[i], h_q), 256>>>(r), ref_dq<<<dim3(s_q[i], h_q), 192>>>(r);
            if (s_k[i]) ref_dkv<<<dim3(s_k[i], h_kv), 192>>>(r);
        }
        OK(cudaDeviceSynchronize());
        cudaFree(r.p), cudaFree(r.ds);
    }
    x.run();
    OK(cudaDeviceSynchronize());
    bool right = true;
    char note[200] = "";
    std::vector<uint16_t> got[3];
    for (int i = 0; i < 3; i++) {
        const size_t n = x.bytes[DQ + i] / 2, width = i == 0 ? (size_t)h_q * d : i == 1 ? (size_t)h_kv * d : (size_t)h_kv * x.d_v;
        std::vector<float> want(n);
        got[i].resize(n);
        OK(cudaMemcpy(got[i].data(), x.memory[DQ + i], n * 2, cudaMemcpyDeviceToHost)), OK(cudaMemcpy(want.data(), ref[i], n * 4, cudaMemcpyDeviceToHost));
        const std::vector<int> &start = i ? x.start_k : x.start_q;
        double ab = 0, aabb = 0, worst = 0;
        size_t wrong = 0, first = n;
        for (size_t j = 0; j < n; j++) {
            if (poisoned >= 0 && j >= start[poisoned] * width && j < start[poisoned + 1] * width) continue;
            const double a = value_on_host(got[i][j], bf16), b = want[j], e = fabs(a - b);
            if (!(e < 1e-3 || e < fabs(b) * 8.01 / 128)) first = std::min(first, j), wrong++;
            if (e > worst || e != e) worst = e;
            ab += a * b, aabb += a * a + b * b;
        }
        const double cosine = aabb < 1e-12 ? 0 : 1 - 2 * ab / aabb;
        if (wrong || !(cosine < 7e-6)) right = false;
        snprintf(note + strlen(note), sizeof note - strlen(note), " d%c %.1e %.1e", "qkv"[i], worst, cosine);
        if (wrong) snprintf(note + strlen(note), sizeof note - strlen(note), " (%zu wrong of %zu, first token %zu)", wrong, n, first / width);
        cudaFree(ref[i]);
    }
    for (int again = 0; again < 2; again++) {
        OK(cudaMemset(x.memory[SUMS], 0xff, x.bytes[SUMS])), OK(cudaMemset(x.memory[TAKEN], 0xff, x.bytes[TAKEN]));
        x.run();
        OK(cudaDeviceSynchronize());
        for (int i = deterministic ? 0 : 1; i < 3; i++) {
            std::vector<uint16_t> more(got[i].size());
            OK(cudaMemcpy(more.data(), x.memory[DQ + i], more.size() * 2, cudaMemcpyDeviceToHost));
            if (more != got[i]) right = false, snprintf(note + strlen(note), sizeof note - strlen(note), " d%c has other bits", "qkv"[i]);
        }
    }
    printf("%s %d %s b %zu %d x %d, heads %d/%d%s%s%s:%s\n", right ? "ok  " : "BAD ", d, bf16 ? "bf16" : "fp16", s_q.size(), s_q[0], s_k[0], h_q, h_kv,
           causal ? " causal" : "", ragged ? " ragged" : "", deterministic ? " det" : "", note);
    fflush(stdout);
    return right;
}

static int check_all(int only)
{
    int bad = 0, all = 0;
    const auto one = [&](int d, bool bf16, std::vector<int> s_q, std::vector<int> s_k, int h_q, int h_kv, bool ragged, int poisoned = -1) {
        if (only && d != only) return;
        for (int causal = 0; causal < 2; causal++) all++, bad += !check(d, bf16, s_q, s_k, h_q, h_kv, causal, 0, ragged, poisoned);
        for (int causal = 0; causal < 2; causal++) all++, bad += !check(d, bf16, s_q, s_k, h_q, h_kv, causal, 1, ragged, poisoned);
    };
    for (const Kernels &k : all_kernels) {
        one(k.d_qk, k.bf16, {64}, {128}, 1, 1, false);
        one(k.d_qk, k.bf16, {256, 256}, {256, 256}, 2, 2, false);
        one(k.d_qk, k.bf16, {63}, {65}, 1, 1, false);
        one(k.d_qk, k.bf16, {1000}, {1000}, 2, 1, false);
        one(k.d_qk, k.bf16, {300}, {2000}, 4, 2, false);
        one(k.d_qk, k.bf16, {2000}, {300}, 4, 2, true);
        one(k.d_qk, k.bf16, {100, 0, 300, 17, 1, 512, 129}, {100, 40, 0, 200, 1, 512, 127}, 4, 1, true);
        one(k.d_qk, k.bf16, {100, 70, 130}, {130, 90, 100}, 2, 2, true, 1);
        one(k.d_qk, k.bf16, {100, 70, 130}, {130, 90, 100}, 2, 2, true, 2);
    }
    printf("%d of %d checks failed\n", bad, all);
    return bad != 0;
}

// The clock of an SM while kernels run, MHz: of what it counts, and of nanoseconds.
__global__ void read_clocks(long long *to)
{
    if (threadIdx.x == 0) {
        unsigned sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        long long ns;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
        to[2 * sm] = clock64(), to[2 * sm + 1] = ns;
    }
}

static void time_one(int d, int b, int s, int h_q, int h_kv, int causal, int deterministic)
{
    static uint4 *flush;
    const size_t flushed = 512u << 20;
    if (!flush) {
        OK(cudaMalloc(&flush, flushed));
        OK(cudaMemset(flush, 1, flushed));
    }
    Problem x(d, true, std::vector<int>(b, s), std::vector<int>(b, s), h_q, h_kv, causal, deterministic, false, 1.0f);
    make_values<<<2048, 256>>>((uint16_t *)x.memory[OUT], x.bytes[OUT] / 2, 99, 0.03f, true);
    make_lse<<<2048, 256>>>((float *)x.memory[LSE], x.bytes[LSE] / 4, s, causal, 0.5f * d / (d + 100));
    static long long *clocks;
    if (!clocks) OK(cudaMallocManaged(&clocks, 4 * 132 * 16));
    cudaEvent_t event[4];
    for (cudaEvent_t &e : event) OK(cudaEventCreate(&e));
    std::vector<float> times[4];
    for (int i = 0; i < 26; i++) {
        read_all<<<1024, 256>>>(flush, flushed / 16, (uint32_t *)x.memory[TAKEN]);
        OK(cudaEventRecord(event[0]));
        x.prepare();
        if (i & 1) OK(cudaEventRecord(event[1]));
        if (i == 17) read_clocks<<<132, 1024>>>(clocks);
        x.main();
        if (i == 17) read_clocks<<<132, 1024>>>(clocks + 264);
        if (i & 1) OK(cudaEventRecord(event[2]));
        x.finish();
        OK(cudaEventRecord(event[3]));
        OK(cudaDeviceSynchronize());
        float t[4];
        OK(cudaEventElapsedTime(&t[3], event[0], event[3]));
        if (i < 3) continue;
        if (!(i & 1)) times[3].push_back(t[3]); // as the library launches them; below with events between
        if (i & 1)
            for (int j = 0; j < 3; j++) OK(cudaEventElapsedTime(&t[j], event[j], event[j + 1])), times[j].push_back(t[j]);
    }
    const double mhz = (double)(clocks[264] - clocks[0]) / (double)(clocks[265] - clocks[1]) * 1e3;
    for (auto &t : times) std::sort(t.begin(), t.end());
    const double flop = 2.0 * (3 * d + 2 * x.d_v) * b * h_q * (double)s * s / (causal ? 2 : 1);
    const auto median = [&](int i) { return times[i][times[i].size() / 2]; };
    static const struct {
        int d, b;
        double full[2], det;
    } targets[] = {{192, 8, {471, 404}, 0}, {192, 2, {555, 517}, 0}, {192, 1, {557, 540}, 0}, {128, 8, {582, 478}, 0}, {128, 2, {671, 619}, 0},
                   {128, 1, {673, 675}, 0}, {64, 8, {507, 412}, 0},  {64, 2, {576, 535}, 0},  {64, 1, {586, 584}, 0}};
    double target = 0;
    for (const auto &t : targets)
        if (t.d == d && t.b == b) target = t.full[causal];
    const double rate = flop / median(3) * 1e-9;
    printf("%d %dx%d %d/%d %s%s: %.0f TFLOP/s (FA4 %.0f: %.3f) %.3f ms = prepare %.3f + main %.3f (%.0f) + finish %.3f; %.0f MHz\n", d, b, s, h_q, h_kv,
           causal ? "causal" : "full", deterministic ? " det" : "", rate, target, target ? rate / target : 0, median(3), median(0), median(1),
           flop / median(1) * 1e-9, median(2), mhz);
    fflush(stdout);
}

int main(int count, char **arguments)
{
    const char *what = count > 1 ? arguments[1] : "check";
    if (!strcmp(what, "check")) return check_all(count > 2 ? atoi(arguments[2]) : 0);
    if (!strcmp(what, "one")) {
        time_one(atoi(arguments[2]), atoi(arguments[3]), atoi(arguments[4]), atoi(arguments[5]), atoi(arguments[6]), atoi(arguments[7]),
                 count > 8 ? atoi(arguments[8]) : 0);
        return 0;
    }
    for (int i = 2; i < count; i++)
        for (int b : {8, 2, 1})
            for (int causal = 1; causal >= 0; causal--) time_one(atoi(arguments[i]), b, b == 8 ? 2048 : b == 2 ? 8192 : 16384, 16, 16, causal, !strcmp(what, "timedet"));
    return 0;
}
