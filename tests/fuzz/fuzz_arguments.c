/* SPDX-License-Identifier: MIT
 *
 * Fuzzes argument checks. A small valid call of any operation is made from its descriptor, then spoiled in
 * a few places by hostile values. Every tensor that can be real is real: it has exactly the memory that it
 * spans. A tensor too large for that has no data and must be refused. So a call is refused with a message
 * and writes nothing, or it runs and writes only its elements.
 */
#include "../unit/described.h"
#include "../unit/tensors.h"
#include "fuzz.h"

#include <math.h>
#include <sanitizer/asan_interface.h>

enum { MOST_DIMS = 6, MOST_BYTES = 1 << 15, MOST_ELEMENTS = 1 << 14, MOST_WORKSPACE = 1 << 21, FILL = 0xa5 };

struct made {
    struct held of;
    uint8_t *memory, *before;
    size_t bytes;
    bool present, output;
};

/* Returns a small number or one near a power of two, of either sign. */
static int64_t any(struct bytes *in)
{
    static const uint8_t powers[16] = {0, 1, 3, 6, 9, 12, 16, 30, 31, 32, 40, 60, 61, 62, 63, 63};
    const uint32_t which = take(in);
    if (which < 64) return which;
    const uint64_t power = UINT64_C(1) << powers[which % 16];
    return (int64_t)((which >= 192 ? 0 - power : power) + which / 16 % 4 - 1);
}

/* ---- Tensors -------------------------------------------------------------------------------- */

static void start(struct made *t, const struct member *m, const struct layout *layout)
{
    int64_t shape[MAX_DIMENSIONS];
    *t = (struct made){.present = true, .output = m->allowed & IS_OUTPUT};
    held_set(&t->of, NULL, described_dtype(m, layout), described_shape(m, layout, shape), shape);
}

static void spoil_tensor(struct bytes *in, struct made *t)
{
    const fmla_dtype dtypes[] = {bf16, fp16, f32, i32, u8};
    const uint32_t dim = choose(in, MOST_DIMS);
    switch (choose(in, 12)) {
    case 0: t->of.shape[dim] = any(in); break;
    case 1: t->of.strides[dim] = any(in); break;
    case 2: t->of.strides[dim] = (int64_t)((uint64_t)t->of.strides[dim] + choose(in, 5)); break;
    case 3: t->of.tensor.strides = NULL; break;
    case 4: t->of.tensor.dtype = dtypes[choose(in, 5)]; break;
    case 5: t->of.tensor.dtype.lanes = (uint16_t)take(in); break;
    case 6: t->of.tensor.dtype.bits = (uint8_t)take(in), t->of.tensor.dtype.code = (uint8_t)take(in); break;
    case 7: t->of.tensor.ndim = choose(in, 4) ? (int32_t)choose(in, MOST_DIMS + 1) : (int32_t)any(in); break;
    case 8: t->of.tensor.byte_offset = take(in); break;
    case 9: /* no existing GPU: it would be given host memory */
        t->of.tensor.device.device_type = (int32_t)choose(in, 5),
        t->of.tensor.device.id = (int32_t)any(in) | 64;
        break;
    case 10: t->of.tensor.shape = NULL; break;
    default: t->present = false; break;
    }
}

/* Returns the bytes from the first element to past the last; more than MOST_BYTES for a tensor that is to
 * have no memory. Uses wide arithmetic instead of the library's overflow checks. */
static size_t span_of(const struct made *t)
{
    const fmla_tensor *tensor = &t->of.tensor;
    const size_t too_much = (size_t)MOST_BYTES + 1;
    if (tensor->ndim < 0 || tensor->ndim > MOST_DIMS || !tensor->shape) return 64;
    long double span = 1.0L, elements = 1.0L, stride = 1.0L;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        const long double size = (long double)t->of.shape[i];
        if (tensor->strides) stride = (long double)t->of.strides[i];
        if (size > 0.0L) span += (size - 1.0L) * (stride > 0.0L ? stride : 0.0L);
        elements *= size;
        if (!tensor->strides) stride *= size;
    }
    if (elements == 0.0L) return 0;
    const size_t element = tensor->dtype.bits / 8;
    const long double bytes = span * (long double)(element + 1) + 8.0L;
    if (bytes > (long double)MOST_BYTES || fabsl(elements) > (long double)MOST_ELEMENTS) return too_much;
    return (size_t)span * element;
}

static void back(struct bytes *in, struct made *t)
{
    const size_t span = span_of(t);
    if (span > MOST_BYTES) return;
    t->bytes = span + t->of.tensor.byte_offset;
    t->memory = t->of.tensor.data = exactly(t->bytes);
    t->before = malloc(t->bytes + 1);
    memset(t->memory, t->output ? FILL : 0, t->bytes);
    const size_t drawn = in->left < t->bytes ? in->left : t->bytes;
    if (!t->output && drawn) memcpy(t->memory, in->at, drawn);
    memcpy(t->before, t->memory, t->bytes);
}

static void clear_elements(const struct made *t, uint8_t *at, int dim)
{
    const int64_t element = t->of.tensor.dtype.bits / 8;
    if (dim == t->of.tensor.ndim) {
        memset(at, FILL, (size_t)element);
        return;
    }
    int64_t stride = 1;
    if (t->of.tensor.strides)
        stride = t->of.strides[dim];
    else
        for (int i = dim + 1; i < t->of.tensor.ndim; i++) stride *= t->of.shape[i];
    if (dim == t->of.tensor.ndim - 1 && stride == 1) {
        memset(at, FILL, (size_t)(t->of.shape[dim] * element));
        return;
    }
    for (int64_t i = 0; i < t->of.shape[dim]; i++)
        clear_elements(t, at + (i ? i * stride : 0) * element, dim + 1);
}

/* Checks after the call: inputs are unchanged; so are outputs if the call was refused, else outside their
 * elements. */
static void check_memory(struct made *t, fmla_status status)
{
    if (!t->memory) {
        PROMISE(status || !t->present || span_of(t) == 0, "a tensor without memory was accepted");
        return;
    }
    if (t->output && t->present && status == FMLA_OK && span_of(t))
        clear_elements(t, t->memory + t->of.tensor.byte_offset, 0);
    PROMISE(!t->bytes || !memcmp(t->memory, t->before, t->bytes), "%s",
            "memory was written that must not be");
}

static void check_status(fmla_status status, const char *operation)
{
    const char *message = fmla_last_error();
    if (status == FMLA_OK) return;
    PROMISE(status <= FMLA_DEVICE_ERROR, "status %d", (int)status);
    PROMISE(!strncmp(message, operation, strlen(operation)) && strlen(message) > strlen(operation) + 4,
            "%s is refused with \"%s\"", operation, message);
}

/* ---- The call ------------------------------------------------------------------------------- */

/* Copies an argument struct into memory of its claimed size, if that size is plausible. */
static void *hand_over(struct bytes *in, void *args, size_t size)
{
    uint8_t *copy = exactly(size + 5000);
    memset(copy, 0, size + 5000);
    memcpy(copy, args, size);
    size_t claimed = size;
    if (choose(in, 16) == 15) {
        claimed = choose(in, 2) ? size + choose(in, 200) * 25u : (size_t)any(in);
        if (choose(in, 2)) copy[size + choose(in, 200)] = 1;
    }
    memcpy(copy, &claimed, sizeof claimed);
    return copy;
}

static const char *any_kernel(struct bytes *in)
{
    static const char *const kernels[] = {"ref",         "cpu-generic", NULL,       "ref",
                                          "cpu-generic", NULL,          "cpu-avx2", "cpu-avx512"};
    return kernels[choose(in, 8)];
}

/* Returns memory full of garbage with AddressSanitizer watching the first byte outside. One block for all
 * inputs: new pages from the system for each would cost more than the call. */
static void *garbage(size_t bytes)
{
    static uint8_t *block;
    static size_t open;
    if (bytes > MOST_WORKSPACE) abort();
    if (!block) {
        block = exactly(MOST_WORKSPACE + 64);
        open = MOST_WORKSPACE + 64;
    }
    ASAN_POISON_MEMORY_REGION(block, open);
    ASAN_UNPOISON_MEMORY_REGION(block, bytes);
    open = bytes;
    return memset(block, 0xff, bytes);
}

struct call {
    enum operation operation;
    struct made tensors[MAX_TENSORS]; /* in the order of the descriptor */
    struct layout layout;
    uint8_t *args;
};

/* The initial range of every dimension, from `least` on. */
static const struct {
    uint16_t least, count;
} small[DIMENSIONS] = DESIGNATED(
    [DIM_b] = {0, 4}, [DIM_s_q] = {1, 3}, [DIM_h_kv] = {1, 2}, [DIM_h_q] = {1, 3}, [DIM_pages] = {0, 5},
    [DIM_page_size] = {1, 8}, [DIM_max_pages] = {1, 3}, [DIM_extra_pages] = {0, 4},
    [DIM_extra_page_size] = {1, 6}, [DIM_topk] = {0, 140}, [DIM_extra_topk] = {0, 70}, [DIM_s_kv] = {0, 9},
    [DIM_n] = {0, 5}, [DIM_n_out] = {1, 1}, [DIM_tokens] = {0, 4}, [DIM_one_head] = {1, 1},
    [DIM_rows] = {1, 5}, [DIM_d_qk] = {1, 8}, [DIM_rope] = {64, 1}, [DIM_normed] = {512, 1},
    [DIM_turned] = {64, 1}, [DIM_max_positions] = {1, 3}, [DIM_fields] = {FMLA_PARTITION_FIELDS, 1});

/* Dense MHA has any number of tokens and keys, including none, and its own sizes of values. */
static void draw_mha(struct bytes *in, int64_t size[DIMENSIONS], bool any_size)
{
    size[DIM_s_q] = choose(in, 5), size[DIM_s_k] = choose(in, 9);
    size[DIM_tokens_q] = choose(in, 10), size[DIM_tokens_k] = choose(in, 10);
    if (!any_size) size[DIM_d_qk] = 64 * (1 + choose(in, 3));
    size[DIM_d_v] = any_size ? 1 + choose(in, 40) : 64 * (1 + choose(in, 2));
}

/* Returns a byte format up to `last`; where lists name keys, all but one. */
static int32_t any_of_bytes(struct bytes *in, int32_t last)
{
    const int32_t format = FMLA_KV_FP8_656 + (int32_t)choose(in, (uint32_t)(last - FMLA_KV_FP8_656 + 1));
    return format == FMLA_KV_FP8_576 ? FMLA_KV_FP8_584 : format;
}

/* Returns a format that an option takes. */
static int32_t any_named(struct bytes *in, const struct member *option)
{
    return (int32_t)option->low + (int32_t)choose(in, (uint32_t)(option->high - option->low + 1));
}

/* Draws a format for the extra cache: occasionally another one than the first cache's. */
static void draw_second_format(struct bytes *in, struct call *c)
{
    struct layout *l = &c->layout;
    const struct member *const m = described_kind(c->operation, MEMBER_SECOND_FORMAT);
    if (!m) return;
    int32_t *const second = (int32_t *)(void *)((char *)c->args + m->offset);
    if (m->low) l->extra_format = *second = l->format; /* always named */
    if (choose(in, 2)) return;
    const int32_t extra = m->low ? any_named(in, m) : any_of_bytes(in, (int32_t)m->high);
    const int64_t d_qk = cache_formats[extra].d_qk;
    if ((m->low ? d_qk && d_qk != l->d_qk : d_qk != l->d_qk) && choose(in, 8)) return;
    l->extra_format = *second = extra;
}

/* Draws consistent sizes and types. */
static void draw_layout(struct bytes *in, struct call *c, bool any_size)
{
    struct layout *l = &c->layout;
    int64_t *size = l->size;
    const bool attention = described_member(c->operation, "workspace"), merge = c->operation == OP_MERGE,
               mha = operation_is_mha(c->operation);
    const struct member *const named = described_kind(c->operation, MEMBER_FORMAT);
    int32_t *const format = named ? (int32_t *)(void *)((char *)c->args + named->offset) : NULL;
    for (int i = 0; i < DIMENSIONS; i++)
        size[i] = small[i].least + (small[i].count > 1 ? choose(in, small[i].count) : 0);
    l->type = choose(in, 2) && c->operation != OP_SPARSE_PREFILL ? fp16 : bf16;
    if (format && !attention)
        *format = any_named(in, named);
    else if (format && choose(in, 2))
        *format = any_of_bytes(in, (int32_t)named->high), l->type = bf16;
    int32_t *const products = option_at(c->operation, c->args, "products");
    if (products && *format && choose(in, 2)) {
        *format = choose(in, 2) ? FMLA_KV_FP8_656 : FMLA_KV_FP8_576;
        *products = (int32_t)choose(in, 2);
        l->codes = *products && *format == FMLA_KV_FP8_576 && choose(in, 2);
    }
    l->format = format && *format ? *format : l->type.code == FMLA_TYPE_BFLOAT ? FMLA_KV_BF16 : FMLA_KV_FP16;
    const bool bytes = cache_formats[l->format].token;
    if (attention && format && !*format && choose(in, 2)) *format = l->format;
    l->flat = !bytes && choose(in, 2);
    if (described_is_plan(c->operation)) size[DIM_b] *= 1 + choose(in, 10);
    if (merge) size[DIM_h_kv] = choose(in, 3), size[DIM_d_v] = choose(in, 9);
    if (merge || c->operation == OP_SPARSE_PREFILL) size[DIM_s_q] = choose(in, 5);
    if (c->operation == OP_SPARSE_PREFILL && !l->flat) size[DIM_h_kv] = 1;
    size[DIM_h_q] *= size[DIM_h_kv];
    if (bytes)
        size[DIM_d_qk] = cache_formats[l->format].d_qk;
    else if (!attention)
        size[DIM_d_qk] += 64;
    else if (!any_size && !mha)
        size[DIM_d_qk] = choose(in, 2) ? 576 : 512;
    if (attention && !mha)
        size[DIM_d_v] =
            any_size ? 1 + choose(in, size[DIM_d_qk] < 256 ? (uint32_t)size[DIM_d_qk] : 256) : 512;
    if (mha) draw_mha(in, size, any_size);
    described_fit(c->operation, l);
    if (merge && !choose(in, 4)) /* the out of one part, perhaps of none */
        size[DIM_n_out] = 1,
        *(int64_t *)option_at(c->operation, c->args, "part") = choose(in, (uint32_t)size[DIM_n] + 2);
    size[DIM_width] = size[DIM_d_qk];
    size[DIM_splits] = size[DIM_b] + 1;
    draw_second_format(in, c);
}

/* Leaves out tensors, in groups that come together. */
static void leave_out(struct bytes *in, struct call *c)
{
    const uint32_t given = choose(in, 16);
    const struct member *m;
    for (int which = 0; (m = described_tensor(c->operation, which)); which++) {
        struct made *const t = &c->tensors[which];
        const bool tables = !strcmp(m->name, "partitions") || !strcmp(m->name, "num_splits");
        if (!strncmp(m->name, "extra_", 6))
            t->present = given & 4;
        else if (!strcmp(m->name, "out_last") || !strcmp(m->name, "lse_last"))
            t->present = given & 8;
        else if (!strncmp(m->name, "cu_seqlens", 10))
            t->present = c->layout.flat;
        else if (!strcmp(m->name, "q_scale") || !strcmp(m->name, "kv_scale"))
            t->present =
                (m->name[0] == 'q' ? c->layout.codes : c->layout.format == FMLA_KV_FP8_576) && choose(in, 4);
        else if (!strcmp(m->name, "positions") || !strcmp(m->name, "rope_table"))
            t->present = *(int32_t *)option_at(c->operation, c->args, "rope_pairs") != FMLA_ROPE_NONE;
        else if (m->allowed & ALLOW_NULL)
            t->present = tables ? given % 4 == 3 : choose(in, 2);
        if (tables && t->present)
            *(int32_t *)option_at(c->operation, c->args, "num_partitions") = 0; /* their rows give it */
        if (!strcmp(m->name, "rope") && t->present)
            c->tensors[0].of.shape[1] -= 64, c->tensors[0].of.strides[0] -= 64;
    }
}

static void make_call(struct bytes *in, struct call *c)
{
    static const fmla_dtype *const types[] = {&bf16, &fp16, &f32};
    const char **const kernel = option_at(c->operation, c->args, "kernel");
    if (kernel) *kernel = any_kernel(in);
    draw_layout(in, c, kernel && *kernel && !strcmp(*kernel, "ref"));
    int which = 0;
    for (const struct member *m = descriptors[c->operation].members; m->name; m++) {
        if ((m->allowed & ALLOW_FLOATS) == ALLOW_FLOATS) c->layout.type = *types[choose(in, 3)];
        if (m->kind == MEMBER_TENSOR) start(&c->tensors[which++], m, &c->layout);
        if (m->kind == MEMBER_INTEGER) {
            int32_t value = (int32_t)choose(in, m->high < 4 ? (uint32_t)m->high + 1 : 4);
            if (!strcmp(m->name, "log_base")) value &= FMLA_LOG_BASE_2;
            memcpy(c->args + m->offset, &value, sizeof value);
        }
        if (described_wide(m))
            memcpy(c->args + m->offset, &c->layout.size[described_wide(m)], sizeof(int64_t));
    }
    leave_out(in, c);
}

static void spoil_member(struct bytes *in, struct call *c, const struct member *m, struct made *tensor)
{
    void *const at = c->args + m->offset;
    const int64_t value = m->kind == MEMBER_TENSOR || m->kind == MEMBER_TEXT ? 0 : any(in);
    const float real = choose(in, 2) ? NAN : (float)value;
    switch (m->kind) {
    case MEMBER_TENSOR: spoil_tensor(in, tensor); break;
    case MEMBER_INTEGER:
    case MEMBER_FORMAT:
    case MEMBER_SECOND_FORMAT:
    case MEMBER_PRODUCTS: memcpy(at, &(int32_t){(int32_t)value}, sizeof(int32_t)); break;
    case MEMBER_WIDE: memcpy(at, &value, sizeof value); break;
    case MEMBER_REAL: memcpy(at, &real, sizeof real); break;
    case MEMBER_DEVICE: *(fmla_device *)at = (fmla_device){(int32_t)choose(in, 5), (int32_t)value}; break;
    case MEMBER_POINTER: /* for plans: something that is not a plan */
        if (strcmp(m->name, "plan") != 0 || described_is_plan(c->operation)) break;
        *(void **)at = c->tensors;
        *(size_t *)option_at(c->operation, c->args, "plan_size") = (size_t)value % sizeof c->tensors;
        break;
    case MEMBER_TEXT: *(const char **)at = choose(in, 2) ? "" : "no"; break;
    default: break;
    }
}

static void spoil(struct bytes *in, struct call *c)
{
    const struct member *const members = descriptors[c->operation].members;
    uint32_t count = 1;
    while (members[count].name) count++;
    for (uint32_t times = choose(in, 5); times; times--) {
        const uint32_t which = choose(in, count);
        int tensor = 0;
        for (uint32_t i = 0; i < which; i++) tensor += members[i].kind == MEMBER_TENSOR;
        spoil_member(in, c, &members[which], &c->tensors[tensor]);
    }
}

/* Fills in arbitrary rows, except the end of the last one: otherwise all calls would be refused for that.
 * Slots are mostly of the cache, since others are refused at once. */
static void put_sense(struct bytes *in, const struct call *c, const struct member *m, struct made *t)
{
    const int32_t last = (int32_t)c->layout.size[DIM_b] - 1;
    const size_t row = FMLA_PARTITION_FIELDS * sizeof last,
                 at = (size_t)(c->layout.size[DIM_rows] - 1) * row + sizeof last + t->of.tensor.byte_offset;
    if (!t->memory || t->output) return;
    if (!strcmp(m->name, "partitions") && at + sizeof last <= t->bytes)
        memcpy(t->memory + at, &last, sizeof last);
    for (size_t i = 0; (m->allowed & ALLOW_I64) && i + 8 <= t->bytes; i += 8) {
        const int64_t slot = choose(in, 8) ? (int64_t)choose(in, 14) - 1 : any(in);
        memcpy(t->memory + i, &slot, sizeof slot);
    }
    memcpy(t->before, t->memory, t->bytes);
}

/* Makes the queries first; returns the bytes that the call is given. */
static size_t ask(enum operation operation, const void *args, bool *asked)
{
    struct answer answer[QUESTIONS] = {0};
    fmla_status status[QUESTIONS];
    char begin[32];
    snprintf(begin, sizeof begin, "%s: ", descriptors[operation].name);
    for (int question = 0; question < QUESTIONS; question++) {
        status[question] = described_ask(operation, question, args, &answer[question]);
        check_status(status[question], begin);
    }
    const bool sized = *asked = !status[ASK_BYTES];
    const struct answer *first = &answer[ASK_BYTES], *third = &answer[ASK_KERNEL];
    PROMISE(!sized || status[ASK_BOUND] || answer[ASK_BOUND].bytes >= first->bytes,
            "%zu bytes at most, and %zu needed", answer[ASK_BOUND].bytes, first->bytes);
    PROMISE(!sized || !status[ASK_KERNEL], "a size, and no more: %s", fmla_last_error());
    if (described_is_plan(operation))
        PROMISE(sized == !status[ASK_KERNEL] && (!sized || third->count[0] > 0), "%d partitions",
                third->count[0]);
    else
        PROMISE(!sized || (third->name && first->alignment), "alignment %zu", first->alignment);
    *asked = sized && first->bytes <= MOST_WORKSPACE;
    return *asked ? first->bytes : 64;
}

static void run(struct bytes *in, struct call *c)
{
    const struct descriptor *const d = &descriptors[c->operation];
    const bool makes_plan = described_is_plan(c->operation);
    const struct member *m;
    int tables = 0, which = 0;
    for (; (m = described_tensor(c->operation, which)); which++) {
        struct made *const t = &c->tensors[which];
        back(in, t);
        put_sense(in, c, m, t);
        *(const fmla_tensor **)(void *)(c->args + m->offset) = t->present ? &t->of.tensor : NULL;
        tables += t->present && (m->allowed & IN_CALLS);
    }
    uint8_t *const handed = hand_over(in, c->args, d->size);
    bool asked = true;
    size_t given = 0;
    const void *plan = NULL;
    if (described_asks(c->operation)) {
        m = described_member(c->operation, makes_plan ? "plan" : "workspace");
        given = ask(c->operation, handed, &asked);
        if (!makes_plan || !tables || choose(in, 16) == 15) {
            *(void **)(void *)(handed + m->offset) = garbage(given);
            memcpy(handed + m->offset + sizeof(void *), &given, sizeof given);
        }
        if (makes_plan) plan = *(void **)(void *)(handed + m->offset);
    }
    const fmla_status status = described_run(c->operation, handed);
    char begin[32];
    snprintf(begin, sizeof begin, "%s: ", d->name);
    check_status(status, begin);
    PROMISE(status || asked || (makes_plan && tables), "%s without a size was accepted", d->name);
    PROMISE(status || !makes_plan || !tables || (tables == 2 && !plan), "%s", "both ways at once");
    for (int i = 0; i < which; i++) check_memory(&c->tensors[i], status);
    if (plan && !tables) {
        fmla_plan_view view = FMLA_INIT(fmla_plan_view);
        const fmla_status described = fmla_plan_describe(plan, given, &view);
        check_status(described, "plan_describe: ");
        PROMISE(status || !described, "a plan that is none: %s", fmla_last_error());
    }
    free(handed);
    for (int i = 0; i < which; i++) free(c->tensors[i].memory), free(c->tensors[i].before);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { MOST_ARGS = 512 };
    static struct call call;
    static void *args;
    if (!args) args = exactly(MOST_ARGS);
    struct bytes in = {data, size};
    if (fmla_set_parallel_for(in_order, NULL, 1)) abort();
    memset(&call, 0, sizeof call);
    call.args = memset(args, 0, MOST_ARGS);
    call.operation = (enum operation)choose(&in, OPERATIONS);
    make_call(&in, &call);
    spoil(&in, &call);
    run(&in, &call);
    return 0;
}
