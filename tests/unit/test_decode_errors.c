/* SPDX-License-Identifier: MIT
 *
 * Every argument that fmla_dense_decode and the questions about it must reject, and odd ones that they must take.
 */
#include "plans.h"

enum { B = 2, S_Q = 2, H_Q = 4, H_KV = 2, D_QK = 576, D_V = 512, PAGES = 6, PAGE = 16, MAX_PAGES = 3 };

static void set_up(void);
static struct good_call call = {.operation = OP_DENSE_DECODE, .elsewhere = "q", .set_up = set_up};

#define ARGS    (*(fmla_dense_decode_args *)call.args)
#define T(name) (call.held[TENSOR_dense_decode_##name])

static void set_up(void)
{
    static const struct layout layout = {.size = {[DIM_b] = B,
                                                  [DIM_s_q] = S_Q,
                                                  [DIM_h_q] = H_Q,
                                                  [DIM_h_kv] = H_KV,
                                                  [DIM_d_qk] = D_QK,
                                                  [DIM_d_v] = D_V,
                                                  [DIM_pages] = PAGES,
                                                  [DIM_page_size] = PAGE,
                                                  [DIM_max_pages] = MAX_PAGES,
                                                  [DIM_rows] = ROWS,
                                                  [DIM_fields] = FIELDS,
                                                  [DIM_splits] = B + 1},
                                         .type = {FMLA_TYPE_BFLOAT, 16, 1}};
    begin(&call, &layout, BIT(TENSOR_dense_decode_partitions) | BIT(TENSOR_dense_decode_num_splits));
    PUT(T(block_table), int32_t, 4, 0, -1, 5, 1, 2);
    PUT(T(seqlens), int32_t, 20, 33);
}

#define TABLE   ((int32_t *)T(block_table).tensor.data)
#define LENGTHS ((int32_t *)T(seqlens).tensor.data)

static void d_qk_and_d_v(int64_t d_qk, int64_t d_v)
{
    resize(&call, DIM_d_qk, d_qk), resize(&call, DIM_d_v, d_v);
    PUT(T(block_table), int32_t, 4, 0, -1, 5, 1, 2);
}

static void make_plan(int64_t requests, int32_t partitions, char *plan, size_t *bytes)
{
    static int32_t lengths[8] = {20, 33, 1, 0, 70};
    struct held held;
    HELD(&held, lengths, i32, 1, requests);
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &held.tensor, args.s_q = S_Q, args.h_q = H_Q, args.h_kv = H_KV;
    args.num_partitions = partitions, args.plan = plan, args.plan_size = MOST_PLAN;
    CHECK(fmla_decode_plan_size(&args, bytes) == FMLA_OK && fmla_decode_plan(&args) == FMLA_OK, "%s",
          fmla_last_error());
}

static void test_refused(void)
{
    refuse_by_descriptor(&call);
    REFUSED(call, "q", "h_q|3|multiple|2", resize(&call, DIM_h_q, 3));
    REFUSED(call, "out", "d_v|0", resize(&call, DIM_d_v, 0));
    /* The row is long enough to be written, so only the check stands in the way. */
    REFUSED(call, "out", "d_v|512|256", resize(&call, DIM_d_qk, 256));
    REFUSED(call, "q", "s_q · h_q|4294967296", resize(&call, DIM_s_q, 1 << 16),
            resize(&call, DIM_h_q, 1 << 16));
    /* Without a table page r is request r's. */
    REFUSED(call, "kv_cache", "pages|1|2|block_table", ARGS.block_table = NULL, T(kv_cache).shape[0] = 1);
    REFUSED(call, "log_base", "1|0|2", ARGS.log_base = 1);
    REFUSED_HERE(call, "q", "d_qk is 320|512|576", d_qk_and_d_v(320, 256));
    REFUSED_HERE(call, "q", "d_qk is 320|cpu-generic|512|576", d_qk_and_d_v(320, 256),
                 ARGS.kernel = "cpu-generic");
    REFUSED_HERE(call, "q", "d_v is 128|512", resize(&call, DIM_d_v, 128));
    REFUSED_CALL(call, "block_table", "[0, 1]|-1|6", TABLE[1] = -1);
    REFUSED_CALL(call, "block_table", "[1, 2]|6|6", TABLE[B * MAX_PAGES - 1] = PAGES);
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
    TAKEN(call, "the oracle takes any d_qk", d_qk_and_d_v(320, 256), ARGS.kernel = "ref");
    TAKEN(call, "wild strides of dimensions of size 1", resize(&call, DIM_page_size, PAGE),
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
static void test_huge_capacity(void)
{
    static const char *const kernels[] = {"cpu-generic", "ref"};
    for (int way = 0; way < 4; way++) {
        size_t bytes = 0, more = 0;
        set_up();
        resize(&call, DIM_max_pages, 10000);
        ARGS.kernel = kernels[way % 2], ARGS.batch_invariant = way / 2;
        CHECK(fmla_dense_decode_workspace_size(&ARGS, &bytes, NULL) == FMLA_OK, "%s", fmla_last_error());
        T(block_table).shape[1] = T(block_table).strides[0] = (INT64_C(1) << 31) - 46339;
        T(kv_cache).shape[1] = (INT64_C(1) << 30) + 23170;
        for (int i = 0; i < 3; i++) T(kv_cache).strides[i] = 0; /* one key, seen everywhere */
        if (fmla_dense_decode_workspace_size(&ARGS, &more, NULL) != FMLA_OK) continue;
        CHECK(more >= bytes, "%s, invariant %d: %zu bytes for 2^61 keys, %zu for 160000", kernels[way % 2],
              way / 2, more, bytes);
    }
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
                               .most = {PAGE * 2, PAGE * 3}};
    test_refused();
    test_taken();
    test_huge_capacity();
    test_plans();
    return check_done("test_decode_errors");
}
