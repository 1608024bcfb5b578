/* SPDX-License-Identifier: MIT
 *
 * Results worked out by hand, for every kernel and the oracle: what the two take from the same place (default scale,
 * bases, conventions, the sink) no comparison between them can show.
 *
 * One row, q = (1, 0, 0, …), and two keys k0 = (0, 1, 0, …), k1 = (24, 0, …). The scores are 0 and s = 24 / sqrt(d_qk):
 * lse = ln(1 + e^s), and out[1] = 1 / (1 + e^s), the weight of k0.
 */
#include "check.h"

#include "flashmla/flashmla.h"

#include <math.h>
#include <stdlib.h>

enum { D_V = 512, WIDEST = 576, ONE = 0x3f80, TWENTY_FOUR = 0x41c0 /* bf16 */ };

static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
static const fmla_dtype bf16 = {FMLA_TYPE_BFLOAT, 16, 1}, f32 = {FMLA_TYPE_FLOAT, 32, 1},
                        i32 = {FMLA_TYPE_INT, 32, 1};

struct expected {
    int64_t d_qk;
    int32_t keys, log_base, lse_empty, with_sink;
    float lse, out;
};

static const struct expected cases[] = {
    {576, 2, FMLA_LOG_NATURAL, 0, 0, 1.3132617f, 0.26894142f},
    {576, 2, FMLA_LOG_BASE_2, 0, 0, 1.8946362f, 0.26894142f},
    {512, 2, FMLA_LOG_NATURAL, 0, 0, 1.3579662f, 0.25718332f},
    {576, 2, FMLA_LOG_NATURAL, 0, 1, 1.3132617f, 0.18632372f}, /* out times 1 / (1 + exp(0.5 - lse)) */
    {576, 2, FMLA_LOG_BASE_2, 0, 1, 1.8946362f, 0.18632372f},  /* the sink is natural, whatever the base */
    {576, 1, FMLA_LOG_NATURAL, 0, 0, 0.0f, 1.0f},
    {576, 0, FMLA_LOG_NATURAL, 0, 1, INFINITY, 0.0f},
    {576, 0, FMLA_LOG_BASE_2, 1, 0, -INFINITY, 0.0f},
};

static float from_bf16(uint16_t value)
{
    const uint32_t bits = (uint32_t)value << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static int near(float value, float expected, float relative)
{
    return value == expected || fabsf(value - expected) <= relative * fabsf(expected);
}

static void check_case(const char *kernel, const struct expected *e)
{
    static uint16_t q[WIDEST], keys[2 * WIDEST], out[D_V];
    memset(q, 0, sizeof q), memset(keys, 0, sizeof keys), memset(out, 0xff, sizeof out);
    q[0] = ONE, keys[1] = ONE, keys[e->d_qk] = TWENTY_FOUR;
    float lse = NAN, sink = 0.5f;
    int32_t length = e->keys;
    const int64_t q_shape[] = {1, 1, 1, e->d_qk}, keys_shape[] = {1, 2, 1, e->d_qk},
                  out_shape[] = {1, 1, 1, D_V};
    const int64_t one[] = {1, 1, 1};
    const fmla_tensor tq = {q, cpu, 4, bf16, q_shape, NULL, 0},
                      tkeys = {keys, cpu, 4, bf16, keys_shape, NULL, 0};
    const fmla_tensor tout = {out, cpu, 4, bf16, out_shape, NULL, 0},
                      tlse = {&lse, cpu, 3, f32, one, NULL, 0};
    const fmla_tensor tsink = {&sink, cpu, 1, f32, one, NULL, 0},
                      tlength = {&length, cpu, 1, i32, one, NULL, 0};
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.q = &tq, args.kv_cache = &tkeys, args.seqlens = &tlength, args.out = &tout, args.lse = &tlse;
    args.attn_sink = e->with_sink ? &tsink : NULL;
    args.kernel = kernel, args.log_base = e->log_base, args.lse_empty = e->lse_empty;
    size_t alignment = 0;
    CHECK_OK(fmla_dense_decode_workspace_size(&args, &args.workspace_size, &alignment));
    args.workspace = aligned_alloc(64, (args.workspace_size + 63) / 64 * 64);
    CHECK_OK(fmla_dense_decode(&args));
    free(args.workspace);
    const long which = (long)(e - cases);
    CHECK(near(lse, e->lse, 1e-5f), "%s, case %ld: lse %g, expected %g", kernel, which, (double)lse,
          (double)e->lse);
    CHECK(near(from_bf16(out[1]), e->out, 1.0f / 128), "%s, case %ld: out %g, expected %g", kernel, which,
          (double)from_bf16(out[1]), (double)e->out);
    CHECK(from_bf16(out[2]) == 0.0f, "%s, case %ld: out[2] is %g", kernel, which, (double)from_bf16(out[2]));
}

/* Two machines with one key each: e^0 (1, 2) and e^1 (5, 6), and a third that saw none. */
static void check_merge(const char *kernel, int32_t log_base)
{
    const float merged = 2.7187257f; /* 3.9242343 · 1 / (1 + exp(0.5 - lse)) */
    const float base = log_base == FMLA_LOG_BASE_2 ? 1.442695041f : 1.0f;
    float parts[3][2] = {{1, 2}, {5, 6}, {NAN, NAN}}, lses[3] = {0.0f, base, -INFINITY}, out[2] = {0},
          lse = 0, sink = 0.5f;
    const int64_t parts_shape[] = {3, 1, 1, 1, 2}, lses_shape[] = {3, 1, 1, 1}, one = 1;
    const fmla_tensor tparts = {parts, cpu, 5, f32, parts_shape, NULL, 0},
                      tlses = {lses, cpu, 4, f32, lses_shape, NULL, 0};
    const fmla_tensor tout = {out, cpu, 4, f32, parts_shape + 1, NULL, 0},
                      tlse = {&lse, cpu, 3, f32, lses_shape + 1, NULL, 0};
    const fmla_tensor tsink = {&sink, cpu, 1, f32, &one, NULL, 0};
    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    args.out_parts = &tparts, args.lse_parts = &tlses, args.out = &tout, args.lse = &tlse,
    args.attn_sink = &tsink;
    args.kernel = kernel, args.log_base = log_base;
    CHECK_OK(fmla_merge(&args));
    CHECK(near(lse, 1.3132617f * base, 1e-5f), "%s: lse %g", kernel, (double)lse);
    CHECK(near(out[0], merged, 1e-5f), "%s, base %d: out %.7g, expected %.7g", kernel, (int)log_base,
          (double)out[0], (double)merged);
}

static const fmla_dtype u8 = {FMLA_TYPE_UINT, 8, 1}, i64 = {FMLA_TYPE_INT, 64, 1};

/* One token into slot 1 of a page of two, byte by byte, and out of it. */
static void check_cache(const char *append_kernel, const char *gather_kernel)
{
    float values[576] = {3.0f, -1.5f, 0.0f}, back[576] = {0};
    values[512] = 1.0f; /* the first of RoPE */
    uint8_t cache[2 * 656] = {0}, small[2 * 576] = {0};
    const int64_t shape[] = {1, 576}, cache_shape[] = {1, 2, 1, 656}, small_shape[] = {1, 2, 1, 576}, one = 1;
    int64_t slot = 1;
    const fmla_tensor tvalues = {values, cpu, 2, f32, shape, NULL, 0},
                      tback = {back, cpu, 2, f32, shape, NULL, 0},
                      tcache = {cache, cpu, 4, u8, cache_shape, NULL, 0},
                      tsmall = {small, cpu, 4, u8, small_shape, NULL, 0},
                      tslot = {&slot, cpu, 1, i64, &one, NULL, 0};
    fmla_cache_append_args append = FMLA_INIT(fmla_cache_append_args);
    fmla_cache_gather_args gather = FMLA_INIT(fmla_cache_gather_args);
    memset(cache, 0x11, sizeof cache), memset(small, 0x11, sizeof small);
    append.latent = &tvalues, append.kv_cache = gather.kv_cache = &tcache, gather.out = &tback;
    append.slot_mapping = gather.slots = &tslot, append.kernel = append_kernel, gather.kernel = gather_kernel;
    append.kv_format = gather.kv_format = FMLA_KV_FP8_656;
    CHECK(!fmla_cache_append(&append) && !fmla_cache_gather(&gather), "%s", fmla_last_error());
    const uint8_t *token = cache + 656;
    /* 3 / 448 rounds up to 2^-7: 384 = 1.5 · 2^8, and -192. Groups of zeros have the least scale, 2^-13. */
    CHECK(token[0] == 0x7c && token[1] == 0xf4 && token[2] == 0 && token[511] == 0, "%s: %#x %#x",
          append_kernel, token[0], token[1]);
    CHECK(!memcmp(token + 512, "\0\0\0\x3c\0\0\0\x39\0\0\0\x39\0\0\0\x39", 16), "%s: scales", append_kernel);
    CHECK(token[528] == 0x80 && token[529] == 0x3f && token[530] == 0, "%s: RoPE", append_kernel);
    CHECK(cache[0] == 0x11 && cache[655] == 0x11, "%s: the other slot was written", append_kernel);
    CHECK(back[0] == 3.0f && back[1] == -1.5f && back[2] == 0.0f && back[512] == 1.0f, "%s: %g %g %g",
          gather_kernel, (double)back[0], (double)back[1], (double)back[512]);

    /* One scale of a half: 2, -4, beyond 448, and 1.024 of the least subnormal. */
    values[0] = 1.0f, values[1] = -2.0f, values[2] = 500.0f, values[3] = 0.001f;
    append.kv_cache = gather.kv_cache = &tsmall, append.kv_format = gather.kv_format = FMLA_KV_FP8_576;
    append.cache_scale = gather.cache_scale = 0.5f;
    CHECK(!fmla_cache_append(&append) && !fmla_cache_gather(&gather), "%s", fmla_last_error());
    CHECK(!memcmp(small + 576, "\x40\xc8\x7e\x01", 4), "%s: %#x %#x %#x %#x", append_kernel, small[576],
          small[577], small[578], small[579]);
    CHECK(back[0] == 1.0f && back[1] == -2.0f && back[2] == 224.0f && back[3] == 0x1p-10f, "%s: %g %g",
          gather_kernel, (double)back[2], (double)back[3]);
}

int main(void)
{
    int decoders = 0, mergers = 0, appenders = 0;
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++) {
        if (!row.available) continue;
        if (!strcmp(row.operation, "dense_decode")) {
            decoders++;
            for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) check_case(row.kernel, &cases[k]);
        } else if (!strcmp(row.operation, "merge")) {
            mergers++;
            check_merge(row.kernel, FMLA_LOG_NATURAL);
            check_merge(row.kernel, FMLA_LOG_BASE_2);
        } else if (!strcmp(row.operation, "cache_append")) {
            appenders++;
            check_cache(row.kernel, row.kernel); /* gather's have the same names */
        }
    }
    CHECK(decoders >= 2 && mergers >= 2 && appenders >= 2, "%d, %d and %d kernels, the oracle among them",
          decoders, mergers, appenders);
    return check_done("test_values");
}
