/* SPDX-License-Identifier: MIT
 *
 * mma.sync m16n8k16 and ldmatrix (sm_80 and later). fragment.h defines the fragments.
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

DEVICE void ldmatrix_x4(uint32_t to[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

DEVICE void ldmatrix_x4_trans(uint32_t to[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

#define MMA_16816(TYPE)                                                                                      \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "   \
        "{%8, %9}, {%0, %1, %2, %3};"                                                                        \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                             \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

/* sum += A B, with B's fragments of k 0-7 and of k 8-15 passed separately. */
template <typename Element> DEVICE void mma_16816(float sum[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    if (Element::IS_BF16)
        MMA_16816("bf16");
    else
        MMA_16816("f16");
}
