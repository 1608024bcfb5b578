/* SPDX-License-Identifier: MIT
 *
 * AVX-512 (F, BW, VL, DQ).
 */
#define CACHE_NAME cpu_avx512_cache
#include "../cache_token.h"
