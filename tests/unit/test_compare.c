/* SPDX-License-Identifier: MIT
 *
 * Tests the comparison of support/compare.h: what passes by the bound of one element, and what that bound
 * must not hide.
 */
#include "check.h"

#include "compare.h"

#include <math.h>

static const struct tolerance tolerance = {1e-6, 1e-4, 1e-7};

/* Compares one element with a reference of 0.01, with its own bound of 1e-4. */
static struct comparison one(double value, double within)
{
    struct comparison comparison = {0};
    compare_add_within(&comparison, &tolerance, value, 0.01, within);
    return comparison;
}

int main(void)
{
    struct comparison got = one(0.0100009, 0.0);
    CHECK(compare_passed(&got, &tolerance), "within abs and rel: %lld wrong", (long long)got.wrong);
    got = one(0.01005, 0.0);
    CHECK(!compare_passed(&got, &tolerance), "beyond both, and no bound of its own");
    got = one(0.01005, 1e-4);
    CHECK(compare_passed(&got, &tolerance), "within its own bound: cosine difference %g",
          compare_cosine(&got));
    CHECK(got.worst_abs > 4e-5, "the difference is told all the same: %g", got.worst_abs);
    got = one(0.01011, 1e-4);
    CHECK(!compare_passed(&got, &tolerance), "beyond its own bound");

    const double special[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        got = one(special[i], INFINITY);
        CHECK(!compare_passed(&got, &tolerance), "no bound lets %g pass", special[i]);
        struct comparison other = {0};
        compare_add_within(&other, &tolerance, 0.01, special[i], INFINITY);
        CHECK(!compare_passed(&other, &tolerance), "no bound lets 0.01 pass for %g", special[i]);
        compare_add_within(&other, &tolerance, special[i], special[i], 0.0);
        CHECK_EQ(other.wrong, 1);
    }

    /* An element that passes by its bound does not affect the cosine. */
    struct comparison many = {0};
    compare_add_within(&many, &tolerance, 0.01005, 0.01, 1e-4);
    for (int i = 0; i < 100; i++) compare_add_within(&many, &tolerance, 1.0 + 0.9e-4, 1.0, 0.0);
    CHECK(compare_cosine(&many) < 1e-8, "cosine difference %g", compare_cosine(&many));

    /* All `count` elements are 0.3 % too large: a cosine difference of 4.5e-6, where 1e-6 is allowed and,
     * for few elements of inputs outside the table, 2^-17. */
    const struct tolerance leaning = {1e-6, 1e-2, 1e-6};
    for (int count = 1; count <= 1000; count *= 10) {
        struct comparison all = {0};
        for (int i = 0; i < count; i++) compare_add_within(&all, &leaning, 1.003, 1.0, 0.0);
        CHECK(!compare_passed(&all, &leaning), "%d elements: cosine difference %g", count,
              compare_cosine(&all));
        CHECK(compare_passed_other(&all, &leaning) == (count < 256), "%d elements: cosine difference %g",
              count, compare_cosine(&all));
        compare_add_within(&all, &leaning, 1.004e4, 1e4, 0.0);
        CHECK(!compare_passed_other(&all, &leaning), "0.4 %% of few: cosine difference %g",
              compare_cosine(&all));
    }
    return check_done("compare");
}
