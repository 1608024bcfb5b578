/* SPDX-License-Identifier: MIT
 *
 * AVX2, FMA and F16C. A register tile holds 12 sums, 2 vectors of rows and the broadcast in sixteen registers
 * of 256 bits.
 */
#ifndef FMLA_CPU_AVX2_VECTORS_H
#define FMLA_CPU_AVX2_VECTORS_H

#define LANES            8
#define VECTORS          2
#define WIDE             2
#define AT_ONCE(vectors) 6
#define LARGER(x, top)   (vector) _mm256_max_ps((__m256)(x), (__m256)(top))
#define SMALLER(x, top)  (vector) _mm256_min_ps((__m256)(x), (__m256)(top))

#endif
