/* SPDX-License-Identifier: MIT
 *
 * The way through the tiles, of either kernel of Hopper's sparse prefill.
 */
#pragma once

#include "../../device/divide.cuh"
#include "../../device/gather.cuh"

/* A tile of heads of a token. A block of threads takes every gridDim.x-th; every role goes through them by itself. */
struct Item {
    int token, tile, length, blocks;

    Item() = default;

    __device__ __forceinline__ Item(int token, int tile, int length, int blocks)
        : token(token), tile(tile), length(length), blocks(blocks)
    {
    }

    __device__ __forceinline__ Item(const struct sparse_prefill_sm90_params &p, int item)
    {
        token = fast_divide(item, p.call.tiles_divisor), tile = item - token * p.call.tiles;
        length = topk_count(p.call.topk, p.call.topk_length, token);
        blocks = (int)((unsigned)(length + PLAN_BLOCK - 1) / PLAN_BLOCK);
    }
};
