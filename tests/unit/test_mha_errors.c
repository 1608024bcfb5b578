/* SPDX-License-Identifier: MIT
 *
 * Tests every argument that dense MHA, forward and backward, and its queries must reject, in both forms of
 * a call, and unusual ones that they must accept. Both operations have the same first tensors.
 */
#include "rules.h"

static void set_up(void);
static struct good_call calls[2] = {{.operation = OP_MHA_FORWARD, .elsewhere = "q", .set_up = set_up},
                                    {.operation = OP_MHA_BACKWARD, .elsewhere = "q", .set_up = set_up}};
static int backward; /* which one is tested */

#define call    (calls[backward])
#define T(name) (call.held[TENSOR_mha_forward_##name])
#define STARTS  (BIT(TENSOR_mha_forward_cu_seqlens_q) | BIT(TENSOR_mha_forward_cu_seqlens_k))
_Static_assert((int)TENSOR_mha_forward_cu_seqlens_k == (int)TENSOR_mha_backward_cu_seqlens_k &&
                   (int)TENSOR_mha_forward_v == (int)TENSOR_mha_backward_v,
               "tensors that both have are in the same places");

static void leave_out(const char *name)
{
    *(const fmla_tensor **)option(&call, name) = NULL;
}

static void give(const char *name, const struct held *held)
{
    *(const fmla_tensor **)option(&call, name) = &held->tensor;
}

/* A tensor of both operations, at different places. */
static struct held *held(const char *name)
{
    return &call.held[described_index(call.operation, name)];
}

static void leave_out_used(void)
{
    leave_out("seqused_q"), leave_out("seqused_k");
}

static void resize_requests(int64_t b)
{
    call.layout.b = b, resize(&call, DIM_splits, b + 1);
}

static void set_up_form(bool flat)
{
    struct layout layout = good_layout;
    layout.d_qk = 192, layout.d_v = 128, layout.s_k = 5, layout.tokens_q = 5, layout.tokens_k = 7;
    layout.flat = flat;
    begin(&call, &layout, flat ? 0 : STARTS);
    PUT(T(cu_seqlens_q), int32_t, 0, 2, 5);
    PUT(T(cu_seqlens_k), int32_t, 0, 4, 7);
    PUT(*held("seqused_q"), int32_t, 1, 3);
    PUT(*held("seqused_k"), int32_t, 4, 2);
}

SET_UP(set_up, set_up_form(false))
SET_UP(set_up_flat, set_up_form(true))

/* Errors in either form. */
static void test_either(void)
{
    refuse_by_descriptor(&call);
    REFUSED(call, "q", "h_q|3|2 key heads", resize(&call, DIM_h_q, 3));
    REFUSED(call, "q", "h_q|4|3 key heads", resize(&call, DIM_h_kv, 3));
    REFUSED(call, "k", "float16|must be bfloat16", T(k).tensor.dtype = fp16);
    REFUSED(call, "k", "bfloat16|must be float16", T(q).tensor.dtype = fp16);
    REFUSED(call, "v", "d_v|0", resize(&call, DIM_d_v, 0));
    REFUSED(call, "log_base", "1|0|2", put_int(&call, "log_base", 1));
    REFUSED_HERE(call, "q", "d_qk is 80|64 96 128 192 256", resize(&call, DIM_d_qk, 80));
    REFUSED_HERE(call, "v", "d_v is 192|cpu-generic|64 128 256", resize(&call, DIM_d_v, 192),
                 name_kernel(&call, "cpu-generic"));
    TAKEN(call, "the oracle takes any sizes", resize_heads(&call, 40, 70), name_kernel(&call, "ref"));
    TAKEN(call, "fp16", call.layout.type = fp16, lay_out(&call));
    if (!backward) TAKEN(call, "without lse", leave_out("lse"));
    TAKEN(call, "without a sink", leave_out("attn_sink"), backward ? leave_out("d_attn_sink") : (void)0);
    if (backward) {
        REFUSED(call, "d_attn_sink", "is a tensor|must be NULL without attn_sink", leave_out("attn_sink"));
        TAKEN(call, "without the gradient of lse", leave_out("dlse"));
        TAKEN(call, "a sink without its gradient", leave_out("d_attn_sink"));
    }
    TAKEN(call, "keys that share memory", T(k).strides[0] = T(v).strides[0] = 0);
    TAKEN(call, "one key head", resize(&call, DIM_h_kv, 1));
    TAKEN(call, "wild strides of dimensions of size 1", one_of_each(&call), leave_out_used());
    TAKEN(call, "all tokens in use", leave_out("seqused_q"));
    TAKEN(call, "all keys in use", leave_out("seqused_k"));
    TAKEN(call, "lengths in use below 0 and beyond the request",
          PUT(*held("seqused_q"), int32_t, INT32_MAX, -1),
          PUT(*held("seqused_k"), int32_t, INT32_MIN, INT32_MAX));
    TAKEN(call, "no token in use", PUT(*held("seqused_q"), int32_t, 0, INT32_MIN));
    check_no_key(&call, "no token in use");
    TAKEN(call, "no key in use", PUT(*held("seqused_k"), int32_t, 0, -1));
    check_no_key(&call, "no key in use");
    REFUSED(call, "seqused_q", "int64|must be int32", held("seqused_q")->tensor.dtype.bits = 64);
    REFUSED(call, "seqused_k", "2 dimensions, must have 1", held("seqused_k")->tensor.ndim = 2);
    take_by_descriptor(&call);
}

static void test_apart(void)
{
    test_either();
    REFUSED(call, "k", "4 dimensions|must have 3", T(q).tensor.ndim = 3, T(q).tensor.strides = NULL);
    REFUSED(call, "cu_seqlens_q", "given|must be NULL|q has 4 dimensions",
            give("cu_seqlens_q", &T(cu_seqlens_q)));
    REFUSED(call, "cu_seqlens_k", "given|must be NULL|q has 4 dimensions",
            give("cu_seqlens_k", &T(cu_seqlens_k)));
    REFUSED(call, "v", "s_k (dimension 1)|4|must be 5 as in k", T(v).shape[1] = 4);
    REFUSED(call, "seqused_q", "b (dimension 0) is 3, must be 2 as in q", held("seqused_q")->shape[0] = 3);
    REFUSED(call, "seqused_k", "b (dimension 0) is 1, must be 2 as in q", held("seqused_k")->shape[0] = 1);
    TAKEN(call, "heads before tokens", T(q).strides[2] = 2 * 192, T(q).strides[1] = 192);
    TAKEN(call, "b = 0", resize(&call, DIM_b, 0));
    TAKEN(call, "s_q = 0", resize(&call, DIM_s_q, 0));
    TAKEN(call, "s_k = 0", resize(&call, DIM_s_k, 0));
    if (!backward) check_no_key(&call, "s_k = 0");
}

static void test_flat(void)
{
    call.set_up = set_up_flat;
    test_either();
    REFUSED(call, "k", "3 dimensions|must have 4", T(q).tensor.ndim = 4);
    REFUSED(call, "cu_seqlens_q", "NULL|must be given|q has 3 dimensions", leave_out("cu_seqlens_q"));
    REFUSED(call, "cu_seqlens_k", "NULL|must be given|q has 3 dimensions", leave_out("cu_seqlens_k"));
    REFUSED(call, "cu_seqlens_q", "NULL|must be given|q has 3 dimensions", leave_out("cu_seqlens_q"),
            leave_out("cu_seqlens_k"));
    REFUSED(call, "cu_seqlens_k", "b + 1 (dimension 0) is 2, must be 3 as in cu_seqlens_q",
            T(cu_seqlens_k).shape[0] = 2);
    REFUSED(call, "cu_seqlens_q", "int64|must be int32", T(cu_seqlens_q).tensor.dtype.bits = 64);
    REFUSED(call, "seqused_q", "b (dimension 0) is 3, must be 2 as in cu_seqlens_q",
            held("seqused_q")->shape[0] = 3, leave_out("seqused_k"));
    REFUSED(call, "seqused_k", "b (dimension 0) is 1, must be 2 as in seqused_q",
            held("seqused_k")->shape[0] = 1);
    REFUSED(call, "v", "tokens (dimension 0)|6|must be 7 as in k", T(v).shape[0] = 6);
    TAKEN(call, "starts beyond all tokens and before the first",
          PUT(T(cu_seqlens_q), int32_t, INT32_MIN, INT32_MAX, INT32_MIN),
          PUT(T(cu_seqlens_k), int32_t, INT32_MAX, INT32_MIN, -1));
    check_no_key(&call, "keys that begin behind the last one");
    TAKEN(call, "maxima that are too small",
          *(int64_t *)option(&call, "max_s_q") = *(int64_t *)option(&call, "max_s_k") = 1);
    TAKEN(call, "no tokens", resize(&call, DIM_tokens_q, 0));
    TAKEN(call, "b = 0 without tokens", call.layout.tokens_q = 0, resize_requests(0));
    TAKEN(call, "no keys", resize(&call, DIM_tokens_k, 0));
    if (!backward) check_no_key(&call, "no keys");
    set_up_flat();
    resize_requests(0);
    check_taken(&call, "b = 0");
    if (backward)
        check_written(&call, "b = 0"), check_no_key(&call, "b = 0");
    else
        CHECK(untouched(&call), "%s", "tokens of no request were written");
}

static size_t bytes_now(void)
{
    struct answer answer = {0};
    CHECK(described_ask(call.operation, ASK_BYTES, call.args, &answer) == FMLA_OK, "%s", fmla_last_error());
    return answer.bytes;
}

/* The workspace grows with requests; not with tokens in forward, where long requests have room for the parts of
 * their splits, so many rows on two threads; by two numbers per row and one per 64 in backward; the oracle's has at
 * least one fp64 number per key. */
static void test_workspace(void)
{
    enum { PART_ROWS = (256 + 64 + 2 * 64) * 64 + 2 * 256 /* a tile of each thread */ };
    static const int64_t tokens[] = {4096, 1 << 20, INT32_MAX};
    const enum dimension all[2][2] = {{DIM_s_q, DIM_s_k}, {DIM_tokens_q, DIM_tokens_k}};
    for (int flat = 0; flat < 2; flat++) {
        size_t bytes = 0, again = 0, row = 0;
        for (int i = 0; i < 3; i++) {
            set_up_form(flat);
            resize(&call, all[flat][0], tokens[i]), resize(&call, all[flat][1], tokens[i]);
            row = (size_t)call.layout.h_q * (flat ? 1 : 2) * 2 * sizeof(float);
            again = bytes_now() -
                    (backward ? (size_t)tokens[i] * row + ((size_t)tokens[i] + 63) / 64 * row / 2 : 0);
            const size_t more = i == 1 && !backward ? PART_ROWS * (size_t)(4 * call.layout.d_v + 8) : 0;
            if (i)
                CHECK(again <= bytes + more + 128 && bytes <= again + 128, "%zu bytes, and %zu", again,
                      bytes);
            bytes = again;
        }
        resize(&call, all[flat][0], 4096), resize_requests(1 << 20);
        again =
            bytes_now() - (backward ? (size_t)(flat ? 4096 * row : (row / 2 * 4096) << 20) / 128 * 129 : 0);
        CHECK(again > bytes && again < bytes + (100 << 20), "%zu bytes for 2^20 requests, %zu for 2", again,
              bytes);
        set_up_form(flat), resize(&call, all[flat][1], INT32_MAX), name_kernel(&call, "ref");
        CHECK(bytes_now() >= INT32_MAX * sizeof(double), "%zu bytes for 2^31 keys", bytes_now());
    }
}

int main(void)
{
    unsetenv("FLASHMLA_KERNEL");
    CHECK_OK(fmla_set_num_threads(2));
    for (backward = 0; backward < 2; backward++) {
        test_apart();
        test_flat();
        test_workspace();
    }
    return check_done("test_mha_errors");
}
