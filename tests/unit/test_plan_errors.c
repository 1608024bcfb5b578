/* SPDX-License-Identifier: MIT
 *
 * Every argument that fmla_decode_plan, fmla_decode_plan_size and fmla_plan_describe must reject.
 */
#include "arguments.h"

enum { B = 3, PARTITIONS = 4, PLAN = 32 + 32 * PARTITIONS + 4 * (B + 1), PATTERN = 0xc3 };

static const char op[] = "decode_plan";

static int32_t seqlens_data[B + 1];
static _Alignas(16) char plan[PLAN + 64], before[PLAN + 64];
static struct held seqlens;
static union {
    fmla_decode_plan_args args;
    char bytes[sizeof(fmla_decode_plan_args) + 64];
} call;
#define ARGS call.args

static const struct argument seqlens_argument = {"seqlens", &seqlens, &ARGS.seqlens, "int32", 0, 0};

static void set_up(void)
{
    static const int32_t lengths[B] = {100, 0, 7000};
    memcpy(seqlens_data, lengths, sizeof lengths);
    memset(plan, PATTERN, sizeof plan), memset(before, PATTERN, sizeof before);
    HELD(&seqlens, seqlens_data, i32, 1, B);
    memset(&call, 0, sizeof call);
    ARGS = FMLA_INIT(fmla_decode_plan_args);
    ARGS.seqlens = &seqlens.tensor, ARGS.s_q = 1, ARGS.h_q = 128, ARGS.h_kv = 1;
    ARGS.num_partitions = PARTITIONS, ARGS.plan = plan, ARGS.plan_size = PLAN;
}

static void check_failed(const char *label, fmla_status status, const char *argument, const char *words,
                         int only_call)
{
    if (!only_call) {
        size_t bytes = 12345;
        int32_t count = 54321;
        check_rejected(label, fmla_decode_plan_size(&ARGS, &bytes), status, op, argument, words);
        CHECK(bytes == 12345, "%s: a failed question answered %zu", label, bytes);
        check_rejected(label, fmla_decode_plan_partitions(&ARGS, &count), status, op, argument, words);
        CHECK(count == 54321, "%s: a failed question answered %d", label, count);
    }
    check_rejected(label, fmla_decode_plan(&ARGS), status, op, argument, words);
    CHECK(!memcmp(plan, before, sizeof plan), "%s: a failed call wrote to the plan", label);
}

static void check_accepted(const char *label)
{
    size_t bytes = 0;
    int32_t count = 0;
    CHECK(fmla_decode_plan_size(&ARGS, &bytes) == FMLA_OK && bytes <= ARGS.plan_size, "%s: size %zu: %s",
          label, bytes, fmla_last_error());
    CHECK(fmla_decode_plan_partitions(&ARGS, &count) == FMLA_OK &&
              bytes == 32 + 32 * (size_t)count + 4 * (size_t)(seqlens.shape[0] + 1),
          "%s: %d partitions, %zu bytes: %s", label, count, bytes, fmla_last_error());
    CHECK(fmla_decode_plan(&ARGS) == FMLA_OK, "%s: %s", label, fmla_last_error());
    CHECK(!memcmp(plan + bytes, before + bytes, sizeof plan - bytes), "%s: wrote behind the plan", label);
    CHECK(memcmp(plan, before, 16) != 0, "%s: wrote no plan", label);
}

#define MUTATION(name, ...)                                                                                  \
    static void name(void)                                                                                   \
    {                                                                                                        \
        __VA_ARGS__;                                                                                         \
    }

MUTATION(size_0, ARGS.struct_size = 0)
MUTATION(size_1, ARGS.struct_size = 1)
MUTATION(size_less, ARGS.struct_size = sizeof ARGS - 8)
MUTATION(size_tail, ARGS.struct_size = sizeof call; call.bytes[sizeof call - 1] = 1)
MUTATION(s_q_0, ARGS.s_q = 0)
MUTATION(s_q_least, ARGS.s_q = INT64_MIN)
MUTATION(s_q_most, ARGS.s_q = INT64_MAX)
MUTATION(h_q_0, ARGS.h_q = 0)
MUTATION(h_q_most, ARGS.h_q = INT64_MAX)
MUTATION(rows_many, ARGS.s_q = 65536; ARGS.h_q = 65536)
MUTATION(h_kv_0, ARGS.h_kv = 0)
MUTATION(h_kv_minus, ARGS.h_kv = -1)
MUTATION(h_kv_3, ARGS.h_kv = 3)
MUTATION(h_kv_more, ARGS.h_kv = 256)
MUTATION(capacity_minus, ARGS.capacity = -1)
MUTATION(workers_minus, ARGS.num_workers = -1)
MUTATION(partitions_minus, ARGS.num_partitions = -1)
MUTATION(partitions_many, ARGS.num_partitions = 65537)
MUTATION(batch_many, HELD(&seqlens, seqlens_data, i32, 1, INT64_C(1) << 40))
MUTATION(target_unknown, ARGS.target.device_type = 42)
MUTATION(target_id, ARGS.target = (fmla_device){FMLA_DEVICE_CPU, -1})
MUTATION(target_cuda, ARGS.target = (fmla_device){FMLA_DEVICE_CUDA, 99}; ARGS.num_partitions = 0)
MUTATION(on_cuda, seqlens.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 99})

static const struct mutation mutations[] = {
    {"struct_size 0", size_0, FMLA_INVALID_ARGUMENT, "struct_size", "0|must be"},
    {"struct_size 1", size_1, FMLA_INVALID_ARGUMENT, "struct_size", "1|must be"},
    {"struct_size too small", size_less, FMLA_INVALID_ARGUMENT, "struct_size", "must be"},
    {"struct_size with a tail", size_tail, FMLA_UNSUPPORTED, "struct_size", "0.1.0"},
    {"s_q 0", s_q_0, FMLA_INVALID_ARGUMENT, "s_q", "0|1"},
    {"s_q least", s_q_least, FMLA_INVALID_ARGUMENT, "s_q", "-9223372036854775808|1"},
    {"s_q most", s_q_most, FMLA_INVALID_ARGUMENT, "s_q", "9223372036854775807"},
    {"h_q 0", h_q_0, FMLA_INVALID_ARGUMENT, "h_q", "0|1"},
    {"h_q most", h_q_most, FMLA_INVALID_ARGUMENT, "h_q", "9223372036854775807"},
    {"s_q · h_q 2^32", rows_many, FMLA_INVALID_ARGUMENT, "s_q", "h_q|4294967296"},
    {"h_kv 0", h_kv_0, FMLA_INVALID_ARGUMENT, "h_kv", "0|1"},
    {"h_kv -1", h_kv_minus, FMLA_INVALID_ARGUMENT, "h_kv", "-1|1"},
    {"h_kv divides not", h_kv_3, FMLA_INVALID_ARGUMENT, "h_q", "128|multiple|3"},
    {"h_kv above h_q", h_kv_more, FMLA_INVALID_ARGUMENT, "h_q", "128|multiple|256"},
    {"capacity -1", capacity_minus, FMLA_INVALID_ARGUMENT, "capacity", "-1|0"},
    {"num_workers -1", workers_minus, FMLA_INVALID_ARGUMENT, "num_workers", "-1|0"},
    {"num_partitions -1", partitions_minus, FMLA_INVALID_ARGUMENT, "num_partitions", "-1|65536"},
    {"num_partitions 65537", partitions_many, FMLA_INVALID_ARGUMENT, "num_partitions", "65537|65536"},
    {"b 2^40", batch_many, FMLA_INVALID_ARGUMENT, "seqlens", "b|1099511627776"},
    {"unknown target", target_unknown, FMLA_INVALID_ARGUMENT, "target", "42"},
    {"target id -1", target_id, FMLA_INVALID_ARGUMENT, "target", "-1"},
    {"target whose SMs are unknown", target_cuda, FMLA_UNSUPPORTED, "target", "cuda:99|num_partitions"},
    {"seqlens on cuda", on_cuda, FMLA_UNSUPPORTED, "seqlens", "device is cuda:99: "},
};

MUTATION(plan_null, ARGS.plan = NULL)
MUTATION(plan_short, ARGS.plan_size = PLAN - 1)
MUTATION(plan_none, ARGS.plan = NULL; ARGS.plan_size = 0)
MUTATION(plan_odd, ARGS.plan = plan + 8)

static const struct mutation call_mutations[] = {
    {"plan NULL", plan_null, FMLA_INVALID_ARGUMENT, "plan", "NULL"},
    {"plan a byte too small", plan_short, FMLA_BUFFER_TOO_SMALL, "plan_size", "175|at least 176 bytes"},
    {"no plan", plan_none, FMLA_BUFFER_TOO_SMALL, "plan_size", "0|at least 176 bytes"},
    {"plan misaligned", plan_odd, FMLA_INVALID_ARGUMENT, "plan", "aligned|16"},
};

static void test_plan(void)
{
    char words[160];
    for (int fault = 0; fault < FAULTS; fault++) {
        set_up();
        const char *what = spoil(&seqlens_argument, fault, words);
        if (what)
            check_failed(what, FMLA_INVALID_ARGUMENT, "seqlens", words,
                         fault == FAULT_DATA_NULL || fault == FAULT_DATA_MISALIGNED ||
                             fault == FAULT_OFFSET_MISALIGNED);
    }
    for (size_t k = 0; k < sizeof mutations / sizeof mutations[0]; k++) {
        set_up();
        mutations[k].apply();
        check_failed(mutations[k].label, mutations[k].status, mutations[k].argument, mutations[k].words, 0);
    }
    for (size_t k = 0; k < sizeof call_mutations / sizeof call_mutations[0]; k++) {
        set_up();
        call_mutations[k].apply();
        check_failed(call_mutations[k].label, call_mutations[k].status, call_mutations[k].argument,
                     call_mutations[k].words, 1);
    }
    size_t bytes = 0;
    check_rejected("NULL args", fmla_decode_plan(NULL), FMLA_INVALID_ARGUMENT, op, "args", "NULL");
    check_rejected("NULL args", fmla_decode_plan_size(NULL, &bytes), FMLA_INVALID_ARGUMENT, op, "args",
                   "NULL");
    set_up();
    check_rejected("NULL bytes", fmla_decode_plan_size(&ARGS, NULL), FMLA_INVALID_ARGUMENT, op, "bytes",
                   "NULL");
    int32_t count = 0;
    check_rejected("NULL args", fmla_decode_plan_partitions(NULL, &count), FMLA_INVALID_ARGUMENT, op, "args",
                   "NULL");
    check_rejected("NULL count", fmla_decode_plan_partitions(&ARGS, NULL), FMLA_INVALID_ARGUMENT, op, "count",
                   "NULL");

    /* The size is asked for before there is any data. */
    set_up();
    seqlens.tensor.data = NULL, ARGS.plan = NULL, ARGS.plan_size = 0;
    CHECK(fmla_decode_plan_size(&ARGS, &bytes) == FMLA_OK && bytes == PLAN, "without data: %zu bytes: %s",
          bytes, fmla_last_error());
    set_up();
    check_accepted("as it is");
    set_up();
    ARGS.struct_size = sizeof call;
    check_accepted("a larger struct, zero behind");
    set_up();
    HELD(&seqlens, NULL, i32, 1, 0);
    check_accepted("b = 0");
    set_up();
    seqlens.tensor.device = (fmla_device){FMLA_DEVICE_CUDA_HOST, 0};
    check_accepted("pinned host memory");
    set_up();
    ARGS.target = (fmla_device){FMLA_DEVICE_CUDA, 0}, ARGS.num_workers = 4, ARGS.num_partitions = 0;
    check_accepted("planned on the host for a GPU");
}

/* ---- Tables ------------------------------------------------------------------------------------------ */

enum { FIELDS = FMLA_PARTITION_FIELDS, SPARE = 4 /* behind each table, to be left alone */ };

static _Alignas(16) int32_t rows_data[PARTITIONS * FIELDS + SPARE], splits_data[B + 1 + SPARE];
static _Alignas(16) int32_t rows_before[PARTITIONS * FIELDS + SPARE], splits_before[B + 1 + SPARE];
static struct held rows, splits;

static const struct argument tables[] = {{"partitions", &rows, &ARGS.partitions, "int32", 0, 1},
                                         {"num_splits", &splits, &ARGS.num_splits, "int32", 0, 1}};

static void set_up_tables(void)
{
    set_up();
    memset(rows_data, PATTERN, sizeof rows_data), memset(splits_data, PATTERN, sizeof splits_data);
    memcpy(rows_before, rows_data, sizeof rows_data), memcpy(splits_before, splits_data, sizeof splits_data);
    HELD(&rows, rows_data, i32, 2, PARTITIONS, FIELDS);
    HELD(&splits, splits_data, i32, 1, B + 1);
    ARGS.num_partitions = 0, ARGS.plan = NULL, ARGS.plan_size = 0;
    ARGS.partitions = &rows.tensor, ARGS.num_splits = &splits.tensor;
}

MUTATION(tables_and_plan, ARGS.plan = plan; ARGS.plan_size = PLAN)
MUTATION(rows_none, HELD(&rows, NULL, i32, 2, 0, FIELDS))
MUTATION(rows_65537, rows.shape[0] = 65537)
MUTATION(fields_7, HELD(&rows, rows_data, i32, 2, PARTITIONS, 7))
MUTATION(rows_apart, rows.shape[0] = 2; rows.strides[0] = 2 * FIELDS)
MUTATION(rows_off_8, rows.tensor.data = rows_data + 2)
MUTATION(splits_less, splits.shape[0] = B)
MUTATION(splits_more, splits.shape[0] = B + 2)
MUTATION(told_others, ARGS.num_partitions = PARTITIONS - 1)
MUTATION(rows_on_cuda, rows.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 3})
MUTATION(splits_on_cuda, splits.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 3})

static const struct mutation table_mutations[] = {
    {"tables and a plan", tables_and_plan, FMLA_INVALID_ARGUMENT, "plan", "NULL|partitions"},
    {"no partition", rows_none, FMLA_INVALID_ARGUMENT, "partitions", "rows|0|[1, 65536]"},
    {"65537 partitions", rows_65537, FMLA_INVALID_ARGUMENT, "partitions", "rows|65537|[1, 65536]"},
    {"7 fields", fields_7, FMLA_INVALID_ARGUMENT, "partitions", "fields|7|8"},
    {"rows apart", rows_apart, FMLA_INVALID_ARGUMENT, "partitions", "stride|0|16|8"},
    {"rows off 16 bytes", rows_off_8, FMLA_INVALID_ARGUMENT, "partitions", "aligned|16"},
    {"b of num_splits", splits_less, FMLA_INVALID_ARGUMENT, "num_splits", "b + 1|3|4|seqlens"},
    {"b + 2 of num_splits", splits_more, FMLA_INVALID_ARGUMENT, "num_splits", "b + 1|5|4|seqlens"},
    {"another number of partitions", told_others, FMLA_INVALID_ARGUMENT, "num_partitions", "3|0|4"},
    {"partitions on cuda:3", rows_on_cuda, FMLA_INVALID_ARGUMENT, "partitions", "cuda:3|cpu"},
    {"num_splits on cuda:3", splits_on_cuda, FMLA_INVALID_ARGUMENT, "num_splits", "cuda:3|cpu"},
};

/* Sizes are asked for without tables, so only the call may fail. */
static void check_tables_failed(const char *label, fmla_status status, const char *argument,
                                const char *words)
{
    size_t bytes = 0;
    int32_t count = 0;
    CHECK(fmla_decode_plan_size(&ARGS, &bytes) == FMLA_OK &&
              fmla_decode_plan_partitions(&ARGS, &count) == FMLA_OK,
          "%s: %s", label, fmla_last_error());
    check_failed(label, status, argument, words, 1);
    CHECK(!memcmp(rows_data, rows_before, sizeof rows_data) &&
              !memcmp(splits_data, splits_before, sizeof splits_data),
          "%s: a failed call wrote to the tables", label);
}

/* The tables are those of the plan with as many partitions. */
static void check_tables_accepted(const char *label, int64_t requests, int32_t partitions)
{
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    CHECK(fmla_decode_plan(&ARGS) == FMLA_OK, "%s: %s", label, fmla_last_error());
    ARGS.partitions = ARGS.num_splits = NULL;
    ARGS.num_partitions = partitions, ARGS.plan = plan, ARGS.plan_size = PLAN;
    CHECK(fmla_decode_plan(&ARGS) == FMLA_OK && fmla_plan_describe(plan, PLAN, &view) == FMLA_OK, "%s: %s",
          label, fmla_last_error());
    const size_t of_rows = (size_t)partitions * FIELDS, of_splits = (size_t)requests + 1;
    CHECK(!memcmp(rows_data, view.partitions, of_rows * 4) &&
              !memcmp(splits_data, view.num_splits, of_splits * 4),
          "%s: other tables than the plan's", label);
    CHECK(!memcmp(rows_data + of_rows, rows_before + of_rows, sizeof rows_data - of_rows * 4) &&
              !memcmp(splits_data + of_splits, splits_before + of_splits, sizeof splits_data - of_splits * 4),
          "%s: wrote behind the tables", label);
}

static void test_tables(void)
{
    char words[160];
    for (int i = 0; i < 2; i++)
        for (int fault = 0; fault < FAULTS; fault++) {
            set_up_tables();
            const char *what = spoil(&tables[i], fault, words);
            if (what) check_tables_failed(what, FMLA_INVALID_ARGUMENT, tables[i].name, words);
        }
    for (size_t k = 0; k < sizeof table_mutations / sizeof table_mutations[0]; k++) {
        const struct mutation *m = &table_mutations[k];
        set_up_tables();
        m->apply();
        check_tables_failed(m->label, m->status, m->argument, m->words);
    }
    for (int32_t partitions = 1; partitions <= PARTITIONS; partitions++) {
        set_up_tables();
        rows.shape[0] = partitions;
        if (partitions == 1) rows.strides[0] = INT64_MIN; /* never used */
        if (partitions % 2) ARGS.num_partitions = partitions;
        check_tables_accepted("tables", B, partitions);
    }
    set_up_tables();
    rows.tensor.strides = splits.tensor.strides = NULL;
    splits.tensor.byte_offset = 4, splits.tensor.data = (void *)((uintptr_t)splits_data - 4);
    check_tables_accepted("tables without strides, and one by an offset", B, PARTITIONS);
    set_up_tables();
    HELD(&seqlens, NULL, i32, 1, 0), HELD(&splits, splits_data, i32, 1, 1);
    check_tables_accepted("tables, b = 0", 0, PARTITIONS);
    /* Their rows say how many partitions there are, so nobody asks a GPU that is not there. */
    set_up_tables();
    target_cuda();
    check_tables_accepted("tables for a GPU", B, PARTITIONS);
    /* A caller from before there were tables: what stands behind its struct is not looked at. */
    set_up();
    ARGS.struct_size = offsetof(fmla_decode_plan_args, partitions);
    memset(call.bytes + ARGS.struct_size, PATTERN, sizeof call - ARGS.struct_size);
    check_accepted("an older struct");
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
    check_rejected(label, fmla_plan_describe(plan, PLAN, &shown.view), expected, "plan_describe",
                   "struct_size", "");
    CHECK(!shown.view.partitions, "%s: a failed call described something", label);
}

static void test_describe(void)
{
    set_up();
    CHECK(fmla_decode_plan(&ARGS) == FMLA_OK, "%s", fmla_last_error());
    memcpy(before, plan, sizeof plan);
    check_no_plan("NULL", NULL, 0, FMLA_BUFFER_TOO_SMALL, "0");
    check_no_plan("NULL with a size", NULL, PLAN, FMLA_INVALID_ARGUMENT, "NULL");
    check_no_plan("misaligned", plan + 8, PLAN, FMLA_INVALID_ARGUMENT, "aligned|16");
    for (size_t cut = 0; cut < PLAN; cut++) {
        /* A copy of just that size: reading past it shows to the sanitizer. */
        char *copy = aligned_alloc(16, (cut + 15) / 16 * 16 + 16);
        if (!copy) abort();
        memcpy(copy, plan, cut);
        check_no_plan("cut off", copy, cut, FMLA_BUFFER_TOO_SMALL,
                      cut < 32 ? "at least 32 bytes" : "at least 176 bytes");
        free(copy);
    }
    /* The header: magic, int32 partitions, int64 requests. Each lie in turn, the extreme ones included. */
    plan[1] ^= 1;
    check_no_plan("another magic", plan, PLAN, FMLA_INVALID_ARGUMENT, "");
    memcpy(plan, before, sizeof plan);
    static const struct {
        int32_t partitions;
        int64_t requests;
        fmla_status status; /* what could be true of a larger buffer is a plan cut off */
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
        memcpy(plan, before, sizeof plan);
        memcpy(plan + 4, &lies[k].partitions, 4), memcpy(plan + 8, &lies[k].requests, 8);
        check_no_plan("a header that lies", plan, PLAN, lies[k].status, lies[k].words);
    }
    memcpy(plan, before, sizeof plan);

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
    CHECK(!memcmp(plan, before, sizeof plan), "%s", "describing changed the plan");
}

int main(void)
{
    test_plan();
    test_tables();
    test_describe();
    return check_done("test_plan_errors");
}
