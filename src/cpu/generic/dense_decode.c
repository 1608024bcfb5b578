/* SPDX-License-Identifier: MIT
 *
 * Any processor: vectors of 128 bits, which x86-64 and aarch64 always have; 8 sums and 4 vectors of rows in sixteen
 * registers.
 */
#define ATTENTION_NAME cpu_generic_attention
#define LANES          4
#define VECTORS        4
#define AT_ONCE        2
#include "../attention_f32.h"
