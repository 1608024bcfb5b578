/* SPDX-License-Identifier: MIT
 *
 * flashmla bench --op cache_append and cache_gather: operations that only move data, held against a copy.
 */
#ifndef FLASHMLA_TOOL_BENCH_CACHE_H
#define FLASHMLA_TOOL_BENCH_CACHE_H

#include "fault.h"
#include "options.h"

#include "flashmla/flashmla.h"

struct bench_cache {
    bool gather, warm;
    fmla_device device;
    struct option_counts tokens;
    bool bf16, fp16; /* types of the vectors */
    int64_t page_size, repeat;
    const char *kernel, *json; /* NULL: the library's choice; none */
};

/* Prints a row for each number of tokens, type and format. Sets *exit_code where it returns false with a fault. */
bool bench_cache(const struct bench_cache *bench, int *exit_code, struct fault *fault);

#endif
