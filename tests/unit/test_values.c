/* SPDX-License-Identifier: MIT
 *
 * Tests dense decode and merge against results computed by hand, in numbers given here, and the bytes of a
 * cache. test_attention_values.c has results computed in double.
 */
#include "values.h"

enum { D_V = 512, WIDEST = 576, AT = 130 };

/* One row (1, 0, …) and two keys: (0, …, 1 at AT, …) with score 0, and (24, 0, …). */
static const struct expected {
    int64_t d_qk;
    int32_t keys, log_base, lse_empty, with_sink;
    double lse, out; /* out[AT] */
} cases[] = {
    {576, 2, FMLA_LOG_NATURAL, 0, 0, 1.3132617, 0.26894142},
    {576, 2, FMLA_LOG_BASE_2, 0, 0, 1.8946362, 0.26894142},
    {512, 2, FMLA_LOG_NATURAL, 0, 0, 1.3579662, 0.25718332},
    {576, 2, FMLA_LOG_NATURAL, 0, 1, 1.3132617, 0.18632372}, /* out times 1 / (1 + exp(0.5 - lse)) */
    {576, 2, FMLA_LOG_BASE_2, 0, 1, 1.8946362, 0.18632372},  /* the sink is natural in every base */
    {576, 1, FMLA_LOG_NATURAL, 0, 0, 0.0, 1.0},
    {576, 0, FMLA_LOG_NATURAL, 0, 1, INFINITY, 0.0f},
    {576, 0, FMLA_LOG_BASE_2, 1, 0, -INFINITY, 0.0f},
};

static void check_case(const char *kernel, const struct expected *e)
{
    static uint16_t q[WIDEST], keys[2 * WIDEST], out[D_V];
    memset(keys, 0, sizeof keys), memset(out, 0xff, sizeof out);
    q[0] = keys[AT] = num_to_bf16(1.0f), keys[e->d_qk] = num_to_bf16(24.0f);
    float lse = NAN, sink = 0.5f;
    int32_t length = e->keys;
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.q = TENSOR_OF(q, bf16, 1, 1, 1, e->d_qk), args.kv_cache = TENSOR_OF(keys, bf16, 1, 2, 1, e->d_qk);
    args.seqlens = TENSOR_OF(&length, i32, 1),
    args.attn_sink = e->with_sink ? TENSOR_OF(&sink, f32, 1) : NULL;
    args.out = TENSOR_OF(out, bf16, 1, 1, 1, D_V), args.lse = TENSOR_OF(&lse, f32, 1, 1, 1);
    args.kernel = kernel, args.log_base = e->log_base, args.lse_empty = e->lse_empty;
    CHECK_OK(run_in_room(OP_DENSE_DECODE, &args));
    const double of_at = (double)num_from_bf16(out[AT]);
    CHECK(near((double)lse, e->lse, 1e-5), "%s, case %d: lse %g", kernel, (int)(e - cases), (double)lse);
    CHECK(near(of_at, e->out, 1.0 / 128), "%s, case %d: out[AT] %g", kernel, (int)(e - cases), of_at);
    for (int d = 1; d < D_V; d++)
        CHECK(d == AT || num_from_bf16(out[d]) == 0.0f, "%s, case %d: out[%d]", kernel, (int)(e - cases), d);
}

/* Two machines with one key each: e^0 (1, 2) and e^1 (5, 6), and a third without keys. */
static void check_merge(const char *kernel, int32_t log_base)
{
    const float merged = 2.7187257f; /* 3.9242343 · 1 / (1 + exp(0.5 - lse)) */
    const float base = log_base == FMLA_LOG_BASE_2 ? 1.442695041f : 1.0f;
    float parts[3][2] = {{1, 2}, {5, 6}, {NAN, NAN}}, lses[3] = {0.0f, base, -INFINITY}, out[2] = {0},
          lse = 0, sink = 0.5f;
    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    args.out_parts = TENSOR_OF(parts, f32, 3, 1, 1, 1, 2), args.lse_parts = TENSOR_OF(lses, f32, 3, 1, 1, 1);
    args.out = TENSOR_OF(out, f32, 1, 1, 1, 2), args.lse = TENSOR_OF(&lse, f32, 1, 1, 1);
    args.attn_sink = TENSOR_OF(&sink, f32, 1);
    args.kernel = kernel, args.log_base = log_base;
    CHECK_OK(fmla_merge(&args));
    CHECK(near((double)lse, (double)(1.3132617f * base), 1e-5), "%s: lse %g", kernel, (double)lse);
    CHECK(near((double)out[0], (double)merged, 1e-5), "%s, base %d: out %.7g, expected %.7g", kernel,
          (int)log_base, (double)out[0], (double)merged);
}

/* Appends one token to slot 1 of a page of two, checks its bytes, and gathers it, by kernels of the same
 * name. */
static void check_cache(const fmla_capability *row)
{
    const char *const kernel = row->kernel;
    float values[576] = {3.0f, -1.5, 0.0}, back[576] = {0};
    values[512] = 1.0f; /* first RoPE value */
    uint8_t cache[2 * 656] = {0}, small[2 * 576] = {0};
    int64_t slot = 1;
    fmla_cache_append_args append = FMLA_INIT(fmla_cache_append_args);
    fmla_cache_gather_args gather = FMLA_INIT(fmla_cache_gather_args);
    memset(cache, 0x11, sizeof cache), memset(small, 0x11, sizeof small);
    append.latent = TENSOR_OF(values, f32, 1, 576), gather.out = TENSOR_OF(back, f32, 1, 576);
    append.kv_cache = gather.kv_cache = TENSOR_OF(cache, u8, 1, 2, 1, 656);
    append.slot_mapping = gather.slots = TENSOR_OF(&slot, i64, 1);
    append.kernel = gather.kernel = kernel;
    append.kv_format = gather.kv_format = FMLA_KV_FP8_656;
    CHECK(!fmla_cache_append(&append) && !fmla_cache_gather(&gather), "%s", fmla_last_error());
    const uint8_t *token = cache + 656;
    /* 3 / 448 rounds up to 2^-7: 384 = 1.5 · 2^8, and -192. Groups of zeros have the smallest scale,
     * 2^-13. */
    CHECK(token[0] == 0x7c && token[1] == 0xf4 && token[2] == 0 && token[511] == 0, "%s: %#x %#x", kernel,
          token[0], token[1]);
    CHECK(!memcmp(token + 512, "\0\0\0\x3c\0\0\0\x39\0\0\0\x39\0\0\0\x39", 16), "%s: scales", kernel);
    CHECK(token[528] == 0x80 && token[529] == 0x3f && token[530] == 0, "%s: RoPE", kernel);
    CHECK(cache[0] == 0x11 && cache[655] == 0x11, "%s: the other slot was written", kernel);
    CHECK(back[0] == 3.0f && back[1] == -1.5f && back[2] == 0.0f && back[512] == 1.0f, "%s: %g %g %g", kernel,
          (double)back[0], (double)back[1], (double)back[512]);

    /* A single scale of 1/2: 2, -4, beyond 448, and 1.024 times the smallest subnormal. */
    values[0] = 1.0f, values[1] = -2.0f, values[2] = 500.0f, values[3] = 0.001f;
    append.kv_cache = gather.kv_cache = TENSOR_OF(small, u8, 1, 2, 1, 576);
    append.kv_format = gather.kv_format = FMLA_KV_FP8_576;
    append.cache_scale = gather.cache_scale = 0.5f;
    CHECK(!fmla_cache_append(&append) && !fmla_cache_gather(&gather), "%s", fmla_last_error());
    CHECK(!memcmp(small + 576, "\x40\xc8\x7e\x01", 4), "%s: %#x %#x %#x %#x", kernel, small[576], small[577],
          small[578], small[579]);
    CHECK(back[0] == 1.0f && back[1] == -2.0f && back[2] == 224.0f && back[3] == 0x1p-10f, "%s: %g %g",
          kernel, (double)back[2], (double)back[3]);
    gather.cache_scale = 0.3f; /* bf16(0.6) would be 0.6015625 */
    CHECK(!fmla_cache_gather(&gather), "%s", fmla_last_error());
    CHECK(back[0] == 2.0f * 0.3f, "%s: %.9g, expected %.9g", kernel, (double)back[0], (double)(2.0f * 0.3f));
}

/* Attends to one key of an FP8_576 cache, whose scale rounding to bf16 would change by 2^-9 of itself. `out`
 * is that key, and fp16 shows the difference. */
static void check_exact_scale(const char *kernel)
{
    static uint16_t q[WIDEST], out[D_V];
    static uint8_t key[WIDEST];
    const uint8_t code = 0x3f; /* 1.875 */
    float scale = 1.0f + 0x1p-8f + 0x1p-9f, lse = NAN;
    const double value = 1.875 * (double)scale, score = value * 2.0 / 24.0;
    int32_t length = 1;
    q[0] = num_to_fp16(2.0f), key[0] = code;
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.q = TENSOR_OF(q, fp16, 1, 1, 1, WIDEST), args.kv_cache = TENSOR_OF(key, u8, 1, 1, 1, WIDEST);
    args.seqlens = TENSOR_OF(&length, i32, 1), args.kv_scale = TENSOR_OF(&scale, f32, 1);
    args.out = TENSOR_OF(out, fp16, 1, 1, 1, D_V), args.lse = TENSOR_OF(&lse, f32, 1, 1, 1);
    args.kernel = kernel, args.kv_format = FMLA_KV_FP8_576;
    CHECK_OK(run_in_room(OP_DENSE_DECODE, &args));
    CHECK(near((double)lse, score, 1e-6), "%s: lse %.9g, expected %.9g", kernel, (double)lse, score);
    CHECK(out[0] == num_to_fp16((float)value), "%s: out %a, expected %a", kernel,
          (double)num_from_fp16(out[0]), value);
}

static void check_decode(const fmla_capability *row)
{
    const int32_t format = 1 << FMLA_KV_FP8_576;
    if ((row->kv_formats & format) && (row->types & FMLA_TAKES_FP16)) check_exact_scale(row->kernel);
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) check_case(row->kernel, &cases[k]);
}

static void check_merges(const fmla_capability *row)
{
    check_merge(row->kernel, FMLA_LOG_NATURAL), check_merge(row->kernel, FMLA_LOG_BASE_2);
}

/* Checks a table of cosines and sines. */
static void check_rope_table(void)
{
    float table[3][64] = {{0}};
    CHECK(!fmla_rope_table(&table[0][0], 3, 1e4), "%s", fmla_last_error());
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < 32; i++) {
            const double angle = t * pow(1e4, -i / 32.0);
            CHECK(fabs((double)table[t][i] - cos(angle)) < 1e-7 &&
                      fabs((double)table[t][32 + i] - sin(angle)) < 1e-7,
                  "position %d, pair %d: %g %g", t, i, (double)table[t][i], (double)table[t][32 + i]);
        }
    check_rejected("no room", fmla_rope_table(NULL, 1, 1e4), FMLA_INVALID_ARGUMENT, "rope_table", "table",
                   "NULL|1 rows");
    check_rejected("rows", fmla_rope_table(&table[0][0], -1, 1e4), FMLA_INVALID_ARGUMENT, "rope_table",
                   "positions", "-1|≥ 0");
    for (int i = 0; i < 3; i++)
        check_rejected("base", fmla_rope_table(&table[0][0], 3, (double[]){0.0, INFINITY, NAN}[i]),
                       FMLA_INVALID_ARGUMENT, "rope_table", "base", "finite and > 0");
    CHECK(!fmla_rope_table(NULL, 0, 1e4), "%s", fmla_last_error());
}

int main(void)
{
    for_kernels(OP_DENSE_DECODE, check_decode);
    for_kernels(OP_MERGE, check_merges);
    for_kernels(OP_CACHE_APPEND, check_cache);
    check_rope_table();
    return check_done("test_values");
}
