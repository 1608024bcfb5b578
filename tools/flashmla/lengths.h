/* SPDX-License-Identifier: MIT
 *
 * The lengths of a batch, given or random: options that `make-input` and `plan` share.
 */
#ifndef FLASHMLA_TOOL_LENGTHS_H
#define FLASHMLA_TOOL_LENGTHS_H

#include "options.h"

#include "reason.h"

struct lengths {
    struct option_counts list;
    int64_t batch, seq_len, min_len, max_len, seed;
    bool batch_given, seq_len_given, min_given, max_given, list_given;
};

/* 8 requests of 512 to 4096 keys. */
#define LENGTHS_DEFAULTS                                                                                     \
    {                                                                                                        \
        .batch = 8, .min_len = 512, .max_len = 4096                                                          \
    }

#define LENGTHS_MAX_BATCH 1000000

#define LENGTHS_OPTIONS(l)                                                                                   \
    OPTION_NUMBER("--batch", &(l).batch, 0, LENGTHS_MAX_BATCH, "requests; default 8", &(l).batch_given),     \
        OPTION_NUMBER("--seq-len", &(l).seq_len, 0, INT32_MAX, "keys of every request", &(l).seq_len_given), \
        OPTION_LIST("--seq-lens", &(l).list, "A,B,C", 0, INT32_MAX, "keys of each request, in order",        \
                    &(l).list_given),                                                                        \
        OPTION_NUMBER("--min-len", &(l).min_len, 0, INT32_MAX, "least keys of a random length; default 512", \
                      &(l).min_given),                                                                       \
        OPTION_NUMBER("--max-len", &(l).max_len, 0, INT32_MAX, "most keys of a random length; default 4096", \
                      &(l).max_given),                                                                       \
        OPTION_NUMBER("--seed", &(l).seed, 0, INT64_MAX, "seed of all random values; default 0", NULL)

bool lengths_any_given(const struct lengths *lengths);

/* Returns the lengths that the options ask for, allocated; *batch is their number. Returns NULL with a
 * reason if options contradict each other. */
int32_t *lengths_make(const struct lengths *lengths, int64_t *batch, struct reason *reason);

#endif
