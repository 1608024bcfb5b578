/* SPDX-License-Identifier: MIT
 *
 * The planner: every block of keys in one partition, once and in order, whatever the lengths. And the reader of plans:
 * decode with a plan for other lengths counts every key once, with a damaged one it stays within its memory.
 */
#include "fuzz.h"

#include "flashmla/flashmla.h"
#include "plan.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { MOST_REQUESTS = 40 };

static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
static const fmla_dtype i32 = {FMLA_TYPE_INT, 32, 1}, f32 = {FMLA_TYPE_FLOAT, 32, 1},
                        bf16 = {FMLA_TYPE_BFLOAT, 16, 1};

static void in_order(void *pool, int64_t count, fmla_task task, void *task_data)
{
    (void)pool;
    for (int64_t i = 0; i < count; i++) task(task_data, i, 0);
}

static int64_t blocks_of(int32_t length, int64_t capacity)
{
    const int64_t keys = length < 0 ? 0 : length < capacity ? length : capacity;
    return keys ? (keys + 63) / 64 : 1;
}

/* Knows only what docs/semantics.md says of a finished plan. */
static void check_cover(const fmla_plan_view *view, const int32_t *lengths, int64_t capacity)
{
    int64_t request = 0, block = 0;
    int32_t split = 0;
    for (int64_t p = 0; p < view->num_partitions; p++) {
        const int32_t *row = view->partitions + p * FMLA_PARTITION_FIELDS;
        if (row[1] < row[0]) {
            PROMISE(request == view->batch, "partition %lld is idle too early", (long long)p);
            continue;
        }
        PROMISE(row[0] == request && row[2] == block && row[4] == split, "partition %lld begins elsewhere",
                (long long)p);
        int64_t load = 0;
        for (int64_t r = row[0]; r <= row[1]; r++) {
            PROMISE(r < view->batch, "request %lld", (long long)r);
            const int64_t blocks = blocks_of(lengths[r], capacity);
            const int64_t end = r == row[1] ? row[3] : blocks;
            PROMISE(end > block && end <= blocks, "request %lld ends at block %lld", (long long)r,
                    (long long)end);
            load += end - block + 5;
            split++, block = end;
            if (end < blocks) continue;
            PROMISE(view->num_splits[r + 1] - view->num_splits[r] == split, "splits of request %lld",
                    (long long)r);
            request = r + 1, block = 0, split = 0;
        }
        PROMISE(load <= view->payload, "load %lld of %lld", (long long)load, (long long)view->payload);
    }
    PROMISE(request == view->batch && !block && view->num_splits[0] == 0, "ends at request %lld",
            (long long)request);
}

/* A decode in which every key counts the same: q is 0, K is 1 everywhere. So lse = ln(keys) and out = 1. */
static void decode(struct bytes *in, void *plan, size_t plan_size, int64_t b, bool damaged)
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
    static const int64_t capacities[] = {0, 1, 63, 64, 65, 400, 4096, INT32_MAX, (int64_t)1 << 40, INT64_MAX};
    struct bytes in = {data, size};
    if (fmla_set_parallel_for(in_order, NULL, 1)) abort();
    const uint32_t what = take(&in);
    const int64_t b = choose(&in, MOST_REQUESTS + 1);
    const int32_t partitions = choose(&in, 8) ? 1 + (int32_t)choose(&in, 100) : 1;
    const int64_t capacity = capacities[choose(&in, sizeof capacities / sizeof *capacities)];
    int32_t *lengths = exactly((size_t)b * sizeof *lengths + 4);
    for (int64_t r = 0; r < b; r++)
        lengths[r] = what & 16 && what < 240 ? (int32_t)take32(&in) : (int32_t)(take(&in) << (what >> 1 & 7));

    const size_t bytes = plan_bytes(b, partitions);
    struct plan_header *inside = exactly(bytes);
    plan_build(inside, b, partitions, lengths, capacity ? capacity : INT32_MAX);
    const fmla_tensor seqlens = {lengths, cpu, 1, i32, &b, NULL, 0};
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &seqlens, args.s_q = args.h_q = args.h_kv = 1;
    args.capacity = capacity, args.num_partitions = partitions;
    PROMISE(fmla_decode_plan_size(&args, &args.plan_size) == FMLA_OK && args.plan_size == bytes,
            "size: %zu: %s", args.plan_size, fmla_last_error());
    args.plan = exactly(bytes);
    PROMISE(fmla_decode_plan(&args) == FMLA_OK, "%s", fmla_last_error());
    PROMISE(!memcmp(args.plan, inside, bytes), "the public plan has other bytes");
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    PROMISE(fmla_plan_describe(args.plan, bytes, &view) == FMLA_OK, "%s", fmla_last_error());
    PROMISE(view.batch == b && view.num_partitions == partitions, "described as another");
    check_cover(&view, lengths, capacity ? capacity : INT32_MAX);

    /* Arithmetic is dear beside planning: only small batches, and not all of them. */
    if (what >= 240 && b <= 4) {
        const bool damaged = what & 1;
        if (damaged) damage(&in, args.plan, bytes);
        decode(&in, args.plan, bytes, b, damaged);
        view = FMLA_INIT(fmla_plan_view);
        const fmla_status status = fmla_plan_describe(args.plan, bytes, &view);
        PROMISE(damaged || status == FMLA_OK, "%s", fmla_last_error());
        PROMISE(status == FMLA_OK || *fmla_last_error(), "refused without a word");
    }
    free(args.plan), free(inside), free(lengths);
    return 0;
}
