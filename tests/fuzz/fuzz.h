/* SPDX-License-Identifier: MIT
 *
 * Shared by the fuzz targets: bytes as choices, and aborting on a broken promise. A target is the one
 * function that libFuzzer calls; replay.c calls it in builds without libFuzzer.
 */
#ifndef FMLA_FUZZ_H
#define FMLA_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "flashmla/flashmla.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* An input, read from the front; zeros past its end. */
struct bytes {
    const uint8_t *at;
    size_t left;
};

static inline uint32_t take(struct bytes *bytes)
{
    if (!bytes->left) return 0;
    bytes->left--;
    return *bytes->at++;
}

/* Returns a choice in [0, count), count ≤ 256. */
static inline uint32_t choose(struct bytes *bytes, uint32_t count)
{
    return take(bytes) % count;
}

static inline uint32_t take32(struct bytes *bytes)
{
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) value = value << 8 | take(bytes);
    return value;
}

/* A loop with one worker: decode runs in the calling thread, so an input always does the same. */
static inline void in_order(void *pool, int64_t count, fmla_task task, void *task_data)
{
    (void)pool;
    for (int64_t i = 0; i < count; i++) task(task_data, i, 0);
}

/* Also active with NDEBUG. libFuzzer takes abort() for a finding. */
#define PROMISE(condition, ...)                                                                              \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: broken: %s: ", __FILE__, __LINE__, #condition);                          \
            fprintf(stderr, __VA_ARGS__);                                                                    \
            fputc('\n', stderr);                                                                             \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

/* Returns memory of exactly that many bytes, so that AddressSanitizer detects the first byte outside. */
static inline void *exactly(size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes)) abort();
    return memory;
}

#endif
