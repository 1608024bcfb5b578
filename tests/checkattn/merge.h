/* SPDX-License-Identifier: MIT
 *
 * The axes of a case of merge, and what their values mean where they are not numbers.
 */
#ifndef CHECKATTN_MERGE_H
#define CHECKATTN_MERGE_H

#include "case.h"

enum {
    M_N,
    M_B,
    M_SQ,
    M_HQ,
    M_DV,
    M_PART,
    M_OUT,
    M_EMPTY,
    M_BASE,
    M_SINK,
    M_EMPTIES,
    M_LAYOUT,
    M_THREADS,
    M_AXES
};
enum {
    EMPTIES_NONE,
    EMPTIES_SOME,
    EMPTIES_ALL,
    EMPTIES_NAN /* of some rows one part has an lse of NaN */
};

#endif
