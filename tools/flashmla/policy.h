/* SPDX-License-Identifier: MIT
 *
 * What the command knows of an operation beyond its descriptor: a row of a table. Tensors lie in host memory without gaps,
 * and have passed the library's checks.
 */
#ifndef FLASHMLA_TOOL_POLICY_H
#define FLASHMLA_TOOL_POLICY_H

#include "call.h"

#include "compare.h"

struct work {
    double keys;  /* of all requests; of the sparse operations those that tokens name, each once a token */
    double pairs; /* (row, key that it sees) */
    double flop;  /* two products, each a multiplication and an addition an element */
    double bytes; /* that must be read and written at least, each once */
};

enum { RESULTS = 3, ROW_DIMENSIONS = 3, KEY_SOURCES = 2, NARROWED = 4 };

/* Where rows find keys: names of tensors. */
struct key_source {
    const char *cache, *list,
        *count;         /* the list is a block table or indices; the count is optional with the latter */
    const char *values; /* NULL: the first elements of keys */
};

struct policy {
    const char *has,
        *lacks; /* a file with the one tensor and without the other is of this operation; NULL: none is */
    enum dimension rows[ROW_DIMENSIONS]; /* a result has a row for each of these; DIM__ after the last one */
    enum dimension flat_rows[ROW_DIMENSIONS]; /* the same of a flat call, where that has others */
    int sliced; /* the oracle can be asked for one place of each of the first so many, the sizes of a slice */
    double budget; /* products that the oracle computes in a few seconds */
    struct {
        const char *name;
        const struct tolerance *tolerance; /* NULL: to the byte */
    } results[RESULTS];                    /* out and lse first */
    struct key_source keys[KEY_SOURCES];
    struct work (*work)(const struct call *call);
    void (*print)(const struct call *call, const struct work *work); /* what run tells of a call */
    /* Where views are not enough: makes `part` a call of its own, at `at` along the first dimensions of `rows`; `room` stays
     * as long as the part. */
    void (*narrow)(struct call *part, const struct call *call, const int64_t *at, int32_t room[NARROWED]);
    bool (*check)(const struct call *call, struct fault *fault); /* what no library can refuse on a GPU */
    /* The plan of a call, into its memory for one, or how many bytes it takes. */
    fmla_status (*plan)(const struct call *call, size_t *bytes);
};

extern const struct policy policies[OPERATIONS];

/* The operation of this name; OPERATIONS if there is none. */
enum operation operation_named(const char *name);

/* For an option: the names of those that calls can be made of, or that `run` tells of, and then NULL; and both in words. */
void operation_choices(bool run, const char **names, char *words, size_t room);

/* "sparse decode", of static storage. */
const char *operation_title(enum operation op);

/* "FP8_656" and so on. */
const char *format_name(int32_t kv_format);

/* May a call of the operation name that format? */
bool takes_format(enum operation op, int32_t kv_format);

/* The last FMLA_KV_… that the descriptor lets a call of the operation name; 0 where it can name none. */
int32_t last_format(enum operation op);

struct work call_work(const struct call *call);

/* What a result of the call has a row for each of; DIM__ after the last one. */
const enum dimension *call_rows(const struct call *call);

/* Says how many tokens and keys the longest request has, if the starts of requests tell. */
void call_set_longest(struct call *call);

/* The format that a call's keys have: kv_format, or where that is not said the type of the call's first tensor. */
int32_t call_format(const struct call *call);

/* … and that of the keys of that cache, which may have a format of its own. */
int32_t call_format_of(const struct call *call, const char *cache);

/* The keys from a source that the one row of a call of one row may see, and the slot that the i-th of them is in. */
int64_t call_row_keys(const struct call *row, const struct key_source *from);
int64_t call_row_slot(const struct call *row, const struct key_source *from, int64_t i);

/* Keys of request r of dense decode, and those that its token j sees. */
int64_t call_length(const struct call *call, int64_t r);
int64_t call_visible(const struct call *call, int64_t r, int64_t j);

/* Is there a kernel of this name that computes the operation, on whatever device? If not, a fault that names those that
 * there are. NULL is the library's choice. */
bool kernel_exists(const char *operation, const char *name, struct fault *fault);

/* For qsort. */
int double_by_value(const void *left, const void *right);

#endif
