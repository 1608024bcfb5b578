/* SPDX-License-Identifier: MIT
 *
 * What an operation is to checkattn, and a case of it: tensors in guarded memory, told by a table, so that making copies on a device,
 * hashing what is only read, resetting and comparing what is written are said once for all operations. An operation adds how a case is
 * made, a row of it by the oracle, and its axes (struct subject).
 */
#ifndef CHECKATTN_CASE_H
#define CHECKATTN_CASE_H

#include "checkattn.h"
#include "compare.h"
#include "device.h"
#include "grid.h"
#include "magnitude.h"
#include "op_call.h"
#include "plan_call.h"

#include <stddef.h>

enum { RESULTS = 3, MOST_ROWS = 4096, ROW_HEADS = 128, TEXTS = 20 };

/* The axes of an operation are a list of X(enumerator, "name: values"). */
#define AXIS_NAME(name, text) name,
#define AXIS_TEXT(name, text) text "\n"

/* The value of an axis of shapes that stands for one that is in no table: up to three sizes below 2^20. */
static inline int64_t axis_shape(int64_t first, int64_t second, int64_t third)
{
    return INT64_C(1) << 60 | first << 40 | second << 20 | third;
}

/* Such a value, or a row of the table, taken apart. */
static inline void axis_shape_take(int64_t value, const int64_t *row, int64_t columns, int64_t shape[3])
{
    for (int i = 0; i < 3; i++)
        shape[i] = value >> 60            ? value >> (40 - 20 * i) & 0xfffff
                   : (int64_t)i < columns ? row[value * columns + i]
                                          : 0;
}

struct subject;

/* ---- A case ----------------------------------------------------------------------------------- */

struct test_case {
    const struct subject *op;
    int64_t v[GRID_AXES]; /* the values of the axes */
    struct random_state random;
    char name[480];
    fmla_device device;          /* where it runs */
    struct device_blocks blocks; /* on a GPU: the copies there */
    union { /* the dimensions of operations.def, by their names; 1 where neither an axis nor the maker says it */
        int64_t size[DIMENSIONS];
        struct {
            int64_t none;
#define DIMENSION(name, words) int64_t name;
#include "operations.def"
        };
    };
    bool
        flat; /* a batch whose tokens are one dimension is one of one request here, and its tokens are those of all */
    fmla_dtype dtype;                   /* of tensors that may have several */
    bool wide;                          /* integers that may have 32 or 64 bits have 64 */
    int64_t capacity;                   /* keys that a table has room for; 0: as many as there are */
    struct guarded tensor[MAX_TENSORS]; /* by the operation's descriptor */
    fmla_tensor view[MAX_TENSORS];      /* what the arguments name */
    int64_t strides[MAX_TENSORS];       /* of dimension 0 of a view with far memory, in the near one */
    union call_args args;               /* of tensors in host memory, on a GPU too */
    void *plan, *owned[2];              /* owned: by the maker, freed with the case */
    struct tolerance tolerance[RESULTS];
    double
        of_product; /* how far, relative to it, a product of q and k may be from the oracle's beyond the rounding of fp32 */
    double rounded;   /* the bound of their own that values of a row have for rounded scales; 0: none */
    bool other;       /* inputs that the table of tolerances is not for */
    bool bounds_out;  /* elements of out too have a bound of their own */
    bool infinite;    /* there are rows with a score of +inf */
    bool beyond;      /* scores that fp32 does not hold: of rows with a key nothing is promised */
    bool large_apart; /* elements of out above 1 are not in the cosine */
    bool captured;    /* on a GPU: each call is one of a graph */
    bool unordered;   /* the first result's bits may differ from run to run */
};

/* Also of a batch whose tokens are one dimension, where starts say which are of a request. */
static inline int64_t case_requests(const struct test_case *c)
{
    return c->flat ? c->splits - 1 : c->b;
}

/* Rows of one token: heads head, head + step, … */
struct rows {
    int64_t request, token, head, step, heads;
};

/* Part of a case as a problem of its own: the arguments, whose tensors can be narrowed. */
struct view {
    union call_args args;
    fmla_tensor tensor[MAX_TENSORS];
    int64_t shape[MAX_TENSORS][GUARDED_DIMS], strides[MAX_TENSORS][GUARDED_DIMS];
    float sinks[ROW_HEADS];
    int32_t count[2];
};

/* Some requests of a case, the last of which must have the bits that it has in the whole. */
struct part {
    struct view view;
    int64_t request, n;
    int64_t first, tokens; /* of the request, among those of the case; all, if the maker leaves them */
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
    const char *positions[3];      /* each request alone; batch-invariant, where that is an axis */
    const char *busy, *threads[2]; /* threads: what differs where two threads of the host have one each */
    const char *foreign;           /* with a plan: tables that do not fit */
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
    /* Gives lengths k of each request for a plan, those of the case, or drawn ones; false: none. */
    bool (*plan_lengths)(struct test_case *c, int k, bool stale, int32_t *lengths);

    /* The rows that are compared: all of a small case, chosen ones of a large one. How many. NULL: all, whole tokens. */
    int64_t (*choose_rows)(struct test_case *c, struct rows *rows);
    /* What the oracle's view of such rows needs beside view_rows. NULL: nothing. */
    void (*narrow)(const struct test_case *c, const struct rows *rows, struct view *view);
    bool (*sees)(const struct test_case *c, int64_t request, int64_t token, int64_t head); /* a key */
    /* Goes through the keys of a row. NULL: results of this operation have no bound of their own. */
    void (*magnitude)(const struct test_case *c, int64_t request, int64_t token, int64_t head,
                      struct magnitude *magnitude);
    /* In place of rows: compares all of it. `inputs` and `oracle` as for compare_oracle. */
    void (*compare)(struct test_case *c, const struct run *run, struct tally *tally, uint64_t inputs,
                    struct oracle *oracle);
    /* Makes a part of a batch-invariant case, with that request (-1: a drawn one). The view is of the whole. An operation without
     * an axis of that name promises the same bits in every case; no request is drawn there. */
    void (*part)(struct test_case *c, int64_t request, const struct run *run, struct part *part);
};

struct subject {
    enum operation of;
    const struct maker *maker;
    const char *values;   /* of all axes (axes_define) */
    const char *defaults; /* what a text leaves out, beside the first values of the axes; NULL: nothing */
    struct grid grid;     /* its functions; what else it has suite_check sets */
    /* Sets the values of axes that the kernel under test has, and what of the grid is another for it; a GPU has one value of
     * threads. NULL: nothing. */
    void (*choose)(struct subject *op, const struct run *run);
    /* Is a case that is not of the grid one for this kernel and device? NULL: each is. */
    bool (*has)(const struct run *run, const int64_t *v);
    /* May the kernel under test refuse the case? NULL: none may. *must: it has to. */
    bool (*leaves)(const struct test_case *c, const struct run *run, bool *must);
    /* What pairs do not reach: texts, each with a seed of its own, and what is made by suite_case. */
    const char *special[TEXTS]; /* ends with NULL */
    void (*more)(struct suite *suite);

    uint64_t faults;     /* bits of enum defect that a kernel could have */
    uint64_t cpu_faults; /* those that only one of the CPU could */
    /* The text of case i for a defect; NULL: no more. NULL: the grid's cases, until one has a place for it. */
    const char *(*fault_case)(const struct run *run, uint64_t i);
    bool (*plant_before)(struct test_case *c, enum defect fault, struct patch *patch);
    bool (*plant_after)(struct test_case *c, enum defect fault);

    struct gpu_cases gpu;
    const char *timed[TEXTS]; /* the same */

    /* What operation_begin makes of its descriptor and its axes. 0: there is none. */
    struct axis axis[GRID_AXES];
    int axes;
    const char *name;
    const struct member *tensor[MAX_TENSORS];
    int tensors, results,
        result[RESULTS];          /* tensors that are written, in their order: out in front, lse last */
    int tables, sink;             /* tables: the first of two of a plan */
    int threads, plan, invariant; /* the axes of that name */
};

/* Bits of `faults`. */
#define FAULT(name) (UINT64_C(1) << FAULT_##name)

extern struct subject dense_decode, sparse_decode, sparse_prefill, mha_forward, mha_backward, merge,
    cache_append, cache_gather, cache_convert;

static inline bool is_result(const struct subject *op, int i)
{
    return (op->tensor[i]->allowed & IS_OUTPUT) != 0;
}

/* Such a tensor is a table of a plan, made by case_plan. */
static inline bool is_table(const struct subject *op, int i)
{
    return op->tables && i >= op->tables && i < op->tables + 2;
}

/* Every operation; NULL: it has no cases here, as plans have none. */
extern struct subject *const subjects[OPERATIONS];

/* ---- Making it -------------------------------------------------------------------------------- */

/* Before its first case. */
void operation_begin(struct subject *op, uint64_t seed);

struct test_case *case_make(const struct subject *op, const struct run *run, const int64_t *v, uint64_t seed);
void case_free(struct test_case *c);

/* The values of a text, over the operation's defaults. */
void case_values(const struct subject *op, const char *text, int64_t v[GRID_AXES]);

/* Tensor i of the case, of the type and the dimensions that its descriptor has, which the arguments then name if it is
 * wanted. Its view is that of the memory. */
void case_tensor(struct test_case *c, int i, enum layout layout, bool wanted);
void case_name(struct test_case *c, int i); /* by the arguments */
bool case_names(const struct test_case *c, int i);

/* The values of an axis of plans. */
enum { PLAN_INSIDE, PLAN_GIVEN, PLAN_STALE };

/* Sinks for the heads of a case: none, drawn ones, or some of them infinite. */
enum { SINK_NONE, SINK_FINITE, SINK_INFINITE };
void case_sinks(struct test_case *c, int64_t kind);

/* A spike: the last values of a vector, which ends there, are 1/2. Two vectors with spikes have a product larger by 8, and
 * the values keep their size, so that the tolerance keeps its meaning. */
enum { SPIKE = 32 };
void case_spike(uint8_t *end, bool fp16);

/* Scores of +inf, by the last two columns of a key or a query: all that a special query has, and those of a special key with
 * all queries. */
void case_infinite(uint8_t *end, bool fp16, bool of_key, bool special);

/* Makes the plan that the case asks for, and passes it. On a GPU the device makes it too, and *same says whether all that
 * were made, in one piece and as tables, have the same bits. */
fmla_status case_plan(struct test_case *c, bool *same);

/* The same plan from host memory: without lengths it would be for memory of the target, so it is given lengths of lists that are
 * full, in *full (guarded_free). */
void case_plan_on_host(struct plan_call *plan, struct guarded *full);
void case_use_tables(struct test_case *c); /* from now on in place of the plan in one piece */

/* Everything but lengths of a plan for a case, and the tensors of lengths that `args` name. */
void case_plan_args(const struct test_case *c, const union call_args *args, struct plan_call *plan);

/* ---- Its memory ------------------------------------------------------------------------------- */

/* Copies it to the device that it is for; nothing to do on the CPU. With `like`, a case of the same shapes and no smaller
 * memory, into the place of that one: a graph of `like` then reads this one. */
void case_to_device(struct test_case *c, const struct test_case *like);
void case_from_device(struct test_case *c);

/* Result k of a call, or of a part of the case, to the device or from there. */
void case_move_result(const struct test_case *c, int k, const fmla_tensor *result, bool up);

/* FNV-1a over everything that the call only reads, canaries included. */
uint64_t case_hash_inputs(const struct test_case *c);

/* A copy of the results' memory, to be freed, and whether they are the same now. */
unsigned char *case_results_copy(const struct test_case *c);
bool case_results_same(const struct test_case *c, const unsigned char *copy);
void case_results_reset(struct test_case *c);
void case_results_intact(const struct test_case *c, const struct run *run, struct tally *tally);

/* Where a row of tensor i is, in the case's memory of it or in another of such dimensions. */
void *case_row(const struct test_case *c, int i, int64_t request, int64_t token, int64_t head);
void *row_in(const struct test_case *c, const struct guarded *guarded, int i, int64_t request, int64_t token,
             int64_t head);

/* ---- Calls ------------------------------------------------------------------------------------ */

/* Members of arguments that are no tensors. */
void *pointer_at(const struct subject *op, const union call_args *args, const char *name);
void set_pointer(const struct subject *op, union call_args *args, const char *name, const void *pointer);
void set_size(const struct subject *op, union call_args *args, const char *name, size_t size);

const fmla_tensor *tensor_at(const struct subject *op, const union call_args *args, int i);
void set_tensor(const struct subject *op, union call_args *args, int i, const fmla_tensor *tensor);

/* Runs it in host memory, with a workspace of exactly the size that was answered, full of `fill` (-1: of anything). */
fmla_status call_on_host(const struct subject *op, union call_args *args, int fill);

/* Arguments on the device: tensors and plan are where their host memory has its copy. */
struct device_args {
    union call_args args;
    fmla_tensor tensor[MAX_TENSORS];
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

/* The same of every input that has a dimension of that name. */
void view_cut(const struct test_case *c, struct view *view, enum dimension dimension, int64_t first,
              int64_t count);

/* Request, token, heads and key head of rows, and the sinks of the heads. */
void view_rows(const struct test_case *c, struct view *view, const struct rows *rows);

/* ---- Checking it ------------------------------------------------------------------------------ */

/* What the oracle made of the rows of a case: made for one kernel, and good for others of the same inputs and rows. */
struct oracle {
    uint64_t inputs;
    int64_t count, first[MOST_ROWS + 1]; /* where the results of each are */
    struct rows rows[MOST_ROWS];
    unsigned char *out; /* NULL: nothing was made */
    float *values[RESULTS];
    int failures;
    void *kept; /* by a maker that compares by itself, which says how it is freed; NULL: nothing */
    void (*forget)(void *kept);
};
void oracle_free(struct oracle *oracle);

/* One case through all that is checked of it. `oracle`, if not NULL, is kept from kernel to kernel. */
void case_check(const struct subject *op, const struct run *run, const int64_t *v, uint64_t seed,
                struct tally *tally, struct oracle *oracle);

/* Does the kernel under test leave the case to another one, as it may or must? Then it says so, by its name. */
bool case_left(struct test_case *c, const struct run *run, struct tally *tally);

/* What the CPU takes for rows besides their keys, in row-keys of the generic kernel: to make, fill, hash, copy and compare them,
 * and to fill the rows of the workspace, twice. Measured with sanitizers, which take longest. */
static inline double case_cost_of_rows(double rows, double of_workspace)
{
    return 32.0 * rows + 2.0 * of_workspace;
}

/* All rows of a case, so many heads together. How many. */
int64_t all_rows(const struct test_case *c, struct rows *rows, int64_t heads);

/* What is in the results against the oracle. `inputs` is the hash of what is read. */
void compare_oracle(struct test_case *c, const struct run *run, struct tally *tally, uint64_t inputs,
                    struct oracle *oracle);

/* The same and whether anything outside of the results was written. */
void compare_whole(struct test_case *c, const struct run *run, struct tally *tally);

/* A request (-1: a drawn one) in a batch of its own has the bits that it has in this one. */
void compare_part(struct test_case *c, int64_t request, const struct run *run, struct tally *tally);

/* How far from the oracle's a value of a row may be for the rounding of its products. */
double compare_bound(const struct test_case *c, int64_t request, int64_t token, int64_t head);

/* Writes to an input, and keeps what was there. False if it was that already. */
bool plant(struct patch *patch, void *at, const void *bytes, size_t size);

/* Kernels that have the same grid, checked case by case. */
enum { SUITE_KERNELS = 8 };
struct suite {
    struct subject *op;
    int kernels;
    struct run run[SUITE_KERNELS];
    struct tally tally[SUITE_KERNELS];
    double seconds[SUITE_KERNELS];
    uint64_t asked; /* cases, of which this process may have a part */
    struct oracle oracle;
};

void suite_check(struct suite *suite);

/* Pages 2^31 bytes apart cost address space on the CPU, and memory on a GPU: has it so many GiB? Says where it has not. */
bool has_far_memory(const struct run *run, size_t gib);

/* A case beside the grid, by every kernel of the suite that has it; `by_oracle`: the oracle itself as the kernel. */
void suite_case(struct suite *suite, const char *text, uint64_t seed, bool by_oracle);

/* The same text with each value that an axis has, whether or not it is of the grid. */
void suite_each(struct suite *suite, int axis, const char *text, uint64_t seed, bool by_oracle);

/* Prints GFLOP/s of the operation's plain shapes. */
void time_cases(const struct subject *op, const struct run *run);

/* What a GPU's kernel promises beyond the values of one call. */
void gpu_check(const struct subject *op, const struct run *run, struct tally *tally);

#endif
