/* SPDX-License-Identifier: MIT
 *
 * Any processor: vectors of 128 bits, which x86-64 and aarch64 always have; 8 sums and 4 vectors of rows in sixteen
 * registers.
 */
#ifndef FMLA_CPU_GENERIC_VECTORS_H
#define FMLA_CPU_GENERIC_VECTORS_H

#define LANES   4
#define VECTORS 4
#define AT_ONCE 2

#endif
