/* SPDX-License-Identifier: MIT
 *
 * The axes of a case of cache append or gather, and what their values mean where they are not numbers.
 */
#ifndef CHECKATTN_CACHE_H
#define CHECKATTN_CACHE_H

#include "case.h"

#define CACHE_AXES(X)                                                                                        \
    X(C_FORMAT, "format: (none) bf16 fp16 fp8_656 fp8_584 fp8_576")                                          \
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
    X(C_GRAPH, "graph: 0 1")                                                                                 \
    X(C_THREADS,                                                                                             \
      "threads: built_in (one) own") /* ---- The grid ------------------------------------------------------------------------------- */
enum { CACHE_AXES(AXIS_NAME) C_AXES };
enum { CACHE_DENSE, CACHE_PADDED, CACHE_ODD, CACHE_SPREAD, CACHE_FAR /* pages more than 2^31 bytes apart */ };
enum { VALUES_NORMAL, VALUES_HOSTILE, VALUES_ALL };
enum { SLOTS_DISTINCT, SLOTS_SKIPPED, SLOTS_TWICE };
enum { CACHE_SCALES = 5 };

#endif
