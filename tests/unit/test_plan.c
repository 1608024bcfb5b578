/* SPDX-License-Identifier: MIT
 *
 * The split plan (docs/semantics.md, "The split plan"): golden tables, and properties that are checked by
 * walking a finished plan, without knowing how it was made. Every case runs through the planner itself and
 * through the public functions, which must write the same bytes. The plan by costs ("The plan by costs" there) is held
 * against both plans that it chooses from, made and timed here.
 */
#include "check.h"
#include "flashmla/flashmla.h"
#include "plan.h"
#include "random.h"

#include <stdbool.h>
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

static int64_t default_payload(const struct batch *batch)
{
    int64_t total = 0;
    for (int64_t r = 0; r < batch->requests; r++) total += blocks_of(batch, r) + OVERHEAD;
    return total / batch->partitions + (total % batch->partitions != 0) + OVERHEAD;
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
    plan_build(plan_tables_of(plan, (int32_t)batch->partitions), batch->requests, batch->seqlens,
               batch->capacity ? batch->capacity : INT64_MAX);
    check_guards((const uint8_t *)plan, bytes);
    return plan;
}

/* Planned into two tables of their own by `args`, they are those of `plan`, and no header is written. */
static void check_tables(const struct batch *batch, fmla_decode_plan_args args, const fmla_plan_view *plan)
{
    const int64_t rows_shape[2] = {batch->partitions, FMLA_PARTITION_FIELDS};
    const int64_t splits_shape[1] = {batch->requests + 1};
    const size_t rows_bytes = 32 * (size_t)batch->partitions,
                 splits_bytes = 4 * ((size_t)batch->requests + 1);
    const fmla_dtype int32 = {FMLA_TYPE_INT, 32, 1};
    const fmla_tensor rows = {poisoned(rows_bytes), {FMLA_DEVICE_CPU, 0}, 2, int32, rows_shape, NULL, 0};
    const fmla_tensor splits = {
        poisoned(splits_bytes), {FMLA_DEVICE_CPU, 0}, 1, int32, splits_shape, NULL, 0};
    args.plan = NULL, args.plan_size = 0, args.partitions = &rows, args.num_splits = &splits;
    CHECK(fmla_decode_plan(&args) == FMLA_OK, "%s: tables: %s", which, fmla_last_error());
    check_guards(rows.data, rows_bytes), check_guards(splits.data, splits_bytes);
    CHECK(!memcmp(rows.data, plan->partitions, rows_bytes) &&
              !memcmp(splits.data, plan->num_splits, splits_bytes),
          "%s: other tables than those of the plan", which);
    release(rows.data), release(splits.data);
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
    if (!status) {
        check_tables(batch, args, view);
        return args.plan;
    }
    release(args.plan);
    return NULL;
}

static fmla_plan_view view_of(const struct plan_header *plan)
{
    return (fmla_plan_view){sizeof(fmla_plan_view),
                            plan->batch,
                            plan->num_partitions,
                            plan->payload,
                            (const int32_t *)plan_partitions(plan),
                            plan_num_splits(plan)};
}

/* ---- The walk ---------------------------------------------------------------------------------------- */

/* Follows the partitions through the batch, block by block in order, and checks every claim of a row against
 * what the walk found. */
enum { NO_PAYLOAD = -1 /* any that is enough */ };

static void walk(const struct batch *batch, const fmla_plan_view *view, int64_t payload)
{
    const int64_t b = batch->requests, p = batch->partitions;
    CHECK(view->batch == b && view->num_partitions == p, "%s: described as %" PRId64 " requests in %" PRId64,
          which, view->batch, view->num_partitions);
    const bool in_step = payload == NO_PAYLOAD;
    if (in_step) payload = view->payload;
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
        if (!in_step && load < payload - OVERHEAD) light = i;
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
        walk(batch, &view, default_payload(batch));
        if (then) then(batch, &view);
        release(made);
    }
    const fmla_plan_view inside_view = view_of(inside);
    walk(batch, &inside_view, default_payload(batch));
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

/* ---- By costs ---------------------------------------------------------------------------------------- */

static struct plan_header *build_by_costs(const struct batch *batch, struct plan_costs costs)
{
    const size_t bytes = size_of(batch);
    struct plan_header *plan = poisoned(bytes);
    plan_build_by_costs(plan_tables_of(plan, (int32_t)batch->partitions), batch->requests, batch->seqlens,
                        batch->capacity ? batch->capacity : INT64_MAX, costs);
    check_guards((const uint8_t *)plan, bytes);
    /* Its tables alone have the same bits. */
    const size_t rows_bytes = 32 * (size_t)batch->partitions, splits_bytes = bytes - 32 - rows_bytes;
    const struct plan_tables tables = {NULL, poisoned(rows_bytes), poisoned(splits_bytes),
                                       (int32_t)batch->partitions};
    plan_build_by_costs(tables, batch->requests, batch->seqlens,
                        batch->capacity ? batch->capacity : INT64_MAX, costs);
    check_guards((const uint8_t *)tables.partitions, rows_bytes);
    check_guards((const uint8_t *)tables.num_splits, splits_bytes);
    CHECK(!memcmp(tables.partitions, plan_partitions(plan), rows_bytes) &&
              !memcmp(tables.num_splits, plan_num_splits(plan), splits_bytes),
          "%s: other tables than those of the plan", which);
    release(tables.partitions), release(tables.num_splits);
    return plan;
}

/* The time of a plan, as docs/semantics.md has it, from its published form. */
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

/* The plan in step, row after row. */
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
            struct plan_partition *row = &rows[used++];
            *row = (struct plan_partition){(int32_t)r,
                                           (int32_t)(r + taken - 1),
                                           (int32_t)(part * last_blocks / parts),
                                           0,
                                           (int32_t)part,
                                           parts > 1,
                                           parts > 1,
                                           0};
            row->end_block = (int32_t)((part + 1) * last_blocks / parts);
            load = row->end_block - row->begin_block + OVERHEAD;
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

/* The planners' own times of the two plans, that in step both by its rows and without them. */
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

/* The plan by costs is the one of the two that takes less time, to the byte; the default one if neither does. */
static enum choice run_by_costs(const struct batch *batch, struct plan_costs costs)
{
    snprintf(which, sizeof which, "%s: b %" PRId64 ", p %" PRId64 ", capacity %" PRId64 ", tiles %d, %d",
             batch->name, batch->requests, batch->partitions, batch->capacity, costs.row_tiles,
             costs.tiles_of_head);
    struct plan_header *plan = build_by_costs(batch, costs), *filled = build_inside(batch),
                       *in_step = build_in_step(batch);
    const fmla_plan_view filled_view = view_of(filled), in_step_view = view_of(in_step), view = view_of(plan);
    walk(batch, &in_step_view, NO_PAYLOAD);
    const int64_t filled_time = time_of(batch, &filled_view, costs.row_tiles, costs.tiles_of_head),
                  in_step_time = time_of(batch, &in_step_view, costs.row_tiles, costs.tiles_of_head);
    check_times(batch, costs, filled, in_step, filled_time, in_step_time);
    const enum choice expected = in_step_time < filled_time ? IN_STEP : FILLED;
    CHECK(!memcmp(plan, expected == IN_STEP ? in_step : filled, size_of(batch)),
          "%s: is not the plan %s, whose time is %" PRId64 " (filled %" PRId64 ")", which,
          expected == IN_STEP ? "in step" : "filled one after the other", in_step_time, filled_time);
    if (expected == IN_STEP) walk(batch, &view, NO_PAYLOAD);
    release(plan), release(filled), release(in_step);
    return expected;
}

/* By hand, in sixteenths of a block.
 * 128 requests of 128 blocks, 66 partitions, 2 row tiles: two a partition, 64 partitions, payload 2 · 133. Mean 16 · 16384 /
 * 66 = 3971; 2 · 60 + 4096 - (4096 - 3971) · 2 / 16 = 4201, nothing to join. Filled one after the other, payload 263: some
 * have 3 pieces, and nearly every second request is cut: no less than 3 · 60 + 3971. */
static void check_whole(const fmla_plan_view *view)
{
    CHECK_EQ(view->payload, 266);
    for (int i = 0; i < 66; i++) {
        const int32_t row[8] = {2 * i, 2 * i + 1, 0, 128}, idle[8] = {128, 127, 0, 128};
        CHECK(!memcmp(view->partitions + 8 * i, i < 64 ? row : idle, sizeof row), "whole: row %d", i);
    }
    for (int r = 0; r <= 128; r++) CHECK_EQ(view->num_splits[r], r);
}

/* A request of one block and six of 16, 32 partitions, 4 row tiles: 32 / 7 = 4 parts each, 1 of the first; 25 rows.
 * Mean 16 · 97 / 32 = 48. Four blocks: 60 + 64 - (64 - 48) · 2 / 16 = 122; join 16 + (24 · 4 · 3 + 4 · 5) / 8 = 54; uneven, but
 * 48 · 5 / 256 = 0: 176. Filled: payload ceil(132 / 32) + 5 = 10, so parts of 5, 5, 5 and 1 blocks: 60 + 80 - 4 + 54 = 190. */
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
    struct plan_header *plan = build_by_costs(&whole, (struct plan_costs){2, 2});
    fmla_plan_view view = view_of(plan);
    check_whole(&view);
    release(plan);
    static const int32_t seven[] = {1, 1000, 1000, 1000, 1000, 1000, 1000};
    const struct batch parts = {"parts", 7, 32, 0, seven};
    plan = build_by_costs(&parts, (struct plan_costs){4, 4});
    view = view_of(plan);
    check_parts(&view);
    release(plan);

    CHECK_EQ(run_by_costs(&whole, (struct plan_costs){2, 2}), IN_STEP);
    CHECK_EQ(run_by_costs(&parts, (struct plan_costs){4, 4}), IN_STEP);
    /* What a GPU with 132 SMs is given: the rows of the measurements. */
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

/* The default plan, although the plan in step takes less time. */
static void check_default(const struct batch *batch, struct plan_costs costs, int32_t tiles)
{
    struct plan_header *plan = build_by_costs(batch, costs), *filled = build_inside(batch),
                       *in_step = build_in_step(batch);
    const fmla_plan_view filled_view = view_of(filled), in_step_view = view_of(in_step);
    CHECK(time_of(batch, &in_step_view, tiles, tiles) < time_of(batch, &filled_view, tiles, tiles),
          "%s: the default plan is to be chosen anyway", batch->name);
    CHECK(!memcmp(plan, filled, size_of(batch)), "%s: not the default plan", batch->name);
    release(plan), release(filled), release(in_step);
}

/* Without costs, and on either side of where they are looked at. */
static void test_costs_not_looked_at(void)
{
    static int32_t same[PLAN_FEW + 1];
    const struct plan_costs one_tile = {1, 1}, none = {0, 0};
    for (int r = 0; r <= PLAN_FEW; r++) same[r] = 1000;
    struct batch batch = {"most requests", PLAN_FEW, 66, 0, same};
    CHECK(run_by_costs(&batch, one_tile) == IN_STEP, "%s", which);
    check_default(&batch, none, 1);
    batch.requests++;
    check_default(&batch, one_tile, 1);

    /* The line of 64 requests ends at 2^24, then one block further. */
    for (int r = 0; r < 64; r++) same[r] = ((1 << 24) / 64 - OVERHEAD) * BLOCK;
    batch = (struct batch){"longest line", 64, 128, 0, same};
    CHECK(run_by_costs(&batch, one_tile) == IN_STEP, "%s", which);
    same[63]++;
    check_default(&batch, one_tile, 1);

    /* A request costs (2^31 - 1) / 1024 blocks, then one more. */
    same[0] = (INT32_MAX / 1024 - OVERHEAD) * BLOCK;
    batch = (struct batch){"longest request", 1, 4, 0, same};
    CHECK(run_by_costs(&batch, one_tile) == IN_STEP, "%s", which);
    same[0]++;
    check_default(&batch, one_tile, 1);

    struct plan_header *empty = build_by_costs(&(struct batch){"empty", 0, 3, 0, same}, one_tile);
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
        CHECK_OK(fmla_decode_plan_size(&args, &bytes));
        CHECK_EQ(bytes, 32 + 32 * cases[k].expected + 4 * 2);
    }
}

int main(int argc, char **argv)
{
    test_golden();
    test_random(argc > 1 && !strcmp(argv[1], "--short") ? 300 : 6000);
    test_ends();
    test_costs_by_hand();
    test_costs_not_looked_at();
    test_costs_random(argc > 1 && !strcmp(argv[1], "--short") ? 300 : 6000);
    test_default_partitions();
    return check_done("test_plan");
}
