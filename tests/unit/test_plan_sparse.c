/* SPDX-License-Identifier: MIT
 *
 * Tests plans of sparse decode: the lengths that they split, the number of partitions, and every argument
 * that must be rejected. The splitting is that of dense plans, so a plan is compared with a dense one of
 * the same lengths.
 */
#include "plans.h"

enum { MOST = 40, PLAN = 1 << 16 };

static int32_t length_data[MOST], extra_data[MOST], seqlens_data[MOST];
static _Alignas(16) char plan[PLAN], dense[PLAN], before[PLAN];
static struct held length, extra_length, seqlens;
static fmla_sparse_plan_args args;

/* Returns the length as docs/semantics.md defines it. */
static int64_t listed(int64_t topk, int64_t extra_topk, const int32_t *count, const int32_t *extra)
{
    int64_t main_keys = count ? *count : topk, extra_keys = extra ? *extra : extra_topk;
    if (main_keys > topk) main_keys = topk;
    if (main_keys < 1) main_keys = 1; /* also if below 0 */
    if (!extra_topk) return main_keys;
    if (extra_keys > extra_topk) extra_keys = extra_topk;
    if (extra_keys < 0) extra_keys = 0;
    return (main_keys + 63) / 64 * 64 + extra_keys;
}

static void set_up_lengths(int64_t b)
{
    memset(plan, PATTERN, sizeof plan), memset(before, PATTERN, sizeof before);
    HELD(&length, length_data, i32, 1, b);
    HELD(&extra_length, extra_data, i32, 1, b);
    args = FMLA_INIT(fmla_sparse_plan_args);
    args.s_q = 1, args.h_q = 128, args.topk = 2048, args.num_partitions = 4;
    args.topk_length = &length.tensor;
    args.plan = plan, args.plan_size = sizeof plan;
}

/* Checks that the plan of `args` equals a dense one over `lengths`. */
static void check_same(const char *label, int64_t b)
{
    fmla_decode_plan_args like = FMLA_INIT(fmla_decode_plan_args);
    size_t bytes = 0;
    HELD(&seqlens, seqlens_data, i32, 1, b);
    like.seqlens = &seqlens.tensor, like.s_q = like.h_q = like.h_kv = 1;
    like.num_partitions = args.num_partitions, like.plan = dense, like.plan_size = sizeof dense;
    CHECK(fmla_sparse_plan_size(&args, &bytes) == FMLA_OK && fmla_sparse_plan(&args) == FMLA_OK &&
              fmla_decode_plan(&like) == FMLA_OK,
          "%s: %s", label, fmla_last_error());
    CHECK(!memcmp(plan, dense, bytes), "%s: another plan than for these lengths", label);
    CHECK(!memcmp(plan + bytes, before + bytes, sizeof plan - bytes), "%s: wrote behind the plan", label);
}

static void test_lengths(void)
{
    static const int32_t special[] = {0, 1, 63, 64, 65, 128, 2048, 2049, -1, INT32_MIN, INT32_MAX};
    struct random_state random = {7};
    char label[96];
    for (int round = 0; round < 2000; round++) {
        const int64_t b = random_between(&random, 0, MOST), topks[] = {0, 1, 64, 70, 2048};
        set_up_lengths(b);
        args.topk = topks[random_between(&random, 0, 4)];
        args.extra_topk = random_between(&random, 0, 1) ? topks[random_between(&random, 0, 4)] : 0;
        args.num_partitions = (int32_t)random_between(&random, 1, 90);
        const int given = random_between(&random, 0, 1), extra_given = random_between(&random, 0, 1);
        args.topk_length = given ? &length.tensor : NULL;
        args.extra_topk_length = extra_given ? &extra_length.tensor : NULL;
        if (!given && !extra_given) args.b = (int32_t)b;
        for (int64_t r = 0; r < b; r++) {
            length_data[r] = special[random_between(&random, 0, 10)];
            extra_data[r] = special[random_between(&random, 0, 10)];
            seqlens_data[r] = (int32_t)listed(args.topk, args.extra_topk, given ? &length_data[r] : NULL,
                                              extra_given ? &extra_data[r] : NULL);
        }
        snprintf(label, sizeof label, "round %d: b %d, topk %d, extra %d", round, (int)b, (int)args.topk,
                 (int)args.extra_topk);
        check_same(label, b);
    }
    /* A list longer than 2^31: 2^25 blocks of each cache, in one partition. */
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    set_up_lengths(1);
    args.topk = args.extra_topk = INT32_MAX, args.topk_length = NULL, args.b = 1, args.num_partitions = 1;
    CHECK(fmla_sparse_plan(&args) == FMLA_OK && fmla_plan_describe(plan, sizeof plan, &view) == FMLA_OK &&
              view.partitions[3] == 1 << 26 && view.payload == (1 << 26) + 10,
          "2^32 keys: %d blocks, payload %lld", view.partitions[3], (long long)view.payload);
}

static void check_partitions(int64_t s_q, int64_t h_q, int32_t workers, int32_t expected)
{
    int32_t count = -1;
    set_up_lengths(1);
    args.s_q = s_q, args.h_q = h_q, args.num_workers = workers, args.num_partitions = 0;
    CHECK(fmla_sparse_plan_partitions(&args, &count) == FMLA_OK && count == expected,
          "s_q %d, h_q %d, %d workers: %d partitions, must be %d", (int)s_q, (int)h_q, workers, count,
          expected);
}

static void test_partitions(void)
{
    check_partitions(1, 128, 132, 66);
    check_partitions(2, 128, 132, 33);
    check_partitions(1, 64, 132, 132);
    check_partitions(1, 65, 132, 66);
    check_partitions(3, 16, 132, 44); /* as for 64 heads: tokens do not share a tile */
    check_partitions(5, 129, 132, 8);
    check_partitions(100, 128, 132, 1);
}

/* ---- Arguments ------------------------------------------------------------------------------- */

enum { B = 3 };

static void set_up(void);
static struct good_call call = {.operation = OP_SPARSE_PLAN, .elsewhere = "topk_length", .set_up = set_up};

#define ARGS    (*(fmla_sparse_plan_args *)call.args)
#define T(name) (call.held[TENSOR_sparse_plan_##name])

static void set_up_in(bool tables)
{
    begin_making(tables, B);
    PUT(T(topk_length), int32_t, 100, 0, 7000), PUT(T(extra_topk_length), int32_t, 5, 0, 3);
    ARGS.topk = 2048, ARGS.extra_topk = 5;
}

SET_UP(set_up, set_up_in(false))
SET_UP(set_up_made_tables, set_up_in(true))
/* Without lengths, b gives the number of requests. */
static void no_lengths(fmla_device target)
{
    ARGS.topk_length = ARGS.extra_topk_length = NULL, ARGS.b = B, ARGS.target = target;
}

static void test_arguments(void)
{
    plan_for(&call, "topk_length", 0, 0);
    refuse_by_descriptor(&call);
    REFUSED(call, "s_q", "h_q|4294967296", ARGS.s_q = ARGS.h_q = 65536);
    REFUSED(call, "b", "2147483647|2147418110", no_lengths((fmla_device){0}), ARGS.b = INT32_MAX);
    REFUSED(call, "topk_length", "b|3|4 as in b", ARGS.b = 4);
    REFUSED(call, "extra_topk_length", "b|3|4 as in b", ARGS.topk_length = NULL, ARGS.b = 4);
    REFUSED(call, "target", "-1", no_lengths((fmla_device){FMLA_DEVICE_CUDA, -1}));
    REFUSED_HERE(call, "target", "cuda:99", no_lengths((fmla_device){FMLA_DEVICE_CUDA, 99}));
    take_by_descriptor(&call);
    TAKEN(call, "the same b", ARGS.b = B);
    TAKEN(call, "no lengths", no_lengths((fmla_device){0}));
    test_tables_made(set_up_made_tables, B);
}

int main(void)
{
    test_lengths();
    test_partitions();
    test_arguments();
    return check_done("test_plan_sparse");
}
