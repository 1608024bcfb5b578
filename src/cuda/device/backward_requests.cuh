/* SPDX-License-Identifier: MIT
 *
 * Row tiles and key blocks are numbered over all requests, so that the request of a number is found without
 * prefix sums: the tiles of ragged request r begin at start / size + r. That leaves room for its last,
 * partial tile, and sometimes leaves a number unused. Tokens before the first request and after the last one
 * form two more requests, numbered first and last: their rows see no key and their keys are seen by no row,
 * so their gradients are 0. Where only the first tokens or keys of a request are in use, the others leave numbers
 * unused.
 *
 *   size 64    before: 0 tokens     request 1: 100   2: 20          3: 64           after: 6
 *   begins at  0 / 64 + 0 = 0       0 / 64 + 1 = 1   100 / 64 + 2   120 / 64 + 3    184 / 64 + 4 = 6
 *   numbers    (0: unused)          1 2              3              4 5             6
 */
#pragma once

#include "../params.h"

#include "divide.cuh"
#include "used.cuh"
#include "warp.cuh"

struct Request {
    int index;
    int token, tokens;   /* its first token (0 if not ragged); its number of tokens in use */
    int key, keys;       /* the same of keys */
    int row_tile;        /* number of its first row tile */
    int key_block, room; /* number of its first key block; how many numbers it has */
};

/* Reduces a request, number `number` of the call, to the lengths in use. */
DEVICE void use_lengths(const mha_backward_params &call, int number, Request &r)
{
    r.tokens = length_in_use(call.used_q, number, r.tokens);
    r.keys = length_in_use(call.used_k, number, r.keys);
}

/* Returns the request of row tile (BY_ROWS) or key block `at`. All lanes of a warp must call. */
template <bool BY_ROWS, int ROWS, int KEYS>
DEVICE Request find_request(const mha_backward_params &call, int at)
{
    Request r;
    if (!call.starts_q) {
        const int tiles = (call.s_q + ROWS - 1) / ROWS, blocks = (call.s_k + KEYS - 1) / KEYS;
        const int index = at / max(BY_ROWS ? tiles : blocks, 1);
        r = {index, 0, call.s_q, 0, call.s_k, index * tiles, index * blocks, blocks};
        use_lengths(call, index, r);
        return r;
    }
    const int lane = (int)threadIdx.x % 32;
    int last_q = 0, last_k = 0;
    for (int first = 0;; first += 32) { /* a start counts as no smaller than those before it */
        const int request = first + lane, next = min(request, call.b);
        int end_q = min(max(warp_inclusive_max(call.starts_q[next]), last_q), call.tokens_q);
        int end_k = min(max(warp_inclusive_max(call.starts_k[next]), last_k), call.tokens_k);
        if (request > call.b) end_q = call.tokens_q, end_k = call.tokens_k;
        int q = __shfl_up_sync(~0u, end_q, 1), k = __shfl_up_sync(~0u, end_k, 1);
        if (lane == 0) q = last_q, k = last_k;
        const int row_tile = q / ROWS + request, key_block = k / KEYS + request;
        const int in_front =
            __popc(__ballot_sync(~0u, request <= call.b + 1 && (BY_ROWS ? row_tile : key_block) <= at));
        if (in_front) {
            const int from = in_front - 1;
            r.index = first + from;
            r.token = __shfl_sync(~0u, q, from), r.tokens = __shfl_sync(~0u, end_q, from) - r.token;
            r.key = __shfl_sync(~0u, k, from), r.keys = __shfl_sync(~0u, end_k, from) - r.key;
            r.row_tile = __shfl_sync(~0u, row_tile, from), r.key_block = __shfl_sync(~0u, key_block, from);
            r.room = (r.key + r.keys) / KEYS + 1 - r.key / KEYS;
        }
        if (in_front < 32 || first + 32 > call.b + 1) {
            const bool real = r.index > 0 && r.index <= call.b;
            if (!real && BY_ROWS) r.keys = 0;
            if (!real && !BY_ROWS) r.tokens = 0;
            if (real) use_lengths(call, r.index - 1, r);
            return r;
        }
        last_q = __shfl_sync(~0u, end_q, 31), last_k = __shfl_sync(~0u, end_k, 31);
    }
}

/* Returns the first row of a request that sees a key; all behind it do. */
DEVICE int first_seeing_row(const mha_backward_params &call, const Request &r)
{
    return !r.keys ? r.tokens : call.causal ? max(r.tokens - r.keys, 0) : 0;
}
