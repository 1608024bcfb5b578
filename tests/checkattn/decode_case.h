/* SPDX-License-Identifier: MIT
 *
 * A case of dense decode: random tensors in guarded memory with everything unused poisoned, and parts of
 * it: requests and rows.
 */
#ifndef CHECKATTN_DECODE_CASE_H
#define CHECKATTN_DECODE_CASE_H

#include "sparse_pool.h"

/* The axes of the grid, and the meaning of values that are not numbers. */
#define DENSE_AXES(X)                                                                                        \
    X(A_B, "b: 0 1 2 6 64 128 1000")                                                                         \
    X(A_SQ, "s_q: 1 2 3 4 7 64")                                                                             \
    X(A_SK, "s_k: 0 1 20 63 64 65 140 4096 131072")                                                          \
    X(A_HQ, "h_q: 1 3 9 11 16 63 64 126 128")                                                                \
    X(A_HKV, "h_kv: 1 2 3 8")                                                                                \
    X(A_PAGE, "page_size: 1 2 16 61 64 128 256 0") /* 0: contiguous */                                       \
    X(A_CAUSAL, "causal: 0 1")                                                                               \
    X(A_DTYPE, "dtype: bf16 fp16")                                                                           \
    X(A_DQK, "d_qk: 576 512")                                                                                \
    X(A_CACHE, "cache: q fp8_656 fp8_584 fp8_576")         /* q: the type of q */                            \
    X(A_CODES, "codes: written scales extreme beyond nan") /* FP8 */                                         \
    X(A_PRODUCTS, "products: bf16 fp8 codes")              /* codes: fp8 with q as codes */                  \
    X(A_LENGTHS, "lengths: fixed varied beyond")                                                             \
    X(A_SINK, "sink: none finite infinite")                                                                  \
    X(A_EMPTY, "lse_empty: 0 1")                                                                             \
    X(A_BASE, "log_base: 0 2")                                                                               \
    X(A_INVARIANT, "batch_invariant: 0 1")                                                                   \
    X(A_PLAN, "plan: inside given stale")                                                                    \
    X(A_PARTITIONS, "num_partitions: 0 1 3 78")                                                              \
    X(A_LAYOUT, "layout: contiguous padded swapped odd (far)")                                               \
    X(A_INPUTS, "inputs: normal spiked steep nan_ends (infinite) (beyond)")                                  \
    X(A_LSE, "lse: 1 0")                                                                                     \
    X(A_THREADS, "threads: built_in one own")
enum { DENSE_AXES(AXIS_NAME) AXES };
enum { CACHE_OF_Q, CACHE_656, CACHE_584, CACHE_576, CACHE_KINDS };
enum { OF_BF16, OF_FP8, OF_CODES /* values of the axis of products */ };
enum { LENGTHS_FIXED, LENGTHS_VARIED, LENGTHS_BEYOND };
enum { D_V = 512 };

/* Its tensors. */
#define DENSE(member) TENSOR_dense_decode_##member

struct decode_case {
    struct test_case c;
    int64_t s_k;
    int64_t *length;         /* of each request, clamped */
    struct sparse_pool pool; /* the cache, without lists; requests of a contiguous cache may share memory */
    bool paged;
    float q_scale;
};

extern const struct maker decode_maker;

/* Returns the slot of a key. */
int64_t decode_slot(const struct decode_case *d, int64_t request, int64_t key);

#endif
