/* SPDX-License-Identifier: MIT
 *
 * Tests the host side of sparse decode on a GPU: the kernel chosen, the parameters of the planner and the
 * join, the number of CTAs, and the workspace size. What kernels are passed of a call's tensors:
 * test_cuda_random.c.
 */
#include "fake_cuda/launches.h"

#include "plan.h"

/* A valid call: 5 requests of 2 tokens and 96 heads, 4000 entries that name keys in 9 pages of 64, and 70
 * of an extra cache of 4 pages of 2. With a tenth of the entries it uses Hopper's kernel for small
 * batches. */
enum { B = 5, S_Q = 2, H_Q = 96, TOPK = 4000, SMALL_TOPK = 200, EXTRA = 70 };
enum { CTA_GROUP_BARRIER_BYTES = (132 * 8 + 255) / 256 * 256 /* one word per SM */ };

/* Makes the call of a shape; sizes of 0 are the valid call's. */
static void shaped_call(struct sparse_decode_call *c, struct layout l)
{
    l.s_q = S_Q, l.page_size = 64, l.b = l.b ? l.b : B, l.h_q = l.h_q ? l.h_q : H_Q;
    l.topk = l.topk ? l.topk : TOPK, l.extra_topk = l.extra_topk ? l.extra_topk : EXTRA;
    if (l.format == FMLA_KV_FP16) l.type = fp16;
    l.has |= HAS_LSE;
    sparse_decode_make(c, &l, gpu_number(0));
}

static void sparse_call(struct sparse_decode_call *c, int32_t format, bool extra)
{
    shaped_call(c, SHAPE_OF(layout, .format = format, .has = HAS_LENGTHS | (extra ? HAS_EXTRA : 0u)));
}

/* ---- What kernels are passed ------------------------------------------------------------------ */

static void on_hopper(void)
{
    struct sparse_decode_call c;
    sparse_call(&c, FMLA_KV_FP8_656, true);
    RUNS(sparse_decode, &c, "decode_plan|sm90_sparse_decode_bf16_fp8_656|join_half_rows_bf16_halves");

    /* 132 SMs, two tokens, two tiles of heads. */
    enum { PARTITIONS = 33 };
    const struct plan_params plan = PARAMS(plan_params, launched(2));
    CHECK_ALL({!plan.seqlens, true}, {plan.b, B}, {plan.num_partitions, PARTITIONS}, {plan.topk.topk, TOPK},
              {plan.topk.extra_topk, EXTRA}, {offset(plan.topk.length, 3), 0},
              {!plan.topk.extra_length, true}, {offset(plan.header, REGION_OF_WORKSPACE), 0},
              {plan.costs.row_tiles, 0});

    const struct sparse_decode_params p = PARAMS(sparse_decode_params, launched(1));
    CHECK_ALL(GRID(launched(1), PARTITIONS * S_Q * 2, 384, 227 * 1024));

    /* The plan, then two parts per partition, and none past the queried size, which a call with a plan's
     * tables uses too. */
    const size_t plan_end = (plan_bytes(B, PARTITIONS) + 255) / 256 * 256, rows = 2 * PARTITIONS * S_Q * H_Q;
    CHECK_ALL({(char *)p.split.part_out - region(REGION_OF_WORKSPACE), (int64_t)plan_end},
              {(char *)p.split.part_ends - (char *)p.split.part_out, (int64_t)(rows * 512 * 4)},
              {plan.planned, PARTITIONS});
    enum { ROWS = 35 };
    const size_t end = (plan_bytes(B, ROWS) + 255) / 256 * 256, most = 2 * ROWS * S_Q * H_Q;
    CHECK_EQ(c.bytes, end + most * 512 * 4 + (most * 8 + 255) / 256 * 256 + CTA_GROUP_BARRIER_BYTES);
}

/* Few entries of more requests than can start at once with tiles of 64 heads: tiles of 16 heads, and a
 * plan for the CTAs that start at once; if forced, either kernel follows it. */
static void small_batch(void)
{
    static const struct {
        const char *kernel, *launched;
        int heads, threads, shared_bytes;
    } all[] = {{NULL, "sm90_sparse_decode_small_bf16_fp8_656", 16, 256, 96 * 1024},
               {"cuda-sm90", "sm90_sparse_decode_small_bf16_fp8_656", 16, 256, 96 * 1024},
               {"cuda-sm90-16", "sm90_sparse_decode_small_bf16_fp8_656", 16, 256, 96 * 1024},
               {"cuda", "sparse_decode_bytes_bf16", 0, 32 * SPARSE_WARPS, 0}};
    enum { PARTITIONS = 264 / 12 /* tiles */ };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        struct sparse_decode_call c;
        shaped_call(&c, SHAPE_OF(layout, .b = 35, .topk = 64, .format = FMLA_KV_FP8_656, .has = HAS_LENGTHS));
        c.args.kernel = all[i].kernel;
        RUNS(sparse_decode, &c, "decode_plan|%s|join_%s_bf16", all[i].launched,
             all[i].heads ? "half_rows" : "splits");
        const struct plan_params plan = PARAMS(plan_params, launched(2));
        CHECK_EQ(plan.num_partitions, PARTITIONS);
        const int tiles =
            all[i].heads ? S_Q * ((H_Q + all[i].heads - 1) / all[i].heads) : S_Q * H_Q / SPARSE_WARPS;
        CHECK_EQ(PARAMS(sparse_decode_params, launched(1)).tiles, tiles);
        if (all[i].heads) CHECK_EQ(PARAMS(sparse_decode_params, launched(1)).tiles_of_token, tiles / S_Q);
        CHECK_ALL(GRID(launched(1), PARTITIONS * tiles, all[i].threads, all[i].shared_bytes));
    }
    struct sparse_decode_call c;
    sparse_call(&c, FMLA_KV_FP8_584, true);
    c.args.kernel = "cuda-sm90-16";
    RUNS(sparse_decode, &c, "decode_plan|sm90_sparse_decode_small_bf16_fp8_584|join_half_rows_bf16_halves");
    CHECK_EQ(launched(1)->config.grid_x, 33 * S_Q * 6);
}

/* In a context with fewer SMs than its device, not all CTAs can be resident: the same splits, and a
 * separate join. */
static void no_room_for_all_ctas(void)
{
    struct sparse_decode_call c;
    shaped_call(&c, SHAPE_OF(layout, .b = 2, .h_q = 128, .topk = 2048, .format = FMLA_KV_FP8_656));
    RUNS(sparse_decode, &c, "sm90_sparse_decode_bf16_fp8_656_together");
    const size_t bytes = c.bytes;
    fake->fails[CALL_cuLaunchKernelEx] = CU_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
    fake->once[CALL_cuLaunchKernelEx] = 1;
    RUNS(sparse_decode, &c, "sm90_sparse_decode_bf16_fp8_656|join_half_rows_bf16_quarters");
    CHECK_ALL({c.bytes, bytes}, {PARAMS(sparse_decode_params, launched(1)).split.split_keys, 128},
              {fake_depth(), 0});
}

/* Without lengths, few entries are split evenly: no plan is made, and a given one is not read. */
static void even_splits(void)
{
    static const struct {
        int b, h_q, topk, extra;
        const char *kernel;
        int heads, keys;
    } all[] = {{1, 64, 1024, 0, "sm90_sparse_decode_small_bf16_fp8_656_together", 16, 64},
               {1, 64, 2048, 0, "sm90_sparse_decode_bf16_fp8_656_together", 64, 64},
               {1, 96, SMALL_TOPK, EXTRA, "sm90_sparse_decode_small_bf16_fp8_656_together", 16, 64},
               {B, 96, SMALL_TOPK, EXTRA, "sm90_sparse_decode_bf16_fp8_656_together", 64, 64},
               {2, 128, 2048, 0, "sm90_sparse_decode_bf16_fp8_656_together", 64, 128},
               {16, 64, 2048, 0, "sm90_sparse_decode_bf16_fp8_656_together", 64, 512},
               {16, 16, 2048, 0, "sm90_sparse_decode_small_bf16_fp8_656_together", 16, 256},
               {64, 64, 500, 0, "sm90_sparse_decode_bf16_fp8_656", 64, 512},
               /* With 64 keys they would not fit the parts. */
               {17, 64, 192, 0, "sm90_sparse_decode_bf16_fp8_656_together", 64, 128},
               {3, 128, 704, 0, "sm90_sparse_decode_bf16_fp8_656_together", 64, 128}};
    uint64_t ticket = 0;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        for (int given = 0; given < 2; given++) {
            struct sparse_decode_call c;
            shaped_call(&c, SHAPE_OF(layout, .b = all[i].b, .h_q = all[i].h_q, .topk = all[i].topk,
                                     .format = FMLA_KV_FP8_656, .has = all[i].extra ? HAS_EXTRA : 0));
            if (given) c.args.plan = region(3), c.args.plan_size = MEMORY;
            const int before = fake->launches;
            CHECK_OK(sparse_decode_run(&c));
            const int length = all[i].extra ? (all[i].topk + 63) / 64 * 64 + all[i].extra : all[i].topk;
            const int count = (length + all[i].keys - 1) / all[i].keys,
                      tiles = S_Q * ((all[i].h_q + all[i].heads - 1) / all[i].heads);
            const struct fake_launch *const decode = &fake->launch[before];
            CHECK_EQ(fake->launches - before, count > 1 && !joins_in_kernel(decode) ? 2 : 1);
            CHECK(!strcmp(decode->kernel, all[i].kernel), "%zu: %s", i, decode->kernel);
            CHECK_EQ(decode->config.grid_x, all[i].b * count * tiles);
            const struct sparse_decode_params p = PARAMS(sparse_decode_params, decode);
            CHECK(!p.split.partitions && !p.split.header && p.split.parts_in_halves, "%s", "by a plan");
            CHECK_ALL({p.split.split_keys, all[i].keys}, {p.split.even_splits, count},
                      {p.split.split_lanes, count}, {divides(p.splits_divisor, (uint32_t)count), true});
            if (count == 1) continue;
            if (!joins_in_kernel(decode)) continue;
            const uint64_t own = PARAMS(sparse_decode_sm90_params, decode).ticket;
            CHECK(own != ticket, "%s", "two launches have the same ticket");
            ticket = own;
        }
    no_room_for_all_ctas();
    /* More requests than start at once: a plan, and the kernel for it. */
    struct sparse_decode_call c;
    shaped_call(&c, SHAPE_OF(layout, .b = 67, .h_q = 64, .topk = 64, .format = FMLA_KV_FP8_656));
    c.args.plan = region(3), c.args.plan_size = MEMORY;
    CHECK_OK(sparse_decode_run(&c));
    CHECK(!strcmp(launched(0)->kernel, "sm90_sparse_decode_small_bf16_fp8_656") ||
              !strcmp(launched(1)->kernel, "sm90_sparse_decode_small_bf16_fp8_656"),
          "%s", launched(0)->kernel);
    /* With short splits, lengths are distributed. */
    for (int forced = 0; forced < 2; forced++) {
        sparse_call(&c, FMLA_KV_FP8_656, true);
        c.indices.shape[2] = SMALL_TOPK, c.args.kernel = forced ? "cuda-sm90-16" : NULL;
        RUNS(sparse_decode, &c, "sm90_sparse_decode%s_bf16_fp8_656_together", forced ? "_small" : "");
    }
    /* The caller's number of partitions is used. */
    sparse_call(&c, FMLA_KV_FP8_656, true);
    c.indices.shape[2] = SMALL_TOPK, c.args.topk_length = NULL, c.args.num_partitions = 7;
    RUNS(sparse_decode, &c, "decode_plan|sm90_sparse_decode_bf16_fp8_656|join_half_rows_bf16_halves");
    CHECK_EQ(PARAMS(sparse_decode_params, launched(1)).split.num_partitions, 7);
}

/* A request's bits must not depend on the other requests or their number: the choice uses only the number
 * of heads. */
static void small_batch_invariant(void)
{
    struct sparse_decode_call c;
    sparse_call(&c, FMLA_KV_FP8_656, false);
    c.indices.shape[2] = SMALL_TOPK, c.args.batch_invariant = 1;
    c.q.shape[0] = c.indices.shape[0] = c.topk_length.shape[0] = c.out.shape[0] = c.lse.shape[0] = 1;
    RUNS(sparse_decode, &c, "sm90_sparse_decode_bf16_fp8_656");
    c.q.shape[2] = c.out.shape[2] = c.lse.shape[1] = 16;
    RUNS(sparse_decode, &c, "sm90_sparse_decode_small_bf16_fp8_656");
}

/* Plans for 132 SMs: partitions, and blocks of the longest split if every entry is present. */
static void small_plans(void)
{
    static _Alignas(16) char host[1 << 16];
    static const struct {
        int b, s_q, h_q, topk, extra, partitions, longest;
    } all[] = {
        {1, 1, 64, 2048, 0, 37, 1},   {1, 1, 128, 2048, 0, 37, 1},  {2, 1, 64, 2048, 0, 74, 1},
        {2, 2, 128, 2048, 0, 37, 2},  {4, 1, 64, 2048, 0, 74, 2},   {1, 1, 16, 2048, 0, 37, 1},
        {1, 1, 64, 128, 512, 15, 1},  {1, 1, 64, 1, 0, 1, 1},       {128, 1, 16, 2048, 0, 264, 18},
        {1, 1, 64, 0, 0, 1, 1},       {1, 1, 4096, 64, 0, 1, 1},    {1, 1, 65536, 64, 0, 1, 1},
        {16, 1, 64, 2048, 0, 148, 4}, {8, 1, 64, 2048, 0, 148, 2},  {9, 1, 64, 2048, 0, 111, 3},
        {0, 1, 64, 2048, 0, 132, 0},  {0, 2, 128, 0, 0, 33, 0},     {0, 2, 16, 0, 0, 132, 0}, /* b: unknown */
        {16, 1, 128, 2048, 0, 74, 8}, {100, 1, 64, 512, 0, 100, 8}, {64, 2, 64, 2048, 0, 66, 32},
        {8, 1, 128, 2048, 0, 74, 4},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        fmla_sparse_plan_args args = FMLA_INIT(fmla_sparse_plan_args);
        args.b = all[i].b, args.s_q = all[i].s_q, args.h_q = all[i].h_q;
        args.topk = all[i].topk, args.extra_topk = all[i].extra;
        args.target = gpu_number(0);
        int32_t partitions = 0;
        CHECK_OK(fmla_sparse_plan_partitions(&args, &partitions));
        struct plan_params plan;
        args.plan = region(0), args.plan_size = MEMORY;
        CHECK_OK(fmla_sparse_plan(&args));
        memcpy(&plan, launched(0)->parameters, sizeof plan);
        CHECK_EQ(plan.num_partitions, partitions);
        CHECK(plan.planned == all[i].partitions, "%zu: %d partitions, expected %d", i, plan.planned,
              all[i].partitions);
        struct plan_tables tables = plan_tables_of(host, partitions);
        tables.planned = plan.planned;
        plan_build(tables, all[i].b, (struct plan_topk){all[i].topk, all[i].extra, NULL, NULL},
                   (struct plan_costs){0, 0});
        const int64_t length = plan_topk_length(all[i].topk, all[i].extra, all[i].extra);
        const int blocks = (int)((length + PLAN_BLOCK - 1) / PLAN_BLOCK);
        int longest = 0;
        for (int32_t k = 0; k < partitions; k++) {
            const struct plan_partition row = tables.partitions[k];
            const int taken =
                (row.end_request - row.begin_request) * blocks + row.end_block - row.begin_block;
            if (row.end_request >= row.begin_request && taken > longest) longest = taken;
        }
        CHECK(longest == all[i].longest, "%zu: a split of %d blocks, expected %d", i, longest,
              all[i].longest);
        /* The caller's choice has priority, and plans of other GPUs are unchanged. */
        args.num_workers = 132;
        CHECK_OK(fmla_sparse_plan_partitions(&args, &partitions));
        CHECK_EQ(partitions, plan_default_partitions(132, 1, all[i].s_q * all[i].h_q, all[i].s_q));
    }
}

/* A plan has as many rows as any batch needs, and no more. */
static void same_rows(void)
{
    static const struct {
        int s_q, h_q, topk, extra, rows;
    } all[] = {{1, 64, 2048, 0, 153}, {1, 128, 2048, 0, 74},   {1, 16, 2048, 0, 306}, {2, 64, 2048, 0, 74},
               {1, 64, 256, 0, 297},  {1, 128, 128, 1024, 85}, {1, 64, 0, 0, 132},    {1, 65536, 64, 0, 1}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        fmla_sparse_plan_args args = FMLA_INIT(fmla_sparse_plan_args);
        args.s_q = all[i].s_q, args.h_q = all[i].h_q, args.topk = all[i].topk;
        args.extra_topk = all[i].extra, args.target = gpu_number(0);
        int32_t most = 0;
        for (int b = 0; b <= 600; b++) {
            int32_t rows = 0;
            args.b = b, args.plan = NULL;
            CHECK_OK(fmla_sparse_plan_partitions(&args, &rows));
            CHECK(rows == all[i].rows, "%zu: %d rows for %d requests, expected %d", i, rows, b, all[i].rows);
            args.plan = region(0), args.plan_size = MEMORY;
            fake->launches = 0;
            CHECK_OK(fmla_sparse_plan(&args));
            const struct plan_params plan = PARAMS(plan_params, &fake->launch[0]);
            CHECK_EQ(plan.num_partitions, rows);
            if (plan.planned > most) most = plan.planned;
        }
        CHECK(most == all[i].rows, "%zu: at most %d partitions of %d rows", i, most, all[i].rows);
    }
}

static void formats(void)
{
    static const struct {
        int32_t format;
        bool fp16;
        const char *kernel;
    } all[] = {{FMLA_KV_FP8_656, false, "sm90_sparse_decode_bf16_fp8_656"},
               {FMLA_KV_FP8_584, false, "sm90_sparse_decode_bf16_fp8_584"},
               {FMLA_KV_FP8_656, true, "sparse_decode_bytes_fp16"},
               {FMLA_KV_FP8_584, true, "sparse_decode_bytes_fp16"},
               {FMLA_KV_FP4_288, true, "sparse_decode_bytes_fp16"},
               {FMLA_KV_BF16, false, "sm90_sparse_decode_bf16_576"},
               {FMLA_KV_FP16, true, "sm90_sparse_decode_fp16_576"}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        struct sparse_decode_call c;
        shaped_call(&c, SHAPE_OF(layout, .format = all[i].format, .has = HAS_LENGTHS,
                                 .type = all[i].fp16 ? fp16 : bf16));
        c.args.num_partitions = 1;
        RUNS(sparse_decode, &c, "decode_plan|%s", all[i].kernel); /* one partition: nothing is split */
    }
}

/* The arguments of a separate plan, which has no format. */
static fmla_sparse_plan_args plan_args(int64_t topk)
{
    fmla_sparse_plan_args args = FMLA_INIT(fmla_sparse_plan_args);
    args.b = B, args.s_q = S_Q, args.h_q = H_Q, args.topk = topk, args.extra_topk = EXTRA;
    args.target = gpu_number(0);
    return args;
}

/* Caches of the queries' type: tiles of 64 heads for every batch size; plans and workspaces are as for FP8
 * caches. */
static void rows(void)
{
    static const struct {
        int64_t d_qk;
        bool fp16;
        const char *kernel, *launched;
    } all[] = {{576, false, NULL, "sm90_sparse_decode_bf16_576"},
               {512, false, "cuda-sm90", "sm90_sparse_decode_bf16_512"},
               {576, true, "cuda-sm90-64", "sm90_sparse_decode_fp16_576"},
               {512, true, NULL, "sm90_sparse_decode_fp16_512"}};
    struct sparse_decode_call codes;
    sparse_call(&codes, FMLA_KV_FP8_656, true);
    codes.indices.shape[2] = SMALL_TOPK;
    CHECK_OK(sparse_decode_run(&codes));
    fmla_sparse_plan_args plan_alone = plan_args(SMALL_TOPK);
    plan_alone.plan = region(0), plan_alone.plan_size = MEMORY;
    CHECK_OK(fmla_sparse_plan(&plan_alone));
    const int32_t partitions = PARAMS(plan_params, launched(0)).planned;
    CHECK(partitions != 33, "%s", "the batch is not small");
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        struct sparse_decode_call c;
        shaped_call(&c, SHAPE_OF(layout, .format = all[i].fp16 ? FMLA_KV_FP16 : FMLA_KV_BF16,
                                 .has = HAS_EXTRA | HAS_LENGTHS, .d_qk = all[i].d_qk));
        c.indices.shape[2] = SMALL_TOPK, c.args.kernel = all[i].kernel;
        RUNS(sparse_decode, &c, "decode_plan|%s|join_half_rows_%s_halves", all[i].launched,
             all[i].fp16 ? "fp16" : "bf16");
        const struct plan_params plan = PARAMS(plan_params, launched(2));
        CHECK_ALL({plan.num_partitions, partitions}, {c.bytes, codes.bytes},
                  GRID(launched(1), partitions * S_Q * 2, 384, 227 * 1024));
    }
    struct sparse_decode_call c;
    sparse_call(&c, FMLA_KV_BF16, true);
    c.args.kernel = "cuda-sm90-16";
    check_rejected("tiles of 16 heads", sparse_decode_run(&c), FMLA_UNSUPPORTED, "sparse_decode", "kv_format",
                   "cache FP8_656 FP8_584");
    sparse_call(&c, FMLA_KV_FP8_656, true);
    c.q.tensor.dtype = c.out.tensor.dtype = fp16;
    c.args.kernel = "cuda-sm90";
    check_rejected("codes and float16", sparse_decode_run(&c), FMLA_UNSUPPORTED, "sparse_decode", "q",
                   "float16 queries only with FP16 caches");
    sparse_call(&c, FMLA_KV_BF16, true);
    c.kv_cache.tensor.byte_offset = 2;
    RUNS(sparse_decode, &c, "decode_plan|sm80_sparse_decode_bf16_64x64|join_splits_bf16_halves");
}

/* The portable kernel takes what Hopper's does not; then the call is made anew. */
static void refused(const char *label, struct sparse_decode_call *c, const char *argument, const char *words)
{
    RUNS(sparse_decode, c, "decode_plan|sm80_sparse_decode_f32_64x64|join_splits_bf16_halves");
    check_left(label, OP_SPARSE_DECODE, &c->args, "cuda-sm90", "cuda-sm80", argument, words);
    sparse_call(c, FMLA_KV_FP8_656, true);
}

static void not_taken(void)
{
    struct sparse_decode_call c;
    sparse_call(&c, FMLA_KV_FP8_656, true);
    c.q.tensor.byte_offset = 2;
    refused("q at an odd address", &c, "q", "multiples of 16 bytes");
    c.q.strides[2] = 577;
    refused("q with odd strides", &c, "q", "multiples of 16 bytes");
    c.kv_cache.tensor.byte_offset = 4;
    refused("a cache at an odd address", &c, "kv_cache", "multiples of 16 bytes");
    c.extra_kv_cache.strides[0] = 2 * 656 + 4;
    refused("an extra cache with odd pages", &c, "extra_kv_cache", "multiples of 16 bytes");
    c.extra_kv_cache.strides[0] = 2 * 656 + 4, c.extra_indices.shape[2] = 0;
    check_rejected("so without entries", (c.args.kernel = "cuda-sm90", sparse_decode_run(&c)),
                   FMLA_UNSUPPORTED, "sparse_decode", "extra_kv_cache", "multiples of 16 bytes");
    sparse_call(&c, FMLA_KV_FP8_656, true);
    c.out.strides[1] += 2, c.out.strides[0] += 4;
    refused("out with odd strides", &c, "out", "multiples of 16 bytes");
    c.args.softmax_scale = -1.0f;
    refused("a negative scale", &c, "softmax_scale", "at least");
}

/* Hopper's kernel does not take a page of FP8_584 whose size is not a multiple of 16 bytes; padded, it
 * does. */
static void odd_pages(void)
{
    struct sparse_decode_call c;
    sparse_call(&c, FMLA_KV_FP8_584, false);
    c.kv_cache.shape[1] = 61, c.kv_cache.strides[0] = 61 * 584;
    RUNS(sparse_decode, &c, "decode_plan|sm80_sparse_decode_fp8_584_64x64|join_splits_bf16_halves");
    c.kv_cache.strides[0] = 61 * 584 + 8;
    RUNS(sparse_decode, &c, "decode_plan|sm90_sparse_decode_bf16_fp8_584|join_half_rows_bf16_halves");
    CHECK_ALL({PARAMS(sparse_decode_params, launched(1)).cache[0].page_bytes, 61 * 584 + 8},
              {PARAMS(sparse_decode_params, launched(1)).cache[0].slot_bytes, 576});
}

static void batch_invariant(void)
{
    struct sparse_decode_call c;
    shaped_call(&c, SHAPE_OF(layout, .topk = 5000, .format = FMLA_KV_FP8_656, .has = HAS_LENGTHS));
    c.args.batch_invariant = 1;
    RUNS(sparse_decode, &c, "sm90_sparse_decode_bf16_fp8_656|join_half_rows_bf16_halves");
    const struct sparse_decode_params p = PARAMS(sparse_decode_params, launched(1));
    CHECK_ALL({!p.split.partitions, true}, {!p.split.header, true}, {p.split.even_splits, 3},
              {p.split.split_lanes, 3}, {launched(1)->config.grid_x, B * 3 * S_Q * 2});
    const size_t rows = B * 3 * S_Q * H_Q;
    CHECK_EQ(c.bytes, rows * 512 * 4 + rows * 8);
    c.indices.shape[2] = 2048;
    RUNS(sparse_decode, &c, "sm90_sparse_decode_bf16_fp8_656"); /* one split per request: nothing to join */
    CHECK_EQ(c.bytes, 0);
}

/* More CTAs than a grid allows: the partitions may be the caller's, or rows of its tables. */
static void many_blocks(void)
{
    enum { MOST = 65536, HEADS = 1 << 20 };
    for (int way = 0; way < 4; way++) {
        struct sparse_decode_call c;
        struct held rows, splits;
        shaped_call(&c, SHAPE_OF(layout, .h_q = HEADS, .format = FMLA_KV_FP8_656, .has = HAS_LENGTHS));
        REGION(&rows, 4, i32, 2, MOST, 8);
        REGION(&splits, 5, i32, 1, B + 1);
        c.args.lse = NULL;
        if (way % 2)
            c.args.partitions = &rows.tensor, c.args.num_splits = &splits.tensor;
        else
            c.args.num_partitions = MOST;
        if (way / 2) c.args.kernel = "cuda-sm90";
        check_rejected(way % 2 ? "many rows" : "many partitions", sparse_decode_run(&c), FMLA_UNSUPPORTED,
                       "sparse_decode", "q", "tiles of heads times partitions");
        c.args.batch_invariant = 1; /* without a plan */
        c.args.num_partitions = 0;
        CHECK_OK(sparse_decode_run(&c));
    }
}

/* At most 2^31 indices; indices cannot name slots past that. */
static void large(void)
{
    struct sparse_decode_call c;
    sparse_call(&c, FMLA_KV_FP8_656, false);
    c.kv_cache.shape[0] = INT64_C(1) << 30, c.kv_cache.strides[0] = 0;
    CHECK_OK(sparse_decode_run(&c));
    CHECK_EQ(PARAMS(sparse_decode_params, launched(1)).cache[0].slots, INT64_C(1) << 31);
    c.indices.shape[2] = INT32_MAX - 100;
    for (int i = 0; i < 2; i++) c.indices.strides[i] = 0;
    check_rejected("too many entries", sparse_decode_run(&c), FMLA_UNSUPPORTED, "sparse_decode", "indices",
                   "indices per token, over both caches");
}

static void elsewhere(void)
{
    fake->capability = 80, fake->shared_bytes = 166912;
    struct sparse_decode_call c;
    sparse_call(&c, FMLA_KV_FP8_656, true);
    c.indices.shape[2] = SMALL_TOPK;
    RUNS(sparse_decode, &c, "decode_plan|sm80_sparse_decode_f32_64x32|join_splits_bf16_halves");
    const struct sparse_decode_params p = PARAMS(sparse_decode_params, launched(1));
    CHECK_ALL({launched(1)->config.grid_x, 33 * S_Q * ((H_Q + 63) / 64)}, {p.tiles_of_token, (H_Q + 63) / 64},
              {p.tiles, S_Q * ((H_Q + 63) / 64)});
}

/* The portable kernel takes few keys of the queries' type, except in batch-invariant calls, because that
 * choice depends on the batch. */
static void few_keys(void)
{
    enum { FP8 = FMLA_KV_FP8_656, BF16 = FMLA_KV_BF16 };
    static const struct {
        int64_t b, h_q, topk; /* with two tokens per request */
        int32_t format;
        bool invariant;
        const char *kernel;
    } all[] = {{1, 16, 512, BF16, false, "cuda-sm80"},   {1, 16, 512, BF16, true, "cuda-sm90"},
               {1, 16, 512, FP8, false, "cuda-sm90"},    {16, 32, 2048, BF16, false, "cuda-sm80"},
               {17, 32, 2048, BF16, false, "cuda-sm90"}, {4, 64, 512, BF16, false, "cuda-sm80"},
               {5, 64, 512, BF16, false, "cuda-sm90"},   {1, 64, 2048, BF16, false, "cuda-sm90"},
               {2, 128, 512, BF16, false, "cuda-sm80"},  {3, 128, 512, BF16, false, "cuda-sm90"},
               {1, 128, 0, BF16, false, "cuda-sm80"},    {8, 64, 128, BF16, false, "cuda-sm80"},
               {9, 64, 128, BF16, false, "cuda-sm90"}};
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++) {
        struct sparse_decode_call c;
        shaped_call(&c, SHAPE_OF(layout, .format = all[i].format, .b = all[i].b, .h_q = all[i].h_q));
        c.indices.shape[2] = all[i].topk;
        c.args.batch_invariant = all[i].invariant;
        const char *const kernel = kernel_of(OP_SPARSE_DECODE, &c.args);
        CHECK(!strcmp(kernel, all[i].kernel), "%d: %s", i, kernel);
    }
}

/* The separate plan, from lengths on the device and without lengths. */
static void planner(void)
{
    struct held length;
    REGION(&length, 3, i32, 1, B);
    fmla_sparse_plan_args args = plan_args(TOPK);
    args.plan = region(0), args.plan_size = MEMORY, args.stream = STREAM;
    for (int i = 0; i < 2; i++) {
        args.topk_length = i ? &length.tensor : NULL;
        CHECK_OK(fmla_sparse_plan(&args));
        const struct plan_params plan = PARAMS(plan_params, launched(0));
        CHECK(!plan.seqlens && (const char *)plan.topk.length == (i ? region(3) : NULL), "%s", "lengths");
        CHECK_ALL({plan.topk.topk, TOPK}, {plan.topk.extra_topk, EXTRA}, {plan.num_partitions, 35},
                  {plan.planned, 33}, {plan.b, B});
    }
    check_kernels(0, "decode_plan|decode_plan");
}

int main(int argc, char **argv)
{
    return RUN_SCENARIOS(argc, argv, "test_cuda_sparse", on_hopper, small_batch, even_splits,
                         small_batch_invariant, small_plans, same_rows, formats, rows, not_taken, odd_pages,
                         batch_invariant, many_blocks, large, elsewhere, few_keys, planner);
}
