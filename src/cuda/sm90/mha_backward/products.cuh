/* SPDX-License-Identifier: MIT
 *
 * The wgmma products of MHA backward, named by the layout of their operands: those of device/wgmma.cuh, and
 * some that only the backward needs.
 */
#pragma once

#include "../../device/wgmma.cuh"

/* clang-format off */
#define WGMMA_NAMES_48 WGMMA_NAMES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_96 WGMMA_NAMES_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_D_48(d) WGMMA_D_32(d), WGMMA_SUMS_8(d, 32), WGMMA_SUMS_8(d, 40)
#define WGMMA_D_96(d) WGMMA_D_64(d), WGMMA_SUMS_32(d, 64)
/* clang-format on */

enum Swizzle { SWIZZLE_128 = 1, SWIZZLE_64 = 2 };

/* Returns the descriptor of a tile with lines of 128 or 64 bytes; groups of eight lines are contiguous.
 * `leading`: distance between tiles of 64 (32) columns. */
template <Swizzle SWIZZLE> DEVICE uint64_t descriptor_of(uint32_t tile, uint32_t leading, uint32_t offset)
{
    constexpr uint32_t EIGHT_LINES = SWIZZLE == SWIZZLE_128 ? 1024 : 512;
    const uint32_t low = (tile >> 4) + (offset >> 4 | leading >> 4 << 16);
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};"
        : "=l"(descriptor)
        : "r"(low), "r"(EIGHT_LINES >> 4 | (uint32_t)SWIZZLE << 30));
    return descriptor;
}

/* D (+)= A·B; A and B row by row in lines; 64 or 128 columns. */
template <typename Element> DEVICE void product_of_lines(float (&d)[32], uint64_t a, uint64_t b, int add)
{
    wgmma_64<Element>(d, a, b, add);
}
template <typename Element> DEVICE void product_of_lines(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    wgmma_lines_of<Element>(d, a, b, add);
}

/* D += A·B; A in registers, B transposed; 64, 128 or 192 columns. */
template <typename Element> DEVICE void add_product(float (&d)[32], const uint32_t (&a)[4], uint64_t b)
{
    wgmma_64_columns<Element>(d, a, b, 1);
}
template <typename Element> DEVICE void add_product(float (&d)[64], const uint32_t (&a)[4], uint64_t b)
{
    wgmma_128_columns<Element>(d, a, b, 1);
}
template <typename Element> DEVICE void add_product(float (&d)[96], const uint32_t (&a)[4], uint64_t b)
{
    WGMMA_OF("m64n192k16", WGMMA_NAMES_96, "%101", "{%96, %97, %98, %99}", "%100", "1", WGMMA_D_96, "r"(a[0]),
             "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

/* The same with A row by row in lines. */
template <typename Element> DEVICE void add_product(float (&d)[32], uint64_t a, uint64_t b)
{
    WGMMA_OF("m64n64k16", WGMMA_NAMES_32, "%34", "%32", "%33", "0, 1", WGMMA_D_32, "l"(a), "l"(b), "r"(1));
}
template <typename Element> DEVICE void add_product(float (&d)[64], uint64_t a, uint64_t b)
{
    wgmma_128_columns<Element>(d, a, b, 1);
}
template <typename Element> DEVICE void add_product(float (&d)[96], uint64_t a, uint64_t b)
{
    WGMMA_OF("m64n192k16", WGMMA_NAMES_96, "%98", "%96", "%97", "0, 1", WGMMA_D_96, "l"(a), "l"(b), "r"(1));
}

/* D (+)= A·B, both transposed: a line of A holds a column of it; 64, 96 or 128 columns of B. */
template <typename Element> DEVICE void product_of_columns(float (&d)[32], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n64k16", WGMMA_NAMES_32, "%34", "%32", "%33", "1, 1", WGMMA_D_32, "l"(a), "l"(b), "r"(add));
}
template <typename Element> DEVICE void product_of_columns(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n128k16", WGMMA_NAMES_64, "%66", "%64", "%65", "1, 1", WGMMA_D_64, "l"(a), "l"(b), "r"(add));
}
template <typename Element> DEVICE void product_of_columns(float (&d)[48], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n96k16", WGMMA_NAMES_48, "%50", "%48", "%49", "1, 1", WGMMA_D_48, "l"(a), "l"(b), "r"(add));
}
