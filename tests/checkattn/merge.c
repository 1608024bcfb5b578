/* SPDX-License-Identifier: MIT
 *
 * Merge, token by token against the oracle.
 */
#include "merge.h"
#include "num.h"

#include <stdio.h>
#include <string.h>

static struct axis axes[M_AXES];

static const char axis_values[] = "n: 0 1 2 3 17 64\n"
                                  "b: 0 1 3\n"
                                  "s_q: 1 2 5\n"
                                  "h_q: 1 5 16 128\n"
                                  "d_v: 1 64 127 512 513\n"
                                  "parts: bf16 fp16 fp32\n"
                                  "out: bf16 fp16 fp32\n"
                                  "lse_empty: 0 1\n"
                                  "log_base: 0 2\n"
                                  "sink: 0 1\n"
                                  "empty parts: none some all nan\n"
                                  "layout: contiguous padded swapped odd\n"
                                  "threads: built_in (one) own\n";

#define MERGE_TENSORS_OF(X)                                                                                  \
    X(MERGE_OUT, OUT, out)                                                                                   \
    X(MERGE_LSE, BY_HEAD, lse)                                                                               \
    X(MERGE_OUT_PARTS, INPUT, out_parts) X(MERGE_LSE_PARTS, INPUT, lse_parts) X(MERGE_SINK, INPUT, attn_sink)
enum { MERGE_TENSORS_OF(TENSOR_NAME) MERGE_TENSORS };

#define TENSOR_ARGS fmla_merge_args
static const struct tensor_row tensors[] = {MERGE_TENSORS_OF(TENSOR_ROW)};

static bool possible(const int64_t *v)
{
    return v != NULL;
}

/* Without a request nothing is computed, without a part only the row of no keys. */
static bool counts(const int64_t *v, int i, int j)
{
    return (v[M_B] || i == M_B || j == M_B) && (v[M_N] || i == M_N || i == M_B) && j < M_AXES;
}

static double cost(const int64_t *v)
{
    return (double)(v[M_N] + 1) * (double)(v[M_B] * v[M_SQ]) * (double)(v[M_HQ] * v[M_DV]);
}

static void choose(const struct run *run, struct grid *grid)
{
    axes[M_THREADS].count = on_gpu(run) ? 1 : 2;
    grid->possible = possible, grid->counts = counts;
    grid->cost = cost, grid->dear = 3e6;
}

static void fill(const struct guarded *parts, const struct guarded *lse_parts, const int64_t *v,
                 struct random_state *random)
{
    for (int64_t i = 0; i < v[M_N]; i++)
        for (int64_t r = 0; r < v[M_B]; r++)
            for (int64_t j = 0; j < v[M_SQ]; j++)
                for (int64_t h = 0; h < v[M_HQ]; h++) {
                    const bool empty =
                        v[M_EMPTIES] == EMPTIES_ALL || (v[M_EMPTIES] == EMPTIES_SOME && (i + h + r) % 3 == 0);
                    *(float *)guarded_at(lse_parts, i, r, h, j) =
                        empty ? ((i + j) % 2 ? INFINITY : -INFINITY) : 5.0f + 3.0f * random_normal(random);
                    if (v[M_EMPTIES] == EMPTIES_NAN && (h + r) % 3 == 0 && i == h % v[M_N])
                        *(float *)guarded_at(lse_parts, i, r, h, j) = NAN;
                    if (empty) continue;                       /* its out stays NaN */
                    char *row = guarded_at(parts, i, r, j, h); /* four indices of five: the row */
                    for (int64_t d = 0; d < v[M_DV]; d++) {
                        const float x = random_input(random, 0.0f, 0.1f);
                        const uint16_t narrow = v[M_PART] == 1 ? num_to_fp16(x) : num_to_bf16(x);
                        if (v[M_PART] == 2)
                            memcpy(row + 4 * d, &x, sizeof x);
                        else
                            memcpy(row + 2 * d, &narrow, sizeof narrow);
                    }
                }
}

static void make(struct test_case *c, const struct run *run)
{
    static const fmla_dtype *const dtypes[] = {&dtype_bf16, &dtype_fp16, &dtype_f32};
    const int64_t *v = c->v;
    const enum layout layout = (enum layout)v[M_LAYOUT];
    (void)run;
    c->b = v[M_B], c->s_q = v[M_SQ], c->h_q = v[M_HQ], c->d_v = v[M_DV];
    c->args.merge = FMLA_INIT(fmla_merge_args);
    case_tensor(c, MERGE_OUT_PARTS, *dtypes[v[M_PART]], 5, (int64_t[]){v[M_N], c->b, c->s_q, c->h_q, c->d_v},
                layout, true);
    case_tensor(c, MERGE_LSE_PARTS, dtype_f32, 4, (int64_t[]){v[M_N], c->b, c->h_q, c->s_q}, layout, true);
    case_tensor(c, MERGE_SINK, dtype_f32, 1, &c->h_q, LAYOUT_CONTIGUOUS, v[M_SINK] != 0);
    case_tensor(c, MERGE_OUT, *dtypes[v[M_OUT]], 4, (int64_t[]){c->b, c->s_q, c->h_q, c->d_v}, layout, true);
    case_tensor(c, MERGE_LSE, dtype_f32, 3, (int64_t[]){c->b, c->h_q, c->s_q}, layout, true);
    fill(&c->tensor[MERGE_OUT_PARTS], &c->tensor[MERGE_LSE_PARTS], v, &c->random);
    for (int64_t h = 0; h < c->h_q; h++)
        *(float *)guarded_at(&c->tensor[MERGE_SINK], h, 0, 0, 0) = h % 5 == 3 ? INFINITY
                                                                   : h % 5 == 4
                                                                       ? -INFINITY
                                                                       : 4.0f * random_normal(&c->random);
    c->args.merge.lse_empty = (int32_t)v[M_EMPTY], c->args.merge.log_base = (int32_t)v[M_BASE];
    /* In fp32 the results differ by rounding alone; narrow outputs may differ by their last bit. */
    c->tolerance[MERGE_OUT] = v[M_OUT] == 2 ? tolerance_exact_f32 : tolerance_dense_decode_out;
    c->tolerance[MERGE_LSE] = tolerance_decode_lse;
}

/* All of them. */
static int64_t choose_rows(struct test_case *c, struct rows *rows)
{
    const int64_t tokens = c->b * c->s_q;
    for (int64_t i = 0; i < tokens; i++) rows[i] = (struct rows){i / c->s_q, i % c->s_q, 0, 1, c->h_q};
    return tokens;
}

static void narrow(const struct test_case *c, const struct rows *rows, struct view *v)
{
    (void)c;
    view_narrow(v, MERGE_OUT_PARTS, 1, rows->request, 1), view_narrow(v, MERGE_OUT_PARTS, 2, rows->token, 1);
    view_narrow(v, MERGE_LSE_PARTS, 1, rows->request, 1), view_narrow(v, MERGE_LSE_PARTS, 3, rows->token, 1);
}

static bool plant_before(struct test_case *c, enum defect fault, struct patch *patch)
{
    const int32_t other = FMLA_LOG_BASE_2 - c->args.merge.log_base;
    if (fault != FAULT_MERGE_BASE || !c->b || c->v[M_N] < 2 || c->v[M_EMPTIES] != EMPTIES_NONE) return false;
    return plant(patch, &c->args.merge.log_base, &other, sizeof other);
}

static const struct maker maker = {
    .size = sizeof(struct test_case), .make = make, .choose_rows = choose_rows, .narrow = narrow};

const struct operation merge = {
    .name = "merge",
    .calls = &merge_calls,
    .maker = &maker,
    .values = axis_values,
    .axis = axes,
    .axes = M_AXES,
    .threads = M_THREADS,
    .tensor = tensors,
    .tensors = MERGE_TENSORS,
    .results = MERGE_OUT_PARTS,
    .choose = choose,
    .sink = MERGE_SINK,
    .faults = FAULT(MERGE_BASE),
    .plant_before = plant_before,
};
