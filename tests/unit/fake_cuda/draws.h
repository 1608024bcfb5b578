/* SPDX-License-Identifier: MIT
 *
 * Random shapes, concentrated near thresholds of the library's choices, and tensors of them. Memory is
 * only addresses: a fake GPU's memory is neither read nor written.
 */
#ifndef FMLA_DRAWS_H
#define FMLA_DRAWS_H

#include "scenarios.h"

/* splitmix64: every case begins with its own state, so that it can be drawn again on its own. */
static uint64_t draw_state;

static inline uint64_t draw_bits(void)
{
    uint64_t z = draw_state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static inline void draw_from(uint64_t seed, uint64_t number)
{
    draw_state = seed * UINT64_C(0x2545f4914f6cdd1d) + number;
    draw_state = draw_bits();
}

static inline int64_t draw_below(int64_t n)
{
    return (int64_t)(draw_bits() % (uint64_t)n);
}

static inline bool draw_one_in(int64_t n)
{
    return !draw_below(n);
}

static inline int64_t draw_clamp(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

/* Returns a value in [1, most]: small, next to a power of two, or of any magnitude. */
static inline int64_t draw_size(int64_t most)
{
    int bits = 1;
    while (bits < 62 && INT64_C(1) << bits < most) bits++;
    const int64_t magnitude = INT64_C(1) << draw_below(bits + 1);
    const int64_t kind = draw_below(8);
    const int64_t x = kind < 3   ? 1 + draw_below(16)
                      : kind < 5 ? magnitude - 1 + draw_below(3)
                      : kind < 7 ? magnitude + draw_below(magnitude)
                                 : most - draw_below(2);
    return draw_clamp(x, 1, most);
}

/* Returns, mostly, a value of a list, else any up to `most`. */
#define DRAW_OF(most, ...) (draw_one_in(4) ? draw_size(most) : DRAW_AMONG(__VA_ARGS__))

/* Returns a value of the list. */
#define DRAW_AMONG(...)                                                                                      \
    draw_of((const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))

static inline int64_t draw_of(const int64_t *list, size_t count)
{
    return list[draw_below((int64_t)count)];
}

/* Returns a number of requests or tokens: next to those whose tiles are a small multiple, or fraction, of
 * the SMs. */
static inline int64_t draw_near_sms(int64_t sms, int64_t tiles, int64_t most)
{
    static const int64_t numerator[] = {1, 1, 2, 2, 3, 4, 8}, denominator[] = {1, 1, 2, 3, 4};
    const int64_t at = sms * draw_of(numerator, 7) / draw_of(denominator, 5) / tiles;
    return draw_clamp(at + draw_below(3) - 1, 0, most);
}

/* Returns the address of the k-th region, aligned like the driver's memory. Tensors of any size do not meet. */
static inline char *region(int k)
{
    return (char *)((uintptr_t)(k + 1) << 57);
}

static _Thread_local fmla_device draw_device = {FMLA_DEVICE_CUDA, 0}; /* of the following tensors */

/* Makes a tensor in region k, occasionally at an odd address or with gaps in one dimension. */
static inline void draw_tensor(struct held *held, int k, fmla_dtype dtype, int ndim, const int64_t *shape,
                               bool odd)
{
    held_set(held, region(k), dtype, ndim, shape);
    held->tensor.device = draw_device;
    if (!odd) return;
    const int64_t unit = dtype.bits == 16 ? 1 : 4;
    if (draw_one_in(2)) held->tensor.byte_offset = (uint64_t)(dtype.bits == 16 ? 2 : 4) << draw_below(5);
    if (draw_one_in(2)) {
        const int64_t gap = unit << draw_below(6), at = draw_below(ndim - 1);
        for (int64_t i = ndim - 2, stride = shape[ndim - 1]; i >= 0; i--, stride *= shape[i + 1])
            held->strides[i] = stride += i == at ? gap : 0;
    }
}

/* A struct with designated initialisers. */
#define SHAPE_OF(type, ...) ((struct type)DESIGNATED(__VA_ARGS__))

/* A tensor that is always contiguous. */
#define REGION(held, k, dtype, ndim, ...)                                                                    \
    draw_tensor(held, k, dtype, ndim, (const int64_t[]){__VA_ARGS__}, false)

#endif
