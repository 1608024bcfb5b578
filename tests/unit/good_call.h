/* SPDX-License-Identifier: MIT
 *
 * A valid call, in memory laid out by its operation's descriptor. A test changes one thing about it and
 * says whether the call must then be refused (REFUSED) or accepted (TAKEN).
 */
#ifndef FMLA_GOOD_CALL_H
#define FMLA_GOOD_CALL_H

#include "arguments.h"
#include "described.h"

#include <math.h>

enum { TAIL = 64 /* bytes after a struct, as from a caller with a newer header */, PATTERN = 0xc3 };
enum { ROWS = 3 /* rows of a plan's table */, TOPK = 40, EXTRA = 10 /* entries of lists */ };
enum { SCRATCH = 1 << 23, SCRATCH_WATCHED = 1 << 12 };

/* The workspace, or the memory of a plan. */
static _Alignas(64) char scratch[SCRATCH];

/* Consistent sizes for any operation; a test overrides some. */
static const struct layout good_layout =
    DESIGNATED(.b = 2, .s_q = 2, .h_q = 4, .h_kv = 2, .d_qk = 576, .d_v = 512, .s_kv = 60, .pages = 6,
               .page_size = 16, .max_pages = 3, .one = 1, .one_head = 1, .extra_pages = 3,
               .extra_page_size = 5, .topk = TOPK, .extra_topk = EXTRA, .n = 3, .n_out = 3, .tokens = 3,
               .width = 512, .rope = 64, .normed = 512, .max_positions = 5, .turned = 64, .rows = ROWS,
               .fields = FMLA_PARTITION_FIELDS, .splits = 3, .type = {FMLA_TYPE_BFLOAT, 16, 1},
               .format = FMLA_KV_BF16);

/* A call that is valid after set_up. */
struct good_call {
    enum operation operation;
    const char *elsewhere; /* the argument named in errors if nothing runs on the device */
    void (*set_up)(void);
    bool partly; /* it writes only the part of its outputs that its arguments select */
    /* The following are set by begin(). */
    struct layout layout;
    unsigned absent; /* bit mask of tensors */
    void *args;
    struct held held[MAX_TENSORS]; /* in the descriptor's order, like: */
    char *memory[MAX_TENSORS];     /* the tensor and one element more */
    size_t room[MAX_TENSORS];
};

#define BIT(tensor) (1u << (tensor))

static inline void *option_of(const struct good_call *good, const struct member *m)
{
    return (char *)good->args + m->offset;
}

static inline const fmla_tensor **tensor_of(const struct good_call *good, const struct member *m)
{
    return option_of(good, m);
}

/* Returns the address of an option. */
static inline void *option(const struct good_call *good, const char *name)
{
    return option_of(good, described_member(good->operation, name));
}

static inline void put_int(const struct good_call *good, const char *name, int32_t value)
{
    memcpy(option(good, name), &value, sizeof value);
}

/* Returns memory of exactly that many bytes with the largest alignment. */
static inline void *exactly(size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes)) abort();
    return memory;
}

/* ---- Making a call --------------------------------------------------------------------------- */

static inline void fill(const struct good_call *good, const struct member *m, int which)
{
    const fmla_dtype dtype = good->held[which].tensor.dtype;
    char *memory = good->memory[which];
    memset(memory, m->allowed & IS_OUTPUT ? PATTERN : 0, good->room[which]);
    if (m->allowed & IS_OUTPUT) return;
    for (size_t i = 0; dtype.bits == 16 && i < good->room[which] / 2; i++)
        memcpy(memory + 2 * i, &(uint16_t){(uint16_t)(0x3b00 + i % 89)}, 2);
    for (size_t i = 0; dtype.code == FMLA_TYPE_FLOAT && dtype.bits == 32 && i < good->room[which] / 4; i++)
        memcpy(memory + 4 * i, &(float){(float)(i % 17) - 8.0f}, 4);
}

/* Lays out the tensors as the layout says. A tensor without elements has no data; one too large for any
 * machine keeps its memory. */
static inline void lay_out_in(struct good_call *good, bool anew)
{
    const struct member *m;
    int64_t shape[MAX_DIMENSIONS];
    for (int which = 0; (m = described_tensor(good->operation, which)); which++) {
        struct held *held = &good->held[which];
        const fmla_dtype dtype = described_dtype(m, &good->layout);
        held_set(held, good->memory[which], dtype, described_shape(m, &good->layout, shape), shape);
        *tensor_of(good, m) = good->absent & BIT(which) ? NULL : &held->tensor;
        double bytes = 1.0 * dtype.bits / 8;
        for (int i = 0; i < held->tensor.ndim; i++) bytes *= (double)shape[i];
        if (bytes == 0.0) held->tensor.data = NULL;
        const size_t needed = bytes < 1e8 ? (size_t)bytes + dtype.bits / 8 : 0;
        if (bytes == 0.0 || needed == good->room[which] || (!anew && needed < good->room[which])) continue;
        free(good->memory[which]);
        good->memory[which] = held->tensor.data = exactly(needed);
        good->room[which] = needed;
        fill(good, m, which);
    }
}

/* Lays the tensors out in their existing memory where possible. */
static inline void lay_out(struct good_call *good)
{
    lay_out_in(good, false);
}

static inline void resize(struct good_call *good, enum dimension name, int64_t size)
{
    good->layout.size[name] = size;
    lay_out(good);
}

/* For set_up. absent: the tensors left out. */
static inline void begin(struct good_call *good, const struct layout *layout, unsigned absent)
{
    const struct member *m;
    const size_t size = descriptors[good->operation].size;
    if (!good->args) good->args = malloc(size + TAIL);
    if (!good->args) abort();
    memset(good->args, 0, size + TAIL);
    memcpy(good->args, &size, sizeof size);
    good->layout = *layout, good->absent = absent;
    lay_out_in(good, true);
    for (int which = 0; (m = described_tensor(good->operation, which)); which++) fill(good, m, which);
    const bool plans = described_is_plan(good->operation);
    if (plans) memset(scratch, PATTERN, SCRATCH_WATCHED);
    if (!described_asks(good->operation)) return;
    *(void **)option(good, plans ? "plan" : "workspace") = scratch;
    *(size_t *)option(good, plans ? "plan_size" : "workspace_size") = plans ? SCRATCH_WATCHED : SCRATCH;
}

/* Defines a set_up of a variant. */
#define SET_UP(name, call)                                                                                   \
    static void name(void)                                                                                   \
    {                                                                                                        \
        call;                                                                                                \
    }

/* Puts integers into a tensor. */
#define PUT(held, type, ...)                                                                                 \
    memcpy((held).tensor.data, (const type[]){__VA_ARGS__}, sizeof((const type[]){__VA_ARGS__}))

static inline void everywhere(struct good_call *good, int32_t device_type, int32_t id)
{
    for (int i = 0; i < MAX_TENSORS; i++) good->held[i].tensor.device = (fmla_device){device_type, id};
}

/* ---- How it ends ----------------------------------------------------------------------------- */

/* Counts elements of the outputs that are unchanged or, with `behind`, changed elements after them. */
static inline int64_t count_outputs(const struct good_call *good, bool behind)
{
    const struct member *m;
    int64_t found = 0;
    for (int which = 0; (m = described_tensor(good->operation, which)); which++) {
        const struct held *held = &good->held[which];
        const size_t width = held->tensor.dtype.bits / 8;
        int64_t elements = 1; /* from the first to one past the last */
        for (int i = 0; i < held->tensor.ndim; i++)
            elements = held->shape[i] && elements ? elements + (held->shape[i] - 1) * held->strides[i] : 0;
        if (!*tensor_of(good, m)) elements = 0;
        for (size_t at = 0; (m->allowed & IS_OUTPUT) && at + width <= good->room[which]; at += width) {
            bool same = true;
            for (size_t i = 0; i < width; i++) same &= (unsigned char)good->memory[which][at + i] == PATTERN;
            found += behind ? (int64_t)(at / width) >= elements && !same
                            : (int64_t)(at / width) < elements && same;
        }
    }
    return found;
}

static inline bool untouched(const struct good_call *good)
{
    const struct member *m;
    for (int which = 0; (m = described_tensor(good->operation, which)); which++) {
        for (size_t i = 0; (m->allowed & IS_OUTPUT) && i < good->room[which]; i++)
            if ((unsigned char)good->memory[which][i] != PATTERN) return false;
    }
    for (int i = 0; described_is_plan(good->operation) && i < SCRATCH_WATCHED; i++)
        if ((unsigned char)scratch[i] != PATTERN) return false;
    return true;
}

/* Checks that every element of the outputs was written (any, for some calls), and nothing after them. */
static inline void check_written(const struct good_call *good, const char *label)
{
    const int64_t stayed = count_outputs(good, false), behind = count_outputs(good, true);
    CHECK(good->partly ? !untouched(good) : stayed == 0, "%s: %" PRId64 " elements were not written", label,
          stayed);
    CHECK(behind == 0, "%s: %" PRId64 " elements were written past the end", label, behind);
}

/* Checks that all rows are those of rows without a key. */
static inline void check_no_key(const struct good_call *good, const char *label)
{
    const struct member *m;
    int64_t wrong = 0;
    for (int which = 0; (m = described_tensor(good->operation, which)); which++) {
        const fmla_dtype dtype = good->held[which].tensor.dtype;
        const float wide = strcmp(m->name, "lse") == 0           ? INFINITY
                           : strcmp(m->name, "d_attn_sink") == 0 ? 0.0f
                                                                 : -INFINITY;
        if (!(m->allowed & IS_OUTPUT)) continue;
        for (size_t i = 0; dtype.bits == 16 && i < good->room[which] / 2 - 1; i++)
            wrong += (((const uint16_t *)(const void *)good->memory[which])[i] & 0x7fff) != 0;
        for (size_t i = 0; dtype.bits == 32 && i < good->room[which] / 4 - 1; i++)
            wrong += ((const float *)(const void *)good->memory[which])[i] != wide;
    }
    CHECK(wrong == 0, "%s: %" PRId64 " elements are not those of a row without keys", label, wrong);
}

/* Checks that the call and its queries fail alike; or only the call, if the queries do not look at the
 * error. */
static inline void check_refused(const struct good_call *good, const char *label, fmla_status status,
                                 const char *argument, const char *words, bool only_call)
{
    const char *op = descriptors[good->operation].name;
    for (int question = 0; question < QUESTIONS && described_asks(good->operation); question++) {
        const struct answer before = {12345, 54321, {4711, 0}, "untouched"};
        struct answer answer = before;
        const fmla_status asked = described_ask(good->operation, question, good->args, &answer);
        if (only_call) {
            CHECK(asked == FMLA_OK, "%s: question %d: %s", label, question, fmla_last_error());
            continue;
        }
        check_rejected(label, asked, status, op, argument, words);
        CHECK(!memcmp(&answer, &before, sizeof answer), "%s: a failed question %d was answered", label,
              question);
    }
    check_rejected(label, described_run(good->operation, good->args), status, op, argument, words);
    CHECK(untouched(good), "%s: a failed call wrote", label);
}

/* The valid call with a change that a descriptor cannot express. */
#define REFUSED_AS(good, status, only_call, argument, words, ...)                                            \
    ((good).set_up(), __VA_ARGS__, check_refused(&(good), #__VA_ARGS__, status, argument, words, only_call))
#define REFUSED(good, argument, words, ...)                                                                  \
    REFUSED_AS(good, FMLA_INVALID_ARGUMENT, false, argument, words, __VA_ARGS__)
#define REFUSED_CALL(good, argument, words, ...)                                                             \
    REFUSED_AS(good, FMLA_INVALID_ARGUMENT, true, argument, words, __VA_ARGS__)
#define REFUSED_HERE(good, argument, words, ...)                                                             \
    REFUSED_AS(good, FMLA_UNSUPPORTED, false, argument, words, __VA_ARGS__)

/* Checks that the call works within the queried workspace. */
static inline void check_taken(const struct good_call *good, const char *label)
{
    struct answer answer = {0};
    void *workspace = NULL;
    CHECK(described_ask(good->operation, ASK_BYTES, good->args, &answer) == FMLA_OK, "%s: size: %s", label,
          fmla_last_error());
    if (described_member(good->operation, "workspace")) {
        const size_t alignment = answer.alignment;
        CHECK(alignment && !(alignment & (alignment - 1)), "%s: alignment is %zu", label, alignment);
        workspace = exactly(answer.bytes);
        *(void **)option(good, "workspace") = workspace;
        *(size_t *)option(good, "workspace_size") = answer.bytes;
    }
    const fmla_status status = described_run(good->operation, good->args);
    CHECK(status == FMLA_OK, "%s: %s: %s", label, fmla_status_name(status), fmla_last_error());
    free(workspace);
}

#define TAKEN(good, label, ...)                                                                              \
    ((good).set_up(), __VA_ARGS__, check_taken(&(good), label), check_written(&(good), label))

#endif
