/* SPDX-License-Identifier: MIT
 *
 * What every operation must refuse, made from its descriptor (src/operations.def): every tensor in every way in which a tensor can be
 * wrong, every named dimension that disagrees or is out of its range, every option out of its bounds, every struct size, kernel name and
 * workspace. A test brings a good call; what its descriptor cannot say are mutations of its own.
 */
#ifndef FMLA_REFUSALS_H
#define FMLA_REFUSALS_H

#include "arguments.h"

#include "operations.h"

#include <math.h>
#include <stdbool.h>

/* A call that is good in every respect, after set_up. Tensors that it leaves out are NULL in its struct. */
struct good_call {
    enum operation operation;
    char *args; /* the struct, with TAIL bytes behind it as of a caller with a later header */
    struct held *held[MAX_TENSORS]; /* in the order of the descriptor; NULL where it has none */
    void (*set_up)(void);
    fmla_status (*run)(const void *args);
    /* NULL where the operation has none */
    fmla_status (*size)(const void *args, size_t *bytes, size_t *alignment);
    fmla_status (*kernel)(const void *args, const char **name);
    /* Memory of the outputs, with what stands behind it: PATTERN until a call works. */
    struct {
        const void *memory;
        size_t bytes;
    } outputs[3];
};

enum { TAIL = 64, PATTERN = 0xc3 };

/* The functions of an operation as struct good_call has them. */
#define RUN_OF(op)                                                                                           \
    static fmla_status run_##op(const void *args)                                                            \
    {                                                                                                        \
        return fmla_##op(args);                                                                              \
    }
#define QUESTIONS_OF(op)                                                                                     \
    static fmla_status size_##op(const void *args, size_t *bytes, size_t *alignment)                         \
    {                                                                                                        \
        return fmla_##op##_workspace_size(args, bytes, alignment);                                           \
    }                                                                                                        \
    static fmla_status kernel_##op(const void *args, const char **name)                                      \
    {                                                                                                        \
        return fmla_##op##_kernel(args, name);                                                               \
    }

static inline const struct descriptor *descriptor_of(const struct good_call *good)
{
    return &descriptors[good->operation];
}

static inline bool untouched(const struct good_call *good)
{
    for (int i = 0; i < 3; i++) {
        const unsigned char *bytes = good->outputs[i].memory;
        for (size_t k = 0; k < good->outputs[i].bytes; k++)
            if (bytes[k] != PATTERN) return false;
    }
    return true;
}

/* The call, and unless only it reads what is wrong, the questions for its workspace and its kernel, must fail alike. */
static inline void check_refused(const struct good_call *good, const char *label, fmla_status status,
                                 const char *argument, const char *words, bool only_call)
{
    const char *op = descriptor_of(good)->name;
    if (!only_call && good->size) {
        size_t bytes = 12345, alignment = 54321;
        check_rejected(label, good->size(good->args, &bytes, &alignment), status, op, argument, words);
        CHECK(bytes == 12345 && alignment == 54321, "%s: a failed question answered %zu, %zu", label, bytes,
              alignment);
    }
    if (good->kernel) {
        /* Whether a kernel is named follows what a size is answered for, the size's own overflow aside. */
        const char *kernel = "untouched";
        const fmla_status named = good->kernel(good->args, &kernel);
        CHECK((named == FMLA_OK) == (strcmp(kernel, "untouched") != 0), "%s: status %d, kernel %s", label,
              named, kernel);
        if (named != FMLA_OK) check_rejected(label, named, status, op, argument, words);
    }
    check_rejected(label, good->run(good->args), status, op, argument, words);
    CHECK(untouched(good), "%s: a failed call wrote to its outputs", label);
}

/* ---- Tensors --------------------------------------------------------------------------------- */

static inline const fmla_tensor **tensor_member(const struct good_call *good, const struct member *m)
{
    return (const fmla_tensor **)(void *)(good->args + m->offset);
}

/* For set_up: the struct's tensors are those that are held. */
static inline void attach(const struct good_call *good)
{
    int which = 0;
    for (const struct member *m = descriptor_of(good)->members; m->name; m++)
        if (m->kind == MEMBER_TENSOR) {
            const struct held *held = good->held[which++];
            *tensor_member(good, m) = held ? &held->tensor : NULL;
        }
}

/* The tensors of the descriptor that the good call has: `which` counts all. */
#define EACH_TENSOR(good, m, which)                                                                          \
    int which = -1;                                                                                          \
    for (const struct member *m = descriptor_of(good)->members; m->name; m++)                                \
        if (m->kind == MEMBER_TENSOR && (which++, (good)->set_up(), *tensor_member(good, m)))

static inline const char *dtype_words(const fmla_dtype *dtype)
{
    return dtype->code == FMLA_TYPE_BFLOAT                       ? "bfloat16"
           : dtype->code == FMLA_TYPE_FLOAT && dtype->bits == 16 ? "float16"
           : dtype->code == FMLA_TYPE_FLOAT                      ? "float32"
           : dtype->bits == 8                                    ? "a type of one byte"
           : dtype->bits == 64                                   ? "int64"
                                                                 : "int32";
}

/* The types that a message lists; those of the call where they depend on another argument. */
static inline void allowed_words(const struct member *m, const struct held *held, char words[64])
{
    static const char *const names[] = {"bfloat16", "float16", "float32", "int32", "int64"};
    words[0] = 0;
    if (m->allowed & (ALLOW_SAME | IS_CACHE)) {
        snprintf(words, 64, "%s", dtype_words(&held->tensor.dtype));
        return;
    }
    for (int i = 0; i < 5; i++)
        if (m->allowed & 1u << i)
            snprintf(words + strlen(words), 64 - strlen(words), "%s%s", *words ? " or " : "", names[i]);
}

static inline bool only_of_call(int fault)
{
    return fault == FAULT_DATA_NULL || fault == FAULT_DATA_MISALIGNED || fault == FAULT_OFFSET_MISALIGNED;
}

static inline void refuse_tensors(const struct good_call *good)
{
    char words[160], dtypes[64], label[96];
    EACH_TENSOR(good, m, which)
    {
        struct held *held = good->held[which];
        allowed_words(m, held, dtypes);
        const struct argument argument = {m->name,
                                          held,
                                          tensor_member(good, m),
                                          dtypes,
                                          (m->allowed & ALLOW_NULL) != 0,
                                          (m->allowed & IS_OUTPUT) != 0};
        for (int fault = 0; fault < FAULTS; fault++) {
            good->set_up();
            const char *what = spoil(&argument, fault, words);
            if (!what) continue;
            /* Of bytes a misplaced one is told in units of the format, if at all. */
            if (held->tensor.dtype.bits == 8 && only_of_call(fault) && fault != FAULT_DATA_NULL) continue;
            snprintf(label, sizeof label, "%s: %s", m->name, what);
            check_refused(good, label, FMLA_INVALID_ARGUMENT, m->name, words, only_of_call(fault));
        }
    }
}

/* One tensor elsewhere: the message names it, or, where it is the first, the second; and both devices. */
static inline void refuse_devices(const struct good_call *good)
{
    char label[96];
    const char *second = NULL;
    bool first = true;
    EACH_TENSOR(good, m, which)
    {
        if (!first && !second) second = m->name;
        if (!first) {
            good->held[which]->tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 3};
            snprintf(label, sizeof label, "%s on cuda:3", m->name);
            check_refused(good, label, FMLA_INVALID_ARGUMENT, m->name, "cuda:3|cpu", false);
        }
        first = false;
    }
    EACH_TENSOR(good, n, where)
    {
        good->held[where]->tensor.device.device_type = FMLA_DEVICE_CUDA;
        if (second)
            check_refused(good, "the first on cuda", FMLA_INVALID_ARGUMENT, second, "cpu|cuda:0", false);
        break;
    }
}

/* ---- Named dimensions ------------------------------------------------------------------------ */

/* The name of a dimension as this call has it; DIM__ where a cache's bytes are a token's. */
static inline enum dimension name_at(const struct good_call *good, const struct member *m, int which, int i)
{
    const fmla_tensor *t = &good->held[which]->tensor;
    if (i >= t->ndim) return DIM__;
    if (m->allowed & OR_FLAT && t->ndim == 3) return flat_dimensions[i];
    if (m->allowed & IS_CACHE && t->dtype.bits == 8 && i == 3) return DIM__;
    return m->dimensions[i];
}

/* The tensor that is named where dimension `name`, which `after` binds, is another there; NULL: nothing else has it. */
static inline const char *next_that_has(const struct good_call *good, const struct member *after,
                                        enum dimension name)
{
    const char *found = NULL;
    bool behind = false;
    EACH_TENSOR(good, m, which)
    {
        for (int i = 0; behind && !found && i < MAX_DIMENSIONS; i++)
            if (name_at(good, m, which, i) == name) found = m->name;
        behind |= m == after;
    }
    return found;
}

static inline void refuse_size(const struct good_call *good, int which, int dimension, int64_t size,
                               const char *argument, const char *dimension_name)
{
    char label[96], words[96];
    good->set_up();
    const int64_t before = good->held[which]->shape[dimension];
    if (size < 0 || size == before) return;
    good->held[which]->shape[dimension] = size;
    snprintf(label, sizeof label, "%s: %s of %" PRId64, argument, dimension_name, size);
    snprintf(words, sizeof words, "%s (dimension ", dimension_name);
    check_refused(good, label, FMLA_INVALID_ARGUMENT, argument, words, false);
    snprintf(words, sizeof words, "%" PRId64, size);
    CHECK(strstr(fmla_last_error(), words), "%s: \"%s\" does not say %s", label, fmla_last_error(), words);
}

static inline void refuse_sizes(const struct good_call *good)
{
    bool bound[DIMENSIONS] = {false};
    EACH_TENSOR(good, m, which)
    {
        const int rank = good->held[which]->tensor.ndim;
        for (int i = 0; i < rank; i++) {
            const enum dimension name = name_at(good, m, which, i);
            const char *called = dimension_words[name];
            if (name == DIM__) continue;
            good->set_up();
            const int64_t size = good->held[which]->shape[i];
            if (bound[name]) {
                refuse_size(good, which, i, size + 1, m->name, called);
                refuse_size(good, which, i, size - 1, m->name, called);
                continue;
            }
            bound[name] = true;
            for (const struct range *r = descriptor_of(good)->ranges; r->dimension != DIM__; r++) {
                if (r->dimension != name) continue;
                refuse_size(good, which, i, r->low - 1, m->name, called);
                if (r->high < INT64_MAX / 4096) refuse_size(good, which, i, r->high + 1, m->name, called);
            }
            const char *other = next_that_has(good, m, name);
            if (other) {
                good->set_up();
                good->held[which]->shape[i] = size + 1;
                check_refused(good, "another size where it is bound", FMLA_INVALID_ARGUMENT, other, called,
                              false);
            }
        }
    }
}

/* ---- Options, the struct, the kernel, the workspace ------------------------------------------ */

static inline void refuse_option(const struct good_call *good, const struct member *m, int64_t value)
{
    char label[96], words[64];
    good->set_up();
    if (m->kind == MEMBER_WIDE)
        memcpy(good->args + m->offset, &value, sizeof value);
    else
        memcpy(good->args + m->offset, &(int32_t){(int32_t)value}, sizeof(int32_t));
    snprintf(label, sizeof label, "%s %" PRId64, m->name, value);
    snprintf(words, sizeof words, "%" PRId64 "|[%" PRId64 ", %" PRId64, value, m->low, m->high);
    check_refused(good, label, FMLA_INVALID_ARGUMENT, m->name, words, false);
}

static inline void refuse_options(const struct good_call *good)
{
    static const float no_numbers[] = {NAN, INFINITY, -INFINITY};
    for (const struct member *m = descriptor_of(good)->members; m->name; m++) {
        const int64_t most = m->kind == MEMBER_WIDE ? INT64_MAX : INT32_MAX;
        if (m->kind == MEMBER_INTEGER || m->kind == MEMBER_FORMAT || m->kind == MEMBER_WIDE) {
            refuse_option(good, m, m->low - 1);
            if (m->high < most) refuse_option(good, m, m->high + 1);
            if (m->high < most) refuse_option(good, m, most);
        }
        for (int i = 0; m->kind == MEMBER_REAL && i < 3; i++) {
            good->set_up();
            memcpy(good->args + m->offset, &no_numbers[i], sizeof(float));
            check_refused(good, m->name, FMLA_INVALID_ARGUMENT, m->name, isnan(no_numbers[i]) ? "nan" : "inf",
                          false);
        }
    }
}

static inline void refuse_struct(const struct good_call *good)
{
    const size_t size = descriptor_of(good)->size;
    const struct {
        size_t said, set; /* a byte that is not 0; 0: none */
        fmla_status status;
        const char *words;
    } sizes[] = {
        {0, 0, FMLA_INVALID_ARGUMENT, "0|must be"},
        {1, 0, FMLA_INVALID_ARGUMENT, "1|must be"},
        {size - 8, 0, FMLA_INVALID_ARGUMENT, "must be"},
        {SIZE_MAX, 0, FMLA_INVALID_ARGUMENT, "18446744073709551615"},
        {size + TAIL, size + TAIL - 1, FMLA_UNSUPPORTED, FMLA_VERSION_WORDS},
        {size + 8, size, FMLA_UNSUPPORTED, FMLA_VERSION_WORDS},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char label[64];
        good->set_up();
        memcpy(good->args, &sizes[i].said, sizeof(size_t));
        if (sizes[i].set) good->args[sizes[i].set] = 1;
        snprintf(label, sizeof label, "struct_size %zu", sizes[i].said);
        check_refused(good, label, sizes[i].status, "struct_size", sizes[i].words, false);
    }
    const char *op = descriptor_of(good)->name;
    size_t bytes = 1;
    check_rejected("NULL args", good->run(NULL), FMLA_INVALID_ARGUMENT, op, "args", "NULL");
    if (good->size)
        check_rejected("NULL args", good->size(NULL, &bytes, NULL), FMLA_INVALID_ARGUMENT, op, "args",
                       "NULL");
    good->set_up();
    if (good->kernel)
        check_rejected("nowhere to answer", good->kernel(good->args, NULL), FMLA_INVALID_ARGUMENT, op, "name",
                       "NULL");
}

static inline const struct member *member_named(const struct good_call *good, const char *name)
{
    for (const struct member *m = descriptor_of(good)->members; m->name; m++)
        if (!strcmp(m->name, name)) return m;
    return NULL;
}

static inline void set_pointer(const struct good_call *good, const struct member *m, const void *value)
{
    memcpy(good->args + m->offset, &value, sizeof(void *));
}

/* A kernel that is not there, and a GPU that is not there. */
static inline void refuse_kernels(const struct good_call *good)
{
    const struct member *kernel = member_named(good, "kernel");
    const char *first = NULL;
    for (int i = 0; kernel && i < 2; i++) {
        good->set_up();
        set_pointer(good, kernel, i ? "" : "sm90-imaginary");
        check_refused(good, i ? "empty kernel name" : "unknown kernel", FMLA_INVALID_ARGUMENT, "kernel",
                      i ? "cpu-generic|ref" : "sm90-imaginary|cpu-generic|ref", false);
    }
    EACH_TENSOR(good, n, where)
    {
        if (!first) first = n->name;
    }
    good->set_up();
    for (int i = 0; i < MAX_TENSORS; i++)
        if (good->held[i]) good->held[i]->tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 99};
    check_refused(good, "all on cuda", FMLA_UNSUPPORTED, first, "device is cuda:99", false);
}

static inline void refuse_workspaces(const struct good_call *good)
{
    const struct member *pointer = member_named(good, "workspace"),
                        *size = member_named(good, "workspace_size");
    size_t bytes = 0;
    if (!pointer) return;
    good->set_up();
    CHECK(good->size(good->args, &bytes, NULL) == FMLA_OK && bytes, "%zu bytes: %s", bytes,
          fmla_last_error());
    char needed[32], *workspace;
    memcpy(&workspace, good->args + pointer->offset, sizeof workspace);
    snprintf(needed, sizeof needed, "%zu bytes", bytes);
    const struct {
        const char *label;
        void *workspace;
        size_t size;
        fmla_status status;
        const char *argument, *words;
    } wrong[] = {
        {"workspace NULL", NULL, bytes, FMLA_INVALID_ARGUMENT, "workspace", "NULL"},
        {"no workspace", NULL, 0, FMLA_BUFFER_TOO_SMALL, "workspace_size", "0|at least"},
        {"workspace a byte too small", workspace, bytes - 1, FMLA_BUFFER_TOO_SMALL, "workspace_size",
         "at least"},
        {"workspace misaligned", workspace + 1, bytes, FMLA_INVALID_ARGUMENT, "workspace", "aligned"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        good->set_up();
        set_pointer(good, pointer, wrong[i].workspace);
        memcpy(good->args + size->offset, &wrong[i].size, sizeof(size_t));
        check_refused(good, wrong[i].label, wrong[i].status, wrong[i].argument, wrong[i].words, true);
        if (wrong[i].status == FMLA_BUFFER_TOO_SMALL)
            CHECK(strstr(fmla_last_error(), needed), "%s: \"%s\" does not say %s", wrong[i].label,
                  fmla_last_error(), needed);
    }
}

/* All of it. */
static inline void refuse_by_descriptor(const struct good_call *good)
{
    refuse_tensors(good);
    refuse_devices(good);
    refuse_sizes(good);
    refuse_options(good);
    refuse_struct(good);
    refuse_kernels(good);
    refuse_workspaces(good);
}

/* What the descriptor does not say; each begins with the good call. */
static inline void refuse_mutations(const struct good_call *good, const struct mutation *mutations,
                                    size_t count, bool only_call)
{
    for (size_t k = 0; k < count; k++) {
        const struct mutation *m = &mutations[k];
        good->set_up();
        m->apply();
        check_refused(good, m->label, m->status, m->argument, m->words, only_call);
    }
}
#define REFUSE(good, mutations, only_call)                                                                   \
    refuse_mutations(good, mutations, sizeof(mutations) / sizeof(mutations)[0], only_call)

/* ---- What must be taken ---------------------------------------------------------------------- */

/* The call must work within the workspace that it was said to need, and reach every element of its outputs. */
static inline void check_taken(const struct good_call *good, const char *label)
{
    size_t bytes = 0, alignment = 1;
    fmla_status status = good->size ? good->size(good->args, &bytes, &alignment) : FMLA_OK;
    CHECK(status == FMLA_OK, "%s: size: %s", label, fmla_last_error());
    CHECK(alignment && !(alignment & (alignment - 1)), "%s: alignment is %zu", label, alignment);
    status = good->run(good->args);
    CHECK(status == FMLA_OK, "%s: %s: %s", label, fmla_status_name(status), fmla_last_error());
}

/* How a call may differ that is as good. */
static inline void take_by_descriptor(const struct good_call *good, void (*written)(const char *label))
{
    const struct descriptor *d = descriptor_of(good);
    static const char *const labels[] = {"as it is", "pinned host memory", "no strides",
                                         "a larger struct, zero behind", "byte offsets"};
    for (size_t way = 0; way < sizeof labels / sizeof labels[0]; way++) {
        good->set_up();
        for (int i = 0; i < MAX_TENSORS; i++) {
            if (!good->held[i]) continue;
            fmla_tensor *t = &good->held[i]->tensor;
            if (way == 1) t->device.device_type = i & 1 ? FMLA_DEVICE_CPU : FMLA_DEVICE_CUDA_HOST;
            if (way == 2) t->strides = NULL;
            if (way == 4 && t->data) t->data = (char *)t->data - 4096, t->byte_offset = 4096;
        }
        if (way == 3) memcpy(good->args, &(size_t){d->size + TAIL}, sizeof(size_t));
        check_taken(good, labels[way]);
        written(labels[way]);
    }
}

#endif
