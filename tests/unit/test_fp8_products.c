/* SPDX-License-Identifier: MIT
 *
 * Tests FP8 products of dense decode on every CPU kernel and the oracle: a call has the bits of one with
 * BF16 products whose queries were quantised here, using only the number formats, and a NaN or infinity of
 * a query stays in its row.
 */
#include "attention_calls.h"

/* Rows of zeros, of the smallest numbers, and with values that are not finite, the last one behind those that
 * FP8_656 quantises. */
enum { ROWS = B * S_Q * H_Q, ZEROS = 1, LEAST = 3, WITH_NAN = 5, WITH_INFINITY = 7, WITH_TAIL = ROWS - 2 };
static uint16_t quantised[ROWS][WIDEST];
static bool no_number[ROWS]; /* whose results are NaN */

static uint8_t *query(int row)
{
    const struct held *const q = tensor("q");
    return (uint8_t *)q->tensor.data +
           offset_of(q, row / H_Q / S_Q, row / H_Q % S_Q, row % H_Q) * q->tensor.dtype.bits / 8;
}

/* Changes some values of queries, and quantises the first `count` of each by the definition. */
static void quantise_values(int count)
{
    for (int row = 0; row < ROWS; row++) {
        uint16_t *const q = (uint16_t *)(void *)query(row);
        for (int i = 0; i < WIDEST && (row == ZEROS || row == LEAST); i++)
            q[i] = row == ZEROS ? 0 : num_to_bf16(num_from_bf16(q[i]) * 0x1p-126f);
        if (row == WITH_NAN) q[200] = 0x7fc1;
        if (row == WITH_INFINITY) q[511] = 0xff80;
        if (row == WITH_TAIL) q[575] = 0x7f80;
        float most = 0.0f, nan = 0.0f;
        for (int i = 0; i < count; i++) {
            const float x = fabsf(num_from_bf16(q[i]));
            most = fmaxf(most, x), nan = isnan(x) ? NAN : nan;
        }
        const float scale = most == 0.0f ? 1.0f : most / 448.0f + nan;
        for (int i = 0; i < WIDEST; i++) {
            const uint8_t code = num_to_e4m3(num_from_bf16(q[i]) / scale);
            quantised[row][i] = i < count ? num_to_bf16(num_from_e4m3(code) * scale) : q[i];
        }
    }
}

static void put_codes(float scale)
{
    for (int i = 0; i < ROWS * WIDEST; i++) {
        const int row = i / WIDEST, d = i % WIDEST;
        const uint8_t code =
            (uint8_t)(row == WITH_NAN && d == 3 ? 0x7f : (row * 31 + d * 7) % 0x70 | (d & 8) << 4);
        query(row)[d] = code, quantised[row][d] = num_to_bf16(num_from_e4m3(code) * scale);
    }
}

/* Copies all results: out, then lse. */
static void keep(double results[ROWS][MOST_V + 1])
{
    const struct held *const out = tensor("out"), *const lse = tensor("lse");
    for (int row = 0; row < ROWS; row++) {
        const int r = row / H_Q / S_Q, token = row / H_Q % S_Q, head = row % H_Q;
        for (int d = 0; d < MOST_V; d++) results[row][d] = element(out, offset_of(out, r, token, head) + d);
        results[row][MOST_V] = element(lse, r * lse->strides[0] + head * lse->strides[1] + token);
    }
}

static void check_products(const fmla_capability *row)
{
    static double fp8[ROWS][MOST_V + 1], of_values[ROWS][MOST_V + 1];
    struct held *const q = tensor("q"), given = *q;
    CHECK_EQ(row->products, 1 << FMLA_PRODUCTS_BF16 | 1 << FMLA_PRODUCTS_FP8);
    run_call(row->kernel), keep(fp8);
    held_set(q, quantised, bf16, 4, given.shape), put_number(call.operation, call.args, "products", 0);
    const fmla_tensor **const q_scale = option_at(call.operation, call.args, "q_scale");
    const fmla_tensor *const scale = *q_scale;
    *q_scale = NULL;
    run_call(row->kernel), keep(of_values);
    *q = given, q->tensor.shape = q->shape, q->tensor.strides = q->strides, *q_scale = scale;
    put_number(call.operation, call.args, "products", FMLA_PRODUCTS_FP8);
    for (int i = 0; i < ROWS * (MOST_V + 1); i++) {
        const double *const a = &fp8[0][0] + i, *const b = &of_values[0][0] + i;
        const int r = i / (MOST_V + 1);
        const bool empty = r / H_Q / S_Q == 1,
                   seen = i % (MOST_V + 1) != MOST_V &&
                          (r != WITH_TAIL || call.layout.format == FMLA_KV_FP8_576);
        CHECK(!memcmp(a, b, sizeof *a) || (isnan(*a) && isnan(*b)),
              "%s, call %u, row %d: %g, of quantised queries %g", row->kernel, number, r, *a, *b);
        CHECK(!seen || (no_number[r] && !empty ? isnan(*a) : isfinite(*a)), "%s, call %u, row %d: %g",
              row->kernel, number, r, *a);
    }
}

/* Values of both formats, and codes with a scale and without. */
int main(void)
{
    for (int way = 0; way < 8; way++) {
        const bool codes = way / 2 % 2, of_656 = way % 2 && !codes;
        const struct layout l = DESIGNATED(
            DECODE, .h_kv = 1, .d_qk = 576, .pages = B, .page_size = 640, .causal = 1, .codes = codes,
            .format = of_656 ? FMLA_KV_FP8_656 : FMLA_KV_FP8_576, .products = FMLA_PRODUCTS_FP8,
            .type = {FMLA_TYPE_BFLOAT, 16, 1}, .batch_invariant = way / 4, .has = HAS_LSE);
        make(OP_DENSE_DECODE, &l);
        put_integers("seqlens", (int32_t[]){600, 0, 33}, B);
        const float scale = 0.0123f;
        if (codes) memcpy(tensor("q_scale")->tensor.data, &scale, sizeof scale);
        if (codes && way % 2) *(const fmla_tensor **)option_at(call.operation, call.args, "q_scale") = NULL;
        if (codes)
            put_codes(way % 2 ? 1.0f : scale);
        else
            quantise_values(of_656 ? 512 : 576);
        no_number[WITH_NAN] = true, no_number[WITH_INFINITY] = !codes,
        no_number[WITH_TAIL] = !codes && !of_656;
        for_kernels(OP_DENSE_DECODE, check_products);
    }
    return check_done("test_fp8_products");
}
