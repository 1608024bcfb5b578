/* SPDX-License-Identifier: MIT
 *
 * The library with emulated tiles (emulated_tiles.h) reports AMX on every processor with AVX-512 BF16.
 */
#include "../../src/dispatch.h"

__attribute__((constructor)) static void pretend(void)
{
    const struct processor processor = {NEEDS_AVX2 | NEEDS_AVX512 | NEEDS_AVX512_BF16 | NEEDS_AMX, false};
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bf16")) dispatch_pretend(&processor);
}
