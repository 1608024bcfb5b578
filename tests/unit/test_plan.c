/* SPDX-License-Identifier: MIT
 *
 * Tests the split plan (docs/semantics.md, "The split plan"): golden tables, and properties checked by
 * walking a finished plan without knowing how it was made. Every case runs through the planner itself and
 * through the public functions, which must write the same bytes.
 */
#include "plan_walk.h"

/* ---- Golden tables ----------------------------------------------------------------------------------- */

/* Checks the printed form of a row: keys instead of blocks. A split is at 64 · blocks, an end at the
 * length. */
static void check_printed(const struct batch *batch, const fmla_plan_view *view, int i,
                          const int32_t expected[7])
{
    const int32_t *row = view->partitions + 8 * i;
    const int64_t end_key = row[1] < 0                           ? 0
                            : row[3] == blocks_of(batch, row[1]) ? length_of(batch, row[1])
                                                                 : (int64_t)BLOCK * row[3];
    const int64_t printed[7] = {row[0], (int64_t)BLOCK * row[2], row[1], end_key, row[4], row[5], row[6]};
    for (int k = 0; k < 7; k++)
        CHECK(printed[k] == expected[k], "%s: row %d, column %d is %d, expected %d", which, i, k,
              (int)printed[k], expected[k]);
}

/* Published with FlashMLA: b = 128, every s_k = 4096, 78 partitions. The rows repeat every three, five
 * requests further, up to the last ones given here. */
static void check_published(const struct batch *batch, const fmla_plan_view *view)
{
    CHECK_EQ(view->payload, 119);
    for (int i = 0; i < 76; i++) {
        const int32_t r = i / 3 * 5;
        const int32_t rows[3][7] = {{r, 0, r + 1, 2880, 0, 0, 1},
                                    {r + 1, 2880, r + 3, 1344, 1, 1, 1},
                                    {r + 3, 1344, r + 4, 4096, 1, 1, 0}};
        check_printed(batch, view, i, rows[i % 3]);
    }
    static const struct {
        int index;
        int32_t row[7];
    } spelled[] = {
        {0, {0, 0, 1, 2880, 0, 0, 1}},      {1, {1, 2880, 3, 1344, 1, 1, 1}},
        {2, {3, 1344, 4, 4096, 1, 1, 0}},   {3, {5, 0, 6, 2880, 0, 0, 1}},
        {4, {6, 2880, 8, 1344, 1, 1, 1}},   {74, {123, 1344, 124, 4096, 1, 1, 0}},
        {75, {125, 0, 126, 2880, 0, 0, 1}}, {76, {126, 2880, 127, 4096, 1, 1, 0}},
        {77, {128, 0, 127, 4096, 0, 0, 0}},
    };
    for (size_t k = 0; k < sizeof spelled / sizeof spelled[0]; k++)
        check_printed(batch, view, spelled[k].index, spelled[k].row);
    /* The second and the fourth of five requests have two splits. */
    static const int32_t before[5] = {0, 1, 3, 4, 6};
    for (int r = 0; r <= 128; r++) CHECK_EQ(view->num_splits[r], r / 5 * 7 + before[r % 5]);
}

/* A plan computed by hand: payload, rows (if there are fewer than partitions, all are equal), and
 * num_splits. */
static const struct by_hand {
    int64_t payload;
    int listed;
    int32_t rows[5][7], num_splits[8];
} * by_hand;

static void check_listed(const struct batch *batch, const fmla_plan_view *view)
{
    CHECK_EQ(view->payload, by_hand->payload);
    for (int i = 0; i < batch->partitions; i++)
        check_printed(batch, view, i, by_hand->rows[i % by_hand->listed]);
    for (int r = 0; r <= batch->requests; r++) CHECK_EQ(view->num_splits[r], by_hand->num_splits[r]);
}

static void run_listed(const struct by_hand *expected, struct batch batch)
{
    by_hand = expected;
    run(&batch, check_listed);
}

/* Worked out by hand from the rules, cost of a request = blocks + 5:
 *   request   0    1    2    3    4    5    6
 *   length    0   64   65 1000  128 3000    1
 *   blocks    1    1    2   16    2   47    1      sum 70, + 7 · 5 = 105; / 5 = 21; payload 26
 * Partition 0: 26 - 6 - 6 - 7 = 7; request 3 costs 21 > 7 > 5: split after 7 - 5 = 2 blocks, key 128.
 * Partition 1: request 3 has 14 left, costs 19: 7 remain; request 4 costs 7: an exact fit, 0 remain: stop.
 * Partition 2: request 5 costs 52: split after 21 blocks, key 1344.
 * Partition 3: 26 left cost 31: split after 21 more, 42 blocks, key 2688.
 * Partition 4: 5 left cost 10, 16 remain; request 6 costs 6. */
static const struct by_hand split = {26,
                                     5,
                                     {{0, 0, 3, 128, 0, 0, 1},
                                      {3, 128, 4, 128, 1, 1, 0},
                                      {5, 0, 5, 1344, 0, 1, 1},
                                      {5, 1344, 5, 2688, 1, 1, 1},
                                      {5, 2688, 6, 1, 2, 1, 0}},
                                     {0, 1, 2, 3, 5, 6, 9, 10}};

/* By hand again, nothing split, two exact fits and an idle partition:
 *   length    0   64   65 1000    0  640
 *   blocks    1    1    2   16    1   10      sum 31, + 6 · 5 = 61; / 4 = 15.25 → 16; payload 21
 * Partition 0: 21 - 6 - 6 - 7 = 2, not above 5: stop. Partition 1: request 3 costs 21: 0 remain.
 * Partition 2: 21 - 6 - 15 = 0. Partition 3: idle; its end is that of the last request. */
static const struct by_hand fit = {
    21,
    4,
    {{0, 0, 2, 65, 0, 0, 0}, {3, 0, 3, 1000, 0, 0, 0}, {4, 0, 5, 640, 0, 0, 0}, {6, 0, 5, 640, 0, 0, 0}},
    {0, 1, 2, 3, 4, 5, 6}};

/* An empty batch: payload ceil(0 / p) + 5, all idle, num_splits = [0]. */
static const struct by_hand empty = {5, 1, {{0, 0, -1, 0, 0, 0, 0}}, {0}};

static void test_golden(void)
{
    static int32_t published[128];
    for (int r = 0; r < 128; r++) published[r] = 4096;
    run(&(struct batch){"published", 128, 78, 0, published}, check_published);
    /* Outside: the same lengths after clamping at both ends. */
    static const int32_t splits[] = {0, 64, 65, 1000, 128, 3000, 1},
                         fits[] = {0, 64, 65, 1000, INT32_MIN, 640},
                         outside[] = {-5, 64, 65, 1000, 128, INT32_MAX, 1};
    run_listed(&split, (struct batch){"splits", 7, 5, 0, splits});
    run_listed(&split, (struct batch){"splits, clamped", 7, 5, 3000, outside});
    run_listed(&fit, (struct batch){"fits", 6, 4, 0, fits});
    run_listed(&empty, (struct batch){"empty", 0, 1, 0, fits});
    run_listed(&empty, (struct batch){"empty", 0, 9, 640, fits});
}

/* ---- Properties -------------------------------------------------------------------------------------- */

static const int32_t special[] = {0, 1, 63, 64, 65, 127, 128, 129, 4096, 1000000, -1, INT32_MIN};

static void test_random(int64_t count)
{
    enum { MOST = 64 };
    static int32_t seqlens[MOST];
    struct random_state random = {78};
    for (int64_t n = 0; n < count; n++) {
        const int64_t longest = INT64_C(1) << random_between(&random, 0, 20);
        for (int i = 0; i < MOST; i++)
            seqlens[i] = random_between(&random, 0, 3) == 0
                             ? special[random_between(&random, 0, sizeof special / sizeof special[0] - 1)]
                             : (int32_t)random_between(&random, 0, longest);
        static const int64_t capacities[] = {0, 1, 64, 100, 4096, 1000000};
        const struct batch batch = {"random", random_between(&random, 0, MOST),
                                    random_between(&random, 1, INT64_C(1) << random_between(&random, 0, 9)),
                                    capacities[random_between(&random, 0, 5)], seqlens};
        run(&batch, NULL);
    }
}

/* Tests the ends of every range: batches of 0, 1, 2 … 100 000, partitions of 1 … 65536, one length for
 * all. */
static void test_ends(void)
{
    enum { MOST = 100000 };
    static int32_t seqlens[MOST];
    static const int32_t lengths[] = {0, 1, 63, 64, 65, 1000000, INT32_MAX, -7};
    static const int64_t batches[] = {1, 2, 3, 1000}, partitions[] = {1, 2, 131, 65536};
    for (int l = 0; l < 8; l++) {
        for (int r = 0; r < MOST; r++) seqlens[r] = lengths[l];
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 4; k++)
                run(&(struct batch){"ends", batches[i], partitions[k], 0, seqlens}, NULL);
    }
    for (int k = 0; k < 4; k++) {
        run(&(struct batch){"long", MOST, partitions[k], 0, seqlens}, NULL);
        for (int r = 0; r < MOST; r++) seqlens[r] = special[r % 12];
        run(&(struct batch){"long, mixed", MOST, partitions[k], 0, seqlens}, NULL);
        for (int r = 0; r < MOST; r++) seqlens[r] = INT32_MAX;
        run(&(struct batch){"long, longest", MOST, partitions[k], 0, seqlens}, NULL);
    }
}

/* Tests keys shared among fewer partitions than there are: the rows are those of a plan with as many,
 * followed by idle ones. */
static void test_planned(void)
{
    enum { MOST = 40, ROWS = 200 };
    static struct plan_partition rows[ROWS], fewer[ROWS];
    static int32_t lengths[MOST], splits[MOST + 1], splits_of_fewer[MOST + 1];
    struct random_state random = {79};
    for (int n = 0; n < 2000; n++) {
        const int32_t b = (int32_t)random_between(&random, 0, MOST),
                      planned = (int32_t)random_between(&random, 1, ROWS);
        for (int r = 0; r < b; r++) lengths[r] = (int32_t)random_between(&random, 0, 3000);
        const struct plan_topk lists = {.topk = 2048, .length = lengths};
        plan_build((struct plan_tables){NULL, rows, splits, ROWS, planned}, b, lists,
                   (struct plan_costs){0, 0});
        plan_build((struct plan_tables){NULL, fewer, splits_of_fewer, planned, 0}, b, lists,
                   (struct plan_costs){0, 0});
        CHECK(!memcmp(rows, fewer, (size_t)planned * sizeof rows[0]), "%d of %d: other rows", planned, ROWS);
        CHECK(!memcmp(splits, splits_of_fewer, ((size_t)b + 1) * sizeof splits[0]), "%d: other splits",
              planned);
        for (int i = planned; i < ROWS; i++)
            CHECK(rows[i].begin_request == b && rows[i].end_request == b - 1 && !rows[i].begin_block,
                  "row %d of %d is not idle", i, planned);
    }
}

/* Tests max(1, workers / h_kv / ceil(s_q · h_q / h_kv / 64)), computed by hand. */
static void test_default_partitions(void)
{
    static const struct {
        int32_t workers, s_q, h_q, h_kv, expected;
    } cases[] = {
        {132, 1, 128, 1, 66},  {132, 2, 128, 1, 33}, {78, 1, 64, 1, 78},   {78, 1, 65, 1, 39},
        {132, 1, 128, 128, 1}, {132, 3, 40, 2, 66},  {132, 5, 40, 2, 33},  {8, 100, 128, 1, 1},
        {1, 1, 16, 1, 1},      {108, 1, 16, 1, 108}, {131, 1, 128, 1, 65}, {7, 1, 6, 2, 3},
    };
    static int32_t length = 100;
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        CHECK_EQ(plan_default_partitions(cases[k].workers, cases[k].s_q, cases[k].h_q, cases[k].h_kv),
                 cases[k].expected);
        fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
        args.seqlens = TENSOR_OF(&length, i32, 1), args.s_q = cases[k].s_q, args.h_q = cases[k].h_q;
        args.h_kv = cases[k].h_kv;
        args.num_workers = cases[k].workers;
        size_t bytes = 0;
        CHECK_OK(fmla_decode_plan_size(&args, &bytes));
        CHECK_EQ(bytes, 32 + 32 * cases[k].expected + 4 * 2);
    }
}

int main(int argc, char **argv)
{
    test_golden();
    test_random(argc > 1 && !strcmp(argv[1], "--short") ? 300 : 6000);
    test_ends();
    test_planned();
    test_default_partitions();
    return check_done("test_plan");
}
