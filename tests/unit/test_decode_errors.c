/* SPDX-License-Identifier: MIT
 *
 * Every argument that fmla_dense_decode and fmla_dense_decode_workspace_size must reject, and odd ones that
 * they must take.
 */
#include "arguments.h"
#include "random.h"

#include <math.h>
#include <stdbool.h>

enum { B = 2, S_Q = 2, H_Q = 4, H_KV = 2, D_QK = 576, D_V = 512, PAGES = 6, PAGE = 16, MAX_PAGES = 3 };
enum { OUT = B * S_Q * H_Q * D_V, LSE = B * H_Q * S_Q, PATTERN = 0xc3, WORKSPACE = 1 << 22 };

static const char op[] = "dense_decode";

static _Alignas(64) uint16_t q_data[B * S_Q * H_Q * D_QK + 1], kv_data[PAGES * PAGE * H_KV * D_QK + 1],
    out_data[OUT + 1], out_before[OUT + 1];
static _Alignas(64) int32_t table_data[B * MAX_PAGES + 1], seqlens_data[B + 1];
static _Alignas(64) float sink_data[H_Q + 1], lse_data[LSE + 1], lse_before[LSE + 1];
static _Alignas(64) char plan_data[4096], other_plan[4096], workspace[WORKSPACE];
static size_t plan_bytes, other_plan_bytes, workspace_bytes;

static struct held q, kv, table, seqlens, sink, out, lse;
static union {
    fmla_dense_decode_args args;
    char bytes[sizeof(fmla_dense_decode_args) + 64]; /* a caller with a later header */
} call;
#define ARGS call.args

static const struct argument arguments[] = {
    {"q", &q, &ARGS.q, "bfloat16 or float16", 0, 0},
    {"kv_cache", &kv, &ARGS.kv_cache, "bfloat16", 0, 0},
    {"block_table", &table, &ARGS.block_table, "int32", 1, 0},
    {"seqlens", &seqlens, &ARGS.seqlens, "int32", 0, 0},
    {"attn_sink", &sink, &ARGS.attn_sink, "float32", 1, 0},
    {"out", &out, &ARGS.out, "bfloat16", 0, 1},
    {"lse", &lse, &ARGS.lse, "float32", 1, 1},
};
enum { ARGUMENTS = sizeof arguments / sizeof arguments[0] };

static void set_up(void)
{
    static const int32_t pages[B * MAX_PAGES] = {4, 0, -1, 5, 1, 2};
    static const int32_t lengths[B] = {20, 33};
    for (size_t i = 0; i < sizeof q_data / 2; i++) q_data[i] = (uint16_t)(0x3c00 + i % 97);
    for (size_t i = 0; i < sizeof kv_data / 2; i++) kv_data[i] = (uint16_t)(0x3b00 + i % 89);
    memcpy(table_data, pages, sizeof pages);
    memcpy(seqlens_data, lengths, sizeof lengths);
    memset(sink_data, 0, sizeof sink_data);
    memset(out_data, PATTERN, sizeof out_data), memset(out_before, PATTERN, sizeof out_before);
    memset(lse_data, PATTERN, sizeof lse_data), memset(lse_before, PATTERN, sizeof lse_before);
    HELD(&q, q_data, bf16, 4, B, S_Q, H_Q, D_QK);
    HELD(&kv, kv_data, bf16, 4, PAGES, PAGE, H_KV, D_QK);
    HELD(&table, table_data, i32, 2, B, MAX_PAGES);
    HELD(&seqlens, seqlens_data, i32, 1, B);
    HELD(&sink, sink_data, f32, 1, H_Q);
    HELD(&out, out_data, bf16, 4, B, S_Q, H_Q, D_V);
    HELD(&lse, lse_data, f32, 3, B, H_Q, S_Q);
    memset(&call, 0, sizeof call);
    ARGS = FMLA_INIT(fmla_dense_decode_args);
    for (int i = 0; i < ARGUMENTS; i++) *arguments[i].member = &arguments[i].held->tensor;
    ARGS.workspace = workspace, ARGS.workspace_size = sizeof workspace;
}

static int untouched(void)
{
    return !memcmp(out_data, out_before, sizeof out_data) && !memcmp(lse_data, lse_before, sizeof lse_data);
}

/* The call must work, and reach every element of the outputs. */
static void check_accepted(const char *label)
{
    size_t bytes = 0, alignment = 0;
    fmla_status status = fmla_dense_decode_workspace_size(&ARGS, &bytes, &alignment);
    CHECK(status == FMLA_OK && bytes <= sizeof workspace, "%s: size: %s (%zu bytes)", label,
          fmla_last_error(), bytes);
    CHECK(alignment && !(alignment & (alignment - 1)), "%s: alignment is %zu", label, alignment);
    status = fmla_dense_decode(&ARGS);
    CHECK(status == FMLA_OK, "%s: %s: %s", label, fmla_status_name(status), fmla_last_error());
}

static void check_written(const char *label)
{
    int64_t same = 0;
    for (int i = 0; i < OUT; i++) same += out_data[i] == out_before[i];
    for (int i = 0; ARGS.lse && i < LSE; i++) same += !memcmp(&lse_data[i], &lse_before[i], 4);
    CHECK(same == 0, "%s: %" PRId64 " elements were not written", label, same);
    CHECK(out_data[OUT] == out_before[OUT] && !memcmp(&lse_data[LSE], &lse_before[LSE], 4),
          "%s: written past the end", label);
}

/* The call, and unless only it reads what is wrong, the question for its workspace, must fail alike. */
static void check_both(const char *label, fmla_status status, const char *argument, const char *words,
                       int only_call)
{
    if (!only_call) {
        size_t bytes = 12345, alignment = 54321;
        check_rejected(label, fmla_dense_decode_workspace_size(&ARGS, &bytes, &alignment), status, op,
                       argument, words);
        CHECK(bytes == 12345 && alignment == 54321, "%s: a failed question answered %zu, %zu", label, bytes,
              alignment);
    }
    /* Whether a kernel is named follows what a size is answered for, the size's own overflow aside. */
    const char *kernel = "untouched";
    const fmla_status named = fmla_dense_decode_kernel(&ARGS, &kernel);
    CHECK((named == FMLA_OK) == (strcmp(kernel, "untouched") != 0), "%s: status %d, kernel %s", label, named,
          kernel);
    if (named != FMLA_OK) check_rejected(label, named, status, op, argument, words);
    check_rejected(label, fmla_dense_decode(&ARGS), status, op, argument, words);
    CHECK(untouched(), "%s: a failed call wrote to its outputs", label);
}

/* ---- Tensors ----------------------------------------------------------------------------------------- */

static void test_tensors(void)
{
    char words[160], label[96];
    for (int i = 0; i < ARGUMENTS; i++)
        for (int fault = 0; fault < FAULTS; fault++) {
            set_up();
            const char *what = spoil(&arguments[i], fault, words);
            if (!what) continue;
            snprintf(label, sizeof label, "%s: %s", arguments[i].name, what);
            check_both(label, FMLA_INVALID_ARGUMENT, arguments[i].name, words,
                       fault == FAULT_DATA_NULL || fault == FAULT_DATA_MISALIGNED ||
                           fault == FAULT_OFFSET_MISALIGNED);
        }
    /* One tensor elsewhere: the message names one of the two devices' tensors, and both devices. */
    for (int i = 1; i < ARGUMENTS; i++) {
        set_up();
        arguments[i].held->tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 3};
        snprintf(label, sizeof label, "%s on cuda:3", arguments[i].name);
        check_both(label, FMLA_INVALID_ARGUMENT, arguments[i].name, "cuda:3|cpu", 0);
    }
    set_up();
    q.tensor.device.device_type = FMLA_DEVICE_CUDA;
    check_both("q on cuda", FMLA_INVALID_ARGUMENT, "kv_cache", "cpu|cuda:0", 0);
}

/* ---- Sizes that disagree ----------------------------------------------------------------------------- */

static const struct {
    struct held *held;
    int dimension;
    int64_t size;
    const char *argument, *words;
} sizes[] = {
    {&q, 1, 0, "q", "s_q|0"},
    {&q, 2, 0, "q", "h_q|0"},
    {&q, 3, 0, "q", "d_qk|0"},
    {&q, 2, 3, "q", "h_q|3|multiple|2"},
    {&kv, 1, 0, "kv_cache", "page_size|0"},
    {&kv, 2, 0, "kv_cache", "h_kv|0"},
    {&kv, 3, 512, "kv_cache", "d_qk|512|576"},
    {&table, 0, 1, "block_table", "b|1|2"},
    {&seqlens, 0, 1, "seqlens", "b|1|2"},
    {&sink, 0, 2, "attn_sink", "h_q|2|4"},
    {&out, 0, 1, "out", "b|1|2"},
    {&out, 1, 1, "out", "s_q|1|2"},
    {&out, 2, 2, "out", "h_q|2|4"},
    {&out, 3, 0, "out", "d_v|0"},
    {&lse, 0, 1, "lse", "b|1|2"},
    {&lse, 1, 2, "lse", "h_q|2|4"},
    {&lse, 2, 1, "lse", "s_q|1|2"},
};

static void test_sizes(void)
{
    char label[96];
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        set_up();
        sizes[k].held->shape[sizes[k].dimension] = sizes[k].size;
        snprintf(label, sizeof label, "%s: size %" PRId64 " of dimension %d", sizes[k].argument,
                 sizes[k].size, sizes[k].dimension);
        check_both(label, FMLA_INVALID_ARGUMENT, sizes[k].argument, sizes[k].words, 0);
    }
    /* d_v above d_qk; the row is long enough to be written, so only the check stands in the way. */
    set_up();
    HELD(&q, q_data, bf16, 4, B, S_Q, H_Q, 256);
    HELD(&kv, kv_data, bf16, 4, PAGES, PAGE, H_KV, 256);
    check_both("d_v above d_qk", FMLA_INVALID_ARGUMENT, "out", "d_v|512|256", 0);
    /* Without a table page r is request r's. */
    set_up();
    ARGS.block_table = NULL;
    kv.shape[0] = 1;
    check_both("fewer pages than requests", FMLA_INVALID_ARGUMENT, "kv_cache", "pages|1|2|block_table", 0);
}

/* ---- Everything else --------------------------------------------------------------------------------- */

#define MUTATION(name, ...)                                                                                  \
    static void name(void)                                                                                   \
    {                                                                                                        \
        __VA_ARGS__;                                                                                         \
    }

MUTATION(size_0, ARGS.struct_size = 0)
MUTATION(size_1, ARGS.struct_size = 1)
MUTATION(size_less, ARGS.struct_size = sizeof ARGS - 8)
MUTATION(size_most, ARGS.struct_size = SIZE_MAX)
MUTATION(size_tail, ARGS.struct_size = sizeof call; call.bytes[sizeof call - 1] = 1)
MUTATION(size_tail_first, ARGS.struct_size = sizeof ARGS + 8; call.bytes[sizeof ARGS] = 1)
MUTATION(scale_nan, ARGS.softmax_scale = NAN)
MUTATION(scale_inf, ARGS.softmax_scale = -INFINITY)
MUTATION(causal_2, ARGS.causal = 2)
MUTATION(causal_minus, ARGS.causal = -1)
MUTATION(invariant_2, ARGS.batch_invariant = 2)
MUTATION(invariant_minus, ARGS.batch_invariant = -1)
MUTATION(lse_empty_2, ARGS.lse_empty = 2)
MUTATION(lse_empty_minus, ARGS.lse_empty = -1)
MUTATION(log_base_1, ARGS.log_base = 1)
MUTATION(log_base_10, ARGS.log_base = 10)
MUTATION(partitions_minus, ARGS.num_partitions = -1)
MUTATION(partitions_many, ARGS.num_partitions = 65537)
MUTATION(kernel_unknown, ARGS.kernel = "sm90-imaginary")
MUTATION(kernel_empty, ARGS.kernel = "")
MUTATION(plan_none, ARGS.plan = workspace; ARGS.plan_size = 4096; memset(workspace, 7, 4096))
MUTATION(plan_odd, memmove(other_plan + 4, plan_data, plan_bytes); ARGS.plan = other_plan + 4;
         ARGS.plan_size = plan_bytes)
MUTATION(plan_other_batch, ARGS.plan = other_plan; ARGS.plan_size = other_plan_bytes)
MUTATION(plan_partitions, ARGS.plan = plan_data; ARGS.plan_size = plan_bytes; memset(plan_data + 4, 255, 4))
MUTATION(d_qk_320, HELD(&q, q_data, bf16, 4, B, S_Q, H_Q, 320);
         HELD(&kv, kv_data, bf16, 4, PAGES, PAGE, H_KV, 320); HELD(&out, out_data, bf16, 4, B, S_Q, H_Q, 256))
MUTATION(d_qk_320_forced, d_qk_320(); ARGS.kernel = "cpu-generic")
MUTATION(d_v_128, HELD(&out, out_data, bf16, 4, B, S_Q, H_Q, 128))
static void all_cuda(void)
{
    for (int i = 0; i < ARGUMENTS; i++)
        arguments[i].held->tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 99};
}

static const struct mutation mutations[] = {
    {"struct_size 0", size_0, FMLA_INVALID_ARGUMENT, "struct_size", "0|must be"},
    {"struct_size 1", size_1, FMLA_INVALID_ARGUMENT, "struct_size", "1|must be"},
    {"struct_size too small", size_less, FMLA_INVALID_ARGUMENT, "struct_size", "must be"},
    {"struct_size SIZE_MAX", size_most, FMLA_INVALID_ARGUMENT, "struct_size", "18446744073709551615"},
    {"struct_size with a tail", size_tail, FMLA_UNSUPPORTED, "struct_size", "0.1.0"},
    {"struct_size, first byte", size_tail_first, FMLA_UNSUPPORTED, "struct_size", "0.1.0"},
    {"softmax_scale NaN", scale_nan, FMLA_INVALID_ARGUMENT, "softmax_scale", "nan|finite"},
    {"softmax_scale -inf", scale_inf, FMLA_INVALID_ARGUMENT, "softmax_scale", "-inf|finite"},
    {"causal 2", causal_2, FMLA_INVALID_ARGUMENT, "causal", "2|0|1"},
    {"causal -1", causal_minus, FMLA_INVALID_ARGUMENT, "causal", "-1|0|1"},
    {"batch_invariant 2", invariant_2, FMLA_INVALID_ARGUMENT, "batch_invariant", "2|0|1"},
    {"batch_invariant -1", invariant_minus, FMLA_INVALID_ARGUMENT, "batch_invariant", "-1|0|1"},
    {"lse_empty 2", lse_empty_2, FMLA_INVALID_ARGUMENT, "lse_empty", "2|0|1"},
    {"lse_empty -1", lse_empty_minus, FMLA_INVALID_ARGUMENT, "lse_empty", "-1|0|1"},
    {"log_base 1", log_base_1, FMLA_INVALID_ARGUMENT, "log_base", "1|0|2"},
    {"log_base 10", log_base_10, FMLA_INVALID_ARGUMENT, "log_base", "10|0|2"},
    {"num_partitions -1", partitions_minus, FMLA_INVALID_ARGUMENT, "num_partitions", "-1|65536"},
    {"num_partitions 65537", partitions_many, FMLA_INVALID_ARGUMENT, "num_partitions", "65537|65536"},
    {"unknown kernel", kernel_unknown, FMLA_INVALID_ARGUMENT, "kernel", "sm90-imaginary|cpu-generic|ref"},
    {"empty kernel name", kernel_empty, FMLA_INVALID_ARGUMENT, "kernel", "cpu-generic|ref"},
    {"no plan", plan_none, FMLA_INVALID_ARGUMENT, "plan", "fmla_decode_plan"},
    {"plan misaligned", plan_odd, FMLA_INVALID_ARGUMENT, "plan", "aligned|16"},
    {"plan for another batch", plan_other_batch, FMLA_INVALID_ARGUMENT, "plan", "5|2"},
    {"plan with -1 partitions", plan_partitions, FMLA_INVALID_ARGUMENT, "plan", "-1"},
    {"d_qk without a kernel", d_qk_320, FMLA_UNSUPPORTED, "q", "d_qk is 320|512|576"},
    {"d_qk not of that kernel", d_qk_320_forced, FMLA_UNSUPPORTED, "q", "d_qk is 320|cpu-generic|512|576"},
    {"d_v without a kernel", d_v_128, FMLA_UNSUPPORTED, "q", "d_v is 128|512"},
    {"all on cuda", all_cuda, FMLA_UNSUPPORTED, "q", "device is cuda:99: "},
};

MUTATION(workspace_null, ARGS.workspace = NULL)
MUTATION(workspace_none, ARGS.workspace = NULL; ARGS.workspace_size = 0)
MUTATION(workspace_small, ARGS.workspace_size = workspace_bytes - 1)
MUTATION(workspace_odd, ARGS.workspace = workspace + 1; ARGS.workspace_size = workspace_bytes)
MUTATION(page_negative, table_data[1] = -1)
MUTATION(page_beyond, table_data[B * MAX_PAGES - 1] = PAGES)
MUTATION(page_of_no_cache, HELD(&kv, NULL, bf16, 4, 0, PAGE, H_KV, D_QK))

static const struct mutation call_mutations[] = {
    {"workspace NULL", workspace_null, FMLA_INVALID_ARGUMENT, "workspace", "NULL"},
    {"no workspace", workspace_none, FMLA_BUFFER_TOO_SMALL, "workspace_size", "0|at least"},
    {"workspace a byte too small", workspace_small, FMLA_BUFFER_TOO_SMALL, "workspace_size", "at least"},
    {"workspace misaligned", workspace_odd, FMLA_INVALID_ARGUMENT, "workspace", "aligned"},
    {"used page -1", page_negative, FMLA_INVALID_ARGUMENT, "block_table", "[0, 1]|-1|6"},
    {"used page past the end", page_beyond, FMLA_INVALID_ARGUMENT, "block_table", "[1, 2]|6|6"},
    {"pages of an empty cache", page_of_no_cache, FMLA_INVALID_ARGUMENT, "block_table", "[0, 0]|4|0"},
};

static void make_plan(int64_t requests, int32_t partitions, char *plan, size_t *bytes)
{
    static int32_t lengths[8] = {20, 33, 1, 0, 70};
    struct held held;
    HELD(&held, lengths, i32, 1, requests);
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &held.tensor, args.s_q = S_Q, args.h_q = H_Q, args.h_kv = H_KV,
    args.num_partitions = partitions;
    args.plan = plan, args.plan_size = sizeof plan_data;
    CHECK(fmla_decode_plan_size(&args, bytes) == FMLA_OK && fmla_decode_plan(&args) == FMLA_OK, "%s",
          fmla_last_error());
}

static void test_mutations(void)
{
    for (size_t k = 0; k < sizeof mutations / sizeof mutations[0]; k++) {
        make_plan(B, 3, plan_data, &plan_bytes);
        make_plan(5, 3, other_plan, &other_plan_bytes);
        set_up();
        mutations[k].apply();
        check_both(mutations[k].label, mutations[k].status, mutations[k].argument, mutations[k].words, 0);
    }
    for (size_t k = 0; k < sizeof call_mutations / sizeof call_mutations[0]; k++) {
        set_up();
        CHECK(fmla_dense_decode_workspace_size(&ARGS, &workspace_bytes, NULL) == FMLA_OK, "%s",
              fmla_last_error());
        call_mutations[k].apply();
        check_both(call_mutations[k].label, call_mutations[k].status, call_mutations[k].argument,
                   call_mutations[k].words, 1);
        char needed[32];
        snprintf(needed, sizeof needed, "%zu bytes", workspace_bytes);
        if (call_mutations[k].status == FMLA_BUFFER_TOO_SMALL)
            CHECK(strstr(fmla_last_error(), needed), "%s: \"%s\" does not say %s", call_mutations[k].label,
                  fmla_last_error(), needed);
    }
    size_t bytes = 1;
    check_rejected("NULL args", fmla_dense_decode(NULL), FMLA_INVALID_ARGUMENT, op, "args", "NULL");
    check_rejected("NULL args", fmla_dense_decode_workspace_size(NULL, &bytes, NULL), FMLA_INVALID_ARGUMENT,
                   op, "args", "NULL");
    /* A plan cut off anywhere, from nothing on. */
    make_plan(B, 3, plan_data, &plan_bytes);
    for (size_t cut = 0; cut < plan_bytes; cut++) {
        set_up();
        ARGS.plan = plan_data, ARGS.plan_size = cut;
        const fmla_status status = fmla_dense_decode(&ARGS);
        CHECK(status == FMLA_BUFFER_TOO_SMALL || status == FMLA_INVALID_ARGUMENT,
              "a plan cut off at %zu of %zu bytes: %s", cut, plan_bytes, fmla_status_name(status));
        CHECK(!strncmp(fmla_last_error(), "dense_decode: plan", 18) && untouched(), "plan cut at %zu: %s",
              cut, fmla_last_error());
    }
}

/* ---- What must be taken ------------------------------------------------------------------------------ */

MUTATION(as_is, (void)0)
MUTATION(pinned, for (int i = 0; i < ARGUMENTS; i++) arguments[i].held->tensor.device.device_type =
                     i & 1 ? FMLA_DEVICE_CPU : FMLA_DEVICE_CUDA_HOST)
MUTATION(no_strides, for (int i = 0; i < ARGUMENTS; i++) arguments[i].held->tensor.strides = NULL)
MUTATION(larger, ARGS.struct_size = sizeof call)
MUTATION(optional, ARGS.block_table = NULL; ARGS.attn_sink = NULL; ARGS.lse = NULL; seqlens_data[1] = 5)
MUTATION(lengths_wild, seqlens_data[0] = INT32_MIN; seqlens_data[1] = INT32_MAX)
MUTATION(garbage_plan_unread, ARGS.plan = q_data; ARGS.plan_size = 1; ARGS.batch_invariant = 1)
MUTATION(with_plan, ARGS.plan = plan_data; ARGS.plan_size = plan_bytes)
MUTATION(unused_pages, table_data[2] = 2147480000; seqlens_data[1] = 0;
         table_data[3] = table_data[4] = INT32_MIN)
MUTATION(by_reference, ARGS.kernel = "ref"; d_qk_320())
MUTATION(
    offset, for (int i = 0; i < ARGUMENTS; i++) {
        fmla_tensor *t = &arguments[i].held->tensor;
        t->data = (char *)t->data - 4096;
        t->byte_offset = 4096;
    })

static const struct {
    const char *label;
    void (*apply)(void);
} accepted[] = {
    {"as it is", as_is},
    {"pinned host memory", pinned},
    {"no strides", no_strides},
    {"a larger struct, zero behind", larger},
    {"optional tensors left out", optional},
    {"lengths outside of the cache", lengths_wild},
    {"a plan that is not read", garbage_plan_unread},
    {"a plan", with_plan},
    {"unused pages", unused_pages},
    {"byte offsets", offset},
};

static void test_accepted(void)
{
    make_plan(B, 3, plan_data, &plan_bytes);
    for (size_t k = 0; k < sizeof accepted / sizeof accepted[0]; k++) {
        set_up();
        accepted[k].apply();
        check_accepted(accepted[k].label);
        check_written(accepted[k].label);
    }
    set_up();
    by_reference();
    check_accepted("the oracle takes any d_qk");
    /* Strides of dimensions with one element are never used. */
    set_up();
    HELD(&q, q_data, bf16, 4, 1, 1, 1, D_QK), HELD(&kv, kv_data, bf16, 4, 1, PAGE, 1, D_QK);
    HELD(&table, table_data, i32, 2, 1, 1), HELD(&seqlens, seqlens_data, i32, 1, 1);
    HELD(&sink, sink_data, f32, 1, 1), HELD(&out, out_data, bf16, 4, 1, 1, 1, D_V);
    HELD(&lse, lse_data, f32, 3, 1, 1, 1);
    table_data[0] = 0;
    for (int i = 0; i < ARGUMENTS; i++)
        for (int k = 0; k < 8; k++)
            if (arguments[i].held->shape[k] == 1)
                arguments[i].held->strides[k] = k & 1 ? INT64_MIN : INT64_MAX;
    check_accepted("wild strides of dimensions of size 1");
    CHECK(out_data[0] != out_before[0] && out_data[D_V] == out_before[D_V], "wild strides: %04x",
          out_data[0]);
    /* No request: no data needed. No page of a table: no key, out is 0 and lse +inf. */
    set_up();
    HELD(&q, NULL, bf16, 4, 0, S_Q, H_Q, D_QK), HELD(&out, NULL, bf16, 4, 0, S_Q, H_Q, D_V);
    HELD(&table, NULL, i32, 2, 0, MAX_PAGES), HELD(&seqlens, NULL, i32, 1, 0);
    HELD(&lse, NULL, f32, 3, 0, H_Q, S_Q), HELD(&kv, NULL, bf16, 4, 0, PAGE, H_KV, D_QK);
    check_accepted("b = 0");
    for (int invariant = 0; invariant < 2; invariant++) {
        set_up();
        HELD(&table, NULL, i32, 2, B, 0), HELD(&kv, NULL, bf16, 4, 0, PAGE, H_KV, D_QK);
        ARGS.batch_invariant = invariant;
        check_accepted("max_pages = 0");
        int64_t wrong = 0;
        for (int i = 0; i < OUT; i++) wrong += (out_data[i] & 0x7fff) != 0;
        for (int i = 0; i < LSE; i++) wrong += lse_data[i] != INFINITY;
        CHECK(wrong == 0, "max_pages = 0: %" PRId64 " elements are not those of a row without keys", wrong);
    }
    /* The workspace is asked for before there is any memory. */
    set_up();
    size_t bytes = 0, again = 0;
    CHECK(fmla_dense_decode_workspace_size(&ARGS, &bytes, NULL) == FMLA_OK, "%s", fmla_last_error());
    for (int i = 0; i < ARGUMENTS; i++) arguments[i].held->tensor.data = NULL;
    ARGS.workspace = NULL, ARGS.workspace_size = 0;
    CHECK(fmla_dense_decode_workspace_size(&ARGS, &again, NULL) == FMLA_OK, "without data: %s",
          fmla_last_error());
    CHECK_EQ(again, bytes);
}

/* A plan with rows of anything behind a sound header, or made for other lengths, may give wrong values but
 * leads nowhere else: workspace and plan are just as large as asked for, the ends of the outputs are watched.
 */
static void test_damaged_plans(void)
{
    static const int32_t extremes[] = {INT32_MIN, -1, 0, 1, B, B + 1, 1 << 26, INT32_MAX};
    struct random_state random = {4711};
    for (int n = 0; n < 400; n++) {
        set_up();
        make_plan(B, 1 + n % 4, plan_data, &plan_bytes);
        const size_t rows = 32 / 4, fields = plan_bytes / 4 - rows;
        seqlens_data[0] = (int32_t)random_between(&random, 0, PAGE * 2);
        seqlens_data[1] = (int32_t)random_between(&random, 0, PAGE * 3);
        ARGS.plan = plan_data, ARGS.plan_size = plan_bytes;
        CHECK(fmla_dense_decode_workspace_size(&ARGS, &workspace_bytes, NULL) == FMLA_OK, "%s",
              fmla_last_error());
        int32_t *damaged = aligned_alloc(64, (plan_bytes + 63) / 64 * 64);
        ARGS.workspace = aligned_alloc(64, (workspace_bytes + 63) / 64 * 64);
        if (!damaged || !ARGS.workspace) abort();
        memcpy(damaged, plan_data, plan_bytes);
        for (int64_t k = random_between(&random, 0, 12); k > 0; k--)
            damaged[rows + (size_t)random_between(&random, 0, (int64_t)fields - 1)] =
                extremes[random_between(&random, 0, 7)];
        ARGS.plan = damaged, ARGS.workspace_size = workspace_bytes;
        CHECK(fmla_dense_decode(&ARGS) == FMLA_OK, "%s", fmla_last_error());
        /* The same as tables, each in memory of its own. One that does not end with the last request is refused. */
        const int32_t count = 1 + n % 4;
        const size_t of_rows = (size_t)count * FMLA_PARTITION_FIELDS, of_splits = B + 1;
        int32_t *its_rows = aligned_alloc(16, of_rows * 4), *its_splits = malloc(of_splits * 4);
        if (!its_rows || !its_splits) abort();
        memcpy(its_rows, damaged + rows, of_rows * 4);
        memcpy(its_splits, damaged + rows + of_rows, of_splits * 4);
        struct held row_table, split_table;
        HELD(&row_table, its_rows, i32, 2, count, FMLA_PARTITION_FIELDS);
        HELD(&split_table, its_splits, i32, 1, B + 1);
        ARGS.plan = NULL, ARGS.partitions = &row_table.tensor, ARGS.num_splits = &split_table.tensor;
        const bool whole = its_rows[of_rows - FMLA_PARTITION_FIELDS + 1] == B - 1;
        CHECK(fmla_dense_decode(&ARGS) == (whole ? FMLA_OK : FMLA_INVALID_ARGUMENT), "%s", fmla_last_error());
        free(its_rows), free(its_splits);
        CHECK(out_data[OUT] == out_before[OUT] && !memcmp(&lse_data[LSE], &lse_before[LSE], 4),
              "damaged plan %d: written past the end", n);
        free(damaged), free(ARGS.workspace);
    }
}

/* Keys of a request beyond all memory: 2^61 + 67194 of them, whose bytes as fp64 are few modulo 2^64. */
static void test_huge_capacity(void)
{
    static const char *const kernels[] = {"cpu-generic", "ref"};
    for (int invariant = 0; invariant < 2; invariant++)
        for (int k = 0; k < 2; k++) {
            size_t bytes = 0, more = 0;
            set_up();
            HELD(&table, table_data, i32, 2, B, 10000);
            ARGS.kernel = kernels[k], ARGS.batch_invariant = invariant;
            CHECK(fmla_dense_decode_workspace_size(&ARGS, &bytes, NULL) == FMLA_OK, "%s", fmla_last_error());
            HELD(&table, table_data, i32, 2, B, (INT64_C(1) << 31) - 46339);
            HELD(&kv, kv_data, bf16, 4, PAGES, (INT64_C(1) << 30) + 23170, H_KV, D_QK);
            for (int i = 0; i < 3; i++) kv.strides[i] = 0; /* one key, seen everywhere */
            if (fmla_dense_decode_workspace_size(&ARGS, &more, NULL) != FMLA_OK) continue;
            CHECK(more >= bytes, "%s, invariant %d: %zu bytes for 2^61 keys, %zu for 160000", kernels[k],
                  invariant, more, bytes);
        }
}

/* ---- A plan in tables -------------------------------------------------------------------------------- */

enum { ROWS = 3, MOST_ROWS = 8, FIELDS = FMLA_PARTITION_FIELDS };

static _Alignas(64) int32_t rows_data[MOST_ROWS * FIELDS + 4], splits_data[B + 2];
static struct held rows, splits;

static const struct argument tables[] = {
    {"partitions", &rows, &ARGS.partitions, "int32", 0, 0},
    {"num_splits", &splits, &ARGS.num_splits, "int32", 0, 0},
};

/* A good call with the tables of a plan of `count` partitions, for `requests` requests; num_splits has the right size. */
static void set_up_tables(int64_t requests, int32_t count)
{
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    make_plan(requests, count, plan_data, &plan_bytes);
    CHECK(fmla_plan_describe(plan_data, plan_bytes, &view) == FMLA_OK, "%s", fmla_last_error());
    set_up();
    memcpy(rows_data, view.partitions, (size_t)count * FIELDS * sizeof(int32_t));
    memset(splits_data, 0, sizeof splits_data);
    memcpy(splits_data, view.num_splits, (size_t)(requests < B ? requests + 1 : B + 1) * sizeof(int32_t));
    HELD(&rows, rows_data, i32, 2, count, FIELDS);
    HELD(&splits, splits_data, i32, 1, B + 1);
    ARGS.partitions = &rows.tensor, ARGS.num_splits = &splits.tensor;
}

MUTATION(tables_and_plan, ARGS.plan = plan_data; ARGS.plan_size = plan_bytes)
MUTATION(rows_none, HELD(&rows, NULL, i32, 2, 0, FIELDS))
MUTATION(rows_65537, rows.shape[0] = 65537)
MUTATION(fields_7, HELD(&rows, rows_data, i32, 2, ROWS, 7))
MUTATION(fields_9, HELD(&rows, rows_data, i32, 2, ROWS - 1, 9))
MUTATION(rows_apart, rows.shape[0] = 2; rows.strides[0] = 2 * FIELDS)
MUTATION(rows_aliased, rows.strides[0] = 0)
MUTATION(splits_less, splits.shape[0] = B)
MUTATION(splits_more, splits.shape[0] = B + 2)
MUTATION(told_others, ARGS.num_partitions = ROWS + 1)
MUTATION(rows_on_cuda, rows.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 3})
MUTATION(splits_on_cuda, splits.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 3})
MUTATION(invariant_fields, ARGS.batch_invariant = 1; fields_7())
MUTATION(rows_off_8, rows.tensor.data = rows_data + 2)
MUTATION(rows_off_by_offset, rows.tensor.byte_offset = 4)
MUTATION(of_more, set_up_tables(5, ROWS))
MUTATION(of_fewer, set_up_tables(1, ROWS))

static const struct mutation table_mutations[] =
    {
        {"tables and a plan", tables_and_plan, FMLA_INVALID_ARGUMENT, "plan", "NULL|partitions"},
        {"no partition", rows_none, FMLA_INVALID_ARGUMENT, "partitions", "rows|0|[1, 65536]"},
        {"65537 partitions", rows_65537, FMLA_INVALID_ARGUMENT, "partitions", "rows|65537|[1, 65536]"},
        {"7 fields", fields_7, FMLA_INVALID_ARGUMENT, "partitions", "fields|7|8"},
        {"9 fields", fields_9, FMLA_INVALID_ARGUMENT, "partitions", "fields|9|8"},
        {"rows apart", rows_apart, FMLA_INVALID_ARGUMENT, "partitions", "stride|0|16|8"},
        {"rows in one place", rows_aliased, FMLA_INVALID_ARGUMENT, "partitions", "stride|0|0|8"},
        {"b of num_splits", splits_less, FMLA_INVALID_ARGUMENT, "num_splits", "b + 1|2|3|q"},
        {"b + 2 of num_splits", splits_more, FMLA_INVALID_ARGUMENT, "num_splits", "b + 1|4|3|q"},
        {"another number of partitions", told_others, FMLA_INVALID_ARGUMENT, "num_partitions", "4|0|3"},
        {"partitions on cuda:3", rows_on_cuda, FMLA_INVALID_ARGUMENT, "partitions", "cuda:3|cpu"},
        {"num_splits on cuda:3", splits_on_cuda, FMLA_INVALID_ARGUMENT, "num_splits", "cuda:3|cpu"},
        {"batch-invariant, 7 fields", invariant_fields, FMLA_INVALID_ARGUMENT, "partitions", "fields|7|8"},
},
                             table_call_mutations[] = {
                                 {"rows off 16 bytes", rows_off_8, FMLA_INVALID_ARGUMENT, "partitions",
                                  "aligned|16"},
                                 {"rows off 16 bytes by byte_offset", rows_off_by_offset,
                                  FMLA_INVALID_ARGUMENT, "partitions", "aligned|16"},
                                 {"tables of more requests", of_more, FMLA_INVALID_ARGUMENT, "partitions",
                                  "request 4|1|batch"},
                                 {"tables of fewer requests", of_fewer, FMLA_INVALID_ARGUMENT, "partitions",
                                  "request 0|1|batch"},
};

static void test_tables(void)
{
    char words[160], label[96];
    for (int i = 0; i < 2; i++)
        for (int fault = 0; fault < FAULTS; fault++) {
            set_up_tables(B, ROWS);
            const char *what = spoil(&tables[i], fault, words);
            if (!what) continue;
            snprintf(label, sizeof label, "%s: %s", tables[i].name, what);
            check_both(label, FMLA_INVALID_ARGUMENT, tables[i].name, words,
                       fault == FAULT_DATA_NULL || fault == FAULT_DATA_MISALIGNED ||
                           fault == FAULT_OFFSET_MISALIGNED);
        }
    for (size_t k = 0; k < sizeof table_mutations / sizeof table_mutations[0]; k++) {
        const struct mutation *m = &table_mutations[k];
        set_up_tables(B, ROWS);
        m->apply();
        check_both(m->label, m->status, m->argument, m->words, 0);
    }
    for (size_t k = 0; k < sizeof table_call_mutations / sizeof table_call_mutations[0]; k++) {
        const struct mutation *m = &table_call_mutations[k];
        set_up_tables(B, ROWS);
        m->apply();
        check_both(m->label, m->status, m->argument, m->words, 1);
    }
}

/* The same bits as with the plan in one piece, and the same workspace. */
static void test_tables_accepted(void)
{
    static uint16_t expected_out[OUT];
    static float expected_lse[LSE];
    for (int32_t count = 1; count <= MOST_ROWS; count++) {
        set_up_tables(B, count);
        ARGS.partitions = ARGS.num_splits = NULL, ARGS.plan = plan_data, ARGS.plan_size = plan_bytes;
        size_t bytes = 0, with_tables = 1;
        CHECK(fmla_dense_decode_workspace_size(&ARGS, &bytes, NULL) == FMLA_OK, "%s", fmla_last_error());
        check_accepted("a plan");
        memcpy(expected_out, out_data, sizeof expected_out),
            memcpy(expected_lse, lse_data, sizeof expected_lse);
        for (int way = 0; way < 5; way++) {
            set_up_tables(B, count);
            if (way == 1) ARGS.num_partitions = count;
            if (way == 2) rows.tensor.strides = splits.tensor.strides = NULL;
            if (way == 3)
                memmove(rows_data + 4, rows_data, sizeof rows_data - 16), rows.tensor.byte_offset = 16;
            if (way == 4 && count == 1) rows.strides[0] = INT64_MAX; /* never used */
            if (way == 4)
                memmove(splits_data + 1, splits_data, (B + 1) * 4), splits.tensor.data = splits_data + 1;
            CHECK(fmla_dense_decode_workspace_size(&ARGS, &with_tables, NULL) == FMLA_OK, "%s",
                  fmla_last_error());
            CHECK_EQ(with_tables, bytes);
            check_accepted("tables");
            check_written("tables");
            CHECK(!memcmp(expected_out, out_data, sizeof expected_out) &&
                      !memcmp(expected_lse, lse_data, sizeof expected_lse),
                  "%d partitions, way %d: other bits than with the plan", count, way);
        }
    }
    /* The workspace is asked for before there are tables. */
    set_up_tables(B, ROWS);
    size_t bytes = 0, without = 1;
    CHECK(fmla_dense_decode_workspace_size(&ARGS, &bytes, NULL) == FMLA_OK, "%s", fmla_last_error());
    rows.tensor.data = splits.tensor.data = NULL;
    CHECK(fmla_dense_decode_workspace_size(&ARGS, &without, NULL) == FMLA_OK && without == bytes, "%s",
          fmla_last_error());
    /* Not read in batch-invariant mode. */
    set_up_tables(B, ROWS);
    memset(rows_data, PATTERN, sizeof rows_data), memset(splits_data, PATTERN, sizeof splits_data);
    ARGS.batch_invariant = 1;
    check_accepted("tables that are not read");
    /* No request, and tables of a plan of none. */
    set_up_tables(0, ROWS);
    HELD(&q, NULL, bf16, 4, 0, S_Q, H_Q, D_QK), HELD(&out, NULL, bf16, 4, 0, S_Q, H_Q, D_V);
    HELD(&table, NULL, i32, 2, 0, MAX_PAGES), HELD(&seqlens, NULL, i32, 1, 0);
    HELD(&lse, NULL, f32, 3, 0, H_Q, S_Q), HELD(&splits, splits_data, i32, 1, 1);
    check_accepted("tables, b = 0");
    /* A caller from before there were tables: what stands behind its struct is not looked at. */
    set_up();
    ARGS.struct_size = offsetof(fmla_dense_decode_args, partitions);
    memset(call.bytes + ARGS.struct_size, PATTERN, sizeof call - ARGS.struct_size);
    check_accepted("an older struct");
    check_written("an older struct");
}

int main(void)
{
    CHECK(fmla_set_num_threads(2) == FMLA_OK, "%s", fmla_last_error());
    test_accepted();
    set_up();
    check_rejected("nowhere to answer", fmla_dense_decode_kernel(&ARGS, NULL), FMLA_INVALID_ARGUMENT, op,
                   "name", "NULL");
    test_tensors();
    test_sizes();
    test_mutations();
    test_tables();
    test_tables_accepted();
    test_damaged_plans();
    test_huge_capacity();
    return check_done("test_decode_errors");
}
