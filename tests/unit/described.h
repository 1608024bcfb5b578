/* SPDX-License-Identifier: MIT
 *
 * Calls made from an operation's descriptor (src/operations.def), for error tests and fuzzing: its tensors
 * for given sizes, and its public functions by number.
 */
#ifndef FMLA_DESCRIBED_H
#define FMLA_DESCRIBED_H

#include "operations.h"

#include <stdbool.h>
#include <string.h>

/* Designated initialisers of a struct. */
#define DESIGNATED(...)                                                                                      \
    {                                                                                                        \
        __VA_ARGS__                                                                                          \
    }

/* Sizes and types of a call's tensors. Sizes are accessible by number and by name. */
struct layout {
    union {
        int64_t size[DIMENSIONS];
        struct {
            int64_t none;
#define DIMENSION(name, words) int64_t name;
#include "operations.def"
        };
    };
    fmla_dtype type;      /* of values that allow several types */
    int32_t format;       /* of caches, FMLA_KV_… */
    int32_t extra_format; /* of a second cache; 0: format */
    bool codes;           /* queries are codes if they may be */
    bool flat;            /* tensors have all tokens in one dimension if they may (form_of) */
    /* Only used by calls made by name (named_calls.h): */
    unsigned has; /* optional tensors, HAS_… */
    int32_t batch_invariant, num_partitions, causal, products, batch_dependent, num_splits;
};

/* Returns the format of a cache. */
static inline const struct cache_format *described_format(const struct member *m, const struct layout *layout)
{
    return &cache_formats[(m->allowed & IS_SECOND) && layout->extra_format ? layout->extra_format
                                                                           : layout->format];
}

/* Returns true if a page is contiguous: its tokens, then all scales. */
static inline bool described_contiguous_pages(const struct member *m, const struct layout *layout)
{
    return (m->allowed & IS_CACHE) && kv_layout_of(described_format(m, layout)->format, 0).scale_bytes;
}

/* Returns the names of a tensor's dimensions; DIM__ is the bytes of a token. */
static inline struct form described_form(const struct member *m, const struct layout *layout)
{
    struct form form = form_of(m, layout->flat);
    if ((m->allowed & IS_CACHE) && !layout->flat && described_format(m, layout)->token)
        form.dimensions[3] = DIM__;
    return form;
}

/* Fills in the shape and returns the rank. */
static inline int described_shape(const struct member *m, const struct layout *layout, int64_t *shape)
{
    const struct form form = described_form(m, layout);
    for (int i = 0; i < form.rank; i++)
        shape[i] = form.dimensions[i] == DIM__ ? described_format(m, layout)->token
                                               : layout->size[form.dimensions[i]];
    return form.rank;
}

static inline fmla_dtype described_dtype(const struct member *m, const struct layout *layout)
{
    const unsigned format = m->allowed & IS_CACHE ? described_format(m, layout)->allowed : 0;
    if ((format & ALLOW_BYTES) || (layout->codes && (m->allowed & ALLOW_CODES)))
        return (fmla_dtype){FMLA_TYPE_UINT, 8, 1};
    if (format & ALLOW_BF16) return (fmla_dtype){FMLA_TYPE_BFLOAT, 16, 1};
    if (format & ALLOW_FP16) return (fmla_dtype){FMLA_TYPE_FLOAT, 16, 1};
    if (m->allowed & (ALLOW_I32 | ALLOW_I64))
        return (fmla_dtype){FMLA_TYPE_INT, m->allowed & ALLOW_I32 ? 32 : 64, 1};
    if ((m->allowed & ALLOW_FLOATS) == ALLOW_F32) return (fmla_dtype){FMLA_TYPE_FLOAT, 32, 1};
    return layout->type;
}

static inline const struct member *described_member(enum operation operation, const char *name)
{
    for (const struct member *m = descriptors[operation].members; m->name; m++)
        if (*m->name == *name && !strcmp(m->name, name)) return m; /* millions of times */
    return NULL;
}

/* Returns the address of an option; NULL: the operation has none of that name. */
static inline void *option_at(enum operation operation, void *args, const char *name)
{
    const struct member *const m = described_member(operation, name);
    return m ? (char *)args + m->offset : NULL;
}

/* Returns the first option of a kind; NULL: the operation has none. */
static inline const struct member *described_kind(enum operation operation, enum member_kind kind)
{
    for (const struct member *m = descriptors[operation].members; m->name; m++)
        if (m->kind == kind) return m;
    return NULL;
}

/* Makes a layout agree with a descriptor: a format that its option takes, the d_qk of that format, and sizes of
 * which one value alone is allowed. */
static inline void described_fit(enum operation operation, struct layout *layout)
{
    const struct member *const named = described_kind(operation, MEMBER_FORMAT);
    const struct range *const ranges = descriptors[operation].ranges;
    if (named && (layout->format < named->low || layout->format > named->high))
        layout->format = (int32_t)named->low;
    if (named && cache_formats[layout->format].d_qk) layout->d_qk = cache_formats[layout->format].d_qk;
    for (int i = 0; i < DIMENSIONS; i++)
        if (ranges[i].high && ranges[i].low == ranges[i].high) layout->size[i] = ranges[i].low;
    layout->n_out = layout->n; /* a merge of all parts */
}

/* Returns tensor `which` of an operation; NULL past the last. */
static inline const struct member *described_tensor(enum operation operation, int which)
{
    for (const struct member *m = descriptors[operation].members; m->name; m++)
        if (m->kind == MEMBER_TENSOR && !which--) return m;
    return NULL;
}

/* Returns the number of a tensor; -1: the operation has none of that name. */
static inline int described_index(enum operation operation, const char *name)
{
    const struct member *m;
    for (int which = 0; (m = described_tensor(operation, which)); which++)
        if (!strcmp(m->name, name)) return which;
    return -1;
}

/* Returns the dimension that an option sets in the absence of a tensor; DIM__: none. */
static inline enum dimension described_wide(const struct member *m)
{
    for (int i = 1; m->kind == MEMBER_WIDE && i < DIMENSIONS; i++)
        if (!strcmp(dimension_words[i], m->name)) return (enum dimension)i;
    return DIM__;
}

static inline fmla_status described_run(enum operation operation, const void *args)
{
#define OPERATION(op, OP)                                                                                    \
    if (operation == OP_##OP) return fmla_##op(args);
#include "operations.def"
    return FMLA_INVALID_ARGUMENT;
}

/* Answers to the queries of an operation. */
struct answer {
    size_t bytes, alignment;
    int32_t count[2]; /* the second is unused */
    const char *name;
};

enum question { ASK_BYTES, ASK_BOUND, ASK_KERNEL, QUESTIONS };

/* Queries the bytes of a workspace, their bound and a kernel; for a plan its bytes (twice) and its
 * partitions. An operation without these returns FMLA_OK. answer NULL: passes no place for the answer. */
static inline fmla_status described_ask(enum operation operation, enum question question, const void *args,
                                        struct answer *answer)
{
    size_t *bytes = answer ? &answer->bytes : NULL, *alignment = answer ? &answer->alignment : NULL;
    const char **name = answer ? &answer->name : NULL;
    int32_t *count = answer ? answer->count : NULL;
    switch (operation) {
#define ASK_PLAN(op, OP)                                                                                     \
    case OP:                                                                                                 \
        return question == ASK_KERNEL ? fmla_##op##_partitions(args, count) : fmla_##op##_size(args, bytes);
#define WORKSPACE(op, OP)                                                                                    \
    case OP_##OP:                                                                                            \
        return question == ASK_KERNEL  ? fmla_##op##_kernel(args, name)                                      \
               : question == ASK_BOUND ? fmla_##op##_workspace_bound(args, bytes, alignment)                 \
                                       : fmla_##op##_workspace_size(args, bytes, alignment);
#include "operations.def"
        ASK_PLAN(decode_plan, OP_DECODE_PLAN)
        ASK_PLAN(sparse_plan, OP_SPARSE_PLAN)
    default: return FMLA_OK;
    }
}

static inline bool described_is_plan(enum operation operation)
{
    return operation == OP_DECODE_PLAN || operation == OP_SPARSE_PLAN;
}

static inline bool described_asks(enum operation operation)
{
    return described_is_plan(operation) || described_member(operation, "workspace");
}

#endif
