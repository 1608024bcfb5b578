/* SPDX-License-Identifier: MIT
 *
 * The factor is fp32(1 / sqrt(mean + eps)). It changes where mean + eps passes one double; norm_eps, which is
 * small and therefore fine, moves the sum there. A weight w moves value · factor · w next to the middle of two
 * 16-bit numbers, so that the factor's last bit shows in the cache.
 */
#include "norm_edge.h"

#include "elements.h"
#include "new_token.h"

#include <float.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = NORM_EDGE_WIDTH };

static float rounded(fmla_dtype dtype, float x)
{
    uint32_t room;
    element_store(&room, dtype, 0, x);
    return element_load(&room, dtype, 0);
}

/* ---- Other orders of the sum ------------------------------------------------------------------- */

static double in_order(const float *x)
{
    double sum = 0.0;
    for (int i = 0; i < WIDTH; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}

/* Each of 32 lanes adds every 32nd value; then the lanes' sums are halved, as a warp would. */
static double by_strided_lanes(const float *x)
{
    double lane[32] = {0.0};
    for (int i = 0; i < WIDTH; i++) lane[i % 32] += (double)x[i] * (double)x[i];
    for (int half = 16; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

/* Neighbours are added until one sum is left. */
static double by_neighbours(const float *x)
{
    double sum[WIDTH];
    for (int i = 0; i < WIDTH; i++) sum[i] = (double)x[i] * (double)x[i];
    for (int count = WIDTH / 2; count; count /= 2)
        for (int i = 0; i < count; i++) sum[i] = sum[2 * i] + sum[2 * i + 1];
    return sum[0];
}

/* The defined sums of eight, then neighbours in place of halves. */
static double eights_by_neighbours(const float *x)
{
    double sum[WIDTH / 8];
    for (int i = 0; i < WIDTH / 8; i++) sum[i] = norm_of_four(x + 8 * i) + norm_of_four(x + 8 * i + 4);
    for (int count = WIDTH / 16; count; count /= 2)
        for (int i = 0; i < count; i++) sum[i] = sum[2 * i] + sum[2 * i + 1];
    return sum[0];
}

/* Returns whether all of them are on that side of the defined sum. */
static bool others_are(bool above, const float *x)
{
    const double sum = norm_sum_of_squares(x),
                 others[] = {in_order(x), by_strided_lanes(x), by_neighbours(x), eights_by_neighbours(x)};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (above ? others[i] <= sum : others[i] >= sum) return false;
    return true;
}

/* ---- norm_eps ---------------------------------------------------------------------------------- */

static float factor_of(double mean)
{
    return (float)(1.0 / sqrt(mean));
}

/* Finds an eps with which mean + eps is the first double beyond a change of the factor, or the last before
 * it; returns false if there is none that is small. *other is the factor on the other side. */
static bool find_eps(double sum, bool above, float *eps, float *other)
{
    const double mean = sum / WIDTH;
    const float factor = factor_of(mean), next = nextafterf(factor, 0.0f);
    double low = mean, high = mean * (1.0 + 0x1p-22);
    while (nextafter(low, high) < high) { /* the factor changes between them */
        const double middle = low + (high - low) / 2;
        *(factor_of(middle) == factor ? &low : &high) = middle;
    }
    const double to = above ? low : high;
    if (factor_of(high) != next || to - mean > mean * 0x1p-29 || to <= mean) return false;
    *eps = (float)(to - mean);
    *other = above ? next : factor;
    return mean + (double)*eps == to && norm_factor(sum, *eps) == (above ? factor : next) &&
           norm_factor(nextafter(sum, above ? DBL_MAX : 0.0), *eps) == *other;
}

/* ---- Weights ----------------------------------------------------------------------------------- */

/* The types of a case, and the two factors. */
struct edge {
    fmla_dtype vectors, cache;
    float factor, other;
};

/* Returns whether the cache has another value of x with the other factor. */
static bool shows(const struct edge *e, float x, float weight)
{
    const float y = rounded(e->vectors, norm_value(x, e->factor, weight)),
                z = rounded(e->vectors, norm_value(x, e->other, weight));
    return rounded(e->cache, y) != rounded(e->cache, z);
}

/* Returns a weight that shows the difference in value x, or one of 1 to 2 that does not. */
static float find_weight(struct random_state *random, const struct edge *e, float x)
{
    const float drawn = rounded(e->vectors, (float)(1.0 + random_unit(random)));
    const bool is_bf16 = dtype_is(e->cache, FMLA_TYPE_BFLOAT, 16);
    if (e->vectors.bits == 16) { /* tries every weight of the type */
        const int all = dtype_is(e->vectors, FMLA_TYPE_BFLOAT, 16) ? 1 << 7 : 1 << 10;
        for (int i = 0; i < all; i++) {
            const float weight = 1.0f + (float)i / (float)all;
            if (shows(e, x, weight)) return weight;
        }
        return drawn;
    }
    /* Moves the product to the middle of two numbers of the cache. */
    const float y = x * e->factor * drawn;
    const uint32_t step = is_bf16 ? 0x10000 : 0x2000, middle = (num_bits(y) & ~(step - 1)) | step / 2;
    float weight = drawn * (num_float(middle) / y);
    for (int i = 0; i < 8; i++) weight = nextafterf(weight, 0.0f);
    for (int i = 0; i < 16; i++) {
        if (shows(e, x, weight)) return weight;
        weight = nextafterf(weight, 4.0f);
    }
    return drawn;
}

void norm_edge_make(struct random_state *random, fmla_dtype vectors, fmla_dtype cache,
                    float values[NORM_EDGE_WIDTH], float weights[NORM_EDGE_WIDTH], float *eps)
{
    const bool above = random_between(random, 0, 1);
    const int least = dtype_is(vectors, FMLA_TYPE_FLOAT, 16) ? -12 : -18;
    struct edge e = {vectors, cache, 0.0f, 0.0f};
    int drawn = WIDTH;
    for (int shown = 0; !shown; drawn = 4) { /* at first all values, then few at a time */
        for (int i = 0; i < drawn; i++) { /* of many sizes: else the squares of 16-bit values add exactly */
            const int64_t at = drawn == WIDTH ? i : random_between(random, 0, WIDTH - 1);
            const float size = ldexpf(1.0f, (int)random_between(random, least, 5));
            values[at] = rounded(vectors, size * random_normal(random));
        }
        if (!others_are(above, values)) continue;
        const double sum = norm_sum_of_squares(values);
        if (!find_eps(sum, above, eps, &e.other)) continue;
        e.factor = norm_factor(sum, *eps);
        for (int i = 0; i < WIDTH; i++) {
            weights[i] = find_weight(random, &e, values[i]);
            shown += shows(&e, values[i], weights[i]);
        }
    }
}
