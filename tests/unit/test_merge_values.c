/* SPDX-License-Identifier: MIT
 *
 * Tests what merge promises about parts apart, results in place and the contribution of one part, on every kernel
 * that runs here, a GPU's too: calls that must agree are compared with each other. All tensors of a call lie in
 * one block of memory, and whatever a call must not write there is compared too.
 */
#include "values.h"

#include "elements.h"
#include "gpu.h"
#include "random.h"

enum { N = 3, B = 2, S_Q = 2, H_Q = 3, ROWS = B * S_Q * H_Q, BLOCK = 1 << 19, PAD = 8 };

static _Alignas(64) unsigned char block[BLOCK], before[BLOCK], expected[BLOCK];
static size_t used;
static void *on_gpu; /* a copy of the block; NULL: calls run in host memory */

/* The kernel and the layout under test. */
static struct variant {
    const char *kernel;
    fmla_dtype dtype;
    int64_t d_v;
    bool padded; /* rows are PAD elements apart, and tokens and heads are swapped */
    int32_t log_base;
} v;

static struct held out_parts, lse_parts, out_last, lse_last, out, lse, sink;
static fmla_merge_args args;

/* ---- The call -------------------------------------------------------------------------------- */

/* Gives a tensor room in the block. */
static void place(struct held *held, fmla_dtype dtype, int ndim, const int64_t *shape)
{
    const bool rows = ndim > 3 && shape[ndim - 1] == v.d_v && shape[ndim - 2] == H_Q;
    int64_t elements = 1;
    held_set(held, block + used, dtype, ndim, shape);
    for (int i = 0; i < ndim; i++) elements *= shape[i];
    if (rows && v.padded) {
        held->strides[ndim - 3] = v.d_v + PAD, held->strides[ndim - 2] = S_Q * (v.d_v + PAD);
        held->strides[ndim - 4] = S_Q * H_Q * (v.d_v + PAD);
        if (ndim == 5) held->strides[0] = ROWS * (v.d_v + PAD);
        elements = elements / v.d_v * (v.d_v + PAD);
    }
    used += ((size_t)elements * dtype.bits / 8 + 127) / 64 * 64;
    if (used > BLOCK) abort();
}

#define PLACE(held, dtype, ...)                                                                              \
    place(held, dtype, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t),                             \
          (const int64_t[]){__VA_ARGS__})

static char *row_of(const struct held *h, int64_t part, int64_t row)
{
    const int64_t at[] = {part, row / (S_Q * H_Q), row / H_Q % S_Q, row % H_Q};
    int64_t offset = 0;
    for (int i = 0; i < h->tensor.ndim - 1; i++) offset += at[i + 5 - h->tensor.ndim] * h->strides[i];
    return (char *)h->tensor.data + offset * h->tensor.dtype.bits / 8;
}

static float *lse_of(const struct held *h, int64_t part, int64_t row)
{
    const int64_t at[] = {part, row / (S_Q * H_Q), row % H_Q, row / H_Q % S_Q};
    int64_t offset = 0;
    for (int i = 0; i < h->tensor.ndim; i++) offset += at[i + 4 - h->tensor.ndim] * h->strides[i];
    return (float *)h->tensor.data + offset;
}

/* Makes a call of N parts and a last one. In row 0 no part has keys, in others some have none: their out is NaN. */
static void make(void)
{
    struct random_state random = {7};
    memset(block, 0xc3, sizeof block), used = 0;
    PLACE(&out_parts, v.dtype, N, B, S_Q, H_Q, v.d_v), PLACE(&lse_parts, f32, N, B, H_Q, S_Q);
    PLACE(&out_last, v.dtype, B, S_Q, H_Q, v.d_v), PLACE(&lse_last, f32, B, H_Q, S_Q);
    PLACE(&out, v.dtype, B, S_Q, H_Q, v.d_v), PLACE(&lse, f32, B, H_Q, S_Q), PLACE(&sink, f32, H_Q);
    for (int64_t part = 0; part <= N; part++)
        for (int64_t row = 0; row < ROWS; row++) {
            char *const values = row_of(part < N ? &out_parts : &out_last, part, row);
            const bool empty = !row || (row + part) % 4 == 1;
            *lse_of(part < N ? &lse_parts : &lse_last, part, row) =
                empty ? (part % 2 ? INFINITY : -INFINITY) : 2.0f * random_normal(&random);
            for (int64_t d = 0; d < v.d_v; d++)
                element_store(values, v.dtype, d, empty ? NAN : random_normal(&random));
        }
    for (int h = 0; h < H_Q; h++) ((float *)sink.tensor.data)[h] = random_normal(&random);
    args = (fmla_merge_args)FMLA_INIT(fmla_merge_args);
    args.out_parts = &out_parts.tensor, args.lse_parts = &lse_parts.tensor;
    args.out_last = &out_last.tensor, args.lse_last = &lse_last.tensor, args.attn_sink = &sink.tensor;
    args.out = &out.tensor, args.lse = &lse.tensor, args.kernel = v.kernel, args.log_base = v.log_base;
}

/* Runs the call in the block or in the GPU's copy of it, which is copied back. */
static void run(void)
{
    struct reason reason = {""};
    fmla_merge_args there = args;
    fmla_tensor moved[7];
    const fmla_tensor **const at[] = {&there.out_parts, &there.lse_parts, &there.out_last, &there.lse_last,
                                      &there.attn_sink, &there.out,       &there.lse};
    memcpy(before, block, sizeof block);
    if (!on_gpu) {
        CHECK_OK(fmla_merge(&args));
        return;
    }
    for (int i = 0; i < 7; i++) {
        if (!*at[i]) continue;
        moved[i] = **at[i], moved[i].device = (fmla_device){FMLA_DEVICE_CUDA, 0};
        moved[i].data = (char *)on_gpu + ((unsigned char *)moved[i].data - block), *at[i] = &moved[i];
    }
    CHECK(gpu_upload(on_gpu, block, sizeof block, &reason), "%s", reason.text);
    CHECK_OK(fmla_merge(&there));
    CHECK(gpu_stream_wait(NULL, &reason) && gpu_download(block, on_gpu, sizeof block, &reason), "%s",
          reason.text);
}

/* ---- The promises ---------------------------------------------------------------------------- */

/* The results of a call, row by row. */
struct results {
    char out[ROWS][4 * 600];
    float lse[ROWS];
};

static size_t row_bytes(void)
{
    return (size_t)v.d_v * v.dtype.bits / 8;
}

static void keep(struct results *results)
{
    for (int64_t row = 0; row < ROWS; row++) {
        memcpy(results->out[row], row_of(&out, 0, row), row_bytes());
        results->lse[row] = *lse_of(&lse, 0, row);
    }
}

static const char *label(void)
{
    static char text[128];
    snprintf(text, sizeof text, "%s, %d bits of code %d, d_v %d, %s, base %d", v.kernel, v.dtype.bits,
             v.dtype.code, (int)v.d_v, v.padded ? "padded" : "contiguous", (int)v.log_base);
    return text;
}

/* Part N is at a pointer of its own, or in one tensor with the others. */
static void check_last(const struct results *merged)
{
    static struct results stacked;
    struct held all_out, all_lse;
    make();
    PLACE(&all_out, v.dtype, N + 1, B, S_Q, H_Q, v.d_v), PLACE(&all_lse, f32, N + 1, B, H_Q, S_Q);
    for (int64_t part = 0; part <= N; part++)
        for (int64_t row = 0; row < ROWS; row++) {
            memcpy(row_of(&all_out, part, row), row_of(part < N ? &out_parts : &out_last, part, row),
                   row_bytes());
            *lse_of(&all_lse, part, row) = *lse_of(part < N ? &lse_parts : &lse_last, part, row);
        }
    args.out_parts = &all_out.tensor, args.lse_parts = &all_lse.tensor, args.out_last = args.lse_last = NULL;
    run(), keep(&stacked);
    for (int row = 0; row < ROWS; row++)
        CHECK(!memcmp(merged->out[row], stacked.out[row], row_bytes()) &&
                  merged->lse[row] == stacked.lse[row],
              "%s: row %d differs where all parts are one tensor", label(), row);
}

/* The result replaces `part`: out, lse or both. */
static void check_in_place(const struct results *merged, int64_t part, bool with_out, bool with_lse)
{
    make();
    struct held *const of_out = part < N ? &out_parts : &out_last, *const of_lse =
                                                                       part < N ? &lse_parts : &lse_last;
    if (with_out) {
        memcpy(out.strides, of_out->strides + (part < N), 4 * sizeof *out.strides);
        out.tensor.data = row_of(of_out, part, 0);
    }
    if (with_lse) lse.tensor.data = lse_of(of_lse, part, 0);
    run();
    memcpy(expected, before, sizeof expected);
    for (int64_t row = 0; row < ROWS; row++) {
        memcpy(expected + ((unsigned char *)row_of(&out, 0, row) - block), merged->out[row], row_bytes());
        memcpy(expected + ((unsigned char *)lse_of(&lse, 0, row) - block), &merged->lse[row], sizeof(float));
    }
    CHECK(!memcmp(block, expected, sizeof block), "%s: part %d in place%s%s: other bits", label(), (int)part,
          with_out ? ", out" : "", with_lse ? ", lse" : "");
}

/* The contributions of all parts add up to the merged result, in which no part is apart here; lse is the same. A
 * part without keys contributes 0. */
static void check_contributions(bool in_place)
{
    static struct results merged;
    static double sum[ROWS][600];
    int64_t wrong = 0;
    make(), args.out_last = args.lse_last = NULL;
    run(), keep(&merged);
    memset(sum, 0, sizeof sum);
    for (int part = 0; part < N; part++) {
        make(), args.out_last = args.lse_last = NULL, args.part = part + 1;
        struct held own = out_parts;
        own.shape[0] = 1, own.tensor.shape = own.shape, own.tensor.strides = own.strides;
        own.tensor.data = row_of(&out_parts, part, 0), args.out_parts = &own.tensor;
        if (in_place) out.tensor.data = own.tensor.data;
        run();
        for (int64_t row = 0; row < ROWS; row++) {
            wrong += memcmp(lse_of(&lse, 0, row), &merged.lse[row], sizeof(float)) != 0;
            for (int64_t d = 0; d < v.d_v; d++) {
                const double value = (double)element_load(row_of(&out, 0, row), v.dtype, d);
                const unsigned char *const of_lse = (const unsigned char *)lse_of(&lse_parts, part, row);
                float its;
                memcpy(&its, before + (of_lse - block), sizeof its);
                wrong += isinf(its) && value != 0.0;
                sum[row][d] += value;
            }
        }
    }
    const double relative = v.dtype.bits == 32 ? 1e-6 : v.dtype.code == FMLA_TYPE_BFLOAT ? 0x1p-7 : 0x1p-10;
    for (int64_t row = 0; row < ROWS; row++)
        for (int64_t d = 0; d < v.d_v; d++) {
            const double whole = (double)element_load(merged.out[row], v.dtype, d);
            wrong += !(fabs(sum[row][d] - whole) <= relative * 4.0);
        }
    CHECK(wrong == 0, "%s: %d contributions are wrong%s", label(), (int)wrong, in_place ? " in place" : "");
}

static void check_variant(void)
{
    static struct results merged;
    make(), run(), keep(&merged);
    for (int64_t d = 0; d < v.d_v; d++)
        CHECK(element_load(merged.out[0], v.dtype, d) == 0.0f && merged.lse[0] == INFINITY, "%s: row 0",
              label());
    check_last(&merged);
    for (int64_t part = 0; part <= N; part++)
        for (int which = 1; which < 4; which++) check_in_place(&merged, part, which & 1, which & 2);
    check_contributions(false), check_contributions(true);
}

static void check_kernel(const fmla_capability *row)
{
    static const int64_t widths[] = {1, 40, 129, 512, 600};
    const fmla_dtype dtypes[] = {bf16, fp16, f32};
    for (int i = 0; i < 3 * 5 * 4; i++) {
        v = (struct variant){row->kernel, dtypes[i % 3], widths[i / 3 % 5], i / 15 % 2,
                             i / 30 ? FMLA_LOG_BASE_2 : FMLA_LOG_NATURAL};
        check_variant();
    }
}

/* ---- Memory that is shared otherwise ---------------------------------------------------------- */

static void refused(const char *what, const char *argument, const char *words)
{
    memcpy(before, block, sizeof block);
    check_rejected(what, fmla_merge(&args), FMLA_INVALID_ARGUMENT, "merge", argument, words);
    CHECK(!memcmp(block, before, sizeof block), "%s: a refused call wrote", what);
    make();
}

/* Makes a tensor begin some elements from another's data. */
static void put(struct held *held, const struct held *at, int64_t elements)
{
    held->tensor.data = (char *)at->tensor.data + elements * at->tensor.dtype.bits / 8;
}

static void check_shared_memory(void)
{
    static const char of_parts[] = "shares memory with out_parts, must be apart from it or exactly one part",
                      of_last[] = "shares memory with out_last, must be apart from it or exactly one part",
                      of_lse[] = "shares memory with lse_parts, must be apart from it or exactly one part";
    v = (struct variant){"ref", f32, 40, false, FMLA_LOG_NATURAL};
    const int64_t part = ROWS * v.d_v;
    make();
    put(&out, &out_parts, v.d_v), refused("out a row into the parts", "out", of_parts);
    put(&out, &out_parts, part - 1), refused("out between two parts", "out", of_parts);
    put(&out, &out_parts, N * part - 1), refused("out on the last element", "out", of_parts);
    out.tensor.dtype = bf16, put(&out, &out_parts, 0), refused("out of another type", "out", of_parts);
    put(&out, &out_parts, 0), out.strides[0] = 2 * out.strides[0], refused("other strides", "out", of_parts);
    out_parts.strides[0] = v.d_v, put(&out, &out_parts, 0), refused("parts on each other", "out", of_parts);
    put(&out_last, &out, 1), refused("an element beside the last", "out", of_last);
    put(&lse, &lse_parts, 1), refused("lse beside a part", "lse", of_lse);
    put(&lse, &lse_last, 1),
        refused("lse beside the last", "lse", "shares memory with lse_last|exactly one part");
    put(&lse_parts, &out, 0),
        refused("lse_parts in out", "out", "shares memory with lse_parts, must be apart from it");
    put(&lse_last, &out, 0), refused("lse_last in out", "out", "shares memory with lse_last");
    put(&sink, &out, part - 1), refused("sink in out", "out", "shares memory with attn_sink");
    put(&lse, &out_parts, 0), refused("lse in the parts", "lse", "shares memory with out_parts");
    put(&lse, &out_last, 0), refused("lse in the last", "lse", "shares memory with out_last");
    put(&sink, &lse, 0), refused("sink in lse", "lse", "shares memory with attn_sink");
    put(&lse, &out, 7), refused("lse in out", "lse", "shares memory with out");

    /* In between each other, out and parts share no memory: rows of both take turns. */
    out_parts.strides[3] = out.strides[2] = 2 * v.d_v,
    out_parts.strides[2] = out.strides[1] = 2 * H_Q * v.d_v;
    out_parts.strides[1] = out.strides[0] = 2 * S_Q * H_Q * v.d_v, out_parts.strides[0] = 2 * part;
    put(&out, &out_parts, v.d_v);
    CHECK_OK(fmla_merge(&args));
    put(&out, &out_parts, v.d_v - 1), refused("rows that meet", "out", of_parts);
}

int main(void)
{
    struct reason reason = {""};
    fmla_capability row = FMLA_INIT(fmla_capability);
    const fmla_device gpu = {FMLA_DEVICE_CUDA, 0};
    for_kernels(OP_MERGE, check_kernel);
    check_shared_memory();
    for (int64_t i = 0; fmla_capabilities(gpu, i, &row) == FMLA_OK; i++) {
        if (strcmp(row.operation, "merge") != 0 || !row.available) continue;
        CHECK(on_gpu || (gpu_open(0, &reason) && gpu_alloc(&on_gpu, BLOCK, &reason)), "%s", reason.text);
        if (on_gpu) check_kernel(&row);
    }
    if (on_gpu) gpu_free(on_gpu);
    return check_done("test_merge_values");
}
