/* SPDX-License-Identifier: MIT
 *
 * Tests the branch-free forms of num_fast.h against num.h: every bf16 and fp16 value, and fp32 values in
 * steps and around every border. --short takes fewer fp32 values.
 */
#include "check.h"

#include "num_fast.h"

#include "random.h"

static void check_value(uint32_t bits)
{
    const float x = num_float(bits);
    CHECK(fast_to_bf16(x) == num_to_bf16(x), "bf16 of %#x: %#x, not %#x", bits, fast_to_bf16(x),
          num_to_bf16(x));
    CHECK(fast_to_fp16(x) == num_to_fp16(x), "fp16 of %#x: %#x, not %#x", bits, fast_to_fp16(x),
          num_to_fp16(x));
    CHECK(fast_to_e2m1(x) == num_to_e2m1(x), "e2m1 of %#x: %#x, not %#x", bits, fast_to_e2m1(x),
          num_to_e2m1(x));
    CHECK(fast_to_e4m3(x) == num_to_e4m3(x), "e4m3 of %#x: %#x, not %#x", bits, fast_to_e4m3(x),
          num_to_e4m3(x));
    if (bits <= 0x7f800000u)
        CHECK(fast_ue8m0_scale(bits) == num_ue8m0_scale(x), "ue8m0 of %#x: %d, not %d", bits,
              fast_ue8m0_scale(bits), num_ue8m0_scale(x));
}

static void test_conversions(uint32_t step)
{
    for (uint32_t i = 0; i < 65536; i++) {
        check_value(num_bits(num_from_bf16((uint16_t)i)));
        check_value(num_bits(num_from_fp16((uint16_t)i)));
        for (uint32_t low = 0; low < 65536; low += 0x1fff) /* around rounding borders */
            check_value(i << 16 | low);
        check_value(i << 16 | 0x8001u);
    }
    for (uint64_t bits = 0; bits <= UINT32_MAX; bits += step) check_value((uint32_t)bits);
}

static void test_scales(void)
{
    for (int code = 114; code <= 254; code++) {
        const float scale = num_from_ue8m0((uint8_t)code), inverse = fast_ue8m0_inverse((uint8_t)code);
        for (uint32_t i = 0; i < 65536; i++) {
            const float x = num_from_bf16((uint16_t)i);
            CHECK(num_to_e4m3(x * inverse) == num_to_e4m3(x / scale), "%#x over 2^%d", i, code - 127);
        }
    }
}

/* Checks the quotient as kernels use it: only its e4m3 value counts. fp32 values are near borders between
 * two e4m3 values. */
static void check_quotient(float x, float scale)
{
    const float pre = fast_prescale(scale), inverse = 1.0f / (scale * pre);
    const float q = fast_quotient(x * pre, scale * pre, inverse);
    /* A GPU's product loses the sign of a NaN; kernels take it from x. */
    const unsigned mine = (num_to_e4m3(q) & 0x7fu) | (num_bits(x) >> 24 & 0x80u);
    CHECK(mine == num_to_e4m3(x / scale), "%a / %a: %#x, not %#x", (double)x, (double)scale, mine,
          num_to_e4m3(x / scale));
}

static void test_quotient(int scales)
{
    struct random_state random = {5};
    /* Includes 2^-80 and 2^80, to which the scale is clamped, and their neighbours. */
    static const uint32_t edges[] = {0x17800000, 0x67800000, 0x3f800000, 0x3fffffff, 0x00000001, 0x7f7fffff,
                                     0x007fffff, 0x177fffff, 0x67800001, 0x17800001, 0x3f800001, 0x3d178d50};
    const int given = sizeof edges / sizeof edges[0];
    for (int k = 0; k < scales; k++) {
        const float scale =
            num_float(k < given ? edges[k] : (uint32_t)random_between(&random, 1, 0x7f7fffff));
        for (uint32_t i = 0; i < 65536; i++) {
            check_quotient(num_from_bf16((uint16_t)i), scale);
            check_quotient(num_from_fp16((uint16_t)i), scale);
        }
        for (int v = 0; v < 0x7e; v++) {
            const float border = 0.5f * (num_from_e4m3((uint8_t)v) + num_from_e4m3((uint8_t)(v + 1)));
            const uint32_t near = num_bits(border * scale);
            for (uint32_t i = 0; i < 9; i++) check_quotient(num_float(near + i - 4), scale);
        }
    }
}

int main(int argc, char **argv)
{
    const int less = argc > 1 && !strcmp(argv[1], "--short");
    test_conversions(less ? 99991 : 997);
    test_scales();
    test_quotient(less ? 20 : 100);
    return check_done("test_num_fast");
}
