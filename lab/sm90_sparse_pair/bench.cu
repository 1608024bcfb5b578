// bench.cu - checks and times the sparse decode of pair.cuh: bench [check|time] [b,s_q,128,topk[,s_k] ...]
#include "pair.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static int *stuck_records; // warps that waited too long (LAB_BOUND)
static void ok(cudaError_t error, int line)
{
    if (error == cudaSuccess) return;
    printf("bench.cu:%d: %s\n", line, cudaGetErrorString(error));
    static const struct { const char *name; size_t at; } barriers[] = {
#define NAME(member) {#member, offsetof(Shared, member)}
        NAME(part_full), NAME(part_empty), NAME(p_full), NAME(p_peer_full), NAME(p_empty), NAME(v_full), NAME(v_empty),
        NAME(sum_full), NAME(sum_peer_full), NAME(sum_empty)};
    for (int i = 0, told = 0; stuck_records && i < 132 * (THREADS / 32) && told < 48; i++) {
        const int *r = stuck_records + 4 * i;
        if (!r[0]) continue;
        const char *name = "?";
        size_t from = 0;
        for (auto &b : barriers)
            if (b.at <= (size_t)r[0] - 1) name = b.name, from = b.at;
        printf("  block %d warp %d waits for %s[%d], parity %d, count %d\n", i / (THREADS / 32), i % (THREADS / 32), name, (int)(r[0] - 1 - from) / 8, r[1], r[2]), told++;
    }
    exit(1);
}
#define OK(call) ok((call), __LINE__)

#include "../sm90_sparse_decode/data.cuh"

enum { stuck_bytes = 132 * (THREADS / 32) * 16 };
struct Problem {
    sparse_params p;
    int b, s_q;
    void *memory[5];
    Problem(int b_, int s_q_, int topk, int s_k, int odd, int invalid, double sharp = 1) : b(b_), s_q(s_q_)
    {
        const int h_q = HEADS;
        static int *stuck = NULL;
        if (!stuck) OK(cudaHostAlloc(&stuck, stuck_bytes, cudaHostAllocMapped)), memset(stuck, 0, stuck_bytes), stuck_records = stuck;
        const int64_t tokens = (int64_t)b * s_q, keys = (int64_t)b * s_k;
        OK(cudaMalloc(&memory[0], tokens * h_q * 576 * 2)), OK(cudaMalloc(&memory[1], keys * TOKEN_BYTES));
        OK(cudaMalloc(&memory[2], tokens * topk * 4)), OK(cudaMalloc(&memory[3], tokens * h_q * 512 * 2));
        OK(cudaMalloc(&memory[4], tokens * h_q * 4));
        p = {(uint16_t *)memory[0], (uint8_t *)memory[1], (int32_t *)memory[2], (uint16_t *)memory[3], (float *)memory[4],
             (int)tokens, h_q, topk, (int)keys, (float)(pow(576, -0.55) * 1.4426950408889634 * sharp), NULL, NULL, stuck};
        make_q<<<1024, 256>>>((uint16_t *)p.q, tokens * h_q * 576);
        make_cache<<<4096, 128>>>((uint8_t *)p.cache, keys, odd);
        make_indices<<<1024, 256>>>((int32_t *)p.indices, tokens * topk, topk, s_q, s_k, invalid);
        OK(cudaMemset(p.out, 0xff, tokens * h_q * 512 * 2)), OK(cudaMemset(p.lse, 0xff, tokens * h_q * 4));
        OK(cudaDeviceSynchronize());
    }
    ~Problem() { for (void *m : memory) cudaFree(m); }
    int items() const { return p.tokens; }
    void launch(cudaStream_t s = 0) const
    {
        const int clusters = std::min(items(), 66);
        pair_kernel<<<2 * clusters, THREADS, sizeof(Shared), s>>>(p);
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
    // One token of one block: what is wrong, and where.
    int probe(const char *name)
    {
        const int total = HEADS, dump_bytes = 2 * TILE_BYTES + V_BYTES;
        OK(cudaMalloc(&p.dump, 2 * dump_bytes)), OK(cudaMemset(p.dump, 0xee, 2 * dump_bytes));
        launch();
        OK(cudaDeviceSynchronize());
        std::vector<int> rows(total);
        for (int i = 0; i < total; i++) rows[i] = i;
        int *d_rows; double *d_out, *d_lse;
        OK(cudaMalloc(&d_rows, total * 4)), OK(cudaMalloc(&d_out, total * 512 * 8)), OK(cudaMalloc(&d_lse, total * 8));
        OK(cudaMemcpy(d_rows, rows.data(), total * 4, cudaMemcpyHostToDevice));
        reference<<<total, 256>>>(p, d_rows, d_out, d_lse);
        std::vector<double> out(total * 512), lse(total);
        std::vector<uint16_t> got(total * 512), q(total * 576);
        std::vector<float> got_lse(total);
        std::vector<int> index(p.topk);
        std::vector<uint8_t> cache((size_t)p.keys * TOKEN_BYTES), dump(2 * dump_bytes);
        OK(cudaMemcpy(out.data(), d_out, out.size() * 8, cudaMemcpyDeviceToHost)), OK(cudaMemcpy(lse.data(), d_lse, total * 8, cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(got.data(), p.out, got.size() * 2, cudaMemcpyDeviceToHost)), OK(cudaMemcpy(got_lse.data(), p.lse, total * 4, cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(q.data(), p.q, q.size() * 2, cudaMemcpyDeviceToHost)), OK(cudaMemcpy(index.data(), p.indices, p.topk * 4, cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(cache.data(), p.cache, cache.size(), cudaMemcpyDeviceToHost)), OK(cudaMemcpy(dump.data(), p.dump, dump.size(), cudaMemcpyDeviceToHost));
        auto bf16 = [](uint16_t x) { uint32_t u = (uint32_t)x << 16; float f; memcpy(&f, &u, 4); return f; };
        auto fp16 = [](const unsigned char *at) { uint16_t x; memcpy(&x, at, 2); const int e = x >> 10 & 31, m = x & 1023;
            const double v = e == 31 ? 1e30 : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24); return x & 0x8000 ? -v : v; };
        auto code = [](uint8_t c) { const int e = c >> 3 & 15, m = c & 7; const double v = e ? ldexp(8 + m, e - 10) : ldexp(m, -9); return c & 0x80 ? -v : v; };
        auto value = [&](int key, int i) -> double {
            const uint8_t *t = cache.data() + (size_t)index[key] * TOKEN_BYTES;
            if (i >= 512) { uint16_t r; memcpy(&r, t + 528 + 2 * (i - 512), 2); return bf16(r); }
            float s; memcpy(&s, t + 512 + 4 * (i / 128), 4);
            return code(t[i]) * s;
        };
        printf("%s: out: bad of 16 heads x 64 columns (out of 1024), worst\n", name);
        for (int h = 0; h < 8; h++) {
            printf("  heads %3d:", 16 * h);
            for (int c = 0; c < 8; c++) {
                int bad = 0; double worst = 0;
                for (int a = 0; a < 16; a++)
                    for (int b = 0; b < 64; b++) {
                        const int at = (16 * h + a) * 512 + 64 * c + b;
                        const double d = fabs(bf16(got[at]) - out[at]);
                        bad += !(d < 3e-4 || d < 0.01 * fabs(out[at])), worst = d > worst || d != d ? d : worst;
                    }
                printf(" %5d %.0e", bad, worst);
            }
            printf("\n");
        }
#ifdef LAB_DUMP
        for (int r = 0; r < 2; r++) {
            const unsigned char *d = dump.data() + r * dump_bytes, *v = d + 2 * TILE_BYTES;
            int bad_v[4][4] = {}, bad_p[2][4] = {};
            for (int key = 0; key < 64; key++)
                for (int c = 0; c < 4; c++)
                    for (int i = 0; i < 64; i++) { // real column 16 t + 4 step + e: at 16 step + 8 (e / 2) + 2 t + e % 2
                        const int t = i / 16, step = i / 4 % 4, e = i % 4, at = 16 * step + 8 * (e / 2) + 2 * t + e % 2;
                        const double x = fp16(v + c * TILE_BYTES + key * 128 + ((at / 8 ^ (key & 7)) * 16) + at % 8 * 2);
                        bad_v[key / 16][c] += x != value(key, 256 * r + 64 * c + i);
                    }
            for (int side = 0; side < 2; side++)
                for (int h = 0; h < 64; h++) {
                    const int head = 64 * (side ? 1 - r : r) + h;
                    double s[64], most = -1e300;
                    for (int key = 0; key < 64; key++) {
                        s[key] = 0;
                        for (int i = 0; i < 576; i++) s[key] += bf16(q[head * 576 + i]) * value(key, i);
                        s[key] *= p.scale_log2, most = std::max(most, s[key]);
                    }
                    for (int key = 0; key < 64; key++) {
                        const double x = fp16(d + side * TILE_BYTES + key * 128 + ((h / 8 ^ (key & 7)) * 16) + h % 8 * 2), want = exp2(s[key] - most);
                        bad_p[side][key / 16] += !(fabs(x - want) < 2e-3 * want + 1e-6);
                    }
                }
            for (int k = 0; k < 4; k++)
                printf("  block %d keys %2d: bad V of 1024 by chunk %d %d %d %d; bad P of 1024: own %d, other's %d\n", r, 16 * k, bad_v[k][0], bad_v[k][1], bad_v[k][2], bad_v[k][3], bad_p[0][k], bad_p[1][k]);
        }
#endif
        double worst = 0;
        for (int i = 0; i < total; i++) worst = std::max(worst, fabs(got_lse[i] - lse[i]));
        printf("  worst lse %.1e\n", worst);
        return 0;
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
    OK(cudaFuncSetAttribute(pair_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    const char *mode = argc > 1 ? argv[1] : "check";
    int bad = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!strcmp(mode, "probe")) {
        Problem(1, 1, 64, 512, 0, 0).probe("1 block");
        Problem(1, 1, 64, 512, 0, 0, 100).probe("1 block, sharp");
        Problem(1, 1, 128, 512, 0, 0).probe("2 blocks");
        return 0;
    }
    if (!strcmp(mode, "check")) {
        bad += Problem(1, 1, 64, 512, 0, 0).check("1 block");
        bad += Problem(1, 1, 128, 512, 0, 0).check("2 blocks");
        bad += Problem(1, 1, 256, 512, 0, 0).check("4 blocks");
        bad += Problem(4, 2, 576, 1024, 0, 0).check("4x2, 576");
        bad += Problem(4, 2, 576, 1024, 0, 0, 300).check("4x2, 576, references move");
        bad += Problem(100, 3, 512, 1024, 1, 5).check("100x3, odd scales, invalid");
        bad += Problem(8, 1, 100, 700, 1, 2).check("8x1, topk 100");
        bad += Problem(80, 2, 40, 700, 0, 3, 300).check("80x2, topk 40, sharp");
        bad += Problem(2, 1, 2048, 4096, 1, 1).check("2x1, all invalid");
        bad += Problem(128, 2, 2048, 4096, 0, 0, 300).check("128x2, 2048, references move");
        printf(bad ? "FAILED\n" : "all passed\n");
        return bad;
    }
    for (int i = 2; i < argc; i++) {
        int b, s_q, h_q, topk, s_k = 32768;
        if (sscanf(argv[i], "%d,%d,%d,%d,%d", &b, &s_q, &h_q, &topk, &s_k) < 4 || h_q != HEADS) {
            printf("%s: not b,s_q,128,topk[,s_k]\n", argv[i]);
            continue;
        }
        Problem x(b, s_q, topk, s_k, 0, 0);
#ifdef LAB_CLOCK
        OK(cudaMalloc(&x.p.clocks, CLOCKS * 8));
#endif
        const double us = x.time(), flop = 2.0 * b * s_q * h_q * topk * (576 + 512);
        printf("%-20s %8.1f us %6.0f TFLOP/s  %.2f us a block\n", argv[i], us, flop / us / 1e6,
               us / (((x.items() + 65) / 66) * ((topk + 63) / 64)));
#ifdef LAB_CLOCK
        static const char *const names[] = {CLOCK_NAMES};
        long long c[CLOCKS];
        OK(cudaMemcpy(c, x.p.clocks, sizeof c, cudaMemcpyDeviceToHost));
        printf("    clocks a block:");
        for (int k = 1; k < CLOCKS; k++) printf(" %s %lld;", names[k], c[k] / c[0]);
        printf(" %lld blocks\n", c[0]);
#endif
    }
    return 0;
}
