/* SPDX-License-Identifier: MIT
 *
 * The cache operations on pages that are far apart.
 */
#ifndef CHECKATTN_CACHE_FAR_H
#define CHECKATTN_CACHE_FAR_H

#include "checkattn.h"

void check_cache_far(const struct run *run, bool gather, struct tally *tally);

#endif
