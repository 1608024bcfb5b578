/* SPDX-License-Identifier: MIT
 *
 * Which lane holds which element: the register fragments of the matrix instructions, and the XOR swizzle of rows of
 * 128 bytes in shared memory. Kernels compute their addresses with these functions, and `flashmla layout` draws them.
 * Source: PTX ISA 8.x, "Matrix fragments for mma.m16n8k16" and "ldmatrix".
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

/* A, 16 × 16, 8 elements a lane (two a register). */
FRAGMENT_FN int mma_a_row(int lane, int e)
{
    return lane / 4 + 8 * (e / 2 % 2);
}

FRAGMENT_FN int mma_a_column(int lane, int e)
{
    return 2 * (lane % 4) + e % 2 + 8 * (e / 4);
}

/* B, 16 × 8 (k × n), 4 elements a lane. */
FRAGMENT_FN int mma_b_row(int lane, int e)
{
    return 2 * (lane % 4) + e % 2 + 8 * (e / 2);
}

FRAGMENT_FN int mma_b_column(int lane, int e)
{
    (void)e;
    return lane / 4;
}

/* C and D, 16 × 8, 4 elements a lane. */
FRAGMENT_FN int mma_c_row(int lane, int e)
{
    return lane / 4 + 8 * (e / 2);
}

FRAGMENT_FN int mma_c_column(int lane, int e)
{
    return 2 * (lane % 4) + e % 2;
}

/* ---- ldmatrix.x4: four 8 × 8 matrices; lane l gives the address of row l % 8 of matrix l / 8 ---- */

/* The matrices of a 16 × 16 tile in the order of A's registers (rows 0-7, rows 8-15, then the right half), which
 * with .trans is the order of two B fragments side by side (k 0-7, k 8-15, then the next 8 columns). */
FRAGMENT_FN int ldmatrix_tile_row(int lane)
{
    return lane % 16;
}

FRAGMENT_FN int ldmatrix_tile_chunk(int lane) /* of 8 elements */
{
    return lane / 16;
}

/* The matrices of 8 rows × 32 columns: two B fragments, one after the other along k. */
FRAGMENT_FN int ldmatrix_row_of_8(int lane)
{
    return lane % 8;
}

FRAGMENT_FN int ldmatrix_chunk_of_4(int lane)
{
    return lane / 8;
}

/* The matrices of 16 rows × 16 columns in the order of two B fragments of 8 rows each. */
FRAGMENT_FN int ldmatrix_pair_row(int lane)
{
    return lane % 8 + 8 * (lane / 16);
}

FRAGMENT_FN int ldmatrix_pair_chunk(int lane)
{
    return lane / 8 % 2;
}

/* ---- Shared memory --------------------------------------------------------------------------- */

enum { LINE_BYTES = 128, CHUNK_BYTES = 16, LINE_ELEMENTS = 64 /* of 16 bits */, CHUNK_ELEMENTS = 8 };

/* Byte offset of a 16-byte chunk of a row in an array of rows of 128 bytes. Eight rows that read the same chunk find it
 * in eight different groups of banks. It is also what TMA and wgmma call the 128-byte swizzle. */
FRAGMENT_FN uint32_t swizzle_128(uint32_t row, uint32_t chunk)
{
    return row * LINE_BYTES + ((chunk ^ (row & 7u)) * CHUNK_BYTES);
}

#endif
