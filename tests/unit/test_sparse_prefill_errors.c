/* SPDX-License-Identifier: MIT
 *
 * Tests every argument that fmla_sparse_prefill and its queries must reject, and unusual ones that they
 * must accept.
 */
#include "rules.h"

static void set_up(void);
static struct good_call call = {.operation = OP_SPARSE_PREFILL, .elsewhere = "q", .set_up = set_up};

#define ARGS       (*(fmla_sparse_prefill_args *)call.args)
#define T(name)    (call.held[TENSOR_sparse_prefill_##name])
#define INTS(name) ((int32_t *)T(name).tensor.data)

static void set_up_keys(bool flat, int32_t format)
{
    struct layout layout = good_layout;
    layout.s_q = 3, layout.page_size = 10, layout.flat = flat;
    if (!flat) layout.h_kv = 1;
    if (format) layout.format = format;
    if (cache_formats[layout.format].d_qk) layout.d_qk = cache_formats[layout.format].d_qk;
    begin(&call, &layout, 0);
    for (int i = 0; i < 3 * layout.h_kv * TOPK; i++) INTS(indices)[i] = i * 7 % 60;
    PUT(T(topk_length), int32_t, 20, 33, TOPK);
    ARGS.kv_format = format;
}

static void set_up_format(int32_t format)
{
    set_up_keys(false, format);
}

SET_UP(set_up, set_up_keys(true, 0))
SET_UP(set_up_pages, set_up_format(0))
/* Zeros are valid tokens. */
SET_UP(set_up_656, set_up_format(FMLA_KV_FP8_656))
SET_UP(set_up_584, set_up_format(FMLA_KV_FP8_584))

static void test_refused(void)
{
    void (*const set_ups[])(void) = {set_up_pages, set_up_656, set_up_584, set_up};
    for (int i = 0; i < 4; i++) {
        call.set_up = set_ups[i];
        refuse_by_descriptor(&call);
    }
    REFUSED(call, "q", "h_q|3|2 key heads", resize(&call, DIM_h_q, 3));
    REFUSED(call, "q", "h_q|4|3 key heads", resize(&call, DIM_h_kv, 3));
    REFUSED(call, "q", "h_q|2147483648", resize(&call, DIM_h_q, INT64_C(1) << 31));
    REFUSED(call, "indices", "h_kv|2|1", set_up_pages(), T(indices).shape[1] = 2);
    REFUSED(call, "q", "float16|must be bfloat16", T(q).tensor.dtype = fp16);
    REFUSED(call, "kv", "float16|must be bfloat16", T(kv).tensor.dtype = fp16);
    REFUSED(call, "out", "float16|must be bfloat16", T(out).tensor.dtype = fp16);
    /* FP8_576, which has a scale of the whole cache, is not offered. */
    REFUSED(call, "kv_format", "is 0|FMLA_KV_FP8_584 (4) or FMLA_KV_FP8_528 (6)", set_up_656(),
            ARGS.kv_format = 0);
    REFUSED(call, "kv", "3 dimensions|must have 4", set_up_656(),
            HELD(&T(kv), T(kv).tensor.data, T(kv).tensor.dtype, 3, 60, 1, 656));
    REFUSED(call, "kv", "3 dimensions|must have 4", ARGS.kv_format = FMLA_KV_FP8_584);
}

static void test_taken(void)
{
    struct held *const kv = &T(kv);
    take_by_descriptor(&call);
    TAKEN(call, "optional tensors left out",
          ARGS.topk_length = ARGS.attn_sink = ARGS.max_logits = ARGS.lse = NULL);
    TAKEN(call, "max_logits alone", ARGS.lse = NULL);
    TAKEN(call, "lse alone", ARGS.max_logits = NULL);
    TAKEN(call, "lengths outside of the lists", PUT(T(topk_length), int32_t, INT32_MIN, INT32_MAX, -1));
    TAKEN(call, "pages", set_up_pages());
    TAKEN(call, "key heads first", kv->strides[0] = kv->shape[2], kv->strides[1] = 60 * kv->shape[2]);
    TAKEN(call, "keys that share memory", kv->strides[0] = 1, kv->strides[1] = 0, ARGS.attn_sink = NULL);
    TAKEN(call, "one key head", resize(&call, DIM_h_kv, 1));
    set_up();
    for (int i = 0; i < 3 * 2 * TOPK; i++) INTS(indices)[i] = i & 1 ? INT32_MIN : INT32_MAX;
    check_taken(&call, "indices of no key"), check_written(&call, "indices of no key");
    TAKEN(call, "wild strides of dimensions of size 1", one_of_each(&call), INTS(indices)[0] = 0);
}

static void test_nothing(void)
{
    /* No token: no data needed. No key or no index: out is 0, max_logits -inf and lse +inf. */
    TAKEN(call, "s_q = 0", resize(&call, DIM_s_kv, 0), resize(&call, DIM_s_q, 0));
    for (int way = 0; way < 6; way++) {
        set_up_keys(way < 3, 0);
        if (way % 3 != 0) resize(&call, DIM_topk, 0);
        if (way % 3 != 1) resize(&call, way < 3 ? DIM_s_kv : DIM_pages, 0);
        check_taken(&call, "no key");
        check_no_key(&call, "no key");
    }
    for (int32_t format = FMLA_KV_FP8_656; format <= FMLA_KV_FP8_584; format++) {
        TAKEN(call, "a cache of no bytes", set_up_format(format), T(kv).shape[0] = 0,
              T(kv).tensor.byte_offset = 1);
        check_no_key(&call, "a cache of no bytes");
    }
}

/* The workspace does not grow with the number of tokens. */
static void test_workspace(void)
{
    static const int64_t tokens[] = {4096, 1 << 20, INT32_MAX};
    size_t bytes = 0, again = 0;
    for (int i = 0; i < 3; i++) {
        set_up();
        call.layout.topk = 2048, resize(&call, DIM_s_q, tokens[i]);
        CHECK_OK(fmla_sparse_prefill_workspace_size(&ARGS, i ? &again : &bytes, NULL));
        if (i) CHECK_EQ(again, bytes);
    }
    /* The oracle keeps a score of each listed key, in fp64. */
    set_up();
    resize(&call, DIM_d_qk, INT32_MAX), resize(&call, DIM_topk, INT32_MAX);
    ARGS.kernel = "ref";
    CHECK_OK(fmla_sparse_prefill_workspace_size(&ARGS, &bytes, NULL));
    CHECK(bytes >= INT32_MAX * sizeof(double), "%zu bytes for 2^31 keys", bytes);
}

int main(void)
{
    unsetenv("FLASHMLA_KERNEL");
    CHECK_OK(fmla_set_num_threads(2));
    test_refused();
    test_attention_rules(&call);
    test_formats(&call, set_up_format);
    test_taken();
    test_nothing();
    test_workspace();
    return check_done("test_sparse_prefill_errors");
}
