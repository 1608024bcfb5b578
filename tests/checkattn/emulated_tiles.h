/* SPDX-License-Identifier: MIT
 *
 * Emulates src/cpu/amx/tiles.h with tiles in memory, without AMX, following Intel's manual for its
 * instructions. The compiler includes it before that kernel's text (-include).
 */
#ifndef FMLA_CPU_AMX_TILES_H
#define FMLA_CPU_AMX_TILES_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { TILE = 16, TILE_BYTES = 64 };

union emulated_tile {
    float sums[TILE][TILE];
    int32_t pairs[TILE][TILE];
};

static _Thread_local _Alignas(64) union emulated_tile emulated[8];

static void emulated_zero(int t)
{
    memset(&emulated[t], 0, sizeof emulated[t]);
}

static void emulated_load(int t, const void *at, int64_t bytes)
{
    for (int row = 0; row < TILE; row++)
        memcpy(emulated[t].sums[row], (const char *)at + row * bytes, TILE_BYTES);
}

static void emulated_store(int t, void *at)
{
    memcpy(at, &emulated[t], sizeof emulated[t]);
}

/* Convert the two bf16 numbers of a pair to fp32. */
static __m512 first_of(__m512i pairs)
{
    return (__m512)_mm512_slli_epi32(pairs, 16);
}

static __m512 second_of(__m512i pairs)
{
    return (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32((int32_t)0xffff0000u));
}

/* The products of first numbers and of second numbers of pairs are summed separately. */
__attribute__((noinline)) static void emulated_products(int c, int a, int b)
{
    for (int m = 0; m < TILE; m++) {
        __m512 first = _mm512_setzero_ps(), second = first;
        for (int k = 0; k < TILE; k++) {
            const __m512i x = _mm512_set1_epi32(emulated[a].pairs[m][k]),
                          y = _mm512_load_si512(emulated[b].pairs[k]);
            first = _mm512_fmadd_ps(first_of(x), first_of(y), first);
            second = _mm512_fmadd_ps(second_of(x), second_of(y), second);
        }
        _mm512_store_ps(emulated[c].sums[m],
                        _mm512_add_ps(_mm512_load_ps(emulated[c].sums[m]), _mm512_add_ps(first, second)));
    }
}

/* Subnormal inputs and results are flushed to 0. */
static void emulated_add(int c, int a, int b)
{
    enum { DAZ = 1 << 6, FTZ = 1 << 15 };
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | DAZ | FTZ);
    emulated_products(c, a, b);
    _mm_setcsr(before);
}

#define TILE_ZERO(t)            emulated_zero(t)
#define TILE_LOAD(t, at, bytes) emulated_load(t, at, bytes)
#define TILE_STORE(t, at)       emulated_store(t, at)
#define TILE_ADD(c, a, b)       emulated_add(c, a, b)

static void tiles_see_memory(void) {}
static void tiles_begin(void) {}

/* The contents of released tiles are lost. */
static void tiles_end(void)
{
    memset(emulated, 0xff, sizeof emulated);
}

#endif
