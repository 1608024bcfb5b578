/* SPDX-License-Identifier: MIT
 *
 * Tests every argument that fmla_sparse_decode and its queries must reject, and unusual ones that they
 * must accept.
 */
#include "plans.h"
#include "rules.h"

static void set_up(void);
static struct good_call call = {.operation = OP_SPARSE_DECODE, .elsewhere = "q", .set_up = set_up};

#define ARGS          (*(fmla_sparse_decode_args *)call.args)
#define TENSOR_OF(of) TENSOR_sparse_decode_##of
#define T(name)       (call.held[TENSOR_OF(name)])
#define INTS(name)    ((int32_t *)T(name).tensor.data)

/* Fills lists of keys: indices[i] = 7 i modulo the number of keys. */
static void put_indices(struct held *held, int64_t keys)
{
    for (int64_t i = 0; i < held->shape[0] * held->strides[0]; i++)
        ((int32_t *)held->tensor.data)[i] = (int32_t)(i * 7 % keys);
}

static void set_up_two(int32_t format, int32_t extra, fmla_dtype type)
{
    struct layout layout = good_layout;
    layout.type = type;
    if (format) layout.format = format;
    layout.extra_format = extra;
    if (cache_formats[layout.format].d_qk) layout.d_qk = cache_formats[layout.format].d_qk;
    begin(&call, &layout, BIT(TENSOR_OF(partitions)) | BIT(TENSOR_OF(num_splits)));
    put_indices(&T(indices), layout.pages * layout.page_size);
    put_indices(&T(extra_indices), layout.extra_pages * layout.extra_page_size);
    PUT(T(topk_length), int32_t, 20, 33);
    PUT(T(extra_topk_length), int32_t, EXTRA, 3);
    ARGS.kv_format = format, ARGS.extra_kv_format = extra;
}

static void set_up_typed(int32_t format, fmla_dtype type)
{
    set_up_two(format, 0, type);
}

/* Zeros are valid tokens of byte caches. */
static void set_up_format(int32_t format)
{
    set_up_typed(format, bf16);
}

SET_UP(set_up, set_up_format(0))
SET_UP(set_up_656, set_up_format(FMLA_KV_FP8_656))
SET_UP(set_up_584, set_up_format(FMLA_KV_FP8_584))
SET_UP(set_up_both, set_up_two(FMLA_KV_FP8_528, FMLA_KV_FP4_288, bf16))

static void test_refused(void)
{
    void (*const set_ups[])(void) = {set_up_656, set_up_584, set_up_both, set_up};
    for (int i = 0; i < 4; i++) {
        call.set_up = set_ups[i];
        refuse_by_descriptor(&call);
    }
    REFUSED(call, "q", "s_q · h_q|4294967296", resize(&call, DIM_s_q, 1 << 16),
            resize(&call, DIM_h_q, 1 << 16));
    /* FP8_576, which has a scale of the whole cache, is not offered. */
    REFUSED(call, "kv_format", "is 0|FMLA_KV_FP8_584 (4) or FMLA_KV_FP8_528 (6)", set_up_656(),
            ARGS.kv_format = 0);
    REFUSED(call, "extra_kv_cache", "NULL|extra_indices", ARGS.extra_kv_cache = NULL);
    REFUSED(call, "extra_indices", "NULL|extra_kv_cache", ARGS.extra_indices = NULL);
    REFUSED(call, "extra_topk_length", "NULL|extra_kv_cache",
            ARGS.extra_kv_cache = ARGS.extra_indices = NULL);
    /* The oracle's scores for 2^31 heads. */
    size_t bytes = 0;
    set_up();
    resize(&call, DIM_b, 0), resize(&call, DIM_s_q, 1);
    resize(&call, DIM_h_q, INT32_MAX), resize(&call, DIM_topk, INT32_MAX);
    ARGS.kernel = "ref";
    check_rejected("scores of 2^31 heads", fmla_sparse_decode_workspace_size(&ARGS, &bytes, NULL),
                   FMLA_UNSUPPORTED, "sparse_decode", "indices", "exceed the address space");
}

/* Formats of two caches. */
static void test_extra_format(void)
{
    enum { LAST = FMLA_KV_FP8_528_F32 };
    REFUSED(call, "extra_kv_format", "11|0|10", ARGS.extra_kv_format = LAST + 1);
    REFUSED(call, "extra_kv_format", "-1|0|10", ARGS.extra_kv_format = -1);
    REFUSED(call, "extra_kv_format", "FP8_656|576|512|q", set_up_two(FMLA_KV_FP8_528, FMLA_KV_FP8_656, bf16));
    REFUSED(call, "extra_kv_format", "FP8_528|512|576|q", set_up_two(FMLA_KV_FP8_656, FMLA_KV_FP8_528, bf16));
    REFUSED(call, "extra_kv_format", "FP4_288|512|576|q", set_up_two(0, FMLA_KV_FP4_288, bf16));
    REFUSED(call, "extra_kv_format", "FP16|q's type|bfloat16", set_up_both(),
            ARGS.extra_kv_format = FMLA_KV_FP16);
    REFUSED(call, "extra_kv_cache", "uint8|bfloat16", set_up_both(), ARGS.extra_kv_format = FMLA_KV_BF16);
    REFUSED(call, "extra_kv_cache", "288|528|FP8_528", set_up_both(), ARGS.extra_kv_format = 0);
    REFUSED(call, "extra_kv_cache", "288|584|FP8_584", set_up_both(), ARGS.extra_kv_format = FMLA_KV_FP8_584);
    REFUSED(call, "extra_kv_cache", "512|576", set_up_two(FMLA_KV_FP8_656, FMLA_KV_BF16, bf16),
            T(extra_kv_cache).shape[3] = 512);
    REFUSED(call, "extra_kv_format", "8|must be 0|without extra_kv_cache", set_up_both(),
            ARGS.extra_kv_cache = ARGS.extra_indices = ARGS.extra_topk_length = NULL);
    REFUSED_HERE(call, "extra_kv_format", "FP8_576|FP8_656",
                 set_up_two(FMLA_KV_FP8_656, FMLA_KV_FP8_576, bf16));
    for (int32_t format = FMLA_KV_BF16; format <= LAST; format++)
        for (int32_t extra = FMLA_KV_BF16; extra <= LAST; extra++) {
            const int64_t d_qk = cache_formats[format].d_qk, of_extra = cache_formats[extra].d_qk;
            const bool halves = format == FMLA_KV_FP16 || extra == FMLA_KV_FP16;
            if (format == FMLA_KV_FP8_576 || extra == FMLA_KV_FP8_576 ||
                (d_qk && of_extra && d_qk != of_extra) ||
                (halves && (format == FMLA_KV_BF16 || extra == FMLA_KV_BF16)) || (!d_qk && of_extra == 512))
                continue; /* in 16-bit formats the valid call has 576 values */
            TAKEN(call, "caches of two formats", set_up_two(format, extra, halves ? fp16 : bf16));
        }
}

static void test_taken(void)
{
    take_by_descriptor(&call);
    make_plans();
    TAKEN(call, "float16", set_up_typed(FMLA_KV_FP16, fp16));
    TAKEN(call, "optional tensors left out",
          ARGS.topk_length = ARGS.extra_topk_length = ARGS.attn_sink = ARGS.lse = NULL);
    TAKEN(call, "no extra cache", ARGS.extra_kv_cache = ARGS.extra_indices = ARGS.extra_topk_length = NULL);
    TAKEN(call, "lengths outside of the lists", PUT(T(topk_length), int32_t, INT32_MIN, INT32_MAX),
          PUT(T(extra_topk_length), int32_t, INT32_MAX, INT32_MIN));
    TAKEN(call, "a plan", give_plan(plan_data, plan_bytes));
    set_up();
    for (int i = 0; i < 2 * 2 * TOPK; i++) INTS(indices)[i] = i & 1 ? INT32_MIN : INT32_MAX;
    check_taken(&call, "indices of no key"), check_written(&call, "indices of no key");
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

/* Lists of 2^31 indices. */
static void enlarge(void)
{
    T(indices).shape[2] = T(extra_indices).shape[2] = INT32_MAX;
}

int main(void)
{
    CHECK(fmla_set_num_threads(2) == FMLA_OK, "%s", fmla_last_error());
    plan_for(&call, "topk_length", TOPK, TOPK);
    test_refused();
    test_extra_format();
    test_taken();
    test_attention_rules(&call);
    test_formats(&call, set_up_format);
    test_huge(&call, enlarge);
    test_plans();
    return check_done("test_sparse_errors");
}
