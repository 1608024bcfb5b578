/* SPDX-License-Identifier: MIT
 *
 * Every argument that fmla_merge must reject, and odd ones that it must take.
 */
#include "arguments.h"

#include <math.h>

enum { N = 3, B = 2, S_Q = 2, H_Q = 3, D_V = 40, OUT = B * S_Q * H_Q * D_V, LSE = B * H_Q * S_Q };
enum { PATTERN = 0xc3 };

static const char op[] = "merge";

static _Alignas(16) float parts_data[N * OUT + 1], lse_parts_data[N * LSE + 1], sink_data[H_Q + 1],
    out_data[OUT + 1], lse_data[LSE + 1], out_before[OUT + 1], lse_before[LSE + 1];

static struct held parts, lse_parts, sink, out, lse;
static union {
    fmla_merge_args args;
    char bytes[sizeof(fmla_merge_args) + 64];
} call;
#define ARGS call.args

static const struct argument arguments[] = {
    {"out_parts", &parts, &ARGS.out_parts, "bfloat16 or float16 or float32", 0, 0},
    {"lse_parts", &lse_parts, &ARGS.lse_parts, "float32", 0, 0},
    {"attn_sink", &sink, &ARGS.attn_sink, "float32", 1, 0},
    {"out", &out, &ARGS.out, "bfloat16 or float16 or float32", 0, 1},
    {"lse", &lse, &ARGS.lse, "float32", 1, 1},
};
enum { ARGUMENTS = sizeof arguments / sizeof arguments[0] };

static void set_up(void)
{
    for (int i = 0; i < N * OUT; i++) parts_data[i] = (float)(i % 17) + 1.0f;
    for (int i = 0; i < N * LSE; i++) lse_parts_data[i] = (float)(i % 5);
    memset(sink_data, 0, sizeof sink_data);
    memset(out_data, PATTERN, sizeof out_data), memset(out_before, PATTERN, sizeof out_before);
    memset(lse_data, PATTERN, sizeof lse_data), memset(lse_before, PATTERN, sizeof lse_before);
    HELD(&parts, parts_data, f32, 5, N, B, S_Q, H_Q, D_V);
    HELD(&lse_parts, lse_parts_data, f32, 4, N, B, H_Q, S_Q);
    HELD(&sink, sink_data, f32, 1, H_Q);
    HELD(&out, out_data, f32, 4, B, S_Q, H_Q, D_V);
    HELD(&lse, lse_data, f32, 3, B, H_Q, S_Q);
    memset(&call, 0, sizeof call);
    ARGS = FMLA_INIT(fmla_merge_args);
    for (int i = 0; i < ARGUMENTS; i++) *arguments[i].member = &arguments[i].held->tensor;
}

static void check_failed(const char *label, fmla_status status, const char *argument, const char *words)
{
    check_rejected(label, fmla_merge(&ARGS), status, op, argument, words);
    CHECK(!memcmp(out_data, out_before, sizeof out_data) && !memcmp(lse_data, lse_before, sizeof lse_data),
          "%s: a failed call wrote to its outputs", label);
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
            check_failed(label, FMLA_INVALID_ARGUMENT, arguments[i].name, words);
        }
    for (int i = 1; i < ARGUMENTS; i++) {
        set_up();
        arguments[i].held->tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 3};
        snprintf(label, sizeof label, "%s on cuda:3", arguments[i].name);
        check_failed(label, FMLA_INVALID_ARGUMENT, arguments[i].name, "cuda:3|cpu");
    }
    static const struct {
        struct held *held;
        int dimension;
        int64_t size;
        const char *argument, *words;
    } sizes[] = {
        {&lse_parts, 0, 2, "lse_parts", "n|2|3"},
        {&lse_parts, 1, 1, "lse_parts", "b|1|2"},
        {&lse_parts, 2, 1, "lse_parts", "h_q|1|3"},
        {&lse_parts, 3, 1, "lse_parts", "s_q|1|2"},
        {&sink, 0, 2, "attn_sink", "h_q|2|3"},
        {&out, 0, 1, "out", "b|1|2"},
        {&out, 1, 1, "out", "s_q|1|2"},
        {&out, 2, 1, "out", "h_q|1|3"},
        {&out, 3, 39, "out", "d_v|39|40"},
        {&lse, 0, 1, "lse", "b|1|2"},
        {&lse, 1, 1, "lse", "h_q|1|3"},
        {&lse, 2, 1, "lse", "s_q|1|2"},
    };
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        set_up();
        sizes[k].held->shape[sizes[k].dimension] = sizes[k].size;
        snprintf(label, sizeof label, "%s: size %" PRId64 " of dimension %d", sizes[k].argument,
                 sizes[k].size, sizes[k].dimension);
        check_failed(label, FMLA_INVALID_ARGUMENT, sizes[k].argument, sizes[k].words);
    }
}

#define MUTATION(name, ...)                                                                                  \
    static void name(void)                                                                                   \
    {                                                                                                        \
        __VA_ARGS__;                                                                                         \
    }

MUTATION(size_0, ARGS.struct_size = 0)
MUTATION(size_less, ARGS.struct_size = sizeof ARGS - 1)
MUTATION(size_tail, ARGS.struct_size = sizeof call; call.bytes[sizeof call - 1] = 1)
MUTATION(lse_empty_2, ARGS.lse_empty = 2)
MUTATION(log_base_1, ARGS.log_base = 1)
MUTATION(kernel_unknown, ARGS.kernel = "none")
static void all_cuda(void)
{
    for (int i = 0; i < ARGUMENTS; i++)
        arguments[i].held->tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 99};
}

static const struct mutation mutations[] = {
    {"struct_size 0", size_0, FMLA_INVALID_ARGUMENT, "struct_size", "0|must be"},
    {"struct_size too small", size_less, FMLA_INVALID_ARGUMENT, "struct_size", "must be"},
    {"struct_size with a tail", size_tail, FMLA_UNSUPPORTED, "struct_size", "0.1.0"},
    {"lse_empty 2", lse_empty_2, FMLA_INVALID_ARGUMENT, "lse_empty", "2|0|1"},
    {"log_base 1", log_base_1, FMLA_INVALID_ARGUMENT, "log_base", "1|0|2"},
    {"unknown kernel", kernel_unknown, FMLA_INVALID_ARGUMENT, "kernel", "none|cpu-generic|ref"},
    {"all on cuda", all_cuda, FMLA_UNSUPPORTED, "out_parts", "device is cuda:99: "},
};

static void check_accepted(const char *label, int written)
{
    const fmla_status status = fmla_merge(&ARGS);
    CHECK(status == FMLA_OK, "%s: %s", label, fmla_last_error());
    int64_t same = 0;
    for (int i = 0; i < OUT; i++) same += !memcmp(&out_data[i], &out_before[i], 4);
    for (int i = 0; i < LSE; i++) same += !memcmp(&lse_data[i], &lse_before[i], 4);
    CHECK(same == (written ? 0 : OUT + LSE), "%s: %" PRId64 " elements stayed", label, same);
}

static void test_accepted(void)
{
    set_up();
    check_accepted("as it is", 1);
    set_up();
    ARGS.struct_size = sizeof call;
    check_accepted("a larger struct, zero behind", 1);
    set_up();
    for (int i = 0; i < ARGUMENTS; i++)
        arguments[i].held->tensor.device = (fmla_device){FMLA_DEVICE_CUDA_HOST, 0};
    check_accepted("pinned host memory", 1);
    set_up();
    for (int i = 0; i < ARGUMENTS; i++) arguments[i].held->tensor.strides = NULL;
    check_accepted("no strides", 1);
    /* No part: no key was seen by anyone. */
    set_up();
    HELD(&parts, NULL, f32, 5, 0, B, S_Q, H_Q, D_V), HELD(&lse_parts, NULL, f32, 4, 0, B, H_Q, S_Q);
    check_accepted("n = 0", 1);
    CHECK(out_data[0] == 0.0f && lse_data[0] == INFINITY, "n = 0 gives %a, lse %a", (double)out_data[0],
          (double)lse_data[0]);
    set_up();
    HELD(&parts, NULL, f32, 5, N, 0, S_Q, H_Q, D_V), HELD(&lse_parts, NULL, f32, 4, N, 0, H_Q, S_Q);
    HELD(&out, NULL, f32, 4, 0, S_Q, H_Q, D_V), HELD(&lse, NULL, f32, 3, 0, H_Q, S_Q);
    check_accepted("b = 0", 0);
    /* The out of a part without keys is not read, whatever stands there; either infinity says so. */
    set_up();
    for (int i = 0; i < OUT; i++) parts_data[i] = parts_data[2 * OUT + i] = NAN, parts_data[OUT + i] = 1.5f;
    for (int i = 0; i < LSE; i++) {
        lse_parts_data[i] = INFINITY, lse_parts_data[2 * LSE + i] = -INFINITY;
        lse_parts_data[LSE + i] = 0.25f;
    }
    ARGS.attn_sink = NULL;
    check_accepted("parts without keys", 1);
    int64_t wrong = 0;
    for (int i = 0; i < OUT; i++) wrong += out_data[i] != 1.5f;
    for (int i = 0; i < LSE; i++) wrong += lse_data[i] != 0.25f;
    CHECK(wrong == 0, "parts without keys: %" PRId64 " elements differ from the one part with keys", wrong);
    /* Nothing to write is done at once, however large the sizes beside the zero are. */
    set_up();
    HELD(&parts, NULL, f32, 5, 1, INT32_MAX, INT32_MAX, 0, 0),
        HELD(&out, NULL, f32, 4, INT32_MAX, INT32_MAX, 0, 0);
    HELD(&lse_parts, NULL, f32, 4, 1, INT32_MAX, 0, INT32_MAX);
    ARGS.lse = NULL, ARGS.attn_sink = NULL;
    check_accepted("no heads, many tokens", 0);
}

int main(void)
{
    test_tensors();
    for (size_t k = 0; k < sizeof mutations / sizeof mutations[0]; k++) {
        set_up();
        mutations[k].apply();
        check_failed(mutations[k].label, mutations[k].status, mutations[k].argument, mutations[k].words);
    }
    check_rejected("NULL args", fmla_merge(NULL), FMLA_INVALID_ARGUMENT, op, "args", "NULL");
    test_accepted();
    return check_done("test_merge_errors");
}
