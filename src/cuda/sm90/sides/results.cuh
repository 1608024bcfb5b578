/* SPDX-License-Identifier: MIT
 *
 * Finished rows to `out`, as one side has them. After a kernel's layout.cuh.
 */
#pragma once

#include "../../device/shared.cuh"

/* A row's elements of 16 columns, of which e is the first, multiplied. */
template <int COUNT>
__device__ __forceinline__ float4 scaled_values(const float (&o)[COUNT], int e, float factor)
{
    return make_float4(o[e] * factor, o[e + 1] * factor, o[e + 4] * factor, o[e + 5] * factor);
}

/* What becomes of an element of O on its way to `out`: it is multiplied by its row's factor. */
struct Scaled {
    const float (&factor)[2]; /* of the thread's two rows */

    /* Of row i of the thread's two what it holds of 16 columns (slot_position): from element e on, in the group of 64 columns
     * that begins at element FIRST, and at `column` of the side's. */
    template <int FIRST, int COUNT>
    __device__ __forceinline__ float4 values(const float (&o)[COUNT], int e, int i, int) const
    {
        return scaled_values(o, e, factor[i]);
    }
};

/* nvcc makes four stores of a plain one where it stands in a branch of its own. */
__device__ __forceinline__ void store_global_16(void *to, uint4 words, bool stores)
{
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
        "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"((int)stores)
        : "memory");
}

/* 64 columns of the warp's 16 rows to 16 lines of shared memory. */
template <typename Element, int FIRST, int COUNT, typename Finish>
__device__ __forceinline__ void stage_group(const float (&o)[COUNT], const Finish &finish, int column,
                                            uint32_t lines, uint32_t lane)
{
    const uint32_t line = lines + ldmatrix_tile_row((int)lane) * LINE_BYTES;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 four = finish.template values<FIRST>(o, FIRST + 8 * k + 2 * i, i, column);
            words[i] = Element::pack(four.x, four.y), words[i + 2] = Element::pack(four.z, four.w);
        }
        store_matrices(line + (((2 * (uint32_t)k + lane / 16) ^ (lane % 8)) * CHUNK_BYTES), words);
    }
}

/* 64 columns of the warp's 16 rows to `out`: through the warp's lines of P in shared memory, which nobody reads between two
 * pieces, so that eight lanes write 128 bytes of a row. `offset` and `stores`: of rows lane / 8 + 4 i. */
template <typename Element, int FIRST, typename Finish>
__device__ __forceinline__ void store_group(uint16_t *to, const int64_t (&offset)[4], const bool (&stores)[4],
                                            const float (&o)[64], const Finish &finish, int column,
                                            uint32_t lines)
{
    const uint32_t lane = fresh_thread() % 32;
    stage_group<Element, FIRST>(o, finish, column, lines, lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 chunk = load_shared_16(lines + swizzle_128(lane / 8 + 4 * (uint32_t)i, lane % 8));
        store_global_16(to + offset[i] + 8 * (lane % 8), chunk, stores[i]);
    }
    __syncwarp();
}
