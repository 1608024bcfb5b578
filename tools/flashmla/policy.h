/* SPDX-License-Identifier: MIT
 *
 * What the command needs about an operation beyond its descriptor: a row of a table. Tensors are
 * contiguous in host memory and have passed the library's checks.
 */
#ifndef FLASHMLA_TOOL_POLICY_H
#define FLASHMLA_TOOL_POLICY_H

#include "call.h"

#include "compare.h"

struct work {
    double keys;  /* of all requests; sparse: keys that tokens name, once per token */
    double pairs; /* (row, visible key) */
    double flop;  /* two products, a multiplication and an addition per element each */
    double bytes; /* least bytes read and written, each once */
};

enum { RESULTS = 4, ROW_DIMENSIONS = 3, KEY_SOURCES = 2, NARROWED = 5 };

/* The tensors, by name, in which rows find keys. */
struct key_source {
    const char *cache, *list, *count; /* list: a block table or indices; count is optional with indices */
    const char *values;               /* NULL: values are the first elements of keys */
};

struct policy {
    const char *has,
        *lacks; /* a file with the first tensor but not the second is this operation's; NULL: none is */
    enum dimension rows[ROW_DIMENSIONS];      /* dimensions of a result's rows; DIM__ after the last one */
    enum dimension flat_rows[ROW_DIMENSIONS]; /* the same for a flat call, if they differ */
    int sliced;    /* the oracle can compute slices along the first `sliced` of these */
    double budget; /* products the oracle computes in a few seconds */
    struct {
        const char *name;
        const struct tolerance *tolerance; /* NULL: byte-exact */
    } results[RESULTS];                    /* out and lse first */
    struct key_source keys[KEY_SOURCES];
    struct work (*work)(const struct call *call);
    void (*print)(const struct call *call, const struct work *work); /* prints the report of `run` */
    /* If views do not suffice: makes `part` a call of its own at `at` along the first dimensions of
     * `rows`; `room` must live as long as `part`. */
    void (*narrow)(struct call *part, const struct call *call, const int64_t *at, int32_t room[NARROWED]);
    bool (*check)(const struct call *call,
                  struct reason *reason); /* checks that the library cannot make on a GPU */
    /* Makes the plan of a call in the call's memory, or returns its size in *bytes. */
    fmla_status (*plan)(const struct call *call, size_t *bytes);
};

extern const struct policy policies[OPERATIONS];

/* Returns the operation of this name; OPERATIONS if there is none. */
enum operation operation_named(const char *name);

/* For an option: lists the operations that calls can be made of, or that `run` reports, in `names`, ending
 * with NULL, and in `words`. */
void operation_choices(bool run, const char **names, char *words, size_t room);

/* Returns for example "sparse decode", in static storage. */
const char *operation_title(enum operation op);

/* Returns for example "FP8_656". */
const char *format_name(int32_t kv_format);

/* Of options whose words name the formats of caches, plain first, that of q: returns the index-th, 0 for
 * plain. */
int32_t format_chosen(int index);

/* Returns true if a call of the operation may name that format. */
bool takes_format(enum operation op, int32_t kv_format);

/* Return the first and the last FMLA_KV_… that the descriptor allows for the operation; 0 if none. */
int32_t first_format(enum operation op);
int32_t last_format(enum operation op);

/* Returns true if the operation has a tensor or an option of this name. */
bool operation_has(enum operation op, const char *name);

/* Returns true if the operation takes the lengths of requests: each row is over the keys of one. */
bool takes_lengths(enum operation op);

struct work call_work(const struct call *call);

/* Returns the dimensions of the rows of the call's results; DIM__ after the last one. */
const enum dimension *call_rows(const struct call *call);

/* Sets the tokens and keys of the longest request, if the starts of requests tell. */
void call_set_longest(struct call *call);

/* Returns the format of a call's keys: kv_format or, if unset, the type of the call's first tensor. */
int32_t call_format(const struct call *call);

/* Returns the format of one cache's keys, which may be its own. */
int32_t call_format_of(const struct call *call, const char *cache);

/* For a call of one row: return the number of keys from a source that the row may see, and the slot of the
 * i-th. */
int64_t call_row_keys(const struct call *row, const struct key_source *from);
int64_t call_row_slot(const struct call *row, const struct key_source *from, int64_t i);

/* Returns the keys of request r of dense decode. */
int64_t call_length(const struct call *call, int64_t r);

/* Returns true if a kernel of this name computes the operation on any device. If not, the reason lists the
 * kernels that do. NULL is the library's choice. */
bool kernel_exists(const char *operation, const char *name, struct reason *reason);

/* Returns the head size of values that MHA has by default beside this one of keys. */
int64_t usual_d_v(int64_t d_qk);

/* Compares doubles, for qsort. */
int double_by_value(const void *left, const void *right);

#endif
