/* SPDX-License-Identifier: MIT
 *
 * make-input for sparse decode and sparse prefill.
 */
#ifndef FLASHMLA_TOOL_MAKE_SPARSE_H
#define FLASHMLA_TOOL_MAKE_SPARSE_H

#include "fault.h"
#include "options.h"

#include "flashmla/flashmla.h"

struct sparse_options {
    int64_t batch, seq_len, query_tokens, heads, page_size, d_qk; /* d_qk 0: the format's */
    bool fp16, sink;
    uint64_t seed;
    const char *dense_given; /* an option of dense decode alone that was given */
    bool batch_given;        /* of decode alone */
    /* Of the sparse operations alone. */
    int cache; /* index of the choice: of q's type, FP8_656, FP8_584 */
    int64_t topk, extra_topk, extra_page_size;
    int64_t kv_heads; /* not of sparse decode */
    bool kv_heads_given;
    bool page_given; /* without, keys of sparse prefill lie in pages where they are bytes */
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

/* The first option of the sparse operations alone that was given, or NULL. */
const char *sparse_options_given(const struct sparse_options *options);

/* Writes the file; an exit code. */
int make_sparse(const struct command *command, const struct sparse_options *options, const char *path);
int make_prefill(const struct command *command, const struct sparse_options *options, const char *path);

/* ---- What both do ---------------------------------------------------------------------------- */

/* A tensor of the file by its name; one that is NULL is not there. Those with larger elements first: then every one is
 * aligned. */
struct sparse_member {
    const char *name;
    const fmla_tensor *tensor;
};
enum { SPARSE_MEMBERS = 8 /* at most */ };

/* `scale`: the metadata's softmax_scale; NULL = none. */
bool sparse_write(const char *path, const struct sparse_member *members, int count, int32_t kv_format,
                  uint64_t seed, const char *scale, struct fault *fault);

/* Complains of options that contradict each other; EXIT_GOOD where none do. */
int sparse_check_options(const struct command *command, const struct sparse_options *options, int64_t d_qk);

#endif
