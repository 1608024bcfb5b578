/* SPDX-License-Identifier: MIT
 *
 * Tests the launches of dense decode on a GPU: order, grids, shared memory and parameters, as the fake
 * driver (fake_cuda/) received them. What kernels are passed of a call's tensors and sizes: test_cuda_random.c.
 */
#include "fake_cuda/launches.h"

#include "cuda/sm80/latent/shape.h"

#include <math.h>

static struct split_params split_of(const struct fake_launch *launch)
{
    return strncmp(launch->kernel, "join", 4) ? PARAMS(dense_decode_params, launch).split
                                              : PARAMS(join_params, launch).split;
}

/* Returns a value after the parameters of a join: rows per CTA, or lanes per row. */
static int32_t after_join(const struct fake_launch *launch, size_t index)
{
    int32_t value;
    memcpy(&value, launch->parameters + sizeof(struct join_params) + index * sizeof value, sizeof value);
    return value;
}

#define ROWS_PER_BLOCK(launch) after_join(launch, 0)
#define ROW_LANES(launch)      after_join(launch, 1)

/* Runs the portable decode, which the fake GPU, a Hopper, would not choose. */
static void run(struct dense_decode_call *call)
{
    call->args.kernel = "cuda-sm80";
    CHECK_OK(dense_decode_run(call));
}

/* Runs the portable decode and checks its launches by name. */
static void runs(struct dense_decode_call *call, const char *kernels)
{
    call->args.kernel = "cuda-sm80";
    RUNS(dense_decode, call, "%s", kernels);
}

/* ---- Dense decode ---------------------------------------------------------------------------------------- */

static void planned_inside(void)
{
    DECODE_CALL(c, 5, 2, 16, 2, 99, 64, 40);
    runs(&c, "decode_plan|sm80_dense_decode_bf16_16x64|join_splits_bf16");

    const struct plan_params plan = PARAMS(plan_params, launched(2));
    CHECK_ALL({launched(2)->config.grid_x, 1}, {launched(2)->config.block_x, PLAN_THREADS});
    CHECK(plan.seqlens == (int32_t *)(void *)region(3) && plan.b == 5 && plan.capacity == 40 * 64,
          "%lld, %lld", (long long)plan.b, (long long)plan.capacity);
    CHECK_ALL({offset(plan.header, REGION_OF_WORKSPACE), 0},
              {offset(plan.partitions, REGION_OF_WORKSPACE), 32},
              {offset(plan.num_splits, REGION_OF_WORKSPACE), 32 + 66 * 32},
              {plan.num_partitions, 66 /* 132 SMs, 2 key heads */});
    CHECK_ALL({plan.costs.row_tiles, 2 /* one tile per key head */}, {plan.costs.tiles_of_head, 1});

    const struct dense_decode_params p = PARAMS(dense_decode_params, launched(1));
    /* The plan, then two parts per partition, each 256-byte aligned, and none past the queried size. */
    CHECK_ALL({p.split.num_partitions, 66}, {p.split.even_splits, 0});
    const size_t plan_end = (plan_bytes(5, 66) + 255) / 256 * 256, rows = 2 * 66 * 32;
    CHECK_ALL({(char *)p.split.part_out - region(REGION_OF_WORKSPACE), (int64_t)plan_end},
              {(char *)p.split.part_ends - (char *)p.split.part_out, (int64_t)(rows * 512 * 4)});
    const size_t flags = 66 * 2 * READY_FLAGS_OF_TILE * 4; /* one tile per key head */
    CHECK_ALL({c.bytes, plan_end + rows * 512 * 4 + (rows * 8 + 255) / 256 * 256 + (flags + 255) / 256 * 256},
              {!p.split.ready_flags, true});

    const struct cu_launch_config decode = launched(1)->config, join = launched(0)->config;
    CHECK_ALL({decode.grid_x, 66 * 2 /* a tile holds the 16 rows of a key head */}, {decode.block_x, 256},
              {decode.shared_bytes, 3 * 64 * 1152 + 16 * 128 + 640}, {p.stages, 3});
    CHECK_ALL({ROWS_PER_BLOCK(launched(0)), 1 /* 66 / 5 splits per request */},
              {join.grid_x, 5 * 32 /* one request and row per CTA */}, {join.block_x, 32 * JOIN_WARPS},
              {join.shared_bytes, 0});
}

static void large_tiles(void)
{
    struct layout layout = dense_layout(128, 2, 128, 1, 9, 64, 1);
    struct dense_decode_call c;
    layout.type = fp16;
    decode_call(&c, layout);
    runs(&c, "decode_plan|sm80_dense_decode_fp16_64x64|join_splits_fp16");
    CHECK_ALL(GRID(launched(1), 33 * 4 /* 256 rows; 132 SMs over 4 tiles */, 256,
                   64 * 1152 + 2 * 64 * 1152 + 64 * 128 + 2 * 64 * 4 + 64 * 4),
              {ROWS_PER_BLOCK(launched(0)), JOIN_WARPS /* fewer partitions than requests */},
              {ROW_LANES(launched(0)), 32},
              {launched(0)->config.grid_x, 8 * 32 /* 33 requests take turns; at most 2 · 132 */});
    CHECK(isinf(PARAMS(join_params, launched(0)).output.rules.lse_of_empty), "%s", "lse_of_empty");
}

/* A GPU with 99 KiB of shared memory per CTA uses the smallest tile for every call. */
static void little_shared_memory(void)
{
    fake->capability = 89, fake->shared_bytes = 101376, fake->sms = 142;
    DECODE_CALL(c, 4, 1, 128, 1, 9, 64, 2);
    runs(&c, "decode_plan|sm80_dense_decode_bf16_16x32|join_splits_bf16");
    CHECK_EQ(PARAMS(dense_decode_params, launched(1)).stages, 2);
    const struct plan_params plan = PARAMS(plan_params, launched(2)); /* the costs of another GPU */
    CHECK_EQ(plan.costs.row_tiles, 0);
    CHECK(launched(1)->config.shared_bytes <= 101376 - 1024, "%u", launched(1)->config.shared_bytes);
    CHECK_EQ(launched(1)->config.grid_x, 71 * 8); /* partitions count rows by 64, tiles by 16 */
}

static void plan_given(void)
{
    SMALL_CALL(c);
    c.args.plan = region(REGION_OF_WORKSPACE) + MEMORY / 2, c.args.plan_size = plan_bytes(2, 7),
    c.args.num_partitions = 7;
    runs(&c, "sm80_dense_decode_bf16_16x64|join_splits_bf16_quarters");
    const struct split_params split = PARAMS(dense_decode_params, launched(1)).split;
    CHECK_ALL({split.num_partitions, 7}, {offset(split.part_out, REGION_OF_WORKSPACE), 0},
              {ROWS_PER_BLOCK(launched(0)), JOIN_WARPS /* 3 splits per request */},
              {ROW_LANES(launched(0)), 2},
              {launched(0)->config.grid_x, 2 * 2 * 4 /* requests × row blocks × columns */});
    /* Without num_partitions: the planner's number for this GPU. */
    c.args.num_partitions = 0, c.args.plan_size = plan_bytes(2, 132);
    run(&c);
    CHECK_EQ(split_of(launched(0)).num_partitions, 132);
    /* One partition: nothing is split. */
    c.args.num_partitions = 1;
    runs(&c, "sm80_dense_decode_bf16_16x64");
    CHECK_EQ(c.bytes, 0);
    /* The host checks what it can know about a plan in device memory. */
    c.args.num_partitions = 133;
    check_rejected("a plan too small", dense_decode_run(&c), FMLA_BUFFER_TOO_SMALL, "dense_decode",
                   "plan_size", "at least|133 partitions of 2 requests");
    c.args.num_partitions = 7, c.args.plan = region(REGION_OF_WORKSPACE) + 8;
    check_rejected("a plan misaligned", dense_decode_run(&c), FMLA_INVALID_ARGUMENT, "dense_decode", "plan",
                   "16 bytes");
}

/* Gives tables of 7 rows in region(4) and region(5), which this call does not use otherwise. */
static void give_tables_of(struct held *rows, struct held *splits, int64_t b, const fmla_tensor **partitions,
                           const fmla_tensor **num_splits)
{
    REGION(rows, 4, i32, 2, 7, FMLA_PARTITION_FIELDS);
    REGION(splits, 5, i32, 1, b + 1);
    splits->tensor.byte_offset = 4;
    *partitions = &rows->tensor, *num_splits = &splits->tensor;
}

/* A plan in tables: without a header, which no kernel reads then; their rows are the number of partitions. */
static void tables_given(void)
{
    for (int hopper = 0; hopper < 2; hopper++) {
        struct held rows, splits;
        SMALL_CALL(c);
        give_tables_of(&rows, &splits, 2, &c.args.partitions, &c.args.num_splits);
        c.args.kernel = hopper ? NULL : "cuda-sm80";
        RUNS(dense_decode, &c, "%s|join_splits_bf16_quarters",
             hopper ? "sm90_dense_decode_bf16_576" : "sm80_dense_decode_bf16_16x64");
        CHECK_EQ(split_of(launched(0)).num_partitions, 7);
        CHECK_EQ(ROW_LANES(launched(0)), 2);
        /* The workspace is as with a plan of as many partitions. */
        const size_t bytes = c.bytes;
        c.args.partitions = c.args.num_splits = NULL;
        c.args.plan = region(REGION_OF_WORKSPACE) + MEMORY / 2, c.args.plan_size = plan_bytes(2, 7),
        c.args.num_partitions = 7;
        CHECK_OK(dense_decode_run(&c));
        CHECK_EQ(c.bytes, bytes);
        /* In batch-invariant mode tables are not read, but still checked. */
        c.args.plan = NULL, c.args.num_partitions = 0, c.args.batch_invariant = 1;
        c.args.partitions = &rows.tensor, c.args.num_splits = &splits.tensor;
        CHECK_OK(dense_decode_run(&c));
        CHECK(!split_of(launched(0)).partitions, "%s", "batch-invariant, and by a plan");
        rows.tensor.device.id = 1;
        check_rejected("a table elsewhere", dense_decode_run(&c), FMLA_INVALID_ARGUMENT, "dense_decode",
                       "partitions", "cuda:1|cuda:0");
    }
}

/* The device's planner writes only the tables, and decode reads them there. */
static void tables_planned(void)
{
    struct held seqlens, rows, splits;
    REGION(&seqlens, 0, i32, 1, 5);
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &seqlens.tensor, args.s_q = 1, args.h_q = 16, args.h_kv = 1, args.num_workers = 99;
    int32_t count = 0;
    CHECK_OK(fmla_decode_plan_partitions(&args, &count));
    CHECK_EQ(count, 99);
    args.num_workers = 0;
    CHECK_OK(fmla_decode_plan_partitions(&args, &count));
    CHECK_EQ(count, 132);
    give_tables_of(&rows, &splits, 5, &args.partitions, &args.num_splits);
    CHECK_OK(fmla_decode_plan(&args));
    const struct plan_params p = PARAMS(plan_params, launched(0));
    CHECK_ALL({offset(p.num_splits, 5), 4}, {p.num_partitions, 7}, {p.costs.row_tiles, 1});
}

static void batch_invariant(void)
{
    struct dense_decode_call c;
    struct layout layout = dense_layout(3, 1, 16, 1, 9, 64, 1000);
    decode_call(&c, layout);
    c.args.batch_invariant = 1;
    c.args.plan = region(0) + 1; /* not read */
    runs(&c, "sm80_dense_decode_bf16_16x64|join_splits_bf16_quarters");
    struct dense_decode_params p = PARAMS(dense_decode_params, launched(1));
    CHECK(!p.split.header && !p.split.partitions && !p.split.num_splits, "%p",
          (const void *)p.split.partitions);
    CHECK_ALL({p.split.even_splits, 32 /* ⌈64000 / 2048⌉ */}, {p.split.split_lanes, 32},
              {launched(1)->config.grid_x, 3 * 32}, {ROWS_PER_BLOCK(launched(0)), 1},
              {ROW_LANES(launched(0)), 16}, {launched(0)->config.grid_x, 3 * 16 * 4},
              {offset(p.split.part_out, REGION_OF_WORKSPACE), 0}, {c.bytes, 3 * 32 * 16 * (512 * 4 + 8)});
    /* With many requests a worker takes several splits. */
    layout.b = 528;
    decode_call(&c, layout);
    c.args.batch_invariant = 1;
    run(&c);
    p = PARAMS(dense_decode_params, launched(1));
    CHECK_ALL({p.split.even_splits, 32}, {p.split.split_lanes, 4 /* 16 · 132 / 528 */},
              {launched(1)->config.grid_x, 528 * 4});
    /* With a capacity of one split there is nothing to join and no workspace. */
    layout.max_pages = 32;
    decode_call(&c, layout);
    c.args.batch_invariant = 1;
    runs(&c, "sm80_dense_decode_bf16_16x64");
    CHECK_ALL({PARAMS(dense_decode_params, launched(0)).split.split_lanes, 1}, {c.bytes, 0});
}

/* The join has many more row blocks than CTAs, which take turns. */
static void join_is_capped(void)
{
    DECODE_CALL(c, 1, 1024, 128, 1, 9, 64, 1);
    c.args.num_partitions = 2;
    run(&c);
    CHECK_EQ(launched(0)->config.grid_x, 2 * 132);
    c.args.num_partitions = 20; /* many splits: one row per CTA */
    run(&c);
    CHECK_ALL({ROWS_PER_BLOCK(launched(0)), 1}, {launched(0)->config.grid_x, 2 * 132});
}

/* For partial results of 2^20 requests of 2^20 splits the number of rows or bytes overflows. */
static void too_large(void)
{
    for (int shift = 15; shift <= 30; shift += 15) {
        size_t bytes;
        DECODE_CALL(c, 1 << 20, 1, INT64_C(1) << shift, 1, 1, 64, INT32_MAX);
        for (int i = 0; i < 3; i++) c.q.strides[i] = c.kv_cache.strides[i] = 0;
        c.block_table.strides[0] = 0;
        c.args.lse = NULL;
        c.args.batch_invariant = 1;
        check_rejected("too large", fmla_dense_decode_workspace_size(&c.args, &bytes, NULL), FMLA_UNSUPPORTED,
                       "dense_decode", "q", "partial results|1048576");
    }
}

/* Hopper's kernel launches no more CTAs than a grid allows, even if rows of a plan's tables ask for them. */
static void many_blocks(void)
{
    struct held rows, splits;
    DECODE_CALL(c, 2, 1, 1 << 22, 1, 9, 64, 8);
    REGION(&rows, 4, i32, 2, 65536, 8);
    REGION(&splits, 5, i32, 1, 3);
    c.args.kernel = "cuda-sm90";
    for (int way = 0; way < 2; way++) {
        size_t bytes;
        c.args.num_partitions = way ? 0 : 65536;
        if (way) c.args.partitions = &rows.tensor, c.args.num_splits = &splits.tensor;
        check_rejected("many blocks", fmla_dense_decode_workspace_size(&c.args, &bytes, NULL),
                       FMLA_UNSUPPORTED, "dense_decode", "q", "tiles of 64 rows times partitions");
    }
}

/* ---- Dense decode on Hopper -------------------------------------------------------------------------------- */

static void hopper(void)
{
    DECODE_CALL(c, 5, 2, 16, 2, 99, 64, 40);
    c.args.causal = 1; /* which CTAs that join their parts do not take */
    RUNS(dense_decode, &c, "decode_plan|sm90_dense_decode_bf16_576|join_splits_bf16");
    CHECK_ALL(GRID(launched(1), 66 * 2, 384, 232448),
              {launched(0)->config.grid_x, 5 * 32 /* as behind the portable kernel */});
    const struct dense_decode_sm90_params p = PARAMS(dense_decode_sm90_params, launched(1));
    CHECK_ALL({p.q_heads, 8}, {p.tiles_of_head, 1}, {p.request_step, 1}, {p.page_step, 1}, {fake->tensors, 3},
              {offset(passed_of(&p.keys)->base, 1), 0}, {offset(passed_of(&p.rope)->base, 1), 0},
              {offset(passed_of(&p.queries)->base, 0), 0}, {passed_of(&p.keys)->box[2], 2},
              {passed_of(&p.rope)->box[2], 1}, {passed_of(&p.queries)->box[1], 8},
              {passed_of(&p.queries)->box[2], 8});
}

static void hopper_variants(void)
{
    for (int k = 0; k < 8; k++) {
        const int64_t d_qk = k & 1 ? 576 : 512, h_q = k & 2 ? 65 : 64;
        struct layout layout = dense_layout(2, 1, h_q, 1, 9, 64, 8);
        struct dense_decode_call c;
        layout.type = k & 4 ? fp16 : bf16, layout.d_qk = d_qk;
        decode_call(&c, layout);
        const char *type = k & 4 ? "fp16" : "bf16";
        for (int planned = 0; planned < 2;
             planned++) { /* two cases: shared out, or by a plan with other partitions */
            c.args.num_partitions = planned ? 30 : 0;
            if (planned)
                RUNS(dense_decode, &c, "decode_plan|sm90_dense_decode_%s_%d%s|join_splits_%s_halves", type,
                     (int)d_qk, k & 2 ? "_shared" : "", type);
            else
                RUNS(dense_decode, &c, "sm90_dense_decode_%s_%d%s_together", type, (int)d_qk,
                     k & 2 ? "_shared" : "");
            const struct fake_launch *const decode = launched(planned);
            const struct dense_decode_sm90_params p = PARAMS(dense_decode_sm90_params, decode);
            const int64_t workers = planned ? 30 : k & 2 ? 66 : 132;
            CHECK_ALL({p.tiles_of_head, k & 2 ? 2 : 1}, {p.q_heads, h_q},
                      {decode->config.grid_x, workers * p.tiles_of_head}, {p.workers, planned ? 0 : workers},
                      {p.of_request, planned ? 0 : workers / 2},
                      {passed_of(&p.keys)->type, k & 4 ? CU_TENSOR_FLOAT16 : CU_TENSOR_BFLOAT16},
                      {passed_of(&p.queries)->sizes[3], d_qk / 64},
                      {passed_of(&p.keys)->sizes[2], d_qk / 64});
        }
    }
}

/* 256 rows for each of two key heads; and a join of few CTAs, which all fit beside the decode's last ones. */
static void hopper_large_tiles(void)
{
    DECODE_CALL(c, 128, 2, 256, 2, 9, 64, 1);
    c.args.num_partitions = 33;
    RUNS(dense_decode, &c, "decode_plan|sm90_dense_decode_bf16_576_shared|join_splits_bf16");
    const struct dense_decode_sm90_params p = PARAMS(dense_decode_sm90_params, launched(1));
    CHECK_ALL({p.q_heads, 128}, {p.tiles_of_head, 4}, {divides(p.tiles_of_head_divisor, 4), true},
              {divides(p.tiles_divisor, 8), true}, {launched(1)->config.grid_x, 33 * 8},
              {PARAMS(join_params, launched(0)).split.tiles, 8},
              {PARAMS(join_params, launched(0)).split.tiles_of_head, 4},
              {ROWS_PER_BLOCK(launched(0)), JOIN_WARPS},
              {launched(0)->config.grid_x, 4 * 64 /* 512 rows; at most 2 · 132 */});
}

/* All requests share one query tensor and one cache: one request, one page, strides of 0. */
static void hopper_shared_tensors(void)
{
    SMALL_CALL(c);
    c.q.strides[0] = 0, c.kv_cache.strides[0] = 0;
    RUNS(dense_decode, &c, "sm90_dense_decode_bf16_576_together");
    const struct dense_decode_sm90_params p = PARAMS(dense_decode_sm90_params, launched(0));
    CHECK_ALL({p.request_step, 0}, {p.page_step, 0}, {passed_of(&p.queries)->sizes[4], 1},
              {passed_of(&p.keys)->sizes[3], 1});
}

static void hopper_without_plan(void)
{
    DECODE_CALL(c, 3, 1, 16, 1, 9, 64, 1000);
    c.args.batch_invariant = 1;
    RUNS(dense_decode, &c, "sm90_dense_decode_bf16_576|join_splits_bf16_quarters");
    CHECK_ALL({launched(1)->config.grid_x, 3 * 32},
              {PARAMS(dense_decode_sm90_params, launched(1)).call.split.split_lanes, 32});
    decode_call(&c, dense_layout(SMALL_SIZES));
    c.args.plan = region(REGION_OF_WORKSPACE) + MEMORY / 2, c.args.plan_size = plan_bytes(2, 1),
    c.args.num_partitions = 1;
    RUNS(dense_decode, &c, "sm90_dense_decode_bf16_576"); /* nothing to join */
}

/* The small call on neighbouring GPUs; on 9.0 it runs Hopper's kernel (hopper). */
#define ON_A_GPU(scenario, number, bytes)                                                                    \
    static void scenario(void)                                                                               \
    {                                                                                                        \
        fake->capability = (number), fake->shared_bytes = (bytes);                                           \
        SMALL_CALL(c);                                                                                       \
        RUNS(dense_decode, &c, "decode_plan|sm80_dense_decode_bf16_16x64|join_splits_bf16_quarters");        \
        CHECK_EQ(fake->tensors, 0);                                                                          \
    }
ON_A_GPU(on_8_0, 80, 166912)
ON_A_GPU(on_10_0, 100, 232448)

int main(int argc, char **argv)
{
    return RUN_SCENARIOS(argc, argv, "test_cuda_launch", planned_inside, large_tiles, little_shared_memory,
                         plan_given, tables_given, tables_planned, batch_invariant, join_is_capped, too_large,
                         many_blocks, hopper, hopper_variants, hopper_large_tiles, hopper_shared_tensors,
                         hopper_without_plan, on_8_0, on_10_0);
}
