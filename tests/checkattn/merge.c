/* SPDX-License-Identifier: MIT
 *
 * Merge against the oracle, whole tensors.
 */
#include "merge.h"
#include "checkattn.h"
#include "device.h"
#include "grid.h"
#include "num.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static struct axis axes[M_AXES] = {
    {"n", 6, {0, 1, 2, 3, 17, 64}},
    {"b", 3, {0, 1, 3}},
    {"s_q", 3, {1, 2, 5}},
    {"h_q", 4, {1, 5, 16, 128}},
    {"d_v", 5, {1, 64, 127, 512, 513}},
    {"parts", 3, {0 /* bf16 */, 1 /* fp16 */, 2 /* fp32 */}},
    {"out", 3, {0, 1, 2}},
    {"lse_empty", 2, {0, 1}},
    {"log_base", 2, {0, 2}},
    {"sink", 2, {0, 1}},
    {"empty parts", 4, {EMPTIES_NONE, EMPTIES_SOME, EMPTIES_ALL, EMPTIES_NAN}},
    {"layout", 4, {LAYOUT_CONTIGUOUS, LAYOUT_PADDED, LAYOUT_SWAPPED, LAYOUT_ODD}},
    {"own threads", 2, {0, 1}},
};

static int64_t value_of(const int *choice, int axis)
{
    return axes[axis].values[choice[axis]];
}
static bool possible(const int *choice)
{
    return choice != NULL;
}
static bool counts(const int *choice, int i, int j)
{
    /* Without a request nothing is computed, without a part only the row of no keys. */
    return (value_of(choice, M_B) || i == M_B || j == M_B) &&
           (value_of(choice, M_N) || i == M_N || i == M_B) && j < M_AXES;
}

static double cost(const int *choice)
{
    return (double)(value_of(choice, M_N) + 1) * (double)(value_of(choice, M_B) * value_of(choice, M_SQ)) *
           (double)(value_of(choice, M_HQ) * value_of(choice, M_DV));
}

static void fill(struct guarded *parts, struct guarded *lse_parts, const int64_t *v,
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

/* The call on copies of all its memory, which come back. */
static fmla_status merge_on_device(const fmla_merge_args *args, struct guarded *const *all, size_t count)
{
    struct device_blocks blocks = {0};
    fmla_tensor tensor[5];
    fmla_merge_args on_device = *args;
    for (size_t i = 0; i < count; i++) device_add_guarded(&blocks, all[i]);
    on_device.out_parts = device_tensor(&blocks, args->out_parts, &tensor[0]);
    on_device.lse_parts = device_tensor(&blocks, args->lse_parts, &tensor[1]);
    on_device.attn_sink = device_tensor(&blocks, args->attn_sink, &tensor[2]);
    on_device.out = device_tensor(&blocks, args->out, &tensor[3]);
    on_device.lse = device_tensor(&blocks, args->lse, &tensor[4]);
    void *stream = on_device.stream = device_stream_open();
    const fmla_status status = fmla_merge(&on_device);
    if (!status) device_wait(stream);
    device_down(&blocks, NULL);
    device_stream_close(stream);
    device_free(&blocks);
    return status;
}

void merge_check(const struct run *run, const int64_t v[M_AXES], uint64_t seed, struct tally *tally)
{
    static const fmla_dtype *const dtypes[] = {&dtype_bf16, &dtype_fp16, &dtype_f32};
    const enum layout layout = (enum layout)v[M_LAYOUT];
    struct random_state random = {seed};
    struct guarded parts, lse_parts, sink, out, lse, ref_out, ref_lse;
    const int64_t out_shape[] = {v[M_B], v[M_SQ], v[M_HQ], v[M_DV]}, lse_shape[] = {v[M_B], v[M_HQ], v[M_SQ]};
    guarded_make(&parts, *dtypes[v[M_PART]], 5, (int64_t[]){v[M_N], v[M_B], v[M_SQ], v[M_HQ], v[M_DV]},
                 layout);
    guarded_make(&lse_parts, dtype_f32, 4, (int64_t[]){v[M_N], v[M_B], v[M_HQ], v[M_SQ]}, layout);
    guarded_make(&sink, dtype_f32, 1, &v[M_HQ], LAYOUT_CONTIGUOUS);
    guarded_make(&out, *dtypes[v[M_OUT]], 4, out_shape, layout);
    guarded_make(&lse, dtype_f32, 3, lse_shape, layout);
    guarded_make(&ref_out, *dtypes[v[M_OUT]], 4, out_shape, LAYOUT_CONTIGUOUS);
    guarded_make(&ref_lse, dtype_f32, 3, lse_shape, LAYOUT_CONTIGUOUS);
    fill(&parts, &lse_parts, v, &random);
    for (int64_t h = 0; h < v[M_HQ]; h++)
        *(float *)guarded_at(&sink, h, 0, 0, 0) = h % 5 == 3   ? INFINITY
                                                  : h % 5 == 4 ? -INFINITY
                                                               : 4.0f * random_normal(&random);

    char name[256];
    size_t used = 0;
    for (int i = 0; i < M_AXES; i++)
        used += (size_t)snprintf(name + used, sizeof name - used, "%s%s %lld", i ? ", " : "", axes[i].name,
                                 (long long)v[i]);
    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    args.out_parts = &parts.tensor, args.lse_parts = &lse_parts.tensor;
    args.attn_sink = v[M_SINK] ? &sink.tensor : NULL;
    args.out = &ref_out.tensor, args.lse = &ref_lse.tensor;
    args.lse_empty = (int32_t)v[M_EMPTY], args.log_base = (int32_t)v[M_BASE];
    args.kernel = "ref";
    if (fmla_merge(&args)) report(tally, run, name, fmla_last_error());

    args.out = &out.tensor, args.lse = &lse.tensor;
    args.kernel = forced_kernel(run);
    if (run->fault == FAULT_MERGE_BASE && v[M_B] && v[M_N] > 1 && v[M_EMPTIES] == EMPTIES_NONE) {
        args.log_base = FMLA_LOG_BASE_2 - args.log_base;
        tally->planted = true;
    }
    use_threads(run, v[M_THREADS] ? THREADS_OWN : THREADS_BUILT_IN);
    struct guarded *memory[] = {&parts, &lse_parts, &sink, &out, &lse};
    if (is_apart(run->device) ? merge_on_device(&args, memory, sizeof memory / sizeof memory[0])
                              : fmla_merge(&args))
        report(tally, run, name, fmla_last_error());
    use_threads(run, THREADS_BUILT_IN);
    tally->cases++;

    /* In fp32 the results differ by rounding alone; narrow outputs may differ by their last bit. */
    const struct tolerance *tolerance = v[M_OUT] == 2 ? &tolerance_exact_f32 : &tolerance_dense_decode_out;
    struct comparison outs = {0}, lses = {0};
    const int64_t element = out.tensor.dtype.bits / 8;
    for (int64_t r = 0; r < v[M_B]; r++)
        for (int64_t j = 0; j < v[M_SQ]; j++)
            for (int64_t h = 0; h < v[M_HQ]; h++, tally->rows++) {
                const char *mine = guarded_at(&out, r, j, h, 0), *theirs = guarded_at(&ref_out, r, j, h, 0);
                for (int64_t d = 0; d < v[M_DV]; d++)
                    compare_add(&outs, tolerance, guarded_value(&out, mine + d * element),
                                guarded_value(&ref_out, theirs + d * element));
                compare_add(&lses, &tolerance_decode_lse, guarded_value(&lse, guarded_at(&lse, r, h, j, 0)),
                            guarded_value(&ref_lse, guarded_at(&ref_lse, r, h, j, 0)));
            }
    tally->cosine_out = fmax(tally->cosine_out, compare_cosine(&outs));
    tally->cosine_lse = fmax(tally->cosine_lse, compare_cosine(&lses));
    char what[240];
    snprintf(what, sizeof what,
             "out: %lld of %lld elements off, worst |Δ| %.3g, cosine difference %.3g; lse: %lld off, worst "
             "|Δ| %.3g, "
             "cosine difference %.3g",
             (long long)outs.wrong, (long long)outs.count, outs.worst_abs, compare_cosine(&outs),
             (long long)lses.wrong, lses.worst_abs, compare_cosine(&lses));
    if (!compare_passed(&outs, tolerance) || !compare_passed(&lses, &tolerance_decode_lse))
        report(tally, run, name, what);
    if (!guarded_intact(&out) || !guarded_intact(&lse))
        report(tally, run, name, "bytes outside the tensors' elements were written");
    struct guarded *all[] = {&parts, &lse_parts, &sink, &out, &lse, &ref_out, &ref_lse};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) guarded_free(all[i]);
}

void check_merge(const struct run *run, struct tally *tally)
{
    axes[M_THREADS].count = on_gpu(run) ? 1 : 2;
    struct grid grid = {.axes = M_AXES,
                        .axis = axes,
                        .possible = possible,
                        .cost = cost,
                        .counts = counts,
                        .dear = 3e6,
                        .random = {run->seed}};
    grid_begin(&grid);
    int choice[GRID_AXES];
    for (uint64_t i = 1; grid_next(&grid, choice); i++) {
        int64_t v[M_AXES];
        for (int a = 0; a < M_AXES; a++) v[a] = value_of(choice, a);
        if (wants_case(run, tally, i)) merge_check(run, v, run->seed * 1000003 + i, tally);
        if (run->most_cases && (int64_t)i >= run->most_cases) break;
        if (run->fault != FAULT_NONE && tally->planted) break;
    }
    tally->pairs += grid.pairs, tally->covered += grid.covered;
    grid_end(&grid);
}
