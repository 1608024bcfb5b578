/* SPDX-License-Identifier: MIT
 *
 * Plans of sparse decode: the lengths that they cut, how many partitions they have, and every argument of theirs that must
 * be rejected. The cutting itself is that of dense plans, so a plan is held against a dense one of the same lengths.
 */
#include "arguments.h"
#include "random.h"

enum { MOST = 40, PLAN = 1 << 16, PATTERN = 0xc3 };

static const char op[] = "decode_plan";

static int32_t length_data[MOST], extra_data[MOST], seqlens_data[MOST];
static _Alignas(16) char plan[PLAN], dense[PLAN], before[PLAN];
static struct held length, extra_length, seqlens;
static fmla_decode_plan_args args;

/* As docs/semantics.md says it. */
static int64_t listed(int64_t topk, int64_t extra_topk, const int32_t *count, const int32_t *extra)
{
    int64_t main_keys = count ? *count : topk, extra_keys = extra ? *extra : extra_topk;
    if (main_keys > topk) main_keys = topk;
    if (main_keys < 1) main_keys = 1; /* one below 0 too */
    if (!extra_topk) return main_keys;
    if (extra_keys > extra_topk) extra_keys = extra_topk;
    if (extra_keys < 0) extra_keys = 0;
    return (main_keys + 63) / 64 * 64 + extra_keys;
}

static void set_up(int64_t b)
{
    memset(plan, PATTERN, sizeof plan), memset(before, PATTERN, sizeof before);
    HELD(&length, length_data, i32, 1, b);
    HELD(&extra_length, extra_data, i32, 1, b);
    args = FMLA_INIT(fmla_decode_plan_args);
    args.sparse = 1, args.s_q = 1, args.h_q = 128, args.topk = 2048, args.num_partitions = 4;
    args.topk_length = &length.tensor;
    args.plan = plan, args.plan_size = sizeof plan;
}

/* The plan of `args` has the bytes of a dense one over `lengths`. */
static void check_same(const char *label, int64_t b)
{
    fmla_decode_plan_args like = FMLA_INIT(fmla_decode_plan_args);
    size_t bytes = 0;
    HELD(&seqlens, seqlens_data, i32, 1, b);
    like.seqlens = &seqlens.tensor, like.s_q = like.h_q = like.h_kv = 1;
    like.num_partitions = args.num_partitions, like.plan = dense, like.plan_size = sizeof dense;
    CHECK(fmla_decode_plan_size(&args, &bytes) == FMLA_OK && fmla_decode_plan(&args) == FMLA_OK &&
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
        set_up(b);
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
    /* A list beyond 2^31: 2^25 blocks of each cache, in one partition. */
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    set_up(1);
    args.topk = args.extra_topk = INT32_MAX, args.topk_length = NULL, args.b = 1, args.num_partitions = 1;
    CHECK(fmla_decode_plan(&args) == FMLA_OK && fmla_plan_describe(plan, sizeof plan, &view) == FMLA_OK &&
              view.partitions[3] == 1 << 26 && view.payload == (1 << 26) + 10,
          "2^32 keys: %d blocks, payload %lld", view.partitions[3], (long long)view.payload);
}

static void check_partitions(int64_t s_q, int64_t h_q, int32_t workers, int32_t expected)
{
    int32_t count = -1;
    set_up(1);
    args.s_q = s_q, args.h_q = h_q, args.num_workers = workers, args.num_partitions = 0;
    CHECK(fmla_decode_plan_partitions(&args, &count) == FMLA_OK && count == expected,
          "s_q %d, h_q %d, %d workers: %d partitions, must be %d", (int)s_q, (int)h_q, workers, count,
          expected);
}

static void test_partitions(void)
{
    check_partitions(1, 128, 132, 66);
    check_partitions(2, 128, 132, 33);
    check_partitions(1, 64, 132, 132);
    check_partitions(1, 65, 132, 66);
    check_partitions(3, 16, 132,
                     44); /* as many as for 64 heads: tokens share no tile, unlike in dense decode */
    check_partitions(5, 129, 132, 8);
    check_partitions(100, 128, 132, 1);
}

/* ---- Arguments ------------------------------------------------------------------------------- */

static void check_failed(const char *label, fmla_status status, const char *argument, const char *words)
{
    size_t bytes = 12345;
    check_rejected(label, fmla_decode_plan_size(&args, &bytes), status, op, argument, words);
    CHECK(bytes == 12345, "%s: a failed question answered %zu", label, bytes);
    check_rejected(label, fmla_decode_plan(&args), status, op, argument, words);
    CHECK(!memcmp(plan, before, sizeof plan), "%s: a failed call wrote to the plan", label);
}

/* One thing of a good call is changed. */
#define REJECTED(argument, words, ...)                                                                       \
    do {                                                                                                     \
        set_up(3);                                                                                           \
        __VA_ARGS__;                                                                                         \
        check_failed(#__VA_ARGS__, FMLA_INVALID_ARGUMENT, argument, words);                                  \
    } while (0)

static void test_options(void)
{
    REJECTED("sparse", "2|[0, 1]", args.sparse = 2);
    REJECTED("sparse", "-1|[0, 1]", args.sparse = -1);
    REJECTED("seqlens", "NULL|sparse", HELD(&seqlens, seqlens_data, i32, 1, 3);
             args.seqlens = &seqlens.tensor);
    REJECTED("topk", "-1", args.topk = -1);
    REJECTED("topk", "2147483648|2147483647", args.topk = INT64_C(1) << 31);
    REJECTED("extra_topk", "-1", args.extra_topk = -1);
    REJECTED("extra_topk", "9223372036854775807", args.extra_topk = INT64_MAX);
    REJECTED("capacity", "64", args.capacity = 64);
    REJECTED("h_kv", "2|[0, 1]", args.h_kv = 2);
    REJECTED("b", "-1", args.b = -1);
    REJECTED("b", "2147483647|2147418110", args.topk_length = NULL; args.b = INT32_MAX);
    REJECTED("topk_length", "b|3|4 as in b", args.b = 4);
    REJECTED("extra_topk_length", "4|3|topk_length", extra_length.shape[0] = 4;
             args.extra_topk_length = &extra_length.tensor);
    REJECTED("extra_topk_length", "cuda:3|cpu", args.extra_topk_length = &extra_length.tensor;
             extra_length.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 3});
    REJECTED("topk_length", "b|2147483648", length.shape[0] = INT64_C(1) << 31);
    REJECTED("s_q", "0|1", args.s_q = 0);
    REJECTED("s_q", "h_q|4294967296", args.s_q = args.h_q = 65536);
    REJECTED("b", "3|[0, 0]", args.sparse = 0; args.topk_length = NULL; args.topk = 0; args.b = 3;
             args.seqlens = &length.tensor);
    REJECTED("topk", "2048|[0, 0]", args.sparse = 0; args.topk_length = NULL; args.seqlens = &length.tensor);
    REJECTED("extra_topk", "1|[0, 0]", args.sparse = 0; args.topk_length = NULL; args.topk = 0;
             args.extra_topk = 1; args.seqlens = &length.tensor);
    REJECTED("topk_length", "NULL|sparse", args.sparse = 0; args.seqlens = &length.tensor);
    REJECTED("seqlens", "NULL", args.sparse = 0);
    REJECTED("target", "-1", args.topk_length = NULL; args.b = 3;
             args.target = (fmla_device){FMLA_DEVICE_CUDA, -1});
    set_up(3);
    args.topk_length = NULL;
    args.b = 3;
    args.target = (fmla_device){FMLA_DEVICE_CUDA, 99};
    check_failed("a target that is not there", FMLA_UNSUPPORTED, "b", "cuda:99");
}

static void test_arguments(void)
{
    char words[160];
    static const struct argument tensors[] = {
        {"topk_length", &length, &args.topk_length, "int32", 1, 0},
        {"extra_topk_length", &extra_length, &args.extra_topk_length, "int32", 1, 0}};
    for (int i = 0; i < 2; i++)
        for (int fault = 0; fault < FAULTS; fault++) {
            set_up(3);
            args.extra_topk_length = &extra_length.tensor, args.extra_topk = 5;
            const char *what = spoil(&tensors[i], fault, words);
            if (!what) continue;
            size_t bytes;
            if (fault == FAULT_DATA_NULL || fault == FAULT_DATA_MISALIGNED ||
                fault == FAULT_OFFSET_MISALIGNED)
                CHECK(fmla_decode_plan_size(&args, &bytes) == FMLA_OK, "%s: %s", what, fmla_last_error());
            else
                check_failed(what, FMLA_INVALID_ARGUMENT, tensors[i].name, words);
            check_rejected(what, fmla_decode_plan(&args), FMLA_INVALID_ARGUMENT, op, tensors[i].name, words);
        }
    /* A caller from before there was sparse decode: what stands behind its struct is not looked at. */
    set_up(3);
    args.seqlens = &length.tensor, args.topk_length = NULL, args.h_kv = 1, args.topk = -1;
    args.struct_size = offsetof(fmla_decode_plan_args, sparse);
    CHECK(fmla_decode_plan(&args) == FMLA_OK, "an older struct: %s", fmla_last_error());
}

int main(void)
{
    test_lengths();
    test_partitions();
    test_options();
    test_arguments();
    return check_done("test_plan_sparse");
}
