/* SPDX-License-Identifier: MIT
 *
 * The cache operations of flashmla verify: one small case a format, to the byte.
 */
#ifndef FLASHMLA_TOOL_VERIFY_CACHE_H
#define FLASHMLA_TOOL_VERIFY_CACHE_H

#include "fault.h"

#include "flashmla/flashmla.h"

enum { VERIFY_CACHE_CASES = 5, VERIFY_CACHE_ROWS = 37 };

/* "FP8_656". Static storage. */
const char *verify_cache_name(int which);

/* False with a fault that says what differs from the oracle's, or what was refused. */
bool verify_cache(fmla_device device, bool gather, const char *kernel, int which, struct fault *fault);

#endif
