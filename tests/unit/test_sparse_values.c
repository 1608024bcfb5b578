/* SPDX-License-Identifier: MIT
 *
 * Tests sparse decode: results computed by hand, for every kernel and the oracle, in every cache format;
 * and the oracle against the oracle of dense decode over the same keys, gathered.
 */
#include "values.h"

static const struct format formats[] = {
    {"BF16", FMLA_KV_BF16, KV_BF16, 576, 576, 0},
    {"BF16", 0, KV_BF16, 512, 512, 0},
    {"FP16", FMLA_KV_FP16, KV_FP16, 576, 576, 0},
    FORMATS_OF_BYTES,
};
enum { FORMATS = sizeof formats / sizeof formats[0] };

/* ---- By hand --------------------------------------------------------------------------------- */

enum { ALONE, WITH_EXTRA, ONLY_EXTRA, NO_KEY, LISTS };

static void check_by_hand(const char *kernel, const struct format *f, int list, int with_sink)
{
    static _Alignas(64) uint8_t cache[4 * 2 * WIDEST], extra[3 * 2 * WIDEST];
    static uint16_t q[WIDEST], out[D_V];
    /* With page size 2 the keys are at 3 and 2. The extra cache has page size 3 and one page: the key is
     * at 1. */
    static int32_t lists[LISTS][6] = {
        {-1, 3, 2147480000, 2, 4, 1}, {INT32_MIN, 4, 5, -7, 2, 1}, {0, 0, 0, 0, 0, 0}, {4, 5, -1, -2, 6, 0}};
    static int32_t lengths[LISTS] = {5, 5, 0, 5}, extra_lengths[LISTS] = {0, 2, 3, -1};
    static int32_t extra_lists[LISTS][4] = {{0}, {-1, 1, 0, 0}, {1, 3, 0, 1}, {1, 1, 1, 1}};
    memset(cache, 0xff, sizeof cache), memset(extra, 0xff, sizeof extra), memset(q, 0, sizeof q);
    memset(out, 0xff, sizeof out);
    q[0] = code_of(1.0f, f);
    put_keys(cache + bytes_of_page(f, 2), 2, 0, 1, f); /* slots 2 and 3 */
    put_token(extra, 3, 1, f, 0, 1);
    if (list == ONLY_EXTRA) put_token(extra, 3, 0, f, AT, 0), extra_lists[list][2] = 0;
    float lse = NAN, sink = 0.5f;
    fmla_sparse_decode_args args = FMLA_INIT(fmla_sparse_decode_args);
    args.q = TENSOR_OF(q, type_of(f), 1, 1, 1, f->d_qk);
    args.kv_cache = TENSOR_OF(cache, cache_type_of(f), 2, 2, 1, f->last);
    args.indices = TENSOR_OF(lists[list], i32, 1, 1, 6), args.topk_length = TENSOR_OF(&lengths[list], i32, 1);
    args.extra_kv_cache = list == ALONE ? NULL : TENSOR_OF(extra, cache_type_of(f), 1, 3, 1, f->last);
    args.extra_indices = list == ALONE ? NULL : TENSOR_OF(extra_lists[list], i32, 1, 1, 4);
    args.extra_topk_length = list == ALONE ? NULL : TENSOR_OF(&extra_lengths[list], i32, 1);
    args.attn_sink = with_sink ? TENSOR_OF(&sink, f32, 1) : NULL;
    args.out = TENSOR_OF(out, type_of(f), 1, 1, 1, D_V), args.lse = TENSOR_OF(&lse, f32, 1, 1, 1);
    args.kv_format = f->public_name, args.kernel = kernel;
    char which[96];
    snprintf(which, sizeof which, "%s, %s, d_qk %d, list %d, sink %d", kernel, f->name, (int)f->d_qk, list,
             with_sink);
    CHECK(run_in_room(OP_SPARSE_DECODE, &args) == FMLA_OK, "%s: %s", which, fmla_last_error());
    const int each = list != NO_KEY;
    check_row(which, out, (double)lse, f, work_out(each, each, 1.0, f->d_qk, with_sink ? &sink : NULL));
}

static void check_kernel(const fmla_capability *row)
{
    for (int f = 0; f < FORMATS; f++)
        for (int n = 0; n < 2 * LISTS && (formats[f].format != KV_FP16 || row->types & FMLA_TAKES_FP16); n++)
            check_by_hand(row->kernel, &formats[f], n / 2, n % 2);
}

/* ---- The oracle against that of dense decode ------------------------------------------------- */

enum { B = 3, S_Q = 2, H_Q = 3, TOPK = 40, EXTRA = 17, PAGES = 5, PAGE = 7, EXTRA_PAGES = 4, EXTRA_PAGE = 3 };

struct cache {
    uint8_t *bytes;
    int64_t pages, page_size, page_stride, slot_stride; /* in bytes */
};

/* Makes a cache with gaps between its pages and, if the format allows it, between its tokens; all NaN,
 * then tokens of random values. */
static void make_cache(struct cache *c, const struct format *f, int64_t pages, int64_t page_size,
                       struct random_state *random)
{
    const struct kv_layout layout = kv_layout_of(f->format, (int32_t)f->d_qk);
    float values[WIDEST] = {0};
    c->pages = pages, c->page_size = page_size;
    c->slot_stride = layout.scale_bytes ? f->last : layout.token_bytes + 12;
    c->page_stride = page_size * c->slot_stride + 36;
    c->bytes = aligned_alloc(64, (size_t)(pages * c->page_stride + 63) / 64 * 64);
    memset(c->bytes, 0xff, (size_t)(pages * c->page_stride));
    for (int64_t p = 0; p < pages; p++)
        for (int64_t s = 0; s < page_size; s++) {
            uint8_t *page = c->bytes + p * c->page_stride;
            for (int d = 0; d < f->d_qk; d++) values[d] = random_input(random, 0.0f, 0.3f);
            if (layout.scale_bytes)
                kv_store_token(&layout, page, page_size, s, values, 1.0f);
            else
                kv_store_token(&layout, page + s * c->slot_stride, 1, 0, values, 1.0f);
        }
}

/* Appends the keys that the list names, as values of q's type; returns the new number of keys. `to` has
 * that type. */
static int64_t gather(const struct cache *c, const struct format *f, const int32_t *list, int64_t length,
                      const struct format *to, uint16_t *keys, int64_t count)
{
    const struct kv_layout layout = kv_layout_of(f->format, (int32_t)f->d_qk);
    for (int64_t i = 0; i < length; i++) {
        if (list[i] < 0 || list[i] >= c->pages * c->page_size) continue;
        const int64_t slot = list[i] % c->page_size;
        const uint8_t *page = c->bytes + list[i] / c->page_size * c->page_stride;
        for (int d = 0; d < f->d_qk; d++) {
            const float x = layout.scale_bytes
                                ? kv_load(&layout, page, c->page_size, slot, d, 1.0f)
                                : kv_load(&layout, page + slot * c->slot_stride, 1, 0, d, 1.0f);
            keys[count * f->d_qk + d] = code_of(x, to);
        }
        count++;
    }
    return count;
}

static void draw_list(struct random_state *random, int32_t *list, int64_t count, int64_t slots)
{
    for (int64_t i = 0; i < count; i++)
        list[i] = (int32_t)(random_between(random, 0, 3)   ? random_between(random, 0, slots - 1)
                            : random_between(random, 0, 1) ? slots + random_between(random, 0, 9)
                                                           : -1 - random_between(random, 0, 9));
}

static const fmla_tensor *hold_cache(struct held *held, const struct cache *c, const struct format *f)
{
    const fmla_dtype type = cache_type_of(f);
    HELD(held, c->bytes, type, 4, c->pages, c->page_size, 1, f->last);
    held->strides[0] = c->page_stride * 8 / type.bits, held->strides[1] = c->slot_stride * 8 / type.bits;
    held->strides[2] = 12345;
    return &held->tensor;
}

/* with_extra: the format of the extra cache, or NULL. */
static void check_oracle(const struct format *f, const struct format *with_extra, struct random_state *random)
{
    static uint16_t q[B * S_Q * H_Q * WIDEST], out[B * S_Q * H_Q * D_V], expected[H_Q * D_V];
    static uint16_t keys[(TOPK + EXTRA) * WIDEST];
    static int32_t list[B * S_Q * TOPK], extra_list[B * S_Q * EXTRA];
    static float lse[B * H_Q * S_Q], sink[H_Q];
    int32_t lengths[B] = {TOPK + 9, -3, 23}, extra_lengths[B] = {0, EXTRA, 5};
    const fmla_dtype type = type_of(f);
    struct cache cache, extra;
    const struct format *const other = with_extra ? with_extra : f;
    make_cache(&cache, f, PAGES, PAGE, random), make_cache(&extra, other, EXTRA_PAGES, EXTRA_PAGE, random);
    for (size_t i = 0; i < sizeof q / 2; i++) q[i] = code_of(random_input(random, 0.0f, 1.0f), f);
    for (int h = 0; h < H_Q; h++) sink[h] = random_input(random, 0.0f, 1.0f);
    draw_list(random, list, B * S_Q * TOPK, PAGES * PAGE);
    draw_list(random, extra_list, B * S_Q * EXTRA, EXTRA_PAGES * EXTRA_PAGE);

    fmla_sparse_decode_args args = FMLA_INIT(fmla_sparse_decode_args);
    args.q = TENSOR_OF(q, type, B, S_Q, H_Q, f->d_qk);
    args.kv_cache = hold_cache(&(struct held){0}, &cache, f);
    args.indices = TENSOR_OF(list, i32, B, S_Q, TOPK), args.topk_length = TENSOR_OF(lengths, i32, B);
    args.extra_kv_cache = with_extra ? hold_cache(&(struct held){0}, &extra, other) : NULL;
    args.extra_indices = with_extra ? TENSOR_OF(extra_list, i32, B, S_Q, EXTRA) : NULL;
    args.extra_topk_length = with_extra ? TENSOR_OF(extra_lengths, i32, B) : NULL;
    args.attn_sink = TENSOR_OF(sink, f32, H_Q);
    args.out = TENSOR_OF(out, type, B, S_Q, H_Q, D_V), args.lse = TENSOR_OF(lse, f32, B, H_Q, S_Q);
    args.kv_format = f->public_name, args.kernel = "ref", args.softmax_scale = 0.05f;
    args.extra_kv_format = with_extra && other != f ? (int32_t)other->format + 1 : 0;
    CHECK(run_in_room(OP_SPARSE_DECODE, &args) == FMLA_OK, "%s: %s", f->name, fmla_last_error());

    for (int r = 0; r < B; r++)
        for (int j = 0; j < S_Q; j++) {
            const int64_t length = lengths[r] < 0 ? 0 : lengths[r] > TOPK ? TOPK : lengths[r];
            const int64_t token = r * S_Q + j;
            int64_t count = gather(&cache, f, list + token * TOPK, length, f, keys, 0);
            if (with_extra)
                count = gather(&extra, other, extra_list + token * EXTRA, extra_lengths[r], f, keys, count);
            float one_lse[H_Q];
            int32_t seqlen = (int32_t)count;
            fmla_dense_decode_args dense = FMLA_INIT(fmla_dense_decode_args);
            dense.q = TENSOR_OF(q + token * H_Q * f->d_qk, type, 1, 1, H_Q, f->d_qk);
            dense.kv_cache = TENSOR_OF(keys, type, 1, TOPK + EXTRA, 1, f->d_qk);
            dense.seqlens = TENSOR_OF(&seqlen, i32, 1), dense.attn_sink = args.attn_sink;
            dense.out = TENSOR_OF(expected, type, 1, 1, H_Q, D_V),
            dense.lse = TENSOR_OF(one_lse, f32, 1, H_Q, 1);
            dense.kernel = "ref", dense.softmax_scale = args.softmax_scale;
            CHECK_OK(run_in_room(OP_DENSE_DECODE, &dense));
            CHECK(!memcmp(expected, out + token * H_Q * D_V, sizeof expected),
                  "%s, extra %s: out of token %d, %d", f->name, with_extra ? other->name : "none", r, j);
            for (int h = 0; h < H_Q; h++)
                CHECK(lse[(r * H_Q + h) * S_Q + j] == one_lse[h],
                      "%s, extra %s: lse of token %d, %d: %g, expected %g", f->name,
                      with_extra ? other->name : "none", r, j, (double)lse[(r * H_Q + h) * S_Q + j],
                      (double)one_lse[h]);
        }
    free(cache.bytes), free(extra.bytes);
}

int main(void)
{
    struct random_state random = {11};
    for_kernels(OP_SPARSE_DECODE, check_kernel);
    for (int f = 0; f < FORMATS; f++) {
        const struct format *const of = &formats[f];
        check_oracle(of, NULL, &random);
        for (int e = 0; e < FORMATS; e++)
            if (formats[e].d_qk == of->d_qk && (of_bytes(&formats[e]) || formats[e].format == of->format))
                check_oracle(of, &formats[e], &random);
    }
    return check_done("test_sparse_values");
}
