/* SPDX-License-Identifier: MIT
 *
 * The split plan (docs/semantics.md, "The split plan"): golden tables, and properties that are checked by
 * walking a finished plan, without knowing how it was made. Every case runs through the planner itself and
 * through the public functions, which must write the same bytes.
 */
#include "check.h"
#include "flashmla/flashmla.h"
#include "plan.h"
#include "random.h"

#include <stdlib.h>

enum { GUARD = 64, POISON = 0x5a, BLOCK = 64, OVERHEAD = 5 };

/* A batch to plan. */
struct batch {
    const char *name;
    int64_t requests, partitions, capacity; /* capacity 0: none */
    const int32_t *seqlens;
};

static char which[160]; /* names the batch at hand in failures */

static int64_t length_of(const struct batch *batch, int64_t request)
{
    const int64_t length = batch->seqlens[request];
    if (length < 0) return 0;
    return batch->capacity && length > batch->capacity ? batch->capacity : length;
}

static int64_t blocks_of(const struct batch *batch, int64_t request)
{
    const int64_t blocks = (length_of(batch, request) + BLOCK - 1) / BLOCK;
    return blocks ? blocks : 1;
}

/* ---- Making a plan, both ways ------------------------------------------------------------------------ */

static size_t size_of(const struct batch *batch)
{
    return 32 + 32 * (size_t)batch->partitions + 4 * ((size_t)batch->requests + 1);
}

static void *poisoned(size_t bytes)
{
    uint8_t *memory = aligned_alloc(GUARD, (bytes + 3 * GUARD - 1) / GUARD * GUARD);
    if (!memory) abort();
    memset(memory, POISON, bytes + 2 * GUARD);
    return memory + GUARD;
}

static void release(void *plan)
{
    free((uint8_t *)plan - GUARD);
}

static void check_guards(const uint8_t *plan, size_t bytes)
{
    int touched = 0;
    for (int i = 1; i <= GUARD; i++) touched |= plan[-i] != POISON || plan[bytes + (size_t)i - 1] != POISON;
    CHECK(!touched, "%s: written outside of the plan's %zu bytes", which, bytes);
}

static struct plan_header *build_inside(const struct batch *batch)
{
    const size_t bytes = size_of(batch);
    CHECK_EQ(plan_bytes(batch->requests, (int32_t)batch->partitions), bytes);
    struct plan_header *plan = poisoned(bytes);
    plan_build(plan, batch->requests, (int32_t)batch->partitions, batch->seqlens,
               batch->capacity ? batch->capacity : INT64_MAX);
    check_guards((const uint8_t *)plan, bytes);
    return plan;
}

static void *build_public(const struct batch *batch, fmla_plan_view *view)
{
    int64_t shape[1] = {batch->requests};
    const fmla_tensor seqlens = {.data = (void *)(uintptr_t)batch->seqlens,
                                 .device = {FMLA_DEVICE_CPU, 0},
                                 .ndim = 1,
                                 .dtype = {FMLA_TYPE_INT, 32, 1},
                                 .shape = shape};
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &seqlens, args.s_q = 1, args.h_q = 128, args.h_kv = 1;
    args.capacity = batch->capacity, args.num_partitions = (int32_t)batch->partitions;
    size_t bytes = 0;
    fmla_status status = fmla_decode_plan_size(&args, &bytes);
    CHECK(status == FMLA_OK, "%s: size: %s", which, fmla_last_error());
    if (status) return NULL;
    CHECK_EQ(bytes, size_of(batch));
    args.plan = poisoned(bytes), args.plan_size = bytes;
    status = fmla_decode_plan(&args);
    CHECK(status == FMLA_OK, "%s: plan: %s", which, fmla_last_error());
    check_guards(args.plan, bytes);
    *view = FMLA_INIT(fmla_plan_view);
    if (!status) {
        status = fmla_plan_describe(args.plan, bytes, view);
        CHECK(status == FMLA_OK, "%s: describe: %s", which, fmla_last_error());
    }
    if (!status) return args.plan;
    release(args.plan);
    return NULL;
}

/* ---- The walk ---------------------------------------------------------------------------------------- */

/* Follows the partitions through the batch, block by block in order, and checks every claim of a row against
 * what the walk found. */
static void walk(const struct batch *batch, const fmla_plan_view *view)
{
    const int64_t b = batch->requests, p = batch->partitions;
    CHECK(view->batch == b && view->num_partitions == p, "%s: described as %" PRId64 " requests in %" PRId64,
          which, view->batch, view->num_partitions);
    int64_t total = 0;
    for (int64_t r = 0; r < b; r++) total += blocks_of(batch, r) + OVERHEAD;
    const int64_t payload = total / p + (total % p != 0) + OVERHEAD;
    CHECK(view->payload == payload, "%s: payload is %" PRId64 ", expected %" PRId64, which, view->payload,
          payload);

    int32_t *parts = calloc((size_t)b + 1, sizeof *parts);
    if (!parts) abort();
    int64_t request = 0, block = 0, used = 0, light = -1;
    int broken = 0;
    for (int64_t i = 0; i < p && !broken; i++) {
        const int32_t *row = view->partitions + 8 * i;
        CHECK(row[7] == 0, "%s: row %" PRId64 " ends with %d", which, i, row[7]);
        if (row[1] < row[0]) {
            const int32_t end = b ? (int32_t)blocks_of(batch, b - 1) : 0;
            CHECK(request == b && row[0] == b && row[1] == b - 1 && row[2] == 0 && row[3] == end &&
                      row[4] == 0 && row[5] == 0 && row[6] == 0,
                  "%s: idle row %" PRId64 " is %d %d %d %d %d %d %d, at request %" PRId64, which, i, row[0],
                  row[1], row[2], row[3], row[4], row[5], row[6], request);
            continue;
        }
        CHECK(used == i && light < 0,
              "%s: row %" PRId64 " works behind %" PRId64 " used ones, %" PRId64 " too light", which, i, used,
              light);
        used++;
        CHECK(row[4] == parts[request],
              "%s: row %" PRId64 " begins with split %d of request %" PRId64 ", expected %d", which, i,
              row[4], request, parts[request]);
        int64_t load = 0;
        for (int64_t r = row[0]; r <= row[1] && !broken; r++) {
            const int64_t from = r == row[0] ? row[2] : 0;
            const int64_t blocks = r < b ? blocks_of(batch, r) : 0;
            const int64_t to = r == row[1] ? row[3] : blocks;
            broken = r != request || from != block || to <= from || to > blocks;
            CHECK(!broken,
                  "%s: row %" PRId64 " takes blocks %" PRId64 " … %" PRId64 " of request %" PRId64
                  ", next is block %" PRId64 " of request %" PRId64,
                  which, i, from, to, r, block, request);
            if (broken) break;
            parts[r]++;
            load += to - from + OVERHEAD;
            block = to;
            if (to == blocks) request++, block = 0;
        }
        CHECK(load <= payload, "%s: row %" PRId64 " has load %" PRId64 " of %" PRId64, which, i, load,
              payload);
        if (load < payload - OVERHEAD) light = i;
    }
    CHECK(request == b && block == 0, "%s: ends at block %" PRId64 " of request %" PRId64, which, block,
          request);
    /* With the parts known: what a row says of its first and last request, and the prefix sum. */
    for (int64_t i = 0; i < used && !broken; i++) {
        const int32_t *row = view->partitions + 8 * i;
        CHECK(row[5] == (parts[row[0]] > 1) && row[6] == (parts[row[1]] > 1),
              "%s: row %" PRId64 " has flags %d %d, its requests %d and %d parts", which, i, row[5], row[6],
              parts[row[0]], parts[row[1]]);
    }
    int64_t sum = 0, wrong = -1;
    for (int64_t r = 0; r <= b; r++) {
        if (view->num_splits[r] != sum && wrong < 0) wrong = r;
        if (r < b) sum += parts[r];
    }
    CHECK(wrong < 0, "%s: num_splits[%" PRId64 "] is %d", which, wrong, view->num_splits[wrong]);
    free(parts);
}

/* Plans both ways, compares, walks; hands the public plan to `then` if there is one. */
static void run(const struct batch *batch, void (*then)(const struct batch *, const fmla_plan_view *))
{
    snprintf(which, sizeof which, "%s: b %" PRId64 ", p %" PRId64 ", capacity %" PRId64, batch->name,
             batch->requests, batch->partitions, batch->capacity);
    struct plan_header *inside = build_inside(batch);
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    void *made = build_public(batch, &view);
    if (made) {
        CHECK(!memcmp(made, inside, size_of(batch)), "%s: the public plan has other bytes", which);
        walk(batch, &view);
        if (then) then(batch, &view);
        release(made);
    }
    const fmla_plan_view inside_view = {sizeof inside_view,
                                        inside->batch,
                                        inside->num_partitions,
                                        inside->payload,
                                        (const int32_t *)plan_partitions(inside),
                                        plan_num_splits(inside)};
    walk(batch, &inside_view);
    if (then) then(batch, &inside_view);
    release(inside);
}

/* ---- Golden tables ----------------------------------------------------------------------------------- */

/* The printed form of a row: keys instead of blocks. A cut is at 64 · blocks, an end at the length. */
static void check_printed(const struct batch *batch, const fmla_plan_view *view, int64_t i,
                          const int32_t expected[7])
{
    const int32_t *row = view->partitions + 8 * i;
    const int64_t end_key = row[1] < 0                           ? 0
                            : row[3] == blocks_of(batch, row[1]) ? length_of(batch, row[1])
                                                                 : (int64_t)BLOCK * row[3];
    const int64_t printed[7] = {row[0], (int64_t)BLOCK * row[2], row[1], end_key, row[4], row[5], row[6]};
    for (int k = 0; k < 7; k++)
        CHECK(printed[k] == expected[k], "%s: row %" PRId64 ", column %d is %" PRId64 ", expected %d", which,
              i, k, printed[k], expected[k]);
}

/* Published with FlashMLA: b = 128, every s_k = 4096, 78 partitions. The rows repeat every three, five
 * requests further, up to the last that are spelled. */
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
        int64_t index;
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
    /* Of five requests the second and the fourth have two parts. */
    static const int32_t before[5] = {0, 1, 3, 4, 6};
    for (int r = 0; r <= 128; r++) CHECK_EQ(view->num_splits[r], r / 5 * 7 + before[r % 5]);
}

/* Worked out by hand from the rules, cost of a request = blocks + 5:
 *   request   0    1    2    3    4    5    6
 *   length    0   64   65 1000  128 3000    1
 *   blocks    1    1    2   16    2   47    1      sum 70, + 7 · 5 = 105; / 5 = 21; payload 26
 * Partition 0: 26 - 6 - 6 - 7 = 7; request 3 costs 21 > 7 > 5: cut after 7 - 5 = 2 blocks, key 128.
 * Partition 1: request 3 has 14 left, costs 19: 7 remain; request 4 costs 7: an exact fit, 0 remain: stop.
 * Partition 2: request 5 costs 52: cut after 21 blocks, key 1344.
 * Partition 3: 26 left cost 31: cut after 21 more, 42 blocks, key 2688.
 * Partition 4: 5 left cost 10, 16 remain; request 6 costs 6. */
static void check_cuts(const struct batch *batch, const fmla_plan_view *view)
{
    static const int32_t rows[5][7] = {{0, 0, 3, 128, 0, 0, 1},
                                       {3, 128, 4, 128, 1, 1, 0},
                                       {5, 0, 5, 1344, 0, 1, 1},
                                       {5, 1344, 5, 2688, 1, 1, 1},
                                       {5, 2688, 6, 1, 2, 1, 0}};
    static const int32_t num_splits[8] = {0, 1, 2, 3, 5, 6, 9, 10};
    CHECK_EQ(view->payload, 26);
    for (int i = 0; i < 5; i++) check_printed(batch, view, i, rows[i]);
    for (int r = 0; r < 8; r++) CHECK_EQ(view->num_splits[r], num_splits[r]);
}

/* By hand again, nothing cut, two exact fits and an idle partition:
 *   length    0   64   65 1000    0  640
 *   blocks    1    1    2   16    1   10      sum 31, + 6 · 5 = 61; / 4 = 15.25 → 16; payload 21
 * Partition 0: 21 - 6 - 6 - 7 = 2, not above 5: stop. Partition 1: request 3 costs 21: 0 remain.
 * Partition 2: 21 - 6 - 15 = 0. Partition 3: idle; its end is that of the last request. */
static void check_fits(const struct batch *batch, const fmla_plan_view *view)
{
    static const int32_t rows[4][7] = {
        {0, 0, 2, 65, 0, 0, 0}, {3, 0, 3, 1000, 0, 0, 0}, {4, 0, 5, 640, 0, 0, 0}, {6, 0, 5, 640, 0, 0, 0}};
    CHECK_EQ(view->payload, 21);
    for (int i = 0; i < 4; i++) check_printed(batch, view, i, rows[i]);
    for (int r = 0; r < 7; r++) CHECK_EQ(view->num_splits[r], r);
}

/* An empty batch: payload ceil(0 / p) + 5, all idle, num_splits = [0]. */
static void check_empty(const struct batch *batch, const fmla_plan_view *view)
{
    static const int32_t idle[7] = {0, 0, -1, 0, 0, 0, 0};
    CHECK_EQ(view->payload, 5);
    for (int64_t i = 0; i < batch->partitions; i++) check_printed(batch, view, i, idle);
    CHECK_EQ(view->num_splits[0], 0);
}

static void test_golden(void)
{
    static int32_t published[128];
    for (int r = 0; r < 128; r++) published[r] = 4096;
    run(&(struct batch){"published", 128, 78, 0, published}, check_published);
    static const int32_t cuts[] = {0, 64, 65, 1000, 128, 3000, 1};
    run(&(struct batch){"cuts", 7, 5, 0, cuts}, check_cuts);
    /* The same lengths after clamping from both sides. */
    static const int32_t outside[] = {-5, 64, 65, 1000, 128, INT32_MAX, 1};
    run(&(struct batch){"cuts, clamped", 7, 5, 3000, outside}, check_cuts);
    static const int32_t fits[] = {0, 64, 65, 1000, INT32_MIN, 640};
    run(&(struct batch){"fits", 6, 4, 0, fits}, check_fits);
    run(&(struct batch){"empty", 0, 1, 0, fits}, check_empty);
    run(&(struct batch){"empty", 0, 9, 640, fits}, check_empty);
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

/* The ends of every range: batches of 0, 1, 2 … 100 000, partitions of 1 … 65536, one length for all. */
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

/* max(1, workers / h_kv / ceil(s_q · h_q / h_kv / 64)), worked out by hand. */
static void test_default_partitions(void)
{
    static const struct {
        int32_t workers, s_q, h_q, h_kv, expected;
    } cases[] = {
        {132, 1, 128, 1, 66},  {132, 2, 128, 1, 33}, {78, 1, 64, 1, 78},   {78, 1, 65, 1, 39},
        {132, 1, 128, 128, 1}, {132, 3, 40, 2, 66},  {132, 5, 40, 2, 33},  {8, 100, 128, 1, 1},
        {1, 1, 16, 1, 1},      {108, 1, 16, 1, 108}, {131, 1, 128, 1, 65}, {7, 1, 6, 2, 3},
    };
    static const int32_t length = 100;
    int64_t shape[1] = {1};
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        CHECK_EQ(plan_default_partitions(cases[k].workers, cases[k].s_q, cases[k].h_q, cases[k].h_kv),
                 cases[k].expected);
        const fmla_tensor seqlens = {.data = (void *)(uintptr_t)&length,
                                     .device = {FMLA_DEVICE_CPU, 0},
                                     .ndim = 1,
                                     .dtype = {FMLA_TYPE_INT, 32, 1},
                                     .shape = shape};
        fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
        args.seqlens = &seqlens, args.s_q = cases[k].s_q, args.h_q = cases[k].h_q, args.h_kv = cases[k].h_kv;
        args.num_workers = cases[k].workers;
        size_t bytes = 0;
        CHECK(fmla_decode_plan_size(&args, &bytes) == FMLA_OK, "%s", fmla_last_error());
        CHECK_EQ(bytes, 32 + 32 * cases[k].expected + 4 * 2);
    }
}

int main(int argc, char **argv)
{
    test_golden();
    test_random(argc > 1 && !strcmp(argv[1], "--short") ? 300 : 6000);
    test_ends();
    test_default_partitions();
    return check_done("test_plan");
}
