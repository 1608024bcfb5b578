/* SPDX-License-Identifier: MIT
 *
 * How functions of kernels, and kernels, are declared.
 */
#pragma once

/* Inlined into its callers, whose registers and addresses it then shares. */
#define DEVICE __device__ __forceinline__

/* The side of a branch that is taken where this is true lies behind the other one in the kernel's code: what is behind the first
 * 64 KB comes late (docs/architecture.md, "Decisions worth knowing"). */
#define SELDOM(CONDITION) __builtin_expect(!!(CONDITION), 0)

/* A function that is one instruction without operands, or with the constant N. */
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

/* A kernel that does the rest with its parameters p, a struct PARAMS. BOUNDS: threads of a block, and, where that is to limit
 * registers, blocks of an SM. */
#define DEFINE_KERNEL(NAME, PARAMS, BOUNDS, ...)                                                             \
    extern "C" __global__ void __launch_bounds__ BOUNDS NAME(const __grid_constant__ struct PARAMS p)        \
    {                                                                                                        \
        __VA_ARGS__;                                                                                         \
    }
