/* SPDX-License-Identifier: MIT
 *
 * Access to shared memory by 32-bit address, where swizzles and not types determine the content of an
 * address.
 */
#pragma once

#include "async_copy.cuh"

#include <stddef.h>

/* The address of a member of `Shared`, the struct of that name where the macro is used, which begins at
 * `base`. The offset is a constant of the struct, which an instruction adds by itself. */
#define SHARED_AT(base, ...) ((base) + (uint32_t)offsetof(Shared, __VA_ARGS__))

/* Stores four 8 × 8 matrices of 16 bits (sm_90). Each lane gives the address of a row of 16 bytes, in the
 * order of ldmatrix (fragment.h). */
DEVICE void store_matrices(uint32_t to, const uint32_t (&words)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

/* The same, with each matrix transposed. */
DEVICE void store_matrices_transposed(uint32_t to, const uint32_t (&words)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

DEVICE void store_shared_4(uint32_t to, uint32_t word)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

DEVICE void store_shared_8(uint32_t to, uint32_t first, uint32_t second)
{
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(first), "r"(second) : "memory");
}

DEVICE void store_shared_16(uint32_t to, const uint4 &words)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
}

DEVICE void store_zero_16(uint32_t to)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}

/* Adds 1 and returns the previous value. Acquire-release: the thread's earlier accesses are visible to
 * threads that see a greater number. */
DEVICE uint32_t count_shared(uint32_t at)
{
    uint32_t before;
    asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(at) : "memory");
    return before;
}

DEVICE uint32_t load_shared_4(uint32_t from)
{
    uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

DEVICE uint2 load_shared_8(uint32_t from)
{
    uint2 words;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(from) : "memory");
    return words;
}

DEVICE uint4 load_shared_16(uint32_t from)
{
    uint4 words;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(from)
                 : "memory");
    return words;
}
