/* SPDX-License-Identifier: MIT
 *
 * Tests src/num.h against independent definitions of the formats: a code's value is an integer times a
 * power of two, in double, and the right code for a value is the nearest in the list of all codes.
 * Everything runs twice if the machine allows: in the default floating-point mode, and with subnormals
 * flushed to zero in operands and results. The references below are exact in both: they use no fp32
 * arithmetic and no subnormal double.
 */
#include "check.h"
#include "num.h"
#include "random.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* The sweep is slow; under valgrind and sanitizers it is shorter. */
enum { SWEEP = 10000000, SWEEP_INSTRUMENTED = 500000 };

static const char *mode = "default";

/* ---- Exact fp32, by its fields ----------------------------------------------------------------------- */

static double exact_of_bits(uint32_t u)
{
    const uint32_t exponent = (u >> 23) & 255u;
    const uint32_t mantissa = u & 0x7fffffu;
    double magnitude;
    if (exponent == 255u)
        magnitude = mantissa ? NAN : INFINITY;
    else if (exponent == 0u)
        magnitude = ldexp((double)mantissa, -149);
    else
        magnitude = ldexp((double)(mantissa + 0x800000u), (int)exponent - 150);
    return u >> 31 ? -magnitude : magnitude;
}

/* Returns the bits of a positive finite value that fp32 represents exactly. */
static uint32_t bits_of_exact(double value)
{
    int exponent;
    const double fraction = frexp(value, &exponent); /* [0.5, 1) */
    const int shift = exponent - 24 < -149 ? -149 : exponent - 24;
    const double mantissa = ldexp(fraction, exponent - shift);
    const uint32_t m = (uint32_t)mantissa;
    const uint32_t u = m < 0x800000u ? m : ((uint32_t)(shift + 150) << 23) | (m & 0x7fffffu);
    if (exact_of_bits(u) != value) {
        fprintf(stderr, "test_num: %a is no fp32\n", value);
        exit(2);
    }
    return u;
}

/* ---- A format, as this test sees it -------------------------------------------------------------------- */

struct format {
    const char *name;
    int exponent_bits, mantissa_bits, bias;
    uint32_t infinity;  /* its positive code, or the first NaN's if there is none */
    int saturates;      /* values beyond the largest finite one become that one instead of infinity */
    uint32_t sign;      /* the sign bit */
    uint32_t nan_quiet; /* the bit that makes a NaN quiet; 0 if there is only one NaN */
    float (*decode)(uint32_t code);
    uint32_t (*encode)(float x);
};

#define CODEC(name, type)                                                                                    \
    static float decode_##name(uint32_t code)                                                                \
    {                                                                                                        \
        return num_from_##name((type)code);                                                                  \
    }                                                                                                        \
    static uint32_t encode_##name(float x)                                                                   \
    {                                                                                                        \
        return num_to_##name(x);                                                                             \
    }
CODEC(bf16, uint16_t)
CODEC(fp16, uint16_t)
CODEC(e4m3, uint8_t)
CODEC(e2m1, uint8_t)

static const struct format formats[] = {
    {"bf16", 8, 7, 127, 0x7f80u, 0, 0x8000u, 0x40u, decode_bf16, encode_bf16},
    {"fp16", 5, 10, 15, 0x7c00u, 0, 0x8000u, 0x200u, decode_fp16, encode_fp16},
    {"e4m3", 4, 3, 7, 0x7fu, 1, 0x80u, 0, decode_e4m3, encode_e4m3},
    {"e2m1", 2, 1, 1, 0x8u, 1, 0x8u, 0, decode_e2m1, encode_e2m1}, /* without NaN */
};
enum { FORMATS = sizeof formats / sizeof formats[0], WITH_NAN = FORMATS - 1, CODES = 0x7f80 + 1 };

/* The value of each positive finite code, followed by the value of the next code: the upper end of the
 * interval in which the largest finite value is nearest. */
static double worth[FORMATS][CODES];

static double define(const struct format *f, uint32_t magnitude)
{
    const uint32_t mantissa = magnitude & ((1u << f->mantissa_bits) - 1u);
    const int exponent = (int)(magnitude >> f->mantissa_bits);
    return exponent == 0
               ? ldexp((double)mantissa, 1 - f->bias - f->mantissa_bits)
               : ldexp((double)(mantissa + (1u << f->mantissa_bits)), exponent - f->bias - f->mantissa_bits);
}

static void build_tables(void)
{
    for (int i = 0; i < FORMATS; i++)
        for (uint32_t m = 0; m <= formats[i].infinity; m++) worth[i][m] = define(&formats[i], m);
}

/* Returns the code nearest to a value given by its bits, from the list; of two equally near the even one. */
static uint32_t nearest(int i, uint32_t bits)
{
    const struct format *f = &formats[i];
    const uint32_t sign = bits >> 31 ? f->sign : 0u;
    const double value = exact_of_bits(bits & 0x7fffffffu);
    if (value >= worth[i][f->infinity]) return sign | (f->saturates ? f->infinity - 1u : f->infinity);
    uint32_t below = 0, count = f->infinity; /* worth[below] <= value < worth[below + count] */
    while (count > 1) {
        const uint32_t half = count / 2;
        below = value >= worth[i][below + half] ? below + half : below;
        count -= half;
    }
    const double down = value - worth[i][below], up = worth[i][below + 1] - value;
    uint32_t code = below + (up < down || (up == down && (below & 1u)));
    if (f->saturates && code == f->infinity) code--;
    return sign | code;
}

static void check_encode(int i, uint32_t bits, uint32_t expected)
{
    const uint32_t code = formats[i].encode(num_float(bits));
    CHECK(code == expected, "%s (%s): fp32 %08" PRIx32 " (%a) became %04" PRIx32 ", expected %04" PRIx32,
          formats[i].name, mode, bits, exact_of_bits(bits), code, expected);
}

static int is_nan_bits(uint32_t bits)
{
    return (bits & 0x7fffffffu) > 0x7f800000u;
}

static int is_nan_code(const struct format *f, uint32_t code)
{
    const uint32_t magnitude = code & (f->sign - 1u);
    return f->saturates ? magnitude == f->infinity : magnitude > f->infinity;
}

/* ---- Every code -------------------------------------------------------------------------------------- */

static void test_codes(int i)
{
    const struct format *f = &formats[i];
    for (uint32_t code = 0; code < 2u * f->sign; code++) {
        const uint32_t bits = num_bits(f->decode(code));
        const uint32_t magnitude = code & (f->sign - 1u);
        CHECK(bits >> 31 == (code & f->sign ? 1u : 0u), "%s (%s): %04" PRIx32 " decodes to %08" PRIx32,
              f->name, mode, code, bits);
        if (is_nan_code(f, code)) {
            CHECK(is_nan_bits(bits), "%s (%s): %04" PRIx32 " decodes to %08" PRIx32, f->name, mode, code,
                  bits);
            check_encode(i, bits, code | f->nan_quiet);
            continue;
        }
        const double expected = magnitude == f->infinity ? INFINITY : worth[i][magnitude];
        CHECK(exact_of_bits(bits & 0x7fffffffu) == expected, "%s (%s): %04" PRIx32 " decodes to %a", f->name,
              mode, code, exact_of_bits(bits));
        check_encode(i, bits, code);
    }
}

/* A few codes whose values the standards state, to check define() above. */
static void test_spelled(void)
{
    static const struct {
        int format;
        uint32_t code;
        double value;
    } spelled[] = {
        {0, 0x3f80, 1.0},        {0, 0x4049, 3.140625},
        {0, 0x7f7f, 0x1.fep127}, {0, 0x0001, 0x1p-133},
        {0, 0x0080, 0x1p-126},   {1, 0x3c00, 1.0},
        {1, 0x7bff, 65504.0},    {1, 0x0400, 0x1p-14},
        {1, 0x0001, 0x1p-24},    {1, 0x3555, 0.333251953125},
        {2, 0x38, 1.0},          {2, 0x7e, 448.0},
        {2, 0x08, 0x1p-6},       {2, 0x07, 0.013671875},
        {2, 0x01, 0.001953125},  {2, 0x77, 240.0},
        {2, 0x78, 256.0},        {2, 0x7d, 416.0},
        {3, 0x1, 0.5},           {3, 0x3, 1.5},
        {3, 0x5, 3.0},           {3, 0x7, 6.0},
    };
    for (size_t k = 0; k < sizeof spelled / sizeof spelled[0]; k++) {
        const struct format *f = &formats[spelled[k].format];
        const double came = exact_of_bits(num_bits(f->decode(spelled[k].code)));
        CHECK(came == spelled[k].value, "%s (%s): %04" PRIx32 " is %.17g, expected %.17g", f->name, mode,
              spelled[k].code, came, spelled[k].value);
        CHECK(define(f, spelled[k].code) == spelled[k].value, "the test's own %s of %04" PRIx32, f->name,
              spelled[k].code);
    }
}

/* ---- Every border between two codes ------------------------------------------------------------------ */

static void test_ties(int i)
{
    const struct format *f = &formats[i];
    for (uint32_t m = 0; m < f->infinity; m++) {
        const uint32_t middle = bits_of_exact((worth[i][m] + worth[i][m + 1]) / 2);
        uint32_t up = m + 1, even = m & 1u ? m + 1 : m;
        if (f->saturates && up == f->infinity) up = even = m;
        for (uint32_t sign = 0; sign < 2; sign++) {
            const uint32_t s = sign << 31, code_sign = sign ? f->sign : 0;
            check_encode(i, s | (middle - 1), code_sign | m);
            check_encode(i, s | middle, code_sign | even);
            check_encode(i, s | (middle + 1), code_sign | up);
        }
    }
}

static void test_extremes(void)
{
    enum { BF16, FP16, E4M3 };
    static const struct {
        int format;
        uint32_t bits, code;
    } cases[] = {
        {FP16, 0x477fefff, 0x7bff},                             /* 65519.996: the last below the tie */
        {FP16, 0x477ff000, 0x7c00},                             /* 65520: the tie of 65504 and 65536 */
        {FP16, 0x477fe000, 0x7bff},                             /* 65504 */
        {FP16, 0x47800000, 0x7c00},                             /* 65536 */
        {BF16, 0x7f7f7fff, 0x7f7f}, {BF16, 0x7f7f8000, 0x7f80}, /* the last below the tie, and the tie */
        {BF16, 0x7f7fffff, 0x7f80},                             /* FLT_MAX */
        {BF16, 0x00000001, 0x0000},                             /* the least fp32 subnormal */
        {BF16, 0x00007fff, 0x0000}, {BF16, 0x00008000, 0x0000}, /* half of the least bf16: a tie, to 0 */
        {BF16, 0x00008001, 0x0001}, {BF16, 0x00018000, 0x0002}, /* a tie, to even */
        {BF16, 0x007fffff, 0x0080}, /* the greatest subnormal rounds to the least normal */
        {FP16, 0x33000000, 0x0000}, {FP16, 0x33000001, 0x0001}, /* 2^-25: half of the least; above it */
        {FP16, 0x32ffffff, 0x0000}, {FP16, 0x33800000, 0x0001}, /* below it; the least */
        {FP16, 0x00000001, 0x0000}, {FP16, 0x387fffff, 0x0400}, /* rounds up into the normals */
        {E4M3, 0x43e00000, 0x7e},   {E4M3, 0x43e00001, 0x7e},   /* 448 and above */
        {E4M3, 0x43e80000, 0x7e},   {E4M3, 0x43e80001, 0x7e},   /* 464, where 480 would begin */
        {E4M3, 0x43f00000, 0x7e},   {E4M3, 0x7149f2ca, 0x7e},   /* 480, 1e30 */
        {E4M3, 0x43d80000, 0x7e},   {E4M3, 0x43d7ffff, 0x7d},   /* 432: tie of 416 and 448; below it */
        {E4M3, 0x3a800000, 0x00},   {E4M3, 0x3a800001, 0x01},   /* 2^-10: half of the least; above it */
        {E4M3, 0x3a7fffff, 0x00},   {E4M3, 0x3b400000, 0x02},   /* below it; 1.5 · 2^-9, a tie */
        {E4M3, 0x00000001, 0x00},   {E4M3, 0x3c7fffff, 0x08},   /* rounds up into the normals */
        {BF16, 0x7f800000, 0x7f80}, {FP16, 0x7f800000, 0x7c00}, {E4M3, 0x7f800000, 0x7e}, /* infinity */
        {BF16, 0x00000000, 0x0000}, {FP16, 0x00000000, 0x0000}, {E4M3, 0x00000000, 0x00},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        check_encode(cases[k].format, cases[k].bits, cases[k].code);
        check_encode(cases[k].format, cases[k].bits | 0x80000000u,
                     cases[k].code | formats[cases[k].format].sign);
    }
    /* Whatever its payload, a NaN stays a NaN with its sign: payloads in the bits that rounding drops
     * could become an infinity, or carry over into a zero. */
    for (uint32_t bit = 0; bit < 23; bit++)
        for (uint32_t fill = 0; fill < 2; fill++)
            for (uint32_t sign = 0; sign < 2; sign++) {
                const uint32_t payload = fill ? (2u << bit) - 1u : 1u << bit;
                const uint32_t bits = (sign << 31) | 0x7f800000u | payload;
                for (int i = 0; i < WITH_NAN; i++) {
                    const uint32_t code = formats[i].encode(num_float(bits));
                    CHECK(is_nan_code(&formats[i], code) && (code & formats[i].sign ? 1u : 0u) == sign,
                          "%s (%s): NaN %08" PRIx32 " became %04" PRIx32, formats[i].name, mode, bits, code);
                }
            }
}

/* ---- ue8m0 ------------------------------------------------------------------------------------------- */

static void test_ue8m0(void)
{
    for (int v = 0; v < 255; v++) {
        const double came = exact_of_bits(num_bits(num_from_ue8m0((uint8_t)v)));
        CHECK(came == ldexp(1.0, v - 127), "ue8m0 (%s): %d is %a", mode, v, came);
    }
    CHECK(is_nan_bits(num_bits(num_from_ue8m0(255))), "ue8m0 (%s): 255", mode);
}

/* Returns 2^ceil(log2(max(amax / 448, 1e-4))) without a quotient or a logarithm: the smallest power of two
 * that is at least 1e-4, and at least amax when multiplied by 448. Exact, so it tests the library's
 * rounded quotient. */
static int scale_code(uint32_t bits)
{
    const double amax = exact_of_bits(bits);
    for (int k = -20; k <= 127; k++)
        if (ldexp(1.0, k) >= 1e-4 && ldexp(448.0, k) >= amax) return k + 127;
    return 254; /* infinity */
}

static void check_scale(uint32_t bits)
{
    const int code = num_ue8m0_scale(num_float(bits));
    const int expected = scale_code(bits);
    CHECK(code == expected, "ue8m0 scale (%s) of fp32 %08" PRIx32 " (%a) is %d, expected %d", mode, bits,
          exact_of_bits(bits), code, expected);
}

static void test_scales(struct random_state *random)
{
    for (uint32_t exponent = 0; exponent < 255; exponent++) {
        /* 1 · 2^k, 448 · 2^k = 1.75 · 2^(k+8) (where the scale steps), and their neighbours */
        const uint32_t around[] = {exponent << 23, (exponent << 23) | 0x600000u};
        for (int k = 0; k < 2; k++)
            for (uint32_t d = 0; d < 5; d++)
                if (around[k] + d >= 2) check_scale(around[k] + d - 2);
    }
    check_scale(0x7f7fffff); /* FLT_MAX */
    CHECK_ALL({num_ue8m0_scale(0.0f), 127 - 13 /* 2^-13 is the least above 1e-4 */},
              {num_ue8m0_scale(num_float(1)), 127 - 13 /* the least subnormal */},
              {num_ue8m0_scale(448.0f), 127 /* 1 */},
              {num_ue8m0_scale(num_float(0x43e00001)), 128 /* next above 448 */},
              {num_ue8m0_scale(448.0f * 0x1p-13f), 127 - 13 /* the last with the least scale */},
              {num_ue8m0_scale(448.5f * 0x1p-13f), 127 - 12},
              {num_ue8m0_scale(num_float(0x7f800000)), 254 /* "the largest finite scale" */});
    CHECK(num_ue8m0_scale(num_float(0x7fc00000)) != 255, "a NaN amax (%s) gives no finite scale", mode);

    uint32_t previous = 0;
    for (uint64_t u = 0; u <= 0x7f800000u; u += 1u + (random_u64(random) & 0x7fffu)) {
        const uint32_t bits = (uint32_t)u;
        check_scale(bits);
        const uint32_t code = num_ue8m0_scale(num_float(bits));
        CHECK(code >= previous, "ue8m0 scale (%s) falls at %08" PRIx32, mode, bits);
        previous = code;
    }
}

/* ---- Random bit patterns ----------------------------------------------------------------------------- */

static void test_sweep(struct random_state *random, int64_t count)
{
    for (int64_t n = 0; n < count; n++) {
        uint32_t bits = (uint32_t)(random_u64(random) >> 32);
        const int i = (int)(n % FORMATS);
        /* Most fp32 values are outside the range of the narrow formats: bring three in four into it. */
        if (i > 0 && n & 12) bits = (bits & 0x807fffffu) | ((97u + (bits >> 23) % 48u) << 23);
        if (is_nan_bits(bits)) continue;
        check_encode(i, bits, nearest(i, bits));
    }
}

static void __attribute__((noinline)) test_all(int64_t sweep)
{
    struct random_state random = {20250224};
    for (int i = 0; i < FORMATS; i++) {
        test_codes(i);
        test_ties(i);
    }
    test_spelled();
    test_extremes();
    test_ue8m0();
    test_scales(&random);
    test_sweep(&random, sweep);
}

/* Codes and scales of FP4 beyond what all formats have: e2m1 has no NaN. */
static void test_fp4(void)
{
    CHECK_ALL({num_to_e2m1(1e30f), 7}, {num_to_e2m1(-INFINITY), 15}, {num_to_e2m1(NAN), 0},
              {num_to_e2m1(-0.0f), 8}, {num_to_e2m1(0x1p-149f), 0});
    /* e4m3(clamp(amax / 6, 2^-9, 448)) */
    CHECK_ALL({num_e4m3_scale(0.0f), 1}, {num_e4m3_scale(6.0f), 0x38}, {num_e4m3_scale(6.0f * 448.0f), 0x7e},
              {num_e4m3_scale(INFINITY), 0x7e}, {num_e4m3_scale(1.0f), 0x23});
}

int main(int argc, char **argv)
{
    const int64_t sweep = argc > 1 && !strcmp(argv[1], "--short") ? SWEEP_INSTRUMENTED : SWEEP;
    build_tables();
    test_fp4();
    test_all(sweep);
#if defined(__x86_64__)
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040u); /* flush to zero, denormals are zero */
    mode = "subnormals flushed";
    volatile float subnormal = num_float(0x00400000u);
    if (subnormal * 1.0f == 0.0f)
        test_all(sweep / 10);
    else /* every processor supports the mode; valgrind does not */
        fprintf(stderr, "test_num: no flushing mode here: skipped\n");
    _mm_setcsr(before);
#endif
    return check_done("test_num");
}
