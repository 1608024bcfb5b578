/* SPDX-License-Identifier: MIT
 *
 * Fuzzes the planner: every block of keys is in one partition, once and in order, for all lengths and
 * costs. fuzz_decode_plan.c tests decoding with plans, because its arithmetic is slow compared with
 * planning.
 */
#include "../unit/plan_walk.h"
#include "fuzz.h"

/* Checks the plan by costs: the default plan, or another that also covers the keys and splits no request
 * into more parts than there are partitions for each. */
static void check_by_costs(struct bytes *in, const struct batch *batch)
{
    static const int32_t tiles[] = {1, 2, 4, INT32_MAX, 0};
    const int64_t b = batch->requests, most = b && b < batch->partitions ? batch->partitions / b : 1;
    const int32_t row_tiles = tiles[choose(in, 5)];
    const struct plan_costs costs = {row_tiles, tiles[choose(in, 4)]};
    struct plan_header *const plan = build_inside(batch, &costs), *const filled = build_inside(batch, NULL);
    if (memcmp(plan, filled, size_of(batch))) {
        fmla_plan_view view = FMLA_INIT(fmla_plan_view);
        PROMISE(costs.row_tiles, "another plan without costs");
        PROMISE(fmla_plan_describe(plan, size_of(batch), &view) == FMLA_OK, "%s", fmla_last_error());
        walk(batch, &view, NO_PAYLOAD);
        for (int64_t r = 0; r < b; r++)
            PROMISE(view.num_splits[r + 1] - view.num_splits[r] <= most, "parts of request %lld",
                    (long long)r);
    }
    release(plan), release(filled);
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
                     : what & 32 && r > 0 ? lengths[r - 1] /* the same as the previous one */
                                          : (int32_t)(take(&in) << (what >> 1 & 7));
    const struct batch batch = {"fuzzed", b, partitions, capacity, lengths};
    run(&batch, NULL);
    check_by_costs(&in, &batch);
    PROMISE(!check_failures, "%" PRIu64 " checks failed", check_failures);
    free(lengths);
    return 0;
}
