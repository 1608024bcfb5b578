/* SPDX-License-Identifier: MIT
 *
 * Tests what every operation must refuse, generated from its descriptor (src/operations.def): every tensor
 * with every possible fault, every named dimension that disagrees or is out of range, every option out of
 * bounds, every wrong struct size, kernel name and buffer. And what every operation must accept: calls
 * that differ from a valid one and are equally valid.
 */
#ifndef FMLA_REFUSALS_H
#define FMLA_REFUSALS_H

#include "good_call.h"

/* ---- Tensors --------------------------------------------------------------------------------- */

/* Writes the types as a message lists them. */
static inline void allowed_words(const struct member *m, fmla_dtype dtype, char words[64])
{
    static const char *const names[] = {"bfloat16", "float16", "float32", "int32", "int64"};
    words[0] = 0;
    if (m->allowed & (ALLOW_SAME | IS_CACHE))
        snprintf(words, 64, "%s",
                 dtype.bits == 8                  ? "a type of one byte"
                 : dtype.code == FMLA_TYPE_BFLOAT ? "bfloat16"
                 : dtype.bits == 16               ? "float16"
                                                  : "float32");
    for (int i = 0; !*words && i < 5; i++)
        if (m->allowed & 1u << i)
            snprintf(words + strlen(words), 64 - strlen(words), "%s%s", *words ? " or |" : "",
                     i && (m->allowed & ALLOW_CODES) && dtype.bits == 8 ? "a type of one byte" : names[i]);
}

/* Spoils a tensor by fault `number` and returns its name; NULL if the tensor cannot have it, "" past the
 * last fault. `words` are those that the message must contain; *of_data: only the call looks at the fault. */
static inline const char *spoil(const struct good_call *good, const struct member *m, struct held *h,
                                int number, char words[160], bool *of_data)
{
    fmla_tensor *t = &h->tensor;
    char dtypes[64], came[32], ranks[48];
    const int inner = t->ndim - 1, rank = t->ndim, bytes = t->dtype.bits / 8;
    const bool cache = m->allowed & IS_CACHE, output = m->allowed & IS_OUTPUT;
    const bool either =
        (m->allowed & OR_FLAT) && (cache ? bytes > 1 : m == described_tensor(good->operation, 0));
    const bool several = h->shape[inner] > 1, rows = rank > 1 && h->shape[0] > 1;
    allowed_words(m, t->dtype, dtypes);
    *of_data = number < 3;
#define FAULT(what, possible, change, ...)                                                                   \
    if (!number--) {                                                                                         \
        change;                                                                                              \
        snprintf(words, 160, __VA_ARGS__);                                                                   \
        return (possible) ? (what) : NULL;                                                                   \
    }
#define FAULT_DTYPE(what, possible, change, said)                                                            \
    FAULT(what, possible, change, "dtype is %s|must be|%s", said, dtypes)
/* A tensor that selects the call's form may have three or four dimensions: with the other rank a different
 * error occurs. */
#define FAULT_RANK(what, came)                                                                               \
    FAULT(what, !either || (came) != 7 - rank, t->ndim = (came), "has %d dimensions|must have %s",           \
          (int)(came), ranks)
    if (either)
        snprintf(ranks, sizeof ranks, "3|%s|or 4|%s", dimension_words[form_of(m, true).dimensions[0]],
                 dimension_words[m->dimensions[0]]);
    else
        snprintf(ranks, sizeof ranks, "%d", rank);
    snprintf(came, sizeof came, "|int%d", t->dtype.bits);
    FAULT("data is NULL", true, t->data = NULL, "data is NULL")
    FAULT("odd data", bytes > 1, t->data = (char *)t->data + 1, "multiple of")
    FAULT("odd offset", bytes > 1, t->byte_offset = 1, "byte_offset|multiple of")
    FAULT("tensor is NULL", !(m->allowed & ALLOW_NULL), *tensor_of(good, m) = NULL, "is NULL|must be")
    FAULT_DTYPE("dtype code", bytes > 1,
                t->dtype.code = t->dtype.code == FMLA_TYPE_INT ? FMLA_TYPE_UINT : FMLA_TYPE_INT, came)
    FAULT_DTYPE("unknown dtype code", bytes > 1, t->dtype.code = 77, "|77")
    FAULT_DTYPE("dtype bits", bytes < 8 && !(m->allowed & ALLOW_I64), t->dtype.bits = 64, "|64")
    FAULT_DTYPE("dtype lanes", true, t->dtype.lanes = 4, "|4 lanes")
    FAULT_RANK("rank 0", 0)
    FAULT_RANK("rank too small", rank - 1)
    FAULT_RANK("rank too large", rank + 1)
    FAULT_RANK("negative rank", -1)
    FAULT_RANK("huge rank", INT32_MAX)
    FAULT("keys without pages", either && cache && rank == 4, t->ndim = 3, "d_qk (dimension 2)|must be")
    FAULT("keys in pages", either && cache && rank == 3, t->ndim = 4, "h_kv (dimension 2)|must be")
    FAULT("shape is NULL", true, t->shape = NULL, "shape is NULL")
    FAULT("negative size", true, h->shape[0] = -1, "dimension 0|-1|≥ 0")
    FAULT("the least size", true, h->shape[inner] = INT64_MIN, "dimension %d|-9223372036854775808", inner)
    FAULT("size times stride", rank > 1, h->shape[0] = INT64_MAX, "overflow|2^63 bytes")
    FAULT("contiguous size", true, (h->shape[0] = INT64_MAX, t->strides = NULL), "overflow|2^63 bytes")
    FAULT("stride overflows", rows, h->strides[0] = INT64_MAX, "overflow|2^63 bytes")
    /* The elements fit 63 bits, the bytes do not. */
    FAULT("bytes overflow", rows && bytes > 1, h->strides[0] = INT64_MAX / 2 / (rows ? h->shape[0] - 1 : 1),
          "overflow|2^63 bytes")
    FAULT("inner stride 2", several, h->strides[inner] = 2, "stride|innermost|2|must be 1")
    FAULT("inner stride 0", several, h->strides[inner] = 0, "stride|innermost|0|must be 1")
    FAULT("unknown device", true, t->device.device_type = 99, "device|99|cpu|cuda")
    FAULT("device type 0", true, t->device.device_type = 0, "device|0|cpu|cuda")
    FAULT("negative device id", true, t->device.id = -1, "device id|-1|≥ 0")
    FAULT("output stride 0", output && rows, h->strides[0] = 0, "share memory")
    FAULT("output overlaps itself", output && rows, h->strides[0]--, "share memory")
    return "";
#undef FAULT
#undef FAULT_DTYPE
#undef FAULT_RANK
}

static inline void refuse_tensors(struct good_call *good)
{
    const struct member *m;
    const char *what = NULL;
    char words[160], label[96];
    bool of_data;
    for (int which = 0; (m = described_tensor(good->operation, which)); which++) {
        good->set_up();
        if (!*tensor_of(good, m)) continue;
        for (int fault = 0; !what || *what; fault++) {
            good->set_up();
            what = spoil(good, m, &good->held[which], fault, words, &of_data);
            if (!what || !*what) continue;
            snprintf(label, sizeof label, "%s: %s", m->name, what);
            check_refused(good, label, FMLA_INVALID_ARGUMENT, m->name, words,
                          (m->allowed & IN_CALLS) || of_data);
        }
        what = NULL;
    }
}

/* One tensor on another device: the message names it or, if it is the first, the second; and both devices. */
static inline void refuse_devices(struct good_call *good)
{
    const struct member *m;
    char label[96];
    int first = -1;
    const char *second = NULL;
    for (int which = 0; (m = described_tensor(good->operation, which)); which++) {
        good->set_up();
        if (!*tensor_of(good, m)) continue;
        if (first < 0) {
            first = which;
            continue;
        }
        if (!second && !(m->allowed & IN_CALLS)) second = m->name;
        good->held[which].tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 3};
        snprintf(label, sizeof label, "%s on cuda:3", m->name);
        check_refused(good, label, FMLA_INVALID_ARGUMENT, m->name, "cuda:3|cpu",
                      (m->allowed & IN_CALLS) != 0);
    }
    if (!second) return;
    good->set_up();
    good->held[first].tensor.device.device_type = FMLA_DEVICE_CUDA;
    check_refused(good, "the first on cuda", FMLA_INVALID_ARGUMENT, second, "cpu|cuda:0", false);
}

/* ---- Named dimensions ------------------------------------------------------------------------ */

static inline enum dimension name_at(const struct good_call *good, const struct member *m, int i)
{
    return i < MAX_DIMENSIONS ? described_form(m, &good->layout).dimensions[i] : DIM__;
}

/* Returns the tensor that the message names if `after`, which binds a name, has another size: the next one
 * with that dimension, or itself if bytes of a token determine the size. NULL: no other tensor has it. */
static inline const char *named_with(struct good_call *good, const struct member *after, enum dimension name)
{
    const struct member *m;
    const char *found = NULL;
    bool behind = false;
    if (name == DIM_d_qk && cache_formats[good->layout.format].token) return after->name;
    for (int which = 0; (m = described_tensor(good->operation, which)); which++) {
        good->set_up();
        if (!*tensor_of(good, m)) continue;
        for (int i = 0; behind && !found && i < MAX_DIMENSIONS; i++)
            if (name_at(good, m, i) == name) found = m->name;
        behind |= m == after;
    }
    return found;
}

/* Gives dimension i of tensor `which` another size. */
static inline void refuse_size(struct good_call *good, const struct member *m, int which, int i, int64_t size,
                               const char *argument, const char *called)
{
    struct held *held = &good->held[which];
    int64_t shape[MAX_DIMENSIONS];
    char label[96], words[96];
    good->set_up();
    if (size < 0 || held->shape[i] == size) return;
    memcpy(shape, held->shape, sizeof shape);
    shape[i] = size;
    held_set(held, held->tensor.data, held->tensor.dtype, held->tensor.ndim, shape);
    snprintf(label, sizeof label, "%s: %s of %" PRId64, m->name, called, size);
    snprintf(words, sizeof words, "%s (dimension |is ", called);
    if (argument == m->name) snprintf(words + strlen(words), 32, "%" PRId64 "|must be", size);
    check_refused(good, label, FMLA_INVALID_ARGUMENT, argument, words, (m->allowed & IN_CALLS) != 0);
}

static inline void refuse_sizes(struct good_call *good)
{
    const struct member *m;
    bool bound[DIMENSIONS] = {false};
    for (int which = 0; (m = described_tensor(good->operation, which)); which++) {
        good->set_up();
        if (!*tensor_of(good, m)) continue;
        const int rank = good->held[which].tensor.ndim;
        for (int i = 0; i < rank; i++) {
            const enum dimension name = name_at(good, m, i);
            const char *called = name == DIM__ ? "bytes of a token" : dimension_words[name];
            good->set_up();
            const int64_t size = good->held[which].shape[i];
            if (name == DIM__ || bound[name]) {
                refuse_size(good, m, which, i, size + 1, m->name, called);
                refuse_size(good, m, which, i, size - 1, m->name, called);
                continue;
            }
            bool may_grow = true;
            bound[name] = true;
            const struct range *range = &descriptors[good->operation].ranges[name];
            if (range->high) {
                refuse_size(good, m, which, i, range->low - 1, m->name, called);
                refuse_size(good, m, which, i, range->high + 1, m->name, called);
                may_grow = size < range->high;
            }
            const char *other = may_grow ? named_with(good, m, name) : NULL;
            if (other) refuse_size(good, m, which, i, size + 1, other, called);
        }
    }
}

/* ---- Options, the struct, the kernel, buffers ------------------------------------------------- */

static inline void refuse_options(struct good_call *good)
{
    static const float no_numbers[] = {NAN, INFINITY, -INFINITY};
    static const fmla_device no_devices[] = {{42, 0}, {FMLA_DEVICE_CPU, -1}};
    char label[96], words[96];
    for (const struct member *m = descriptors[good->operation].members; m->name; m++) {
        const bool wide = m->kind == MEMBER_WIDE;
        const int64_t values[] = {m->low - 1, wide ? INT64_MIN : INT32_MIN,
                                  m->high < INT64_MAX ? m->high + 1 : 0, wide ? INT64_MAX : INT32_MAX};
        const bool integer = m->kind <= MEMBER_LAST_INTEGER;
        for (int i = 0; integer && i < 4; i++) {
            if (values[i] >= m->low && values[i] <= m->high) continue;
            good->set_up();
            memcpy(option_of(good, m), wide ? (const void *)&values[i] : &(int32_t){(int32_t)values[i]},
                   wide ? sizeof(int64_t) : sizeof(int32_t));
            snprintf(label, sizeof label, "%s %" PRId64, m->name, values[i]);
            snprintf(words, sizeof words, "is %" PRId64 "|[%" PRId64 ", %" PRId64 "]", values[i], m->low,
                     m->high);
            check_refused(good, label, FMLA_INVALID_ARGUMENT, m->name, words, false);
        }
        for (int i = 0; m->kind == MEMBER_REAL && i < 3; i++) {
            good->set_up();
            memcpy(option_of(good, m), &no_numbers[i], sizeof(float));
            check_refused(good, "no number", FMLA_INVALID_ARGUMENT, m->name,
                          (const char *const[]){"nan|must", "inf|must", "-inf|must"}[i], false);
        }
        for (int i = 0; m->kind == MEMBER_DEVICE && i < 2; i++) {
            good->set_up();
            memcpy(option_of(good, m), &no_devices[i], sizeof(fmla_device));
            check_refused(good, "no device", FMLA_INVALID_ARGUMENT, m->name, i ? "-1" : "42", false);
        }
    }
}

static inline void refuse_size_of_struct(struct good_call *good, size_t said, size_t set)
{
    char label[64];
    good->set_up();
    memcpy(good->args, &said, sizeof said);
    if (set) ((char *)good->args)[set] = 1;
    snprintf(label, sizeof label, "struct_size %zu", said);
    check_refused(good, label, set ? FMLA_UNSUPPORTED : FMLA_INVALID_ARGUMENT, "struct_size",
                  set ? fmla_version_string() : "must be", false);
    snprintf(label, sizeof label, "is %zu", said);
    CHECK(strstr(fmla_last_error(), label), "\"%s\" does not say \"%s\"", fmla_last_error(), label);
}

static inline void refuse_structs(struct good_call *good)
{
    static const char *const answers[2][QUESTIONS] = {{NULL, NULL, "name"}, {"bytes", "bytes", "count"}};
    const char *op = descriptors[good->operation].name;
    const size_t size = descriptors[good->operation].size;
    for (size_t said = 0; said < size; said++)
        if (said < 2 || said % 8 == 0 || said == size - 1) refuse_size_of_struct(good, said, 0);
    refuse_size_of_struct(good, SIZE_MAX, 0);
    refuse_size_of_struct(good, size + 8, size);
    refuse_size_of_struct(good, size + TAIL, size + TAIL - 1);
    check_rejected("NULL args", described_run(good->operation, NULL), FMLA_INVALID_ARGUMENT, op, "args",
                   "NULL");
    for (int question = 0; question < QUESTIONS && described_asks(good->operation); question++) {
        const char *argument = answers[described_is_plan(good->operation)][question];
        struct answer answer;
        check_rejected("NULL args", described_ask(good->operation, question, NULL, &answer),
                       FMLA_INVALID_ARGUMENT, op, "args", "NULL");
        good->set_up();
        const fmla_status status = described_ask(good->operation, question, good->args, NULL);
        if (argument)
            check_rejected("nowhere to answer", status, FMLA_INVALID_ARGUMENT, op, argument, "NULL");
        else
            CHECK(status == FMLA_OK, "question %d, nowhere to answer: %s", question, fmla_last_error());
    }
}

/* An unknown kernel, and an absent GPU. */
static inline void refuse_kernels(struct good_call *good)
{
    static const char *const names[] = {"sm90-imaginary", "", "none"};
    char words[64];
    for (int i = 0; described_member(good->operation, "kernel") && i < 3; i++) {
        good->set_up();
        *(const char **)option(good, "kernel") = names[i];
        snprintf(words, sizeof words, "\"%s\"|must be one of|cpu-generic|ref", names[i]);
        check_refused(good, names[i], FMLA_INVALID_ARGUMENT, "kernel", words, false);
    }
    good->set_up();
    everywhere(good, FMLA_DEVICE_CUDA, 99);
    check_refused(good, "all on cuda", FMLA_UNSUPPORTED, good->elsewhere, "device is cuda:99", false);
}

/* Wrong workspaces, or memory of a plan. */
static inline void refuse_buffers(struct good_call *good)
{
    const char *name = described_is_plan(good->operation) ? "plan" : "workspace";
    char argument[32], needed[64];
    struct answer answer = {0};
    good->set_up();
    if (!described_asks(good->operation) || !*(void **)option(good, name)) return;
    CHECK(described_ask(good->operation, ASK_BYTES, good->args, &answer) == FMLA_OK && answer.bytes, "%s",
          fmla_last_error());
    const struct {
        const char *label;
        char *buffer;
        size_t size;
        bool short_of;
        const char *words;
    } wrong[] = {
        {"none", NULL, 0, true, "is 0|at least"},
        {"NULL", NULL, answer.bytes, false, "NULL"},
        {"a byte", scratch, 1, true, "is 1,|at least"},
        {"a byte too small", scratch, answer.bytes - 1, true, "at least"},
        {"odd", scratch + 1, answer.bytes, false, "aligned"},
        {"off by 8", scratch + 8, answer.bytes, false, "aligned"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        good->set_up();
        snprintf(argument, sizeof argument, "%s%s", name, wrong[i].short_of ? "_size" : "");
        *(void **)option(good, name) = wrong[i].buffer;
        snprintf(needed, sizeof needed, "%s_size", name);
        *(size_t *)option(good, needed) = wrong[i].size;
        snprintf(needed, sizeof needed, "%s|%zu bytes", wrong[i].words, answer.bytes);
        check_refused(good, wrong[i].label, wrong[i].short_of ? FMLA_BUFFER_TOO_SMALL : FMLA_INVALID_ARGUMENT,
                      argument, wrong[i].short_of ? needed : wrong[i].words, true);
    }
}

/* ---- Questions that are refused alike --------------------------------------------------------- */

/* Makes dimensions i and j as large as they may be and all others small; no request unless b is one of them. */
static inline void two_at_most(struct good_call *good, int i, int j)
{
    const struct range *ranges = descriptors[good->operation].ranges;
    for (int d = 0; d < DIMENSIONS; d++)
        if (ranges[d].high && d != DIM_d_qk)
            good->layout.size[d] = d == i || d == j ? ranges[d].high : ranges[d].low;
    if (i != DIM_splits && j != DIM_splits) good->layout.splits = good->layout.b + 1;
    lay_out(good);
}

/* What refuses the size of a workspace or of a plan refuses the other question too, in the same words: also
 * where the arguments are right, and the kernel finds that the workspace exceeds the address space. */
static inline void refuse_alike(struct good_call *good)
{
    static const char *const kernels[] = {NULL, "ref", "cpu-generic"};
    const struct range *ranges = descriptors[good->operation].ranges;
    const bool has_kernel = described_member(good->operation, "kernel");
    struct answer answer;
    int too_large = 0;
    for (int at = 0; described_asks(good->operation) && at < 3 * DIMENSIONS * DIMENSIONS; at++) {
        const int k = at / (DIMENSIONS * DIMENSIONS), i = at / DIMENSIONS % DIMENSIONS, j = at % DIMENSIONS;
        char words[512];
        if (!ranges[i].high || !ranges[j].high || j < i || (k && !has_kernel)) continue;
        good->set_up();
        two_at_most(good, i, j);
        if (has_kernel) *(const char **)option(good, "kernel") = kernels[k];
        const fmla_status size = described_ask(good->operation, ASK_BYTES, good->args, &answer);
        snprintf(words, sizeof words, "%s", fmla_last_error());
        const fmla_status kernel = described_ask(good->operation, ASK_KERNEL, good->args, &answer);
        CHECK(size == kernel && (!size || !strcmp(words, fmla_last_error())),
              "%s and %s at most, %s: the size is %s (%s), the other question %s (%s)", dimension_words[i],
              dimension_words[j], has_kernel && kernels[k] ? kernels[k] : "no kernel named",
              fmla_status_name(size), size ? words : "", fmla_status_name(kernel),
              kernel ? fmla_last_error() : "");
        too_large += size == FMLA_UNSUPPORTED && strstr(words, "exceed the address space");
    }
    CHECK(too_large || !has_kernel || !described_asks(good->operation), "no workspace was too large");
}

static inline void refuse_by_descriptor(struct good_call *good)
{
    refuse_alike(good);
    refuse_tensors(good);
    refuse_devices(good);
    refuse_sizes(good);
    refuse_options(good);
    refuse_structs(good);
    refuse_kernels(good);
    refuse_buffers(good);
}

/* ---- What must be taken ---------------------------------------------------------------------- */

/* All sizes are 1: strides of dimensions with one element are never used. */
static inline void one_of_each(struct good_call *good)
{
    static const enum dimension kept[] = {DIM_d_qk,   DIM_d_v,    DIM_width,  DIM_rope,
                                          DIM_normed, DIM_turned, DIM_fields, DIM_splits};
    const struct layout before = good->layout;
    for (int i = 0; i < DIMENSIONS; i++) good->layout.size[i] = 1;
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++)
        good->layout.size[kept[i]] = before.size[kept[i]];
    lay_out(good);
    for (int which = 0; which < MAX_TENSORS; which++)
        for (int i = 0; i < 8; i++)
            if (good->held[which].shape[i] == 1) good->held[which].strides[i] = i & 1 ? INT64_MIN : INT64_MAX;
}

/* Variations of a call that are equally valid. */
static inline void take_by_descriptor(struct good_call *good)
{
    static const char *const labels[] = {"as it is", "pinned host memory", "no strides",
                                         "a larger struct, zero behind", "byte offsets"};
    for (int way = 0; way < 5; way++) {
        good->set_up();
        for (int i = 0; i < MAX_TENSORS; i++) {
            fmla_tensor *t = &good->held[i].tensor;
            if (way == 1) t->device.device_type = i & 1 ? FMLA_DEVICE_CPU : FMLA_DEVICE_CUDA_HOST;
            if (way == 2) t->strides = NULL;
            if (way == 4 && t->data) t->data = (void *)((uintptr_t)t->data - 4096), t->byte_offset = 4096;
        }
        const size_t longer = descriptors[good->operation].size + TAIL;
        if (way == 3) memcpy(good->args, &longer, sizeof longer);
        check_taken(good, labels[way]);
        check_written(good, labels[way]);
    }
    /* Queries are made before there is any memory. */
    for (int question = 0; question < QUESTIONS && described_asks(good->operation); question++) {
        struct answer with = {0}, without = {0};
        good->set_up();
        CHECK(described_ask(good->operation, question, good->args, &with) == FMLA_OK, "%s",
              fmla_last_error());
        for (int i = 0; i < MAX_TENSORS; i++) good->held[i].tensor.data = NULL;
        const bool plans = described_is_plan(good->operation);
        *(void **)option(good, plans ? "plan" : "workspace") = NULL;
        *(size_t *)option(good, plans ? "plan_size" : "workspace_size") = 0;
        CHECK(described_ask(good->operation, question, good->args, &without) == FMLA_OK, "without data: %s",
              fmla_last_error());
        CHECK(!memcmp(&with, &without, sizeof with), "question %d has another answer without data", question);
    }
}

#endif
