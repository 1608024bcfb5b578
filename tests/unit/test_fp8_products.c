/* SPDX-License-Identifier: MIT
 *
 * Tests FP8 products of dense decode on every CPU kernel and the oracle: a call has the bits of one with
 * BF16 products whose queries were quantised here, using only the number formats, and a NaN or infinity of
 * a query stays in its row.
 */
#include "filled.h"
#include "tensors.h"

#include "num.h"

#include <math.h>

enum { B = 3, S_Q = 2, H_Q = 9, ROWS = B * S_Q * H_Q, D_QK = 576, D_V = 512, PAGE = 64, MOST_KEYS = 640 };

static uint16_t q[ROWS][D_QK + 24], quantised[ROWS][D_QK]; /* rows of q have gaps */
static uint8_t codes[ROWS][D_QK], cache[B * MOST_KEYS * 656];
static int32_t lengths[B] = {600, 0, 33};

struct result {
    uint16_t out[ROWS][D_V];
    float lse[ROWS];
};

/* Rows of many magnitudes; of zeros, of the smallest numbers, and with non-finite values. */
enum {
    ZEROS = 3,
    LEAST = 5,
    WITH_NAN = 7,
    WITH_INFINITY = 11,
    WITH_TAIL = 13 /* infinite in the part that FP8_656 does not quantise */
};

static void draw_queries(void)
{
    struct random_state random = {1};
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < D_QK; i++) {
            const float x = random_input(&random, 0.0f, 0.3f) * ldexpf(1.0f, row % 5 - 2);
            q[row][i] = num_to_bf16(row == ZEROS ? 0.0f : row == LEAST ? x * 0x1p-126f : x);
        }
    q[WITH_NAN][200] = 0x7fc1, q[WITH_INFINITY][511] = 0xff80, q[WITH_TAIL][575] = 0x7f80;
}

/* The definition, implemented independently of the library. */
static void quantise(int row, int count)
{
    float most = 0.0f;
    bool nan = false;
    memcpy(quantised[row], q[row], sizeof quantised[row]);
    for (int i = 0; i < count; i++) {
        const float x = fabsf(num_from_bf16(q[row][i]));
        nan |= x != x;
        most = fmaxf(most, x);
    }
    const float scale = nan ? NAN : most == 0.0f ? 1.0f : most / 448.0f;
    for (int i = 0; i < count; i++) {
        const uint8_t code = num_to_e4m3(num_from_bf16(q[row][i]) / scale);
        quantised[row][i] = num_to_bf16(num_from_e4m3(code) * scale);
    }
}

static void run(const char *kernel, int32_t format, int32_t products, const fmla_tensor *queries,
                const float *q_scale, int32_t batch_invariant, struct result *result)
{
    const int64_t bytes = format == FMLA_KV_FP8_656 ? 656 : 576;
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    memset(result, 0xff, sizeof *result);
    args.q = queries, args.kv_cache = TENSOR_OF(cache, u8, B, MOST_KEYS, 1, bytes);
    args.seqlens = TENSOR_OF(lengths, i32, B);
    args.out = TENSOR_OF(result->out, bf16, B, S_Q, H_Q, D_V);
    args.lse = TENSOR_OF(result->lse, f32, B, H_Q, S_Q);
    args.kernel = kernel, args.kv_format = format, args.products = products, args.causal = 1;
    args.batch_invariant = batch_invariant;
    const fmla_tensor *const scale = TENSOR_OF((void *)(uintptr_t)q_scale, f32, 1);
    args.q_scale = q_scale ? scale : NULL;
    CHECK(run_in_room(OP_DENSE_DECODE, &args) == FMLA_OK, "%s: %s", kernel, fmla_last_error());
}

/* Returns true if the bits are equal; a NaN only has to be a NaN. */
static bool same(const struct result *a, const struct result *b)
{
    bool equal = true;
    for (int row = 0; row < ROWS; row++) {
        equal &= !memcmp(&a->lse[row], &b->lse[row], sizeof a->lse[row]) ||
                 (isnan(a->lse[row]) && isnan(b->lse[row]));
        for (int d = 0; d < D_V; d++)
            equal &= a->out[row][d] == b->out[row][d] ||
                     (isnan(num_from_bf16(a->out[row][d])) && isnan(num_from_bf16(b->out[row][d])));
    }
    return equal;
}

static bool all_nan(const struct result *result, int row)
{
    int nans = 0;
    for (int d = 0; d < D_V; d++) nans += isnan(num_from_bf16(result->out[row][d]));
    return nans == D_V;
}

static void check_rows(const char *kernel, const struct result *result, const bool *no_number)
{
    for (int row = 0; row < ROWS; row++) {
        int finite = 0;
        const bool empty = lengths[row / (S_Q * H_Q)] == 0;
        for (int d = 0; d < D_V; d++) finite += isfinite(num_from_bf16(result->out[row][d])) != 0;
        CHECK(no_number[row] && !empty ? all_nan(result, row) : finite == D_V, "%s: row %d: %d are finite",
              kernel, row, finite);
    }
}

static void check_kernel(const fmla_capability *row)
{
    static struct result fp8, of_values, invariant;
    static const int32_t formats[] = {FMLA_KV_FP8_656, FMLA_KV_FP8_576};
    struct held strided;
    HELD(&strided, q, bf16, 4, B, S_Q, H_Q, D_QK);
    strided.strides[2] = D_QK + 24, strided.strides[1] = H_Q * strided.strides[2];
    strided.strides[0] = S_Q * strided.strides[1];
    for (int f = 0; f < 2; f++) {
        bool no_number[ROWS] = {false};
        no_number[WITH_NAN] = no_number[WITH_INFINITY] = true;
        no_number[WITH_TAIL] = formats[f] == FMLA_KV_FP8_576;
        for (int r = 0; r < ROWS; r++) quantise(r, formats[f] == FMLA_KV_FP8_656 ? 512 : 576);
        run(row->kernel, formats[f], FMLA_PRODUCTS_FP8, &strided.tensor, NULL, 0, &fp8);
        run(row->kernel, formats[f], FMLA_PRODUCTS_BF16, TENSOR_OF(quantised, bf16, B, S_Q, H_Q, D_QK), NULL,
            0, &of_values);
        CHECK(same(&fp8, &of_values), "%s, format %d: other bits than of quantised queries", row->kernel,
              (int)formats[f]);
        run(row->kernel, formats[f], FMLA_PRODUCTS_FP8, &strided.tensor, NULL, 1, &invariant);
        if (f == 1) check_rows(row->kernel, &fp8, no_number), check_rows(row->kernel, &invariant, no_number);
    }
    /* Codes with a scale and without. */
    static const float scale = 0.0123f;
    for (int with = 0; with < 2; with++) {
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < D_QK; i++) {
                codes[r][i] = (uint8_t)((r * 31 + i * 7) % 0x70 | (i & 8) << 4);
                quantised[r][i] = num_to_bf16(num_from_e4m3(codes[r][i]) * (with ? scale : 1.0f));
            }
        codes[WITH_NAN][3] = 0x7f, quantised[WITH_NAN][3] = 0x7fc0;
        run(row->kernel, FMLA_KV_FP8_576, FMLA_PRODUCTS_FP8, TENSOR_OF(codes, u8, B, S_Q, H_Q, D_QK),
            with ? &scale : NULL, 0, &fp8);
        run(row->kernel, FMLA_KV_FP8_576, FMLA_PRODUCTS_BF16, TENSOR_OF(quantised, bf16, B, S_Q, H_Q, D_QK),
            NULL, 0, &of_values);
        CHECK(same(&fp8, &of_values), "%s: other bits than of the values of codes", row->kernel);
        CHECK(all_nan(&fp8, WITH_NAN) && !all_nan(&fp8, WITH_NAN + 1), "%s: a code of NaN", row->kernel);
    }
}

int main(void)
{
    struct random_state random = {2};
    int kernels = 0;
    draw_queries();
    /* Codes below 2 with any FP8_656 scales that such bytes form; no infinity or NaN among its bf16
     * values. */
    for (size_t i = 0; i < sizeof cache; i++) cache[i] = (uint8_t)random_between(&random, 0x20, 0x3d);
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++) {
        if (strcmp(row.operation, "dense_decode") != 0 || !row.available) continue;
        CHECK(row.products == (1 << FMLA_PRODUCTS_BF16 | 1 << FMLA_PRODUCTS_FP8), "%s: products are %d",
              row.kernel, (int)row.products);
        check_kernel(&row);
        kernels++;
    }
    CHECK(kernels >= 2, "%d kernels", kernels);
    return check_done("test_fp8_products");
}
