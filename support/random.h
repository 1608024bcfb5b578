/* SPDX-License-Identifier: MIT
 *
 * Seeded random numbers for tests, benchmarks and generated inputs: the same on every machine. The
 * generator is SplitMix64 (Steele, Lea, Flood 2014).
 */
#ifndef FMLA_SUPPORT_RANDOM_H
#define FMLA_SUPPORT_RANDOM_H

#include <math.h>
#include <stdint.h>

struct random_state {
    uint64_t state;
};

static const uint64_t random_step = 0x9e3779b97f4a7c15u;

static inline uint64_t random_u64(struct random_state *random)
{
    uint64_t z = random->state += random_step;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Passes over the next `count` numbers of random_u64. */
static inline void random_skip(struct random_state *random, int64_t count)
{
    random->state += (uint64_t)count * random_step;
}

/* Returns an integer in [low, high], both included. */
static inline int64_t random_between(struct random_state *random, int64_t low, int64_t high)
{
    return low + (int64_t)(random_u64(random) % ((uint64_t)(high - low) + 1u));
}

/* Returns a value in [0, 1). */
static inline double random_unit(struct random_state *random)
{
    return (double)(random_u64(random) >> 11) * 0x1p-53;
}

enum { RANDOM_NORMAL = 2 /* numbers of random_u64 that a sample takes */ };

/* Returns a sample of N(0, 1) by the Box-Muller transform. */
static inline float random_normal(struct random_state *random)
{
    const double u = 1.0 - random_unit(random);
    const double v = random_unit(random);
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

/* Returns a sample of N(mean, deviation²) clamped to [-1, 1], as docs/semantics.md draws inputs. */
static inline float random_input(struct random_state *random, float mean, float deviation)
{
    const float x = mean + deviation * random_normal(random);
    return x < -1.0f ? -1.0f : x > 1.0f ? 1.0f : x;
}

/* Shuffles items[0 … count). */
static inline void random_shuffle(struct random_state *random, int32_t *items, int64_t count)
{
    for (int64_t i = count - 1; i > 0; i--) {
        const int64_t j = random_between(random, 0, i);
        const int32_t item = items[i];
        items[i] = items[j], items[j] = item;
    }
}

#endif
