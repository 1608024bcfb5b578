/* SPDX-License-Identifier: MIT
 *
 * Access to local memory by address, for data that must stay out of registers.
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

DEVICE void store_local_16(uint32_t to, float4 x)
{
    asm volatile("st.local.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

DEVICE float4 load_local_16(uint32_t from)
{
    float4 x;
    asm volatile("ld.local.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}
