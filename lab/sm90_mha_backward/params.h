/* SPDX-License-Identifier: MIT
 *
 * What the kernels of dense MHA backward are given; to stand in src/cuda/params.h.
 */
#ifndef FMLA_MHA_BACKWARD_PARAMS_H
#define FMLA_MHA_BACKWARD_PARAMS_H

#include "../../src/cuda/params.h"

/* Dense MHA backward. The tokens of ragged requests lie one after the other, as if they were one request's. */
struct lab_backward_params {
    int32_t b, h_q, h_kv, group; /* group: h_q / h_kv */
    int32_t s_q, s_k;            /* of each request, where they are apart */
    const int32_t *starts_q, *starts_k; /* [b + 1]: where ragged requests begin; NULL: they are apart */
    int32_t tokens_q, tokens_k;         /* of all ragged requests */
    int32_t causal, deterministic;
    float scale, scale_log2; /* softmax_scale, and times log2(e) */
    float lse_log2;          /* makes lse one of base 2: log2(e) where it is natural, else 1 */
    const uint16_t *out, *dout;
    const float *lse; /* of a row that sees no key: inf or -inf */
    uint16_t *dq, *dk, *dv;
    int64_t out_stride[3], dout_stride[3], dq_stride[3], dk_stride[3], dv_stride[3]; /* request, token, head */
    int64_t lse_stride[2];                                                           /* request, head */
};

/* Hopper's: tiles of rows and blocks of keys, numbered so that each request has room for its own (requests.cuh). */
struct lab_backward_sm90_params {
    struct lab_backward_params call;
    struct tensor_map q, k, v, dout;
    int32_t row_tiles, key_blocks;  /* of all requests, of one head */
    int32_t items;                  /* key_blocks · h_kv */
    struct divisor key_heads_divisor; /* h_kv */
    int32_t rotates;                /* blocks of keys begin with different tiles: neither causal nor deterministic */
    int32_t heads_of_set;           /* key heads whose items are taken together */
    float *rows;     /* [h_q][row_tiles][2][rows of a tile]: lse of base 2, inf where there is no key; delta */
    float *dq_sums;  /* [h_q][row_tiles][a tile]: results.cuh says in what order */
    uint32_t *taken; /* items, beside the first one of each block of threads */
    uint32_t *turns; /* deterministic: [h_q][row_tiles][2 consumers]: blocks of keys that have added to a tile's dQ */
};


#endif
