/* SPDX-License-Identifier: MIT
 *
 * Attention over two keys, computed by hand, for every kernel and the oracle: comparisons between these
 * cannot detect errors in what they share (default scale, bases, conventions, the sink).
 *
 * One row q = (a, 0, 0, …), and two keys k0 = (0, …, 1 at AT, …), k1 = (24, 0, …). The scores are 0 and s
 * = 24 a / sqrt(d_qk). If the row sees k0 z times and k1 t times, lse = ln(z + t e^s), the largest score
 * is s, or 0 without k1, out[AT] = z / (z + t e^s) and out[0] = 24 t e^s / (z + t e^s). Everything else in
 * a cache is NaN, including scales.
 */
#ifndef FMLA_VALUES_H
#define FMLA_VALUES_H

#include "filled.h"
#include "tensors.h"

#include "kvformat.h"

#include <math.h>

enum {
    D_V = 512,
    WIDEST = 576,
    AT = 130 /* in another group than 0 in every byte format */
};

struct format {
    const char *name;
    int32_t public_name;
    enum kv_format format;
    int64_t d_qk, last; /* last: the tensor's last dimension */
    int flat;
};

/* The formats of bytes that sparse attention takes. */
#define FORMAT(name, d_qk, bytes)                                                                            \
    {                                                                                                        \
#name, FMLA_KV_##name, KV_##name, d_qk, bytes, 0                                                     \
    }
#define FORMATS_OF_BYTES                                                                                     \
    FORMAT(FP8_656, 576, 656), FORMAT(FP8_584, 512, 584), FORMAT(FP8_528, 512, 528),                         \
        FORMAT(FP8_528_SPLIT, 512, 528), FORMAT(FP4_288, 512, 288), FORMAT(FP4_288_SPLIT, 512, 288),         \
        FORMAT(FP8_528_F32, 512, 528)

static inline fmla_dtype type_of(const struct format *f)
{
    return f->format == KV_FP16 ? fp16 : bf16;
}

static inline int of_bytes(const struct format *f)
{
    return f->format >= KV_FP8_656;
}

static inline fmla_dtype cache_type_of(const struct format *f)
{
    return of_bytes(f) ? u8 : type_of(f);
}

static inline int64_t bytes_of_page(const struct format *f, int64_t page_size)
{
    return page_size * (of_bytes(f) ? f->last : 2 * f->d_qk);
}

static inline float value_of(uint16_t v, const struct format *f)
{
    return f->format == KV_FP16 ? num_from_fp16(v) : num_from_bf16(v);
}

static inline uint16_t code_of(float x, const struct format *f)
{
    return f->format == KV_FP16 ? num_to_fp16(x) : num_to_bf16(x);
}

static inline int near(double value, double expected, double relative)
{
    return value == expected || fabs(value - expected) <= relative * fabs(expected);
}

/* ---- By hand --------------------------------------------------------------------------------- */

struct by_hand {
    double lse /* natural logarithm */, most, of_0, of_at;
};

/* Returns the results of a row that sees k0 z times and k1 t times. `sink`: NULL, or the row's. */
static inline struct by_hand work_out(int z, int t, double a, int64_t d_qk, const float *sink)
{
    if (!z && !t) return (struct by_hand){INFINITY, -INFINITY, 0.0, 0.0};
    const double s = 24.0 * a / sqrt((double)d_qk), sum = z + t * exp(s), lse = log(sum);
    const double scale = sink ? 1.0 / (1.0 + exp((double)*sink - lse)) : 1.0;
    return (struct by_hand){lse, t ? s : 0.0, 24.0 * t * exp(s) / sum * scale, z / sum * scale};
}

/* Compares a row with the computed values; of_0 NAN: not computed. */
static inline void check_row(const char *row, const uint16_t *out, double lse, const struct format *f,
                             struct by_hand e)
{
    const double of_0 = (double)value_of(out[0], f), of_at = (double)value_of(out[AT], f);
    CHECK(near(lse, e.lse, 1e-5), "%s: lse %g, expected %g", row, lse, e.lse);
    CHECK(near(of_at, e.of_at, 1.0 / 128), "%s: out[AT] %g, expected %g", row, of_at, e.of_at);
    CHECK(isnan(e.of_0) || near(of_0, e.of_0, 1.0 / 128), "%s: out[0] %g, expected %g", row, of_0, e.of_0);
    int wrong = 0;
    for (int d = 1; d < D_V; d++) wrong += d != AT && value_of(out[d], f) != 0.0f;
    CHECK(wrong == 0, "%s: %d values of out are not 0", row, wrong);
}

/* Calls `check` for each kernel of an operation that runs here; the oracle must be among them. */
static inline void for_kernels(enum operation operation, void (*check)(const fmla_capability *row))
{
    int kernels = 0, oracles = 0;
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++) {
        if (strcmp(row.operation, descriptors[operation].name) != 0 || !row.available) continue;
        kernels++, oracles += !strcmp(row.kernel, "ref");
        check(&row);
    }
    CHECK(kernels >= 2 && oracles == 1, "%s: %d kernels, %d of them the oracle", descriptors[operation].name,
          kernels, oracles);
}

/* The layout of a page of bytes: the bytes of a token, the offset of the scales, and the distance between
 * scales of neighbouring tokens. */
struct spelled {
    int64_t token, scales_at, scales_step;
};

static inline struct spelled spelled_of(const struct format *f, int64_t page_size)
{
    switch (f->format) {
    case KV_FP8_656: return (struct spelled){656, 512, 656};
    case KV_FP8_584: return (struct spelled){576, page_size * 576, 8};
    case KV_FP8_528:
    case KV_FP8_528_F32: return (struct spelled){528, 512, 528};
    case KV_FP8_528_SPLIT: return (struct spelled){512, page_size * 512, 16};
    case KV_FP4_288: return (struct spelled){288, 256, 288};
    case KV_FP4_288_SPLIT: return (struct spelled){256, page_size * 256, 32};
    default: return (struct spelled){2 * f->d_qk, 0, 0};
    }
}

/* Puts one token: 1, or 24, at `d`, and 0 elsewhere, written out without kvformat.h. A quantised value is
 * code · scale, with that group's scale; other groups have other scales. */
static inline void put_token(uint8_t *page, int64_t page_size, int64_t slot, const struct format *f,
                             int64_t d, int twenty_four)
{
    static const float of_128[4] = {2.0f, 0.25f, 8.0f, 1.0f};
    static const uint8_t of_64[7] = {128, 131, 125, 127, 120, 140, 127}; /* 2, 16, 1/4, … */
    static const uint8_t of_32[16] = {128, 131, 140, 127, 125, 120, 0, 254, 127, 140, 1, 2, 3, 200, 90, 127};
    static const uint8_t of_16[32] = {0x48 /* 4 */, 0x7e, 0x01, 0, 0x38, 0x39, 0x08, 0x07, 0x28 /* 1/4 */};
    const struct spelled at = spelled_of(f, page_size);
    uint8_t *const token = page + slot * at.token, *const scales =
                                                       page + at.scales_at + slot * at.scales_step;
    memset(token, 0, (size_t)at.token);
    switch (f->format) {
    case KV_FP8_656:
    case KV_FP8_528_F32: memcpy(scales, of_128, sizeof of_128); break;
    case KV_FP8_584: memcpy(scales, of_64, sizeof of_64); break; /* without the pad byte */
    case KV_FP8_528:
    case KV_FP8_528_SPLIT: memcpy(scales, of_32, sizeof of_32); break;
    case KV_FP4_288:
    case KV_FP4_288_SPLIT:
        memcpy(scales, of_16, sizeof of_16);
        token[d / 2] = twenty_four ? 0x07 /* 6 · 4 */ : 0x06 /* 4 · 1/4 */; /* d is even */
        return;
    default: break;
    }
    if (of_bytes(f)) {
        token[d] = twenty_four ? 0x54 /* 12 · 2 */ : 0x48 /* 4 · 1/4 */;
    } else {
        const uint16_t value =
            f->format == KV_FP16 ? (twenty_four ? 0x4e00 : 0x3c00) : (twenty_four ? 0x41c0 : 0x3f80);
        memcpy(token + 2 * d, &value, sizeof value);
    }
}

/* Puts k0 and k1 in two slots of a page. */
static inline void put_keys(uint8_t *page, int64_t page_size, int64_t k0, int64_t k1, const struct format *f)
{
    put_token(page, page_size, k0, f, AT, 0), put_token(page, page_size, k1, f, 0, 1);
}

#endif
