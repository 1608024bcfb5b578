/* SPDX-License-Identifier: MIT
 *
 * Every argument that fmla_sparse_prefill and the questions about it must reject, and odd ones that they must take.
 */
#include "refusals.h"

enum { S_Q = 3, H_Q = 4, H_KV = 2, D_QK = 576, D_V = 512, S_KV = 60, PAGES = 6, PAGE = 10, TOPK = 40 };

static void set_up(void);
static struct good_call call = {.operation = OP_SPARSE_PREFILL, .elsewhere = "q", .set_up = set_up};

#define ARGS       (*(fmla_sparse_prefill_args *)call.args)
#define T(name)    (call.held[TENSOR_sparse_prefill_##name])
#define INTS(name) ((int32_t *)T(name).tensor.data)

static void set_up_keys(bool flat, int32_t format)
{
    struct layout layout = {.size = {[DIM_s_q] = S_Q,
                                     [DIM_h_q] = H_Q,
                                     [DIM_h_kv] = flat ? H_KV : 1,
                                     [DIM_d_qk] = format == FMLA_KV_FP8_584 ? 512 : D_QK,
                                     [DIM_d_v] = D_V,
                                     [DIM_s_kv] = S_KV,
                                     [DIM_pages] = PAGES,
                                     [DIM_page_size] = PAGE,
                                     [DIM_one_head] = 1,
                                     [DIM_topk] = TOPK},
                            .type = bf16,
                            .format = format ? format : FMLA_KV_BF16,
                            .flat = flat};
    begin(&call, &layout, 0);
    for (int i = 0; i < S_Q * layout.size[DIM_h_kv] * TOPK; i++) INTS(indices)[i] = i * 7 % S_KV;
    PUT(T(topk_length), int32_t, 20, 33, TOPK);
    ARGS.kv_format = format;
}

SET_UP(set_up, set_up_keys(true, 0))
SET_UP(set_up_pages, set_up_keys(false, 0))
/* Zeros are sound tokens. */
SET_UP(set_up_656, set_up_keys(false, FMLA_KV_FP8_656))
SET_UP(set_up_584, set_up_keys(false, FMLA_KV_FP8_584))

static void d_qk_and_d_v(int64_t d_qk, int64_t d_v)
{
    resize(&call, DIM_d_qk, d_qk), resize(&call, DIM_d_v, d_v);
}

static void test_formats(void)
{
    struct held *const kv = &T(kv);
    REFUSED(call, "q", "float16|must be bfloat16", T(q).tensor.dtype = fp16);
    REFUSED(call, "kv", "float16|must be bfloat16", kv->tensor.dtype = fp16);
    REFUSED(call, "out", "float16|must be bfloat16", T(out).tensor.dtype = fp16);
    REFUSED(call, "kv_format", "FP16|type of q|bfloat16", ARGS.kv_format = FMLA_KV_FP16);
    REFUSED(call, "kv_format", "0|kv|FP8_656|FP8_584", set_up_656(), ARGS.kv_format = 0);
    REFUSED(call, "kv", "uint8|bfloat16", set_up_656(), ARGS.kv_format = FMLA_KV_BF16);
    REFUSED(call, "kv", "bfloat16|one byte", set_up_pages(), ARGS.kv_format = FMLA_KV_FP8_656);
    REFUSED(call, "kv", "3 dimensions|must have 4", set_up_656(),
            HELD(kv, kv->tensor.data, kv->tensor.dtype, 3, S_KV, 1, 656));
    REFUSED(call, "kv", "3 dimensions|must have 4", ARGS.kv_format = FMLA_KV_FP8_584);
    REFUSED(call, "kv", "bytes|655|656|FP8_656", set_up_656(), kv->shape[3] = 655);
    REFUSED(call, "kv", "bytes|584|656|FP8_656", set_up_584(), ARGS.kv_format = FMLA_KV_FP8_656);
    REFUSED(call, "q", "d_qk|576|512|FP8_584", set_up_584(), T(q).shape[2] = 576, T(q).tensor.strides = NULL);
    REFUSED(call, "q", "d_qk|512|576|FP8_656", set_up_656(), T(q).shape[2] = 512);
    REFUSED(call, "kv", "stride|0|multiple of 4", set_up_656(), kv->strides[0] += 2);
    REFUSED(call, "kv", "stride|1|658|multiple of 4", set_up_656(), kv->strides[1] += 2);
    REFUSED(call, "kv", "stride|0|multiple of 2", set_up_584(), kv->strides[0] += 1);
    REFUSED(call, "kv", "stride|1|586|584|one piece", set_up_584(), kv->strides[1] += 2);
    REFUSED_CALL(call, "kv", "multiple of 4", set_up_656(), kv->tensor.byte_offset = 2);
    REFUSED_CALL(call, "kv", "multiple of 2", set_up_584(), kv->tensor.byte_offset = 1);

    TAKEN(call, "pages", set_up_pages());
    TAKEN(call, "a format that is named", ARGS.kv_format = FMLA_KV_BF16);
    TAKEN(call, "FP8_656", set_up_656());
    TAKEN(call, "FP8_584", set_up_584());
    TAKEN(call, "another type of 1 byte", set_up_656(), kv->tensor.dtype.code = FMLA_TYPE_INT);
    TAKEN(call, "tokens apart", set_up_656(), kv->shape[0] = 2, kv->strides[1] += 4, kv->strides[0] += 68,
          kv->tensor.byte_offset = 4);
    TAKEN(call, "pages apart", set_up_584(), kv->shape[0] = 2, kv->strides[0] += 2,
          kv->tensor.byte_offset = 2);
}

static void test_refused(void)
{
    void (*const set_ups[])(void) = {set_up, set_up_pages, set_up_656, set_up_584};
    for (int i = 0; i < 4; i++) {
        call.set_up = set_ups[i];
        refuse_by_descriptor(&call);
    }
    call.set_up = set_up;
    REFUSED(call, "q", "h_q|3|2 key heads", resize(&call, DIM_h_q, 3));
    REFUSED(call, "q", "h_q|4|3 key heads", resize(&call, DIM_h_kv, 3));
    REFUSED(call, "q", "h_q|2147483648", resize(&call, DIM_h_q, INT64_C(1) << 31));
    REFUSED(call, "indices", "h_kv|2|1", set_up_pages(), T(indices).shape[1] = 2);
    REFUSED(call, "out", "d_v|0", resize(&call, DIM_d_v, 0));
    /* The row is long enough to be written, so only the check stands in the way. */
    REFUSED(call, "out", "d_v|512|256", resize(&call, DIM_d_qk, 256));
    REFUSED(call, "log_base", "1|0|2", ARGS.log_base = 1);
    REFUSED_HERE(call, "q", "d_qk is 320|512|576", d_qk_and_d_v(320, 256));
    REFUSED_HERE(call, "q", "d_qk is 320|cpu-generic|512|576", d_qk_and_d_v(320, 256),
                 ARGS.kernel = "cpu-generic");
    REFUSED_HERE(call, "q", "d_v is 128|512", resize(&call, DIM_d_v, 128));
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
    TAKEN(call, "key heads first", kv->strides[0] = D_QK, kv->strides[1] = S_KV * D_QK);
    TAKEN(call, "keys that share memory", kv->strides[0] = 1, kv->strides[1] = 0, ARGS.attn_sink = NULL);
    TAKEN(call, "one key head", resize(&call, DIM_h_kv, 1));
    set_up();
    for (int i = 0; i < S_Q * H_KV * TOPK; i++) INTS(indices)[i] = i & 1 ? INT32_MIN : INT32_MAX;
    check_taken(&call, "indices of no key"), check_written(&call, "indices of no key");
    TAKEN(call, "the oracle takes any d_qk", d_qk_and_d_v(320, 256), ARGS.kernel = "ref");
    TAKEN(call, "wild strides of dimensions of size 1", one_of_each(&call), INTS(indices)[0] = 0);
}

static void test_nothing(void)
{
    /* No token: no data needed. No key or no index: out is 0, max_logits -inf and lse +inf. */
    TAKEN(call, "s_q = 0", resize(&call, DIM_s_kv, 0), resize(&call, DIM_s_q, 0));
    for (int way = 0; way < 6; way++) {
        if (way >= 3)
            set_up_pages();
        else
            set_up();
        if (way % 3 != 0) resize(&call, DIM_topk, 0);
        if (way % 3 != 1) resize(&call, way < 3 ? DIM_s_kv : DIM_pages, 0);
        check_taken(&call, "no key");
        check_no_key(&call, "no key");
    }
    /* A cache without pages may begin anywhere, as every tensor without elements. */
    for (int32_t format = FMLA_KV_FP8_656; format <= FMLA_KV_FP8_584; format++) {
        TAKEN(call, "a cache of no bytes at an odd address", set_up_keys(false, format), T(kv).shape[0] = 0,
              T(kv).tensor.byte_offset = 1);
        check_no_key(&call, "a cache of no bytes at an odd address");
    }
}

/* The workspace does not grow with the tokens, however many they are. */
static void test_workspace(void)
{
    static const int64_t tokens[] = {4096, 1 << 20, INT32_MAX};
    size_t bytes = 0, again = 0;
    for (int i = 0; i < 3; i++) {
        set_up();
        call.layout.size[DIM_topk] = 2048;
        resize(&call, DIM_s_q, tokens[i]);
        CHECK(fmla_sparse_prefill_workspace_size(&ARGS, i ? &again : &bytes, NULL) == FMLA_OK, "%s",
              fmla_last_error());
        if (i) CHECK_EQ(again, bytes);
    }
    /* The oracle has a score of each key that is listed, in fp64. */
    set_up();
    resize(&call, DIM_d_qk, INT32_MAX), resize(&call, DIM_topk, INT32_MAX);
    ARGS.kernel = "ref";
    CHECK(fmla_sparse_prefill_workspace_size(&ARGS, &bytes, NULL) == FMLA_OK, "%s", fmla_last_error());
    CHECK(bytes >= INT32_MAX * sizeof(double), "%zu bytes for 2^31 keys", bytes);
}

int main(void)
{
    unsetenv("FLASHMLA_KERNEL");
    CHECK(!fmla_set_num_threads(2), "%s", fmla_last_error());
    test_refused();
    test_formats();
    test_taken();
    test_nothing();
    test_workspace();
    return check_done("test_sparse_prefill_errors");
}
