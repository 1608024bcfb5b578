/* SPDX-License-Identifier: MIT
 *
 * Every argument that fmla_mha_forward and the questions about it must reject, in both forms of a call, and odd ones that they must
 * take.
 */
#include "rules.h"

static void set_up(void);
static struct good_call call = {.operation = OP_MHA_FORWARD, .elsewhere = "q", .set_up = set_up};

#define ARGS    (*(fmla_mha_forward_args *)call.args)
#define T(name) (call.held[TENSOR_mha_forward_##name])
#define STARTS  (BIT(TENSOR_mha_forward_cu_seqlens_q) | BIT(TENSOR_mha_forward_cu_seqlens_k))

static void set_up_form(bool flat)
{
    struct layout layout = good_layout;
    layout.d_qk = 192, layout.d_v = 128, layout.s_k = 5, layout.tokens_q = 5, layout.tokens_k = 7;
    layout.flat = flat;
    begin(&call, &layout, flat ? 0 : STARTS);
    PUT(T(cu_seqlens_q), int32_t, 0, 2, 5);
    PUT(T(cu_seqlens_k), int32_t, 0, 4, 7);
}

SET_UP(set_up, set_up_form(false))
SET_UP(set_up_flat, set_up_form(true))

/* What is wrong in either form. */
static void test_either(void)
{
    refuse_by_descriptor(&call);
    REFUSED(call, "q", "h_q|3|2 key heads", resize(&call, DIM_h_q, 3));
    REFUSED(call, "q", "h_q|4|3 key heads", resize(&call, DIM_h_kv, 3));
    REFUSED(call, "k", "float16|must be bfloat16", T(k).tensor.dtype = fp16);
    REFUSED(call, "k", "bfloat16|must be float16", T(q).tensor.dtype = fp16);
    REFUSED(call, "v", "d_v|0", resize(&call, DIM_d_v, 0));
    REFUSED(call, "log_base", "1|0|2", ARGS.log_base = 1);
    REFUSED_HERE(call, "q", "d_qk is 96|64 128 192", resize(&call, DIM_d_qk, 96));
    REFUSED_HERE(call, "v", "d_v is 192|cpu-generic|64 128", resize(&call, DIM_d_v, 192),
                 name_kernel(&call, "cpu-generic"));
    TAKEN(call, "the oracle takes any sizes", resize_heads(&call, 40, 70), name_kernel(&call, "ref"));
    TAKEN(call, "fp16", call.layout.type = fp16, lay_out(&call));
    TAKEN(call, "without lse", ARGS.lse = NULL);
    TAKEN(call, "keys that share memory", T(k).strides[0] = T(v).strides[0] = 0);
    TAKEN(call, "one key head", resize(&call, DIM_h_kv, 1));
    TAKEN(call, "wild strides of dimensions of size 1", one_of_each(&call));
    take_by_descriptor(&call);
}

static void test_apart(void)
{
    test_either();
    REFUSED(call, "k", "4 dimensions|must have 3", T(q).tensor.ndim = 3, T(q).tensor.strides = NULL);
    REFUSED(call, "cu_seqlens_q", "given|must be NULL|q has 4 dimensions",
            ARGS.cu_seqlens_q = &T(cu_seqlens_q).tensor);
    REFUSED(call, "cu_seqlens_k", "given|must be NULL|q has 4 dimensions",
            ARGS.cu_seqlens_k = &T(cu_seqlens_k).tensor);
    REFUSED(call, "v", "s_k (dimension 1)|4|must be 5 as in k", T(v).shape[1] = 4);
    TAKEN(call, "heads before tokens", T(q).strides[2] = 2 * 192, T(q).strides[1] = 192);
    TAKEN(call, "b = 0", resize(&call, DIM_b, 0));
    TAKEN(call, "s_q = 0", resize(&call, DIM_s_q, 0));
    TAKEN(call, "s_k = 0", resize(&call, DIM_s_k, 0));
    check_no_key(&call, "s_k = 0");
}

static void test_flat(void)
{
    call.set_up = set_up_flat;
    test_either();
    REFUSED(call, "k", "3 dimensions|must have 4", T(q).tensor.ndim = 4);
    REFUSED(call, "cu_seqlens_q", "NULL|must be given|q has 3 dimensions", ARGS.cu_seqlens_q = NULL);
    REFUSED(call, "cu_seqlens_k", "NULL|must be given|q has 3 dimensions", ARGS.cu_seqlens_k = NULL);
    REFUSED(call, "cu_seqlens_q", "NULL|must be given|q has 3 dimensions",
            ARGS.cu_seqlens_q = ARGS.cu_seqlens_k = NULL);
    REFUSED(call, "cu_seqlens_k", "b + 1 (dimension 0) is 2, must be 3 as in cu_seqlens_q",
            T(cu_seqlens_k).shape[0] = 2);
    REFUSED(call, "cu_seqlens_q", "int64|must be int32", T(cu_seqlens_q).tensor.dtype.bits = 64);
    REFUSED(call, "v", "tokens (dimension 0)|6|must be 7 as in k", T(v).shape[0] = 6);
    TAKEN(call, "starts beyond all tokens and before the first",
          PUT(T(cu_seqlens_q), int32_t, INT32_MIN, INT32_MAX, INT32_MIN),
          PUT(T(cu_seqlens_k), int32_t, INT32_MAX, INT32_MIN, -1));
    check_no_key(&call, "keys that begin behind the last one");
    TAKEN(call, "maxima that are too small", ARGS.max_s_q = ARGS.max_s_k = 1);
    TAKEN(call, "no tokens", resize(&call, DIM_tokens_q, 0));
    TAKEN(call, "b = 0 without tokens", call.layout.tokens_q = 0, resize(&call, DIM_splits, 1));
    TAKEN(call, "no keys", resize(&call, DIM_tokens_k, 0));
    check_no_key(&call, "no keys");
    set_up_flat();
    resize(&call, DIM_splits, 1);
    check_taken(&call, "b = 0");
    CHECK(untouched(&call), "%s", "tokens of no request were written");
}

/* The workspace grows with requests, not with tokens; that of the oracle has a score of each key, in fp64. */
static void test_workspace(void)
{
    static const int64_t tokens[] = {4096, 1 << 20, INT32_MAX};
    const enum dimension all[2][2] = {{DIM_s_q, DIM_s_k}, {DIM_tokens_q, DIM_tokens_k}};
    for (int flat = 0; flat < 2; flat++) {
        size_t bytes = 0, again = 0;
        for (int i = 0; i < 3; i++) {
            set_up_form(flat);
            resize(&call, all[flat][0], tokens[i]), resize(&call, all[flat][1], tokens[i]);
            CHECK_OK(fmla_mha_forward_workspace_size(&ARGS, i ? &again : &bytes, NULL));
            if (i) CHECK_EQ(again, bytes);
        }
        resize(&call, flat ? DIM_splits : DIM_b, 1 << 20);
        CHECK_OK(fmla_mha_forward_workspace_size(&ARGS, &again, NULL));
        CHECK(again > bytes && again < bytes + (100 << 20), "%zu bytes for 2^20 requests, %zu for 2", again,
              bytes);
        name_kernel(&call, "ref");
        CHECK_OK(fmla_mha_forward_workspace_size(&ARGS, &bytes, NULL));
        CHECK(bytes >= INT32_MAX * sizeof(double), "%zu bytes for 2^31 keys", bytes);
    }
}

int main(void)
{
    unsetenv("FLASHMLA_KERNEL");
    CHECK_OK(fmla_set_num_threads(2));
    test_apart();
    test_flat();
    test_workspace();
    return check_done("test_mha_errors");
}
