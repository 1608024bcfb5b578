/* SPDX-License-Identifier: MIT
 *
 * Every argument that fmla_dense_decode and the questions about it must reject, and odd ones that they must take.
 */
#include "plans.h"
#include "rules.h"

static void set_up(void);
static struct good_call call = {.operation = OP_DENSE_DECODE, .elsewhere = "q", .set_up = set_up};

#define ARGS    (*(fmla_dense_decode_args *)call.args)
#define T(name) (call.held[TENSOR_dense_decode_##name])

static void set_up(void)
{
    begin(&call, &good_layout,
          BIT(TENSOR_dense_decode_partitions) | BIT(TENSOR_dense_decode_num_splits) |
              BIT(TENSOR_dense_decode_kv_scale));
    PUT(T(block_table), int32_t, 4, 0, -1, 5, 1, 2);
    PUT(T(seqlens), int32_t, 20, 33);
}

#define TABLE   ((int32_t *)T(block_table).tensor.data)
#define LENGTHS ((int32_t *)T(seqlens).tensor.data)

static void make_plan(int64_t requests, int32_t partitions, char *plan, size_t *bytes)
{
    static int32_t lengths[8] = {20, 33, 1, 0, 70};
    struct held held;
    HELD(&held, lengths, i32, 1, requests);
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &held.tensor, args.s_q = good_layout.s_q;
    args.h_q = good_layout.h_q, args.h_kv = good_layout.h_kv;
    args.num_partitions = partitions, args.plan = plan, args.plan_size = MOST_PLAN;
    CHECK(fmla_decode_plan_size(&args, bytes) == FMLA_OK && fmla_decode_plan(&args) == FMLA_OK, "%s",
          fmla_last_error());
}

static void test_refused(void)
{
    refuse_by_descriptor(&call);
    REFUSED(call, "q", "h_q|3|multiple|2", resize(&call, DIM_h_q, 3));
    REFUSED(call, "q", "s_q · h_q|4294967296", resize(&call, DIM_s_q, 1 << 16),
            resize(&call, DIM_h_q, 1 << 16));
    /* Without a table page r is request r's. */
    REFUSED(call, "kv_cache", "pages|1|2|block_table", ARGS.block_table = NULL, T(kv_cache).shape[0] = 1);
    REFUSED_CALL(call, "block_table", "[0, 1]|-1|6", TABLE[1] = -1);
    REFUSED_CALL(call, "block_table", "[1, 2]|6|6", TABLE[5] = 6);
    REFUSED_CALL(call, "block_table", "[0, 0]|4|0", resize(&call, DIM_pages, 0));
}

static void test_taken(void)
{
    take_by_descriptor(&call);
    make_plans();
    TAKEN(call, "optional tensors left out", ARGS.block_table = ARGS.attn_sink = ARGS.lse = NULL,
          LENGTHS[1] = 5);
    TAKEN(call, "lengths outside of the cache", LENGTHS[0] = INT32_MIN, LENGTHS[1] = INT32_MAX);
    TAKEN(call, "a plan", give_plan(plan_data, plan_bytes));
    TAKEN(call, "unused pages", TABLE[2] = 2147480000, LENGTHS[1] = 0, TABLE[3] = TABLE[4] = INT32_MIN);
    TAKEN(call, "wild strides of dimensions of size 1", resize(&call, DIM_page_size, good_layout.page_size),
          one_of_each(&call), TABLE[0] = 0, LENGTHS[0] = 20);
    /* No request: no data needed. No page of a table: no key, out is 0 and lse +inf. */
    TAKEN(call, "b = 0", resize(&call, DIM_pages, 0), resize(&call, DIM_b, 0));
    for (int invariant = 0; invariant < 2; invariant++) {
        TAKEN(call, "max_pages = 0", resize(&call, DIM_max_pages, 0), resize(&call, DIM_pages, 0),
              ARGS.batch_invariant = invariant);
        check_no_key(&call, "max_pages = 0");
    }
}

/* Keys of a request beyond all memory: 2^61 + 67194 of them, whose bytes as fp64 are few modulo 2^64. */
static void enlarge(void)
{
    T(block_table).shape[1] = T(block_table).strides[0] = (INT64_C(1) << 31) - 46339;
    T(kv_cache).shape[1] = (INT64_C(1) << 30) + 23170;
    for (int i = 0; i < 3; i++) T(kv_cache).strides[i] = 0; /* one key, seen everywhere */
}

static void set_up_many_pages(void)
{
    set_up();
    resize(&call, DIM_max_pages, 10000);
}

int main(void)
{
    CHECK(fmla_set_num_threads(2) == FMLA_OK, "%s", fmla_last_error());
    planned = (struct planned){.call = &call,
                               .rows = TENSOR_dense_decode_partitions,
                               .splits = TENSOR_dense_decode_num_splits,
                               .bound_by = "q",
                               .make = make_plan,
                               .lengths = TENSOR_dense_decode_seqlens,
                               .most = {32, 48}};
    test_refused();
    test_taken();
    test_attention_rules(&call);
    call.set_up = set_up_many_pages;
    test_huge(&call, enlarge);
    call.set_up = set_up;
    test_plans();
    return check_done("test_decode_errors");
}
