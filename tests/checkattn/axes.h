/* SPDX-License-Identifier: MIT
 *
 * The axes of cases of dense MHA, merge, cache append, cache gather and cache convert, and the meaning of
 * values that are not numbers.
 */
#ifndef CHECKATTN_AXES_H
#define CHECKATTN_AXES_H

#include "case.h"

/* Both directions have the same axes, except for the last value of requests, one axis, and the last one. */
#define MHA_AXES(X)          MHA_AXES_WITH(X, "", "lse: 1 0") X(H_SPLITS, "splits: chosen batch none two seven most")
#define MHA_BACKWARD_AXES(X) MHA_AXES_WITH(X, " within", "deterministic: 0 1") X(H_DLSE, "dlse: 0 1")
#define MHA_AXES_WITH(X, more_requests, own)                                                                 \
    X(H_B, "b: 0 1 2 7")                                                                                     \
    X(H_SHAPE, "shape: no_token one long odd square even wide tall (largest) (rows) (few) (no_key) (deep) "  \
               "(groups)")                                                                                   \
    X(H_REQUESTS, "requests: apart ragged varied hostile (cut)" more_requests)                               \
    X(H_HEADS, "heads: 5_5 16_1 32_4 128_128 (2_1)")                                                         \
    X(H_SIZES, "sizes: 192_128 128_128 64_64 (64_128) 256_256 96_64")                                        \
    X(H_CAUSAL, "causal: 0 1")                                                                               \
    X(H_DTYPE, "dtype: bf16 fp16")                                                                           \
    X(H_EMPTY, "lse_empty: 0 1")                                                                             \
    X(H_BASE, "log_base: 0 2")                                                                               \
    X(H_LAYOUT, "layout: contiguous padded swapped odd (far)")                                               \
    X(H_INPUTS, "inputs: normal spiked steep nan_ends")                                                      \
    X(H_LSE, own)                                                                                            \
    X(H_SINK, "sink: none finite infinite high")                                                             \
    X(H_USED, "used: all q k both") /* which have lengths in use, and so padding */                          \
    X(H_THREADS, "threads: built_in one own")
enum { MHA_AXES(AXIS_NAME) H_AXES };

#define MERGE_AXES(X)                                                                                        \
    X(M_N, "n: 0 1 2 3 17 64")                                                                               \
    X(M_B, "b: 0 1 3")                                                                                       \
    X(M_SQ, "s_q: 1 2 5")                                                                                    \
    X(M_HQ, "h_q: 1 5 16 128")                                                                               \
    X(M_DV, "d_v: 1 64 127 512 513")                                                                         \
    X(M_PARTS, "parts: bf16 fp16 fp32")                                                                      \
    X(M_OUT, "out: bf16 fp16 fp32")                                                                          \
    X(M_EMPTY, "lse_empty: 0 1")                                                                             \
    X(M_BASE, "log_base: 0 2")                                                                               \
    X(M_SINK, "sink: 0 1")                                                                                   \
    X(M_EMPTIES, "empty parts: none some all nan")                                                           \
    X(M_LAST, "last apart: 0 1") /* one part more, at a pointer of its own */                                \
    X(M_PART, "part: 0 1 2")     /* that the out is of: all, the first, the last */                          \
    X(M_LAYOUT, "layout: contiguous padded swapped odd")                                                     \
    X(M_THREADS, "threads: built_in (one) own")
enum { MERGE_AXES(AXIS_NAME) M_AXES };
enum { EMPTIES_NONE, EMPTIES_SOME, EMPTIES_ALL, EMPTIES_NAN /* in some rows one part has an lse of NaN */ };

#define FORMATS_OF_AXIS                                                                                      \
    "(none) bf16 fp16 fp8_656 fp8_584 fp8_576 fp8_528 fp8_528_split fp4_288 fp4_288_split fp8_528_f32"
#define CACHE_AXES(X)                                                                                        \
    X(C_FORMAT, "format: " FORMATS_OF_AXIS)                                                                  \
    X(C_ELEMENT, "vectors: bf16 fp16 fp32")                                                                  \
    X(C_TOKENS, "tokens: 0 1 128 4097")                                                                      \
    X(C_PAGE_SIZE, "page_size: 1 2 61 64 256")                                                               \
    X(C_CACHE, "cache: dense padded odd spread (far)")                                                       \
    X(C_VECTORS, "layout: contiguous padded (swapped) odd")                                                  \
    X(C_ROPE, "rope apart: 0 1")                                                                             \
    X(C_D_QK, "d_qk: 512 576 1 40 130 1040") /* of bf16 and fp16 */                                          \
    X(C_VALUES, "values: normal hostile all")                                                                \
    X(C_SCALE, "scale: 0 1 2 3 4") /* of FP8_576 */                                                          \
    X(C_SLOTS, "slots: distinct skipped twice")                                                              \
    X(C_NORM, "norm: none with_eps without_eps (edge)")                                                      \
    X(C_TURN, "turned: none interleaved halves")                                                             \
    X(C_POSITIONS, "positions: i32 i64")                                                                     \
    X(C_GRAPH, "graph: 0 1")                                                                                 \
    X(C_THREADS, "threads: built_in (one) own")
enum { CACHE_AXES(AXIS_NAME) C_AXES };
#define CONVERT_AXES(X)                                                                                      \
    X(V_FROM, "from: " FORMATS_OF_AXIS)                                                                      \
    X(V_TO, "to: " FORMATS_OF_AXIS)                                                                          \
    X(V_TOKENS, "tokens: 0 1 128 1031")                                                                      \
    X(V_FROM_PAGE, "page_size from: 1 61 64")                                                                \
    X(V_TO_PAGE, "page_size to: 2 64 256")                                                                   \
    X(V_FROM_CACHE, "source: dense padded odd spread (far)")                                                 \
    X(V_TO_CACHE, "cache: dense padded odd spread (far)")                                                    \
    X(V_D_QK, "d_qk: 512 576 1 130 1040") /* of bf16 and fp16 */                                             \
    X(V_SCALE, "scale: 0 1 2 3 4")        /* of FP8_576 */                                                   \
    X(V_SLOTS, "slots: distinct skipped twice")                                                              \
    X(V_GRAPH, "graph: 0 1")                                                                                 \
    X(V_THREADS, "threads: built_in (one) own")
enum { CONVERT_AXES(AXIS_NAME) V_AXES };
enum { CACHE_DENSE, CACHE_PADDED, CACHE_ODD, CACHE_SPREAD, CACHE_FAR /* pages more than 2^31 bytes apart */ };
enum { VALUES_NORMAL, VALUES_HOSTILE, VALUES_ALL };
enum { SLOTS_DISTINCT, SLOTS_SKIPPED, SLOTS_TWICE };
/* C_TURN has the values of FMLA_ROPE_…. */
enum { NORM_NONE, NORM_EPS, NORM_NO_EPS, NORM_EDGE /* of the first token (norm_edge.h) */ };
enum { CACHE_SCALES = 5 };

#endif
