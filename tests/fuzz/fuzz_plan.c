/* SPDX-License-Identifier: MIT
 *
 * The planner: every block of keys in one partition, once and in order, whatever the lengths and costs. What decoding makes of a
 * plan is asked in fuzz_decode_plan.c, since arithmetic is dear beside planning.
 */
#include "fuzz.h"

#include "plan.h"

#include <stdbool.h>
#include <string.h>

static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
static const fmla_dtype i32 = {FMLA_TYPE_INT, 32, 1};

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

/* By costs: the default plan, or another that covers the keys as well and has no request in more parts than there are
 * partitions for each. */
static void check_by_costs(struct bytes *in, const struct plan_header *filled, int32_t *lengths,
                           int64_t capacity)
{
    const int64_t b = filled->batch, most = b && b < filled->num_partitions ? filled->num_partitions / b : 1;
    const size_t bytes = plan_bytes(b, filled->num_partitions);
    static const int32_t tiles[] = {1, 2, 4, INT32_MAX, 0};
    const struct plan_costs costs = {tiles[choose(in, 5)], tiles[choose(in, 4)]};
    struct plan_header *plan = exactly(bytes);
    plan_build(plan_tables_of(plan, filled->num_partitions), b,
               (struct plan_topk){.topk = capacity, .length = lengths}, costs);
    if (memcmp(plan, filled, bytes)) {
        fmla_plan_view view = FMLA_INIT(fmla_plan_view);
        PROMISE(costs.row_tiles, "another plan without costs");
        PROMISE(fmla_plan_describe(plan, bytes, &view) == FMLA_OK, "%s", fmla_last_error());
        check_cover(&view, lengths, capacity);
        for (int64_t r = 0; r < b; r++)
            PROMISE(view.num_splits[r + 1] - view.num_splits[r] <= most, "parts of request %lld",
                    (long long)r);
    }
    free(plan);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const int64_t capacities[] = {0, 1, 63, 64, 65, 400, 4096, INT32_MAX, (int64_t)1 << 40, INT64_MAX};
    struct bytes in = {data, size};
    const uint32_t what = take(&in);
    const bool large = choose(&in, 8) == 7;
    const int64_t b = choose(&in, large ? 256 : 9);
    const int32_t partitions = 1 + (int32_t)choose(&in, large ? 256 : 13);
    const int64_t capacity = capacities[choose(&in, sizeof capacities / sizeof *capacities)];
    int32_t *lengths = exactly((size_t)b * sizeof *lengths + 4);
    for (int64_t r = 0; r < b; r++)
        lengths[r] = what & 16            ? (int32_t)take32(&in)
                     : what & 32 && r > 0 ? lengths[r - 1] /* the same for all */
                                          : (int32_t)(take(&in) << (what >> 1 & 7));

    const size_t bytes = plan_bytes(b, partitions);
    struct plan_header *inside = exactly(bytes);
    plan_build(plan_tables_of(inside, partitions), b,
               (struct plan_topk){.topk = capacity ? capacity : INT32_MAX, .length = lengths},
               (struct plan_costs){0, 0});
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
    check_by_costs(&in, inside, lengths, capacity ? capacity : INT32_MAX);
    free(args.plan), free(inside), free(lengths);
    return 0;
}
