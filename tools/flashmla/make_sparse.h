/* SPDX-License-Identifier: MIT
 *
 * make-input for sparse decode.
 */
#ifndef FLASHMLA_TOOL_MAKE_SPARSE_H
#define FLASHMLA_TOOL_MAKE_SPARSE_H

#include "options.h"

struct sparse_options {
    int64_t batch, seq_len, query_tokens, heads, page_size, d_qk; /* d_qk 0: the format's */
    bool fp16, sink;
    uint64_t seed;
    const char *dense_given; /* an option of dense decode alone that was given */
    /* Of sparse decode alone. */
    int cache; /* index of the choice: of q's type, FP8_656, FP8_584 */
    int64_t topk, extra_topk, extra_page_size;
    bool short_lists, cache_given, topk_given, extra_topk_given, extra_page_given;
};

#define SPARSE_OPTIONS(s)                                                                                    \
    {"--cache",                                                                                              \
     OPTION_CHOICE,                                                                                          \
     &(s).cache,                                                                                             \
     "FORMAT",                                                                                               \
     "sparse: plain (of q's type, the default), fp8_656 or fp8_584",                                         \
     0,                                                                                                      \
     0,                                                                                                      \
     {"plain", "fp8_656", "fp8_584", NULL},                                                                  \
     &(s).cache_given},                                                                                      \
        {"--topk",  OPTION_COUNT, &(s).topk,      "N", "sparse: indices of a query token; default 2048", 0,  \
         INT32_MAX, {NULL},       &(s).topk_given},                                                          \
        {"--extra-topk",                                                                                     \
         OPTION_COUNT,                                                                                       \
         &(s).extra_topk,                                                                                    \
         "N",                                                                                                \
         "sparse: indices into an extra cache; default none",                                                \
         1,                                                                                                  \
         INT32_MAX,                                                                                          \
         {NULL},                                                                                             \
         &(s).extra_topk_given},                                                                             \
        {"--extra-page-size",                                                                                \
         OPTION_COUNT,                                                                                       \
         &(s).extra_page_size,                                                                               \
         "N",                                                                                                \
         "sparse: its page size; default 64",                                                                \
         1,                                                                                                  \
         65536,                                                                                              \
         {NULL},                                                                                             \
         &(s).extra_page_given},                                                                             \
    {                                                                                                        \
        "--short-lists", OPTION_ON, &(s).short_lists, NULL,                                                  \
            "sparse: lists of all lengths, and holes in them", 0, 0, {NULL}, NULL                            \
    }

/* The first option of sparse decode alone that was given, or NULL. */
const char *sparse_options_given(const struct sparse_options *options);

/* Writes the file; an exit code. */
int make_sparse(const struct command *command, const struct sparse_options *options, const char *path);

#endif
