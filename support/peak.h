/* SPDX-License-Identifier: MIT
 *
 * What this machine's arithmetic and memory can do at best, measured: what a benchmark holds its figures against.
 */
#ifndef FMLA_SUPPORT_PEAK_H
#define FMLA_SUPPORT_PEAK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Instructions that do the work of a kernel. */
enum peak_unit {
    PEAK_GENERIC,     /* separate multiply and add, vectors of 128 bits */
    PEAK_AVX2,        /* vfmadd…ps ymm */
    PEAK_AVX512,      /* vfmadd…ps zmm */
    PEAK_AVX512_BF16, /* vdpbf16ps zmm */
    PEAK_AMX,         /* tdpbf16ps */
    PEAK_UNITS
};

/* "vdpbf16ps zmm". Static storage. */
const char *peak_unit_name(enum peak_unit unit);

/* Whether this build has the loop and this machine the instruction. */
bool peak_unit_available(enum peak_unit unit);

/* FLOP/s of a loop that touches no memory, on `threads` threads at once; the best of several tries, about 0.2 s. */
double peak_flops(enum peak_unit unit, int threads);

/* Memory larger than the last-level cache. Reading it measures the read bandwidth, and leaves nothing else in the
 * caches. */
struct peak_memory {
    uint64_t *words;
    size_t bytes;
    size_t cache_bytes; /* of the last level, as the system tells; 0 = it does not */
};

/* False if there is no memory for it. */
bool peak_memory_open(struct peak_memory *memory, int threads);
void peak_memory_close(struct peak_memory *memory);

/* Reads all of it once, on `threads` threads; returns the seconds that took. */
double peak_memory_read(const struct peak_memory *memory, int threads);

/* Bytes/s, the best of several reads. */
double peak_bandwidth(const struct peak_memory *memory, int threads);

#endif
