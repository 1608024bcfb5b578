/* SPDX-License-Identifier: MIT
 *
 * Fuzzes plans as decode reads them. With a plan for other lengths every key counts once; with a damaged
 * one decode stays within its memory. Slow, because every input computes.
 */
#include "../unit/tensors.h"
#include "fuzz.h"

#include "plan.h"

#include <math.h>
#include <stdbool.h>

enum { MOST_REQUESTS = 4 };

/* Runs a decode in which all keys have equal weight: q is 0, K is 1 everywhere. So lse = ln(keys) and out
 * = 1. With the plan, or with its tables, each in its own memory. */
static void decode(struct bytes *in, void *plan, size_t plan_size, int64_t b, int32_t partitions,
                   bool in_tables, bool damaged)
{
    enum { KEYS = 150, D_QK = 512, D_V = 512, HEADS = 300, MOST_ROWS = 300 };
    static uint16_t kv[KEYS * D_QK], q[MOST_ROWS * D_QK];
    static const char *const kernels[] = {"cpu-generic", NULL};
    if (!kv[0])
        for (size_t i = 0; i < sizeof kv / sizeof *kv; i++) kv[i] = 0x3f80;
    const int64_t h_q = b == 1 && choose(in, 8) == 7 ? HEADS : 1; /* several row tiles, or one row */
    int32_t *lengths = exactly((size_t)(b + 1) * sizeof *lengths);
    for (int64_t r = 0; r < b; r++) lengths[r] = (int32_t)take(in) - 50;
    uint16_t *out = exactly((size_t)(b * h_q * D_V) * sizeof *out);
    float *lse = exactly((size_t)(b * h_q) * sizeof *lse);
    const size_t of_rows = (size_t)partitions * sizeof(struct plan_partition),
                 of_splits = (size_t)(b + 1) * sizeof(int32_t);
    char *rows = exactly(of_rows), *splits = exactly(of_splits),
         *tables = (char *)plan + sizeof(struct plan_header);
    memcpy(rows, tables, of_rows), memcpy(splits, tables + of_rows, of_splits);
    struct held cache;
    HELD(&cache, kv, bf16, 4, b, KEYS, 1, D_QK);
    cache.strides[0] = 0;
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.q = TENSOR_OF(q, bf16, b, 1, h_q, D_QK), args.kv_cache = &cache.tensor;
    args.seqlens = TENSOR_OF(lengths, i32, b);
    args.out = TENSOR_OF(out, bf16, b, 1, h_q, D_V), args.lse = TENSOR_OF(lse, f32, b, h_q, 1);
    args.kernel = kernels[choose(in, 2)], args.causal = (int32_t)choose(in, 2);
    if (!in_tables) args.plan = plan, args.plan_size = plan_size;
    args.partitions = in_tables ? TENSOR_OF(rows, i32, partitions, FMLA_PARTITION_FIELDS) : NULL;
    args.num_splits = in_tables ? TENSOR_OF(splits, i32, b + 1) : NULL;
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
    free(lengths), free(out), free(lse), free(rows), free(splits);
}

/* Returns a damaged value for a field of a plan. */
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
    const struct plan_costs costs = {what >> 4 & 1, 1}; /* or no costs */
    plan_build(plan_tables_of(plan, partitions), b, (struct plan_topk){.topk = capacity, .length = lengths},
               costs);
    if (damaged) damage(&in, plan, bytes);
    decode(&in, plan, bytes, b, partitions, (what & 0x60) == 0x20, damaged);
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    const fmla_status status = fmla_plan_describe(plan, bytes, &view);
    PROMISE(damaged || status == FMLA_OK, "%s", fmla_last_error());
    PROMISE(status == FMLA_OK || *fmla_last_error(), "refused without a word");
    free(plan);
    return 0;
}
