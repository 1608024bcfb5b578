/* SPDX-License-Identifier: MIT
 *
 * The descriptors of operations.def as tables, for the library's checks, its tests and its tools.
 */
#ifndef FMLA_OPERATIONS_H
#define FMLA_OPERATIONS_H

#include "flashmla/flashmla.h"

#include "kvformat.h"

#include <stdbool.h>

enum { MAX_PARTITIONS = 65536, MAX_MHA_SPLITS = 64 };

/* Plans count splits in 32 bits: at most one per request and one more per partition. */
enum { MAX_BATCH = INT32_MAX - MAX_PARTITIONS - 1 };

enum element { ELEMENT_BF16, ELEMENT_FP16, ELEMENT_F32 };

/* The properties of a tensor, as bits. */
enum {
    ALLOW_BF16 = 1 << ELEMENT_BF16,
    ALLOW_FP16 = 1 << ELEMENT_FP16,
    ALLOW_F32 = 1 << ELEMENT_F32,
    ALLOW_FLOATS = ALLOW_BF16 | ALLOW_FP16 | ALLOW_F32,
    ALLOW_I32 = 1 << 3,
    ALLOW_I64 = 1 << 4,
    ALLOW_BYTES = 1 << 5, /* int8, uint8 or float8_e4m3fn */
    /* The type of the operation's first tensor, bf16 if that has codes; for a cache only if its format is
     * 16-bit. */
    ALLOW_SAME = 1 << 6,
    ALLOW_NULL = 1 << 7, /* the tensor may be absent */
    IS_OUTPUT = 1 << 8,  /* no two elements may share memory */
    /* Pages of the format that kv_format names, which determines the type and the last dimension. */
    IS_CACHE = 1 << 9,
    /* All tokens may be in one dimension (form_of); for a cache only if its format is 16-bit. */
    OR_FLAT = 1 << 10,
    IN_UNITS = 1 << 11,    /* addresses and strides must be multiples of the format's unit */
    IN_ROWS = 1 << 12,     /* rows are contiguous, aligned to 16 bytes */
    IN_CALLS = 1 << 13,    /* not checked in a size query */
    ALLOW_CODES = 1 << 14, /* with FP8 products: ALLOW_BYTES, and no fp16 */
    IS_SECOND = 1 << 15    /* a cache whose format is in the MEMBER_SECOND_FORMAT option */
};

enum { MAX_DIMENSIONS = 5, MAX_TENSORS = 16 };

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

/* Returns whether the operation is dense MHA, forward or backward. */
static inline bool operation_is_mha(enum operation operation)
{
    return operation == OP_MHA_FORWARD || operation == OP_MHA_BACKWARD;
}

/* Returns whether the operation writes or reads caches without attention. */
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
    MEMBER_FORMAT,        /* int32_t: FMLA_KV_… of the cache, or of the first of two */
    MEMBER_SECOND_FORMAT, /* int32_t: FMLA_KV_… of the cache with IS_SECOND; 0: as the first */
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
    const struct member *members; /* in order; the last has no name */
    struct range ranges[DIMENSIONS];
};

extern const struct descriptor descriptors[OPERATIONS];
extern const char *const dimension_words[DIMENSIONS];

/* The names of a tensor's dimensions. */
struct form {
    int rank;
    enum dimension dimensions[MAX_DIMENSIONS];
};

/* Returns the dimensions from the descriptor; or, for a tensor with OR_FLAT in a flat call, those with all
 * tokens in one dimension: keys outside pages, or packed requests. */
struct form form_of(const struct member *member, bool flat);

/* A public cache format, FMLA_KV_…. */
struct cache_format {
    const char *name;
    enum kv_format format;
    unsigned allowed; /* types of a cache tensor */
    int64_t d_qk;     /* 0: any */
    int64_t token;    /* elements per token in the tensor's last dimension; 0: d_qk */
    int64_t unit;     /* strides and addresses are multiples of this many bytes, a power of 2 */
};

extern const struct cache_format cache_formats[KV_FORMATS + 1];

#endif
