/* SPDX-License-Identifier: MIT
 *
 * Measures this machine's peak arithmetic throughput and memory bandwidth. Benchmarks compare their
 * figures with them.
 */
#ifndef FMLA_SUPPORT_PEAK_H
#define FMLA_SUPPORT_PEAK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum peak_unit {
    PEAK_GENERIC,     /* separate multiply and add, 128-bit vectors */
    PEAK_AVX2,        /* vfmadd…ps ymm */
    PEAK_AVX512,      /* vfmadd…ps zmm */
    PEAK_AVX512_BF16, /* vdpbf16ps zmm */
    PEAK_AMX,         /* tdpbf16ps */
    PEAK_UNITS
};

/* Returns for example "vdpbf16ps zmm", in static storage. */
const char *peak_unit_name(enum peak_unit unit);

/* Returns the instructions that dominate a CPU kernel of this name; those of the portable one for any other. */
enum peak_unit peak_unit_of(const char *kernel);

/* Returns true if this build has the loop and this machine the instruction. */
bool peak_unit_available(enum peak_unit unit);

/* Returns FLOP/s of a loop without memory accesses on `threads` concurrent threads: the best of several
 * tries, about 0.2 s. */
double peak_flops(enum peak_unit unit, int threads);

/* A buffer larger than the last-level cache. Reading it measures the read bandwidth and evicts everything
 * else from the caches. */
struct peak_memory {
    uint64_t *words;
    size_t bytes;
    size_t cache_bytes; /* last-level cache; 0 = unknown */
};

/* Returns false if memory is insufficient. */
bool peak_memory_open(struct peak_memory *memory, int threads);
void peak_memory_close(struct peak_memory *memory);

/* Reads the buffer once on `threads` threads and returns the seconds. */
double peak_memory_read(const struct peak_memory *memory, int threads);

/* Returns bytes/s, the best of several reads. */
double peak_bandwidth(const struct peak_memory *memory, int threads);

#endif
