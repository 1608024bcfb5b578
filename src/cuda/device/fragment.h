/* SPDX-License-Identifier: MIT
 *
 * Maps of lanes to elements: the register fragments of the matrix instructions, and the XOR swizzles of
 * shared memory. Kernels compute their addresses with these functions, and `flashmla layout` draws them.
 *
 * Source: PTX ISA 8.x, "Matrix fragments for mma.m16n8k16", "ldmatrix", and "Asynchronous warpgroup level
 * matrix instructions" (register fragments of m64nNk16, swizzling modes).
 */
#ifndef FMLA_CUDA_FRAGMENT_H
#define FMLA_CUDA_FRAGMENT_H

#include <stdint.h>

#if defined(__CUDACC__)
#define FRAGMENT_FN static __host__ __device__ __forceinline__
#else
#define FRAGMENT_FN static inline
#endif

/* ---- mma.m16n8k16, 16-bit operands, fp32 sums: element e of a lane --------------------------- */

/* A: 16 × 16, 8 elements per lane (two per register). */
FRAGMENT_FN int mma_a_row(int lane, int e)
{
    return lane / 4 + 8 * (e / 2 % 2);
}

FRAGMENT_FN int mma_a_column(int lane, int e)
{
    return 2 * (lane % 4) + e % 2 + 8 * (e / 4);
}

/* B: 16 × 8 (k × n), 4 elements per lane. */
FRAGMENT_FN int mma_b_row(int lane, int e)
{
    return 2 * (lane % 4) + e % 2 + 8 * (e / 2);
}

FRAGMENT_FN int mma_b_column(int lane, int e)
{
    (void)e;
    return lane / 4;
}

/* C and D: 16 × 8, 4 elements per lane. */
FRAGMENT_FN int mma_c_row(int lane, int e)
{
    return lane / 4 + 8 * (e / 2);
}

FRAGMENT_FN int mma_c_column(int lane, int e)
{
    return 2 * (lane % 4) + e % 2;
}

/* ---- ldmatrix.x4: four 8 × 8 matrices; lane l gives the address of row l % 8 of matrix l / 8 ---- */

/* The matrices of a 16 × 16 tile, in the order of A's registers (rows 0-7, rows 8-15, then the right half).
 * With .trans this is the order of two B fragments side by side (k 0-7, k 8-15, then the next 8 columns). */
FRAGMENT_FN int ldmatrix_tile_row(int lane)
{
    return lane % 16;
}

FRAGMENT_FN int ldmatrix_tile_chunk(int lane) /* of 8 elements */
{
    return lane / 16;
}

/* The matrices of 8 rows × 32 columns: two B fragments that follow each other along k. */
FRAGMENT_FN int ldmatrix_row_of_8(int lane)
{
    return lane % 8;
}

FRAGMENT_FN int ldmatrix_chunk_of_4(int lane)
{
    return lane / 8;
}

/* The matrices of 16 rows × 16 columns, in the order of two B fragments of 8 rows each. */
FRAGMENT_FN int ldmatrix_pair_row(int lane)
{
    return lane % 8 + 8 * (lane / 16);
}

FRAGMENT_FN int ldmatrix_pair_chunk(int lane)
{
    return lane / 8 % 2;
}

/* The source of element e of a lane (register e / 2): `source` is the lane that gave the row's address, and
 * `source_element` the element of that row. With .trans the matrices arrive transposed. */
FRAGMENT_FN int ldmatrix_source(int lane, int e)
{
    return 8 * (e / 2) + lane / 4;
}

FRAGMENT_FN int ldmatrix_source_element(int lane, int e)
{
    return 2 * (lane % 4) + e % 2;
}

FRAGMENT_FN int ldmatrix_trans_source(int lane, int e)
{
    return 8 * (e / 2) + 2 * (lane % 4) + e % 2;
}

FRAGMENT_FN int ldmatrix_trans_source_element(int lane, int e)
{
    (void)e;
    return lane / 4;
}

/* ---- wgmma.m64nNk16, 16-bit operands, fp32 sums: element e of a thread of the warpgroup (0-127) ---- */

enum { WARP_LANES = 32, WARPGROUP_THREADS = 128 };

/* Each warp has 16 of the 64 rows. A in registers: 64 × 16, 8 elements per thread, distributed within a
 * warp's rows as A of mma. */
FRAGMENT_FN int wgmma_a_row(int thread, int e)
{
    return 16 * (thread / WARP_LANES) + mma_a_row(thread % WARP_LANES, e);
}

FRAGMENT_FN int wgmma_a_column(int thread, int e)
{
    return mma_a_column(thread % WARP_LANES, e);
}

/* D: 64 × N, N / 2 elements per thread; every 8 columns are distributed as a C of mma. */
FRAGMENT_FN int wgmma_d_row(int thread, int e)
{
    return 16 * (thread / WARP_LANES) + mma_c_row(thread % WARP_LANES, e % 4);
}

FRAGMENT_FN int wgmma_d_column(int thread, int e)
{
    return 8 * (e / 4) + mma_c_column(thread % WARP_LANES, e % 4);
}

/* ---- Parts: rows of partial results in the workspace ------------------------------------------- */

/* A lane holds two pairs of every 16 columns of a row, 8 columns apart, from two neighbouring C fragments. A
 * part stores them together, so that a lane stores and loads 16 bytes:
 *
 *      position    0  1  2  3   4  5  6  7   8  9 10 11  12 13 14 15
 *      column      0  1  8  9   2  3 10 11   4  5 12 13   6  7 14 15
 *      lane % 4    0            1            2            3
 */
FRAGMENT_FN int part_position(int column)
{
    const unsigned c = (unsigned)column;
    return (int)(c / 16 * 16 + c % 8 / 2 * 4 + c / 8 % 2 * 2 + c % 2);
}

/* Returns the first of the four positions of a lane's values in the first 16 columns. */
FRAGMENT_FN int part_position_of_lane(int lane)
{
    return 4 * (lane % 4);
}

/* Returns the column at a position: the inverse of part_position. */
FRAGMENT_FN int part_column(int position)
{
    const unsigned p = (unsigned)position;
    return (int)(p / 16 * 16 + p / 2 % 2 * 8 + p / 4 % 4 * 2 + p % 2);
}

/* Rows of 24 bits a value (half_rows.cuh) have their upper halves and their third bytes apart. Returns the position
 * of the third byte of the value whose upper half is at `position`. Of 64 values the first and the second half
 * take turns, eight bytes at a time, so that a lane, which stores eight upper halves of either, stores 16 bytes. */
FRAGMENT_FN int third_byte_position(int position)
{
    const unsigned p = (unsigned)position;
    return (int)(p / 64 * 64 + p % 32 / 8 * 16 + p % 64 / 32 * 8 + p % 8);
}

/* ---- Shared memory --------------------------------------------------------------------------- */

enum { LINE_BYTES = 128, CHUNK_BYTES = 16, LINE_ELEMENTS = 64 /* of 16 bits */, CHUNK_ELEMENTS = 8 };

/* Returns the byte offset of a 16-byte chunk of a row in an array of rows of 128 bytes. Eight rows that read
 * the same chunk access eight different groups of banks. This is the 128-byte swizzle of TMA and wgmma. */
FRAGMENT_FN uint32_t swizzle_128(uint32_t row, uint32_t chunk)
{
    return row * LINE_BYTES + ((chunk ^ (row & 7u)) * CHUNK_BYTES);
}

/* The same for rows of 64 and of 32 bytes, where two and four rows fill all banks once: the 64-byte and
 * 32-byte swizzles of TMA and wgmma. Each of the three swizzles XORs bits of the byte address, from bit 4 on,
 * with the bits three places above. The pattern repeats every 1024, 512 or 256 bytes, so the array must start
 * at a multiple of that. */
FRAGMENT_FN uint32_t swizzle_64(uint32_t row, uint32_t chunk)
{
    return row * (LINE_BYTES / 2) + ((chunk ^ (row / 2 & 3u)) * CHUNK_BYTES);
}

FRAGMENT_FN uint32_t swizzle_32(uint32_t row, uint32_t chunk)
{
    return row * (LINE_BYTES / 4) + ((chunk ^ (row / 4 & 1u)) * CHUNK_BYTES);
}

#endif
