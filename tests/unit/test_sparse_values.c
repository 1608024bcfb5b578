/* SPDX-License-Identifier: MIT
 *
 * Sparse decode: results worked out by hand, for every kernel and the oracle, in every cache format; and the oracle held
 * against the oracle of dense decode over the same keys, gathered.
 *
 * By hand: one row, q = (1, 0, 0, …), and two keys k0 = (0, …, 1 at 130, …), k1 = (24, 0, …). The scores are 0 and
 * s = 24 / sqrt(d_qk): lse = ln(1 + e^s), and out[130] = 1 / (1 + e^s), the weight of k0. All else in the caches is NaN,
 * scales too, and all else in the lists is no key.
 */
#include "check.h"

#include "flashmla/flashmla.h"
#include "kvformat.h"
#include "random.h"

#include <math.h>
#include <stdlib.h>

enum {
    D_V = 512,
    WIDEST = 576,
    ONE = 0x3f80,
    AT = 130 /* of another group of values than 0, in both formats */
};

static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
static const fmla_dtype bf16 = {FMLA_TYPE_BFLOAT, 16, 1}, fp16 = {FMLA_TYPE_FLOAT, 16, 1},
                        f32 = {FMLA_TYPE_FLOAT, 32, 1}, i32 = {FMLA_TYPE_INT, 32, 1},
                        byte = {FMLA_TYPE_UINT, 8, 1};

static const struct format {
    const char *name;
    int32_t public_name;
    enum kv_format format;
    int64_t d_qk, last; /* last: of the tensor's dimensions */
} formats[] = {
    {"BF16", FMLA_KV_BF16, KV_BF16, 576, 576},          {"BF16", 0, KV_BF16, 512, 512},
    {"FP16", FMLA_KV_FP16, KV_FP16, 576, 576},          {"FP8_656", FMLA_KV_FP8_656, KV_FP8_656, 576, 656},
    {"FP8_584", FMLA_KV_FP8_584, KV_FP8_584, 512, 584},
};
enum { FORMATS = sizeof formats / sizeof formats[0] };

/* A tensor without strides. */
struct held {
    int64_t shape[4];
    fmla_tensor tensor;
};

static const fmla_tensor *hold(struct held *held, void *data, fmla_dtype dtype, int ndim, int64_t a,
                               int64_t b, int64_t c, int64_t d)
{
    *held = (struct held){{a, b, c, d}, {data, cpu, ndim, dtype, NULL, NULL, 0}};
    held->tensor.shape = held->shape;
    return &held->tensor;
}

static fmla_status run(fmla_sparse_decode_args *args)
{
    size_t alignment = 0;
    fmla_status status = fmla_sparse_decode_workspace_size(args, &args->workspace_size, &alignment);
    if (status) return status;
    args->workspace = aligned_alloc(64, (args->workspace_size + 63) / 64 * 64 + 64);
    memset(args->workspace, 0xff, args->workspace_size);
    status = fmla_sparse_decode(args);
    free(args->workspace);
    return status;
}

/* ---- By hand --------------------------------------------------------------------------------- */

/* A byte, a scale or a value, spelled out; nothing here goes through kvformat.h but where a token is. */
static void put16(uint8_t *at, uint16_t value)
{
    memcpy(at, &value, sizeof value);
}

/* One token: `value` at `d`, 0 elsewhere. Quantised it is code · scale, with that group's scale and others elsewhere. */
static void put_token(uint8_t *page, int64_t page_size, int64_t slot, const struct format *f, int64_t d,
                      int twenty_four)
{
    static const float scales[4] = {2.0f, 0.25f, 8.0f, 1.0f};
    static const uint8_t exponents[7] = {128, 131, 125, 127, 120, 140, 127}; /* 2, 16, 1/4, … */
    if (f->last == 656) {
        uint8_t *token = page + slot * 656;
        memset(token, 0, 656);
        memcpy(token + 512, scales, sizeof scales);
        token[d] = twenty_four ? 0x54 /* 12 · 2 */ : 0x48 /* 4 · 0.25 */;
    } else if (f->last == 584) {
        uint8_t *token = page + slot * 576;
        memset(token, 0, 576);
        memcpy(page + page_size * 576 + slot * 8, exponents, 7); /* and not the pad byte */
        token[d] = twenty_four ? 0x54 /* 12 · 2 */ : 0x48 /* 4 · 1/4 */;
    } else {
        uint8_t *token = page + slot * f->d_qk * 2;
        memset(token, 0, (size_t)f->d_qk * 2);
        put16(token + 2 * d,
              f->format == KV_FP16 ? (twenty_four ? 0x4e00 : 0x3c00) : (twenty_four ? 0x41c0 : 0x3f80));
    }
}

enum { ALONE, WITH_EXTRA, ONLY_EXTRA, NO_KEY, LISTS };

static float value_of(uint16_t v, const struct format *f)
{
    return f->format == KV_FP16 ? num_from_fp16(v) : num_from_bf16(v);
}

static int near(float value, float expected, float relative)
{
    return value == expected || fabsf(value - expected) <= relative * fabsf(expected);
}

static void check_by_hand(const char *kernel, const struct format *f, int list, int with_sink)
{
    static _Alignas(64) uint8_t cache[4 * 2 * WIDEST], extra[3 * 2 * WIDEST];
    static uint16_t q[WIDEST], out[D_V];
    /* Page size 2: the keys are those at 3 and 2. Page size 3, one page, for the extra cache: at 1. */
    static int32_t lists[LISTS][6] = {
        {-1, 3, 2147480000, 2, 4, 1}, {INT32_MIN, 4, 5, -7, 2, 1}, {0, 0, 0, 0, 0, 0}, {4, 5, -1, -2, 6, 0}};
    static int32_t lengths[LISTS] = {5, 5, 0, 5}, extra_lengths[LISTS] = {0, 2, 3, -1};
    static int32_t extra_lists[LISTS][4] = {{0}, {-1, 1, 0, 0}, {1, 3, 0, 1}, {1, 1, 1, 1}};
    const fmla_dtype type = f->format == KV_FP16 ? fp16 : bf16, kv_type = f->last > f->d_qk ? byte : type;
    memset(cache, 0xff, sizeof cache), memset(extra, 0xff, sizeof extra), memset(q, 0, sizeof q);
    memset(out, 0xff, sizeof out);
    q[0] = f->format == KV_FP16 ? 0x3c00 : ONE;
    const int64_t page_bytes = f->last > f->d_qk ? 2 * f->last : 4 * f->d_qk;
    put_token(cache + page_bytes, 2, 0, f, AT, 0); /* slot 2 */
    put_token(cache + page_bytes, 2, 1, f, 0, 1);  /* slot 3 */
    put_token(extra, 3, 1, f, 0, 1);
    if (list == ONLY_EXTRA) put_token(extra, 3, 0, f, AT, 0), extra_lists[list][2] = 0;
    float lse = NAN, sink = 0.5f;
    struct held hq, hkv, hidx, hlen, hextra, hxidx, hxlen, hout, hlse, hsink;
    fmla_sparse_decode_args args = FMLA_INIT(fmla_sparse_decode_args);
    args.q = hold(&hq, q, type, 4, 1, 1, 1, f->d_qk);
    args.kv_cache = hold(&hkv, cache, kv_type, 4, 2, 2, 1, f->last);
    args.indices = hold(&hidx, lists[list], i32, 3, 1, 1, 6, 0);
    args.topk_length = hold(&hlen, &lengths[list], i32, 1, 1, 0, 0, 0);
    if (list != ALONE) {
        args.extra_kv_cache = hold(&hextra, extra, kv_type, 4, 1, 3, 1, f->last);
        args.extra_indices = hold(&hxidx, extra_lists[list], i32, 3, 1, 1, 4, 0);
        args.extra_topk_length = hold(&hxlen, &extra_lengths[list], i32, 1, 1, 0, 0, 0);
    }
    args.attn_sink = with_sink ? hold(&hsink, &sink, f32, 1, 1, 0, 0, 0) : NULL;
    args.out = hold(&hout, out, type, 4, 1, 1, 1, D_V);
    args.lse = hold(&hlse, &lse, f32, 3, 1, 1, 1, 0);
    args.kv_format = f->public_name, args.kernel = kernel;
    char which[96];
    snprintf(which, sizeof which, "%s, %s, d_qk %d, list %d, sink %d", kernel, f->name, (int)f->d_qk, list,
             with_sink);
    CHECK(run(&args) == FMLA_OK, "%s: %s", which, fmla_last_error());
    const float expected_lse = list == NO_KEY ? INFINITY : f->d_qk == 576 ? 1.3132617f : 1.3579662f;
    const float weight = f->d_qk == 576 ? 0.26894142f : 0.25718332f;
    const float factor = with_sink ? 1.0f / (1.0f + expf(0.5f - expected_lse)) : 1.0f;
    const float expected = list == NO_KEY ? 0.0f : weight * factor;
    CHECK(near(lse, expected_lse, 1e-5f), "%s: lse %g, expected %g", which, (double)lse,
          (double)expected_lse);
    CHECK(near(value_of(out[AT], f), expected, 1.0f / 128), "%s: out %g, expected %g", which,
          (double)value_of(out[AT], f), (double)expected);
    int64_t wrong = 0;
    for (int d = 1; d < D_V; d++) wrong += d != AT && value_of(out[d], f) != 0.0f;
    CHECK(wrong == 0, "%s: %d values of out are not 0", which, (int)wrong);
}

/* ---- The oracle against that of dense decode ------------------------------------------------- */

enum { B = 3, S_Q = 2, H_Q = 3, TOPK = 40, EXTRA = 17, PAGES = 5, PAGE = 7, EXTRA_PAGES = 4, EXTRA_PAGE = 3 };

struct cache {
    uint8_t *bytes;
    int64_t pages, page_size, page_stride, slot_stride; /* in bytes */
};

/* A cache with gaps between its pages, and where the format lets them lie apart between its tokens; all NaN, then
 * tokens of random values. */
static void make_cache(struct cache *c, const struct format *f, int64_t pages, int64_t page_size,
                       struct random_state *random)
{
    const struct kv_layout layout = kv_layout_of(f->format, (int32_t)f->d_qk);
    float values[WIDEST] = {0};
    c->pages = pages, c->page_size = page_size;
    c->slot_stride = f->last == 584 ? 584 : layout.token_bytes + 12;
    c->page_stride = page_size * c->slot_stride + 36;
    c->bytes = aligned_alloc(64, (size_t)(pages * c->page_stride + 63) / 64 * 64);
    memset(c->bytes, 0xff, (size_t)(pages * c->page_stride));
    for (int64_t p = 0; p < pages; p++)
        for (int64_t s = 0; s < page_size; s++) {
            uint8_t *page = c->bytes + p * c->page_stride;
            for (int d = 0; d < f->d_qk; d++) values[d] = random_input(random, 0.0f, 0.3f);
            if (f->last == 584)
                kv_store_token(&layout, page, page_size, s, values, 1.0f);
            else
                kv_store_token(&layout, page + s * c->slot_stride, 1, 0, values, 1.0f);
        }
}

/* Appends the keys that the list names, as values of q's type; returns how many there are then. */
static int64_t gather(const struct cache *c, const struct format *f, const int32_t *list, int64_t length,
                      uint16_t *keys, int64_t count)
{
    const struct kv_layout layout = kv_layout_of(f->format, (int32_t)f->d_qk);
    for (int64_t i = 0; i < length; i++) {
        if (list[i] < 0 || list[i] >= c->pages * c->page_size) continue;
        const int64_t slot = list[i] % c->page_size;
        const uint8_t *page = c->bytes + list[i] / c->page_size * c->page_stride;
        for (int d = 0; d < f->d_qk; d++) {
            const float x = f->last == 584 ? kv_load(&layout, page, c->page_size, slot, d, 1.0f)
                                           : kv_load(&layout, page + slot * c->slot_stride, 1, 0, d, 1.0f);
            keys[count * f->d_qk + d] = f->format == KV_FP16 ? num_to_fp16(x) : num_to_bf16(x);
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

static const fmla_tensor *hold_cache(struct held *held, int64_t strides[4], const struct cache *c,
                                     const struct format *f, fmla_dtype type)
{
    const int64_t size = type.bits / 8;
    hold(held, c->bytes, type, 4, c->pages, c->page_size, 1, f->last);
    strides[0] = c->page_stride / size, strides[1] = c->slot_stride / size, strides[2] = 12345,
    strides[3] = 1;
    held->tensor.strides = strides;
    return &held->tensor;
}

static void check_oracle(const struct format *f, int with_extra, struct random_state *random)
{
    static uint16_t q[B * S_Q * H_Q * WIDEST], out[B * S_Q * H_Q * D_V], expected[H_Q * D_V];
    static uint16_t keys[(TOPK + EXTRA) * WIDEST];
    static int32_t list[B * S_Q * TOPK], extra_list[B * S_Q * EXTRA];
    static float lse[B * H_Q * S_Q], sink[H_Q];
    int32_t lengths[B] = {TOPK + 9, -3, 23}, extra_lengths[B] = {0, EXTRA, 5};
    const fmla_dtype type = f->format == KV_FP16 ? fp16 : bf16, kv_type = f->last > f->d_qk ? byte : type;
    struct cache cache, extra;
    make_cache(&cache, f, PAGES, PAGE, random), make_cache(&extra, f, EXTRA_PAGES, EXTRA_PAGE, random);
    for (size_t i = 0; i < sizeof q / 2; i++) {
        const float x = random_input(random, 0.0f, 1.0f);
        q[i] = f->format == KV_FP16 ? num_to_fp16(x) : num_to_bf16(x);
    }
    for (int h = 0; h < H_Q; h++) sink[h] = random_input(random, 0.0f, 1.0f);
    draw_list(random, list, B * S_Q * TOPK, PAGES * PAGE);
    draw_list(random, extra_list, B * S_Q * EXTRA, EXTRA_PAGES * EXTRA_PAGE);

    struct held hq, hkv, hidx, hlen, hextra, hxidx, hxlen, hout, hlse, hsink;
    int64_t strides[4], extra_strides[4];
    fmla_sparse_decode_args args = FMLA_INIT(fmla_sparse_decode_args);
    args.q = hold(&hq, q, type, 4, B, S_Q, H_Q, f->d_qk);
    args.kv_cache = hold_cache(&hkv, strides, &cache, f, kv_type);
    args.indices = hold(&hidx, list, i32, 3, B, S_Q, TOPK, 0);
    args.topk_length = hold(&hlen, lengths, i32, 1, B, 0, 0, 0);
    if (with_extra) {
        args.extra_kv_cache = hold_cache(&hextra, extra_strides, &extra, f, kv_type);
        args.extra_indices = hold(&hxidx, extra_list, i32, 3, B, S_Q, EXTRA, 0);
        args.extra_topk_length = hold(&hxlen, extra_lengths, i32, 1, B, 0, 0, 0);
    }
    args.attn_sink = hold(&hsink, sink, f32, 1, H_Q, 0, 0, 0);
    args.out = hold(&hout, out, type, 4, B, S_Q, H_Q, D_V);
    args.lse = hold(&hlse, lse, f32, 3, B, H_Q, S_Q, 0);
    args.kv_format = f->public_name, args.kernel = "ref", args.softmax_scale = 0.05f;
    CHECK(run(&args) == FMLA_OK, "%s: %s", f->name, fmla_last_error());

    for (int r = 0; r < B; r++)
        for (int j = 0; j < S_Q; j++) {
            const int64_t length = lengths[r] < 0 ? 0 : lengths[r] > TOPK ? TOPK : lengths[r];
            const int64_t token = r * S_Q + j;
            int64_t count = gather(&cache, f, list + token * TOPK, length, keys, 0);
            if (with_extra)
                count = gather(&extra, f, extra_list + token * EXTRA, extra_lengths[r], keys, count);
            float one_lse[H_Q];
            int32_t seqlen = (int32_t)count;
            struct held dq, dkv, dlen, dout, dlse;
            fmla_dense_decode_args dense = FMLA_INIT(fmla_dense_decode_args);
            dense.q = hold(&dq, q + token * H_Q * f->d_qk, type, 4, 1, 1, H_Q, f->d_qk);
            dense.kv_cache = hold(&dkv, keys, type, 4, 1, TOPK + EXTRA, 1, f->d_qk);
            dense.seqlens = hold(&dlen, &seqlen, i32, 1, 1, 0, 0, 0);
            dense.attn_sink = args.attn_sink;
            dense.out = hold(&dout, expected, type, 4, 1, 1, H_Q, D_V);
            dense.lse = hold(&dlse, one_lse, f32, 3, 1, H_Q, 1, 0);
            dense.kernel = "ref", dense.softmax_scale = args.softmax_scale;
            static double workspace[4096];
            dense.workspace = workspace, dense.workspace_size = sizeof workspace;
            CHECK_OK(fmla_dense_decode(&dense));
            CHECK(!memcmp(expected, out + token * H_Q * D_V, sizeof expected),
                  "%s, extra %d: out of token %d, %d", f->name, with_extra, r, j);
            for (int h = 0; h < H_Q; h++)
                CHECK(lse[(r * H_Q + h) * S_Q + j] == one_lse[h],
                      "%s, extra %d: lse of token %d, %d: %g, expected %g", f->name, with_extra, r, j,
                      (double)lse[(r * H_Q + h) * S_Q + j], (double)one_lse[h]);
        }
    free(cache.bytes), free(extra.bytes);
}

int main(void)
{
    struct random_state random = {11};
    int decoders = 0;
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++) {
        if (strcmp(row.operation, "sparse_decode") != 0 || !row.available) continue;
        decoders++;
        for (int f = 0; f < FORMATS; f++) {
            if (formats[f].format == KV_FP16 && !strstr(row.dtypes, "fp16")) continue;
            for (int list = 0; list < LISTS; list++)
                for (int sink = 0; sink < 2; sink++) check_by_hand(row.kernel, &formats[f], list, sink);
        }
    }
    CHECK(decoders >= 1, "%s", "there is no kernel");
    for (int f = 0; f < FORMATS; f++)
        for (int extra = 0; extra < 2; extra++) check_oracle(&formats[f], extra, &random);
    return check_done("test_sparse_values");
}
