/* SPDX-License-Identifier: MIT
 *
 * Finds the request of a row or a key of dense MHA by a linear search from the first request, for kernels
 * that need it once per row.
 */
#pragma once

#include "../device/kernel.cuh"

#include <stdint.h>

/* The request of a row or a key: its first token and key, and its lengths. */
struct RowRequest {
    int number, token, tokens, key, keys;
};

/* Finds the ragged request of token `at` or, BY_KEY, of key `at`; returns false if it belongs to none. A
 * start counts as no smaller than those before it, and not beyond the last token. */
template <bool BY_KEY, typename Params> DEVICE bool find_request(const Params &p, int at, RowRequest &r)
{
    int end = min(max(p.starts_q[0], 0), p.tokens_q), end_k = min(max(p.starts_k[0], 0), p.tokens_k);
    if (at < (BY_KEY ? end_k : end)) return false;
    for (int request = 0; request < p.b; request++) {
        const int from = end, from_k = end_k;
        end = min(max(p.starts_q[request + 1], end), p.tokens_q);
        end_k = min(max(p.starts_k[request + 1], end_k), p.tokens_k);
        if (at >= (BY_KEY ? end_k : end)) continue;
        r = {0, from, end - from, from_k, end_k - from_k};
        return true;
    }
    return false;
}
