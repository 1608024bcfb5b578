/* SPDX-License-Identifier: MIT
 *
 * The portable dense decode by itself, launched by hand: a quick check against double precision, the device's plan against
 * the host's, then times. `bench check`, `bench time`, `bench plan`,
 * `bench plans` (a table).
 */
extern "C" {
#include "../../src/plan.h"
}
#include "../../src/cuda/any/decode_plan.cu"
#define D_V           D_V_OF_JOIN
#define PARTS_AT_ONCE PARTS_AT_ONCE_OF_JOIN
#include "../../src/cuda/any/join_splits.cu"
#undef D_V
#undef PARTS_AT_ONCE
#include "../../src/cuda/sm80/dense_decode/dense_decode.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

DENSE_DECODE_KERNEL(k16, Bf16, 16, 64, 8, 1, true)
DENSE_DECODE_KERNEL(k16s, Bf16, 16, 32, 4, 1, false)
DENSE_DECODE_KERNEL(k32, Bf16, 32, 64, 8, 1, false)
DENSE_DECODE_KERNEL(k64n, Bf16, 64, 32, 8, 2, false)
DENSE_DECODE_KERNEL(k64, Bf16, 64, 64, 8, 2, false)

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        const cudaError_t error = (call);                                                                    \
        if (error != cudaSuccess) {                                                                          \
            printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error));                            \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

static uint64_t state = 1;
static uint64_t draw()
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 33;
}

__global__ void fill(uint16_t *to, size_t n, unsigned seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        unsigned x = (unsigned)(i * 2654435761u) ^ seed ^ (unsigned)(i >> 32) * 40503u;
        float sum = 0.0f;
        for (int j = 0; j < 4; j++) {
            x ^= x << 13, x ^= x >> 17, x ^= x << 5;
            sum += (float)(x >> 8) * (1.0f / 16777216.0f) - 0.5f;
        }
        to[i] = Bf16::from_float(sum * 0.1732f);
    }
}

__global__ void flush(const float4 *from, size_t n, float *out)
{
    float sum = 0.0f;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        const float4 v = from[i];
        sum += v.x + v.y + v.z + v.w;
    }
    if (sum == 123.0f) *out = sum;
}

struct Case {
    int b, s_q, s_k, h_q, causal, vary, partitions, tile; /* tile: 0 = by rows */
};

struct Run {
    Case c;
    struct dense_decode_params p;
    std::vector<int32_t> lengths, table;
    std::vector<uint16_t> kv_host;
    int32_t *lengths_device, *table_device;
    uint16_t *q, *kv, *out;
    float *lse, *slots, *slot_lse;
    struct plan_header *plan;
    int pages, max_pages, rows_of_tile;
    size_t shared_bytes;
    int grid, join_grid, rows_per_block, row_lanes;
    bool small, narrow;
};

static int sms, most_shared;

static void make(Run &r, const Case &c)
{
    r.c = c;
    r.max_pages = (c.s_k + 63) / 64 + 1;
    r.lengths.resize(c.b);
    r.table.assign((size_t)c.b * r.max_pages, -1);
    int next = 0;
    for (int i = 0; i < c.b; i++) {
        r.lengths[i] = c.vary ? (int)(draw() % (unsigned)(c.s_k + 1)) : c.s_k;
        for (int j = 0; j < (r.lengths[i] + 63) / 64; j++) r.table[(size_t)i * r.max_pages + j] = next++;
    }
    r.pages = next + 1;
    std::vector<int32_t> shuffle(r.pages);
    for (int i = 0; i < r.pages; i++) shuffle[i] = i;
    for (int i = r.pages - 1; i > 0; i--) std::swap(shuffle[i], shuffle[draw() % (unsigned)(i + 1)]);
    for (auto &page : r.table)
        if (page >= 0) page = shuffle[page];
    const size_t q_size = (size_t)c.b * c.s_q * c.h_q * 576, kv_size = (size_t)r.pages * 64 * 576;
    const size_t out_size = (size_t)c.b * c.s_q * c.h_q * 512;
    CHECK(cudaMalloc(&r.q, q_size * 2));
    CHECK(cudaMalloc(&r.kv, kv_size * 2));
    CHECK(cudaMalloc(&r.out, out_size * 2));
    CHECK(cudaMalloc(&r.lse, (size_t)c.b * c.s_q * c.h_q * 4));
    CHECK(cudaMalloc(&r.lengths_device, c.b * 4));
    CHECK(cudaMalloc(&r.table_device, r.table.size() * 4));
    fill<<<1024, 256>>>(r.q, q_size, (unsigned)draw());
    fill<<<1024, 256>>>(r.kv, kv_size, (unsigned)draw());
    CHECK(cudaMemset(r.out, 0xff, out_size * 2));
    CHECK(cudaMemcpy(r.lengths_device, r.lengths.data(), c.b * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(r.table_device, r.table.data(), r.table.size() * 4, cudaMemcpyHostToDevice));

    struct dense_decode_params &p = r.p;
    memset(&p, 0, sizeof p);
    p.b = c.b, p.s_q = c.s_q, p.h_q = c.h_q, p.h_kv = 1, p.group = c.h_q, p.d_qk = 576,
    p.rows = c.s_q * c.h_q;
    p.page_size = 64, p.capacity = r.max_pages * 64, p.causal = c.causal, p.vectors_aligned = 1;
    p.scale_log2 = 1.0f / 24.0f * 1.44269504f;
    p.q = r.q, p.kv = r.kv, p.block_table = r.table_device, p.seqlens = r.lengths_device;
    p.q_stride[0] = (int64_t)c.s_q * c.h_q * 576, p.q_stride[1] = (int64_t)c.h_q * 576, p.q_stride[2] = 576;
    p.kv_stride[0] = 64 * 576, p.kv_stride[1] = 576, p.kv_stride[2] = 576;
    p.block_table_stride = r.max_pages;
    p.output.out = r.out, p.output.lse = r.lse, p.output.pairs_aligned = 1;
    p.output.out_stride[0] = (int64_t)c.s_q * c.h_q * 512, p.output.out_stride[1] = (int64_t)c.h_q * 512;
    p.output.out_stride[2] = 512;
    p.output.lse_stride[0] = (int64_t)c.h_q * c.s_q, p.output.lse_stride[1] = c.s_q;
    p.output.rules.lse_of_empty = INFINITY, p.output.rules.lse_factor = 1.0f;
    int partitions = c.partitions ? c.partitions : std::max(1, sms / ((p.rows + 63) / 64));
    p.split.num_partitions = partitions;
    const size_t plan_size = plan_bytes(c.b, partitions);
    std::vector<char> plan(plan_size);
    plan_build((struct plan_header *)plan.data(), c.b, partitions, r.lengths.data(), p.capacity);
    CHECK(cudaMalloc(&r.plan, plan_size));
    CHECK(cudaMemcpy(r.plan, plan.data(), plan_size, cudaMemcpyHostToDevice));
    p.split.plan = r.plan;
    const size_t slot_rows = (size_t)2 * partitions * p.rows;
    CHECK(cudaMalloc(&r.slots, slot_rows * 512 * 4));
    CHECK(cudaMalloc(&r.slot_lse, slot_rows * 4));
    CHECK(cudaMemset(r.slots, 0xff, slot_rows * 512 * 4));
    p.split.slot_out = r.slots, p.split.slot_lse = r.slot_lse;
    r.rows_of_tile = c.tile ? c.tile : p.rows <= 16 ? 16 : p.rows <= 32 ? 32 : 64;
    const bool small = r.rows_of_tile == 17; /* 16 rows for 99 KiB */
    if (small) r.rows_of_tile = 16;
    r.narrow = r.rows_of_tile == 65; /* 64 rows for 163 KiB */
    if (r.narrow) r.rows_of_tile = 64;
    const int keys = small || r.narrow ? 32 : 64, key_groups = small ? 4 : 8 / (r.rows_of_tile / 16);
    const size_t fixed =
        r.rows_of_tile * ((r.rows_of_tile == 16 && !small ? 0 : 1152) + 128 + 4 * key_groups + 4);
    p.stages = small || r.narrow ? 2 : std::min(5, (int)((most_shared - 256 - fixed) / (keys * 1152)));
    p.page_divisor = divisor_of(64);
    r.small = small;
    r.shared_bytes = fixed + (size_t)p.stages * keys * 1152;
    r.grid = partitions * ((p.rows + r.rows_of_tile - 1) / r.rows_of_tile);
    r.rows_per_block = partitions / c.b > 8 ? 1 : JOIN_WARPS;
    r.row_lanes = (p.rows + r.rows_per_block - 1) / r.rows_per_block;
    r.join_grid = partitions * r.row_lanes;
}

static void free_run(Run &r)
{
    void *all[] = {r.q, r.kv, r.out, r.lse, r.lengths_device, r.table_device, r.plan, r.slots, r.slot_lse};
    for (void *memory : all) CHECK(cudaFree(memory));
}

static void launch(const Run &r, cudaStream_t stream)
{
    if (r.small)
        k16s<<<r.grid, 128, r.shared_bytes, stream>>>(r.p);
    else if (r.narrow)
        k64n<<<r.grid, 256, r.shared_bytes, stream>>>(r.p);
    else if (r.rows_of_tile == 32)
        k32<<<r.grid, 256, r.shared_bytes, stream>>>(r.p);
    else if (r.rows_of_tile == 16)
        k16<<<r.grid, 256, r.shared_bytes, stream>>>(r.p);
    else
        k64<<<r.grid, 256, r.shared_bytes, stream>>>(r.p);
    join_splits_bf16<<<r.join_grid, 32 * JOIN_WARPS, 0, stream>>>(r.p, r.rows_per_block, r.row_lanes);
    CHECK(cudaGetLastError());
}

static float value(uint16_t bits)
{
    uint32_t u = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static int check(const Case &c)
{
    Run r;
    make(r, c);
    launch(r, 0);
    CHECK(cudaDeviceSynchronize());
    const size_t out_size = (size_t)c.b * c.s_q * c.h_q * 512;
    std::vector<uint16_t> q((size_t)c.b * c.s_q * c.h_q * 576), kv((size_t)r.pages * 64 * 576), out(out_size),
        again(out_size);
    std::vector<float> lse((size_t)c.b * c.s_q * c.h_q);
    CHECK(cudaMemcpy(q.data(), r.q, q.size() * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(kv.data(), r.kv, kv.size() * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(out.data(), r.out, out_size * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(lse.data(), r.lse, lse.size() * 4, cudaMemcpyDeviceToHost));
    int different = 0;
    for (int i = 0; i < 10; i++) {
        CHECK(cudaMemset(r.out, 0xff, out_size * 2));
        launch(r, 0);
        CHECK(cudaMemcpy(again.data(), r.out, out_size * 2, cudaMemcpyDeviceToHost));
        different += memcmp(again.data(), out.data(), out_size * 2) != 0;
    }
    double worst = 0, worst_lse = 0;
    for (int n = 0; n < 24; n++) {
        const int i = n == 0 ? 0 : n == 1 ? c.b - 1 : (int)(draw() % (unsigned)c.b);
        const int row = n == 0 ? 0 : n == 1 ? c.s_q * c.h_q - 1 : (int)(draw() % (unsigned)(c.s_q * c.h_q));
        const int token = row / c.h_q, head = row % c.h_q;
        const int seen = c.causal ? std::max(0, r.lengths[i] - c.s_q + token + 1) : r.lengths[i];
        const uint16_t *query = &q[((size_t)i * c.s_q * c.h_q + row) * 576];
        std::vector<double> s(seen), o(512, 0.0);
        double most = -1e300, sum = 0;
        for (int k = 0; k < seen; k++) {
            const uint16_t *key =
                &kv[((size_t)r.table[(size_t)i * r.max_pages + k / 64] * 64 + k % 64) * 576];
            double dot = 0;
            for (int d = 0; d < 576; d++) dot += (double)value(query[d]) * value(key[d]);
            s[k] = dot / 24.0, most = std::max(most, s[k]);
        }
        for (int k = 0; k < seen; k++) {
            const uint16_t *key =
                &kv[((size_t)r.table[(size_t)i * r.max_pages + k / 64] * 64 + k % 64) * 576];
            const double weight = exp(s[k] - most);
            sum += weight;
            for (int d = 0; d < 512; d++) o[d] += weight * value(key[d]);
        }
        for (int d = 0; d < 512; d++) {
            const double mine = value(out[((size_t)i * c.s_q * c.h_q + row) * 512 + d]);
            const double error = fabs(mine - (seen ? o[d] / sum : 0.0));
            if (!(error < 1e9)) worst = 1e9;
            worst = std::max(worst, error);
        }
        const float my_lse = lse[(size_t)i * c.h_q * c.s_q + (size_t)head * c.s_q + token];
        const double error = seen ? fabs(my_lse - (most + log(sum))) : my_lse == INFINITY ? 0.0 : 1e9;
        worst_lse = std::max(worst_lse, error == error ? error : 1e9);
    }
    const bool good = worst < 8e-4 && worst_lse < 1e-4 && !different;
    printf("%s b %d s_q %d s_k %d h_q %d causal %d vary %d partitions %d tile %d: out %.2g, lse %.2g, %d of "
           "10 runs differ\n",
           good ? "ok    " : "FAILED", c.b, c.s_q, c.s_k, c.h_q, c.causal, c.vary, r.p.split.num_partitions,
           r.rows_of_tile, worst, worst_lse, different);
    free_run(r);
    return !good;
}

static float4 *flush_memory;
static const size_t flush_bytes = 512u << 20;

template <typename F> static float graph_time(F launches, int repeat)
{
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    launches(stream);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<float> times;
    for (int i = 0; i < repeat + 3; i++) {
        flush<<<1056, 512, 0, stream>>>(flush_memory, flush_bytes / 16, (float *)flush_memory);
        CHECK(cudaEventRecord(begin, stream));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaStreamSynchronize(stream));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3) times.push_back(ms * 1000.0f);
    }
    std::sort(times.begin(), times.end());
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
    return times[times.size() / 2];
}

static void time_case(const Case &c)
{
    Run r;
    make(r, c);
    const float us = graph_time([&](cudaStream_t stream) { launch(r, stream); }, 15);
    double keys = 0;
    for (int length : r.lengths) keys += length;
    const double bytes = keys * 1152 + (double)c.b * c.s_q * c.h_q * (576 + 512) * 2;
    const double flop = 2.0 * (576 + 512) * keys * c.s_q * c.h_q;
    printf("b %3d s_q %d s_k %5d h_q %3d part %3d tile %2d stages %d: %8.1f us %6.2f TB/s %6.1f TFLOP/s, "
           "%4.1f %% of 4.40 TB/s\n",
           c.b, c.s_q, c.s_k, c.h_q, r.p.split.num_partitions, r.rows_of_tile, r.p.stages, us,
           bytes / us * 1e-6, flop / us * 1e-6, bytes / us * 1e-6 / 4.40 * 100);
    free_run(r);
}

enum { PLAN_KINDS = 9 };

static int32_t plan_length(int kind)
{
    switch (kind) {
    case 0: return 4096;
    case 1: return (int32_t)(draw() % 8192);
    case 2: return (int32_t)(draw() % 64);
    case 3: return draw() % 8 ? 0 : 1000000;
    case 4: return (int32_t)(draw() % 640);
    case 5: return (int32_t)(8000 + draw() % 193);
    case 6: return (int32_t)(2000 + draw() % 4001);
    case 7: return 65536;
    default: return 1024;
    }
}

struct Planned {
    bool same, in_step;
    float us; // 0: not timed
};

static Planned plan_run(int64_t b, int partitions, int kind, int tiles, bool timed)
{
    std::vector<int32_t> lengths(b + 1);
    for (int64_t i = 0; i < b; i++) lengths[i] = plan_length(kind);
    const size_t bytes = plan_bytes(b, partitions);
    std::vector<char> host(bytes), mine(bytes);
    struct plan_params p = {};
    p.costs = {tiles, tiles};
    plan_build_by_costs((struct plan_header *)host.data(), b, partitions, lengths.data(), INT32_MAX, p.costs);
    const std::vector<char> chosen = host;
    plan_build((struct plan_header *)host.data(), b, partitions, lengths.data(), INT32_MAX);
    int32_t *device_lengths;
    CHECK(cudaMalloc(&device_lengths, lengths.size() * 4));
    CHECK(cudaMalloc(&p.plan, bytes));
    CHECK(cudaMemcpy(device_lengths, lengths.data(), lengths.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(p.plan, 0xff, bytes));
    p.seqlens = device_lengths, p.b = b, p.capacity = INT32_MAX, p.num_partitions = partitions;
    p.partitions_divisor = divisor_of(partitions);
    decode_plan<<<1, PLAN_THREADS>>>(p);
    CHECK(cudaMemcpy(mine.data(), p.plan, bytes, cudaMemcpyDeviceToHost));
    Planned planned = {chosen == mine, chosen != host, 0.0f};
    if (timed)
        planned.us = graph_time(
            [&](cudaStream_t stream) { decode_plan<<<1, PLAN_THREADS, 0, stream>>>(p); }, 15);
    CHECK(cudaFree(device_lengths));
    CHECK(cudaFree(p.plan));
    return planned;
}

static int plan_case(int64_t b, int partitions, int kind, int tiles, bool timed)
{
    const Planned planned = plan_run(b, partitions, kind, tiles, timed);
    if (!planned.same || timed) {
        printf("%s plan b %lld partitions %d kind %d tiles %d%s", planned.same ? "ok    " : "FAILED",
               (long long)b, partitions, kind, tiles, planned.in_step ? " in step" : "");
        if (timed) printf(": %.1f us", planned.us);
        printf("\n");
    }
    return !planned.same;
}

__global__ void nothing() {}

static float nothing_time()
{
    return graph_time([&](cudaStream_t stream) { nothing<<<1, 32, 0, stream>>>(); }, 15);
}

// Over an empty kernel, the slowest of all kinds of lengths: without costs, and by costs where they choose either plan.
static int plan_table()
{
    static const char *const columns[] = {"no costs", "filled", "in step"};
    int failed = 0;
    float worst = 0.0f;
    const float empty = nothing_time();
    printf("us over an empty kernel (%.2f), slowest kind of lengths (its number, row tiles)\n", empty);
    for (int64_t b : {1, 16, 64, 128, 256, 512, 1024})
        for (int partitions : {132, 66, 33}) {
            float most[3] = {};
            int kinds[3] = {}, tiles_of[3] = {};
            for (int tiles = 0; tiles < 3; tiles++)
                for (int kind = 0; kind < PLAN_KINDS; kind++) {
                    const Planned planned = plan_run(b, partitions, kind, tiles, true);
                    const int column = !tiles ? 0 : 1 + planned.in_step;
                    failed += !planned.same;
                    if (planned.us > most[column])
                        most[column] = planned.us, kinds[column] = kind, tiles_of[column] = tiles;
                }
            printf("b %4lld partitions %3d", (long long)b, partitions);
            for (int i = 0; i < 3; i++) {
                if (most[i] > worst) worst = most[i];
                if (most[i] > 0.0f)
                    printf(" | %s %5.2f (%d, %d)", columns[i], most[i] - empty, kinds[i], tiles_of[i]);
                else
                    printf(" | %s      -       ", columns[i]);
            }
            printf("\n");
        }
    printf("worst %.2f; empty kernel again %.2f\n", worst - empty, nothing_time());
    return failed;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "check";
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    CHECK(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CHECK(cudaFuncSetAttribute(k16, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared - 256));
    CHECK(cudaFuncSetAttribute(k16s, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared - 256));
    CHECK(cudaFuncSetAttribute(k32, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared - 256));
    CHECK(cudaFuncSetAttribute(k64n, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared - 256));
    CHECK(cudaFuncSetAttribute(k64, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared - 256));
    CHECK(cudaMalloc(&flush_memory, flush_bytes));
    CHECK(cudaMemset(flush_memory, 0, flush_bytes));
    int failed = 0;
    if (!strcmp(what, "check")) {
        const Case cases[] = {
            {1, 1, 64, 16, 0, 0, 1, 0},     {1, 1, 64, 64, 0, 0, 1, 0},      {2, 1, 100, 16, 1, 0, 0, 0},
            {2, 1, 100, 128, 1, 0, 0, 0},   {6, 3, 140, 11, 1, 1, 0, 0},     {6, 3, 140, 11, 1, 1, 3, 16},
            {6, 3, 140, 11, 1, 1, 3, 17},   {64, 2, 4096, 16, 1, 1, 0, 17},  {64, 2, 4096, 16, 1, 1, 0, 0},
            {64, 2, 4096, 16, 1, 1, 0, 16}, {128, 1, 1024, 128, 1, 1, 0, 0}, {128, 1, 1024, 16, 1, 1, 78, 0},
            {1, 1, 65536, 16, 1, 0, 0, 0},  {3, 64, 140, 3, 1, 1, 0, 0},     {3, 64, 140, 3, 1, 1, 0, 16},
            {7, 1, 0, 16, 1, 0, 0, 0},      {3, 64, 140, 3, 1, 1, 0, 32},    {64, 2, 4096, 16, 1, 1, 0, 65},
            {3, 64, 140, 3, 1, 1, 0, 65}};
        for (const Case &c : cases) failed += check(c);
    } else if (!strcmp(what, "plan")) {
        printf("empty kernel %.1f us\n", nothing_time());
        for (int tiles = 0; tiles < 3; tiles++) // 0: without costs
            for (int kind = 0; kind < PLAN_KINDS; kind++)
                for (int64_t b : {0, 1, 2, 31, 32, 33, 128, 1000, 1024, 1025, 5000, 100000})
                    for (int partitions : {1, 2, 66, 78, 132, 1000, 65536})
                        failed += plan_case(b, partitions, kind, tiles, false);
        for (int tiles = 0; tiles < 2; tiles++) {
            for (int kind = 0; kind < 5; kind++)
                for (int64_t b : {16, 128, 1024}) failed += plan_case(b, 132, kind, tiles, true);
            for (int partitions : {1, 33, 264, 528}) failed += plan_case(128, partitions, 1, tiles, true);
            for (int64_t b : {64, 128, 1000}) failed += plan_case(b, 66, 0, tiles, true);
            failed += plan_case(100000, 132, 1, tiles, true);
        }
    } else if (!strcmp(what, "plans")) {
        failed += plan_table();
    } else if (!strcmp(what,
                       "one")) { /* one ROWS SEQ_LEN PARTITIONS TILE: a single launch, for the profiler */
        Run r;
        make(r, {128, 1, atoi(argv[3]), atoi(argv[2]), 1, 0, atoi(argv[4]), atoi(argv[5])});
        launch(r, 0);
        CHECK(cudaDeviceSynchronize());
    } else {
        const Case cases[] = {{128, 1, 8192, 16, 1, 0, 0, 0},    {128, 1, 8192, 16, 1, 0, 264, 17},
                              {128, 1, 8192, 16, 1, 0, 132, 17}, {128, 1, 8192, 32, 1, 0, 0, 0},
                              {128, 1, 8192, 32, 1, 0, 0, 64},   {128, 1, 8192, 64, 1, 0, 0, 32},
                              {128, 1, 8192, 128, 1, 0, 0, 65},  {128, 1, 8192, 64, 1, 0, 0, 0},
                              {128, 1, 8192, 128, 1, 0, 0, 0},   {128, 2, 8192, 128, 1, 0, 0, 0},
                              {128, 1, 4096, 16, 1, 0, 0, 0},    {128, 1, 4096, 128, 1, 0, 0, 0},
                              {1, 1, 8192, 16, 1, 0, 0, 0},      {1, 1, 65536, 16, 1, 0, 0, 0},
                              {4, 1, 8192, 128, 1, 0, 0, 0}};
        for (const Case &c : cases) time_case(c);
    }
    printf(failed ? "FAILED\n" : "done\n");
    return failed != 0;
}
