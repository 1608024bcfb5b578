// bench.cu - checks and times Hopper's sparse prefill of src/cuda/sm90/sparse_prefill: bench check | time s_q,h_q,d_qk,s_kv,topk ...
#ifndef KERNEL
#define KERNEL "../../src/cuda/sm90/sparse_prefill/sparse_prefill.cuh"
#endif
#include KERNEL
#include "../../src/cuda/sm90/sparse_prefill/join_pieces.cuh"

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

SPARSE_PREFILL_KERNEL(prefill_512, 512, false)
SPARSE_PREFILL_KERNEL(prefill_576, 576, false)
SPARSE_PREFILL_KERNEL(pieces_512, 512, true)
SPARSE_PREFILL_KERNEL(pieces_576, 576, true)
extern "C" __global__ void __launch_bounds__(32 * PREFILL_JOIN_WARPS) join(const __grid_constant__ struct sparse_prefill_sm90_params p)
{
    join_pieces(p);
}

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
__global__ void make_values(uint16_t *to, int64_t n, uint64_t seed, float size)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        to[i] = Bf16::from_float(size * normal(i + seed));
}
// 1 in `invalid` is no key.
__global__ void make_indices(int32_t *indices, int64_t n, int s_kv, int invalid)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        const uint32_t r = mix(i + 999);
        indices[i] = invalid && r % invalid == 0 ? (r & 64 ? -1 : r & 128 ? 2147483647 : s_kv) : (int32_t)(mix(i * 3 + 5) % s_kv);
    }
}
__global__ void make_lengths(int32_t *lengths, int n, int topk)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const uint32_t r = mix(i + 31337);
        lengths[i] = r % 7 == 0 ? 0 : r % 7 == 1 ? topk + 5 : r % 7 == 2 ? -3 : (int)(r / 8 % (topk + 1));
    }
}
// A row a block: out [512], lse, max in double.
__global__ void reference(sparse_prefill_params p, int d_qk, const int64_t *rows, double *out, double *lse, double *largest)
{
    extern __shared__ double weight[];
    __shared__ double most, sum;
    const int64_t row = rows[blockIdx.x], token = row / p.h_q;
    const uint16_t *q = p.q + row * d_qk, *kv = (const uint16_t *)p.kv.data;
    const int length = p.topk_length ? min(max(p.topk_length[token], 0), p.topk) : p.topk;
    for (int j = threadIdx.x; j < length; j += blockDim.x) {
        const int key = p.kv.indices[token * p.topk + j];
        double s = -INFINITY;
        if ((uint32_t)key < p.kv.slots) {
            s = 0;
            for (int i = 0; i < d_qk; i++) s += (double)Bf16::to_float(q[i]) * (double)Bf16::to_float(kv[(int64_t)key * d_qk + i]);
            s *= p.scale;
        }
        weight[j] = s;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        most = -INFINITY, sum = 0;
        for (int j = 0; j < length; j++) most = fmax(most, weight[j]);
        for (int j = 0; j < length; j++) sum += most > -INFINITY ? exp(weight[j] - most) : 0;
        lse[blockIdx.x] = sum > 0 ? most + log(sum) : INFINITY, largest[blockIdx.x] = most;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 512; i += blockDim.x) {
        double o = 0;
        for (int j = 0; j < length; j++) {
            const int key = p.kv.indices[token * p.topk + j];
            if ((uint32_t)key < p.kv.slots) o += exp(weight[j] - most) * (double)Bf16::to_float(kv[(int64_t)key * d_qk + i]);
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

static tensor_map map_of(void *data, uint64_t inner, uint64_t heads, uint64_t tokens, uint32_t rows, uint32_t tiles)
{
    typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                               const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                               CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    void *f;
    cudaDriverEntryPointQueryResult found;
    OK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
    const cuuint64_t sizes[5] = {64, heads, inner / 64, tokens, 1}, strides[4] = {inner * 2, 128, heads * inner * 2, heads * inner * 2};
    const cuuint32_t box[5] = {64, rows, tiles, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
    tensor_map map;
    const CUresult e = ((Encode)f)((CUtensorMap *)&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, data, sizes, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (e) printf("map: %d\n", (int)e), exit(1);
    return map;
}

struct Problem {
    sparse_prefill_sm90_params p;
    int64_t s_q;
    int d_qk;
    void *memory[8];
    int rest; // tiles that are cut
    Problem(int64_t s_q_, int h_q, int d_qk_, int64_t s_kv, int topk, int invalid, bool lengths, float size = 0.1f) : s_q(s_q_), d_qk(d_qk_)
    {
        OK(cudaMalloc(&memory[0], s_q * h_q * d_qk * 2)), OK(cudaMalloc(&memory[1], s_kv * d_qk * 2));
        OK(cudaMalloc(&memory[2], s_q * topk * 4)), OK(cudaMalloc(&memory[3], s_q * h_q * 512 * 2));
        OK(cudaMalloc(&memory[4], s_q * h_q * 4)), OK(cudaMalloc(&memory[5], s_q * h_q * 4)), OK(cudaMalloc(&memory[6], s_q * 4));
        memset(&p, 0, sizeof p);
        sparse_prefill_params &c = p.call;
        c.s_q = (int)s_q, c.h_q = h_q, c.d_qk = d_qk, c.topk = topk;
        c.tiles = (h_q + 63) / 64, c.tiles_divisor = divisor_of(c.tiles);
        c.scale = (float)pow(d_qk, -0.5), c.scale_log2 = c.scale * 1.44269504f;
        c.q = (uint16_t *)memory[0], c.q_stride[0] = (int64_t)h_q * d_qk, c.q_stride[1] = d_qk;
        c.kv = {(uint8_t *)memory[1], d_qk * 2, 0, (int32_t *)memory[2], {topk, 0}, (uint32_t)s_kv, 1, divisor_of(1)};
        c.topk_length = lengths ? (int32_t *)memory[6] : NULL;
        c.out = (uint16_t *)memory[3], c.out_stride[0] = (int64_t)h_q * 512, c.out_stride[1] = 512;
        c.max_logits = (float *)memory[4], c.lse = (float *)memory[5], c.max_stride = c.lse_stride = h_q;
        c.rules = {NULL, INFINITY, 1.0f};
        // As sm90_sparse_prefill_cut, but PIECES may say how many.
        const int tiles = (int)(s_q * c.tiles), blocks = (topk + 63) / 64;
        rest = tiles % 132;
        int pieces = rest ? std::min({132 / rest, 32, blocks}) : 1;
        if (getenv("PIECES")) pieces = std::min(pieces, atoi(getenv("PIECES")));
        const int chunk = (blocks + pieces - 1) / std::max(pieces, 1);
        pieces = (blocks + chunk - 1) / chunk;
        if (blocks - chunk < 3 || tiles > 8 * 132) pieces = 1;
        if (pieces < 2) pieces = 1, rest = 0;
        p.cut.whole = tiles - rest, p.cut.pieces = pieces, p.cut.pieces_divisor = divisor_of(pieces);
        p.items = p.cut.whole + rest * pieces;
        OK(cudaMalloc(&memory[7], (size_t)(rest * pieces + 1) * PREFILL_SLOT_BYTES)), OK(cudaMemset(memory[7], 0xff, (size_t)rest * pieces * PREFILL_SLOT_BYTES));
        p.cut.slots = (unsigned char *)memory[7];
        p.queries = map_of(memory[0], d_qk, h_q, s_q, 64, 2);
        p.results = map_of(memory[3], 512, h_q, s_q, 64, 2);
        make_values<<<1024, 256>>>((uint16_t *)c.q, s_q * h_q * d_qk, 77, size);
        make_values<<<4096, 128>>>((uint16_t *)c.kv.data, s_kv * d_qk, 1ull << 40, size);
        make_indices<<<1024, 256>>>((int32_t *)c.kv.indices, s_q * topk, (int)s_kv, invalid);
        make_lengths<<<64, 256>>>((int32_t *)memory[6], (int)s_q, topk);
        OK(cudaMemset(c.out, 0xff, s_q * h_q * 512 * 2)), OK(cudaMemset(c.lse, 0xff, s_q * h_q * 4));
        OK(cudaDeviceSynchronize());
    }
    ~Problem() { for (void *m : memory) cudaFree(m); }
    void launch() const
    {
        const int grid = std::min((int64_t)p.items, (int64_t)132);
        (rest ? d_qk == 576 ? pieces_576 : pieces_512 : d_qk == 576 ? prefill_576 : prefill_512)<<<grid, THREADS, sizeof(Shared)>>>(p);
        OK(cudaGetLastError());
        if (!rest) return;
        cudaLaunchAttribute overlap = {cudaLaunchAttributeProgrammaticStreamSerialization};
        overlap.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config = {dim3(rest * 64 / PREFILL_JOIN_WARPS), dim3(32 * PREFILL_JOIN_WARPS), 0, 0, &overlap, 1};
        OK(cudaLaunchKernelEx(&config, join, p));
    }
    int check(const char *name)
    {
        launch();
        OK(cudaDeviceSynchronize());
        const int n = 128;
        const int64_t total = s_q * p.call.h_q;
        std::vector<int64_t> rows;
        for (int i = 0; i < n; i++) rows.push_back(i < 4 ? i * (total - 1) / 3 : (int64_t)((i * 2654435761ull + 12345) % total));
        int64_t *d_rows; double *d_out, *d_lse, *d_max;
        OK(cudaMalloc(&d_rows, n * 8)), OK(cudaMalloc(&d_out, n * 512 * 8)), OK(cudaMalloc(&d_lse, n * 8)), OK(cudaMalloc(&d_max, n * 8));
        OK(cudaMemcpy(d_rows, rows.data(), n * 8, cudaMemcpyHostToDevice));
        OK(cudaFuncSetAttribute(reference, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
        reference<<<n, 256, p.call.topk * 8>>>(p.call, d_qk, d_rows, d_out, d_lse, d_max);
        OK(cudaDeviceSynchronize());
        std::vector<double> out(n * 512), lse(n), max(n);
        std::vector<uint16_t> got((size_t)total * 512), again(got.size());
        std::vector<float> got_lse(total), got_max(total);
        OK(cudaMemcpy(out.data(), d_out, n * 512 * 8, cudaMemcpyDeviceToHost)), OK(cudaMemcpy(lse.data(), d_lse, n * 8, cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(max.data(), d_max, n * 8, cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(got.data(), p.call.out, got.size() * 2, cudaMemcpyDeviceToHost)), OK(cudaMemcpy(got_lse.data(), p.call.lse, total * 4, cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(got_max.data(), p.call.max_logits, total * 4, cudaMemcpyDeviceToHost));
        launch();
        OK(cudaMemcpy(again.data(), p.call.out, got.size() * 2, cudaMemcpyDeviceToHost));
        double ab = 0, aa = 0, worst = 0, worst_lse = 0;
        int bad = 0, bad_lse = 0, bad_max = 0;
        for (int r = 0; r < n; r++) {
            for (int i = 0; i < 512; i++) {
                uint32_t bits = (uint32_t)got[(size_t)rows[r] * 512 + i] << 16;
                float x; memcpy(&x, &bits, 4);
                const double y = out[r * 512 + i], d = fabs(x - y);
                ab += x * y, aa += (double)x * x + y * y, worst = std::max(worst, d);
                bad += !(d < 8e-4 || d < 3.01 / 128 * fabs(y));
            }
            const auto differs = [&](float x, double y) {
                if (std::isinf(y)) return x != y;
                const double d = fabs(x - y);
                worst_lse = std::max(worst_lse, d / fabs(y));
                return !(d < 1e-6 || d < 2.01 / 65536 * fabs(y));
            };
            bad_lse += differs(got_lse[rows[r]], lse[r]), bad_max += differs(got_max[rows[r]], max[r]);
        }
        const int same = memcmp(got.data(), again.data(), got.size() * 2) == 0;
        printf("%-34s bad %d lse %d max %d, cosine %.1e, worst %.1e, lse rel %.1e, %s\n", name, bad, bad_lse, bad_max, 1 - 2 * ab / aa, worst, worst_lse,
               same ? "same bits" : "OTHER BITS");
        cudaFree(d_rows), cudaFree(d_out), cudaFree(d_lse), cudaFree(d_max);
        return bad || bad_lse || bad_max || !same;
    }
    double time(int runs)
    {
        static uint4 *flush = NULL; static uint32_t *sink;
        const size_t bytes = 512u << 20;
        if (!flush) OK(cudaMalloc(&flush, bytes)), OK(cudaMemset(flush, 1, bytes)), OK(cudaMalloc(&sink, 4));
        cudaEvent_t a, z; OK(cudaEventCreate(&a)), OK(cudaEventCreate(&z));
        std::vector<float> us;
        for (int i = 0; i <= runs; i++) {
            read_all<<<1056, 512>>>(flush, bytes / 16, sink);
            OK(cudaEventRecord(a)); launch(); OK(cudaEventRecord(z)); OK(cudaEventSynchronize(z));
            float ms; OK(cudaEventElapsedTime(&ms, a, z));
            if (i) us.push_back(ms * 1000);
        }
        std::sort(us.begin(), us.end());
        return us[us.size() / 2];
    }
};

int main(int argc, char **argv)
{
    OK(cudaFuncSetAttribute(pieces_512, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    OK(cudaFuncSetAttribute(pieces_576, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    OK(cudaFuncSetAttribute(prefill_512, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    OK(cudaFuncSetAttribute(prefill_576, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    const char *mode = argc > 1 ? argv[1] : "check";
    int bad = 0;
    if (!strcmp(mode, "check")) {
        bad += Problem(1, 64, 576, 512, 64, 0, 0).check("1 block");
        bad += Problem(2, 128, 576, 512, 128, 0, 0).check("2 blocks");
        bad += Problem(7, 128, 512, 700, 192, 0, 0).check("3 blocks, 512");
        bad += Problem(300, 128, 576, 1024, 576, 5, 0, 1.0f).check("300 tokens, 9 blocks, invalid, steep");
        bad += Problem(333, 128, 576, 1000, 500, 3, 1).check("lengths, invalid");
        bad += Problem(333, 80, 512, 1000, 500, 3, 1).check("80 heads, lengths, invalid, 512");
        bad += Problem(200, 16, 576, 700, 100, 2, 1).check("16 heads");
        bad += Problem(400, 128, 576, 4096, 2048, 0, 0).check("topk 2048");
        bad += Problem(40, 128, 512, 4096, 300, 1, 0).check("all invalid");
        bad += Problem(1, 64, 512, 4096, 2048, 0, 0, 1.0f).check("1 token in 32 pieces");
        bad += Problem(66, 80, 576, 4096, 700, 3, 1).check("80 heads, 1 round");
        bad += Problem(270, 64, 576, 4096, 1000, 3, 1, 0.5f).check("2 rounds, and 6 tiles in 16 pieces");
        printf(bad ? "FAILED\n" : "all passed\n");
        return bad;
    }
    for (int i = 2; i < argc; i++) {
        int s_q, h_q, d_qk, topk, s_kv;
        if (sscanf(argv[i], "%d,%d,%d,%d,%d", &s_q, &h_q, &d_qk, &s_kv, &topk) < 5) continue;
        Problem x(s_q, h_q, d_qk, s_kv, topk, 0, 0);
        usleep(getenv("COOL") ? atoi(getenv("COOL")) * 1000 : 700000);
        const double us = x.time(15), flop = 2.0 * s_q * h_q * topk * (d_qk + 512);
        printf("%-26s %8.1f us %6.1f TFLOP/s  %.2f us a block\n", argv[i], us, flop / us / 1e6,
               us / ((x.p.call.s_q * x.p.call.tiles + 131) / 132 * ((topk + 63) / 64)));
    }
    return 0;
}
