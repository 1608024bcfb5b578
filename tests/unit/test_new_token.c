/* SPDX-License-Identifier: MIT
 *
 * Tests the RMS norm of new_token.h, bit by bit, against golden/norm.py, which sums in the order that
 * docs/semantics.md defines. The order is part of the format. checkattn compares every kernel with the
 * oracle, which uses these functions, on values for which the order shows (tests/checkattn/norm_edge.h).
 */
#include "check.h"

#include "new_token.h"

#include <inttypes.h>

enum { TOKENS = 6 };

static float value(int token, int i, uint32_t salt)
{
    const uint32_t h = ((uint32_t)(token * NORM_WIDTH + i) * 2 + salt + 1) * 2654435761u,
                   g = (h ^ h >> 15) * 2246822519u;
    return ldexpf((float)((int32_t)(g >> 8) - (1 << 23)),
                  -23 + (int)((h >> 4) % (uint32_t)(1 + 6 * token)) - 3 * token);
}

static const struct {
    float eps;
    uint64_t sum;
    uint32_t factor;
    uint64_t digest;
} golden[TOKENS] = {
    {0.0f, 0x40663463fbac8a3d, 0x3fd94f24, 0xa11209957dc0cf12},
    {1e-06f, 0x409c5bb3cc8985d8, 0x3f07f883, 0xd1e100743dd5846e},
    {1e-05f, 0x40f0c28ebb790600, 0x3db0de15, 0xc44186e33d658acc},
    {0.5f, 0x414a8cb3a5dfe13d, 0x3c46b9e0, 0xc48f1a7a07adfdbe},
    {1e-12f, 0x41a56be54a3b5f9d, 0x3add3ef7, 0x5491e4e21eda6e1e},
    {0.001f, 0x41fd883ab5e45d9e, 0x39853daa, 0xee7843467da28836},
};

static uint64_t bits_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

int main(void)
{
    int others = 0;
    for (int t = 0; t < TOKENS; t++) {
        float x[NORM_WIDTH];
        double in_order = 0.0;
        uint64_t digest = 0xcbf29ce484222325;
        for (int i = 0; i < NORM_WIDTH; i++) x[i] = value(t, i, 0), in_order += (double)x[i] * (double)x[i];
        const double sum = norm_sum_of_squares(x);
        const float factor = norm_factor(sum, golden[t].eps);
        for (int i = 0; i < NORM_WIDTH; i++) {
            const uint32_t word = num_bits(norm_value(x[i], factor, value(t, i, 1)));
            for (int b = 0; b < 32; b += 8) digest = (digest ^ (word >> b & 255)) * UINT64_C(0x100000001b3);
        }
        CHECK(bits_of(sum) == golden[t].sum && num_bits(factor) == golden[t].factor &&
                  digest == golden[t].digest,
              "token %d: sum %#" PRIx64 ", factor %#x, digest %#" PRIx64, t, bits_of(sum), num_bits(factor),
              digest);
        others += in_order != sum;
    }
    CHECK(others >= TOKENS - 1, "%d of %d sums depend on their order", others, TOKENS);
    return check_done("test_new_token");
}
