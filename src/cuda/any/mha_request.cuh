/* SPDX-License-Identifier: MIT
 *
 * Finds the request of a row or a key of dense MHA by a linear search from the first request, for kernels
 * that need it once per row.
 */
#pragma once

#include "../device/kernel.cuh"
#include "../device/used.cuh"

#include <stdint.h>

/* The request of a row or a key: its first token and key, and its lengths in use. `number` is 0 where requests are
 * ragged. */
struct RowRequest {
    int number, token, tokens, key, keys;
};

/* Finds the ragged request of token `at` or, BY_KEY, of key `at`, and returns its index; -1: it belongs to none. A
 * start counts as no smaller than those before it, and not beyond the last token. */
template <bool BY_KEY, typename Params> DEVICE int find_ragged(const Params &p, int at, RowRequest &r)
{
    int end = min(max(p.starts_q[0], 0), p.tokens_q), end_k = min(max(p.starts_k[0], 0), p.tokens_k);
    if (at < (BY_KEY ? end_k : end)) return -1;
    for (int request = 0; request < p.b; request++) {
        const int from = end, from_k = end_k;
        end = min(max(p.starts_q[request + 1], end), p.tokens_q);
        end_k = min(max(p.starts_k[request + 1], end_k), p.tokens_k);
        if (at >= (BY_KEY ? end_k : end)) continue;
        r = {0, from, end - from, from_k, end_k - from_k};
        return request;
    }
    return -1;
}

/* Finds the request of token, or key, `at` of all requests, and its position in the tensors, `token`. Returns false if
 * it belongs to no request or is padding. */
template <bool BY_KEY, typename Params>
DEVICE bool find_request(const Params &p, int64_t at, RowRequest &r, int &token)
{
    int request;
    if (p.starts_q) {
        r.number = 0, token = (int)at;
        request = find_ragged<BY_KEY>(p, token, r);
        if (request < 0) return false;
    } else {
        request = (int)(at / (BY_KEY ? p.s_k : p.s_q));
        token = (int)(at - (int64_t)request * (BY_KEY ? p.s_k : p.s_q));
        r = {request, 0, p.s_q, 0, p.s_k};
    }
    r.tokens = length_in_use(p.used_q, request, r.tokens), r.keys = length_in_use(p.used_k, request, r.keys);
    return BY_KEY ? token < r.key + r.keys : token < r.token + r.tokens;
}
