/* SPDX-License-Identifier: MIT
 *
 * The request of a row or a key of dense MHA, one by one from the first: for kernels that need it once a row.
 */
#pragma once

#include "../device/kernel.cuh"

#include <stdint.h>

/* Where a row's or a key's request begins, and how long it is. */
struct RowRequest {
    int number, token, tokens, key, keys;
};

/* The request that token `at` of ragged ones is of, or key `at`; false: of none. A start is no smaller than those in front of it, and
 * not beyond the last token. */
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
