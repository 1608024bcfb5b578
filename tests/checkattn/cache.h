/* SPDX-License-Identifier: MIT
 *
 * The axes of a case of cache append or gather, and what their values mean where they are not numbers.
 */
#ifndef CHECKATTN_CACHE_H
#define CHECKATTN_CACHE_H

#include "case.h"

enum {
    C_FORMAT,
    C_ELEMENT,
    C_TOKENS,
    C_PAGE_SIZE,
    C_CACHE,
    C_VECTORS,
    C_ROPE,
    C_D_QK,
    C_VALUES,
    C_SCALE,
    C_SLOTS,
    C_GRAPH,
    C_THREADS,
    C_AXES
};
enum { CACHE_DENSE, CACHE_PADDED, CACHE_ODD, CACHE_SPREAD };
enum { VALUES_NORMAL, VALUES_HOSTILE, VALUES_ALL };
enum { SLOTS_DISTINCT, SLOTS_SKIPPED, SLOTS_TWICE };
enum { CACHE_SCALES = 5 };

#endif
