/* SPDX-License-Identifier: MIT
 *
 * Plans as decode reads them. With a plan for other lengths every key counts once; with a damaged one decode stays within
 * its memory. Slow, since every input computes.
 */
#include "fuzz.h"

#include "plan.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { MOST_REQUESTS = 4 };

static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
static const fmla_dtype i32 = {FMLA_TYPE_INT, 32, 1}, f32 = {FMLA_TYPE_FLOAT, 32, 1},
                        bf16 = {FMLA_TYPE_BFLOAT, 16, 1};

/* A plan's tables, each in memory of its own. */
struct tables {
    fmla_tensor rows, splits;
    int64_t rows_shape[2], splits_shape[1];
};

static void tables_make(struct tables *t, const void *plan, int64_t b, int32_t partitions)
{
    const size_t rows_bytes = (size_t)partitions * sizeof(struct plan_partition),
                 splits_bytes = (size_t)(b + 1) * sizeof(int32_t);
    t->rows_shape[0] = partitions, t->rows_shape[1] = FMLA_PARTITION_FIELDS, t->splits_shape[0] = b + 1;
    t->rows = (fmla_tensor){exactly(rows_bytes), cpu, 2, i32, t->rows_shape, NULL, 0};
    t->splits = (fmla_tensor){exactly(splits_bytes), cpu, 1, i32, t->splits_shape, NULL, 0};
    const char *at = (const char *)plan + sizeof(struct plan_header);
    memcpy(t->rows.data, at, rows_bytes), memcpy(t->splits.data, at + rows_bytes, splits_bytes);
}

/* A decode in which every key counts the same: q is 0, K is 1 everywhere. So lse = ln(keys) and out = 1. */
static void decode(struct bytes *in, void *plan, size_t plan_size, int64_t b, const struct tables *tables,
                   bool damaged)
{
    enum { KEYS = 150, D_QK = 512, D_V = 512, HEADS = 300, MOST_ROWS = 300 };
    static uint16_t kv[KEYS * D_QK];
    static const uint16_t q[MOST_ROWS * D_QK];
    static const char *const kernels[] = {"cpu-generic", NULL};
    if (!kv[0])
        for (size_t i = 0; i < sizeof kv / sizeof *kv; i++) kv[i] = 0x3f80;
    const int64_t h_q = b == 1 && choose(in, 8) == 7 ? HEADS : 1; /* several row tiles, or one row */
    int32_t *lengths = exactly((size_t)(b + 1) * sizeof *lengths);
    for (int64_t r = 0; r < b; r++) lengths[r] = (int32_t)take(in) - 50;
    const int64_t q_shape[4] = {b, 1, h_q, D_QK}, kv_shape[4] = {b, KEYS, 1, D_QK},
                  kv_strides[4] = {0, D_QK, D_QK, 1}, lse_shape[3] = {b, h_q, 1},
                  out_shape[4] = {b, 1, h_q, D_V};
    uint16_t *out = exactly((size_t)(b * h_q * D_V) * sizeof *out);
    float *lse = exactly((size_t)(b * h_q) * sizeof *lse);
    const fmla_tensor tq = {(void *)(uintptr_t)q, cpu, 4, bf16, q_shape, NULL, 0},
                      tkv = {kv, cpu, 4, bf16, kv_shape, kv_strides, 0},
                      tlengths = {lengths, cpu, 1, i32, &b, NULL, 0},
                      tout = {out, cpu, 4, bf16, out_shape, NULL, 0},
                      tlse = {lse, cpu, 3, f32, lse_shape, NULL, 0};
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.q = &tq, args.kv_cache = &tkv, args.seqlens = &tlengths, args.out = &tout, args.lse = &tlse;
    args.kernel = kernels[choose(in, 2)], args.causal = (int32_t)choose(in, 2);
    args.plan = plan, args.plan_size = plan_size;
    if (tables) args.plan = NULL, args.partitions = &tables->rows, args.num_splits = &tables->splits;
    fmla_status status = fmla_dense_decode_workspace_size(&args, &args.workspace_size, NULL);
    PROMISE(damaged || status == FMLA_OK, "%s", fmla_last_error());
    if (status == FMLA_OK && args.workspace_size < (4u << 20)) {
        args.workspace = exactly(args.workspace_size);
        memset(args.workspace, 0xff, args.workspace_size);
        status = fmla_dense_decode(&args);
        PROMISE(damaged || status == FMLA_OK, "%s", fmla_last_error());
        for (int64_t i = 0; i < b * h_q && !damaged; i++) {
            const int32_t keys = lengths[i / h_q] < 0 ? 0 : lengths[i / h_q] > KEYS ? KEYS : lengths[i / h_q];
            const float expected = keys ? logf((float)keys) : INFINITY;
            PROMISE(lse[i] == expected || fabsf(lse[i] - expected) < 1e-5f, "lse %g of %d keys",
                    (double)lse[i], keys);
            PROMISE(out[i * D_V] == (keys ? 0x3f80 : 0), "out %x of %d keys", out[i * D_V], keys);
        }
        free(args.workspace);
    }
    free(lengths), free(out), free(lse);
}

/* Values that a field of a plan may be bent to. */
static int32_t bent(struct bytes *in, int32_t was)
{
    static const int32_t ends[] = {0, 1, -1, 2, INT32_MAX, INT32_MIN};
    switch (choose(in, 4)) {
    case 0: return ends[choose(in, 6)];
    case 1: return (int32_t)((uint32_t)was + 1u);
    case 2: return (int32_t)((uint32_t)was - 1u);
    default: return (int32_t)take(in) - 4;
    }
}

static void damage(struct bytes *in, void *plan, size_t bytes)
{
    const size_t fields = (bytes - sizeof(struct plan_header)) / sizeof(int32_t);
    int32_t *field = (int32_t *)(void *)((struct plan_header *)plan + 1);
    for (uint32_t times = 1 + choose(in, 8); times; times--) {
        const size_t at = (take(in) << 8 | take(in)) % fields;
        field[at] = bent(in, field[at]);
    }
    if (choose(in, 16) == 15) ((uint8_t *)plan)[choose(in, sizeof(struct plan_header))] = (uint8_t)take(in);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const int64_t capacities[] = {INT32_MAX, 1, 63, 64, 65, 400, 4096};
    struct bytes in = {data, size};
    if (fmla_set_parallel_for(in_order, NULL, 1)) abort();
    const uint32_t what = take(&in);
    const bool damaged = what & 1;
    const int64_t b = choose(&in, MOST_REQUESTS + 1);
    const int32_t partitions = choose(&in, 8) ? 1 + (int32_t)choose(&in, 100) : 1;
    const int64_t capacity = capacities[choose(&in, sizeof capacities / sizeof *capacities)];
    int32_t lengths[MOST_REQUESTS];
    for (int64_t r = 0; r < b; r++) lengths[r] = (int32_t)(take(&in) << (what >> 1 & 7));

    const size_t bytes = plan_bytes(b, partitions);
    void *plan = exactly(bytes);
    const struct plan_costs costs = {what >> 4 & 1, 1}; /* or none */
    plan_build(plan_tables_of(plan, partitions), b, (struct plan_topk){.topk = capacity, .length = lengths},
               costs);
    if (damaged) damage(&in, plan, bytes);
    struct tables tables;
    const bool in_tables = (what & 0x60) == 0x20;
    if (in_tables) tables_make(&tables, plan, b, partitions);
    decode(&in, plan, bytes, b, in_tables ? &tables : NULL, damaged);
    if (in_tables) free(tables.rows.data), free(tables.splits.data);
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    const fmla_status status = fmla_plan_describe(plan, bytes, &view);
    PROMISE(damaged || status == FMLA_OK, "%s", fmla_last_error());
    PROMISE(status == FMLA_OK || *fmla_last_error(), "refused without a word");
    free(plan);
    return 0;
}
