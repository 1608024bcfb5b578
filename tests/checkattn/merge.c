/* SPDX-License-Identifier: MIT
 *
 * Tests merge token by token against the oracle.
 */
#include "axes.h"

#include "elements.h"

#include <stdio.h>
#include <string.h>

#define MERGE(member) TENSOR_merge_##member

/* Without requests nothing is computed; without parts only rows without keys. A call with the out of one part
 * alone has no part apart. */
static bool possible(const int64_t *v)
{
    return v[M_PART] < 1 || (v[M_N] && v[M_LAST] != 1);
}

static bool counts(const int64_t *v, int i, int j)
{
    return possible(v) && (v[M_B] || i == M_B || j == M_B) && (v[M_N] || i == M_N || i == M_B) && j < M_AXES;
}

static double cost(const int64_t *v)
{
    return (double)(v[M_N] + 1) * (double)(v[M_B] * v[M_SQ]) * (double)(v[M_HQ] * v[M_DV]);
}

static void fill(struct test_case *c)
{
    const int64_t *const v = c->v, n = v[M_N] + v[M_LAST];
    struct random_state *const random = &c->random;
    for (int64_t i = 0; i < n; i++)
        for (int64_t r = 0; r < v[M_B]; r++)
            for (int64_t j = 0; j < v[M_SQ]; j++)
                for (int64_t h = 0; h < v[M_HQ]; h++) {
                    const bool empty =
                        v[M_EMPTIES] == EMPTIES_ALL || (v[M_EMPTIES] == EMPTIES_SOME && (i + h + r) % 3 == 0);
                    const bool last = i == v[M_N];
                    float *const lse = last ? guarded_at(&c->tensor[MERGE(lse_last)], r, h, j, 0)
                                            : guarded_at(&c->tensor[MERGE(lse_parts)], i, r, h, j);
                    *lse = empty ? ((i + j) % 2 ? INFINITY : -INFINITY) : 5.0f + 3.0f * random_normal(random);
                    if (v[M_EMPTIES] == EMPTIES_NAN && (h + r) % 3 == 0 && i == h % n) *lse = NAN;
                    const int64_t own = c->args.merge.part ? i + 1 - c->args.merge.part : i;
                    if (empty || own < 0 || own >= c->n_out + last)
                        continue; /* its out remains NaN, or has none */
                    const struct guarded *const out = &c->tensor[last ? MERGE(out_last) : MERGE(out_parts)];
                    char *const row = last ? guarded_at(out, r, j, h, 0) : guarded_at(out, own, r, j, h);
                    for (int64_t d = 0; d < v[M_DV]; d++)
                        element_store(row, out->tensor.dtype, d, random_input(random, 0.0f, 0.1f));
                }
}

static void make(struct test_case *c)
{
    static const fmla_dtype *const dtypes[] = {&dtype_bf16, &dtype_fp16, &dtype_f32};
    const int64_t *v = c->v;
    const enum layout layout = (enum layout)v[M_LAYOUT];
    c->dtype = *dtypes[v[M_PARTS]];
    c->args.merge.part = v[M_PART] < 2 ? v[M_PART] : v[M_N];
    c->n_out = v[M_PART] ? 1 : v[M_N];
    case_tensor(c, MERGE(out_parts), layout, true), case_tensor(c, MERGE(lse_parts), layout, true);
    if (v[M_LAST])
        case_tensor(c, MERGE(out_last), layout, true), case_tensor(c, MERGE(lse_last), layout, true);
    case_tensor(c, MERGE(attn_sink), LAYOUT_CONTIGUOUS, v[M_SINK] != 0);
    c->dtype = *dtypes[v[M_OUT]];
    case_tensor(c, MERGE(out), layout, true), case_tensor(c, MERGE(lse), layout, true);
    fill(c);
    for (int64_t h = 0; h < c->h_q; h++)
        *(float *)guarded_at(&c->tensor[MERGE(attn_sink)], h, 0, 0, 0) =
            h % 5 == 3   ? INFINITY
            : h % 5 == 4 ? -INFINITY
                         : 4.0f * random_normal(&c->random);
    /* fp32 results differ only by rounding; 16-bit outputs may differ in the last bit. */
    c->tolerance[0] = v[M_OUT] == 2 ? tolerance_exact_f32 : tolerance_dense_decode_out;
    c->tolerance[1] = tolerance_decode_lse;
}

static bool plant_before(struct test_case *c, enum defect fault, struct patch *patch)
{
    const int32_t other = FMLA_LOG_BASE_2 - c->args.merge.log_base;
    if (fault != FAULT_MERGE_BASE || !c->b || c->v[M_N] < 2 || c->v[M_EMPTIES] != EMPTIES_NONE) return false;
    return plant(patch, &c->args.merge.log_base, &other, sizeof other);
}

static const struct maker maker = {.size = sizeof(struct test_case), .make = make};

struct subject merge = {
    .of = OP_MERGE,
    .maker = &maker,
    .values = MERGE_AXES(AXIS_TEXT),
    .grid = {.possible = possible, .counts = counts, .cost = cost, .dear = 3e6},
    .faults = FAULT(MERGE_BASE),
    .plant_before = plant_before,
};
