/* SPDX-License-Identifier: MIT
 *
 * Every argument that fmla_sparse_prefill, fmla_sparse_prefill_workspace_size and fmla_sparse_prefill_kernel must
 * reject, and odd ones that they must take.
 */
#include "arguments.h"

#include <math.h>
#include <stdbool.h>

enum { S_Q = 3, H_Q = 4, H_KV = 2, D_QK = 576, D_V = 512, S_KV = 60, PAGES = 6, PAGE = 10, TOPK = 40 };
enum { OUT = S_Q * H_Q * D_V, ROWS = S_Q * H_Q, PATTERN = 0xc3, WORKSPACE = 1 << 23 };

static const char op[] = "sparse_prefill";

static const fmla_dtype u8 = {FMLA_TYPE_UINT, 8, 1}, i8 = {FMLA_TYPE_INT, 8, 1};

static _Alignas(64) uint16_t q_data[S_Q * H_Q * D_QK + 1], kv_data[S_KV * H_KV * D_QK + 1], out_data[OUT + 1],
    out_before[OUT + 1];
static _Alignas(64) int32_t indices_data[S_Q * H_KV * TOPK + 1], length_data[S_Q + 1];
static _Alignas(64) float sink_data[H_Q + 1], max_data[ROWS + 1], lse_data[ROWS + 1], rows_before[ROWS + 1];
static _Alignas(64) char workspace[WORKSPACE];
static size_t workspace_bytes;

static struct held q, kv, indices, length, sink, out, max_logits, lse;
static union {
    fmla_sparse_prefill_args args;
    char bytes[sizeof(fmla_sparse_prefill_args) + 64]; /* a caller with a later header */
} call;
#define ARGS call.args

static const struct argument arguments[] = {
    {"q", &q, &ARGS.q, "bfloat16", 0, 0},
    {"kv", &kv, &ARGS.kv, "bfloat16", 0, 0},
    {"indices", &indices, &ARGS.indices, "int32", 0, 0},
    {"topk_length", &length, &ARGS.topk_length, "int32", 1, 0},
    {"attn_sink", &sink, &ARGS.attn_sink, "float32", 1, 0},
    {"out", &out, &ARGS.out, "bfloat16", 0, 1},
    {"max_logits", &max_logits, &ARGS.max_logits, "float32", 1, 1},
    {"lse", &lse, &ARGS.lse, "float32", 1, 1},
};
enum { ARGUMENTS = sizeof arguments / sizeof arguments[0] };

static void set_up(void)
{
    static const int32_t lengths[S_Q] = {20, 33, TOPK};
    for (size_t i = 0; i < sizeof q_data / 2; i++) q_data[i] = (uint16_t)(0x3c00 + i % 97);
    for (size_t i = 0; i < sizeof kv_data / 2; i++) kv_data[i] = (uint16_t)(0x3b00 + i % 89);
    for (int32_t i = 0; i < S_Q * H_KV * TOPK; i++) indices_data[i] = i * 7 % S_KV;
    memcpy(length_data, lengths, sizeof lengths);
    memset(sink_data, 0, sizeof sink_data);
    memset(out_data, PATTERN, sizeof out_data), memset(out_before, PATTERN, sizeof out_before);
    memset(max_data, PATTERN, sizeof max_data), memset(lse_data, PATTERN, sizeof lse_data);
    memset(rows_before, PATTERN, sizeof rows_before);
    HELD(&q, q_data, bf16, 3, S_Q, H_Q, D_QK);
    HELD(&kv, kv_data, bf16, 3, S_KV, H_KV, D_QK);
    HELD(&indices, indices_data, i32, 3, S_Q, H_KV, TOPK);
    HELD(&length, length_data, i32, 1, S_Q);
    HELD(&sink, sink_data, f32, 1, H_Q);
    HELD(&out, out_data, bf16, 3, S_Q, H_Q, D_V);
    HELD(&max_logits, max_data, f32, 2, S_Q, H_Q);
    HELD(&lse, lse_data, f32, 2, S_Q, H_Q);
    memset(&call, 0, sizeof call);
    ARGS = FMLA_INIT(fmla_sparse_prefill_args);
    for (int i = 0; i < ARGUMENTS; i++) *arguments[i].member = &arguments[i].held->tensor;
    ARGS.workspace = workspace, ARGS.workspace_size = sizeof workspace;
}

/* The same over pages, and over pages of bytes. Zeros are sound tokens. */
static void set_up_pages(void)
{
    set_up();
    HELD(&kv, kv_data, bf16, 4, PAGES, PAGE, 1, D_QK);
    HELD(&indices, indices_data, i32, 3, S_Q, 1, TOPK);
}

static void set_up_bytes(int32_t format)
{
    const int64_t token = format == FMLA_KV_FP8_656 ? 656 : 584, d_qk = format == FMLA_KV_FP8_656 ? 576 : 512;
    set_up_pages();
    memset(kv_data, 0, sizeof kv_data);
    HELD(&q, q_data, bf16, 3, S_Q, H_Q, d_qk);
    HELD(&kv, kv_data, u8, 4, PAGES, PAGE, 1, token);
    ARGS.kv_format = format;
}

static int untouched(void)
{
    return !memcmp(out_data, out_before, sizeof out_data) &&
           !memcmp(max_data, rows_before, sizeof max_data) && !memcmp(lse_data, rows_before, sizeof lse_data);
}

/* The call must work. */
static void check_accepted(const char *label)
{
    size_t bytes = 0, alignment = 0;
    fmla_status status = fmla_sparse_prefill_workspace_size(&ARGS, &bytes, &alignment);
    CHECK(status == FMLA_OK && bytes <= sizeof workspace, "%s: size: %s (%zu bytes)", label,
          fmla_last_error(), bytes);
    CHECK(alignment && !(alignment & (alignment - 1)), "%s: alignment is %zu", label, alignment);
    status = fmla_sparse_prefill(&ARGS);
    CHECK(status == FMLA_OK, "%s: %s: %s", label, fmla_status_name(status), fmla_last_error());
}

/* Every element of the outputs, and nothing behind them. */
static void check_written(const char *label)
{
    int64_t same = 0;
    for (int i = 0; i < OUT; i++) same += out_data[i] == out_before[i];
    for (int i = 0; ARGS.max_logits && i < ROWS; i++) same += !memcmp(&max_data[i], &rows_before[i], 4);
    for (int i = 0; ARGS.lse && i < ROWS; i++) same += !memcmp(&lse_data[i], &rows_before[i], 4);
    CHECK(same == 0, "%s: %" PRId64 " elements were not written", label, same);
    CHECK(out_data[OUT] == out_before[OUT] && !memcmp(&max_data[ROWS], &rows_before[ROWS], 4) &&
              !memcmp(&lse_data[ROWS], &rows_before[ROWS], 4),
          "%s: written past the end", label);
}

/* The call, and unless only it reads what is wrong, the questions for its workspace and its kernel, must fail alike. */
static void check_both(const char *label, fmla_status status, const char *argument, const char *words,
                       int only_call)
{
    if (!only_call) {
        size_t bytes = 12345, alignment = 54321;
        check_rejected(label, fmla_sparse_prefill_workspace_size(&ARGS, &bytes, &alignment), status, op,
                       argument, words);
        CHECK(bytes == 12345 && alignment == 54321, "%s: a failed question answered %zu, %zu", label, bytes,
              alignment);
    }
    const char *kernel = "untouched";
    const fmla_status named = fmla_sparse_prefill_kernel(&ARGS, &kernel);
    CHECK((named == FMLA_OK) == (strcmp(kernel, "untouched") != 0), "%s: status %d, kernel %s", label, named,
          kernel);
    if (named != FMLA_OK) check_rejected(label, named, status, op, argument, words);
    check_rejected(label, fmla_sparse_prefill(&ARGS), status, op, argument, words);
    CHECK(untouched(), "%s: a failed call wrote to its outputs", label);
}

/* ---- Tensors ----------------------------------------------------------------------------------------- */

static int data_fault(int fault)
{
    return fault == FAULT_DATA_NULL || fault == FAULT_DATA_MISALIGNED || fault == FAULT_OFFSET_MISALIGNED;
}

static void test_tensors(void)
{
    char words[160], label[96];
    for (int i = 0; i < ARGUMENTS; i++)
        for (int fault = 0; fault < FAULTS; fault++) {
            set_up();
            const char *what = spoil(&arguments[i], fault, words);
            if (!what) continue;
            snprintf(label, sizeof label, "%s: %s", arguments[i].name, what);
            /* A kv of four dimensions is one of pages, with one key head. */
            if (arguments[i].held == &kv && fault == FAULT_RANK_MORE)
                snprintf(words, sizeof words, "h_kv|%d|1", D_QK);
            check_both(label, FMLA_INVALID_ARGUMENT, arguments[i].name, words, data_fault(fault));
        }
    /* kv again, as pages; a rank that is neither is told both. */
    const struct argument pages = {"kv", &kv, &ARGS.kv, "bfloat16", 0, 0};
    for (int fault = 0; fault < FAULTS; fault++) {
        set_up_pages();
        const char *what = spoil(&pages, fault, words);
        if (!what) continue;
        snprintf(label, sizeof label, "kv of pages: %s", what);
        if (fault == FAULT_RANK_LESS) snprintf(words, sizeof words, "d_qk|1|%d", D_QK);
        if (fault == FAULT_RANK_MORE || fault == FAULT_RANK_0 || fault == FAULT_RANK_NEGATIVE ||
            fault == FAULT_RANK_HUGE)
            snprintf(words, sizeof words, "has %d dimensions|must have 3|s_kv|or 4|pages", kv.tensor.ndim);
        check_both(label, FMLA_INVALID_ARGUMENT, "kv", words, data_fault(fault));
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
    check_both("q on cuda", FMLA_INVALID_ARGUMENT, "kv", "cpu|cuda:0", 0);
}

/* ---- Sizes that disagree ----------------------------------------------------------------------------- */

static const struct {
    struct held *held;
    int dimension;
    int64_t size;
    const char *argument, *words;
} sizes[] = {
    {&q, 0, INT64_C(1) << 31, "q", "s_q|2147483648"},
    {&q, 1, 0, "q", "h_q|0"},
    {&q, 1, INT64_C(1) << 31, "q", "h_q|2147483648"},
    {&q, 1, 3, "q", "h_q|3|2 key heads"},
    {&q, 2, 0, "q", "d_qk|0"},
    {&kv, 0, INT64_C(1) << 31, "kv", "s_kv|2147483648"},
    {&kv, 1, 0, "kv", "h_kv|0"},
    {&kv, 1, 3, "q", "h_q|4|3 key heads"},
    {&kv, 2, 512, "kv", "d_qk|512|576"},
    {&indices, 0, 1, "indices", "s_q|1|3"},
    {&indices, 1, 1, "indices", "h_kv|1|2"},
    {&indices, 2, INT64_C(1) << 31, "indices", "topk|2147483648"},
    {&length, 0, 1, "topk_length", "s_q|1|3"},
    {&sink, 0, 2, "attn_sink", "h_q|2|4"},
    {&out, 0, 1, "out", "s_q|1|3"},
    {&out, 1, 2, "out", "h_q|2|4"},
    {&out, 2, 0, "out", "d_v|0"},
    {&max_logits, 0, 1, "max_logits", "s_q|1|3"},
    {&max_logits, 1, 2, "max_logits", "h_q|2|4"},
    {&lse, 0, 2, "lse", "s_q|2|3"},
    {&lse, 1, 3, "lse", "h_q|3|4"},
};

static const struct {
    struct held *held;
    int dimension;
    int64_t size;
    const char *argument, *words;
} sizes_of_pages[] = {
    {&kv, 0, INT64_C(1) << 31, "kv", "pages|2147483648"},
    {&kv, 1, 0, "kv", "page_size|0"},
    {&kv, 2, 0, "kv", "h_kv|0|1"},
    {&kv, 2, 2, "kv", "h_kv|2|1"},
    {&kv, 3, 512, "kv", "d_qk|512|576"},
    {&indices, 1, 2, "indices", "h_kv|2|1"},
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
    for (size_t k = 0; k < sizeof sizes_of_pages / sizeof sizes_of_pages[0]; k++) {
        set_up_pages();
        sizes_of_pages[k].held->shape[sizes_of_pages[k].dimension] = sizes_of_pages[k].size;
        snprintf(label, sizeof label, "pages, %s: size %" PRId64 " of dimension %d",
                 sizes_of_pages[k].argument, sizes_of_pages[k].size, sizes_of_pages[k].dimension);
        check_both(label, FMLA_INVALID_ARGUMENT, sizes_of_pages[k].argument, sizes_of_pages[k].words, 0);
    }
    /* d_v above d_qk; the row is long enough to be written, so only the check stands in the way. */
    set_up();
    HELD(&q, q_data, bf16, 3, S_Q, H_Q, 256);
    HELD(&kv, kv_data, bf16, 3, S_KV, H_KV, 256);
    check_both("d_v above d_qk", FMLA_INVALID_ARGUMENT, "out", "d_v|512|256", 0);
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
MUTATION(q_fp16, q.tensor.dtype = fp16)
MUTATION(kv_fp16, kv.tensor.dtype = fp16)
MUTATION(out_fp16, out.tensor.dtype = fp16)
MUTATION(scale_nan, ARGS.softmax_scale = NAN)
MUTATION(scale_inf, ARGS.softmax_scale = -INFINITY)
MUTATION(format_minus, ARGS.kv_format = -1)
MUTATION(format_576, ARGS.kv_format = FMLA_KV_FP8_576)
MUTATION(format_of_fp16, ARGS.kv_format = FMLA_KV_FP16)
MUTATION(bytes_unnamed, set_up_bytes(FMLA_KV_FP8_656); ARGS.kv_format = 0)
MUTATION(bytes_as_bf16, set_up_bytes(FMLA_KV_FP8_656); ARGS.kv_format = FMLA_KV_BF16)
MUTATION(bf16_as_bytes, set_up_pages(); ARGS.kv_format = FMLA_KV_FP8_656)
MUTATION(flat_bytes, set_up_bytes(FMLA_KV_FP8_656); HELD(&kv, kv_data, u8, 3, S_KV, 1, 656))
MUTATION(flat_as_bytes, ARGS.kv_format = FMLA_KV_FP8_584)
MUTATION(token_655, set_up_bytes(FMLA_KV_FP8_656); kv.shape[3] = 655)
MUTATION(token_of_584, set_up_bytes(FMLA_KV_FP8_584); ARGS.kv_format = FMLA_KV_FP8_656;
         HELD(&q, q_data, bf16, 3, S_Q, H_Q, D_QK))
MUTATION(d_qk_of_584, set_up_bytes(FMLA_KV_FP8_584); HELD(&q, q_data, bf16, 3, S_Q, H_Q, D_QK))
MUTATION(d_qk_of_656, set_up_bytes(FMLA_KV_FP8_656); HELD(&q, q_data, bf16, 3, S_Q, H_Q, 512))
MUTATION(page_off, set_up_bytes(FMLA_KV_FP8_656); kv.shape[0] = 2; kv.strides[0] += 2)
MUTATION(slot_off, set_up_bytes(FMLA_KV_FP8_656); kv.shape[0] = 2; kv.strides[1] += 2)
MUTATION(page_odd, set_up_bytes(FMLA_KV_FP8_584); kv.shape[0] = 2; kv.strides[0] += 1)
MUTATION(page_in_parts, set_up_bytes(FMLA_KV_FP8_584); kv.shape[0] = 2; kv.strides[1] += 2)
MUTATION(lse_empty_2, ARGS.lse_empty = 2)
MUTATION(lse_empty_minus, ARGS.lse_empty = -1)
MUTATION(log_base_1, ARGS.log_base = 1)
MUTATION(log_base_10, ARGS.log_base = 10)
MUTATION(kernel_unknown, ARGS.kernel = "sm90-imaginary")
MUTATION(kernel_empty, ARGS.kernel = "")
MUTATION(d_qk_320, HELD(&q, q_data, bf16, 3, S_Q, H_Q, 320); HELD(&kv, kv_data, bf16, 3, S_KV, H_KV, 320);
         HELD(&out, out_data, bf16, 3, S_Q, H_Q, 256))
MUTATION(d_qk_320_forced, d_qk_320(); ARGS.kernel = "cpu-generic")
MUTATION(d_v_128, HELD(&out, out_data, bf16, 3, S_Q, H_Q, 128))
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
    {"q in fp16", q_fp16, FMLA_INVALID_ARGUMENT, "q", "float16|must be bfloat16"},
    {"kv in fp16", kv_fp16, FMLA_INVALID_ARGUMENT, "kv", "float16|must be bfloat16"},
    {"out in fp16", out_fp16, FMLA_INVALID_ARGUMENT, "out", "float16|must be bfloat16"},
    {"softmax_scale NaN", scale_nan, FMLA_INVALID_ARGUMENT, "softmax_scale", "nan|finite"},
    {"softmax_scale -inf", scale_inf, FMLA_INVALID_ARGUMENT, "softmax_scale", "-inf|finite"},
    {"kv_format -1", format_minus, FMLA_INVALID_ARGUMENT, "kv_format", "-1|[0, 4]"},
    {"kv_format 5", format_576, FMLA_INVALID_ARGUMENT, "kv_format", "5|[0, 4]"},
    {"FP16", format_of_fp16, FMLA_INVALID_ARGUMENT, "kv_format", "FP16|type of q|bfloat16"},
    {"bytes that are not named", bytes_unnamed, FMLA_INVALID_ARGUMENT, "kv_format", "0|kv|FP8_656|FP8_584"},
    {"bytes as BF16", bytes_as_bf16, FMLA_INVALID_ARGUMENT, "kv", "uint8|bfloat16"},
    {"bf16 as bytes", bf16_as_bytes, FMLA_INVALID_ARGUMENT, "kv", "bfloat16|one byte"},
    {"bytes without pages", flat_bytes, FMLA_INVALID_ARGUMENT, "kv", "3 dimensions|must have 4"},
    {"bf16 without pages as bytes", flat_as_bytes, FMLA_INVALID_ARGUMENT, "kv", "3 dimensions|must have 4"},
    {"a token of 655 bytes", token_655, FMLA_INVALID_ARGUMENT, "kv", "bytes|655|656|FP8_656"},
    {"a token of 584 as 656", token_of_584, FMLA_INVALID_ARGUMENT, "kv", "bytes|584|656|FP8_656"},
    {"d_qk 576 with FP8_584", d_qk_of_584, FMLA_INVALID_ARGUMENT, "q", "d_qk|576|512|FP8_584"},
    {"d_qk 512 with FP8_656", d_qk_of_656, FMLA_INVALID_ARGUMENT, "q", "d_qk|512|576|FP8_656"},
    {"pages off by 2", page_off, FMLA_INVALID_ARGUMENT, "kv", "stride|0|multiple of 4"},
    {"tokens off by 2", slot_off, FMLA_INVALID_ARGUMENT, "kv", "stride|1|658|multiple of 4"},
    {"pages off by 1", page_odd, FMLA_INVALID_ARGUMENT, "kv", "stride|0|multiple of 2"},
    {"a page in parts", page_in_parts, FMLA_INVALID_ARGUMENT, "kv", "stride|1|586|584|one piece"},
    {"lse_empty 2", lse_empty_2, FMLA_INVALID_ARGUMENT, "lse_empty", "2|0|1"},
    {"lse_empty -1", lse_empty_minus, FMLA_INVALID_ARGUMENT, "lse_empty", "-1|0|1"},
    {"log_base 1", log_base_1, FMLA_INVALID_ARGUMENT, "log_base", "1|0|2"},
    {"log_base 10", log_base_10, FMLA_INVALID_ARGUMENT, "log_base", "10|0|2"},
    {"unknown kernel", kernel_unknown, FMLA_INVALID_ARGUMENT, "kernel", "sm90-imaginary|cpu-generic|ref"},
    {"empty kernel name", kernel_empty, FMLA_INVALID_ARGUMENT, "kernel", "cpu-generic|ref"},
    {"d_qk without a kernel", d_qk_320, FMLA_UNSUPPORTED, "q", "d_qk is 320|512|576"},
    {"d_qk not of that kernel", d_qk_320_forced, FMLA_UNSUPPORTED, "q", "d_qk is 320|cpu-generic|512|576"},
    {"d_v without a kernel", d_v_128, FMLA_UNSUPPORTED, "q", "d_v is 128|512"},
    {"all on cuda", all_cuda, FMLA_UNSUPPORTED, "q", "device is cuda:99"},
};

MUTATION(workspace_null, ARGS.workspace = NULL)
MUTATION(workspace_none, ARGS.workspace = NULL; ARGS.workspace_size = 0)
MUTATION(workspace_small, ARGS.workspace_size = workspace_bytes - 1)
MUTATION(workspace_odd, ARGS.workspace = workspace + 1; ARGS.workspace_size = workspace_bytes)
MUTATION(bytes_off_4, set_up_bytes(FMLA_KV_FP8_656); kv.tensor.byte_offset = 2)
MUTATION(bytes_off_2, set_up_bytes(FMLA_KV_FP8_584); kv.tensor.byte_offset = 1)

static const struct mutation call_mutations[] = {
    {"workspace NULL", workspace_null, FMLA_INVALID_ARGUMENT, "workspace", "NULL"},
    {"no workspace", workspace_none, FMLA_BUFFER_TOO_SMALL, "workspace_size", "0|at least"},
    {"workspace a byte too small", workspace_small, FMLA_BUFFER_TOO_SMALL, "workspace_size", "at least"},
    {"workspace misaligned", workspace_odd, FMLA_INVALID_ARGUMENT, "workspace", "aligned"},
    {"FP8_656 off 4 bytes", bytes_off_4, FMLA_INVALID_ARGUMENT, "kv", "multiple of 4"},
    {"FP8_584 off 2 bytes", bytes_off_2, FMLA_INVALID_ARGUMENT, "kv", "multiple of 2"},
};

static void test_mutations(void)
{
    for (size_t k = 0; k < sizeof mutations / sizeof mutations[0]; k++) {
        set_up();
        mutations[k].apply();
        check_both(mutations[k].label, mutations[k].status, mutations[k].argument, mutations[k].words, 0);
    }
    for (size_t k = 0; k < sizeof call_mutations / sizeof call_mutations[0]; k++) {
        set_up();
        CHECK(fmla_sparse_prefill_workspace_size(&ARGS, &workspace_bytes, NULL) == FMLA_OK, "%s",
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
    const char *kernel = NULL;
    check_rejected("NULL args", fmla_sparse_prefill(NULL), FMLA_INVALID_ARGUMENT, op, "args", "NULL");
    check_rejected("NULL args", fmla_sparse_prefill_workspace_size(NULL, &bytes, NULL), FMLA_INVALID_ARGUMENT,
                   op, "args", "NULL");
    check_rejected("NULL args", fmla_sparse_prefill_kernel(NULL, &kernel), FMLA_INVALID_ARGUMENT, op, "args",
                   "NULL");
    set_up();
    check_rejected("NULL name", fmla_sparse_prefill_kernel(&ARGS, NULL), FMLA_INVALID_ARGUMENT, op, "name",
                   "NULL");
    /* The oracle keeps the scores of all rows that read the same keys: more of them than can be addressed. */
    const int64_t h_q = INT32_MAX - 1;
    set_up();
    indices.shape[2] = INT32_MAX, indices.strides[0] = INT64_C(1) << 33,
    indices.strides[1] = INT64_C(1) << 32;
    HELD(&q, q_data, bf16, 3, S_Q, h_q, D_QK), HELD(&out, out_data, bf16, 3, S_Q, h_q, D_V);
    ARGS.attn_sink = ARGS.max_logits = ARGS.lse = NULL, ARGS.kernel = "ref";
    check_rejected("more keys than fit", fmla_sparse_prefill_workspace_size(&ARGS, &bytes, NULL),
                   FMLA_UNSUPPORTED, op, "indices", "2147483647 keys|memory");
}

/* ---- What must be taken ------------------------------------------------------------------------------ */

MUTATION(as_is, (void)0)
MUTATION(pinned, for (int i = 0; i < ARGUMENTS; i++) arguments[i].held->tensor.device.device_type =
                     i & 1 ? FMLA_DEVICE_CPU : FMLA_DEVICE_CUDA_HOST)
MUTATION(no_strides, for (int i = 0; i < ARGUMENTS; i++) arguments[i].held->tensor.strides = NULL)
MUTATION(larger, ARGS.struct_size = sizeof call)
MUTATION(optional, ARGS.topk_length = ARGS.attn_sink = ARGS.max_logits = ARGS.lse = NULL)
MUTATION(only_max, ARGS.lse = NULL)
MUTATION(only_lse, ARGS.max_logits = NULL)
MUTATION(lengths_wild, length_data[0] = INT32_MIN; length_data[1] = INT32_MAX; length_data[2] = -1)
MUTATION(format_named, ARGS.kv_format = FMLA_KV_BF16)
MUTATION(bytes_656, set_up_bytes(FMLA_KV_FP8_656))
MUTATION(bytes_584, set_up_bytes(FMLA_KV_FP8_584))
MUTATION(bytes_signed, set_up_bytes(FMLA_KV_FP8_656); kv.tensor.dtype = i8)
MUTATION(bytes_apart, set_up_bytes(FMLA_KV_FP8_656); kv.shape[0] = 2; kv.strides[1] += 4; kv.strides[0] += 68;
         kv.tensor.byte_offset = 4)
MUTATION(pages_apart, set_up_bytes(FMLA_KV_FP8_584); kv.shape[0] = 2; kv.strides[0] += 2;
         kv.tensor.byte_offset = 2)
MUTATION(heads_first, kv.strides[0] = D_QK; kv.strides[1] = S_KV * D_QK)
MUTATION(keys_overlap, kv.strides[0] = 1; kv.strides[1] = 0; ARGS.attn_sink = NULL)
MUTATION(one_key_head, HELD(&kv, kv_data, bf16, 3, S_KV, 1, D_QK);
         HELD(&indices, indices_data, i32, 3, S_Q, 1, TOPK))
MUTATION(indices_wild,
         for (int i = 0; i < S_Q * H_KV * TOPK; i++) indices_data[i] = i & 1 ? INT32_MIN : INT32_MAX)
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
    {"pages", set_up_pages},
    {"pinned host memory", pinned},
    {"no strides", no_strides},
    {"a larger struct, zero behind", larger},
    {"optional tensors left out", optional},
    {"max_logits alone", only_max},
    {"lse alone", only_lse},
    {"lengths outside of the lists", lengths_wild},
    {"a format that is named", format_named},
    {"FP8_656", bytes_656},
    {"FP8_584", bytes_584},
    {"another type of 1 byte", bytes_signed},
    {"tokens apart", bytes_apart},
    {"pages apart", pages_apart},
    {"key heads first", heads_first},
    {"keys that share memory", keys_overlap},
    {"one key head", one_key_head},
    {"indices of no key", indices_wild},
    {"byte offsets", offset},
};

/* All rows are those without a key. */
static void check_empty(const char *label)
{
    int64_t wrong = 0;
    for (int i = 0; i < OUT; i++) wrong += (out_data[i] & 0x7fff) != 0;
    for (int i = 0; i < ROWS; i++) wrong += lse_data[i] != INFINITY || max_data[i] != -INFINITY;
    CHECK(wrong == 0, "%s: %" PRId64 " elements are not those of a row without keys", label, wrong);
}

static void test_accepted(void)
{
    for (size_t k = 0; k < sizeof accepted / sizeof accepted[0]; k++) {
        set_up();
        accepted[k].apply();
        check_accepted(accepted[k].label);
        check_written(accepted[k].label);
    }
    set_up();
    d_qk_320();
    ARGS.kernel = "ref";
    check_accepted("the oracle takes any d_qk");
    /* Strides of dimensions with one element are never used. */
    set_up();
    HELD(&q, q_data, bf16, 3, 1, 1, D_QK), HELD(&kv, kv_data, bf16, 3, 1, 1, D_QK);
    HELD(&indices, indices_data, i32, 3, 1, 1, 1), HELD(&length, length_data, i32, 1, 1);
    HELD(&sink, sink_data, f32, 1, 1), HELD(&out, out_data, bf16, 3, 1, 1, D_V);
    HELD(&max_logits, max_data, f32, 2, 1, 1), HELD(&lse, lse_data, f32, 2, 1, 1);
    indices_data[0] = 0;
    for (int i = 0; i < ARGUMENTS; i++)
        for (int k = 0; k < 8; k++)
            if (arguments[i].held->shape[k] == 1)
                arguments[i].held->strides[k] = k & 1 ? INT64_MIN : INT64_MAX;
    check_accepted("wild strides of dimensions of size 1");
    CHECK(out_data[0] != out_before[0] && out_data[D_V] == out_before[D_V], "wild strides: %04x",
          out_data[0]);
}

static void test_nothing(void)
{
    /* No token: no data needed. No key or no index: out is 0, max_logits -inf and lse +inf. */
    set_up();
    HELD(&q, NULL, bf16, 3, 0, H_Q, D_QK), HELD(&out, NULL, bf16, 3, 0, H_Q, D_V);
    HELD(&indices, NULL, i32, 3, 0, H_KV, TOPK), HELD(&length, NULL, i32, 1, 0);
    HELD(&max_logits, NULL, f32, 2, 0, H_Q), HELD(&lse, NULL, f32, 2, 0, H_Q);
    HELD(&kv, NULL, bf16, 3, 0, H_KV, D_QK);
    check_accepted("s_q = 0");
    for (int way = 0; way < 6; way++) {
        set_up();
        if (way >= 3) set_up_pages();
        const int64_t h_kv = way >= 3 ? 1 : H_KV;
        if (way % 3 != 0) HELD(&indices, NULL, i32, 3, S_Q, h_kv, 0);
        if (way % 3 != 1 && way >= 3) HELD(&kv, NULL, bf16, 4, 0, PAGE, 1, D_QK);
        if (way % 3 != 1 && way < 3) HELD(&kv, NULL, bf16, 3, 0, H_KV, D_QK);
        check_accepted("no key");
        check_empty("no key");
    }
    /* A cache without pages may begin anywhere, as every tensor without elements. */
    for (int32_t format = FMLA_KV_FP8_656; format <= FMLA_KV_FP8_584; format++) {
        set_up_bytes(format);
        kv.shape[0] = 0;
        kv.tensor.byte_offset = 1;
        check_accepted("a cache of no bytes at an odd address");
        check_empty("a cache of no bytes at an odd address");
    }
}

/* The workspace is asked for before there is any memory; and does not grow with the tokens, however many they are. */
static void test_workspace(void)
{
    set_up();
    size_t bytes = 0, again = 0;
    CHECK(fmla_sparse_prefill_workspace_size(&ARGS, &bytes, NULL) == FMLA_OK, "%s", fmla_last_error());
    for (int i = 0; i < ARGUMENTS; i++) arguments[i].held->tensor.data = NULL;
    ARGS.workspace = NULL, ARGS.workspace_size = 0;
    CHECK(fmla_sparse_prefill_workspace_size(&ARGS, &again, NULL) == FMLA_OK, "without data: %s",
          fmla_last_error());
    CHECK_EQ(again, bytes);
    const int64_t tokens[] = {4096, 1 << 20, INT32_MAX};
    for (int i = 0; i < 3; i++) {
        const int64_t s_q = tokens[i];
        set_up();
        HELD(&q, q_data, bf16, 3, s_q, H_Q, D_QK), HELD(&out, out_data, bf16, 3, s_q, H_Q, D_V);
        HELD(&indices, indices_data, i32, 3, s_q, H_KV, 2048), HELD(&length, length_data, i32, 1, s_q);
        HELD(&max_logits, max_data, f32, 2, s_q, H_Q), HELD(&lse, lse_data, f32, 2, s_q, H_Q);
        CHECK(fmla_sparse_prefill_workspace_size(&ARGS, i ? &again : &bytes, NULL) == FMLA_OK, "%s",
              fmla_last_error());
        if (i) CHECK_EQ(again, bytes);
    }
}

int main(void)
{
    unsetenv("FLASHMLA_KERNEL");
    CHECK(!fmla_set_num_threads(2), "%s", fmla_last_error());
    test_tensors();
    test_sizes();
    test_mutations();
    test_accepted();
    test_nothing();
    test_workspace();
    return check_done("test_sparse_prefill_errors");
}
