/* SPDX-License-Identifier: MIT
 *
 * Plans, in one buffer or in tables: what dense and sparse decode, which read them, must refuse and take alike, and what both
 * operations that make them.
 */
#ifndef FMLA_PLANS_H
#define FMLA_PLANS_H

#include "random.h"
#include "refusals.h"

enum {
    MADE_PARTITIONS = 4,
    MOST_ROWS = 8,
    FIELDS = FMLA_PARTITION_FIELDS,
    PLAN_HEADER = 32,
    MOST_PLAN = 4096
};

/* The call that the plan is for, and numbers of its tensors. */
static struct planned {
    struct good_call *call;
    int rows, splits, lengths;
    const char *bound_by; /* the tensor that sets b */
    int32_t most[2];      /* of the lengths of two requests */
} planned;

static inline void plan_for(struct good_call *good, const char *lengths, int32_t most_0, int32_t most_1)
{
    const enum operation operation = good->operation;
    planned = (struct planned){good,
                               described_index(operation, "partitions"),
                               described_index(operation, "num_splits"),
                               described_index(operation, lengths),
                               described_tensor(operation, 0)->name,
                               {most_0, most_1}};
}

static _Alignas(64) char plan_data[MOST_PLAN], other_plan[MOST_PLAN];
static size_t plan_bytes, other_plan_bytes;

static inline void give_plan(void *plan, size_t bytes)
{
    *(void **)option(planned.call, "plan") = plan;
    *(size_t *)option(planned.call, "plan_size") = bytes;
}

/* Writes a plan for a call of so many requests into MOST_PLAN bytes. */
static inline void make_plan(int64_t requests, int32_t partitions, char *plan, size_t *bytes)
{
    static int32_t lengths[8] = {20, 33, 1, 0, 70};
    const enum operation planner =
        planned.call->operation == OP_SPARSE_DECODE ? OP_SPARSE_PLAN : OP_DECODE_PLAN;
    _Alignas(16) char args[512] = {0};
    struct held held;
    struct answer answer = {0};
    HELD(&held, lengths, i32, 1, requests);
    memcpy(args, &descriptors[planner].size, sizeof(size_t));
    for (const struct member *m = descriptors[planner].members; m->name; m++)
        if (described_wide(m) && described_wide(m) != DIM_b)
            memcpy(args + m->offset, &good_layout.size[described_wide(m)], sizeof(int64_t));
    *(const fmla_tensor **)(void *)(args + described_tensor(planner, 0)->offset) = &held.tensor;
    *(int32_t *)option_at(planner, args, "num_partitions") = partitions;
    *(void **)option_at(planner, args, "plan") = plan;
    *(size_t *)option_at(planner, args, "plan_size") = MOST_PLAN;
    CHECK_OK(described_ask(planner, ASK_BYTES, args, &answer));
    CHECK_OK(described_run(planner, args));
    *bytes = answer.bytes;
}

static inline void make_plans(void)
{
    make_plan(2, ROWS, plan_data, &plan_bytes);
    make_plan(5, ROWS, other_plan, &other_plan_bytes);
}

/* ---- In one buffer --------------------------------------------------------------------------- */

static inline void plan_off_by(size_t bytes)
{
    memmove(other_plan + bytes, plan_data, plan_bytes);
    give_plan(other_plan + bytes, plan_bytes);
}

static inline void refuse_plans(void)
{
    struct good_call *const good = planned.call;
    make_plans();
    REFUSED(*good, "plan", "fmla_decode_plan", give_plan(memset(scratch, 7, MOST_PLAN), MOST_PLAN));
    REFUSED(*good, "plan", "5|2", give_plan(other_plan, other_plan_bytes));
    REFUSED(*good, "plan", "aligned|16", plan_off_by(4));
    REFUSED(*good, "num_partitions", "is 2,|0|3", give_plan(plan_data, plan_bytes),
            put_int(planned.call, "num_partitions", 2));
    REFUSED(*good, "plan", "-1", give_plan(plan_data, plan_bytes), memset(plan_data + 4, 255, 4));
    /* Truncated at every length, from 0 on. */
    make_plans();
    for (size_t cut = 0; cut < plan_bytes; cut++)
        REFUSED_AS(*good, FMLA_BUFFER_TOO_SMALL, false, "plan_size",
                   cut < PLAN_HEADER ? "32 bytes" : "at least", give_plan(plan_data, cut));
}

/* A plan with arbitrary rows after a valid header, or made for other lengths, may give wrong values but
 * must not lead outside: workspace and plan have exactly the queried sizes, and the ends of the outputs
 * are watched. */
static inline void take_damaged_plans(void)
{
    static const int32_t extremes[] = {INT32_MIN, -1, 0, 1, 2, 3, 1 << 26, INT32_MAX};
    struct good_call *const good = planned.call;
    struct random_state random = {4711};
    for (int n = 0; n < 400; n++) {
        const int32_t count = 1 + n % 4;
        const size_t of_rows = (size_t)count * FIELDS, fields = of_rows + 3;
        make_plan(2, count, plan_data, &plan_bytes);
        int32_t *const damaged = exactly(plan_bytes), *const rows = exactly(of_rows * 4),
                       *const splits = exactly(3 * sizeof *splits);
        memcpy(damaged, plan_data, plan_bytes);
        int32_t *const tables = damaged + PLAN_HEADER / 4;
        for (int64_t k = random_between(&random, 0, 12); k > 0; k--)
            tables[random_between(&random, 0, (int64_t)fields - 1)] = extremes[random_between(&random, 0, 7)];
        memcpy(rows, tables, of_rows * 4), memcpy(splits, tables + of_rows, 3 * sizeof *splits);
        good->set_up();
        PUT(good->held[planned.lengths], int32_t, (int32_t)random_between(&random, 0, planned.most[0]),
            (int32_t)random_between(&random, 0, planned.most[1]));
        give_plan(damaged, plan_bytes);
        check_taken(good, "a damaged plan");
        CHECK(!count_outputs(good, true), "damaged plan %d: written past the end", n);
        /* The same plan as tables, each in its own memory. A table that does not end with the last request
         * is refused. */
        good->absent &= ~(BIT(planned.rows) | BIT(planned.splits)), good->layout.size[DIM_rows] = count;
        void *const plan = NULL;
        lay_out(good);
        give_plan(plan, 0);
        good->held[planned.rows].tensor.data = rows, good->held[planned.splits].tensor.data = splits;
        const bool whole = rows[of_rows - FIELDS + 1] == 1;
        if (whole)
            check_taken(good, "damaged tables");
        else
            CHECK(described_run(good->operation, good->args) == FMLA_INVALID_ARGUMENT, "damaged plan %d", n);
        CHECK(!count_outputs(good, true), "damaged tables %d: written past the end", n);
        free(damaged), free(rows), free(splits);
    }
}

/* ---- In tables ------------------------------------------------------------------------------- */

/* Gives the valid call the tables of a plan of `count` partitions, made for `requests` requests. */
static inline void give_tables(int64_t requests, int32_t count)
{
    struct good_call *const good = planned.call;
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    make_plan(requests, count, plan_data, &plan_bytes);
    CHECK(fmla_plan_describe(plan_data, plan_bytes, &view) == FMLA_OK, "%s", fmla_last_error());
    good->absent &= ~(BIT(planned.rows) | BIT(planned.splits)), good->layout.size[DIM_rows] = count;
    lay_out(good);
    memcpy(good->held[planned.rows].tensor.data, view.partitions, (size_t)count * FIELDS * sizeof(int32_t));
    memcpy(good->held[planned.splits].tensor.data, view.num_splits,
           (size_t)(requests < 2 ? requests + 1 : 3) * sizeof(int32_t));
}

static void (*set_up_without)(void);

static void set_up_tables(void)
{
    set_up_without();
    give_tables(2, ROWS);
}

/* Refusals of a call with tables. If a plan is made, the queries do not look at the tables. */
static inline void refuse_tables(void)
{
    struct good_call *const good = planned.call;
    struct held *const rows = &good->held[planned.rows], *const splits = &good->held[planned.splits];
    const bool makes = described_is_plan(good->operation);
    char less[64], more[64];
    refuse_by_descriptor(good);
    good->set_up();
    const int64_t b = splits->shape[0] - 1;
    snprintf(less, sizeof less, "b + 1|is %d,|%d as in %s", (int)b, (int)b + 1, planned.bound_by);
    snprintf(more, sizeof more, "b + 1|is %d,|%d as in %s", (int)b + 2, (int)b + 1, planned.bound_by);
#define REFUSED_TABLES(...) REFUSED_AS(*good, FMLA_INVALID_ARGUMENT, makes, __VA_ARGS__)
    REFUSED_TABLES("partitions", "is NULL|num_splits",
                   *(const fmla_tensor **)option(good, "partitions") = NULL);
    REFUSED_TABLES("num_splits", "is NULL|partitions",
                   *(const fmla_tensor **)option(good, "num_splits") = NULL);
    REFUSED_TABLES("plan", "NULL|partitions", give_plan(scratch, SCRATCH_WATCHED));
    REFUSED_TABLES("partitions", "rows|0|[1, 65536]", HELD(rows, NULL, i32, 2, 0, FIELDS));
    REFUSED_TABLES("partitions", "stride|0|16|8", rows->shape[0] = 2, rows->strides[0] = 2 * FIELDS);
    REFUSED_TABLES("num_splits", less, splits->shape[0]--);
    REFUSED_TABLES("num_splits", more, splits->shape[0]++);
    REFUSED_TABLES("num_partitions", "4|0|3", put_int(planned.call, "num_partitions", ROWS + 1));
    REFUSED_CALL(*good, "partitions", "aligned|16", rows->tensor.data = (int32_t *)rows->tensor.data + 2);
    REFUSED_CALL(*good, "partitions", "aligned|16", rows->tensor.byte_offset = 4);
#undef REFUSED_TABLES
}

/* Refusals of a call that reads a plan's tables. */
static inline void refuse_tables_of_a_plan(void)
{
    struct good_call *const good = planned.call;
    struct held *const rows = &good->held[planned.rows];
    set_up_without = good->set_up, good->set_up = set_up_tables;
    refuse_tables();
    REFUSED(*good, "partitions", "stride|0|0|8", rows->strides[0] = 0);
    REFUSED(*good, "partitions", "fields|7|8", put_int(planned.call, "batch_invariant", 1),
            HELD(rows, rows->tensor.data, i32, 2, ROWS, 7));
    REFUSED_CALL(*good, "partitions", "request 4|1|batch", give_tables(5, ROWS));
    REFUSED_CALL(*good, "partitions", "request 0|1|batch", give_tables(1, ROWS));
    good->set_up = set_up_without;
}

/* For set_up of a call that makes a plan, whole or in tables, of `b` requests. */
static inline void begin_making(bool tables, int64_t b)
{
    struct good_call *const good = planned.call;
    struct layout layout = good_layout;
    layout.b = b, layout.splits = b + 1;
    begin(good, &layout, tables ? 0 : BIT(planned.rows) | BIT(planned.splits));
    memcpy(option(good, "s_q"), &(int64_t){1}, sizeof(int64_t));
    memcpy(option(good, "h_q"), &(int64_t){128}, sizeof(int64_t));
    if (tables)
        give_plan(NULL, 0);
    else
        put_int(good, "num_partitions", MADE_PARTITIONS);
}

/* The call makes tables, which must equal those of the plan with as many partitions. */
static inline void take_tables_made(const char *label, int64_t requests, int32_t partitions)
{
    struct good_call *const good = planned.call;
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    CHECK(described_run(good->operation, good->args) == FMLA_OK, "%s: %s", label, fmla_last_error());
    check_written(good, label);
    *(const fmla_tensor **)option(good, "partitions") = NULL;
    *(const fmla_tensor **)option(good, "num_splits") = NULL;
    put_int(planned.call, "num_partitions", partitions), give_plan(scratch, SCRATCH_WATCHED);
    check_taken(good, label);
    CHECK(fmla_plan_describe(scratch, SCRATCH_WATCHED, &view) == FMLA_OK, "%s: %s", label, fmla_last_error());
    CHECK(!memcmp(good->memory[planned.rows], view.partitions, (size_t)partitions * FIELDS * 4) &&
              !memcmp(good->memory[planned.splits], view.num_splits, (size_t)(requests + 1) * 4),
          "%s: other tables than the plan's", label);
}

/* Tests what every call that makes a plan in tables must refuse and accept, with `b` requests. */
static inline void test_tables_made(void (*set_up)(void), int64_t b)
{
    struct good_call *const good = planned.call;
    struct held *const rows = &good->held[planned.rows];
    good->set_up = set_up;
    refuse_tables();
    take_by_descriptor(good);
    for (int32_t partitions = 1; partitions <= ROWS; partitions++) {
        good->set_up();
        rows->shape[0] = partitions;
        if (partitions == 1) rows->strides[0] = INT64_MIN; /* never used */
        if (partitions % 2) put_int(planned.call, "num_partitions", partitions);
        take_tables_made("tables", b, partitions);
    }
    good->set_up();
    good->layout.size[DIM_splits] = 1, resize(good, DIM_b, 0);
    take_tables_made("tables, b = 0", 0, ROWS);
    /* The tables' rows give the number of partitions, so an absent GPU is not queried. */
    good->set_up();
    *(fmla_device *)option(good, "target") = (fmla_device){FMLA_DEVICE_CUDA, 99};
    take_tables_made("tables for a GPU", b, ROWS);
}

enum { KEPT = 1 << 16 };

/* Copies all outputs, concatenated. */
static inline size_t keep_outputs(const struct good_call *good, char *copy)
{
    const struct member *m;
    size_t bytes = 0;
    for (int which = 0; (m = described_tensor(good->operation, which)); which++) {
        if (!(m->allowed & IS_OUTPUT)) continue;
        if (bytes + good->room[which] > KEPT) abort();
        memcpy(copy + bytes, good->memory[which], good->room[which]);
        bytes += good->room[which];
    }
    return bytes;
}

/* Results and workspace must equal those with the whole plan. */
static inline void take_tables(void)
{
    static char expected[KEPT], came[KEPT];
    struct good_call *const good = planned.call;
    struct held *const rows = &good->held[planned.rows], *const splits = &good->held[planned.splits];
    for (int32_t count = 1; count <= MOST_ROWS; count++) {
        struct answer with_plan = {0}, with_tables = {0};
        good->set_up();
        make_plan(2, count, plan_data, &plan_bytes);
        give_plan(plan_data, plan_bytes);
        CHECK(!described_ask(good->operation, ASK_BYTES, good->args, &with_plan), "%s", fmla_last_error());
        check_taken(good, "a plan");
        const size_t bytes = keep_outputs(good, expected);
        for (int way = 0; way < 5; way++) {
            good->set_up();
            give_tables(2, count);
            int32_t *const in_rows = rows->tensor.data, *const in_splits = splits->tensor.data;
            if (way == 1) put_int(planned.call, "num_partitions", count);
            if (way == 2) rows->tensor.strides = splits->tensor.strides = NULL;
            if (way == 3) rows->tensor.data = in_rows - 4, rows->tensor.byte_offset = 16;
            if (way == 4 && count == 1) rows->strides[0] = INT64_MAX; /* never used */
            if (way == 4) memmove(in_splits + 1, in_splits, 12), splits->tensor.data = in_splits + 1;
            CHECK(!described_ask(good->operation, ASK_BYTES, good->args, &with_tables), "%s",
                  fmla_last_error());
            CHECK_EQ(with_tables.bytes, with_plan.bytes);
            check_taken(good, "tables");
            check_written(good, "tables");
            CHECK(keep_outputs(good, came) == bytes && !memcmp(expected, came, bytes),
                  "%d partitions, way %d: other bits than with the plan", count, way);
        }
    }
    /* Tables are not read in batch-invariant mode. */
    TAKEN(*good, "tables that are not read", give_tables(2, ROWS),
          put_int(planned.call, "batch_invariant", 1), memset(rows->tensor.data, PATTERN, ROWS * FIELDS * 4),
          memset(splits->tensor.data, PATTERN, 12));
    TAKEN(*good, "a plan that is not read", give_plan(other_plan, 1),
          put_int(planned.call, "batch_invariant", 1));
    /* No request, and tables of a plan for none. */
    TAKEN(*good, "tables, b = 0", give_tables(0, ROWS), good->layout.size[DIM_splits] = 1,
          resize(good, DIM_b, 0));
    /* Tables in the variations of any call. */
    set_up_without = good->set_up, good->set_up = set_up_tables;
    take_by_descriptor(good);
    good->set_up = set_up_without;
}

static inline void test_plans(void)
{
    refuse_plans();
    refuse_tables_of_a_plan();
    take_tables();
    take_damaged_plans();
}

#endif
