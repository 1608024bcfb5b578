/* SPDX-License-Identifier: MIT
 *
 * Macros that declare device functions and kernels.
 */
#pragma once

/* Inlines the function into its callers, so that it shares their registers and addresses. */
#define DEVICE __device__ __forceinline__

/* Marks a condition as unlikely, so that the code of its branch is placed after the other: code behind the
 * first 64 KB of a kernel is fetched late (docs/architecture.md, "Decisions worth knowing"). */
#define SELDOM(CONDITION) __builtin_expect(!!(CONDITION), 0)

/* Defines a function that is one instruction, without operands or with the constant N. */
#define INSTRUCTION(NAME, TEXT)                                                                              \
    DEVICE void NAME()                                                                                       \
    {                                                                                                        \
        asm volatile(TEXT ";" ::: "memory");                                                                 \
    }
#define INSTRUCTION_OF(NAME, TEXT)                                                                           \
    template <int N> DEVICE void NAME()                                                                      \
    {                                                                                                        \
        asm volatile(TEXT " %0;" ::"n"(N) : "memory");                                                       \
    }

/* Defines a kernel with parameters p, a struct PARAMS, and the given body. BOUNDS: threads of a CTA and, to
 * limit registers, CTAs per SM. */
#define DEFINE_KERNEL(NAME, PARAMS, BOUNDS, ...)                                                             \
    extern "C" __global__ void __launch_bounds__ BOUNDS NAME(const __grid_constant__ struct PARAMS p)        \
    {                                                                                                        \
        __VA_ARGS__;                                                                                         \
    }
