/* SPDX-License-Identifier: MIT
 *
 * Tests every argument that fmla_cache_append, fmla_cache_gather and fmla_cache_convert must reject, and
 * unusual ones that they must accept.
 */
#include "refusals.h"

enum { TOKENS = 3, PAGES = 2, PAGE_SIZE = 4, ROPE = 64, D_QK = 576, BYTES = 656 };

static void set_up(void);
static struct good_call append = {.operation = OP_CACHE_APPEND,
                                  .elsewhere = "kv_cache",
                                  .set_up = set_up,
                                  .partly = true},
                        gather = {.operation = OP_CACHE_GATHER, .elsewhere = "kv_cache", .set_up = set_up};

static void set_up_convert(void);
static struct good_call convert = {
    .operation = OP_CACHE_CONVERT, .elsewhere = "dst_cache", .set_up = set_up_convert, .partly = true};

#define APPEND  (*(fmla_cache_append_args *)append.args)
#define GATHER  (*(fmla_cache_gather_args *)gather.args)
#define CONVERT (*(fmla_cache_convert_args *)convert.args)
#define C(name) (convert.held[TENSOR_cache_convert_##name])
#define A(name) (append.held[TENSOR_cache_append_##name])
#define G(name) (gather.held[TENSOR_cache_gather_##name])

/* A change made to both calls, and refused by both. */
#define BOTH(change)        (APPEND.change, GATHER.change)
#define BOTH_CACHES(change) (A(kv_cache).change, G(kv_cache).change)
#define REFUSED_BOTH(argument, words, ...)                                                                   \
    (REFUSED(append, argument, words, __VA_ARGS__), REFUSED(gather, argument, words, __VA_ARGS__))

static void set_up_format(int32_t format, int64_t d_qk)
{
    struct layout layout = good_layout;
    layout.pages = PAGES, layout.page_size = PAGE_SIZE, layout.d_qk = d_qk, layout.width = d_qk - ROPE;
    layout.type = f32, layout.format = format;
    begin(&append, &layout, 0), begin(&gather, &layout, 0);
    PUT(A(slot_mapping), int64_t, 7, -1, 2), PUT(G(slots), int64_t, 7, -1, 2);
    BOTH(kv_format = format);
    APPEND.norm_eps = 1e-6f, APPEND.rope_pairs = FMLA_ROPE_HALVES;
}

SET_UP(set_up, set_up_format(FMLA_KV_FP8_656, D_QK))
SET_UP(set_up_576, set_up_format(FMLA_KV_FP8_576, D_QK))
SET_UP(set_up_584, set_up_format(FMLA_KV_FP8_584, 512))
SET_UP(set_up_528, set_up_format(FMLA_KV_FP8_528_SPLIT, 512))
SET_UP(set_up_288, set_up_format(FMLA_KV_FP4_288, 512))
SET_UP(set_up_bf16, set_up_format(FMLA_KV_BF16, D_QK))

/* 64-bit positions; the token in between is skipped. */
static void put_positions(int64_t skipped, int64_t last)
{
    static int64_t positions[TOKENS];
    positions[0] = 4, positions[1] = skipped, positions[2] = last;
    A(positions).tensor.data = positions, A(positions).tensor.dtype = (fmla_dtype){FMLA_TYPE_INT, 64, 1};
}

static void leave_norm_out(void)
{
    APPEND.norm_weight = NULL, APPEND.norm_eps = 0.0f;
}

static void leave_rope_out(void)
{
    APPEND.positions = APPEND.rope_table = NULL, APPEND.rope_pairs = FMLA_ROPE_NONE;
}

static void test_refused(void)
{
    void (*const set_ups[])(void) = {set_up_576, set_up_584, set_up_528, set_up_288, set_up_bf16, set_up};
    for (int i = 0; i < 6; i++) {
        append.set_up = gather.set_up = set_ups[i];
        refuse_by_descriptor(&append), refuse_by_descriptor(&gather);
    }
    REFUSED_BOTH("kv_cache", "656|584", BOTH(kv_format = FMLA_KV_FP8_584));
    REFUSED_BOTH("kv_cache", "dtype is uint8|bfloat16", BOTH(kv_format = FMLA_KV_BF16));
    REFUSED_BOTH("cache_scale", "0.5|must be 0", BOTH(cache_scale = 0.5f));
    REFUSED_BOTH("cache_scale", "-1|finite and > 0", set_up_576(), BOTH(cache_scale = -1.0f));
    REFUSED_BOTH("cache_scale", "inf|finite", set_up_576(), BOTH(cache_scale = INFINITY));
    REFUSED_BOTH("cache_scale", "nan|finite", set_up_576(), BOTH(cache_scale = NAN));
    REFUSED_BOTH("kv_cache", "stride of dimension 1|592|584", set_up_584(), BOTH_CACHES(strides[1] = 592),
                 BOTH_CACHES(strides[0] = 8192));
    REFUSED_BOTH("kv_cache", "stride of dimension 1|544|528|FP8_528_SPLIT", set_up_528(),
                 BOTH_CACHES(strides[1] = 544), BOTH_CACHES(strides[0] = 8192));
    REFUSED_BOTH("kv_cache", "288|528", set_up_288(), BOTH(kv_format = FMLA_KV_FP8_528));
    REFUSED(append, "latent", "d_qk - 64|576|512", resize(&append, DIM_width, D_QK));
    REFUSED(append, "latent", "d_qk|512|576", APPEND.rope = NULL);
    REFUSED(append, "rope", "bfloat16|float32", A(rope).tensor.dtype = bf16);
    REFUSED(append, "rope", "NULL|64", set_up_format(FMLA_KV_BF16, ROPE));

    /* Norm and rotation of the values. */
    REFUSED(append, "norm_eps", "-1|finite", APPEND.norm_eps = -1.0f);
    REFUSED(append, "norm_eps", "inf|finite", APPEND.norm_eps = INFINITY);
    REFUSED(append, "norm_eps", "nan|finite", APPEND.norm_eps = NAN);
    REFUSED(append, "norm_eps", "1e-06|0 without norm_weight", APPEND.norm_weight = NULL);
    REFUSED(append, "positions", "NULL|rope_table", APPEND.positions = NULL);
    REFUSED(append, "rope_table", "NULL|positions", APPEND.rope_table = NULL);
    REFUSED(append, "rope_pairs", "0|1|2|rope_table", APPEND.rope_pairs = FMLA_ROPE_NONE);
    REFUSED(append, "rope_pairs", "2|0 without rope_table", APPEND.positions = APPEND.rope_table = NULL);
    REFUSED(append, "norm_weight", "NULL|104|512 or 576", set_up_format(FMLA_KV_BF16, 104));
    REFUSED(append, "rope_table", "NULL|640|512 or 576", set_up_format(FMLA_KV_BF16, 640),
            APPEND.norm_weight = NULL, APPEND.norm_eps = 0.0f);
    for (int i = 0; i < 8; i++) { /* a position outside the table, of a token that is not skipped */
        static const int64_t positions[] = {5, -1, INT64_MAX, INT64_MIN};
        char words[64];
        snprintf(words, sizeof words, "entry 2 is %" PRId64 "|0|5|rope_table", positions[i / 2]);
        REFUSED(append, "positions", words, put_positions(99, positions[i / 2]),
                APPEND.kernel = i % 2 ? "ref" : NULL);
    }

    /* An invalid slot is found before anything is written. */
    static const int64_t none[] = {8, -2, INT64_MAX, INT64_MIN};
    for (int i = 0; i < 8; i++) {
        char words[64];
        snprintf(words, sizeof words, "entry 2 is %" PRId64 "|-1|8", none[i / 2]);
        REFUSED(append, "slot_mapping", words, PUT(A(slot_mapping), int64_t, 7, -1, none[i / 2]),
                APPEND.kernel = i % 2 ? "ref" : NULL);
    }
}

/* Writes vectors into pages, and reads them back. */
static void check_both(const char *label, bool written)
{
    check_taken(&append, label);
    CHECK(untouched(&append) == !written && !count_outputs(&append, true), "append, %s: written or not",
          label);
    GATHER.kv_cache = APPEND.kv_cache;
    check_taken(&gather, label), check_written(&gather, label);
    const float *in = A(latent).tensor.data, *out = G(out).tensor.data;
    if (!written) return;
    CHECK(out[0] == in[0] && out[D_QK] == 0.0f && out[2 * D_QK - 1] == 0.0f, "gather, %s: %g %g %g", label,
          (double)out[0], (double)out[D_QK], (double)out[2 * D_QK - 1]);
}
#define TAKEN_BOTH(label, written, ...)                                                                      \
    (set_up(), __VA_ARGS__, leave_norm_out(), leave_rope_out(), check_both(label, written))

static void no_slots(void)
{
    PUT(A(slot_mapping), int64_t, -1, -1, -1), PUT(G(slots), int64_t, -1, -1, -1);
}

static void test_taken(void)
{
    struct held *const cache = &A(kv_cache);
    take_by_descriptor(&append), take_by_descriptor(&gather);
    TAKEN_BOTH("as it is", true, (void)0);
    TAKEN_BOTH("another type of one byte", true, cache->tensor.dtype.code = FMLA_TYPE_FLOAT8_E4M3FN);
    TAKEN_BOTH("pages apart", true, resize(&append, DIM_pages, 2 * PAGES), cache->shape[0] = PAGES,
               cache->strides[0] *= 2);
    TAKEN_BOTH("one page, of any stride", true, resize(&append, DIM_page_size, PAGES * PAGE_SIZE),
               resize(&append, DIM_pages, 1), cache->strides[0] = INT64_MAX);
    TAKEN_BOTH("pages of one slot, of any stride", true, resize(&append, DIM_pages, PAGES * PAGE_SIZE),
               resize(&append, DIM_page_size, 1), cache->strides[1] = INT64_MAX);
    TAKEN_BOTH("slots apart", true, resize(&append, DIM_page_size, PAGE_SIZE + 1),
               cache->shape[1] = PAGE_SIZE, cache->strides[1] = BYTES + 3,
               cache->strides[0] = PAGE_SIZE * (BYTES + 3));
    TAKEN_BOTH("one tensor of all values", true, resize(&append, DIM_width, D_QK), APPEND.rope = NULL);
    TAKEN(append, "a position of a token that is skipped", put_positions(INT64_MIN, 0));
    TAKEN(append, "no norm", leave_norm_out());
    TAKEN(append, "no RoPE", leave_rope_out());
    TAKEN_BOTH("FP8_576", true, set_up_576(), BOTH(cache_scale = 1.0f));
    TAKEN_BOTH("no slots", false, no_slots());
    TAKEN_BOTH("no tokens", false, resize(&append, DIM_tokens, 0), resize(&gather, DIM_tokens, 0));
    TAKEN_BOTH("no pages", false, resize(&append, DIM_pages, 0), resize(&gather, DIM_pages, 0), no_slots());
    /* The last token of a slot remains, on any number of threads; at an odd address. */
    set_up(), leave_norm_out(), leave_rope_out();
    cache->tensor.byte_offset = 1, GATHER.kv_cache = APPEND.kv_cache;
    PUT(A(slot_mapping), int64_t, 5, 5, 5), PUT(G(slots), int64_t, 5, 5, 5);
    check_taken(&append, "one slot"), check_taken(&gather, "one slot"), check_written(&gather, "one slot");
    const float *rope = A(rope).tensor.data, *out = G(out).tensor.data;
    for (int t = 0; t < TOKENS; t++)
        CHECK(out[t * D_QK + D_QK - ROPE] == rope[(TOKENS - 1) * ROPE], "one slot: token %d", t);
}

/* ---- Convert -------------------------------------------------------------------------------- */

static void set_up_between(int32_t from, int32_t to, int64_t d_qk)
{
    struct layout layout = good_layout;
    layout.pages = layout.extra_pages = PAGES, layout.page_size = PAGE_SIZE, layout.extra_page_size = 5;
    layout.d_qk = d_qk, layout.format = from, layout.extra_format = to;
    begin(&convert, &layout, 0);
    PUT(C(src_slots), int64_t, 7, -1, 2), PUT(C(dst_slots), int64_t, 9, 1, 0);
    CONVERT.src_format = from, CONVERT.dst_format = to;
}

SET_UP(set_up_convert, set_up_between(FMLA_KV_FP8_656, FMLA_KV_FP8_576, D_QK))
SET_UP(set_up_from_bf16, set_up_between(FMLA_KV_BF16, FMLA_KV_FP8_656, D_QK))
SET_UP(set_up_to_bf16, set_up_between(FMLA_KV_FP8_584, FMLA_KV_BF16, 512))
SET_UP(set_up_fp4, set_up_between(FMLA_KV_FP8_528, FMLA_KV_FP4_288_SPLIT, 512))

static void test_convert(void)
{
    void (*const set_ups[])(void) = {set_up_from_bf16, set_up_to_bf16, set_up_fp4, set_up_convert};
    for (int i = 0; i < 4; i++) {
        convert.set_up = set_ups[i];
        refuse_by_descriptor(&convert), take_by_descriptor(&convert);
    }
    REFUSED(convert, "dst_format", "FMLA_KV_FP8_584|512|576|src_cache",
            set_up_between(FMLA_KV_FP8_656, FMLA_KV_FP8_584, D_QK));
    REFUSED(convert, "dst_cache", "d_qk|512|576|src_cache", set_up_from_bf16(),
            CONVERT.dst_format = FMLA_KV_BF16, set_up_between(FMLA_KV_FP8_656, FMLA_KV_BF16, 512));
    REFUSED(convert, "src_scale", "0.5|must be 0|FMLA_KV_FP8_656", CONVERT.src_scale = 0.5f);
    REFUSED(convert, "dst_scale", "-1|finite and > 0", CONVERT.dst_scale = -1.0f);
    REFUSED(convert, "dst_scale", "nan|finite", CONVERT.dst_scale = NAN);
    static const int64_t none[] = {10, -2, INT64_MAX, INT64_MIN};
    for (int i = 0; i < 16; i++) {
        const bool source = i & 1;
        char words[64];
        const int64_t slot = source && i / 4 == 0 ? 8 : none[i / 4];
        snprintf(words, sizeof words, "entry 2 is %" PRId64 "|-1|%d", slot, source ? 8 : 10);
        REFUSED(convert, source ? "src_slots" : "dst_slots", words,
                PUT(C(src_slots), int64_t, 7, -1, source ? slot : 2),
                PUT(C(dst_slots), int64_t, 9, 1, source ? 0 : slot), CONVERT.kernel = i & 2 ? "ref" : NULL);
    }
    TAKEN(convert, "a slot of a token that is skipped by the other list",
          PUT(C(dst_slots), int64_t, 9, 77, 0));
    TAKEN(convert, "a scale", CONVERT.dst_scale = 0.5f);
    set_up_convert(), resize(&convert, DIM_tokens, 0), check_taken(&convert, "no tokens");
    CHECK(untouched(&convert), "no tokens, and something was written");
}

int main(void)
{
    test_refused();
    test_convert();
    test_taken();
    return check_done("test_cache_errors");
}
