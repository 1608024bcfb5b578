/* SPDX-License-Identifier: MIT
 *
 * Tests every argument that fmla_decode_plan, its queries and fmla_plan_describe must reject, and unusual
 * ones that they must accept.
 */
#include "plans.h"

enum { B = 3, PARTITIONS = MADE_PARTITIONS, PLAN = PLAN_HEADER + 32 * PARTITIONS + 4 * (B + 1) };

static void set_up(void);
static struct good_call call = {.operation = OP_DECODE_PLAN, .elsewhere = "seqlens", .set_up = set_up};

#define ARGS    (*(fmla_decode_plan_args *)call.args)
#define T(name) (call.held[TENSOR_decode_plan_##name])

static const fmla_device gpu = {FMLA_DEVICE_CUDA, 99};

static void set_up_in(bool tables)
{
    begin_making(tables, B);
    PUT(T(seqlens), int32_t, 100, 0, 7000);
    ARGS.h_kv = 1;
}

SET_UP(set_up, set_up_in(false))
SET_UP(set_up_made_tables, set_up_in(true))

static void test_refused(void)
{
    refuse_by_descriptor(&call);
    REFUSED(call, "s_q", "h_q|4294967296", ARGS.s_q = ARGS.h_q = 65536);
    REFUSED(call, "h_q", "128|multiple|3", ARGS.h_kv = 3);
    REFUSED(call, "h_q", "128|multiple|256", ARGS.h_kv = 256);
    REFUSED(call, "seqlens", "b (|1099511627776", T(seqlens).shape[0] = INT64_C(1) << 40);
    REFUSED_HERE(call, "target", "cuda:99|num_partitions", ARGS.target = gpu, ARGS.num_partitions = 0);
}

/* Checks that the plan has the queried bytes and number of partitions. */
static void check_plan(const char *label, int64_t b)
{
    struct answer answer = {0};
    check_taken(&call, label);
    for (int question = ASK_BYTES; question <= ASK_KERNEL; question++)
        CHECK(!described_ask(OP_DECODE_PLAN, question, &ARGS, &answer), "%s: %s", label, fmla_last_error());
    CHECK_EQ(answer.bytes, PLAN_HEADER + 32 * (int64_t)answer.count[0] + 4 * (b + 1));
    int64_t behind = 0;
    for (size_t i = answer.bytes; i < SCRATCH_WATCHED; i++) behind += (unsigned char)scratch[i] != PATTERN;
    CHECK(behind == 0, "%s: wrote %" PRId64 " bytes behind the plan", label, behind);
    CHECK((unsigned char)scratch[0] != PATTERN, "%s: wrote no plan", label);
}

static void test_taken(void)
{
    take_by_descriptor(&call);
    set_up(), check_plan("as it is", B);
    CHECK_EQ(ARGS.num_partitions, PARTITIONS);
    set_up(), resize(&call, DIM_b, 0), check_plan("b = 0", 0);
    set_up(), ARGS.target = (fmla_device){FMLA_DEVICE_CUDA, 0}, ARGS.num_workers = 4, ARGS.num_partitions = 0;
    check_plan("planned on the host for a GPU", B);
}

/* ---- Describing -------------------------------------------------------------------------------------- */

static union {
    fmla_plan_view view;
    char bytes[sizeof(fmla_plan_view) + 64];
} shown;

static void check_no_plan(const char *label, const void *bytes, size_t size, fmla_status expected,
                          const char *words)
{
    memset(&shown, 0, sizeof shown);
    shown.view = FMLA_INIT(fmla_plan_view);
    const fmla_status status = fmla_plan_describe(bytes, size, &shown.view);
    CHECK(status == expected, "%s, %zu bytes: %s (%s)", label, size, fmla_status_name(status),
          fmla_last_error());
    CHECK(!strncmp(fmla_last_error(), "plan_describe: plan", 19) && has_words(fmla_last_error(), words),
          "%s: message is \"%s\", must hold \"%s\"", label, fmla_last_error(), words);
    CHECK(!shown.view.partitions && !shown.view.num_splits && !shown.view.batch && !shown.view.payload,
          "%s: a failed call described something", label);
}

static void check_view_rejected(const char *label, size_t size, fmla_status expected)
{
    memset(&shown, 0, sizeof shown);
    shown.view.struct_size = size;
    if (expected == FMLA_UNSUPPORTED) shown.bytes[sizeof shown - 1] = 1;
    check_rejected(label, fmla_plan_describe(scratch, PLAN, &shown.view), expected, "plan_describe",
                   "struct_size", "");
    CHECK(!shown.view.partitions, "%s: a failed call described something", label);
}

static void test_describe(void)
{
    static char before[PLAN];
    char *const plan = scratch;
    set_up();
    CHECK(fmla_decode_plan(&ARGS) == FMLA_OK, "%s", fmla_last_error());
    memcpy(before, plan, PLAN);
    check_no_plan("NULL", NULL, 0, FMLA_BUFFER_TOO_SMALL, "0");
    check_no_plan("NULL with a size", NULL, PLAN, FMLA_INVALID_ARGUMENT, "NULL");
    check_no_plan("misaligned", plan + 8, PLAN, FMLA_INVALID_ARGUMENT, "aligned|16");
    for (size_t cut = 0; cut < PLAN; cut++) {
        /* Copies exactly that size, so that sanitizers detect reads past it. */
        char *copy = aligned_alloc(16, (cut + 15) / 16 * 16 + 16);
        if (!copy) abort();
        memcpy(copy, plan, cut);
        check_no_plan("cut off", copy, cut, FMLA_BUFFER_TOO_SMALL,
                      cut < 32 ? "at least 32 bytes" : "at least 176 bytes");
        free(copy);
    }
    /* The header: magic, int32 partitions, int64 requests. Each is wrong in turn, including extreme
     * values. */
    plan[1] ^= 1;
    check_no_plan("another magic", plan, PLAN, FMLA_INVALID_ARGUMENT, "");
    memcpy(plan, before, PLAN);
    static const struct {
        int32_t partitions;
        int64_t requests;
        fmla_status status; /* a header valid for a larger buffer is a truncated plan */
        const char *words;
    } lies[] = {
        {0, B, FMLA_INVALID_ARGUMENT, "0"},
        {-1, B, FMLA_INVALID_ARGUMENT, "-1"},
        {INT32_MIN, B, FMLA_INVALID_ARGUMENT, "-2147483648"},
        {INT32_MAX, B, FMLA_INVALID_ARGUMENT, "2147483647"},
        {65537, B, FMLA_INVALID_ARGUMENT, "65537"},
        {PARTITIONS + 1, B, FMLA_BUFFER_TOO_SMALL, "at least 208 bytes"},
        {65536, B, FMLA_BUFFER_TOO_SMALL, "at least 2097200 bytes"},
        {PARTITIONS, -1, FMLA_INVALID_ARGUMENT, "-1"},
        {PARTITIONS, INT64_MIN, FMLA_INVALID_ARGUMENT, "-9223372036854775808"},
        {PARTITIONS, INT64_MAX, FMLA_INVALID_ARGUMENT, "9223372036854775807"},
        {PARTITIONS, INT64_C(1) << 62, FMLA_INVALID_ARGUMENT,
         "4611686018427387904"}, /* 4 · 2^62 wraps to 0 */
        {PARTITIONS, (INT64_C(1) << 62) + B, FMLA_INVALID_ARGUMENT, ""},
        {PARTITIONS, INT32_MAX, FMLA_INVALID_ARGUMENT, "2147483647"},
        {PARTITIONS, B + 1, FMLA_BUFFER_TOO_SMALL, "at least 180 bytes"},
        {PARTITIONS, INT32_MAX - 65537, FMLA_BUFFER_TOO_SMALL, "at least 8589672604 bytes"},
    };
    for (size_t k = 0; k < sizeof lies / sizeof lies[0]; k++) {
        memcpy(plan, before, PLAN);
        memcpy(plan + 4, &lies[k].partitions, 4), memcpy(plan + 8, &lies[k].requests, 8);
        check_no_plan("a header that lies", plan, PLAN, lies[k].status, lies[k].words);
    }
    memcpy(plan, before, PLAN);

    check_rejected("NULL view", fmla_plan_describe(plan, PLAN, NULL), FMLA_INVALID_ARGUMENT, "plan_describe",
                   "view", "NULL");
    check_view_rejected("view of size 0", 0, FMLA_INVALID_ARGUMENT);
    check_view_rejected("view too small", sizeof(fmla_plan_view) - 8, FMLA_INVALID_ARGUMENT);
    check_view_rejected("view with a tail", sizeof shown, FMLA_UNSUPPORTED);
    memset(&shown, 0, sizeof shown);
    shown.view.struct_size = sizeof shown;
    CHECK(fmla_plan_describe(plan, PLAN, &shown.view) == FMLA_OK, "%s", fmla_last_error());
    CHECK_EQ(shown.view.batch, B);
    CHECK_EQ(shown.view.num_partitions, PARTITIONS);
    CHECK((const char *)shown.view.partitions == plan + 32 &&
              (const char *)shown.view.num_splits == plan + 32 + 32 * PARTITIONS,
          "the view points to %p and %p", (const void *)shown.view.partitions,
          (const void *)shown.view.num_splits);
    CHECK(!memcmp(plan, before, PLAN), "%s", "describing changed the plan");
}

int main(void)
{
    plan_for(&call, "seqlens", 0, 0);
    test_refused();
    test_taken();
    test_describe();
    test_tables_made(set_up_made_tables, B);
    return check_done("test_plan_errors");
}
