/* SPDX-License-Identifier: MIT
 *
 * AVX-512, on processors without its bf16 product and for fp16 caches on all. A register tile holds 16 sums
 * and the vectors of rows of one group or two in thirty-two registers of 512 bits; with one group the
 * broadcast is part of the multiply-add.
 */
#ifndef FMLA_CPU_AVX512_VECTORS_H
#define FMLA_CPU_AVX512_VECTORS_H

#define LANES            16
#define VECTORS          1
#define WIDE             2
#define AT_ONCE(vectors) ((vectors) == 2 ? 8 : 16)
#define LARGER(x, top)   (vector) _mm512_max_ps((__m512)(x), (__m512)(top))
#define SMALLER(x, top)  (vector) _mm512_min_ps((__m512)(x), (__m512)(top))

#endif
