// Driver of the experiment: `bench check` compares with a double-precision oracle, `bench time [first [last]]` times the
// rows of the table against the figures of the other libraries. L2 is flushed by reading, calls run as a captured graph.
#include "dense_decode_pair.cuh"
#include "merge.cuh"
#include "plan.h"
#include "stream.cuh"
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        cudaError_t error_ = (call);                                                                         \
        if (error_ != cudaSuccess) {                                                                         \
            printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_));                           \
            fflush(stdout);                                                                                  \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

// ---------------------------------------------------------------- inputs
__host__ __device__ static inline uint64_t mix(uint64_t x)
{
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}
// N(0, deviation^2) clamped to +-1, or 0xffff (NaN) everywhere.
__global__ void fill_normal(__nv_bfloat16 *to, size_t n, uint64_t seed, float deviation)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint64_t h = mix(i * 0x9E3779B97F4A7C15ull + seed);
        float u = ((uint32_t)h >> 8) * (1.f / 16777216.f) + 1e-8f,
              v = ((uint32_t)(h >> 32) >> 8) * (1.f / 16777216.f);
        float x = sqrtf(-2 * __logf(u)) * __cosf(6.2831853f * v) * deviation;
        to[i] = __float2bfloat16(fminf(1.f, fmaxf(-1.f, x)));
    }
}
// Slots past a request's end in its last page become NaN.
__global__ void poison_tails(uint16_t *cache, const int *block_table, int max_pages, const int *seqlens)
{
    int length = seqlens[blockIdx.x], used = length % PAGE;
    if (used == 0) return;
    uint16_t *page =
        cache + (int64_t)block_table[blockIdx.x * (int64_t)max_pages + length / PAGE] * PAGE * D_QK;
    for (int i = used * D_QK + threadIdx.x; i < PAGE * D_QK; i += blockDim.x) page[i] = 0xffff;
}
__global__ void read_all(const uint4 *from, size_t n, uint32_t *sink)
{
    uint32_t x = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint4 v = __ldg(from + i);
        x += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (x == 0x12345) *sink = x;
}

// ---------------------------------------------------------------- one problem on the device
struct problem {
    int blocks_6; // of CTA 6, whose clocks are taken
    int b, s_q, h_q, causal, partitions, tiles, rows, max_pages, pages;
    float scale;
    std::vector<int> lengths, table;
    __nv_bfloat16 *q, *cache, *out;
    int *d_lengths, *d_table, *d_splits;
    partition *d_plan;
    float *lse, *part_out, *part_lse;
    decode_params params;
    decode_maps maps;
};

typedef CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                 const cuuint64_t *, const cuuint32_t *, const cuuint32_t *,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);

static CUtensorMap make_map(void *base, int rank, const cuuint64_t *dims, const cuuint64_t *strides,
                            const cuuint32_t *box)
{
    static encode_tiled encode;
    if (!encode) {
        void *f;
        cudaDriverEntryPointQueryResult found;
        CHECK(
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
        encode = (encode_tiled)f;
    }
    CUtensorMap map;
    cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    CUresult r = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, base, dims, strides, box, ones,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS) printf("tensor map: error %d\n", (int)r), exit(1);
    return map;
}

static problem make_problem(const std::vector<int> &lengths, int s_q, int h_q, int causal, float scale,
                            uint64_t seed, bool poison, int overhead, int partitions_wanted, int extra_pages)
{
    problem x = {};
    x.b = (int)lengths.size(), x.s_q = s_q, x.h_q = h_q, x.causal = causal, x.scale = scale,
    x.lengths = lengths;
    x.rows = s_q * h_q, x.tiles = (x.rows + TILE_ROWS - 1) / TILE_ROWS;
    x.partitions = partitions_wanted ? partitions_wanted : std::max(1, 132 / x.tiles);
    int used = 0;
    for (int l : lengths) {
        x.max_pages = std::max(x.max_pages, (l + PAGE - 1) / PAGE + 2);
        used += (l + PAGE - 1) / PAGE;
    }
    x.pages = used + 3 + extra_pages;
    std::vector<int> order(x.pages);
    for (int i = 0; i < x.pages; i++) order[i] = i;
    for (int i = x.pages - 1; i > 0; i--) std::swap(order[i], order[mix(seed + 7919 * i) % (i + 1)]);
    x.table.resize((size_t)x.b * x.max_pages);
    int next = 0;
    for (int r = 0; r < x.b; r++)
        for (int i = 0; i < x.max_pages; i++)
            x.table[(size_t)r * x.max_pages + i] =
                i < (lengths[r] + PAGE - 1) / PAGE ? order[next++] : (i & 1 ? -1 : 2147480000);
    std::vector<partition> plan(x.partitions);
    std::vector<int> splits(x.b + 1);
    if (overhead >= 0)
        plan_decode(lengths.data(), x.b, x.partitions, overhead, plan.data(), splits.data());
    else
        plan_by_costs(lengths.data(), x.b, x.partitions, x.tiles, plan.data(), splits.data());
    if (6 / x.tiles < x.partitions) {
        const partition &c = plan[6 / x.tiles];
        for (int r = c.begin_request; r <= c.end_request; r++)
            x.blocks_6 += (r == c.end_request ? c.end_block : plan_blocks(lengths[r])) -
                          (r == c.begin_request ? c.begin_block : 0);
    }
    size_t n_q = (size_t)x.b * x.rows * D_QK, n_cache = (size_t)x.pages * PAGE * D_QK,
           n_out = (size_t)x.b * x.rows * D_V;
    CHECK(cudaMalloc(&x.q, n_q * 2));
    CHECK(cudaMalloc(&x.cache, n_cache * 2));
    CHECK(cudaMalloc(&x.out, n_out * 2));
    CHECK(cudaMalloc(&x.lse, (size_t)x.b * x.rows * 4));
    int parts = x.b + x.partitions; // of any plan
    CHECK(cudaMalloc(&x.part_out, (size_t)parts * x.rows * D_V * 4));
    CHECK(cudaMalloc(&x.part_lse, (size_t)parts * x.rows * 4));
    CHECK(cudaMalloc(&x.d_lengths, x.b * 4));
    CHECK(cudaMalloc(&x.d_table, x.table.size() * 4));
    CHECK(cudaMalloc(&x.d_splits, (x.b + 1) * 4));
    CHECK(cudaMalloc(&x.d_plan, x.partitions * sizeof(partition)));
    CHECK(cudaMemcpy(x.d_lengths, lengths.data(), x.b * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(x.d_table, x.table.data(), x.table.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(x.d_splits, splits.data(), (x.b + 1) * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(x.d_plan, plan.data(), x.partitions * sizeof(partition), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(x.out, 0xff, n_out * 2));
    CHECK(cudaMemset(x.lse, 0x55, (size_t)x.b * x.rows * 4));
    CHECK(cudaMemset(x.part_out, 0xff, (size_t)parts * x.rows * D_V * 4));
    CHECK(cudaMemset(x.part_lse, 0xff, (size_t)parts * x.rows * 4));
    fill_normal<<<1056, 256>>>(x.q, n_q, seed, 0.1f);
    fill_normal<<<1056, 256>>>(x.cache, n_cache, seed ^ 0xabcdef, 0.1f);
    if (poison) poison_tails<<<x.b, 256>>>((uint16_t *)x.cache, x.d_table, x.max_pages, x.d_lengths);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());

    cuuint64_t k_dims[3] = {64, (cuuint64_t)x.pages * PAGE, 9}, k_strides[2] = {D_QK * 2, 128};
    cuuint64_t q_dims[4] = {64, (cuuint64_t)x.rows, 9, (cuuint64_t)x.b},
               q_strides[3] = {D_QK * 2, 128, (cuuint64_t)x.rows * D_QK * 2};
    cuuint32_t pair[4] = {64, 64, 2, 1}, one[4] = {64, 64, 1, 1};
    x.maps.k_pair = make_map(x.cache, 3, k_dims, k_strides, pair);
    x.maps.k_rope = make_map(x.cache, 3, k_dims, k_strides, one);
    x.maps.q_pair = make_map(x.q, 4, q_dims, q_strides, pair);
    x.maps.q_rope = make_map(x.q, 4, q_dims, q_strides, one);
    decode_params &p = x.params;
    p.plan = x.d_plan, p.num_splits = x.d_splits, p.seqlens = x.d_lengths, p.block_table = x.d_table;
    p.q = x.q, p.max_pages = x.max_pages, p.rows = x.rows, p.tiles = x.tiles, p.h_q = h_q, p.s_q = s_q,
    p.causal = causal;
    p.scale_log2 = scale * 1.4426950408889634f;
#if defined(LAB_TRACE) || defined(LAB_CLOCK)
    CHECK(cudaMalloc(&p.trace, 4 * 64 * 8 * 4));
#endif
    p.out = x.out, p.lse = x.lse, p.part_out = x.part_out, p.part_lse = x.part_lse;
    return x;
}

static void free_problem(problem &x)
{
    void *all[] = {x.q,        x.cache,     x.out,     x.lse,      x.part_out,
                   x.part_lse, x.d_lengths, x.d_table, x.d_splits, x.d_plan};
    for (void *p : all) CHECK(cudaFree(p));
}

static int schedule; // 0: dense_decode.cuh, 1: dense_decode_pair.cuh

// CTAs of a cluster that share keys: the pair schedule's, where the tiles come in such groups.
static int cluster_size(const problem &x)
{
    return schedule && x.tiles % LAB_CLUSTER == 0 ? LAB_CLUSTER : 1;
}

static void launch(const problem &x, cudaStream_t stream)
{
    auto kernel = schedule ? pair_schedule::dense_decode_pair_kernel<1> : dense_decode_kernel;
    if (cluster_size(x) > 1) kernel = pair_schedule::dense_decode_pair_kernel<LAB_CLUSTER>;
    int bytes = schedule ? (int)pair_schedule::SMEM_BYTES : (int)SMEM_BYTES;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(x.partitions * x.tiles);
    config.blockDim = dim3(schedule ? (int)pair_schedule::THREADS : (int)THREADS);
    config.dynamicSmemBytes = bytes, config.stream = stream;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = cluster_size(x), cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.attrs = &cluster, config.numAttrs = cluster_size(x) > 1;
    CHECK(cudaLaunchKernelEx(&config, kernel, x.params, x.maps));
    if (getenv("LAB_NO_MERGE")) return; // to price the merge; results are then incomplete
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(x.partitions, std::min(x.rows, std::max(1, 2112 / x.partitions)));
    config.blockDim = dim3(MERGE_THREADS), config.dynamicSmemBytes = 0, config.attrs = &attribute,
    config.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&config, merge_kernel, x.params));
}

// ---------------------------------------------------------------- oracle
static float from_bf16(uint16_t v)
{
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// Compares rows of the given requests (all rows, or every `row_step`-th and the last); returns the number of failures.
static int verify(const problem &x, const std::vector<int> &requests, int row_step, double *worst_cosine)
{
    std::vector<uint16_t> out((size_t)x.b * x.rows * D_V);
    std::vector<float> lse((size_t)x.b * x.rows);
    CHECK(cudaMemcpy(out.data(), x.out, out.size() * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(lse.data(), x.lse, lse.size() * 4, cudaMemcpyDeviceToHost));
    int bad = 0;
    double ab = 0, aabb = 0;
    for (int r : requests) {
        int length = x.lengths[r];
        std::vector<uint16_t> k((size_t)(length + PAGE) * D_QK), q((size_t)x.rows * D_QK);
        for (int i = 0; i * PAGE < length; i++)
            CHECK(cudaMemcpyAsync(&k[(size_t)i * PAGE * D_QK],
                                  x.cache + (size_t)x.table[(size_t)r * x.max_pages + i] * PAGE * D_QK,
                                  PAGE * D_QK * 2, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(q.data(), x.q + (size_t)r * x.rows * D_QK, q.size() * 2, cudaMemcpyDeviceToHost));
        std::vector<int> rows;
        for (int i = 0; i < x.rows; i++)
            if (i % row_step == 0 || i == x.rows - 1) rows.push_back(i);
        std::vector<int> row_bad(rows.size());
        std::vector<double> row_ab(rows.size()), row_aabb(rows.size());
        std::vector<std::thread> threads;
        unsigned workers = std::max(1u, std::thread::hardware_concurrency());
        for (unsigned w = 0; w < workers; w++)
            threads.emplace_back([&, w] {
                std::vector<double> p(length + 1), o(D_V);
                for (size_t n = w; n < rows.size(); n += workers) {
                    int row = rows[n], query = row / x.h_q,
                        seen = x.causal ? length - x.s_q + query + 1 : length;
                    seen = std::max(0, std::min(seen, length));
                    double most = -INFINITY, sum = 0;
                    for (int t = 0; t < seen; t++) {
                        double dot = 0;
                        for (int c = 0; c < D_QK; c++)
                            dot += (double)from_bf16(q[(size_t)row * D_QK + c]) *
                                   from_bf16(k[(size_t)t * D_QK + c]);
                        p[t] = dot * x.scale;
                        most = std::max(most, p[t]);
                    }
                    std::fill(o.begin(), o.end(), 0.0);
                    for (int t = 0; t < seen; t++) {
                        double w2 = exp(p[t] - most);
                        sum += w2;
                        for (int c = 0; c < D_V; c++) o[c] += w2 * from_bf16(k[(size_t)t * D_QK + c]);
                    }
                    double want_lse = seen ? most + log(sum) : INFINITY;
                    float got_lse = lse[((size_t)r * x.h_q + row % x.h_q) * x.s_q + query];
                    if (std::isinf(want_lse) ? got_lse != INFINITY
                                             : !(fabs(got_lse - want_lse) < 1e-6 ||
                                                 fabs(got_lse - want_lse) < 8.01 / 65536 * fabs(want_lse)))
                        row_bad[n]++;
                    for (int c = 0; c < D_V; c++) {
                        double want = seen ? o[c] / sum : 0,
                               got = from_bf16(out[((size_t)r * x.rows + row) * D_V + c]);
                        if (!(fabs(got - want) < 8e-4 || fabs(got - want) < 2.01 / 128 * fabs(want)))
                            row_bad[n]++;
                        row_ab[n] += 2 * got * want, row_aabb[n] += got * got + want * want;
                    }
                }
            });
        for (auto &t : threads) t.join();
        for (size_t n = 0; n < rows.size(); n++) {
            if (row_bad[n] && bad < 4)
                printf("    request %d (length %d) row %d: %d bad\n", r, length, rows[n], row_bad[n]);
            bad += row_bad[n] != 0;
            ab += row_ab[n], aabb += row_aabb[n];
        }
    }
    *worst_cosine = aabb > 1e-12 ? 1 - ab / aabb : 0;
    if (!(*worst_cosine < 5e-6)) bad++;
    return bad;
}

static int plan_overhead() // LAB_PLAN: an overhead in blocks, -1 for the plan by costs
{
    return getenv("LAB_PLAN") ? atoi(getenv("LAB_PLAN")) : 5;
}

static int check_one(const char *name, const std::vector<int> &lengths, int s_q, int h_q, int causal,
                     float scale, int partitions)
{
    problem x = make_problem(lengths, s_q, h_q, causal, scale, 12345 + lengths.size() * 7 + s_q, true, plan_overhead(),
                             partitions, 0);
    launch(x, 0);
    CHECK(cudaDeviceSynchronize());
    std::vector<int> all(lengths.size());
    for (size_t i = 0; i < all.size(); i++) all[i] = (int)i;
    double cosine;
    int bad = verify(x, all, x.rows > 32 ? 7 : 1, &cosine);
    size_t n = (size_t)x.b * x.rows * D_V;
    std::vector<uint16_t> a(n), c(n);
    CHECK(cudaMemcpy(a.data(), x.out, n * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemset(x.out, 0xff, n * 2));
    launch(x, 0);
    CHECK(cudaMemcpy(c.data(), x.out, n * 2, cudaMemcpyDeviceToHost));
    bool same = a == c;
    printf("%-34s s_q %d h_q %3d causal %d parts %3d clusters of %d: %s, cosine %.1e, same bits %s\n", name, s_q, h_q,
           causal, x.partitions, cluster_size(x), bad ? "FAIL" : "ok", cosine, same ? "yes" : "NO");
    fflush(stdout);
    free_problem(x);
    return bad + !same;
}

// Where two runs differ: lse too means the scores differ, out alone means P V.
static int stress(int rounds, int poison, int s_q, int partitions)
{
    std::vector<int> lengths;
    for (int i = 0; i < 40; i++) lengths.push_back((int)(mix(i + 99) % 1500));
    problem x = make_problem(lengths, s_q, 128, 1, 3, 777, poison, plan_overhead(), partitions, 0);
    size_t n = (size_t)x.b * x.rows, differing = 0;
    std::vector<uint16_t> a(n * D_V), c(n * D_V);
    std::vector<float> l(n), m(n);
    int printed = 0;
    for (int i = 0; i < rounds; i++) {
        launch(x, 0);
        CHECK(cudaMemcpy(i ? c.data() : a.data(), x.out, n * D_V * 2, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(i ? m.data() : l.data(), x.lse, n * 4, cudaMemcpyDeviceToHost));
        if (!i) continue;
        for (int r = 0; r < x.b; r++)
            for (int row = 0; row < x.rows; row++) {
                int lo = -1, hi = -1, count = 0;
                size_t base = ((size_t)r * x.rows + row) * D_V;
                for (int k = 0; k < D_V; k++)
                    if (a[base + k] != c[base + k]) lo = lo < 0 ? k : lo, hi = k, count++;
                bool lse_differs = l[((size_t)r * x.h_q + row % x.h_q) * x.s_q + row / x.h_q] !=
                                   m[((size_t)r * x.h_q + row % x.h_q) * x.s_q + row / x.h_q];
                if (count || lse_differs) {
                    differing++;
                    if (printed++ < 12)
                        printf("  round %d request %d (length %d) row %d: %d columns %d..%d, lse %s\n", i, r,
                               lengths[r], row, count, lo, hi, lse_differs ? "differs" : "same");
                }
            }
    }
    printf("stress: %zu differing rows in %d rounds (%d rows, clusters of %d, poison %d)\n", differing, rounds, x.rows,
           cluster_size(x), poison);
    fflush(stdout);
    free_problem(x);
    return differing != 0;
}

static int check()
{
    int bad = 0;
    float scale = 1 / sqrtf(576);
    std::vector<int> edges = {0, 1, 63, 64, 65, 127, 128, 129, 500, 0, 1000, 2}, one = {1}, longer = {3000},
                     even(8, 640), none = {0, 0};
    std::vector<int> mixed;
    for (int i = 0; i < 40; i++) mixed.push_back((int)(mix(i + 99) % 1500));
    bad += check_one("edges", edges, 1, 16, 0, scale, 0);
    bad += check_one("edges, 3 partitions", edges, 1, 16, 0, scale, 3);
    bad += check_one("edges, 1 partition", edges, 2, 16, 1, scale, 1);
    bad += check_one("edges", edges, 2, 128, 1, scale, 0);
    bad += check_one("edges, 5 partitions", edges, 1, 128, 1, scale, 5);
    bad += check_one("edges, steep", edges, 2, 64, 1, 20, 4);
    bad += check_one("one key", one, 1, 1, 0, scale, 0);
    bad += check_one("one request", longer, 1, 1, 0, scale, 0);
    bad += check_one("one request, steep", longer, 3, 7, 1, 40, 0);
    bad += check_one("even", even, 2, 32, 1, scale, 0);
    bad += check_one("none", none, 1, 16, 1, scale, 0);
    bad += check_one("mixed", mixed, 1, 16, 1, scale, 0);
    bad += check_one("mixed, 13 partitions", mixed, 1, 64, 1, scale, 13);
    bad += check_one("mixed, steep, 13 partitions", mixed, 2, 40, 1, 30, 13);
    bad += check_one("mixed, negative steep rows", mixed, 2, 128, 1, 3, 0);
    bad += check_one("edges, 66 partitions", edges, 1, 128, 1, scale, 66);
    bad += check_one("none, two tiles", none, 1, 128, 1, scale, 0);
    bad += check_one("mixed, three tiles", mixed, 3, 64, 1, 3, 0);
    printf("check: %s\n", bad ? "FAILED" : "all ok");
    return bad != 0;
}

// ---------------------------------------------------------------- timing
struct row {
    int b, s_q, s_k, h_q;
    double flashmla, fa3; // microseconds on an H200, 0 = not measured
};
static const row table[] = {
    {128, 1, 4096, 16, 153.2, 168.7},  {128, 1, 4096, 64, 156.3, 173.3}, {128, 1, 8192, 16, 287.5, 318.7},
    {128, 1, 8192, 64, 295.7, 325.5},  {16, 1, 65536, 16, 289.2, 283.5}, {64, 1, 32768, 16, 564.7, 0},
    {32, 1, 65536, 64, 559.4, 556.1},  {128, 2, 8192, 32, 326.9, 328.6}, {128, 1, 4096, 128, 234.8, 247.3},
    {128, 1, 8192, 128, 445.1, 461.8}, {128, 2, 8192, 64, 447.0, 464.7}, {16, 1, 65536, 128, 428.5, 446.1},
    {32, 1, 65536, 128, 837.9, 881.6}, {128, 1, 32768, 128, 1677.0, 0},  {128, 2, 4096, 128, 431.0, 467.4},
    {128, 2, 8192, 128, 813.9, 884.0}, {128, 2, 32768, 128, 3390.8, 0},  {1, 1, 8192, 16, 32.3, 22.3},
    {1, 1, 65536, 16, 65.6, 41.1},     {4, 1, 8192, 64, 37.8, 34.3},     {16, 1, 8192, 16, 56.2, 50.9},
    {16, 1, 8192, 128, 76.7, 75.8},    {32, 1, 8192, 64, 93.5, 91.6},    {32, 1, 8192, 128, 129.1, 136.1},
};

static uint4 *flush_memory;
static uint32_t *flush_sink;
static const size_t FLUSH_BYTES = (size_t)640 << 20;

template <class F> static double time_graph(cudaStream_t stream, int runs, F call)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    call();
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < runs + 3; i++) {
        read_all<<<1056, 512, 0, stream>>>(flush_memory, FLUSH_BYTES / 16, flush_sink);
        CHECK(cudaEventRecord(begin, stream));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3) times.push_back(ms * 1000);
    }
    CHECK(cudaGetLastError());
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

static int run_times(int first, int last, int overhead, bool stream_too)
{
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMalloc(&flush_memory, FLUSH_BYTES));
    CHECK(cudaMalloc(&flush_sink, 4));
    CHECK(cudaMemset(flush_memory, 1, FLUSH_BYTES));
    CHECK(cudaFuncSetAttribute(stream_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, STREAM_SMEM));
    printf(
        "  b s_q   s_k h_q |     us  TB/s TFLOP/s | bare stream us | FlashMLA    FA3 | best/ours | check\n");
    int bad_rows = 0;
    for (int i = first; i <= last && i < (int)(sizeof table / sizeof table[0]); i++) {
        const row &t = table[i];
        int rows = t.s_q * t.h_q,
            extra = (int)((size_t)t.b * rows * (D_QK + D_V) * 2 / (PAGE * D_QK * 2)) + 1;
        problem x = make_problem(std::vector<int>(t.b, t.s_k), t.s_q, t.h_q, 1, 1 / sqrtf(576), 1000 + i,
                                 false, overhead, 0, extra);
        launch(x, stream);
        CHECK(cudaStreamSynchronize(stream));
        double cosine;
        int bad = verify(x, {0, t.b / 2, t.b - 1}, std::max(1, rows / 4), &cosine);
        bad_rows += bad != 0;
        double us = time_graph(stream, 15, [&] { launch(x, stream); });
        double keys = (double)t.b * t.s_k, bytes = keys * D_QK * 2 + (double)t.b * rows * (D_QK + D_V) * 2;
        double flop = 2.0 * keys * rows * (D_QK + D_V), bare = 0;
        if (stream_too && rows <= 64) {
            std::vector<int> pages;
            for (int r = 0; r < t.b; r++)
                for (int n = 0; n * PAGE < t.s_k; n++) pages.push_back(x.table[(size_t)r * x.max_pages + n]);
            for (int n = 0; n < extra && n < x.pages; n++) pages.push_back(n * 7 % x.pages);
            int *d_pages;
            CHECK(cudaMalloc(&d_pages, pages.size() * 4));
            CHECK(cudaMemcpy(d_pages, pages.data(), pages.size() * 4, cudaMemcpyHostToDevice));
            bare = time_graph(stream, 15, [&] {
                stream_kernel<<<132, 32, STREAM_SMEM, stream>>>((uint8_t *)x.cache, d_pages,
                                                                (int)pages.size());
            });
            if (getenv("LAB_BOXES")) {
                CHECK(cudaFuncSetAttribute(stream_boxes_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           221184));
                cuuint64_t dims[3] = {64, (cuuint64_t)x.pages * PAGE, 9}, strides[2] = {D_QK * 2, 128};
                struct {
                    int box_rows, groups, slot, slots;
                } shapes[] = {{64, 2, 16384, 12},
                              {64, 9, 73728, 3},
                              {8, 9, 9216, 24},
                              {16, 9, 18432, 12},
                              {32, 9, 36864, 6}};
                for (auto &v : shapes) {
                    cuuint32_t box[3] = {64, (cuuint32_t)v.box_rows, (cuuint32_t)v.groups};
                    CUtensorMap map = make_map(x.cache, 3, dims, strides, box);
                    double t2 = time_graph(stream, 15, [&] {
                        stream_boxes_kernel<<<132, 32, v.slot * v.slots, stream>>>(
                            map, x.maps.k_rope, v.box_rows, v.groups, v.slot, v.slots, d_pages,
                            (int)pages.size());
                    });
                    printf("    boxes {64, %d, %d}, %d slots: %.1f us\n", v.box_rows, v.groups, v.slots, t2);
                }
            }
            CHECK(cudaFree(d_pages));
        }
#ifdef LAB_TRACE
        std::vector<uint32_t> trace(4 * 64 * 8);
        CHECK(cudaMemcpy(trace.data(), x.params.trace, trace.size() * 4, cudaMemcpyDeviceToHost));
        uint32_t zero = trace[(1 * 64 + 24) * 8];
        auto at = [&](int role, int n, int e) { return (int)(trace[(role * 64 + n) * 8 + e] - zero); };
        printf("one CTA: %u clk in %u ns, %.3f GHz\n", trace[2046], trace[2047],
               (double)trace[2046] / trace[2047]);
        printf("block: producer begin, V issued, rope issued | scores begin, V seen, all seen, QK done, max "
               "done, P free, P out | left begin, issued, first, done | right\n");
        for (int n = 24; n < 32; n++)
            printf("%2d: %6d %6d %6d | %6d %6d %6d %6d %6d %6d %6d | %6d %6d %6d %6d | %6d %6d %6d %6d\n", n,
                   at(0, n, 0), at(0, n, 1), at(0, n, 2), at(1, n, 0), at(1, n, 5), at(1, n, 1), at(1, n, 2),
                   at(1, n, 6), at(1, n, 3), at(1, n, 4), at(2, n, 0), at(2, n, 1), at(2, n, 2), at(2, n, 3),
                   at(3, n, 0), at(3, n, 1), at(3, n, 2), at(3, n, 3));
#endif
        double best = t.fa3 > 0 ? std::min(t.flashmla, t.fa3) : t.flashmla;
        printf("%3d  %d  %6d %3d | %6.1f %5.2f   %5.1f | %14.1f | %8.1f %6.1f | %9.3f | %s\n", t.b, t.s_q,
               t.s_k, t.h_q, us, bytes / us / 1e6, flop / us / 1e6, bare, t.flashmla, t.fa3, best / us,
               bad ? "FAIL" : "ok");
        fflush(stdout);
        free_problem(x);
    }
    return bad_rows != 0;
}

// Both schedules in one run, several plan overheads: medians of 15, alternating.
#ifdef LAB_TRACE
static void print_pair_trace(const problem &x)
{
    std::vector<uint32_t> trace(4 * 64 * 8);
    CHECK(cudaMemcpy(trace.data(), x.params.trace, trace.size() * 4, cudaMemcpyDeviceToHost));
    uint32_t zero = trace[20 * 8];
    printf("block: begin, home Q K issued, P seen, home Q K done, away P V done, Q K done, P out, home P V "
           "done\n");
    for (int n = 40; n < 52; n++) {
        printf("%2d:", n);
        for (int e = 0; e < 8; e++) printf(" %6d", (int)(trace[((n & 1) * 64 + n / 2) * 8 + e] - zero));
        printf("\n");
    }
}
#endif
static int compare(int argc, char **argv)
{
    static const int rows[] = {8, 9, 13, 14, 15, 16, 12, 11};
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMalloc(&flush_memory, FLUSH_BYTES));
    CHECK(cudaMalloc(&flush_sink, 4));
    CHECK(cudaMemset(flush_memory, 1, FLUSH_BYTES));
    int count = argc > 2 ? atoi(argv[2]) : 6, first = argc > 3 ? atoi(argv[3]) : 0, bad_rows = 0;
    std::vector<int> overheads;
    double rest = getenv("LAB_REST") ? atof(getenv("LAB_REST")) : 10; // microseconds of pause a key
    for (int i = 4; i < argc; i++) overheads.push_back(atoi(argv[i]));
    if (overheads.empty()) overheads = {5, 12, 30};
    printf("  b s_q   s_k h_q |    peer |");
    for (int o : overheads) printf("  us of first, pair at %2d TFLOP/s |", o);
    printf("\n");
    for (int n = 0; n < count; n++) {
        const row &t = table[rows[n]];
        double best = t.fa3 > 0 ? std::min(t.flashmla, t.fa3) : t.flashmla,
               flop = 2.0 * t.b * t.s_k * t.s_q * t.h_q * (D_QK + D_V);
        printf("%3d  %d  %6d %3d | %7.1f |", t.b, t.s_q, t.s_k, t.h_q, best);
        for (int o : overheads) {
            problem x = make_problem(std::vector<int>(t.b, t.s_k), t.s_q, t.h_q, 1, 1 / sqrtf(576), 1000 + n,
                                     false, o, 0, 1);
            double us[2] = {1e9, 1e9}, clocks[2] = {}, ghz[2] = {};
            bool failed = false;
            for (int i = first; i < 2; i++) {
                schedule = i;
                launch(x, stream);
                CHECK(cudaStreamSynchronize(stream));
                double cosine;
                failed |= o == overheads[0] && verify(x, {0, t.b - 1}, t.s_q * t.h_q / 2, &cosine);
            }
            for (int round = 0; round < 2; round++)
                for (int i = first; i < 2; i++) {
                    schedule = i;
                    usleep(t.s_k * rest); // a cool start for each, lest the second pay for the first
                    us[i] = std::min(us[i], time_graph(stream, 15, [&] { launch(x, stream); }));
#ifdef LAB_CLOCK
                    uint32_t c[2];
                    CHECK(cudaMemcpy(c, x.params.trace + 2046, 8, cudaMemcpyDeviceToHost));
                    clocks[i] = (double)c[0] / x.blocks_6, ghz[i] = (double)c[0] / c[1];
#endif
                }
#ifdef LAB_TRACE
            print_pair_trace(x);
#endif
            bad_rows += failed;
            printf(" %7.1f %7.1f  %4.0f %4.0f %s |", us[0], us[1], flop / us[0] / 1e6, flop / us[1] / 1e6,
                   failed ? "FAIL" : "ok");
#ifdef LAB_CLOCK
            printf(" %4.0f %4.0f clk a block at %.2f %.2f GHz |", clocks[0], clocks[1], ghz[0], ghz[1]);
#endif
            fflush(stdout);
            free_problem(x);
        }
        printf("\n");
    }
    return bad_rows != 0;
}

// Many plans of one problem in turns: medians of 15, the better of two rounds, and what the plan looks like.
// `bench sweep|fit [cPIECE,PART]... [B,S_Q,S_K,H_Q[v|w]]...`; fit times the cut plans without the merge kernel as well.
struct candidate {
    std::string name;
    std::vector<partition> plan;
    std::vector<int> splits;
};
static void add_candidate(std::vector<candidate> &all, candidate c)
{
    for (candidate &o : all)
        if (!memcmp(o.plan.data(), c.plan.data(), c.plan.size() * sizeof(partition))) {
            o.name += "=" + c.name;
            return;
        }
    all.push_back(c);
}
static int sweep(int argc, char **argv)
{
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMalloc(&flush_memory, FLUSH_BYTES));
    CHECK(cudaMalloc(&flush_sink, 4));
    CHECK(cudaMemset(flush_memory, 1, FLUSH_BYTES));
    double rest = getenv("LAB_REST") ? atof(getenv("LAB_REST")) : 5;
    bool fit = !strcmp(argv[1], "fit");
    int bad_rows = 0;
    schedule = 1;
    // Problems as b,s_q,s_k,h_q; costs as piece,part in blocks with a c before them.
    std::vector<plan_costs> costs;
    for (int i = 2; i < argc; i++) {
        plan_costs c = {};
        if (argv[i][0] == 'c' && sscanf(argv[i] + 1, "%d,%d", &c.piece, &c.part) == 2)
            c.piece *= PLAN_UNIT, c.part *= PLAN_UNIT, costs.push_back(c);
    }
    for (int i = 2; i < argc; i++) {
        int b, s_q, s_k, h_q;
        if (sscanf(argv[i], "%d,%d,%d,%d", &b, &s_q, &s_k, &h_q) != 4) continue;
        std::vector<int> lengths(b, s_k);
        if (strchr(argv[i], 'v')) // varying lengths, half to one and a half times s_k
            for (int r = 0; r < b; r++) lengths[r] = (int)(s_k * (0.5 + (mix(r + 4242) >> 11) * 0x1p-53));
        if (strchr(argv[i], 'w')) // neighbours of unlike lengths whose sum is 2 s_k: whole requests out of step
            for (int r = 0; r + 1 < b; r += 2) {
                lengths[r] = (4 + (int)(mix(r + 77) % (2 * s_k / PAGE - 8))) * PAGE;
                lengths[r + 1] = 2 * s_k - lengths[r];
            }
        problem x = make_problem(lengths, s_q, h_q, 1, 1 / sqrtf(576), 1000 + i, false, 5, 0, 1);
        int n = x.partitions, aligned = n == 132 ? 128 : n == 66 ? 64 : n == 33 ? 32 : n;
        std::vector<candidate> all;
        auto make = [&](std::string name, auto fill) {
            candidate c = {name, std::vector<partition>(n), std::vector<int>(b + 1)};
            if (fill(c)) add_candidate(all, c);
        };
        auto by_costs = [&](plan_costs c, int use, int cut) {
            return [=, &lengths](candidate &to) {
                for (int k = use; k < n; k++) to.plan[k] = {b, b - 1, 0, 0, 0, 0, 0, 0};
                int64_t capacity = plan_capacity(lengths.data(), b, use, &c, cut);
                return plan_fill(lengths.data(), b, use, &c, capacity, cut, to.plan.data(), to.splits.data()) != 0;
            };
        };
        const char *only = getenv("LAB_ONLY"); // overheads 5 and 12, aligned and the rule alone
        if (only) {
            for (int o : {5, 12})
                make("O" + std::to_string(o), [&](candidate &c) {
                    plan_decode(lengths.data(), b, n, o, c.plan.data(), c.splits.data());
                    return true;
                });
            make("aligned", by_costs({12 * PLAN_UNIT, 0}, aligned, 1));
        }
        if (!fit && !only) {
            make("whole", by_costs({32, 0}, n, 0));
            for (int o : {5, 12, 30})
                make("O" + std::to_string(o), [&](candidate &c) {
                    plan_decode(lengths.data(), b, n, o, c.plan.data(), c.splits.data());
                    return true;
                });
            make("aligned", by_costs({12 * PLAN_UNIT, 0}, aligned, 1));
        }
        if (!fit)
            make("rule", [&](candidate &c) {
                plan_by_costs(lengths.data(), b, n, x.tiles, c.plan.data(), c.splits.data());
                return true;
            });
        for (const plan_costs &c : costs)
            make(std::to_string(c.piece / PLAN_UNIT) + "," + std::to_string(c.part / PLAN_UNIT), by_costs(c, n, 1));
        double keys = 0;
        for (int l : lengths) keys += l;
        double flop = 2.0 * keys * s_q * h_q * (D_QK + D_V);
        std::vector<double> us(all.size(), 1e9), bare(all.size(), 1e9), ghz(all.size()), cta(all.size());
        std::vector<uint16_t> first, out((size_t)b * x.rows * D_V);
        std::vector<int> bad(all.size());
        for (int round = 0; round < 2; round++)
            for (size_t k = 0; k < all.size(); k++) {
                CHECK(cudaMemcpy(x.d_plan, all[k].plan.data(), n * sizeof(partition), cudaMemcpyHostToDevice));
                CHECK(cudaMemcpy(x.d_splits, all[k].splits.data(), (b + 1) * 4, cudaMemcpyHostToDevice));
                if (!round) {
                    CHECK(cudaMemset(x.out, 0xff, out.size() * 2));
                    launch(x, stream);
                    CHECK(cudaStreamSynchronize(stream));
                    double cosine;
                    if (!k) bad[k] = verify(x, {0, b - 1}, x.rows / 2, &cosine);
                    CHECK(cudaMemcpy(out.data(), x.out, out.size() * 2, cudaMemcpyDeviceToHost));
                    if (!k) first = out;
                    for (size_t j = 0; j < out.size() && !bad[k]; j += 3) {
                        float u = from_bf16(first[j]), v = from_bf16(out[j]);
                        if (!(fabsf(u - v) <= 1e-3f + fabsf(u) / 64)) bad[k] = 1;
                    }
                    bad_rows += bad[k] != 0;
                }
                usleep(s_k * rest);
                us[k] = std::min(us[k], time_graph(stream, 15, [&] { launch(x, stream); }));
#ifdef LAB_CLOCK
                uint32_t c[2];
                CHECK(cudaMemcpy(c, x.params.trace + 2046, 8, cudaMemcpyDeviceToHost));
                ghz[k] = (double)c[0] / c[1], cta[k] = c[1] / 1000.;
#endif
                if (fit) {
                    setenv("LAB_NO_MERGE", "1", 1);
                    bare[k] = std::min(bare[k], time_graph(stream, 15, [&] { launch(x, stream); }));
                    unsetenv("LAB_NO_MERGE");
                }
            }
        if (!fit)
            printf("%d/%d/%d/%d%s: blocks of the longest partition, pieces, parts, partitions used | us TFLOP/s GHz\n", b,
                   s_q, s_k, h_q, strchr(argv[i], 'v') ? "v" : strchr(argv[i], 'w') ? "w" : "");
        for (size_t k = 0; k < all.size(); k++) {
            int most = 0, pieces = 0, parts = 0, used = 0;
            for (const partition &c : all[k].plan) {
                int sum = 0, count = 0;
                for (int r = c.begin_request; r <= c.end_request; r++)
                    sum += (r == c.end_request ? c.end_block : plan_blocks(lengths[r])) -
                           (r == c.begin_request ? c.begin_block : 0),
                        count++;
                used += count > 0;
                if (sum > most) most = sum;
                if (count > pieces) pieces = count;
            }
            for (int r = 0; r < b; r++) {
                int m = all[k].splits[r + 1] - all[k].splits[r];
                parts += m > 1 ? m : 0;
            }
            if (fit)
                printf("%4d/%d/%6d/%3d %4d bl %2d pc %4d parts %3d used | %7.1f  without merge kernel %7.1f | %.2f GHz, CTA 6 %6.1f%s\n", b,
                       s_q, s_k, h_q, most, pieces, parts, used, us[k], bare[k], ghz[k], cta[k], bad[k] ? " FAIL" : "");
            else
                printf("  %-34s %5d bl %2d pc %4d parts %3d used | %7.1f %5.0f %.2f GHz, CTA 6 %6.1f%s\n", all[k].name.c_str(), most, pieces, parts,
                       used, us[k], flop / us[k] / 1e6, ghz[k], cta[k], bad[k] ? " FAIL" : "");
        }
        fflush(stdout);
        free_problem(x);
    }
    return bad_rows != 0;
}

// `bench rows [B,S_Q,S_K,H_Q]...`: the pair schedule under LAB_PLAN's plan, a line a row; for variants in turns.
static int time_rows(int argc, char **argv)
{
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMalloc(&flush_memory, FLUSH_BYTES));
    CHECK(cudaMalloc(&flush_sink, 4));
    CHECK(cudaMemset(flush_memory, 1, FLUSH_BYTES));
    double rest = getenv("LAB_REST") ? atof(getenv("LAB_REST")) : 5; // microseconds of pause a key
    int bad_rows = 0;
    schedule = 1;
    for (int i = 2; i < argc; i++) {
        int b, s_q, s_k, h_q;
        if (sscanf(argv[i], "%d,%d,%d,%d", &b, &s_q, &s_k, &h_q) != 4) continue;
        problem x = make_problem(std::vector<int>(b, s_k), s_q, h_q, 1, 1 / sqrtf(576), 1000, false, plan_overhead(),
                                 0, 1);
        launch(x, stream);
        CHECK(cudaStreamSynchronize(stream));
        double cosine, clocks = 0, ghz = 0, flop = 2.0 * b * s_k * x.rows * (D_QK + D_V);
        int bad = verify(x, {0, b - 1}, std::max(1, x.rows / 2), &cosine);
        bad_rows += bad != 0;
        usleep(s_k * rest);
        double us = time_graph(stream, 15, [&] { launch(x, stream); });
#ifdef LAB_CLOCK
        uint32_t c[2];
        CHECK(cudaMemcpy(c, x.params.trace + 2046, 8, cudaMemcpyDeviceToHost));
        clocks = (double)c[0] / std::max(1, x.blocks_6), ghz = (double)c[0] / c[1];
#endif
        printf("%s %.1f %.0f %.0f %.3f %s\n", argv[i], us, flop / us / 1e6, clocks, ghz, bad ? "FAIL" : "ok");
        fflush(stdout);
        free_problem(x);
    }
    return bad_rows != 0;
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "check";
    if (getenv("LAB_PAIR")) schedule = atoi(getenv("LAB_PAIR"));
    if (!strcmp(mode, "compare")) return compare(argc, argv);
    if (!strcmp(mode, "sweep") || !strcmp(mode, "fit")) return sweep(argc, argv);
    if (!strcmp(mode, "check")) return check();
    if (!strcmp(mode, "rows")) return time_rows(argc, argv);
    // Tiles in one and in two pairs; few partitions, and a full grid.
    if (!strcmp(mode, "stress"))
        return stress(40, 1, 2, 13) | stress(40, 0, 2, 13) | stress(40, 1, 1, 0) | stress(40, 0, 1, 0);
    int first = argc > 2 ? atoi(argv[2]) : 0, last = argc > 3 ? atoi(argv[3]) : 999,
        overhead = argc > 4 ? atoi(argv[4]) : 5;
    return run_times(first, last, overhead, argc <= 5);
}
