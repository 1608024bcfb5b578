/* SPDX-License-Identifier: MIT
 *
 * Tests every argument that fmla_dense_decode and its queries must reject, and unusual ones that they must
 * accept.
 */
#include "plans.h"
#include "rules.h"

static void set_up(void);
static struct good_call call = {.operation = OP_DENSE_DECODE, .elsewhere = "q", .set_up = set_up};

#define ARGS    (*(fmla_dense_decode_args *)call.args)
#define T(name) (call.held[TENSOR_dense_decode_##name])

/* Zeros are valid tokens of byte caches, which have one key head. */
static void set_up_products(int32_t format, int32_t products, bool codes)
{
    struct layout layout = good_layout;
    const bool of_cache = format == FMLA_KV_FP8_576;
    layout.codes = codes;
    if (format) layout.format = format;
    if (cache_formats[layout.format].token) layout.h_kv = 1, layout.d_qk = cache_formats[layout.format].d_qk;
    begin(&call, &layout,
          BIT(TENSOR_dense_decode_partitions) | BIT(TENSOR_dense_decode_num_splits) |
              (codes ? 0 : BIT(TENSOR_dense_decode_q_scale)) |
              (of_cache ? 0 : BIT(TENSOR_dense_decode_kv_scale)));
    PUT(T(block_table), int32_t, 4, 0, -1, 5, 1, 2);
    PUT(T(seqlens), int32_t, 20, 33);
    ARGS.kv_format = format, ARGS.products = products;
}

static void set_up_format(int32_t format)
{
    set_up_products(format, FMLA_PRODUCTS_BF16, false);
}

SET_UP(set_up, set_up_format(0))
SET_UP(set_up_656, set_up_format(FMLA_KV_FP8_656))
SET_UP(set_up_584, set_up_format(FMLA_KV_FP8_584))
SET_UP(set_up_576, set_up_format(FMLA_KV_FP8_576))
SET_UP(set_up_656_fp8, set_up_products(FMLA_KV_FP8_656, FMLA_PRODUCTS_FP8, false))
SET_UP(set_up_576_fp8, set_up_products(FMLA_KV_FP8_576, FMLA_PRODUCTS_FP8, false))
SET_UP(set_up_codes, set_up_products(FMLA_KV_FP8_576, FMLA_PRODUCTS_FP8, true))

static void (*const set_ups[])(void) = {set_up_656,     set_up_584,   set_up_576, set_up_656_fp8,
                                        set_up_576_fp8, set_up_codes, set_up};
enum { SET_UPS = sizeof set_ups / sizeof set_ups[0] };

#define TABLE   ((int32_t *)T(block_table).tensor.data)
#define LENGTHS ((int32_t *)T(seqlens).tensor.data)

/* No page of the table is used, whatever happens to the cache. */
static void set_up_no_key(int32_t format)
{
    set_up_format(format);
    LENGTHS[0] = LENGTHS[1] = 0;
}

static void test_refused(void)
{
    for (int i = 0; i < SET_UPS; i++) {
        call.set_up = set_ups[i];
        refuse_by_descriptor(&call);
    }
    REFUSED(call, "q", "h_q|3|multiple|2", resize(&call, DIM_h_q, 3));
    REFUSED(call, "q", "s_q · h_q|4294967296", resize(&call, DIM_s_q, 1 << 16),
            resize(&call, DIM_h_q, 1 << 16));
    /* Without a table, page r belongs to request r. */
    REFUSED(call, "kv_cache", "pages|1|2|block_table", ARGS.block_table = NULL, T(kv_cache).shape[0] = 1);
    REFUSED_CALL(call, "block_table", "[0, 1]|-1|6", TABLE[1] = -1);
    REFUSED_CALL(call, "block_table", "[1, 2]|6|6", TABLE[5] = 6);
    REFUSED_CALL(call, "block_table", "[0, 0]|4|0", resize(&call, DIM_pages, 0));
}

/* Features that sparse decode lacks: a scale of the cache, and several key heads in 16-bit formats. */
static void test_formats_of_dense(void)
{
    test_formats(&call, set_up_no_key);
    call.set_up = set_up_576;
    REFUSED(call, "kv_format", "0|FP8_656|FP8_584|FP8_576", ARGS.kv_format = 0);
    REFUSED(call, "kv_cache", "uint8|bfloat16", ARGS.kv_format = FMLA_KV_BF16);
    REFUSED(call, "kv_cache", "bytes|576|656|FP8_656", ARGS.kv_format = FMLA_KV_FP8_656);
    REFUSED(call, "q", "d_qk|512|576|FP8_576", T(q).shape[3] = 512);
    REFUSED(call, "kv_cache", "h_kv|2|[1, 1]", resize(&call, DIM_h_kv, 2));
    TAKEN(call, "a scale of 1", ARGS.kv_scale = NULL);
    TAKEN(call, "tokens at any byte", T(kv_cache).shape[0] = 5, TABLE[3] = 3, T(kv_cache).strides[1] = 577,
          T(kv_cache).strides[0] = 577 * T(kv_cache).shape[1], T(kv_cache).tensor.byte_offset = 1);
    call.set_up = set_up;
    REFUSED(call, "kv_cache", "bfloat16|one byte", ARGS.kv_format = FMLA_KV_FP8_576);
    REFUSED(call, "kv_scale", "must be NULL|FP8_656|cache scale", set_up_656(),
            ARGS.kv_scale = &T(kv_scale).tensor);
    REFUSED(call, "kv_scale", "must be NULL|FMLA_KV_BF16|cache scale", ARGS.kv_scale = &T(kv_scale).tensor);
}

/* Queries of FP8 products are bf16, or codes with the format whose queries are quantised as a whole. */
static void test_products(void)
{
    call.set_up = set_up_576_fp8;
    REFUSED(call, "q", "float16|bfloat16 or a type of one byte", T(q).tensor.dtype = fp16);
    REFUSED(call, "q_scale", "must be NULL|not codes", ARGS.q_scale = &T(q_scale).tensor);
    REFUSED(call, "products", "FMLA_PRODUCTS_FP8 (1)|FMLA_PRODUCTS_BF16 (0)|FMLA_KV_FP8_584|FP8_656|FP8_576",
            set_up_584(), ARGS.products = FMLA_PRODUCTS_FP8);
    REFUSED(call, "products", "FMLA_PRODUCTS_FP8 (1)|FMLA_KV_BF16|FP8_656|FP8_576", set_up(),
            ARGS.products = FMLA_PRODUCTS_FP8);
    call.set_up = set_up_codes;
    REFUSED(call, "q", "uint8|bfloat16 or float16", ARGS.products = FMLA_PRODUCTS_BF16);
    REFUSED(call, "q", "one byte|bfloat16|FMLA_KV_FP8_656|64", ARGS.kv_format = FMLA_KV_FP8_656,
            ARGS.kv_scale = NULL, T(kv_cache).shape[3] = 656, T(kv_cache).strides[2] = 656,
            T(kv_cache).strides[1] = 656, T(kv_cache).strides[0] = 656 * T(kv_cache).shape[1]);
    REFUSED(call, "kv_format", "FMLA_KV_FP16|one byte", ARGS.kv_format = FMLA_KV_FP16);
    REFUSED(call, "out", "uint8|bfloat16", T(out).tensor.dtype = T(q).tensor.dtype);
    TAKEN(call, "codes without a scale", ARGS.q_scale = NULL);
    TAKEN(call, "codes of float8_e4m3fn", T(q).tensor.dtype.code = 10);
    TAKEN(call, "codes at any byte", T(q).tensor.byte_offset = 1);
    call.set_up = set_up;
}

static void test_taken(void)
{
    for (int i = 0; i < SET_UPS; i++) {
        call.set_up = set_ups[i];
        take_by_descriptor(&call);
    }
    make_plans();
    TAKEN(call, "optional tensors left out", ARGS.block_table = ARGS.attn_sink = ARGS.lse = NULL,
          LENGTHS[1] = 5);
    TAKEN(call, "lengths outside of the cache", LENGTHS[0] = INT32_MIN, LENGTHS[1] = INT32_MAX);
    TAKEN(call, "a plan", give_plan(plan_data, plan_bytes));
    TAKEN(call, "unused pages", TABLE[2] = 2147480000, LENGTHS[1] = 0, TABLE[3] = TABLE[4] = INT32_MIN);
    TAKEN(call, "wild strides of dimensions of size 1", resize(&call, DIM_page_size, good_layout.page_size),
          one_of_each(&call), TABLE[0] = 0, LENGTHS[0] = 20);
    /* No request: no data needed. No table page: no key, out is 0 and lse +inf. */
    TAKEN(call, "b = 0", resize(&call, DIM_pages, 0), resize(&call, DIM_b, 0));
    for (int invariant = 0; invariant < 2; invariant++) {
        TAKEN(call, "max_pages = 0", resize(&call, DIM_max_pages, 0), resize(&call, DIM_pages, 0),
              ARGS.batch_invariant = invariant);
        check_no_key(&call, "max_pages = 0");
    }
}

/* More keys of a request than any memory: 2^61 + 67194, whose bytes as fp64 are few modulo 2^64. */
static void enlarge(void)
{
    T(block_table).shape[1] = T(block_table).strides[0] = (INT64_C(1) << 31) - 46339;
    T(kv_cache).shape[1] = (INT64_C(1) << 30) + 23170;
    for (int i = 0; i < 3; i++) T(kv_cache).strides[i] = 0; /* one key at every position */
}

static void set_up_many_pages(void)
{
    set_up();
    resize(&call, DIM_max_pages, 10000);
}

int main(void)
{
    CHECK(fmla_set_num_threads(2) == FMLA_OK, "%s", fmla_last_error());
    plan_for(&call, "seqlens", 32, 48);
    test_refused();
    test_formats_of_dense();
    test_products();
    test_taken();
    test_attention_rules(&call);
    call.set_up = set_up_many_pages;
    test_huge(&call, enlarge);
    call.set_up = set_up;
    test_plans();
    return check_done("test_decode_errors");
}
