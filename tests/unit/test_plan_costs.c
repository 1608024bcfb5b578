/* SPDX-License-Identifier: MIT
 *
 * Tests the plan by costs (docs/semantics.md, "The plan by costs") against both plans that it chooses
 * from, made and timed here.
 */
#include "plan_walk.h"

/* Returns the time of a plan as in docs/semantics.md, from its published form. */
static int64_t time_of(const struct batch *batch, const fmla_plan_view *view, int64_t tiles, int64_t of_head)
{
    int64_t total = 0, longest = 0, parts = 0, walk_parts = 0, most = 0, least = INT64_MAX;
    for (int64_t r = 0; r < batch->requests; r++) {
        const int64_t splits = view->num_splits[r + 1] - view->num_splits[r];
        total += blocks_of(batch, r);
        if (splits > 1) parts += splits;
        if (splits > 1 && splits > walk_parts) walk_parts = splits;
    }
    const int64_t mean = 16 * total / batch->partitions;
    for (int64_t i = 0; i < batch->partitions; i++) {
        const int32_t *row = view->partitions + 8 * i;
        int64_t blocks = row[3] - row[2];
        if (row[1] < row[0]) continue;
        for (int64_t r = row[0]; r < row[1]; r++) blocks += blocks_of(batch, r);
        int64_t hidden = (16 * blocks - mean) * (of_head > 1 ? 2 : 8) / 16;
        if (16 * blocks <= mean) hidden = 0;
        if (hidden > mean / 8) hidden = mean / 8;
        const int64_t time = 60 * (int64_t)(row[1] - row[0] + 1) + 16 * blocks - hidden;
        if (time > longest) longest = time;
        if (blocks > most) most = blocks;
        if (blocks < least) least = blocks;
    }
    if (most != least) longest += mean * 5 / 256;
    return parts ? longest + 16 + (3 * parts * tiles + 5 * walk_parts) / 8 : longest;
}

/* Builds the plan in step, row after row. */
static struct plan_header *build_in_step(const struct batch *batch)
{
    const int64_t b = batch->requests, p = batch->partitions;
    const size_t bytes = size_of(batch);
    struct plan_header *plan = poisoned(bytes);
    *plan = (struct plan_header){.magic = PLAN_MAGIC, .num_partitions = (int32_t)p, .batch = b};
    struct plan_partition *rows = plan_partitions(plan);
    int32_t *num_splits = plan_num_splits(plan);
    num_splits[0] = 0;
    int64_t used = 0;
    for (int64_t r = 0; r < b;) {
        int64_t taken = b < p ? 1 : (b + p - 1) / p, load = 0;
        if (taken > b - r) taken = b - r;
        const int64_t last_blocks = blocks_of(batch, r + taken - 1);
        const int64_t parts = b >= p ? 1 : last_blocks < p / b ? last_blocks : p / b;
        for (int64_t part = 0; part < parts; part++) {
            const int32_t begin = (int32_t)(part * last_blocks / parts),
                          end = (int32_t)((part + 1) * last_blocks / parts), cut = parts > 1;
            rows[used++] = (struct plan_partition){
                (int32_t)r, (int32_t)(r + taken - 1), begin, end, (int32_t)part, cut, cut, 0};
            load = end - begin + OVERHEAD;
            for (int64_t other = r; other < r + taken - 1; other++)
                load += blocks_of(batch, other) + OVERHEAD;
            if (load > plan->payload) plan->payload = load;
        }
        for (int64_t end = r + taken; r < end; r++) num_splits[r + 1] = num_splits[r] + (int32_t)parts;
    }
    while (used < p)
        rows[used++] = (struct plan_partition){
            (int32_t)b, (int32_t)b - 1, 0, (int32_t)blocks_of(batch, b - 1), 0, 0, 0, 0};
    return plan;
}

/* Checks the planners' own times of the two plans; that of the plan in step both from its rows and without
 * them. */
static void check_times(const struct batch *batch, struct plan_costs costs, const struct plan_header *filled,
                        const struct plan_header *in_step, int64_t filled_time, int64_t in_step_time)
{
    uint32_t start[PLAN_FEW + 1] = {0}, payload = 0;
    const int32_t b = (int32_t)batch->requests, p = (int32_t)batch->partitions;
    for (int32_t r = 0; r < b; r++) start[r + 1] = start[r] + (uint32_t)blocks_of(batch, r) + OVERHEAD;
    const uint32_t mean = plan_mean(start[b] - (uint32_t)b * OVERHEAD, p);
    struct plan_tally tally[3] = {plan_tally_none(), plan_tally_none(), plan_tally_none()};
    for (int32_t i = 0; i < p; i++) {
        plan_tally_row(&tally[0], costs, mean, start, plan_partitions(filled) + i);
        plan_tally_row(&tally[1], costs, mean, start, plan_partitions(in_step) + i);
    }
    for (int32_t r = 0; r < b; r++) {
        const int32_t *splits = plan_num_splits(filled) + r, *step_splits = plan_num_splits(in_step) + r;
        plan_tally_request(&tally[0], (uint32_t)(splits[1] - splits[0]));
        plan_tally_request(&tally[1], (uint32_t)(step_splits[1] - step_splits[0]));
        plan_tally_step(&tally[2], &payload, costs, mean, start, b, plan_step_of(b, p), r);
    }
    const int64_t expected[3] = {filled_time, in_step_time, in_step_time};
    for (int i = 0; i < 3; i++)
        CHECK(plan_time(&tally[i], costs, mean) == expected[i],
              "%s: time %d is %" PRId64 ", expected %" PRId64, which, i, plan_time(&tally[i], costs, mean),
              expected[i]);
    CHECK_EQ(payload, in_step->payload);
}

enum choice { FILLED, IN_STEP };

/* The plan by costs must equal, byte for byte, whichever of the two takes less time by the GPU's costs;
 * the default one if neither does, or if the planner does not use the costs although the plan in step
 * takes less. */
static enum choice choose(const struct batch *batch, struct plan_costs given, struct plan_costs costs,
                          bool looks)
{
    snprintf(which, sizeof which, "%s: b %d, p %d, capacity %d, tiles %d, %d", batch->name,
             (int)batch->requests, (int)batch->partitions, (int)batch->capacity, costs.row_tiles,
             costs.tiles_of_head);
    struct plan_header *plan = build_inside(batch, &given), *filled = build_inside(batch, NULL),
                       *in_step = build_in_step(batch);
    const fmla_plan_view filled_view = view_of(filled), in_step_view = view_of(in_step), view = view_of(plan);
    const int64_t filled_time = time_of(batch, &filled_view, costs.row_tiles, costs.tiles_of_head),
                  in_step_time = time_of(batch, &in_step_view, costs.row_tiles, costs.tiles_of_head);
    if (looks) {
        walk(batch, &in_step_view, NO_PAYLOAD);
        check_times(batch, costs, filled, in_step, filled_time, in_step_time);
    } else {
        CHECK(in_step_time < filled_time, "%s: the default plan is to be chosen anyway", which);
    }
    const enum choice expected = looks && in_step_time < filled_time ? IN_STEP : FILLED;
    CHECK(!memcmp(plan, expected == IN_STEP ? in_step : filled, size_of(batch)),
          "%s: is not the plan %s, whose time is %" PRId64 " (filled %" PRId64 ")", which,
          expected == IN_STEP ? "in step" : "filled one after the other", in_step_time, filled_time);
    if (expected == IN_STEP) walk(batch, &view, NO_PAYLOAD);
    release(plan), release(filled), release(in_step);
    return expected;
}

static enum choice run_by_costs(const struct batch *batch, struct plan_costs costs)
{
    return choose(batch, costs, costs, true);
}

/* By hand, in sixteenths of a block.
 * 128 requests of 128 blocks, 66 partitions, 2 row tiles: two a partition, 64 partitions, payload 2 · 133.
 * Mean 16 · 16384 / 66 = 3971; 2 · 60 + 4096 - (4096 - 3971) · 2 / 16 = 4201, nothing to join. Filled one
 * after the other, payload 263: some have 3 splits, and nearly every second request is split: no less than 3
 * · 60 + 3971. */
static void check_whole(const fmla_plan_view *view)
{
    CHECK_EQ(view->payload, 266);
    for (int i = 0; i < 66; i++) {
        const int32_t row[8] = {2 * i, 2 * i + 1, 0, 128}, idle[8] = {128, 127, 0, 128};
        CHECK(!memcmp(view->partitions + 8 * i, i < 64 ? row : idle, sizeof row), "whole: row %d", i);
    }
    for (int r = 0; r <= 128; r++) CHECK_EQ(view->num_splits[r], r);
}

/* A request of one block and six of 16, 32 partitions, 4 row tiles: 32 / 7 = 4 parts each, 1 of the first; 25
 * rows. Mean 16 · 97 / 32 = 48. Four blocks: 60 + 64 - (64 - 48) · 2 / 16 = 122; join 16 + (24 · 4 · 3 + 4 ·
 * 5) / 8 = 54; uneven, but 48 · 5 / 256 = 0: 176. Filled: payload ceil(132 / 32) + 5 = 10, so parts of 5, 5,
 * 5 and 1 blocks: 60 + 80 - 4 + 54 = 190. */
static void check_parts(const fmla_plan_view *view)
{
    CHECK_EQ(view->payload, 9);
    for (int i = 0; i < 32; i++) {
        const int part = (i - 1) % 4, r = (i + 3) / 4;
        const int32_t first[8] = {0, 0, 0, 1}, idle[8] = {7, 6, 0, 16},
                      row[8] = {r, r, 4 * part, 4 * part + 4, part, 1, 1};
        CHECK(!memcmp(view->partitions + 8 * i,
                      !i       ? first
                      : i < 25 ? row
                               : idle,
                      sizeof row),
              "parts: row %d", i);
    }
    for (int r = 0; r <= 7; r++) CHECK_EQ(view->num_splits[r], r ? 4 * r - 3 : 0);
}

static void test_costs_by_hand(void)
{
    static int32_t same[PLAN_FEW + 1];
    for (int r = 0; r <= PLAN_FEW; r++) same[r] = 8192;
    const struct batch whole = {"whole", 128, 66, 0, same};
    static const int32_t seven[] = {1, 1000, 1000, 1000, 1000, 1000, 1000};
    const struct batch parts = {"parts", 7, 32, 0, seven};
    struct plan_header *plans[] = {build_inside(&whole, &(struct plan_costs){2, 2}),
                                   build_inside(&parts, &(struct plan_costs){4, 4})};
    const fmla_plan_view views[] = {view_of(plans[0]), view_of(plans[1])};
    check_whole(&views[0]), check_parts(&views[1]);
    release(plans[0]), release(plans[1]);
    CHECK_EQ(run_by_costs(&whole, (struct plan_costs){2, 2}), IN_STEP);
    CHECK_EQ(run_by_costs(&parts, (struct plan_costs){4, 4}), IN_STEP);
    /* Cases for a GPU with 132 SMs: the rows of the measurements. */
    static const struct {
        int32_t b, length, tiles;
        enum choice expected;
    } rows[] = {{128, 4096, 2, FILLED},  {128, 32768, 2, IN_STEP}, {128, 4096, 4, IN_STEP},
                {128, 8192, 4, IN_STEP}, {128, 32768, 4, FILLED},  {64, 32768, 1, IN_STEP},
                {32, 65536, 1, IN_STEP}, {16, 65536, 1, IN_STEP},  {100, 6000, 2, FILLED},
                {32, 8192, 1, IN_STEP},  {1, 8192, 1, FILLED}};
    for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
        for (int r = 0; r < rows[k].b; r++) same[r] = rows[k].length;
        const struct batch batch = {"measured", rows[k].b, 132 / rows[k].tiles, 0, same};
        CHECK(run_by_costs(&batch, (struct plan_costs){rows[k].tiles, rows[k].tiles}) == rows[k].expected,
              "%s", which);
    }
}

/* Tests without costs, and on either side of the limits of their use. */
static void test_costs_not_looked_at(void)
{
    static int32_t same[PLAN_FEW + 1];
    const struct plan_costs one_tile = {1, 1}, none = {0, 0};
    for (int r = 0; r <= PLAN_FEW; r++) same[r] = 1000;
    struct batch batch = {"most requests", PLAN_FEW, 66, 0, same};
    CHECK(run_by_costs(&batch, one_tile) == IN_STEP, "%s", which);
    choose(&batch, none, one_tile, false);
    batch.requests++;
    choose(&batch, one_tile, one_tile, false);

    /* The 64 requests together end at 2^24, then one block further. */
    for (int r = 0; r < 64; r++) same[r] = ((1 << 24) / 64 - OVERHEAD) * BLOCK;
    batch = (struct batch){"longest line", 64, 128, 0, same};
    CHECK(run_by_costs(&batch, one_tile) == IN_STEP, "%s", which);
    same[63]++;
    choose(&batch, one_tile, one_tile, false);

    /* A request costs (2^31 - 1) / 1024 blocks, then one more. */
    same[0] = (INT32_MAX / 1024 - OVERHEAD) * BLOCK;
    batch = (struct batch){"longest request", 1, 4, 0, same};
    CHECK(run_by_costs(&batch, one_tile) == IN_STEP, "%s", which);
    same[0]++;
    choose(&batch, one_tile, one_tile, false);

    struct plan_header *empty = build_inside(&(struct batch){"empty", 0, 3, 0, same}, &one_tile);
    CHECK(empty->payload == OVERHEAD && plan_num_splits(empty)[0] == 0, "payload %" PRId64, empty->payload);
    release(empty);
}

static void test_costs_random(int64_t count)
{
    enum { MOST = 300 };
    static int32_t seqlens[MOST];
    struct random_state random = {132};
    int64_t chosen[2] = {0, 0};
    for (int64_t n = 0; n < count; n++) {
        const int64_t longest = INT64_C(1) << random_between(&random, 0, 20),
                      length = random_between(&random, 0, longest),
                      spread = random_between(&random, 0, 1) ? length >> random_between(&random, 0, 9) : 0,
                      b = random_between(&random, 1, random_between(&random, 0, 1) ? MOST : 40);
        for (int i = 0; i < b; i++) seqlens[i] = (int32_t)(length + random_between(&random, 0, spread));
        if (random_between(&random, 0, 9) == 0) seqlens[random_between(&random, 0, b - 1)] = 1;
        static const int64_t capacities[] = {0, 0, 0, 100, 4096, 1000000};
        const int32_t of_head = 1 << random_between(&random, 0, 3);
        const struct plan_costs costs = {of_head * (int32_t)random_between(&random, 1, 3), of_head};
        const struct batch batch = {
            "random", b,
            random_between(&random, 0, 2)
                ? 132 / of_head
                : random_between(&random, 1, INT64_C(1) << random_between(&random, 0, 12)),
            capacities[random_between(&random, 0, 5)], seqlens};
        chosen[run_by_costs(&batch, costs)]++;
    }
    CHECK(chosen[FILLED] > count / 12 && chosen[IN_STEP] > count / 12, "filled %" PRId64 ", in step %" PRId64,
          chosen[FILLED], chosen[IN_STEP]);
}

int main(int argc, char **argv)
{
    test_costs_by_hand();
    test_costs_not_looked_at();
    test_costs_random(argc > 1 && !strcmp(argv[1], "--short") ? 300 : 6000);
    return check_done("test_plan_costs");
}
