/* SPDX-License-Identifier: MIT
 *
 * What an operation is to checkattn, and a case of it: tensors in guarded memory, told by a table, so that making copies on a device,
 * hashing what is only read, resetting and comparing what is written are said once for all operations. An operation adds how a case is
 * made, a row of it by the oracle, and its axes (struct operation).
 */
#ifndef CHECKATTN_CASE_H
#define CHECKATTN_CASE_H

#include "checkattn.h"
#include "compare.h"
#include "device.h"
#include "grid.h"
#include "magnitude.h"
#include "plan_call.h"

#include <stddef.h>

enum { CASE_TENSORS = 14, RESULTS = 3, MOST_ROWS = 4096, ROW_HEADS = 128 };

union call_args {
    fmla_dense_decode_args dense;
    fmla_sparse_decode_args sparse;
    fmla_sparse_prefill_args prefill;
    fmla_merge_args merge;
    fmla_cache_append_args append;
    fmla_cache_gather_args gather;
};

/* ---- Tensors ---------------------------------------------------------------------------------- */

enum role {
    INPUT,
    TABLE,    /* of a plan; INPUT, but made by case_plan */
    OUT,      /* a result [b, s_q, h_q, d_v] */
    BY_HEAD,  /* one of fp32, [b, h_q, s_q] */
    BY_TOKEN, /* the same, [s_q, h_q] */
    IN_PLACE  /* read and written */
};

/* Results come first, out in front; an operation has at most RESULTS. */
struct tensor_row {
    const char *name;
    enum role role;
    size_t argument; /* where its pointer is in the arguments */
};

/* How the library is called. Members are told by their offsets in the arguments; 0: there is none. */
struct calls {
    fmla_status (*run)(const union call_args *args);
    fmla_status (*size)(const union call_args *args, size_t *bytes,
                        size_t *alignment);                                /* NULL: no workspace */
    fmla_status (*kernel)(const union call_args *args, const char **name); /* NULL */
    size_t workspace, workspace_size, stream, name, plan, plan_size, log_base;
};

struct operation;
extern const struct calls dense_calls, sparse_calls, prefill_calls, merge_calls, append_calls, gather_calls;

/* ---- A case ----------------------------------------------------------------------------------- */

struct test_case {
    const struct operation *op;
    int64_t v[GRID_AXES]; /* the values of the axes */
    struct random_state random;
    char name[480];
    fmla_device device;                   /* where it runs */
    struct device_blocks blocks;          /* on a GPU: the copies there */
    int64_t b, s_q, h_q, h_kv, d_qk, d_v; /* of rows: requests, tokens, heads */
    int64_t capacity;                     /* keys that a table has room for; 0: as many as there are */
    struct guarded tensor[CASE_TENSORS];  /* by the operation's table */
    fmla_tensor view[CASE_TENSORS];       /* what the arguments name */
    int64_t strides[CASE_TENSORS];        /* of dimension 0 of a view with far memory, in the near one */
    union call_args args;                 /* of tensors in host memory, on a GPU too */
    void *plan;
    struct tolerance tolerance[RESULTS];
    double rounded;   /* the bound of their own that values of a row have for rounded scales; 0: none */
    bool other;       /* inputs that the table of tolerances is not for */
    bool infinite;    /* there are rows with a score of +inf */
    bool beyond;      /* scores that fp32 does not hold: of rows with a key nothing is promised */
    bool large_apart; /* elements of out above 1 are not in the cosine */
    bool captured;    /* on a GPU: each call is one of a graph */
};

/* Rows of one token: heads head, head + step, … */
struct rows {
    int64_t request, token, head, step, heads;
};

/* Part of a case as a problem of its own: the arguments, whose tensors can be narrowed. */
struct view {
    union call_args args;
    fmla_tensor tensor[CASE_TENSORS];
    int64_t shape[CASE_TENSORS][GUARDED_DIMS], strides[CASE_TENSORS][GUARDED_DIMS];
    float sinks[ROW_HEADS];
    int32_t count[2];
};

/* Some requests of a case, the last of which must have the bits that it has in the whole. */
struct part {
    struct view view;
    int64_t request, n;
    struct {
        void *memory; /* of a view's tensors, freed afterwards; NULL: none */
        size_t bytes;
    } own[2];
    char what[160]; /* that differs */
};

/* What an input was before a defect was planted there. */
struct patch {
    void *at;
    unsigned char before[16];
    size_t size;
};

/* ---- An operation ----------------------------------------------------------------------------- */

/* Cases as text (axes_read) for what a GPU's kernel promises beyond the values of one call (gpu.c); NULL: not of this
 * operation. */
struct gpu_cases {
    const char *bases[8];        /* what all of them begin with; each that the kernel takes */
    const char *graph, *next[3]; /* captured; what differs where it is replayed */
    const char *repeats[4];
    const char *positions[2]; /* batch-invariant: each request alone */
    const char *busy;
    const char *foreign; /* with a plan: tables that do not fit */
    void (*more)(const struct run *run, struct tally *tally);
};

struct suite;
struct oracle;

/* How cases of an operation are made and taken apart. */
struct maker {
    size_t size; /* of a struct that begins with a test_case */
    /* Draws the values that cases are copied from: before the first case, and again after so many (0: not again). NULL:
     * none. */
    void (*draw)(uint64_t seed);
    uint64_t cases_of_a_draw;
    /* Makes it; v, random and device are set. */
    void (*make)(struct test_case *c, const struct run *run);
    void (*free)(struct test_case *c); /* beside the tensors; NULL: nothing */
    /* A plan has everything from plan_shape but its lengths and its place. plan_lengths gives lengths k of each request,
     * those of the case, or drawn ones; false: none. */
    void (*plan_shape)(const struct test_case *c, struct plan_call *args);
    bool (*plan_lengths)(struct test_case *c, int k, bool stale, int32_t *lengths);
    struct {
        int tensor;
        size_t argument; /* in struct plan_call */
    } plan_length[2];

    /* The rows that are compared: all of a small case, chosen ones of a large one. How many. */
    int64_t (*choose_rows)(struct test_case *c, struct rows *rows);
    /* The view of such rows for the oracle; results are set by who calls. */
    void (*narrow)(const struct test_case *c, const struct rows *rows, struct view *view);
    bool (*sees)(const struct test_case *c, int64_t request, int64_t token, int64_t head); /* a key */
    /* Goes through the keys of a row. NULL: results of this operation have no bound of their own. */
    void (*magnitude)(const struct test_case *c, int64_t request, int64_t token, int64_t head,
                      struct magnitude *magnitude);
    bool bounds_out; /* the bound is for elements of out too */
    /* In place of rows: compares all of it. */
    void (*compare)(struct test_case *c, const struct run *run, struct tally *tally);
    /* Makes a part of a batch-invariant case, with that request (-1: a drawn one). The view is of the whole. */
    void (*part)(struct test_case *c, int64_t request, const struct run *run, struct part *part);
};

struct operation {
    const char *name;
    const struct calls *calls;
    const struct maker *maker;
    const struct tensor_row *tensor;
    int tensors, results, tables,
        sink; /* tables: the first of two of a plan; 0: there is none, as of a sink */
    struct axis *axis;
    int axes, threads, plan, invariant; /* the axes of that name; 0: there is none */
    const char *values;                 /* of all axes (axes_define) */
    const char *defaults; /* what a text leaves out, beside the first values of the axes; NULL: nothing */

    /* Sets the values of axes that the kernel under test has, and the grid's functions. */
    void (*choose)(const struct run *run, struct grid *grid);
    /* Is a case that is not of the grid one for this kernel and device? NULL: each is. */
    bool (*has)(const struct run *run, const int64_t *v);
    /* May the kernel under test refuse the case? NULL: none may. *must: it has to. */
    bool (*leaves)(const struct test_case *c, const struct run *run, bool *must);
    /* What pairs do not reach: texts, each with a seed of its own, and what is made by suite_case. */
    const char *const *special; /* ends with NULL; may be NULL */
    void (*more)(struct suite *suite);

    uint64_t faults; /* bits of enum defect that a kernel could have */
    /* The text of case i for a defect; NULL: no more. NULL: the grid's cases, until one has a place for it. */
    const char *(*fault_case)(const struct run *run, uint64_t i);
    bool (*plant_before)(struct test_case *c, enum defect fault, struct patch *patch);
    bool (*plant_after)(struct test_case *c, enum defect fault);

    struct gpu_cases gpu;
    const char *const *timed; /* texts, ends with NULL; may be NULL */
    double (*flop)(const struct test_case *c);
};

/* Bits of `faults`. */
#define FAULT(name) (UINT64_C(1) << FAULT_##name)

/* The enumerators of a list of tensors, X(enumerator, role, member of the arguments), and their table. */
#define TENSOR_NAME(name, role, member) name,
#define TENSOR_ROW(name, role, member)  {#member, role, offsetof(TENSOR_ARGS, member)},

extern const struct operation dense_decode, sparse_decode, sparse_prefill, merge, cache_append, cache_gather;

/* Every operation, in the order of the descriptors; NULL: it has no cases here, as plans have none. */
enum subject_index {
#define OPERATION(op, OP) OP,
#include "operations.def"
    SUBJECTS
};
extern const struct operation *const subjects[SUBJECTS];

/* ---- Making it -------------------------------------------------------------------------------- */

/* Before its first case. */
void operation_begin(const struct operation *op, uint64_t seed);

struct test_case *case_make(const struct operation *op, const struct run *run, const int64_t *v,
                            uint64_t seed);
void case_free(struct test_case *c);

/* The values of a text, over the operation's defaults. */
void case_values(const struct operation *op, const char *text, int64_t v[GRID_AXES]);

/* Tensor i of the case, which the arguments then name if it is wanted. Its view is that of the memory. */
void case_tensor(struct test_case *c, int i, fmla_dtype dtype, int ndim, const int64_t *shape,
                 enum layout layout, bool wanted);
void case_name(struct test_case *c, int i); /* by the arguments */
bool case_names(const struct test_case *c, int i);

/* Sinks for the heads of a case: none, drawn ones, or some of them infinite. */
enum { SINK_NONE, SINK_FINITE, SINK_INFINITE };
void case_sinks(struct test_case *c, int64_t kind);

/* A spike: the last values of a vector, which ends there, are 1/2. Two vectors with spikes have a product larger by 8, and
 * the values keep their size, so that the tolerance keeps its meaning. */
void case_spike(uint8_t *end, bool fp16);

/* Scores of +inf, by the last two columns of a key or a query: all that a special query has, and those of a special key with
 * all queries. */
void case_infinite(uint8_t *end, bool fp16, bool of_key, bool special);

/* Makes the plan that the case asks for, and passes it. On a GPU the device makes it too, and *same says whether all that
 * were made, in one piece and as tables, have the same bits. */
fmla_status case_plan(struct test_case *c, bool *same);
void case_use_tables(struct test_case *c); /* from now on in place of the plan in one piece */

/* Everything but lengths of a plan for a case, and the tensors of lengths that `args` name. */
void case_plan_args(const struct test_case *c, const union call_args *args, struct plan_call *plan);

/* ---- Its memory ------------------------------------------------------------------------------- */

/* Copies it to the device that it is for; nothing to do on the CPU. With `like`, a case of the same shapes and no smaller
 * memory, into the place of that one: a graph of `like` then reads this one. */
void case_to_device(struct test_case *c, const struct test_case *like);
void case_from_device(struct test_case *c);

/* FNV-1a over everything that the call only reads, canaries included. */
uint64_t case_hash_inputs(const struct test_case *c);

/* A copy of the results' memory, to be freed, and whether they are the same now. */
unsigned char *case_results_copy(const struct test_case *c);
bool case_results_same(const struct test_case *c, const unsigned char *copy);
void case_results_reset(struct test_case *c);
void case_results_intact(const struct test_case *c, const struct run *run, struct tally *tally);

/* Where a row of result i is. */
void *case_row(const struct test_case *c, int i, int64_t request, int64_t token, int64_t head);

/* ---- Calls ------------------------------------------------------------------------------------ */

/* A member of arguments that is a pointer, or a number, by its offset. */
void *pointer_at(const union call_args *args, size_t offset);
void set_pointer(union call_args *args, size_t offset, const void *pointer);
void set_size(union call_args *args, size_t offset, size_t size);
const fmla_tensor *tensor_at(const struct operation *op, const union call_args *args, int i);

/* Runs it in host memory, with a workspace of exactly the size that was answered, full of `fill` (-1: of anything). */
fmla_status call_on_host(const struct operation *op, union call_args *args, int fill);

/* Arguments on the device: tensors and plan are where their host memory has its copy. */
struct device_args {
    union call_args args;
    fmla_tensor tensor[CASE_TENSORS];
};
void device_args_make(struct device_args *to, const struct test_case *c, const union call_args *from);

/* What call_on_host does, on the device; results are as on the host before, and on the host afterwards. */
fmla_status call_on_device(const struct test_case *c, struct device_args *there, const union call_args *from,
                           int fill);

/* Where the case runs; `args` may be of views of its tensors. */
fmla_status case_run(const struct test_case *c, union call_args *args, int fill);

/* The kernel that would run it. */
fmla_status case_kernel(const struct test_case *c, const char **name);

/* ---- Parts ------------------------------------------------------------------------------------ */

/* The whole case; `near`: by memory where it was made, so that no kernel and oracle share a defect of far pages. */
void view_make(const struct test_case *c, struct view *view, bool near);

/* Leaves `count` of dimension `dim` of tensor i, from `first` on. */
void view_narrow(struct view *view, int i, int dim, int64_t first, int64_t count);

/* The heads of rows, of a tensor with the heads of q in dimension `dim`, and their sinks. */
void view_heads(const struct test_case *c, struct view *view, int i, int dim, const struct rows *rows);

/* ---- Checking it ------------------------------------------------------------------------------ */

/* What the oracle made of the rows of a case: made for one kernel, and good for others of the same inputs and rows. */
struct oracle {
    uint64_t inputs;
    int64_t count, first[MOST_ROWS + 1]; /* where the results of each are */
    struct rows rows[MOST_ROWS];
    unsigned char *out; /* NULL: nothing was made */
    float *values[RESULTS];
    int failures;
};
void oracle_free(struct oracle *oracle);

/* One case through all that is checked of it. `oracle`, if not NULL, is kept from kernel to kernel. */
void case_check(const struct operation *op, const struct run *run, const int64_t *v, uint64_t seed,
                struct tally *tally, struct oracle *oracle);

/* Does the kernel under test leave the case to another one, as it may or must? Then it says so, by its name. */
bool case_left(struct test_case *c, const struct run *run, struct tally *tally);

/* What is in the results against the oracle. `inputs` is the hash of what is read. */
void compare_oracle(struct test_case *c, const struct run *run, struct tally *tally, uint64_t inputs,
                    struct oracle *oracle);

/* The same and whether anything outside of the results was written. */
void compare_whole(struct test_case *c, const struct run *run, struct tally *tally);

/* Batch-invariant: a request (-1: a drawn one) in a batch of its own has the bits that it has in this one. */
void compare_part(struct test_case *c, int64_t request, const struct run *run, struct tally *tally);

/* How far from the oracle's a value of a row may be for the rounding of its products. */
double compare_bound(const struct test_case *c, int64_t request, int64_t token, int64_t head);

/* Writes to an input, and keeps what was there. False if it was that already. */
bool plant(struct patch *patch, void *at, const void *bytes, size_t size);

/* Kernels that have the same grid, checked case by case. */
enum { SUITE_KERNELS = 8 };
struct suite {
    const struct operation *op;
    int kernels;
    struct run run[SUITE_KERNELS];
    struct tally tally[SUITE_KERNELS];
    double seconds[SUITE_KERNELS];
    struct oracle oracle;
};

void suite_check(struct suite *suite);

/* A case beside the grid, by every kernel of the suite that has it; `by_oracle`: the oracle itself as the kernel. */
void suite_case(struct suite *suite, const char *text, uint64_t seed, bool by_oracle);

/* Prints GFLOP/s of the operation's plain shapes. */
void time_cases(const struct operation *op, const struct run *run);

/* What a GPU's kernel promises beyond the values of one call. */
void gpu_check(const struct operation *op, const struct run *run, struct tally *tally);

#endif
