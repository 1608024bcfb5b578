/* SPDX-License-Identifier: MIT
 *
 * The descriptors of operations.def as tables, for the library's checks, for its tests and for its tools.
 */
#ifndef FMLA_OPERATIONS_H
#define FMLA_OPERATIONS_H

#include "flashmla/flashmla.h"

#include "kvformat.h"

#include <stdbool.h>

enum { MAX_PARTITIONS = 65536 };

/* Batches are counted in 32 bits in plans; leave room for one split more a partition. */
enum { MAX_BATCH = INT32_MAX - MAX_PARTITIONS - 1 };

enum element { ELEMENT_BF16, ELEMENT_FP16, ELEMENT_F32 };

/* What a tensor may be, as bits. */
enum {
    ALLOW_BF16 = 1 << ELEMENT_BF16,
    ALLOW_FP16 = 1 << ELEMENT_FP16,
    ALLOW_F32 = 1 << ELEMENT_F32,
    ALLOW_FLOATS = ALLOW_BF16 | ALLOW_FP16 | ALLOW_F32,
    ALLOW_I32 = 1 << 3,
    ALLOW_I64 = 1 << 4,
    ALLOW_BYTES = 1 << 5, /* any type of one byte */
    /* The type of the operation's first tensor, bf16 where that has codes; of a cache: where its format is one of 16 bits. */
    ALLOW_SAME = 1 << 6,
    ALLOW_NULL = 1 << 7, /* the tensor may be absent */
    IS_OUTPUT = 1 << 8,  /* no two elements may share memory */
    /* Pages of the format that kv_format names, which says the type and the last dimension. */
    IS_CACHE = 1 << 9,
    /* All tokens may be one dimension (form_of); of a cache where its format is one of 16 bits. */
    OR_FLAT = 1 << 10,
    IN_UNITS = 1 << 11,    /* … at addresses and strides that are multiples of the format's unit */
    IN_ROWS = 1 << 12,     /* rows without gaps, aligned to 16 bytes */
    IN_CALLS = 1 << 13,    /* not looked at where a size is asked */
    ALLOW_CODES = 1 << 14, /* where products are FP8: any type of one byte, and no fp16 */
    IS_SECOND = 1 << 15    /* a cache whose format another option names: that of MEMBER_SECOND_FORMAT */
};

enum { MAX_DIMENSIONS = 5, MAX_TENSORS = 12 };

enum dimension {
    DIM__,
#define DIMENSION(name, words) DIM_##name,
#include "operations.def"
    DIMENSIONS
};

enum operation {
#define OPERATION(op, OP) OP_##OP,
#include "operations.def"
    OPERATIONS
};

/* Dense MHA, forward or backward: heads with keys and values of their own. */
static inline bool operation_is_mha(enum operation operation)
{
    return operation == OP_MHA_FORWARD || operation == OP_MHA_BACKWARD;
}

/* Tokens into pages and out of them. */
static inline bool operation_is_of_caches(enum operation operation)
{
    return operation == OP_CACHE_APPEND || operation == OP_CACHE_GATHER || operation == OP_CACHE_CONVERT;
}

/* The tensors of each operation, numbered from 0. */
enum {
#define OPERATION(op, OP)                               TENSORS_BEFORE_##op = -1,
#define TENSOR(op, member, allowed, d0, d1, d2, d3, d4) TENSOR_##op##_##member,
#include "operations.def"
};

enum member_kind {
    MEMBER_INTEGER,       /* int32_t */
    MEMBER_FORMAT,        /* int32_t: the format of the caches, or of the first one, FMLA_KV_… */
    MEMBER_SECOND_FORMAT, /* int32_t: the format of the cache that IS_SECOND; 0: that of the other one */
    MEMBER_PRODUCTS,      /* int32_t: FMLA_PRODUCTS_… */
    MEMBER_WIDE,          /* int64_t */
    MEMBER_LAST_INTEGER = MEMBER_WIDE,
    MEMBER_TENSOR,  /* const fmla_tensor * */
    MEMBER_REAL,    /* float */
    MEMBER_POINTER, /* void * */
    MEMBER_BYTES,   /* size_t */
    MEMBER_TEXT,    /* const char * */
    MEMBER_DEVICE   /* fmla_device */
};

struct member {
    const char *name;
    enum member_kind kind;
    size_t offset;
    int64_t low, high; /* of an option */
    unsigned allowed;  /* of a tensor */
    int rank;
    enum dimension dimensions[MAX_DIMENSIONS];
};

struct range {
    int64_t low, high; /* both 0: any size */
};

struct descriptor {
    const char *name;
    size_t size;                  /* of the argument struct */
    const struct member *members; /* in their order; the last has no name */
    struct range ranges[DIMENSIONS];
};

extern const struct descriptor descriptors[OPERATIONS];
extern const char *const dimension_words[DIMENSIONS];

/* The dimensions of a tensor by name. */
struct form {
    int rank;
    enum dimension dimensions[MAX_DIMENSIONS];
};

/* As the descriptor has it; or, where the tensor is OR_FLAT and the call is flat, with all tokens in one dimension: keys that do not
 * lie in pages, or the requests of a batch one after the other. */
struct form form_of(const struct member *member, bool flat);

/* A public cache format, FMLA_KV_…. */
struct cache_format {
    const char *name;
    enum kv_format format;
    unsigned allowed; /* types of a cache */
    int64_t d_qk;     /* 0: any */
    int64_t token;    /* elements of a token as the tensor's last dimension has them; 0: d_qk */
    int64_t unit;     /* bytes that strides and addresses must be multiples of, a power of 2 */
};

extern const struct cache_format cache_formats[KV_FORMATS + 1];

#endif
