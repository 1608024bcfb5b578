/* SPDX-License-Identifier: MIT
 *
 * decode_plan on a GPU: the bytes that the host's planner writes for the same lengths and partitions, with the costs of
 * the GPU and, as for a plan that the CPU will use, without; and the published case by its own figures.
 */
#include "checkattn.h"
#include "device.h"
#include "plan.h"
#include "random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum lengths {
    LENGTHS_NONE,  /* 0 */
    LENGTHS_ONE,   /* 1 */
    LENGTHS_LONG,  /* 1 000 000 */
    LENGTHS_SAME,  /* 4096 */
    LENGTHS_DRAWN, /* 0 … 9000, some 0 */
    LENGTHS_WILD,  /* any 32 bits, to be clamped */
    LENGTHS_LAST,  /* 0, but for the last: everything is in one request */
    LENGTHS_NEAR,  /* 8000 … 8192 */
    LENGTHS_VARY,  /* 2000 … 6000 */
    LENGTHS_KINDS
};

struct plan_case {
    int64_t b, capacity;
    int32_t partitions; /* 0: what the device suggests */
    enum lengths lengths;
    bool odd;         /* lengths at an odd address */
    bool for_cpu;     /* no costs */
    int64_t s_q, h_q; /* of the GPU's costs: s_q · h_q rows of a key head */
};

static int32_t length_of(const struct plan_case *c, int64_t request, struct random_state *random)
{
    switch (c->lengths) {
    case LENGTHS_ONE: return 1;
    case LENGTHS_LONG: return 1000000;
    case LENGTHS_SAME: return 4096;
    case LENGTHS_DRAWN: return (int32_t)(random_between(random, 0, 3) ? random_between(random, 0, 9000) : 0);
    case LENGTHS_WILD: return (int32_t)(uint32_t)random_u64(random);
    case LENGTHS_NEAR: return (int32_t)random_between(random, 8000, 8192);
    case LENGTHS_VARY: return (int32_t)random_between(random, 2000, 6000);
    case LENGTHS_LAST: return request + 1 == c->b ? 1000000 : 0;
    default: return 0;
    }
}

/* The plan's tables by themselves, made on the device; `args` are those of the plan there. */
static void check_tables(const struct run *run, const struct plan_case *c, fmla_decode_plan_args args,
                         const unsigned char *plan, size_t plan_size, const char *name, struct tally *tally)
{
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    int32_t count = 0;
    if (fmla_plan_describe(plan, plan_size, &view) || fmla_decode_plan_partitions(&args, &count) ||
        count != view.num_partitions) {
        report(tally, run, name, "the number of partitions is another than the plan's");
        return;
    }
    const int64_t rows_shape[2] = {count, FMLA_PARTITION_FIELDS}, splits_shape[1] = {c->b + 1};
    struct device_scratch rows, splits;
    device_scratch_make(&rows, (size_t)count * FMLA_PARTITION_FIELDS * sizeof(int32_t), 0xff);
    device_scratch_make(&splits, (size_t)(c->b + 1) * sizeof(int32_t), 0xff);
    const fmla_tensor partitions = {rows.memory, run->device, 2, dtype_i32, rows_shape, NULL, 0},
                      num_splits = {splits.memory, run->device, 1, dtype_i32, splits_shape, NULL, 0};
    args.plan = NULL, args.partitions = &partitions, args.num_splits = &num_splits;
    if (fmla_decode_plan(&args)) report(tally, run, name, fmla_last_error());
    device_wait(args.stream);
    if (!device_scratch_is(&rows, view.partitions) || !device_scratch_is(&splits, view.num_splits))
        report(tally, run, name, "the tables have other bits than those of the plan");
    if (!device_scratch_intact(&rows) || !device_scratch_intact(&splits))
        report(tally, run, name, "bytes behind the tables were written");
    device_scratch_free(&rows), device_scratch_free(&splits);
}

/* Both plans; the host's is left in *plan (freed by the caller), NULL if something was refused. */
static void run_case(const struct run *run, const struct plan_case *c, uint64_t seed, struct tally *tally,
                     unsigned char **plan, size_t *bytes)
{
    struct random_state random = {seed};
    struct guarded lengths;
    struct device_blocks blocks = {0};
    struct device_scratch scratch;
    fmla_tensor seqlens;
    char name[160];
    const long long rows = c->s_q * c->h_q;
    snprintf(name, sizeof name, "b %lld, partitions %d, lengths %d, capacity %lld, rows %lld%s%s",
             (long long)c->b, c->partitions, (int)c->lengths, (long long)c->capacity, rows,
             c->odd ? ", odd address" : "", c->for_cpu ? ", for the CPU" : "");
    tally->cases++;
    guarded_make(&lengths, dtype_i32, 1, &c->b, c->odd ? LAYOUT_ODD : LAYOUT_CONTIGUOUS);
    for (int64_t r = 0; r < c->b; r++)
        *(int32_t *)guarded_at(&lengths, r, 0, 0, 0) = length_of(c, r, &random);
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &lengths.tensor;
    args.target = c->for_cpu ? (fmla_device){FMLA_DEVICE_CPU, 0} : run->device;
    args.s_q = c->s_q, args.h_q = c->h_q, args.h_kv = 1;
    args.capacity = c->capacity, args.num_partitions = c->partitions;
    *bytes = 0;
    fmla_status status = fmla_decode_plan_size(&args, bytes);
    *plan = aligned_alloc(64, (*bytes + 127) / 64 * 64);
    args.plan = *plan, args.plan_size = *bytes;
    if (!status) status = fmla_decode_plan(&args);
    if (status) report(tally, run, name, fmla_last_error());

    device_add_guarded(&blocks, &lengths);
    device_scratch_make(&scratch, *bytes, 0xff);
    void *stream = args.stream = device_stream_open();
    args.seqlens = device_tensor(&blocks, &lengths.tensor, &seqlens);
    args.plan = scratch.memory;
    size_t on_device = 0;
    if (!status && (fmla_decode_plan_size(&args, &on_device) || on_device != *bytes))
        report(tally, run, name, "a plan on the device has another size than on the host");
    for (int fill = 0xff; !status && fill >= 0; fill -= 0xff) { /* whatever the memory held */
        device_scratch_fill(&scratch, fill);
        status = fmla_decode_plan(&args);
        if (status) {
            report(tally, run, name, fmla_last_error());
            break;
        }
        device_wait(stream);
        if (!device_scratch_is(&scratch, *plan))
            report(tally, run, name, "the device's plan has other bits than the host's");
    }
    if (!device_scratch_intact(&scratch)) report(tally, run, name, "bytes behind the plan were written");
    if (!status) check_tables(run, c, args, *plan, *bytes, name, tally);
    tally->rows++;
    device_stream_close(stream);
    device_scratch_free(&scratch);
    device_free(&blocks);
    guarded_free(&lengths);
}

/* docs/semantics.md: b = 128, every length 4096, 78 partitions; (begin request, begin key, end request, end key, split).
 * Each was held equal to the host's, bit by bit; that the host's is the published one is checked here again. */
static void check_published(const struct run *run, struct tally *tally)
{
    static const struct {
        int partition;
        int32_t row[5];
    } published[] = {{0, {0, 0, 1, 2880, 0}},      {1, {1, 2880, 3, 1344, 1}},
                     {2, {3, 1344, 4, 4096, 1}},   {3, {5, 0, 6, 2880, 0}},
                     {4, {6, 2880, 8, 1344, 1}},   {74, {123, 1344, 124, 4096, 1}},
                     {75, {125, 0, 126, 2880, 0}}, {76, {126, 2880, 127, 4096, 1}}};
    const struct plan_case c = {
        .b = 128, .partitions = 78, .lengths = LENGTHS_SAME, .for_cpu = true, .s_q = 1, .h_q = 128};
    unsigned char *plan;
    size_t bytes;
    run_case(run, &c, run->seed, tally, &plan, &bytes);
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    bool same = fmla_plan_describe(plan, bytes, &view) == FMLA_OK && view.payload == 119;
    for (size_t i = 0; same && i < sizeof published / sizeof published[0]; i++) {
        const int32_t *row = view.partitions + (size_t)published[i].partition * FMLA_PARTITION_FIELDS;
        const int32_t mine[5] = {row[0], row[2] * PLAN_BLOCK, row[1], row[3] * PLAN_BLOCK, row[4]};
        same = !memcmp(mine, published[i].row, sizeof mine);
    }
    if (!same) report(tally, run, "the published case", "the plan is not the published one");
    free(plan);
}

/* With the GPU's costs and without. Are the plans two, of as many partitions? */
static bool run_both(const struct run *run, struct plan_case *c, uint64_t seed, struct tally *tally)
{
    unsigned char *plan[2];
    size_t bytes[2];
    for (int i = 0; i < 2; i++) {
        c->for_cpu = i;
        run_case(run, c, seed, tally, &plan[i], &bytes[i]);
    }
    const bool other = bytes[0] == bytes[1] && memcmp(plan[0], plan[1], bytes[0]);
    free(plan[0]), free(plan[1]);
    return other;
}

/* ---- For sparse decode ------------------------------------------------------------------------ */

struct sparse_plan_case {
    int64_t b, topk, extra_topk;
    int32_t partitions; /* 0: what the device suggests */
    bool given[2];      /* are there lengths, of the indices and of the extra ones? */
};

/* Lengths between 0 and past the most, some of them negative, as they are to be clamped. */
static void draw_lengths(struct guarded *lengths, int64_t b, int64_t most, struct random_state *random)
{
    guarded_make(lengths, dtype_i32, 1, &b, LAYOUT_ODD);
    for (int64_t r = 0; r < b; r++) {
        const int64_t kind = random_between(random, 0, 9);
        *(int32_t *)guarded_at(lengths, r, 0, 0, 0) =
            (int32_t)(kind == 0   ? -random_between(random, 1, 100)
                      : kind == 1 ? 0
                      : kind == 2 ? INT32_MAX - r
                                  : random_between(random, 0, most));
    }
}

static void run_sparse_case(const struct run *run, const struct sparse_plan_case *c, uint64_t seed,
                            struct tally *tally)
{
    struct random_state random = {seed};
    struct guarded lengths[2] = {0};
    struct device_blocks blocks = {0};
    struct device_scratch scratch;
    fmla_tensor there[2];
    char name[160];
    const int64_t most[2] = {c->topk, c->extra_topk};
    snprintf(name, sizeof name, "sparse: b %lld, topk %lld%s, extra %lld%s, partitions %d", (long long)c->b,
             (long long)c->topk, c->given[0] ? " at most" : "", (long long)c->extra_topk,
             c->given[1] ? " at most" : "", c->partitions);
    tally->cases++;
    fmla_sparse_plan_args args = FMLA_INIT(fmla_sparse_plan_args);
    args.b = c->b, args.s_q = 2, args.h_q = 100;
    args.topk = c->topk, args.extra_topk = c->extra_topk, args.num_partitions = c->partitions;
    const fmla_tensor **tensors[2] = {&args.topk_length, &args.extra_topk_length};
    for (int k = 0; k < 2; k++) {
        if (!c->given[k]) continue;
        draw_lengths(&lengths[k], c->b, most[k], &random);
        device_add_guarded(&blocks, &lengths[k]);
        *tensors[k] = &lengths[k].tensor;
    }
    fmla_sparse_plan_args device = args;
    device.target = run->device;
    device.topk_length = device_tensor(&blocks, args.topk_length, &there[0]);
    device.extra_topk_length = device_tensor(&blocks, args.extra_topk_length, &there[1]);
    fmla_status status = fmla_sparse_plan_partitions(&device, &args.num_partitions);
    if (!status) status = fmla_sparse_plan_size(&args, &args.plan_size);
    unsigned char *plan = aligned_alloc(64, (args.plan_size + 127) / 64 * 64);
    args.plan = plan;
    if (!status) status = fmla_sparse_plan(&args);
    if (!status) status = fmla_sparse_plan_size(&device, &device.plan_size);
    if (!status && device.plan_size != args.plan_size)
        report(tally, run, name, "a plan on the device has another size than on the host");
    device_scratch_make(&scratch, device.plan_size, 0xff);
    device.plan = scratch.memory;
    for (int fill = 0xff; !status && fill >= 0; fill -= 0xff) { /* whatever the memory held */
        device_scratch_fill(&scratch, fill);
        status = fmla_sparse_plan(&device);
        device_wait(NULL);
        if (!status && device.plan_size == args.plan_size && !device_scratch_is(&scratch, plan))
            report(tally, run, name, "the device's plan has other bits than the host's");
    }
    if (status) report(tally, run, name, fmla_last_error());
    if (!device_scratch_intact(&scratch)) report(tally, run, name, "bytes behind the plan were written");
    tally->rows++;
    free(plan);
    device_scratch_free(&scratch);
    device_free(&blocks);
    for (int k = 0; k < 2; k++) guarded_free(&lengths[k]);
}

static void check_sparse_plans(const struct run *run, struct tally *tally)
{
    static const int64_t batches[] = {0, 1, 2, 33, 128, 1024, 1025, 5000, 100000};
    static const int64_t topks[] = {0, 1, 63, 64, 65, 2048, 16384, INT32_MAX};
    static const int64_t extras[] = {0, 1, 64, 100, 1024, INT32_MAX};
    static const int32_t partitions[] = {0, 1, 3, 132, 1000};
    enum {
        BATCHES = sizeof batches / sizeof batches[0],
        TOPKS = sizeof topks / sizeof topks[0],
        EXTRAS = sizeof extras / sizeof extras[0],
        PARTITIONS = sizeof partitions / sizeof partitions[0]
    };
    for (uint64_t i = 0; i < BATCHES * TOPKS * EXTRAS; i++)
        for (unsigned given = 0; given < 4; given++) {
            const struct sparse_plan_case c = {.b = batches[i % BATCHES],
                                               .topk = topks[i / BATCHES % TOPKS],
                                               .extra_topk = extras[i / BATCHES / TOPKS],
                                               .partitions = partitions[(i + given) % PARTITIONS],
                                               .given = {given & 1, given & 2}};
            run_sparse_case(run, &c, run->seed * 17 + 4 * i + given, tally);
        }
}

void check_device_plan(const struct run *run, struct tally *tally)
{
    static const int64_t batches[] = {0,    1,    2,    3,    31,   32,    33,    128,   1000,
                                      1023, 1024, 1025, 2047, 4096, 10000, 65537, 100000};
    static const int32_t partitions[] = {0, 1, 3, 78, 132, 1000, 65536};
    enum {
        BATCHES = sizeof batches / sizeof batches[0],
        PARTITIONS = sizeof partitions / sizeof partitions[0],
        GRID = BATCHES * PARTITIONS * LENGTHS_KINDS,
        DRAWN = 400
    };
    struct random_state random = {run->seed};
    int64_t before;
    int64_t by_costs = 0;
    bool all = true;
    check_published(run, tally);
    if (!wants_grid_only(run) && !run->most_cases) check_sparse_plans(run, tally);
    before = tally->cases;
    for (int i = 0; i < GRID + DRAWN; i++) {
        const bool wanted = wants_case(run, tally, (uint64_t)i + 1);
        struct plan_case c = {.b = batches[i % BATCHES],
                              .partitions = partitions[i / BATCHES % PARTITIONS],
                              .lengths = (enum lengths)(i / BATCHES / PARTITIONS % LENGTHS_KINDS),
                              .odd = i % 3 == 1};
        if (i >= GRID) {
            static const enum lengths drawn[] = {LENGTHS_DRAWN, LENGTHS_WILD, LENGTHS_SAME, LENGTHS_NEAR,
                                                 LENGTHS_VARY};
            static const int64_t most[] = {40, 300, 1024, 3000, 100000};
            c.b = random_between(&random, 0, most[random_between(&random, 0, 4)]);
            c.partitions = (int32_t)random_between(&random, 1, random_between(&random, 0, 1) ? 200 : 5000);
            c.lengths = drawn[random_between(&random, 0, 4)];
        }
        static const int64_t capacities[] = {0, 0, 4096, 70000}, heads[] = {16, 64, 128, 128};
        c.capacity = capacities[random_between(&random, 0, 3)];
        const int64_t rows = random_between(&random, 0, 3);
        c.h_q = heads[rows], c.s_q = rows == 3 ? 2 : 1;
        all = all && wanted;
        if (!wanted) continue; /* what was drawn stays the same */
        by_costs += run_both(run, &c, run->seed * 31 + (uint64_t)i, tally);
        if (run->most_cases && tally->cases - before >= run->most_cases) {
            all = false;
            break;
        }
    }
    fmla_device_info info = FMLA_INIT(fmla_device_info);
    if (fmla_device_describe(run->device, &info)) report(tally, run, "the GPU", fmla_last_error());
    if (all && info.compute_capability == 90 && !by_costs)
        report(tally, run, "all cases", "costs have chosen no other plan than the default one");
    if (all && info.compute_capability != 90 && by_costs)
        report(tally, run, "all cases", "the plan is not the default one, and the GPU has no costs");
    tally->pairs = tally->covered = 0; /* every combination, unless cut short */
}
