/* SPDX-License-Identifier: MIT
 *
 * Tests the launches of cache operations and FP8 products on a GPU, plans for other devices, and the launch
 * attributes of kernels, as test_cuda_launch.c does for dense decode.
 */
#include "fake_cuda/launches.h"

#include "cuda/device.h"
#include "cuda/launch.h"

/* Two tokens written to and read from 4 pages of 64 slots. */
static struct cache_append_call append;
static struct cache_gather_call gather;

static void cache_calls(int32_t format, fmla_dtype type)
{
    const int64_t d_qk = format == FMLA_KV_FP8_584 || format == FMLA_KV_FP4_288 ? 512 : 576;
    const struct layout layout = SHAPE_OF(layout, .tokens = 2, .width = d_qk - 64, .rope = 64, .d_qk = d_qk,
                                          .pages = 4, .normed = 512, .max_positions = 9, .turned = 64,
                                          .page_size = 64, .format = format, .type = type, .has = HAS_ROPE);
    cache_append_make(&append, &layout, gpu_number(0)), cache_gather_make(&gather, &layout, gpu_number(0));
}

/* Runs the call and returns its launch parameters. */
static struct cache_params appended(const char *kernel)
{
    RUNS(cache_append, &append, "%s", kernel);
    CHECK_EQ(launched(0)->config.block_x, 32 * CACHE_WARPS);
    return PARAMS(cache_params, launched(0));
}

static struct cache_params gathered(const char *kernel)
{
    RUNS(cache_gather, &gather, "%s", kernel);
    CHECK_EQ(launched(0)->config.block_x, 32 * CACHE_WARPS);
    return PARAMS(cache_params, launched(0));
}

static void cache_operations(void)
{
    cache_calls(FMLA_KV_FP8_656, bf16);
    append.latent.strides[0] = 520, append.rope.strides[0] = 1024;
    struct cache_params p = appended("cache_append_fp8_656_bf16");
    CHECK_ALL({offset(p.rope, 1), 0}, {p.latent_stride, 520}, {p.rope_stride, 1024}, {p.tokens, 2});

    /* With norm or RoPE another kernel runs, with no more CTAs than fit on 132 SMs. */
    for (int i = 1; i < 8; i++) {
        cache_calls(i & 4 ? FMLA_KV_FP4_288 : FMLA_KV_FP8_656, bf16);
        append.norm_weight.shape[0] = 512, append.rope_table.shape[0] = 9, append.rope_table.shape[1] = 64;
        append.rope_table.strides[0] = 64, append.positions.shape[0] = 2;
        append.positions.tensor.dtype.bits = i & 4 ? 64 : 32;
        if (i & 1) append.args.norm_weight = &append.norm_weight.tensor, append.args.norm_eps = 0.25f;
        if (i & 2)
            append.args.positions = &append.positions.tensor,
            append.args.rope_table = &append.rope_table.tensor,
            append.args.rope_pairs = i & 1 ? FMLA_ROPE_HALVES : FMLA_ROPE_INTERLEAVED;
        if (!(i & 3)) continue;
        const struct cache_params fused =
            appended(i & 4 ? "cache_append_fused_fp4_288_bf16" : "cache_append_fused_fp8_656_bf16");
        CHECK_ALL({fused.norm_weight != NULL, i & 1}, {fused.norm_eps == 0.25f, i & 1},
                  {fused.rotates, (i & 2) / 2}, {fused.halves, (i & 3) == 3},
                  {fused.table_rows, i & 2 ? 9 : 0}, {fused.wide_positions, (i & 6) == 6}, {fused.aligned, 1},
                  {launched(0)->config.grid_x, 1});
    }
    append.latent.shape[0] = append.rope.shape[0] = append.slot_mapping.shape[0] = append.positions.shape[0] =
        9999;
    append.rope_table.strides[0] = 65;
    CHECK_EQ(appended("cache_append_fused_any_bf16").format, KV_FP4_288);
    CHECK_EQ(launched(0)->config.grid_x, 132 * FUSED_BLOCKS);
    append.rope_table.strides[0] = INT64_C(1) << 32; /* exceeds 32-bit products */
    CHECK_EQ(appended("cache_append_fused_any_bf16").aligned, 0);

    /* Sizes that are not multiples of 16 bytes use another path. */
    struct held *const cache = &append.kv_cache;
    for (int i = 0; i < 5; i++) {
        cache_calls(FMLA_KV_FP8_656, bf16);
        if (i < 2) append.held[i].strides[0] += 4;
        if (i == 2) cache->tensor.byte_offset = 8;
        if (i == 3) cache->strides[0] += 8;
        if (i == 4) cache->strides[1] = 660, cache->strides[0] = 64 * 660;
        CHECK_EQ(appended("cache_append_fp8_656_bf16").aligned, 0);
    }
    /* More slots than 32 bits hold; CTAs for all tokens. */
    cache_calls(FMLA_KV_FP8_656, f32);
    gather.kv_cache.shape[0] = INT64_C(1) << 28, gather.slots.shape[0] = gather.out.shape[0] = 4001;
    p = gathered("cache_gather_fp8_656_fp32");
    CHECK_ALL({p.few_slots, 0}, {p.slots_of_cache, INT64_C(1) << 34}, {launched(0)->config.grid_x, 1001});
    const int before = fake->launches;
    gather.slots.shape[0] = gather.out.shape[0] = 0;
    CHECK_OK(cache_gather_run(&gather));
    CHECK_EQ(fake->launches, before); /* nothing to do */

    /* The scale of the cache in the form that the quotient uses. */
    static const struct {
        float scale, prescale;
    } scales[] = {{0.0f, 1.0f}, {0.037f, 1.0f}, {0x1p-100f, 0x1p80f}, {0x1p100f, 0x1p-64f}};
    for (int i = 0; i < 4; i++) {
        cache_calls(FMLA_KV_FP8_576, bf16);
        append.args.cache_scale = gather.args.cache_scale = scales[i].scale;
        const float scale = scales[i].scale == 0.0f ? 1.0f : scales[i].scale;
        p = appended("cache_append_fp8_576_bf16");
        CHECK(p.prescale == scales[i].prescale && p.cache_scale == scale * p.prescale &&
                  p.inverse == 1.0f / p.cache_scale,
              "scale %a: %a %a %a", (double)scale, (double)p.prescale, (double)p.cache_scale,
              (double)p.inverse);
        CHECK(gathered("cache_gather_fp8_576_bf16").cache_scale == scale, "%a", (double)scale);
    }
}

/* The library of these tests has machine code for 8.0 and 9.0 and PTX for 8.0: on 10.0 that PTX runs, which
 * has no tiles of 64 rows over bytes. */
static void bytes_by_ptx(void)
{
    static struct dense_decode_call call;
    struct layout layout =
        SHAPE_OF(layout, .b = 3, .s_q = 1, .h_q = 64, .h_kv = 1, .page_size = 64, .pages = 9, .max_pages = 4,
                 .d_qk = 576, .format = FMLA_KV_FP8_576, .has = HAS_TABLE | HAS_LSE);
    fake->capability = 100, fake->shared_bytes = 232448;
    dense_decode_make(&call, &layout, gpu_number(0));
    call.args.kernel = "cuda-sm80";
    RUNS(dense_decode, &call, "decode_plan|sm80_dense_decode_bytes_32x64|join_splits_bf16");
}

/* Queries of FP8 products become bf16 values in the workspace, which the byte-cache kernel reads: b 3, s_q
 * 2, h_q 16. */
static void fp8_products(void)
{
    static struct dense_decode_call call, of_bf16;
    struct layout layout =
        SHAPE_OF(layout, .b = 3, .s_q = 2, .h_q = 16, .h_kv = 1, .page_size = 64, .pages = 9, .max_pages = 4,
                 .d_qk = 576, .format = FMLA_KV_FP8_576, .has = HAS_TABLE | HAS_LSE);
    dense_decode_make(&of_bf16, &layout, gpu_number(0));
    of_bf16.args.kernel = "cuda-sm80";
    RUNS(dense_decode, &of_bf16, "decode_plan|sm80_dense_decode_bytes_32x64|join_splits_bf16%s", "_halves");
    layout.products = FMLA_PRODUCTS_FP8;
    for (int way = 0; way < 4; way++) { /* values, codes, values of the other format, values at any strides */
        layout.codes = way == 1, layout.format = way == 2 ? FMLA_KV_FP8_656 : FMLA_KV_FP8_576;
        dense_decode_make(&call, &layout, gpu_number(0));
        call.args.kernel = "cuda-sm80";
        if (way == 3) call.q.strides[2] = 577, call.q.strides[1] = 16 * 577, call.q.strides[0] = 2 * 16 * 577;
        RUNS(dense_decode, &call,
             "decode_plan|quantise_queries|sm80_dense_decode_bytes_32x64|join_splits_bf16%s", "_halves");
        const struct quantise_params p = PARAMS(quantise_params, launched(2));
        const struct dense_decode_params d = PARAMS(dense_decode_params, launched(1));
        CHECK_ALL(GRID(launched(2), 3 * 2 * 16 / QUANTISE_WARPS, 32 * QUANTISE_WARPS, 0),
                  {p.rows, 3 * 2 * 16}, {p.s_q, 2}, {p.h_q, 16}, {p.quantised, way == 2 ? 512 : 576},
                  {p.pairs_aligned, way != 3}, {p.codes != NULL, way == 1}, {p.q == NULL, way == 1},
                  {p.scale != NULL, way == 1}, {p.q_stride[2], way == 3 ? 577 : 576},
                  {p.q_stride[1], call.q.strides[1]}, {p.q_stride[0], call.q.strides[0]}, {d.q == p.to, true},
                  {d.q_stride[2], 576}, {d.q_stride[1], 16 * 576}, {d.q_stride[0], 2 * 16 * 576},
                  {d.vectors_aligned, 1});
        /* The values are at the end of the workspace and are all that FP8 products add to it. */
        CHECK_ALL({call.bytes - of_bf16.bytes, 3 * 2 * 16 * 576 * 2},
                  {(const char *)p.to - (const char *)call.args.workspace, (int64_t)of_bf16.bytes});
    }
}

/* Hopper's kernel quantises queries itself or receives codes; its tiles have as many rows as the call
 * needs, or fewer if CTAs join their own partial results: b 3, 256 keys. */
static void fp8_products_on_hopper(void)
{
    static const struct {
        int64_t s_q, h_q;
        int32_t rows, together; /* per tile */
        const char *join;
    } shapes[] = {{1, 16, 16, 16, "_quarters"},
                  {2, 16, 32, 16, "_quarters"},
                  {1, 33, 64, 16, "_quarters"},
                  {1, 128, 64, 16, "_quarters"},
                  {4, 128, 64, 32, ""}};
    for (int i = 0; i < 5; i++)
        for (int way = 0; way < 4; way++) {
            static struct dense_decode_call call;
            const bool codes = way % 2, planned = way / 2;
            const struct layout layout =
                SHAPE_OF(layout, .b = 3, .s_q = shapes[i].s_q, .h_q = shapes[i].h_q, .h_kv = 1,
                         .page_size = 64, .pages = 9, .max_pages = 4, .d_qk = 576, .format = FMLA_KV_FP8_576,
                         .products = FMLA_PRODUCTS_FP8, .codes = codes, .has = HAS_TABLE | HAS_LSE);
            dense_decode_make(&call, &layout, gpu_number(0));
            call.args.num_partitions = planned ? 7 : 0;
            const int32_t rows = planned ? shapes[i].rows : shapes[i].together;
            const int64_t tiles = (shapes[i].s_q * shapes[i].h_q - 1) / rows + 1, maps = fake->tensors;
            if (planned)
                RUNS(dense_decode, &call, "decode_plan|sm90_dense_decode_fp8_576_%d|join_half_rows_bf16%s",
                     rows, shapes[i].join);
            else
                RUNS(dense_decode, &call, "sm90_dense_decode_fp8_576_%d_together", rows);
            const struct fake_launch *const launch = launched(planned);
            const struct dense_decode_fp8_params p = PARAMS(dense_decode_fp8_params, launch);
            const int64_t workers = planned ? 7 : 132 / tiles;
            CHECK_ALL(
                GRID(launch, workers * tiles, 512, 232448), {p.q_given, codes}, {p.q_scale != NULL, codes},
                {p.dense.tiles_of_head, tiles}, {p.dense.workers, planned ? 0 : workers},
                {fake->tensors - maps, codes ? 4 : 2}, {passed_of(&p.dense.keys)->box[0], 64},
                {passed_of(&p.dense.keys)->box[2], 4}, {passed_of(&p.dense.rope)->box[0], 32},
                {(const char *)passed_of(&p.dense.rope)->base - (const char *)passed_of(&p.dense.keys)->base,
                 512});
            if (codes)
                CHECK_ALL({passed_of(&p.dense.queries)->box[1], rows},
                          {passed_of(&p.queries_end)->box[1], rows},
                          {passed_of(&p.dense.queries)->strides[0], 576});
        }
}

/* Returns the payload of a plan of 128 requests of 8192 keys, made on the host for a device. */
static int64_t payload_for(fmla_device target, int32_t num_workers, int64_t *partitions)
{
    static int32_t lengths[128];
    static _Alignas(16) char plan[1 << 16];
    struct held seqlens;
    HELD(&seqlens, lengths, i32, 1, 128);
    for (int r = 0; r < 128; r++) lengths[r] = 8192;
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &seqlens.tensor, args.s_q = 1, args.h_q = 128, args.h_kv = 1;
    args.target = target, args.num_workers = num_workers;
    args.plan = plan, args.plan_size = sizeof plan;
    CHECK_OK(fmla_decode_plan(&args));
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    CHECK_OK(fmla_plan_describe(plan, sizeof plan, &view));
    CHECK_EQ(fake->launches, 0);
    *partitions = view.num_partitions;
    return view.payload;
}

/* A plan made on the host for a GPU queries that GPU's SMs and whether it has costs: then two whole
 * requests per partition are best, 2 · (128 + 5); the default payload is ceil(128 · 133 / 66) + 5. */
static void planned_on_the_host(void)
{
    int64_t partitions;
    CHECK_EQ(payload_for(gpu_number(0), 0, &partitions), 266);
    CHECK_EQ(partitions, 66);
    CHECK_EQ(payload_for(gpu_number(0), 66, &partitions), 2 * 266);
    CHECK_EQ(payload_for((fmla_device){FMLA_DEVICE_CPU, 0}, 132, &partitions), 263);
    CHECK_EQ(partitions, 66);
}

static void planned_on_the_host_for_another(void)
{
    fake->capability = 80;
    int64_t partitions;
    CHECK_EQ(payload_for(gpu_number(0), 0, &partitions), 263);
    CHECK_EQ(partitions, 66);
}

/* A plan made on a GPU for another device uses that device's costs: none. */
static void planned_on_the_gpu_for_the_cpu(void)
{
    struct held seqlens;
    REGION(&seqlens, 0, i32, 1, 5);
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &seqlens.tensor, args.s_q = 1, args.h_q = 16, args.h_kv = 1, args.num_partitions = 7;
    args.target = (fmla_device){FMLA_DEVICE_CPU, 0};
    args.plan = region(1), args.plan_size = MEMORY;
    CHECK_OK(fmla_decode_plan(&args));
    const struct plan_params p = PARAMS(plan_params, launched(0));
    CHECK_ALL({p.num_partitions, 7}, {p.costs.row_tiles, 0});
}

/* ---- Attributes, for kernels that use them -------------------------------------------------------------- */

static void attributes(void)
{
    struct cuda_kernel merge = {.image = "any/merge", .name = "merge"};
    struct merge_params params = {0};
    struct cuda_scope scope;
    const struct cuda_launch launch = {.kernel = &merge,
                                       .blocks = INT64_C(1) << 40,
                                       .threads = 64,
                                       .shared_bytes = 50000,
                                       .cluster = 8,
                                       .flags = LAUNCH_OVERLAP,
                                       .stream = STREAM};
    CHECK_OK(cuda_enter("test", "x", 0, &scope));
    CHECK_OK(cuda_launch("test", &scope, &launch, (void *[]){&params}));
    CHECK_ALL(
        {launched(0)->config.grid_x, INT32_MAX}, {launched(0)->config.num_attributes, 2},
        {launched(0)->attributes[0].id, CU_LAUNCH_CLUSTER}, {launched(0)->attributes[0].value.cluster.x, 8},
        {launched(0)->attributes[0].value.cluster.y, 1}, {launched(0)->attributes[1].id, CU_LAUNCH_OVERLAP},
        {launched(0)->attributes[1].value.overlap, 1});
    struct cuda_kernel nowhere = {.image = "any/nowhere", .name = "nowhere"};
    check_rejected("no such image", cuda_load("test", &scope, &nowhere, 0), FMLA_UNSUPPORTED, "test",
                   "kernel", "nowhere|any/nowhere");
    cuda_leave(&scope);
}

static void no_overlap_before_hopper(void)
{
    fake->capability = 80;
    struct cuda_kernel merge = {.image = "any/merge", .name = "merge"};
    struct merge_params params = {0};
    struct cuda_scope scope;
    const struct cuda_launch launch = {.kernel = &merge, .blocks = 1, .threads = 64, .flags = LAUNCH_OVERLAP};
    CHECK_OK(cuda_enter("test", "x", 0, &scope));
    CHECK_OK(cuda_launch("test", &scope, &launch, (void *[]){&params}));
    CHECK_EQ(launched(0)->config.num_attributes, 0);
    cuda_leave(&scope);
}

int main(int argc, char **argv)
{
    return RUN_SCENARIOS(argc, argv, "test_cuda_others", cache_operations, fp8_products, bytes_by_ptx,
                         fp8_products_on_hopper, planned_on_the_host, planned_on_the_host_for_another,
                         planned_on_the_gpu_for_the_cpu, attributes, no_overlap_before_hopper);
}
