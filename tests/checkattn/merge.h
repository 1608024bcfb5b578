/* SPDX-License-Identifier: MIT
 *
 * The axes of a case of merge, and what their values mean where they are not numbers.
 */
#ifndef CHECKATTN_MERGE_H
#define CHECKATTN_MERGE_H

#include "case.h"

#define MERGE_AXES(X)                                                                                        \
    X(M_N, "n: 0 1 2 3 17 64")                                                                               \
    X(M_B, "b: 0 1 3")                                                                                       \
    X(M_SQ, "s_q: 1 2 5")                                                                                    \
    X(M_HQ, "h_q: 1 5 16 128")                                                                               \
    X(M_DV, "d_v: 1 64 127 512 513")                                                                         \
    X(M_PART, "parts: bf16 fp16 fp32")                                                                       \
    X(M_OUT, "out: bf16 fp16 fp32")                                                                          \
    X(M_EMPTY, "lse_empty: 0 1")                                                                             \
    X(M_BASE, "log_base: 0 2")                                                                               \
    X(M_SINK, "sink: 0 1")                                                                                   \
    X(M_EMPTIES, "empty parts: none some all nan")                                                           \
    X(M_LAYOUT, "layout: contiguous padded swapped odd")                                                     \
    X(M_THREADS, "threads: built_in (one) own")
enum { MERGE_AXES(AXIS_NAME) M_AXES };
enum {
    EMPTIES_NONE,
    EMPTIES_SOME,
    EMPTIES_ALL,
    EMPTIES_NAN /* of some rows one part has an lse of NaN */
};

#endif
