/* SPDX-License-Identifier: MIT
 *
 * Tests indexformat.h and index_row.h, byte by byte, against golden/indexformat.txt, which
 * golden/indexformat.py computes from the description of the formats in exact fractions. The argument is that
 * file. Keys are at odd addresses between poisoned bytes, so that a byte written next to one is detected.
 * Everything runs twice if the machine allows: in the default floating-point mode, and with subnormals flushed
 * to zero in operands and results, which the values of keys with small scales depend on.
 */
#include "check.h"

#include "index_row.h"
#include "indexformat.h"

#include <ctype.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { MOST = INDEX_MOST, GUARD = 33, POISON = 0xa5 };

/* ---- The file ----------------------------------------------------------------------------------------- */

static FILE *file;
static int flushed; /* whether subnormals are */
static int line_of_record = 1, line = 1;

static int next_char(void)
{
    const int c = getc(file);
    line += c == '\n';
    return c;
}

/* Reads the next word, of at most 31 characters; returns whether there is one. */
static int read_word(char *word)
{
    int c = ' ', n = 0;
    while (isspace(c)) c = next_char();
    for (; c != EOF && !isspace(c) && n < 31; c = next_char()) word[n++] = (char)c;
    word[n] = 0;
    return n;
}

/* Reads hexadecimal digits, which several words may share. */
static uint32_t read_digits(int digits)
{
    uint32_t value = 0;
    while (digits) {
        const int c = next_char();
        if (isspace(c)) continue;
        const char text[2] = {(char)c, 0};
        if (!isxdigit(c)) {
            fprintf(stderr, "golden/indexformat.txt, line %d: no hexadecimal digit\n", line);
            exit(1);
        }
        value = value << 4 | (uint32_t)strtoul(text, NULL, 16);
        digits--;
    }
    return value;
}

static void read_bytes(uint8_t *bytes, int count)
{
    for (int i = 0; i < count; i++) bytes[i] = (uint8_t)read_digits(2);
}

static void read_bf16(float *values, int count)
{
    for (int i = 0; i < count; i++) values[i] = num_from_bf16((uint16_t)read_digits(4));
}

static void read_f32(float *values, int count)
{
    for (int i = 0; i < count; i++) values[i] = num_float(read_digits(8));
}

static float read_float(void)
{
    return num_float(read_digits(8));
}

static int read_number(void)
{
    char word[32];
    read_word(word);
    return atoi(word);
}

static int read_width(void)
{
    const int d = read_number();
    if (d == 64) return 64;
    if (d == 128) return 128;
    fprintf(stderr, "golden/indexformat.txt, line %d: no width %d\n", line, d);
    exit(1);
}

static const char *const names[INDEX_FORMATS] = {
    [INDEX_FP8_132] = "FP8_132", [INDEX_FP8_132_UE8M0] = "FP8_132_UE8M0", [INDEX_FP4_68] = "FP4_68"};

static enum index_format read_format(void)
{
    char word[32];
    read_word(word);
    int f = 0;
    while (f < INDEX_FORMATS && strcmp(word, names[f])) f++;
    if (f == INDEX_FORMATS) {
        fprintf(stderr, "golden/indexformat.txt, line %d: no format %s\n", line, word);
        exit(1);
    }
    return (enum index_format)f;
}

/* ---- Keys --------------------------------------------------------------------------------------------- */

/* The bytes that a function writes, with guards. */
struct written {
    uint8_t codes[GUARD + MOST + GUARD], scale[GUARD + INDEX_SCALE_BYTES + GUARD];
};

static void poison(struct written *w)
{
    memset(w, POISON, sizeof *w);
}

static void check_bytes(const char *what, const uint8_t *came, const uint8_t *expected, int count)
{
    for (int i = -GUARD; i < count + GUARD; i++) {
        const uint8_t wanted = i < 0 || i >= count ? POISON : expected[i];
        CHECK(came[GUARD + i] == wanted, "record of line %d, %s, byte %d of %d: %02x, expected %02x",
              line_of_record, what, i, count, came[GUARD + i], wanted);
    }
}

static void check_key(const struct written *w, enum index_format format, int d, const uint8_t *codes,
                      const uint8_t *scale)
{
    check_bytes(names[format], w->codes, codes, (int)index_code_bytes(format, d));
    check_bytes("scale", w->scale, scale, INDEX_SCALE_BYTES);
}

static void check_store(enum index_format format, int d, float floor, int scale_pow2, const float *values,
                        const uint8_t *codes, const uint8_t *scale)
{
    struct written w;
    poison(&w);
    index_store(format, d, (struct index_scaling){floor, scale_pow2}, values, w.codes + GUARD,
                w.scale + GUARD);
    check_key(&w, format, d, codes, scale);
}

static void test_store_fp8(void)
{
    float values[MOST];
    uint8_t codes[MOST], pow2_codes[MOST], scale[4], pow2_scale[4], ue8m0[4];
    const int d = read_width();
    const float floor = read_float();
    read_bf16(values, d);
    read_bytes(codes, d), read_bytes(scale, 4);
    read_bytes(pow2_codes, d), read_bytes(pow2_scale, 4), read_bytes(ue8m0, 4);
    check_store(INDEX_FP8_132, d, floor, 0, values, codes, scale);
    check_store(INDEX_FP8_132, d, floor, 1, values, pow2_codes, pow2_scale);
    for (int scale_pow2 = 0; scale_pow2 < 2; scale_pow2++)
        check_store(INDEX_FP8_132_UE8M0, d, floor, scale_pow2, values, pow2_codes, ue8m0);
}

static void test_store_fp4(void)
{
    float values[MOST];
    uint8_t codes[MOST / 2], scale[4];
    const int d = read_width();
    read_bf16(values, d);
    read_bytes(codes, d / 2), read_bytes(scale, 4);
    check_store(INDEX_FP4_68, d, 1e-4f, 1, values, codes, scale);
    check_store(INDEX_FP4_68, d, 100.0f, 0, values, codes, scale);
}

/* Returns whether the mode may show in value i: its scale is so small that some codes give subnormals. */
static int mode_shows(enum index_format format, const uint8_t *scale, int i)
{
    return flushed && num_bits(index_scale_of(format, scale, i)) < num_bits(0x1p-117f);
}

static void test_load(void)
{
    float values[MOST];
    uint8_t codes[MOST], scale[4];
    const enum index_format format = read_format();
    const int d = read_width();
    read_bytes(codes, (int)index_code_bytes(format, d)), read_bytes(scale, 4);
    read_f32(values, d);
    for (int i = 0; i < d; i++) {
        if (mode_shows(format, scale, i)) continue;
        const float came = index_value(format, codes, scale, i);
        const int same = num_bits(came) == num_bits(values[i]) || (came != came && values[i] != values[i]);
        CHECK(same, "record of line %d, value %d: %a, expected %a", line_of_record, i, (double)came,
              (double)values[i]);
    }
}

static void test_convert(void)
{
    uint8_t codes[MOST], scale[4], to_codes[MOST], to_scale[4];
    struct written w;
    poison(&w);
    const enum index_format from = read_format(), to = read_format();
    const int d = read_width(), scale_pow2 = read_number();
    const float floor = read_float();
    read_bytes(codes, (int)index_code_bytes(from, d)), read_bytes(scale, 4);
    read_bytes(to_codes, (int)index_code_bytes(to, d)), read_bytes(to_scale, 4);
    for (int i = 0; i < d; i++)
        if (mode_shows(from, scale, i)) return;
    index_convert(from, codes, scale, to, d, (struct index_scaling){floor, scale_pow2}, w.codes + GUARD,
                  w.scale + GUARD);
    check_key(&w, to, d, to_codes, to_scale);
}

/* ---- Rows --------------------------------------------------------------------------------------------- */

/* Reads the expected values and compares their bits. */
static void check_row(const float *came, int d)
{
    float expected[MOST];
    read_bf16(expected, d);
    for (int i = 0; i < d; i++)
        CHECK(num_bits(came[i]) == num_bits(expected[i]), "record of line %d, value %d: %a, expected %a",
              line_of_record, i, (double)came[i], (double)expected[i]);
}

/* Compares a double's bits with the next 16 digits; a NaN is any. */
static void check_sum(const char *what, double came)
{
    uint64_t bits;
    memcpy(&bits, &came, sizeof bits);
    const uint64_t upper = read_digits(8), expected = upper << 32 | read_digits(8);
    const int nan = (expected & INT64_MAX) > UINT64_C(0x7ff0000000000000);
    CHECK(nan ? came != came : bits == expected, "record of line %d, %s: %a", line_of_record, what, came);
}

/* Compares an fp32 with the next 8 digits. */
static void check_value(const char *what, float came)
{
    const uint32_t expected = read_digits(8);
    CHECK(num_bits(came) == expected, "record of line %d, %s: %08x, expected %08x", line_of_record, what,
          num_bits(came), expected);
}

static void test_layer_norm(void)
{
    float x[MOST], weight[MOST], bias[MOST];
    const int d = read_width();
    const float eps = read_float();
    read_bf16(x, d);
    read_f32(weight, d);
    read_f32(bias, d);
    const double sum = layer_norm_sum(x, d), squares = layer_norm_sum_of_squares(x, d, sum / d);
    const float factor = norm_factor_of(squares, d, eps);
    check_sum("sum", sum);
    check_sum("sum of squares", squares);
    check_value("factor", token_number(factor));
    for (int i = 0; i < d; i++)
        check_value("value", layer_norm_value(x[i], (float)(sum / d), factor, weight[i], bias[i]));
    row_layer_norm(x, d, weight, bias, eps);
    check_row(x, d);
}

static void test_rms_norm(void)
{
    float x[MOST], weight[MOST];
    const int d = read_width();
    const float eps = read_float();
    read_bf16(x, d);
    read_f32(weight, d);
    const double squares = norm_sum_of_squares_of(x, d);
    check_sum("sum of squares", squares);
    check_value("factor", token_number(norm_factor_of(squares, d, eps)));
    row_rms_norm(x, d, weight, eps);
    check_row(x, d);
}

static void test_rope(void)
{
    float x[ROPE_WIDTH], table[ROPE_WIDTH];
    const int halves = read_number();
    read_bf16(x, ROPE_WIDTH);
    read_f32(table, ROPE_WIDTH);
    row_rope(x, table, halves);
    check_row(x, ROPE_WIDTH);
}

static void test_hadamard(void)
{
    float x[MOST];
    const int d = read_width();
    read_bf16(x, d);
    check_value("factor", hadamard_factor(d));
    row_hadamard(x, d);
    check_row(x, d);
}

static void test_weight(void)
{
    const float w = read_float(), scale = read_float(), factor = read_float();
    check_value("weight", index_weight(w, scale, factor));
}

enum { STORE_FP8, STORE_FP4, LOAD, CONVERT, LAYER_NORM, RMS_NORM, ROPE, HADAMARD, WEIGHT, RECORDS };

/* Reads all records. Every kind must be there. */
static void test_golden(void)
{
    static const char *const kinds[RECORDS] = {"store_fp8", "store_fp4", "load",     "convert", "layer_norm",
                                               "rms_norm",  "rope",      "hadamard", "weight"};
    int count[RECORDS] = {0};
    char word[32];
    while (read_word(word)) {
        int kind = 0;
        line_of_record = line;
        while (kind < RECORDS && strcmp(word, kinds[kind])) kind++;
        switch (kind) {
        case STORE_FP8: test_store_fp8(); break;
        case STORE_FP4: test_store_fp4(); break;
        case LOAD: test_load(); break;
        case CONVERT: test_convert(); break;
        case LAYER_NORM: test_layer_norm(); break;
        case RMS_NORM: test_rms_norm(); break;
        case ROPE: test_rope(); break;
        case HADAMARD: test_hadamard(); break;
        case WEIGHT: test_weight(); break;
        default: fprintf(stderr, "golden/indexformat.txt, line %d: no record %s\n", line, word); exit(1);
        }
        count[kind]++;
    }
    for (int kind = 0; kind < RECORDS; kind++) CHECK(count[kind] > 5, "%d of %s", count[kind], kinds[kind]);
}

/* ---- Pages -------------------------------------------------------------------------------------------- */

static void test_pages(void)
{
    CHECK_ALL({index_page_bytes(INDEX_FP8_132, 128, 64), 64 * 132},
              {index_page_bytes(INDEX_FP8_132_UE8M0, 128, 1), 132},
              {index_page_bytes(INDEX_FP4_68, 128, 64), 64 * 68},
              {index_page_bytes(INDEX_FP8_132, 64, 64), 64 * 68},
              {index_page_bytes(INDEX_FP4_68, 64, 3), 3 * 36});
    CHECK_ALL({index_codes_at(INDEX_FP8_132, 128, 5), 640}, {index_codes_at(INDEX_FP4_68, 128, 5), 320},
              {index_codes_at(INDEX_FP8_132_UE8M0, 64, 5), 320}, {index_codes_at(INDEX_FP4_68, 64, 5), 160});
    CHECK_ALL({index_scale_at(INDEX_FP8_132, 128, 64, 0), 64 * 128},
              {index_scale_at(INDEX_FP8_132_UE8M0, 128, 64, 63), 64 * 128 + 252},
              {index_scale_at(INDEX_FP8_132, 64, 61, 2), 61 * 64 + 8},
              {index_scale_at(INDEX_FP4_68, 128, 64, 1), 64 * 64 + 4},
              {index_scale_at(INDEX_FP4_68, 64, 7, 6), 7 * 32 + 24});
    /* 64-bit offsets: a slot more than 4 GiB into a page. */
    CHECK_ALL({index_codes_at(INDEX_FP8_132, 128, INT64_C(40000000)), INT64_C(5120000000)},
              {index_scale_at(INDEX_FP8_132, 128, INT64_C(40000001), INT64_C(40000000)),
               INT64_C(5120000128) + 160000000});
}

int main(int argc, char **argv)
{
    file = argc == 2 ? fopen(argv[1], "r") : NULL;
    if (!file) {
        fprintf(stderr, "usage: test_indexformat golden/indexformat.txt\n");
        return 1;
    }
    test_pages();
    test_golden();
#if defined(__x86_64__)
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040u); /* flush to zero, denormals are zero */
    volatile float subnormal = num_float(0x00400000u);
    if (subnormal * 1.0f == 0.0f) {
        flushed = 1, line = 1;
        rewind(file);
        test_golden();
    } else { /* every processor supports the mode; valgrind does not */
        fprintf(stderr, "test_indexformat: no flushing mode here: skipped\n");
    }
    _mm_setcsr(before);
#endif
    fclose(file);
    return check_done("test_indexformat");
}
