/* SPDX-License-Identifier: MIT
 *
 * wgmma, Hopper's asynchronous matrix instructions (sm_90a): a warpgroup of 128 threads multiplies A (64 ×
 * 16, in shared memory or in registers) by B (16 × N, in shared memory) and adds to D (64 × N, fp32, in
 * registers). fragment.h has the fragments (wgmma_a_*, wgmma_d_*). Tiles in shared memory have lines of 128
 * bytes, are swizzled (swizzle_128), and begin at multiples of 1024 bytes.
 *
 * A batch of products is: wgmma_fence, the products, wgmma_commit; then wgmma_wait, and hold for every
 * accumulator that is read. All warps of the warpgroup must call together.
 */
#pragma once

#include "fragment.h"
#include "kernel.cuh"

/* Orders earlier accesses to accumulators and fragments in registers before the products that follow. */
INSTRUCTION(wgmma_fence, "wgmma.fence.sync.aligned")

INSTRUCTION(wgmma_commit, "wgmma.commit_group.sync.aligned")

/* Waits until at most N of the newest batches are in flight. */
INSTRUCTION_OF(wgmma_wait, "wgmma.wait_group.sync.aligned")

/* Keeps the compiler from reading an accumulator before the wait, or writing it after the fence; without it
 * ptxas serialises the products (its warning C7514). */
template <int N> DEVICE void hold(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* ---- Descriptors of tiles in shared memory ---------------------------------------------------- */

enum { TILE_LINES = 64, TILE_BYTES = TILE_LINES * LINE_BYTES /* 64 lines of 64 columns */ };

/* `offset` is added to the low word alone: 32-bit arithmetic, which ptxas can keep in uniform registers. It
 * must stay there, or every product first waits for its two descriptors. */
DEVICE uint64_t wgmma_descriptor(uint32_t tile, uint32_t leading, uint32_t offset)
{
    constexpr uint32_t EIGHT_LINES = 8 * LINE_BYTES, SWIZZLE_128 = 1u << 30;
    const uint32_t low = (tile >> 4) + (offset >> 4 | leading >> 4 << 16);
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(EIGHT_LINES >> 4 | SWIZZLE_128));
    return descriptor;
}

/* A line is a row of A or a column of B: step k takes columns 16 k … 16 k + 15 of the line. */
DEVICE uint64_t wgmma_lines(uint32_t tile, int step)
{
    return wgmma_descriptor(tile, 0, (uint32_t)step * 32);
}

/* The same for lines of 64 bytes (swizzle_64). */
DEVICE uint64_t wgmma_short_lines(uint32_t tile, int step)
{
    constexpr uint32_t EIGHT_LINES = 8 * LINE_BYTES / 2, SWIZZLE_64 = 2u << 30;
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};"
        : "=l"(descriptor)
        : "r"((tile >> 4) + (uint32_t)step * 2), "r"(EIGHT_LINES >> 4 | SWIZZLE_64));
    return descriptor;
}

/* Returns the descriptor of a tile `bytes` later, in shared memory that begins at 0. It is one addition;
 * otherwise ptxas computes the address first and rebuilds every descriptor among the products. */
DEVICE uint64_t wgmma_behind(uint64_t descriptor, uint32_t bytes)
{
    return descriptor + bytes / 16;
}

/* A line is a row of B (V as stored in the cache): step k takes lines 16 k … 16 k + 15. Every 64 columns of N
 * are the next tile. */
DEVICE uint64_t wgmma_columns(uint32_t tile, int step)
{
    return wgmma_descriptor(tile, TILE_BYTES, (uint32_t)step * 16 * LINE_BYTES);
}

/* ---- The products ----------------------------------------------------------------------------- */

/* clang-format off */
#define WGMMA_SUMS_8(d, i) \
    "+f"((d)[i]), "+f"((d)[i + 1]), "+f"((d)[i + 2]), "+f"((d)[i + 3]), "+f"((d)[i + 4]), "+f"((d)[i + 5]), "+f"((d)[i + 6]), "+f"((d)[i + 7])
#define WGMMA_SUMS_32(d, i) WGMMA_SUMS_8(d, i), WGMMA_SUMS_8(d, i + 8), WGMMA_SUMS_8(d, i + 16), WGMMA_SUMS_8(d, i + 24)
#define WGMMA_NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
    "%30, %31"
#define WGMMA_NAMES_64 WGMMA_NAMES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
    "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, " \
    "%58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_56 WGMMA_NAMES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D_8(d) WGMMA_SUMS_8(d, 0)
#define WGMMA_D_16(d) WGMMA_SUMS_8(d, 0), WGMMA_SUMS_8(d, 8)
#define WGMMA_D_32(d) WGMMA_SUMS_32(d, 0)
#define WGMMA_D_40(d) WGMMA_D_32(d), WGMMA_SUMS_8(d, 32)
#define WGMMA_D_56(d) WGMMA_D_32(d), WGMMA_SUMS_8(d, 32), WGMMA_SUMS_8(d, 40), WGMMA_SUMS_8(d, 48)
#define WGMMA_D_64(d) WGMMA_D_32(d), WGMMA_SUMS_32(d, 32)
#define WGMMA_D_128(d) WGMMA_D_64(d), WGMMA_SUMS_32(d, 64), WGMMA_SUMS_32(d, 96)
#define WGMMA_NAMES_128 WGMMA_NAMES_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
/* clang-format on */

/* SHAPE and NAMES belong to D. ADD: whether to add to D. FLAGS: whether A and B are in columns; for A in
 * registers, whether B is. */
#define WGMMA(SHAPE, TYPE, NAMES, ADD, A, B, FLAGS)                                                          \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE         \
    "." TYPE " {" NAMES "}, " A ", " B ", p, 1, 1, " FLAGS ";\n}"

/* Serves both Elements. SUMS names the operands of D, which come before the others. */
#define WGMMA_OF(SHAPE, NAMES, ADD, A, B, FLAGS, SUMS, ...)                                                  \
    if constexpr (Element::IS_BF16)                                                                          \
        asm volatile(WGMMA(SHAPE, "bf16", NAMES, ADD, A, B, FLAGS) : SUMS(d) : __VA_ARGS__);                 \
    else                                                                                                     \
        asm volatile(WGMMA(SHAPE, "f16", NAMES, ADD, A, B, FLAGS) : SUMS(d) : __VA_ARGS__)

/* D (+)= A·B: 64 columns, A and B in lines. */
template <typename Element> DEVICE void wgmma_64(float (&d)[32], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n64k16", WGMMA_NAMES_32, "%34", "%32", "%33", "0, 0", WGMMA_D_32, "l"(a), "l"(b), "r"(add));
}

/* The same with A in registers. */
template <typename Element> DEVICE void wgmma_64(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add)
{
    WGMMA_OF("m64n64k16", WGMMA_NAMES_32, "%37", "{%32, %33, %34, %35}", "%36", "0", WGMMA_D_32, "r"(a[0]),
             "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* 16 or 32 columns, A in registers; the overload for 64 has the same name. */
template <typename Element>
DEVICE void wgmma_lines_of(float (&d)[8], const uint32_t (&a)[4], uint64_t b, int add)
{
    WGMMA_OF("m64n16k16", WGMMA_NAMES_8, "%13", "{%8, %9, %10, %11}", "%12", "0", WGMMA_D_8, "r"(a[0]),
             "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

template <typename Element>
DEVICE void wgmma_lines_of(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int add)
{
    WGMMA_OF("m64n32k16", WGMMA_NAMES_16, "%21", "{%16, %17, %18, %19}", "%20", "0", WGMMA_D_16, "r"(a[0]),
             "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

template <typename Element>
DEVICE void wgmma_lines_of(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add)
{
    wgmma_64<Element>(d, a, b, add);
}

/* The same with A in lines. */
template <typename Element> DEVICE void wgmma_lines_of(float (&d)[8], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n16k16", WGMMA_NAMES_8, "%10", "%8", "%9", "0, 0", WGMMA_D_8, "l"(a), "l"(b), "r"(add));
}

template <typename Element> DEVICE void wgmma_lines_of(float (&d)[16], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n32k16", WGMMA_NAMES_16, "%18", "%16", "%17", "0, 0", WGMMA_D_16, "l"(a), "l"(b), "r"(add));
}

template <typename Element> DEVICE void wgmma_lines_of(float (&d)[32], uint64_t a, uint64_t b, int add)
{
    wgmma_64<Element>(d, a, b, add);
}

/* The same for 80, 112 or 128 columns. */
template <typename Element> DEVICE void wgmma_lines_of(float (&d)[40], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n80k16", WGMMA_NAMES_40, "%42", "%40", "%41", "0, 0", WGMMA_D_40, "l"(a), "l"(b), "r"(add));
}

template <typename Element> DEVICE void wgmma_lines_of(float (&d)[56], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n112k16", WGMMA_NAMES_56, "%58", "%56", "%57", "0, 0", WGMMA_D_56, "l"(a), "l"(b), "r"(add));
}

template <typename Element> DEVICE void wgmma_lines_of(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n128k16", WGMMA_NAMES_64, "%66", "%64", "%65", "0, 0", WGMMA_D_64, "l"(a), "l"(b), "r"(add));
}

/* 64 columns, A in registers, B as columns. */
template <typename Element>
DEVICE void wgmma_64_columns(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add)
{
    WGMMA_OF("m64n64k16", WGMMA_NAMES_32, "%37", "{%32, %33, %34, %35}", "%36", "1", WGMMA_D_32, "r"(a[0]),
             "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* 128 columns, A in lines, B as columns. */
template <typename Element> DEVICE void wgmma_128_columns(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n128k16", WGMMA_NAMES_64, "%66", "%64", "%65", "0, 1", WGMMA_D_64, "l"(a), "l"(b), "r"(add));
}

/* The same with A in registers. */
template <typename Element>
DEVICE void wgmma_128_columns(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add)
{
    WGMMA_OF("m64n128k16", WGMMA_NAMES_64, "%69", "{%64, %65, %66, %67}", "%68", "1", WGMMA_D_64, "r"(a[0]),
             "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* 256 columns, A in lines, B as columns. */
template <typename Element> DEVICE void wgmma_256_columns(float (&d)[128], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n256k16", WGMMA_NAMES_128, "%130", "%128", "%129", "0, 1", WGMMA_D_128, "l"(a), "l"(b),
             "r"(add));
}

/* The same with A in registers. */
template <typename Element>
DEVICE void wgmma_256_columns(float (&d)[128], const uint32_t (&a)[4], uint64_t b, int add)
{
    WGMMA_OF("m64n256k16", WGMMA_NAMES_128, "%133", "{%128, %129, %130, %131}", "%132", "1", WGMMA_D_128,
             "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* ---- Products of e4m3 -------------------------------------------------------------------------- */

/* These have no flags: A and B are in lines, and a step takes 32 columns. Sums do not have fp32 precision:
 * each of the 32 terms, and the sum so far, is truncated at 2^-13 of the largest of them
 * (docs/fp8-accuracy.md). */
#define WGMMA_E4M3(SHAPE, NAMES, ADD, A, B)                                                                  \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned." SHAPE                      \
    ".f32.e4m3.e4m3 {" NAMES "}, " A ", " B ", p, 1, 1;\n}"

/* D (+)= A·B: 64 columns. */
DEVICE void wgmma_64_e4m3(float (&d)[32], uint64_t a, uint64_t b, int add)
{
    asm volatile(WGMMA_E4M3("m64n64k32", WGMMA_NAMES_32, "%34", "%32", "%33")
                 : WGMMA_D_32(d)
                 : "l"(a), "l"(b), "r"(add));
}

/* The same with A in registers. */
DEVICE void wgmma_64_e4m3(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile(WGMMA_E4M3("m64n64k32", WGMMA_NAMES_32, "%37", "{%32, %33, %34, %35}", "%36")
                 : WGMMA_D_32(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* 16 or 32 columns, A in lines; the overload for 64 has the same name. */
DEVICE void wgmma_lines_of_e4m3(float (&d)[8], uint64_t a, uint64_t b, int add)
{
    asm volatile(WGMMA_E4M3("m64n16k32", WGMMA_NAMES_8, "%10", "%8", "%9")
                 : WGMMA_D_8(d)
                 : "l"(a), "l"(b), "r"(add));
}

DEVICE void wgmma_lines_of_e4m3(float (&d)[16], uint64_t a, uint64_t b, int add)
{
    asm volatile(WGMMA_E4M3("m64n32k32", WGMMA_NAMES_16, "%18", "%16", "%17")
                 : WGMMA_D_16(d)
                 : "l"(a), "l"(b), "r"(add));
}

DEVICE void wgmma_lines_of_e4m3(float (&d)[32], uint64_t a, uint64_t b, int add)
{
    wgmma_64_e4m3(d, a, b, add);
}
