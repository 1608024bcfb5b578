/* SPDX-License-Identifier: MIT
 *
 * Any processor: vectors of 128 bits, which x86-64 and aarch64 always have. A register tile holds 8 sums and
 * 4 vectors of rows in sixteen registers.
 */
#ifndef FMLA_CPU_GENERIC_VECTORS_H
#define FMLA_CPU_GENERIC_VECTORS_H

#define LANES            4
#define VECTORS          4
#define WIDE             4
#define AT_ONCE(vectors) ((vectors) == 4 ? 2 : (vectors) == 2 ? 4 : 8)

#if defined(__SSE__)
#include <xmmintrin.h>
#define LARGER(x, top)  (vector) _mm_max_ps((__m128)(x), (__m128)(top))
#define SMALLER(x, top) (vector) _mm_min_ps((__m128)(x), (__m128)(top))
#endif

#endif
