/* SPDX-License-Identifier: MIT
 *
 * Every argument that fmla_sparse_decode and the questions about it must reject, and odd ones that they must take.
 */
#include "plans.h"

enum { B = 2, S_Q = 2, H_Q = 4, D_QK = 576, D_V = 512, PAGES = 6, PAGE = 16, TOPK = 40 };
enum { EXTRA_PAGES = 3, EXTRA_PAGE = 5, EXTRA = 10 };

static void set_up(void);
static struct good_call call = {.operation = OP_SPARSE_DECODE, .elsewhere = "q", .set_up = set_up};

#define ARGS          (*(fmla_sparse_decode_args *)call.args)
#define TENSOR_OF(of) TENSOR_sparse_decode_##of
#define T(name)       (call.held[TENSOR_OF(name)])
#define INTS(name)    ((int32_t *)T(name).tensor.data)

/* Lists of keys: indices[i] = i · 7 of as many as there are. */
static void put_indices(struct held *held, int64_t keys)
{
    for (int64_t i = 0; i < held->shape[0] * held->strides[0]; i++)
        ((int32_t *)held->tensor.data)[i] = (int32_t)(i * 7 % keys);
}

static void set_up_format(int32_t format, fmla_dtype type)
{
    struct layout layout = {.size = {[DIM_b] = B,
                                     [DIM_s_q] = S_Q,
                                     [DIM_h_q] = H_Q,
                                     [DIM_d_qk] = D_QK,
                                     [DIM_d_v] = D_V,
                                     [DIM_pages] = PAGES,
                                     [DIM_page_size] = PAGE,
                                     [DIM_one_head] = 1,
                                     [DIM_extra_pages] = EXTRA_PAGES,
                                     [DIM_extra_page_size] = EXTRA_PAGE,
                                     [DIM_topk] = TOPK,
                                     [DIM_extra_topk] = EXTRA,
                                     [DIM_rows] = ROWS,
                                     [DIM_fields] = FIELDS,
                                     [DIM_splits] = B + 1},
                            .type = type,
                            .format = format ? format : FMLA_KV_BF16};
    if (format == FMLA_KV_FP8_584) layout.size[DIM_d_qk] = 512;
    begin(&call, &layout, BIT(TENSOR_OF(partitions)) | BIT(TENSOR_OF(num_splits)));
    put_indices(&T(indices), PAGES * PAGE), put_indices(&T(extra_indices), EXTRA_PAGES * EXTRA_PAGE);
    PUT(T(topk_length), int32_t, 20, 33);
    PUT(T(extra_topk_length), int32_t, EXTRA, 3);
    ARGS.kv_format = format;
}

SET_UP(set_up, set_up_format(0, bf16))
/* Caches of bytes. Zeros are sound tokens. */
SET_UP(set_up_656, set_up_format(FMLA_KV_FP8_656, bf16))
SET_UP(set_up_584, set_up_format(FMLA_KV_FP8_584, bf16))

static void d_qk_and_d_v(int64_t d_qk, int64_t d_v)
{
    resize(&call, DIM_d_qk, d_qk), resize(&call, DIM_d_v, d_v);
}

static void make_plan(int64_t requests, int32_t partitions, char *plan, size_t *bytes)
{
    static int32_t lengths[8] = {20, 33, 1, 0, 70};
    struct held held;
    HELD(&held, lengths, i32, 1, requests);
    fmla_sparse_plan_args args = FMLA_INIT(fmla_sparse_plan_args);
    args.topk_length = &held.tensor, args.topk = TOPK, args.extra_topk = EXTRA;
    args.s_q = S_Q, args.h_q = H_Q, args.num_partitions = partitions;
    args.plan = plan, args.plan_size = MOST_PLAN;
    CHECK(fmla_sparse_plan_size(&args, bytes) == FMLA_OK && fmla_sparse_plan(&args) == FMLA_OK, "%s",
          fmla_last_error());
}

static void test_formats(void)
{
    struct held *const kv = &T(kv_cache), *const extra = &T(extra_kv_cache);
    REFUSED(call, "kv_format", "FP16|type of q|bfloat16", ARGS.kv_format = FMLA_KV_FP16);
    REFUSED(call, "kv_format", "0|FP8_656|FP8_584", set_up_656(), ARGS.kv_format = 0);
    REFUSED(call, "kv_cache", "uint8|bfloat16", set_up_656(), ARGS.kv_format = FMLA_KV_BF16);
    REFUSED(call, "kv_cache", "bfloat16|one byte", ARGS.kv_format = FMLA_KV_FP8_656);
    REFUSED(call, "extra_kv_cache", "bfloat16|one byte", set_up_656(),
            HELD(extra, extra->tensor.data, bf16, 4, EXTRA_PAGES, EXTRA_PAGE, 1, D_QK));
    REFUSED(call, "kv_cache", "bytes|655|656|FP8_656", set_up_656(), kv->shape[3] = 655);
    REFUSED(call, "kv_cache", "bytes|584|656|FP8_656", set_up_584(), ARGS.kv_format = FMLA_KV_FP8_656);
    REFUSED(call, "q", "d_qk|576|512|FP8_584", set_up_584(), T(q).shape[3] = 576, T(q).tensor.strides = NULL);
    REFUSED(call, "q", "d_qk|512|576|FP8_656", set_up_656(), T(q).shape[3] = 512);
    REFUSED(call, "kv_cache", "stride|0|multiple of 4", set_up_656(), kv->strides[0] += 2);
    REFUSED(call, "kv_cache", "stride|1|658|multiple of 4", set_up_656(), kv->strides[1] += 2);
    REFUSED(call, "extra_kv_cache", "stride|0|multiple of 2", set_up_584(), extra->strides[0] += 1);
    REFUSED(call, "kv_cache", "stride|1|586|584|one piece", set_up_584(), kv->strides[1] += 2);
    REFUSED(call, "kv_cache", "stride|1|576|584|one piece", set_up_584(), kv->strides[1] = 576);
    REFUSED_CALL(call, "kv_cache", "multiple of 4", set_up_656(), kv->tensor.byte_offset = 2);
    REFUSED_CALL(call, "extra_kv_cache", "multiple of 2", set_up_584(), extra->tensor.byte_offset = 1);

    TAKEN(call, "a format that is named", ARGS.kv_format = FMLA_KV_BF16);
    TAKEN(call, "float16", set_up_format(FMLA_KV_FP16, fp16));
    TAKEN(call, "FP8_656", set_up_656());
    TAKEN(call, "FP8_584", set_up_584());
    TAKEN(call, "other types of 1 byte", set_up_656(), kv->tensor.dtype.code = FMLA_TYPE_INT,
          extra->tensor.dtype.code = 10 /* DLPack's e4m3 */);
    TAKEN(call, "tokens apart", set_up_656(), kv->shape[0] = 2, kv->strides[1] += 4, kv->strides[0] += 68,
          kv->tensor.byte_offset = 4);
    TAKEN(call, "pages apart", set_up_584(), kv->shape[0] = 2, kv->strides[0] += 2,
          kv->tensor.byte_offset = 2);
    /* A cache without pages may begin anywhere, as every tensor without elements. */
    for (int32_t format = FMLA_KV_FP8_656; format <= FMLA_KV_FP8_584; format++)
        TAKEN(call, "a cache of no bytes at an odd address", set_up_format(format, bf16),
              kv->shape[0] = extra->shape[0] = 0, kv->tensor.byte_offset = extra->tensor.byte_offset = 1);
}

static void test_refused(void)
{
    void (*const set_ups[])(void) = {set_up, set_up_656, set_up_584};
    for (int i = 0; i < 3; i++) {
        call.set_up = set_ups[i];
        refuse_by_descriptor(&call);
    }
    call.set_up = set_up;
    REFUSED(call, "out", "d_v|0", resize(&call, DIM_d_v, 0));
    /* The row is long enough to be written, so only the check stands in the way. */
    REFUSED(call, "out", "d_v|512|256", resize(&call, DIM_d_qk, 256));
    REFUSED(call, "q", "s_q · h_q|4294967296", resize(&call, DIM_s_q, 1 << 16),
            resize(&call, DIM_h_q, 1 << 16));
    REFUSED(call, "extra_kv_cache", "NULL|extra_indices", ARGS.extra_kv_cache = NULL);
    REFUSED(call, "extra_indices", "NULL|extra_kv_cache", ARGS.extra_indices = NULL);
    REFUSED(call, "extra_topk_length", "NULL|extra_kv_cache",
            ARGS.extra_kv_cache = ARGS.extra_indices = NULL);
    REFUSED(call, "log_base", "1|0|2", ARGS.log_base = 1);
    REFUSED_HERE(call, "q", "d_qk is 320|512|576", d_qk_and_d_v(320, 256));
    REFUSED_HERE(call, "q", "d_qk is 320|cpu-generic|512|576", d_qk_and_d_v(320, 256),
                 ARGS.kernel = "cpu-generic");
    REFUSED_HERE(call, "q", "d_v is 128|512", resize(&call, DIM_d_v, 128));
}

static void test_taken(void)
{
    take_by_descriptor(&call);
    make_plans();
    TAKEN(call, "optional tensors left out",
          ARGS.topk_length = ARGS.extra_topk_length = ARGS.attn_sink = ARGS.lse = NULL);
    TAKEN(call, "no extra cache", ARGS.extra_kv_cache = ARGS.extra_indices = ARGS.extra_topk_length = NULL);
    TAKEN(call, "lengths outside of the lists", PUT(T(topk_length), int32_t, INT32_MIN, INT32_MAX),
          PUT(T(extra_topk_length), int32_t, INT32_MAX, INT32_MIN));
    TAKEN(call, "a plan", give_plan(plan_data, plan_bytes));
    set_up();
    for (int i = 0; i < B * S_Q * TOPK; i++) INTS(indices)[i] = i & 1 ? INT32_MIN : INT32_MAX;
    check_taken(&call, "indices of no key"), check_written(&call, "indices of no key");
    TAKEN(call, "the oracle takes any d_qk", d_qk_and_d_v(320, 256), ARGS.kernel = "ref");
    TAKEN(call, "wild strides of dimensions of size 1", one_of_each(&call), INTS(indices)[0] = 0);
    /* No request: no data needed. No page or no index: no key, out is 0 and lse +inf. */
    TAKEN(call, "b = 0", resize(&call, DIM_pages, 0), resize(&call, DIM_b, 0));
    for (int way = 0; way < 8; way++) {
        set_up();
        if (way & 2) resize(&call, DIM_topk, 0), resize(&call, DIM_extra_topk, 0);
        if (!(way & 2) || way & 4) resize(&call, DIM_pages, 0), resize(&call, DIM_extra_pages, 0);
        ARGS.batch_invariant = way & 1;
        check_taken(&call, "no key");
        check_no_key(&call, "no key");
    }
}

/* Lists of 2^31 indices: the partial results of a batch-invariant call would not fit into memory. */
static void test_huge_lists(void)
{
    static const char *const kernels[] = {"cpu-generic", "ref"};
    for (int way = 0; way < 4; way++) {
        size_t bytes = 0, more = 0;
        set_up();
        ARGS.kernel = kernels[way % 2], ARGS.batch_invariant = way / 2;
        CHECK(fmla_sparse_decode_workspace_size(&ARGS, &bytes, NULL) == FMLA_OK, "%s", fmla_last_error());
        T(indices).shape[2] = T(extra_indices).shape[2] = INT32_MAX;
        if (fmla_sparse_decode_workspace_size(&ARGS, &more, NULL) != FMLA_OK) continue;
        CHECK(more >= bytes, "%s, invariant %d: %zu bytes for 2^32 keys, %zu for 50", kernels[way % 2],
              way / 2, more, bytes);
    }
    size_t bytes = 0;
    set_up();
    resize(&call, DIM_b, 0), resize(&call, DIM_s_q, 1);
    resize(&call, DIM_h_q, INT32_MAX), resize(&call, DIM_topk, INT32_MAX);
    ARGS.kernel = "ref";
    check_rejected("scores of 2^31 heads", fmla_sparse_decode_workspace_size(&ARGS, &bytes, NULL),
                   FMLA_UNSUPPORTED, "sparse_decode", "indices", "would not fit");
}

int main(void)
{
    CHECK(fmla_set_num_threads(2) == FMLA_OK, "%s", fmla_last_error());
    planned = (struct planned){.call = &call,
                               .rows = TENSOR_OF(partitions),
                               .splits = TENSOR_OF(num_splits),
                               .bound_by = "q",
                               .make = make_plan,
                               .lengths = TENSOR_OF(topk_length),
                               .most = {TOPK, TOPK}};
    test_refused();
    test_formats();
    test_taken();
    test_huge_lists();
    test_plans();
    return check_done("test_sparse_errors");
}
