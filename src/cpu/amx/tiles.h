/* SPDX-License-Identifier: MIT
 *
 * The tiles of AMX. A thread has eight tiles of 16 rows of 64 bytes, which are 16 fp32 or 16 pairs of bf16.
 *
 *   TILE_ADD(c, a, b)    c[m][n] += Σ_k a[m][k] · b[k][n]    m, n < 16, k < 32; b is stored [k / 2][n][k % 2]
 *
 * The number of a tile is part of its instruction, so these are macros and take literals. The sum of a
 * product is ready after 52 cycles, and a product can start every 16: four sums in turn keep the unit busy.
 */
#ifndef FMLA_CPU_AMX_TILES_H
#define FMLA_CPU_AMX_TILES_H

#include <immintrin.h>
#include <stdint.h>

enum { TILE = 16, TILE_BYTES = 64 }; /* rows; bytes of a row */

#define TILE_ZERO(t)            _tile_zero(t)
#define TILE_LOAD(t, at, bytes) _tile_loadd(t, at, bytes) /* rows `bytes` apart */
#define TILE_STORE(t, at)       _tile_stored(t, at, TILE_BYTES)
#define TILE_ADD(c, a, b)       _tile_dpbf16ps(c, a, b)

/* Makes the compiler write pending stores to memory: it does not know that a tile load reads them. */
static inline void tiles_see_memory(void)
{
    __asm__ volatile("" ::: "memory");
}

/* Configures all eight tiles at full size. */
static inline void tiles_begin(void)
{
    _Alignas(64) struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.row_bytes[t] = TILE_BYTES, config.rows[t] = TILE;
    tiles_see_memory();
    _tile_loadconfig(&config);
}

static inline void tiles_end(void)
{
    _tile_release();
}

#endif
