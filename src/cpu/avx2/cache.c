/* SPDX-License-Identifier: MIT
 *
 * AVX2, FMA and F16C.
 */
#define CACHE_NAME cpu_avx2_cache
#include "../cache_token.h"
