// bench.cu - checks and times a sparse decode, of sparse.cuh or -DKERNEL='"FILE"': bench [check|time] [b,s_q,h_q,topk ...]
#ifndef KERNEL
#define KERNEL "sparse.cuh"
#endif
#include KERNEL

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static void ok(cudaError_t error, int line)
{
    if (error != cudaSuccess) printf("bench.cu:%d: %s\n", line, cudaGetErrorString(error)), exit(1);
}
#define OK(call) ok((call), __LINE__)

#include "data.cuh"

struct Problem {
    sparse_params p;
    int b, s_q;
    void *memory[5];
    Problem(int b_, int s_q_, int h_q, int topk, int s_k, int odd, int invalid) : b(b_), s_q(s_q_)
    {
        const int64_t tokens = (int64_t)b * s_q, keys = (int64_t)b * s_k;
        OK(cudaMalloc(&memory[0], tokens * h_q * 576 * 2)), OK(cudaMalloc(&memory[1], keys * TOKEN_BYTES));
        OK(cudaMalloc(&memory[2], tokens * topk * 4)), OK(cudaMalloc(&memory[3], tokens * h_q * 512 * 2));
        OK(cudaMalloc(&memory[4], tokens * h_q * 4));
        p = {(uint16_t *)memory[0], (uint8_t *)memory[1], (int32_t *)memory[2], (uint16_t *)memory[3], (float *)memory[4],
             (int)tokens, h_q, topk, (int)keys, (float)(pow(576, -0.55) * 1.4426950408889634), NULL};
        make_q<<<1024, 256>>>((uint16_t *)p.q, tokens * h_q * 576);
        make_cache<<<4096, 128>>>((uint8_t *)p.cache, keys, odd);
        make_indices<<<1024, 256>>>((int32_t *)p.indices, tokens * topk, topk, s_q, s_k, invalid);
        OK(cudaMemset(p.out, 0xff, tokens * h_q * 512 * 2)), OK(cudaMemset(p.lse, 0xff, tokens * h_q * 4));
        OK(cudaDeviceSynchronize());
    }
    ~Problem() { for (void *m : memory) cudaFree(m); }
    int items() const { return p.tokens * ((p.heads + ROWS - 1) / ROWS); }
    void launch(cudaStream_t s = 0) const
    {
        const int grid = std::min(items(), 132);
        sparse_kernel<<<grid, THREADS, sizeof(Shared), s>>>(p);
        OK(cudaGetLastError());
    }
    int check(const char *name)
    {
        launch();
        OK(cudaDeviceSynchronize());
        const int n = 96, total = p.tokens * p.heads;
        std::vector<int> rows;
        for (int i = 0; i < n; i++) rows.push_back(i < 4 ? i * (total - 1) / 3 : (int)((i * 2654435761ull + 12345) % total));
        int *d_rows; double *d_out, *d_lse;
        OK(cudaMalloc(&d_rows, n * 4)), OK(cudaMalloc(&d_out, n * 512 * 8)), OK(cudaMalloc(&d_lse, n * 8));
        OK(cudaMemcpy(d_rows, rows.data(), n * 4, cudaMemcpyHostToDevice));
        reference<<<n, 256>>>(p, d_rows, d_out, d_lse);
        std::vector<double> out(n * 512), lse(n);
        std::vector<uint16_t> got((size_t)total * 512), again(got.size());
        std::vector<float> got_lse(total);
        OK(cudaMemcpy(out.data(), d_out, n * 512 * 8, cudaMemcpyDeviceToHost)), OK(cudaMemcpy(lse.data(), d_lse, n * 8, cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(got.data(), p.out, got.size() * 2, cudaMemcpyDeviceToHost)), OK(cudaMemcpy(got_lse.data(), p.lse, total * 4, cudaMemcpyDeviceToHost));
        launch();
        OK(cudaMemcpy(again.data(), p.out, got.size() * 2, cudaMemcpyDeviceToHost));
        double ab = 0, aa = 0, worst = 0, worst_lse = 0;
        int bad = 0;
        for (int r = 0; r < n; r++) {
            for (int i = 0; i < 512; i++) {
                uint32_t bits = (uint32_t)got[(size_t)rows[r] * 512 + i] << 16;
                float x; memcpy(&x, &bits, 4);
                const double y = out[r * 512 + i], d = fabs(x - y);
                ab += x * y, aa += (double)x * x + y * y, worst = std::max(worst, d);
                bad += !(d < 1e-3 || d < 2.01 / 128 * fabs(y));
            }
            const double d = fabs(got_lse[rows[r]] - lse[r]);
            if (!(std::isinf(lse[r]) && got_lse[rows[r]] == lse[r])) worst_lse = std::max(worst_lse, std::isnan(d) ? 1e9 : d / fabs(lse[r])), bad += !(d < 1e-3);
        }
        const int same = memcmp(got.data(), again.data(), got.size() * 2) == 0;
        printf("%-28s bad %d, cosine %.1e, worst %.1e, lse rel %.1e, %s\n", name, bad, 1 - 2 * ab / aa, worst, worst_lse, same ? "same bits" : "OTHER BITS");
        cudaFree(d_rows), cudaFree(d_out), cudaFree(d_lse);
        return bad || !same;
    }
    double time(int runs = 15)
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
    OK(cudaFuncSetAttribute(sparse_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    const char *mode = argc > 1 ? argv[1] : "check";
    int bad = 0;
    if (!strcmp(mode, "check")) {
        bad += Problem(1, 1, 64, 64, 512, 0, 0).check("1 block");
        bad += Problem(1, 1, 64, 128, 512, 0, 0).check("2 blocks");
        bad += Problem(4, 2, 64, 576, 1024, 0, 0).check("4x2, 576");
        bad += Problem(100, 3, 128, 512, 1024, 1, 5).check("odd scales, invalid, 128 heads");
        bad += Problem(8, 1, 16, 100, 700, 1, 2).check("16 heads, topk 100");
        bad += Problem(2, 1, 96, 2048, 4096, 1, 1).check("96 heads, all invalid");
        printf(bad ? "FAILED\n" : "all passed\n");
        return bad;
    }
    for (int i = 2; i < argc; i++) {
        int b, s_q, h_q, topk, s_k = 32768;
        if (sscanf(argv[i], "%d,%d,%d,%d,%d", &b, &s_q, &h_q, &topk, &s_k) < 4) continue;
        Problem x(b, s_q, h_q, topk, s_k, 0, 0);
#ifdef LAB_CLOCK
        OK(cudaMalloc(&x.p.clocks, 64));
#endif
        const double us = x.time(), flop = 2.0 * b * s_q * h_q * topk * (576 + 512);
        printf("%-20s %8.1f us %6.0f TFLOP/s  %.2f us a block\n", argv[i], us, flop / us / 1e6,
               us / (((x.items() + 131) / 132) * ((topk + 63) / 64)));
#ifdef LAB_CLOCK
#ifdef CLOCK_NAMES
        static const char *const names[16] = {CLOCK_NAMES};
        unsigned c[16];
        OK(cudaMemcpy(c, x.p.clocks, sizeof c, cudaMemcpyDeviceToHost));
        printf("    clocks a block (%u):", c[5]);
        for (int j = 0; j < 16; j++)
            if (*names[j] && j != 5) printf(" %s %u;", names[j], c[j] / c[5]);
        printf("\n");
#else
        long long c[6];
        OK(cudaMemcpy(c, x.p.clocks, sizeof c, cudaMemcpyDeviceToHost));
        printf("    clocks a block: Q K^T %lld, of which waiting for V's place %lld; softmax %lld; P V waits %lld, works %lld\n", c[1] / c[3], c[0] / c[3],
               c[2] / c[3], c[4] / c[3], c[5] / c[3]);
#endif
#endif
    }
    return 0;
}
