/* SPDX-License-Identifier: MIT
 *
 * An operation in checkattn, and a case of it: a table describes its tensors in guarded memory, so that
 * copying to a device, hashing inputs, resetting and comparing outputs are written once for all
 * operations. An operation adds functions that make a case and compute its rows by the oracle, and its
 * axes (struct subject).
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

enum { RESULTS = 4, MOST_ROWS = 4096, ROW_HEADS = 128, TEXTS = 32 };

/* The axes of an operation: a list of X(enumerator, "name: values"). */
#define AXIS_NAME(name, text) name,
#define AXIS_TEXT(name, text) text "\n"

/* Encodes a shape that is not in the table as a value of the axis: up to three sizes below 2^20. */
static inline int64_t axis_shape(int64_t first, int64_t second, int64_t third)
{
    return INT64_C(1) << 60 | first << 40 | second << 20 | third;
}

/* Decodes such a value, or takes a row of the table. */
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
    const struct run *run;
    struct tally *tally;  /* NULL: nothing about the case is counted */
    int64_t v[GRID_AXES]; /* values of the axes */
    struct random_state random;
    char name[480];
    fmla_device device;          /* runs here */
    struct device_blocks blocks; /* on a GPU: the copies on the device */
    union { /* the dimensions of operations.def, by name; 1 unless an axis or the maker sets them */
        int64_t size[DIMENSIONS];
        struct {
            int64_t none;
#define DIMENSION(name, words) int64_t name;
#include "operations.def"
        };
    };
    bool flat;        /* a batch with one dimension of all tokens counts as one request here */
    fmla_dtype dtype; /* of tensors that allow several types */
    bool wide;        /* integers that allow 32 or 64 bits have 64 */
    int64_t capacity; /* keys that a table has room for; 0: exactly the keys */
    struct guarded tensor[MAX_TENSORS]; /* in the descriptor's order */
    fmla_tensor view[MAX_TENSORS];      /* the arguments point to these */
    /* If the view is of far memory: its strides, and the near stride of dimension 0. */
    int64_t far_strides[MAX_TENSORS][4], strides[MAX_TENSORS];
    union call_args args;  /* host tensors, also on a GPU */
    void *plan, *owned[2]; /* owned: the maker's, freed with the case */
    struct tolerance tolerance[RESULTS];
    double of_product; /* relative error of a product of q and k beyond fp32 rounding */
    double rounded;    /* bound of a row's values for rounded scales; 0: none */
    bool other;        /* inputs outside the table of tolerances */
    bool bounds_out;   /* elements of out also have a bound of their own */
    bool infinite;     /* some rows have a score of +inf */
    bool beyond;       /* scores exceed fp32: rows with a key promise nothing */
    bool large_apart;  /* the cosine omits elements of out above 1 */
    bool captured;     /* on a GPU: each call runs in a graph */
    bool unordered;    /* bits of the first result may vary between runs */
    bool of_batch;     /* bits of a request may depend on the others */
};

/* Returns the number of requests, also if tokens are one dimension and starts delimit the requests. */
static inline int64_t case_requests(const struct test_case *c)
{
    return c->flat ? c->splits - 1 : c->b;
}

/* Rows of one token: heads head, head + step, … */
struct rows {
    int64_t request, token, head, step, heads;
};

/* Part of a case as a separate problem: its arguments, whose tensors can be narrowed. */
struct view {
    union call_args args;
    fmla_tensor tensor[MAX_TENSORS];
    int64_t shape[MAX_TENSORS][GUARDED_DIMS], strides[MAX_TENSORS][GUARDED_DIMS];
    float sinks[ROW_HEADS];
    int32_t count[2];
};

/* Some requests of a case; the last must have the same bits as in the whole case. */
struct part {
    struct view view;
    int64_t request, n;
    int64_t first, tokens;   /* the request's tokens in the case; default: all */
    int64_t first_key, keys; /* likewise */
    struct {
        void *memory; /* memory of a view's tensors, freed afterwards; NULL: none */
        size_t bytes;
    } own[2];
    char what[160]; /* the differing part */
};

/* The original bytes of an input where a defect was planted. */
struct patch {
    void *at;
    unsigned char before[16];
    size_t size;
};

/* ---- An operation ----------------------------------------------------------------------------- */

/* Cases as text (axes_read) for promises of a GPU kernel beyond the values of one call (gpu.c). */
struct gpu_cases {
    const char *bases[8]; /* beginnings of all texts; those the kernel supports are used. Default: "" */
    const char *graph[2]; /* captured; none: no cases */
    const char *next[3];  /* the changes for each replay; default: "" */
    const char *repeats[4];
    const char *positions[3]; /* each request alone; batch-invariant, if that is an axis */
    const char *busy;         /* default: repeats[0] */
    const char *threads[2];   /* busy's change for each of two host threads; default: 128 and 16 heads */
    const char *foreign;      /* with a plan: tables of another batch; NULL: none */
    void (*more)(const struct run *run, struct tally *tally);
};

struct suite;
struct oracle;

/* Functions that make cases of an operation and parts of them. */
struct maker {
    size_t size; /* of a struct whose first member is a test_case */
    /* Draws the values that cases copy: before the first case, and again after every cases_of_a_draw cases
     * (0: not again). NULL: no draw. */
    void (*draw)(uint64_t seed);
    uint64_t cases_of_a_draw;
    /* Makes the case; run, v, random and device are already set. */
    void (*make)(struct test_case *c);
    /* Sets lengths k of each request for a plan: the case's, or random ones if `stale`; returns false if
     * there are none. */
    bool (*plan_lengths)(struct test_case *c, int k, bool stale, int32_t *lengths);

    /* Chooses the rows to compare, all of a small case and some of a large one, and returns their number.
     * NULL: all, whole tokens. */
    int64_t (*choose_rows)(struct test_case *c, struct rows *rows);
    /* Completes the oracle's view of such rows after view_rows, over `change` keys more than they see;
     * returns false if there are not so many, or none. NULL: nothing to do. */
    bool (*narrow)(const struct test_case *c, const struct rows *rows, int64_t change, struct view *view);
    /* Returns the number of keys that a row sees. */
    int64_t (*seen)(const struct test_case *c, int64_t request, int64_t token, int64_t head);
    /* Adds the keys of a row. NULL: results of this operation have no bound of their own. */
    void (*magnitude)(const struct test_case *c, int64_t request, int64_t token, int64_t head,
                      struct magnitude *magnitude);
    /* Compares the whole case instead of rows. `inputs` as for compare_oracle. */
    void (*compare)(struct test_case *c, uint64_t inputs, struct oracle *oracle);
    /* Makes a part of a batch-invariant case with that request (-1: a random one). The view is of the
     * whole case. An operation without an axis of that name promises the same bits in every case; no
     * random request is used there. */
    void (*part)(struct test_case *c, int64_t request, struct part *part);
};

/* What an operation sets: `of`, `maker`, `values` and `faults`, and what differs from the default. A list
 * of texts ends with NULL. */
struct subject {
    enum operation of;
    const struct maker *maker;
    const char *values;   /* all axes (axes_define) */
    const char *defaults; /* values that a text omits. Default: the first of each axis */
    struct grid grid;     /* functions and `dear`; suite_check sets the rest */
    /* Restricts axes and grid functions to the kernel under test, after types and threads. Default: no
     * change. */
    void (*choose)(struct subject *op, const struct run *run);
    /* Returns true if a case outside the grid applies to this kernel and device. Default: always. */
    bool (*has)(const struct run *run, const int64_t *v);
    /* Returns true if the kernel under test may refuse the case; *must: it has to. Default: never. */
    bool (*leaves)(const struct test_case *c, bool *must);
    /* Cases that pairs do not cover: texts, each with its own seed; texts whose whole cases compare the
     * oracle with itself, row by row; and cases made by suite_case. Default: none. */
    const char *special[TEXTS], *by_oracle[TEXTS];
    void (*more)(struct suite *suite);

    uint64_t faults;     /* bit mask of enum defect: defects that a kernel could have */
    uint64_t cpu_faults; /* defects that only a CPU kernel could have, besides COUNT if cases are timed */
    /* Makes cases for a defect by suite_case; those after one that has a place for it are left out.
     * Default: the grid's cases. */
    void (*fault_cases)(struct suite *suite);
    /* Plant a defect and return true, if the case has a place for it. Default: it has none. */
    bool (*plant_before)(struct test_case *c, enum defect fault, struct patch *patch);
    bool (*plant_after)(struct test_case *c, enum defect fault);

    struct gpu_cases gpu;     /* default: none */
    const char *timed[TEXTS]; /* on a CPU. Default: none */

    /* Set by operation_begin from the descriptor and the axes. 0: absent. */
    struct axis axis[GRID_AXES];
    int axes;
    const char *name;
    const struct member *tensor[MAX_TENSORS];
    int tensors, results, result[RESULTS]; /* outputs in order: out first, lse last */
    int tables, sink;                      /* tables: first of a plan's two */
    int threads, plan, invariant, dtype;   /* axes of these names */
};

/* Bit of `faults`. */
#define FAULT(name) (UINT64_C(1) << FAULT_##name)

/* Functions of a maker that have these names, for rows compared one by one. */
#define ROWS_BY_NAME .choose_rows = choose_rows, .narrow = narrow, .magnitude = magnitude_of

extern struct subject dense_decode, sparse_decode, sparse_prefill, mha_forward, mha_backward, merge,
    cache_append, cache_gather, cache_convert;

static inline bool is_result(const struct subject *op, int i)
{
    return (op->tensor[i]->allowed & IS_OUTPUT) != 0;
}

/* Returns true if the tensor is a table of a plan, which case_plan makes. */
static inline bool is_table(const struct subject *op, int i)
{
    return op->tables && i >= op->tables && i < op->tables + 2;
}

/* Every operation; NULL: no cases here, for example plans. */
extern struct subject *const subjects[OPERATIONS];

/* ---- Making it -------------------------------------------------------------------------------- */

/* Prepares an operation; call it before its first case. */
void operation_begin(struct subject *op, uint64_t seed);

/* Makes a case and counts it. run and tally must stay valid. */
struct test_case *case_make(const struct subject *op, const struct run *run, struct tally *tally,
                            const int64_t *v, uint64_t seed);
void case_free(struct test_case *c);

/* Report and count what is wrong with a case; a call that was refused. */
void failed(const struct test_case *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
void must(const struct test_case *c, fmla_status status);

/* Sets the values of a text, over the operation's defaults. */
void case_values(const struct subject *op, const char *text, int64_t v[GRID_AXES]);

/* Makes tensor i of the case with the type and dimensions of its descriptor, and sets its argument if
 * `wanted`. Its view is that of the memory. */
void case_tensor(struct test_case *c, int i, enum layout layout, bool wanted);
void case_name(struct test_case *c, int i); /* sets its argument */
bool case_names(const struct test_case *c, int i);

/* Spreads a tensor along dimension 0, `between` bytes apart, after `front` bytes, and points its view
 * there. */
void case_spread(struct test_case *c, int i, size_t front, size_t between);

/* Values of the axis of plans. */
enum { PLAN_INSIDE, PLAN_GIVEN, PLAN_STALE };

/* Values of an axis of inputs. */
enum {
    INPUTS_NORMAL,
    INPUTS_SPIKED,   /* keys at borders weigh more */
    INPUTS_STEEP,    /* scores of ±200: overflow unless the maximum is subtracted */
    INPUTS_NAN_ENDS, /* causal, several tokens: a NaN as last key must not affect rows that may not see it */
    INPUTS_INFINITE, /* not in a grid: scores of +inf, a whole row or one among others */
    INPUTS_BEYOND    /* not in a grid: a softmax_scale of 3e38, whose scores exceed fp32 */
};

/* Sinks for the heads of a case: none, random ones, or some infinite. */
enum { SINK_NONE, SINK_FINITE, SINK_INFINITE, SINK_HIGH /* of some heads far above lse */ };
void case_sinks(struct test_case *c, int64_t kind);

/* Draws numbers from N(mean, deviation²), clamped to ±1, in both 16-bit types: once, for cases to copy
 * vectors from random places. */
void draw_numbers(struct random_state *random, float mean, float deviation, int count, uint16_t *bf16,
                  uint16_t *fp16);

/* Returns true for keys next to the border of a block of 64, and for the last of `count`. Spiked inputs
 * give them more weight, so that losing one is visible even among thousands. */
static inline bool is_border(int64_t key, int64_t count)
{
    return key % 64 == 0 || key % 64 == 63 || key + 1 == count;
}

/* Writes a spike: sets the last values of a vector, which ends at `end`, to 1/2. The product of two spiked
 * vectors is larger by 8, while values keep their size, so that the tolerance remains valid. */
enum { SPIKE = 32 };
void case_spike(uint8_t *end, bool fp16);

/* Makes scores of +inf through the last two columns of keys and queries: all scores of a special query,
 * and those of a special key with all queries. */
void case_infinite(uint8_t *end, bool fp16, bool of_key, bool special);

/* Makes the case's plan, in one buffer and as tables, and sets its argument. On a GPU the device makes
 * both too. Reports what is wrong, for example that two of them have other bits, and then returns false. */
bool case_plan(struct test_case *c);

/* Makes a plan and its tables on the device, from lengths there (without memory: none), and returns how they
 * differ from the host's plan; NULL: they do not. */
const char *plan_differs(const struct plan_call *call, struct guarded lengths[2], const void *plan,
                         size_t bytes);

/* Changes the arguments to make the plan from host memory: without lengths it would be a plan in the
 * target's memory, so it gets the lengths of full lists, in *full (guarded_free). */
void case_plan_on_host(struct plan_call *plan, struct guarded *full);
void case_use_tables(struct test_case *c); /* replace the plan in one buffer from now on */

/* Sets the arguments of a case's plan, except lengths, and the length tensors that `args` name. */
void case_plan_args(const struct test_case *c, const union call_args *args, struct plan_call *plan);

/* ---- Its memory ------------------------------------------------------------------------------- */

/* Copies the case to its device; does nothing on the CPU. With `like`, a case of the same shapes whose
 * memory is not smaller, into that case's place: a graph of `like` then reads this case. */
void case_to_device(struct test_case *c, const struct test_case *like);
void case_from_device(struct test_case *c);

/* Copies result k of a call, or of a part of the case, to the device or back. */
void case_move_result(const struct test_case *c, int k, const fmla_tensor *result, bool up);

/* Returns FNV-1a over everything that the call only reads, canaries included. */
uint64_t case_hash_inputs(const struct test_case *c);

/* Return a copy of the results' memory, to be freed, and whether the results still equal it. */
unsigned char *case_results_copy(const struct test_case *c);
bool case_results_same(const struct test_case *c, const unsigned char *copy);
void case_results_reset(struct test_case *c);
void case_results_intact(const struct test_case *c);

/* Return the address of a row of tensor i, in the case's memory or in other memory of the same dimensions. In
 * keys of dense MHA, token and head are those of a key. */
void *case_row(const struct test_case *c, int i, int64_t request, int64_t token, int64_t head);
void *row_in(const struct test_case *c, const struct guarded *guarded, int i, int64_t request, int64_t token,
             int64_t head);

/* ---- Calls ------------------------------------------------------------------------------------ */

/* Arguments other than tensors. */
void *pointer_at(const struct subject *op, const union call_args *args, const char *name);
void set_pointer(const struct subject *op, union call_args *args, const char *name, const void *pointer);
void set_size(const struct subject *op, union call_args *args, const char *name, size_t size);

const fmla_tensor *tensor_at(const struct subject *op, const union call_args *args, int i);
void set_tensor(const struct subject *op, union call_args *args, int i, const fmla_tensor *tensor);

/* Runs the call in host memory with a workspace of exactly the queried size, filled with `fill` (-1:
 * random bytes). */
fmla_status call_on_host(const struct subject *op, union call_args *args, int fill);

/* Arguments on the device: tensors and plan are the device's copies. */
struct device_args {
    union call_args args;
    fmla_tensor tensor[MAX_TENSORS];
};
void device_args_make(struct device_args *to, const struct test_case *c, const union call_args *from);

/* Like call_on_host, on the device; results are copied from the host before and to the host afterwards. */
fmla_status call_on_device(const struct test_case *c, struct device_args *there, const union call_args *from,
                           int fill);

/* Runs the call on the case's device; `args` may point to views of its tensors. */
fmla_status case_run(const struct test_case *c, union call_args *args, int fill);

/* Sets *name to the kernel that would run the case. */
fmla_status case_kernel(const struct test_case *c, const char **name);

/* Returns whether the kernel under test takes a case of these values, which is not counted. */
fmla_status case_asked(const struct subject *op, const struct run *run, const int64_t *v);

/* ---- Parts ------------------------------------------------------------------------------------ */

/* Makes a view of the whole case; `near`: of the memory it was made in, so that kernel and oracle cannot
 * share a defect in far pages. */
void view_make(const struct test_case *c, struct view *view, bool near);

/* Narrows dimension `dim` of tensor i to `count` entries from `first` on. */
void view_narrow(struct view *view, int i, int dim, int64_t first, int64_t count);

/* Does the same for every input that has the dimension. */
void view_narrow_all(const struct test_case *c, struct view *view, enum dimension dimension, int64_t first,
                     int64_t count);

/* Narrows the view to the request, token, heads and key head of rows, and the sinks of the heads. */
void view_rows(const struct test_case *c, struct view *view, const struct rows *rows);

/* ---- Checking it ------------------------------------------------------------------------------ */

/* What the oracle computes of a case, such as rows: items of `bytes` without padding, each with a result of
 * `of_result` bytes, which are zeros before. */
struct items {
    const void *items;
    int64_t count;
    size_t bytes, of_result;
    fmla_status (*compute)(const struct test_case *c, const void *item, void *result);
};

/* The oracle's results for the items of a case: computed for one kernel, reused for others with the same
 * inputs and items. */
struct oracle {
    uint64_t inputs;
    struct items of; /* the items are a copy */
    void *results;   /* NULL: none */
    int refused;
};
void oracle_ask(struct oracle *oracle, const struct test_case *c, uint64_t inputs, const struct items *items);
void oracle_free(struct oracle *oracle);

/* Runs all checks of one case. `oracle`, if not NULL, is kept between kernels. */
void case_check(const struct subject *op, const struct run *run, const int64_t *v, uint64_t seed,
                struct tally *tally, struct oracle *oracle);

/* Returns true if the kernel under test refuses the case, as it may or must; the refusal has to name the
 * kernel. */
bool case_left(struct test_case *c);

/* Returns the CPU's cost of the rows of each request besides their keys, in row-keys of the generic
 * kernel: making, filling, hashing, copying and comparing them, and filling those of `slots` in the
 * workspace twice. Measured with sanitizers, which are the slowest. */
static inline double case_cost_of_rows(int64_t b, int64_t rows, int64_t slots)
{
    return 32.0 * (double)(b * rows) + 2.0 * (double)(slots * rows);
}

/* Sets all rows of a case, `heads` heads together, and returns their number. */
int64_t all_rows(const struct test_case *c, struct rows *rows, int64_t heads);

/* Of a large case of dense attention, CHOSEN_ROWS rows are compared; the last DRAWN_ROWS of them are
 * random. */
enum { CHOSEN_ROWS = 84, DRAWN_ROWS = 64 };
bool all_are_compared(const struct test_case *c, int64_t keys);
int64_t draw_rows(struct test_case *c, struct rows *rows, int64_t count); /* from `count` on */

/* Recomputes a row over a key fewer or, if causal, more than it sees: the output of a kernel that drops a key
 * or has a wrong mask. */
bool plant_key(struct test_case *c, enum defect fault);

/* Compares the results with the oracle. `inputs` is the hash of the inputs. */
void compare_oracle(struct test_case *c, uint64_t inputs, struct oracle *oracle);

/* Compares the results with the oracle and checks that nothing outside them was written. */
void compare_whole(struct test_case *c);

/* Checks that a request (-1: a random one) alone in a batch has the same bits as in this batch. */
void compare_part(struct test_case *c, int64_t request);

/* Returns the error that the rounding of products allows to a value of a row. */
double compare_bound(const struct test_case *c, int64_t request, int64_t token, int64_t head);

/* Writes to an input and keeps the original bytes. Returns false if they were the same. */
bool plant(struct patch *patch, void *at, const void *bytes, size_t size);

/* Kernels with the same grid, checked case by case. */
enum { SUITE_KERNELS = 8 };
struct suite {
    struct subject *op;
    int kernels;
    struct run run[SUITE_KERNELS];
    struct tally tally[SUITE_KERNELS];
    uint64_t asked; /* cases, of which this process may run a part */
    struct oracle oracle;
};

void suite_check(struct suite *suite);

/* Pages 2^31 bytes apart need address space on the CPU and memory on a GPU: returns true if there are
 * `gib` GiB. Reports a lack. */
bool has_far_memory(const struct run *run, size_t gib);

/* Runs a case beside the grid on every kernel of the suite that has it; `by_oracle`: with the oracle as
 * the kernel. */
void suite_case(struct suite *suite, uint64_t seed, bool by_oracle, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Times a CPU kernel on the operation's plain shapes and returns how many rates are above what the machine
 * can do (rate.c). */
int time_cases(const struct subject *op, const struct run *run);

/* Checks the promises of a GPU kernel beyond the values of one call. */
void gpu_check(const struct subject *op, const struct run *run, struct tally *tally);

#endif
