/* SPDX-License-Identifier: MIT
 *
 * Argument checks. A small good call is made, then spoiled in a few places by hostile values. Every tensor that could be
 * real is: it has exactly the memory that it spans. One that is too large for that has no data, and must be refused. So a
 * call is refused in words and writes nothing, or it runs, and writes its elements and nothing else.
 */
#include "fuzz.h"

#include <math.h>
#include <sanitizer/asan_interface.h>
#include <stdbool.h>
#include <string.h>

enum { MOST_DIMS = 6, MOST_BYTES = 1 << 15, MOST_ELEMENTS = 1 << 14, FILL = 0xa5, TENSORS = 9 };
enum { MOST_WORKSPACE = 1 << 21 };

struct made {
    fmla_tensor tensor;
    int64_t shape[MOST_DIMS], strides[MOST_DIMS];
    uint8_t *memory, *before;
    size_t bytes;
    bool present, output;
};

static const fmla_dtype bf16 = {FMLA_TYPE_BFLOAT, 16, 1}, fp16 = {FMLA_TYPE_FLOAT, 16, 1},
                        f32 = {FMLA_TYPE_FLOAT, 32, 1}, i32 = {FMLA_TYPE_INT, 32, 1},
                        u8 = {FMLA_TYPE_UINT, 8, 1};

static const int64_t hostile[] = {0,
                                  1,
                                  2,
                                  3,
                                  5,
                                  8,
                                  16,
                                  63,
                                  64,
                                  65,
                                  512,
                                  576,
                                  -1,
                                  -2,
                                  INT32_MAX,
                                  INT32_MIN,
                                  (int64_t)INT32_MAX + 1,
                                  INT64_MAX,
                                  INT64_MIN,
                                  INT64_MAX / 2,
                                  INT64_MAX / 4 + 1,
                                  (int64_t)1 << 40,
                                  (int64_t)1 << 32,
                                  4096,
                                  65536,
                                  65537};

static int64_t any(struct bytes *in)
{
    const uint32_t which = take(in);
    if (which < 64) return which;
    return hostile[which % (sizeof hostile / sizeof *hostile)];
}

/* ---- Tensors -------------------------------------------------------------------------------- */

static void start(struct made *t, fmla_dtype dtype, int ndim, const int64_t *shape, bool output)
{
    memset(t, 0, sizeof *t);
    t->tensor = (fmla_tensor){NULL, {FMLA_DEVICE_CPU, 0}, ndim, dtype, t->shape, t->strides, 0};
    t->present = true, t->output = output;
    int64_t stride = 1;
    for (int i = MOST_DIMS - 1; i >= 0; i--) {
        t->shape[i] = i < ndim ? shape[i] : 1, t->strides[i] = stride;
        stride *= t->shape[i];
    }
}

static void spoil_tensor(struct bytes *in, struct made *t)
{
    static const fmla_dtype *const dtypes[] = {&bf16, &fp16, &f32, &i32, &u8};
    const uint32_t dim = choose(in, MOST_DIMS);
    switch (choose(in, 12)) {
    case 0: t->shape[dim] = any(in); break;
    case 1: t->strides[dim] = any(in); break;
    case 2: t->strides[dim] = (int64_t)((uint64_t)t->strides[dim] + choose(in, 5)); break;
    case 3: t->tensor.strides = NULL; break;
    case 4: t->tensor.dtype = *dtypes[choose(in, 5)]; break;
    case 5: t->tensor.dtype.lanes = (uint16_t)take(in); break;
    case 6: t->tensor.dtype.bits = (uint8_t)take(in), t->tensor.dtype.code = (uint8_t)take(in); break;
    case 7: t->tensor.ndim = choose(in, 4) ? (int32_t)choose(in, MOST_DIMS + 1) : (int32_t)any(in); break;
    case 8: t->tensor.byte_offset = take(in); break;
    case 9: /* no GPU that is there: it would be given host memory */
        t->tensor.device.type = (int32_t)choose(in, 5), t->tensor.device.id = (int32_t)any(in) | 64;
        break;
    case 10: t->tensor.shape = NULL; break;
    default: t->present = false; break;
    }
}

/* The bytes from the first element to past the last; more than MOST_BYTES for whatever shall have no memory. Wide
 * arithmetic instead of the library's checks of overflow. */
static size_t span_of(const struct made *t)
{
    const fmla_tensor *tensor = &t->tensor;
    const size_t too_much = (size_t)MOST_BYTES + 1;
    if (tensor->ndim < 0 || tensor->ndim > MOST_DIMS || !tensor->shape) return 64;
    long double span = 1.0L, elements = 1.0L, stride = 1.0L;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        const long double size = (long double)t->shape[i];
        if (tensor->strides) stride = (long double)t->strides[i];
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
    t->bytes = span + t->tensor.byte_offset;
    t->memory = t->tensor.data = exactly(t->bytes);
    t->before = malloc(t->bytes + 1);
    memset(t->memory, t->output ? FILL : 0, t->bytes);
    const size_t drawn = in->left < t->bytes ? in->left : t->bytes;
    if (!t->output && drawn) memcpy(t->memory, in->at, drawn);
    memcpy(t->before, t->memory, t->bytes);
}

static void clear_elements(const struct made *t, uint8_t *at, int dim)
{
    const int64_t element = t->tensor.dtype.bits / 8;
    if (dim == t->tensor.ndim) {
        memset(at, FILL, (size_t)element);
        return;
    }
    int64_t stride = 1;
    if (t->tensor.strides)
        stride = t->strides[dim];
    else
        for (int i = dim + 1; i < t->tensor.ndim; i++) stride *= t->shape[i];
    if (dim == t->tensor.ndim - 1 && stride == 1) {
        memset(at, FILL, (size_t)(t->shape[dim] * element));
        return;
    }
    for (int64_t i = 0; i < t->shape[dim]; i++)
        clear_elements(t, at + (i ? i * stride : 0) * element, dim + 1);
}

/* After the call: inputs are as they were; so are outputs where the call was refused, and else outside their elements. */
static void check_memory(struct made *t, fmla_status status)
{
    if (!t->memory) {
        PROMISE(status || !t->present || span_of(t) == 0, "a tensor without memory was accepted");
        return;
    }
    if (t->output && t->present && status == FMLA_OK && span_of(t))
        clear_elements(t, t->memory + t->tensor.byte_offset, 0);
    PROMISE(!t->bytes || !memcmp(t->memory, t->before, t->bytes), "%s",
            "memory was written that must not be");
}

static void free_all(struct made *tensors, int count)
{
    for (int i = 0; i < count; i++) free(tensors[i].memory), free(tensors[i].before);
}

static void check_status(fmla_status status, const char *operation)
{
    const char *message = fmla_last_error();
    if (status == FMLA_OK) return;
    PROMISE(status <= FMLA_DEVICE_ERROR, "status %d", (int)status);
    PROMISE(!strncmp(message, operation, strlen(operation)) && strlen(message) > strlen(operation) + 4,
            "%s is refused with \"%s\"", operation, message);
}

/* An argument struct, in memory of its claimed size as long as that can be meant. */
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
    static const char *const kernels[] = {"ref",      "cpu-generic", NULL, "ref",
                                          "cpu-avx2", "cpu-avx512",  "",   "no"};
    return kernels[choose(in, 8)];
}

/* Memory full of garbage, whose first byte outside AddressSanitizer sees. One block for all inputs: pages that the system
 * gives anew for each cost more than the call. */
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

/* ---- The operations ------------------------------------------------------------------------- */

/* A plan in tables, or none. */
static void start_tables(struct bytes *in, struct made *rows, struct made *splits, int64_t b, bool output)
{
    const bool given = choose(in, 4) == 3;
    start(rows, i32, 2, (int64_t[]){1 + choose(in, 5), FMLA_PARTITION_FIELDS}, output);
    start(splits, i32, 1, (int64_t[]){b + 1}, output);
    rows->present = splits->present = given;
}

/* Rows of anything, but for where the last one ends: else all calls would be refused for that. */
static void end_with(struct made *t, int64_t rows, int32_t last)
{
    const size_t at = (size_t)((rows - 1) * FMLA_PARTITION_FIELDS + 1) * sizeof last + t->tensor.byte_offset;
    if (!t->memory || at + sizeof last > t->bytes) return;
    memcpy(t->memory + at, &last, sizeof last);
    memcpy(t->before + at, &last, sizeof last);
}

static void fuzz_decode(struct bytes *in)
{
    enum { Q, KV, TABLE, SEQLENS, SINK, OUT, LSE, ROWS, SPLITS };
    struct made t[TENSORS];
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.kernel = any_kernel(in);
    const bool tiny = args.kernel && !strcmp(args.kernel, "ref");
    const int64_t b = choose(in, 4), s_q = 1 + choose(in, 3), h_kv = 1 + choose(in, 2),
                  h_q = h_kv * (1 + choose(in, 3)), pages = 1 + choose(in, 4), page = 1 + choose(in, 8),
                  d_qk = tiny ? 1 + choose(in, 8) : 512, d_v = tiny ? 1 + choose(in, (uint32_t)d_qk) : 512;
    const fmla_dtype type = choose(in, 2) ? fp16 : bf16;
    start(&t[Q], type, 4, (int64_t[]){b, s_q, h_q, d_qk}, false);
    start(&t[KV], type, 4, (int64_t[]){pages, page, h_kv, d_qk}, false);
    start(&t[TABLE], i32, 2, (int64_t[]){b, 1 + choose(in, 3)}, false);
    start(&t[SEQLENS], i32, 1, &b, false);
    start(&t[SINK], f32, 1, &h_q, false);
    start(&t[OUT], type, 4, (int64_t[]){b, s_q, h_q, d_v}, true);
    start(&t[LSE], f32, 3, (int64_t[]){b, h_q, s_q}, true);
    args.causal = (int32_t)choose(in, 2), args.lse_empty = (int32_t)choose(in, 2);
    args.batch_invariant = (int32_t)choose(in, 2), args.num_partitions = (int32_t)choose(in, 4);
    if (choose(in, 2)) t[TABLE].present = false;
    if (choose(in, 2)) t[SINK].present = false;
    start_tables(in, &t[ROWS], &t[SPLITS], b, false);
    if (t[ROWS].present) args.num_partitions = 0;
    const int64_t rows = t[ROWS].shape[0];
    const uint32_t times = choose(in, 5);
    for (uint32_t i = 0; i < times; i++) {
        const uint32_t which = choose(in, TENSORS + 5);
        if (which < TENSORS)
            spoil_tensor(in, &t[which]);
        else if (which == TENSORS)
            args.causal = (int32_t)any(in), args.batch_invariant = (int32_t)any(in);
        else if (which == TENSORS + 1)
            args.lse_empty = (int32_t)any(in), args.log_base = (int32_t)any(in);
        else if (which == TENSORS + 2)
            args.num_partitions = (int32_t)any(in);
        else if (which == TENSORS + 3)
            args.softmax_scale = choose(in, 2) ? NAN : (float)any(in);
        else
            args.plan = t, args.plan_size = (size_t)any(in) % sizeof t;
    }
    for (int i = 0; i < TENSORS; i++) back(in, &t[i]);
    end_with(&t[ROWS], rows, (int32_t)b - 1);
    const fmla_tensor **members[] = {&args.q,       &args.kv_cache,   &args.block_table,
                                     &args.seqlens, &args.attn_sink,  &args.out,
                                     &args.lse,     &args.partitions, &args.num_splits};
    for (int i = 0; i < TENSORS; i++) *members[i] = t[i].present ? &t[i].tensor : NULL;

    fmla_dense_decode_args *handed = hand_over(in, &args, sizeof args);
    size_t bytes = 0, alignment = 0;
    const char *name = NULL;
    const fmla_status asked = fmla_dense_decode_workspace_size(handed, &bytes, &alignment);
    check_status(asked, "dense_decode: ");
    size_t bound = 0;
    const fmla_status bounded = fmla_dense_decode_workspace_bound(handed, &bound, NULL);
    check_status(bounded, "dense_decode: ");
    PROMISE(asked || bounded || bound >= bytes, "%zu bytes at most, and %zu needed", bound, bytes);
    const fmla_status named = fmla_dense_decode_kernel(handed, &name);
    PROMISE(!asked == !named || (asked && !named), "a size, and no kernel: %s", fmla_last_error());
    PROMISE(asked || (alignment), "alignment %zu", alignment);
    const size_t given = asked || bytes > MOST_WORKSPACE ? 64 : bytes;
    handed->workspace = garbage(given), handed->workspace_size = given;
    const fmla_status status = fmla_dense_decode(handed);
    check_status(status, "dense_decode: ");
    PROMISE(status || (!asked && bytes <= given), "a call without a size was accepted");
    for (int i = 0; i < TENSORS; i++) check_memory(&t[i], status);
    free(handed);
    free_all(t, TENSORS);
}

/* Indices are anything at all. */
static void fuzz_sparse(struct bytes *in)
{
    enum { Q, KV, INDICES, LENGTH, SINK, EXTRA, EXTRA_INDICES, EXTRA_LENGTH, OUT, LSE, COUNT };
    static const struct {
        int32_t format;
        int64_t d_qk, token;
    } formats[] = {
        {0, 512, 512}, {FMLA_KV_FP8_656, 576, 656}, {FMLA_KV_FP8_584, 512, 584}, {FMLA_KV_BF16, 512, 512}};
    struct made t[COUNT];
    fmla_sparse_decode_args args = FMLA_INIT(fmla_sparse_decode_args);
    args.kernel = any_kernel(in);
    const uint32_t which_format = choose(in, 4);
    const int64_t token = formats[which_format].token, d_qk = formats[which_format].d_qk;
    const fmla_dtype cache = token == d_qk ? bf16 : u8;
    const int64_t b = choose(in, 4), s_q = 1 + choose(in, 2), h_q = 1 + choose(in, 3);
    start(&t[Q], bf16, 4, (int64_t[]){b, s_q, h_q, d_qk}, false);
    start(&t[KV], cache, 4, (int64_t[]){choose(in, 4), 1 + choose(in, 6), 1, token}, false);
    start(&t[INDICES], i32, 3, (int64_t[]){b, s_q, choose(in, 70)}, false);
    start(&t[LENGTH], i32, 1, &b, false);
    start(&t[SINK], f32, 1, &h_q, false);
    start(&t[EXTRA], cache, 4, (int64_t[]){choose(in, 4), 1 + choose(in, 6), 1, token}, false);
    start(&t[EXTRA_INDICES], i32, 3, (int64_t[]){b, s_q, choose(in, 70)}, false);
    start(&t[EXTRA_LENGTH], i32, 1, &b, false);
    start(&t[OUT], bf16, 4, (int64_t[]){b, s_q, h_q, 512}, true);
    start(&t[LSE], f32, 3, (int64_t[]){b, h_q, s_q}, true);
    args.kv_format = formats[which_format].format;
    args.batch_invariant = (int32_t)choose(in, 2), args.num_partitions = (int32_t)choose(in, 4);
    if (choose(in, 2)) t[EXTRA].present = t[EXTRA_INDICES].present = t[EXTRA_LENGTH].present = false;
    if (choose(in, 2)) t[LENGTH].present = false;
    const uint32_t times = choose(in, 5);
    for (uint32_t i = 0; i < times; i++) {
        const uint32_t which = choose(in, COUNT + 3);
        if (which < COUNT)
            spoil_tensor(in, &t[which]);
        else if (which == COUNT)
            args.kv_format = (int32_t)any(in);
        else if (which == COUNT + 1)
            args.num_partitions = (int32_t)any(in), args.batch_invariant = (int32_t)any(in);
        else
            args.plan = t, args.plan_size = (size_t)any(in) % sizeof t;
    }
    for (int i = 0; i < COUNT; i++) back(in, &t[i]);
    const fmla_tensor **members[] = {&args.q,
                                     &args.kv_cache,
                                     &args.indices,
                                     &args.topk_length,
                                     &args.attn_sink,
                                     &args.extra_kv_cache,
                                     &args.extra_indices,
                                     &args.extra_topk_length,
                                     &args.out,
                                     &args.lse};
    for (int i = 0; i < COUNT; i++) *members[i] = t[i].present ? &t[i].tensor : NULL;
    fmla_sparse_decode_args *handed = hand_over(in, &args, sizeof args);
    size_t bytes = 0, alignment = 0;
    const fmla_status asked = fmla_sparse_decode_workspace_size(handed, &bytes, &alignment);
    check_status(asked, "sparse_decode: ");
    size_t bound = 0;
    const fmla_status bounded = fmla_sparse_decode_workspace_bound(handed, &bound, NULL);
    check_status(bounded, "sparse_decode: ");
    PROMISE(asked || bounded || bound >= bytes, "%zu bytes at most, and %zu needed", bound, bytes);
    PROMISE(asked || alignment, "alignment %zu", alignment);
    const size_t given = asked || bytes > MOST_WORKSPACE ? 64 : bytes;
    handed->workspace = garbage(given), handed->workspace_size = given;
    const fmla_status status = fmla_sparse_decode(handed);
    check_status(status, "sparse_decode: ");
    PROMISE(status || (!asked && bytes <= given), "a call without a size was accepted");
    for (int i = 0; i < COUNT; i++) check_memory(&t[i], status);
    free(handed);
    free_all(t, COUNT);
}

/* The same without a batch: over keys as they lie, of any number of key heads, or over pages. */
static void fuzz_prefill(struct bytes *in)
{
    enum { Q, KV, INDICES, LENGTH, SINK, OUT, MAX, LSE, COUNT };
    static const struct {
        int32_t format;
        int64_t d_qk, token;
    } formats[] = {
        {0, 512, 512}, {FMLA_KV_FP8_656, 576, 656}, {FMLA_KV_FP8_584, 512, 584}, {FMLA_KV_BF16, 576, 576}};
    struct made t[COUNT];
    fmla_sparse_prefill_args args = FMLA_INIT(fmla_sparse_prefill_args);
    args.kernel = any_kernel(in);
    const uint32_t which_format = choose(in, 4);
    const int64_t token = formats[which_format].token, d_qk = formats[which_format].d_qk;
    const bool bytes_of_tokens = token != d_qk, flat = !bytes_of_tokens && choose(in, 2);
    const int64_t s_q = choose(in, 5), h_kv = flat ? 1 + choose(in, 2) : 1, h_q = h_kv * (1 + choose(in, 2));
    start(&t[Q], bf16, 3, (int64_t[]){s_q, h_q, d_qk}, false);
    if (flat)
        start(&t[KV], bf16, 3, (int64_t[]){choose(in, 9), h_kv, d_qk}, false);
    else
        start(&t[KV], bytes_of_tokens ? u8 : bf16, 4, (int64_t[]){choose(in, 4), 1 + choose(in, 6), 1, token},
              false);
    start(&t[INDICES], i32, 3, (int64_t[]){s_q, h_kv, choose(in, 140)}, false);
    start(&t[LENGTH], i32, 1, &s_q, false);
    start(&t[SINK], f32, 1, &h_q, false);
    start(&t[OUT], bf16, 3, (int64_t[]){s_q, h_q, 512}, true);
    start(&t[MAX], f32, 2, (int64_t[]){s_q, h_q}, true);
    start(&t[LSE], f32, 2, (int64_t[]){s_q, h_q}, true);
    args.kv_format = formats[which_format].format;
    if (choose(in, 2)) t[LENGTH].present = false;
    const uint32_t times = choose(in, 5);
    for (uint32_t i = 0; i < times; i++) {
        const uint32_t which = choose(in, COUNT + 2);
        if (which < COUNT)
            spoil_tensor(in, &t[which]);
        else if (which == COUNT)
            args.kv_format = (int32_t)any(in);
        else
            args.lse_empty = (int32_t)any(in), args.log_base = (int32_t)any(in);
    }
    for (int i = 0; i < COUNT; i++) back(in, &t[i]);
    const fmla_tensor **members[] = {&args.q,         &args.kv,  &args.indices,    &args.topk_length,
                                     &args.attn_sink, &args.out, &args.max_logits, &args.lse};
    for (int i = 0; i < COUNT; i++) *members[i] = t[i].present ? &t[i].tensor : NULL;
    fmla_sparse_prefill_args *handed = hand_over(in, &args, sizeof args);
    size_t bytes = 0, alignment = 0;
    const fmla_status asked = fmla_sparse_prefill_workspace_size(handed, &bytes, &alignment);
    check_status(asked, "sparse_prefill: ");
    size_t bound = 0;
    const fmla_status bounded = fmla_sparse_prefill_workspace_bound(handed, &bound, NULL);
    check_status(bounded, "sparse_prefill: ");
    PROMISE(asked || bounded || bound >= bytes, "%zu bytes at most, and %zu needed", bound, bytes);
    PROMISE(asked || alignment, "alignment %zu", alignment);
    const size_t given = asked || bytes > MOST_WORKSPACE ? 64 : bytes;
    handed->workspace = garbage(given), handed->workspace_size = given;
    const fmla_status status = fmla_sparse_prefill(handed);
    check_status(status, "sparse_prefill: ");
    PROMISE(status || (!asked && bytes <= given), "a call without a size was accepted");
    for (int i = 0; i < COUNT; i++) check_memory(&t[i], status);
    free(handed);
    free_all(t, COUNT);
}

static void fuzz_merge(struct bytes *in)
{
    enum { PARTS, LSE_PARTS, SINK, OUT, LSE, COUNT };
    static const fmla_dtype *const types[] = {&bf16, &fp16, &f32};
    static const char *const kernels[] = {NULL, "cpu-generic", "ref", "no"};
    struct made t[COUNT];
    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    const int64_t n = choose(in, 5), b = choose(in, 4), s_q = choose(in, 4), h_q = choose(in, 5),
                  d_v = choose(in, 9);
    start(&t[PARTS], *types[choose(in, 3)], 5, (int64_t[]){n, b, s_q, h_q, d_v}, false);
    start(&t[LSE_PARTS], f32, 4, (int64_t[]){n, b, h_q, s_q}, false);
    start(&t[SINK], f32, 1, &h_q, false);
    start(&t[OUT], *types[choose(in, 3)], 4, (int64_t[]){b, s_q, h_q, d_v}, true);
    start(&t[LSE], f32, 3, (int64_t[]){b, h_q, s_q}, true);
    if (choose(in, 2)) t[SINK].present = false;
    args.kernel = kernels[choose(in, 4)];
    const uint32_t times = choose(in, 5);
    for (uint32_t i = 0; i < times; i++) {
        const uint32_t which = choose(in, COUNT + 1);
        if (which < COUNT)
            spoil_tensor(in, &t[which]);
        else
            args.lse_empty = (int32_t)any(in), args.log_base = (int32_t)any(in);
    }
    for (int i = 0; i < COUNT; i++) back(in, &t[i]);
    const fmla_tensor **members[] = {&args.out_parts, &args.lse_parts, &args.attn_sink, &args.out, &args.lse};
    for (int i = 0; i < COUNT; i++) *members[i] = t[i].present ? &t[i].tensor : NULL;
    fmla_merge_args *handed = hand_over(in, &args, sizeof args);
    const fmla_status status = fmla_merge(handed);
    check_status(status, "merge: ");
    for (int i = 0; i < COUNT; i++) check_memory(&t[i], status);
    free(handed);
    free_all(t, COUNT);
}

/* Slots of the cache as a rule, for anything else is refused at once. */
static void draw_slots(struct bytes *in, struct made *t)
{
    for (size_t at = 0; t->memory && at + 8 <= t->bytes; at += 8) {
        const int64_t slot = choose(in, 8) ? (int64_t)choose(in, 14) - 1 : any(in);
        memcpy(t->memory + at, &slot, sizeof slot);
        memcpy(t->before + at, &slot, sizeof slot);
    }
}

static void fuzz_cache(struct bytes *in)
{
    enum { VECTORS, ROPE, CACHE, SLOTS, COUNT };
    static const fmla_dtype *const types[] = {&bf16, &fp16, &f32};
    static const int64_t widths[] = {0, 70, 66, 656, 584, 576}; /* by format; of bf16 and fp16 any */
    const fmla_dtype i64 = {FMLA_TYPE_INT, 64, 1};
    struct made t[COUNT];
    const bool append = choose(in, 2), apart = append && choose(in, 2);
    int32_t format = 1 + (int32_t)choose(in, 5);
    const int64_t tokens = choose(in, 4), pages = choose(in, 4), page_size = 1 + choose(in, 4);
    const int64_t d_qk = format < 3 ? widths[format] : format == FMLA_KV_FP8_584 ? 512 : 576;
    const fmla_dtype type = *types[choose(in, 3)], of_cache = format == 1 ? bf16 : format == 2 ? fp16 : u8;
    const char *const kernel = any_kernel(in);
    float scale = format == FMLA_KV_FP8_576 ? 0.5f : 0.0f;
    start(&t[VECTORS], type, 2, (int64_t[]){tokens, d_qk - (apart ? 64 : 0)}, !append);
    start(&t[ROPE], type, 2, (int64_t[]){tokens, 64}, false);
    start(&t[CACHE], of_cache, 4, (int64_t[]){pages, page_size, 1, widths[format]}, append);
    start(&t[SLOTS], i64, 1, &tokens, false);
    t[ROPE].present = apart;
    const uint32_t times = choose(in, 5);
    for (uint32_t i = 0; i < times; i++) {
        const uint32_t which = choose(in, COUNT + 2);
        if (which < COUNT)
            spoil_tensor(in, &t[which]);
        else if (which == COUNT)
            format = (int32_t)any(in);
        else
            scale = choose(in, 2) ? NAN : (float)any(in);
    }
    for (int i = 0; i < COUNT; i++) back(in, &t[i]);
    draw_slots(in, &t[SLOTS]);
    const fmla_tensor *given[COUNT];
    for (int i = 0; i < COUNT; i++) given[i] = t[i].present ? &t[i].tensor : NULL;
    fmla_status status;
    void *handed;
    if (append) {
        fmla_cache_append_args args = FMLA_INIT(fmla_cache_append_args);
        args.latent = given[VECTORS], args.rope = given[ROPE], args.kv_cache = given[CACHE];
        args.slot_mapping = given[SLOTS], args.kernel = kernel;
        args.kv_format = format, args.cache_scale = scale;
        handed = hand_over(in, &args, sizeof args);
        status = fmla_cache_append(handed);
        check_status(status, "cache_append: ");
    } else {
        fmla_cache_gather_args args = FMLA_INIT(fmla_cache_gather_args);
        args.kv_cache = given[CACHE], args.slots = given[SLOTS], args.out = given[VECTORS];
        args.kernel = kernel, args.kv_format = format, args.cache_scale = scale;
        handed = hand_over(in, &args, sizeof args);
        status = fmla_cache_gather(handed);
        check_status(status, "cache_gather: ");
    }
    for (int i = 0; i < COUNT; i++) check_memory(&t[i], status);
    free(handed);
    free_all(t, COUNT);
}

static void fuzz_plan(struct bytes *in)
{
    enum { SEQLENS, ROWS, SPLITS, COUNT };
    struct made t[COUNT];
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    const int64_t b = choose(in, 30);
    start(&t[SEQLENS], i32, 1, &b, false);
    args.s_q = 1 + choose(in, 4), args.h_kv = 1 + choose(in, 4), args.h_q = args.h_kv * (1 + choose(in, 9));
    args.num_partitions = (int32_t)choose(in, 9);
    start_tables(in, &t[ROWS], &t[SPLITS], b, true);
    if (t[ROWS].present) args.num_partitions = 0;
    const uint32_t times = choose(in, 5);
    for (uint32_t i = 0; i < times; i++) {
        switch (choose(in, 8)) {
        case 0: args.s_q = any(in); break;
        case 1: args.h_q = any(in); break;
        case 2: args.h_kv = any(in); break;
        case 3: args.capacity = any(in); break;
        case 4: args.target.type = (int32_t)choose(in, 5), args.target.id = (int32_t)any(in); break;
        case 5: args.num_workers = (int32_t)any(in); break;
        case 6: args.num_partitions = (int32_t)any(in); break;
        default: spoil_tensor(in, &t[choose(in, COUNT)]); break;
        }
    }
    for (int i = 0; i < COUNT; i++) back(in, &t[i]);
    const fmla_tensor **members[] = {&args.seqlens, &args.partitions, &args.num_splits};
    for (int i = 0; i < COUNT; i++) *members[i] = t[i].present ? &t[i].tensor : NULL;
    const bool in_tables = t[ROWS].present || t[SPLITS].present;
    fmla_decode_plan_args *handed = hand_over(in, &args, sizeof args);
    size_t bytes = 0;
    int32_t count = 0;
    const fmla_status asked = fmla_decode_plan_size(handed, &bytes);
    check_status(asked, "decode_plan: ");
    PROMISE(fmla_decode_plan_partitions(handed, &count) == asked && (asked || count > 0), "%d partitions",
            count);
    const size_t given = asked || bytes > MOST_WORKSPACE ? 32 : bytes;
    if (!in_tables || choose(in, 16) == 15) handed->plan = garbage(given), handed->plan_size = given;
    const fmla_status status = fmla_decode_plan(handed);
    check_status(status, "decode_plan: ");
    PROMISE(status || in_tables || (!asked && bytes <= given), "a plan without a size was accepted");
    PROMISE(status || !in_tables || (t[ROWS].present && t[SPLITS].present && !handed->plan),
            "both ways at once");
    for (int i = 0; i < COUNT; i++) check_memory(&t[i], status);
    if (!in_tables) {
        fmla_plan_view view = FMLA_INIT(fmla_plan_view);
        const fmla_status described = fmla_plan_describe(handed->plan, given, &view);
        check_status(described, "plan_describe: ");
        PROMISE(status || !described, "a plan that is none: %s", fmla_last_error());
    }
    free(handed);
    free_all(t, COUNT);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct bytes in = {data, size};
    if (fmla_set_parallel_for(in_order, NULL, 1)) abort();
    switch (choose(&in, 7)) {
    case 0: fuzz_plan(&in); break;
    case 1: fuzz_merge(&in); break;
    case 2: fuzz_sparse(&in); break;
    case 4: fuzz_cache(&in); break;
    case 5: fuzz_prefill(&in); break;
    default: fuzz_decode(&in); break;
    }
    return 0;
}
