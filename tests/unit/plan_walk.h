/* SPDX-License-Identifier: MIT
 *
 * Makes plans of a batch by the planner itself and by the public functions, between guards, and walks
 * through a finished plan without knowing how it was made.
 */
#ifndef FMLA_PLAN_WALK_H
#define FMLA_PLAN_WALK_H

#include "tensors.h"

#include "plan.h"
#include "random.h"

#include <sanitizer/asan_interface.h>
#include <stdbool.h>

enum { GUARD = 64, POISON = 0x5a, BLOCK = 64, OVERHEAD = 5 };

/* A batch to plan. */
struct batch {
    const char *name;
    int64_t requests, partitions, capacity; /* capacity 0: none */
    const int32_t *seqlens;
};

static char which[160]; /* names the current batch in failures */

static inline int64_t length_of(const struct batch *batch, int64_t request)
{
    const int64_t length = batch->seqlens[request];
    if (length < 0) return 0;
    return batch->capacity && length > batch->capacity ? batch->capacity : length;
}

static inline int64_t blocks_of(const struct batch *batch, int64_t request)
{
    const int64_t blocks = (length_of(batch, request) + BLOCK - 1) / BLOCK;
    return blocks ? blocks : 1;
}

static inline int64_t default_payload(const struct batch *batch)
{
    int64_t total = 0;
    for (int64_t r = 0; r < batch->requests; r++) total += blocks_of(batch, r) + OVERHEAD;
    return total / batch->partitions + (total % batch->partitions != 0) + OVERHEAD;
}

/* ---- Making a plan, both ways ------------------------------------------------------------------------ */

static inline size_t size_of(const struct batch *batch)
{
    return 32 + 32 * (size_t)batch->partitions + 4 * ((size_t)batch->requests + 1);
}

static inline void *poisoned(size_t bytes)
{
    uint8_t *memory = aligned_alloc(GUARD, (bytes + 3 * GUARD - 1) / GUARD * GUARD);
    if (!memory) abort();
    memset(memory, POISON, bytes + 2 * GUARD);
    ASAN_POISON_MEMORY_REGION(memory, GUARD);
    ASAN_POISON_MEMORY_REGION(memory + GUARD + bytes, GUARD);
    return memory + GUARD;
}

static inline void release(void *plan)
{
    free((uint8_t *)plan - GUARD);
}

static inline void check_guards(const uint8_t *plan, size_t bytes)
{
    int touched = 0;
    ASAN_UNPOISON_MEMORY_REGION(plan - GUARD, bytes + 2 * GUARD);
    for (int i = 1; i <= GUARD; i++) touched |= plan[-i] != POISON || plan[bytes + (size_t)i - 1] != POISON;
    CHECK(!touched, "%s: written outside of the plan's %zu bytes", which, bytes);
}

/* Builds the tables with costs, or without (NULL). */
static inline void build(struct plan_tables tables, const struct batch *batch, const struct plan_costs *costs)
{
    const struct plan_topk lists = {.topk = batch->capacity ? batch->capacity : INT64_MAX,
                                    .length = batch->seqlens};
    plan_build(tables, batch->requests, lists, costs ? *costs : (struct plan_costs){0, 0});
}

/* Builds two separate tables without a header; they must equal those of a plan. */
static inline struct plan_tables own_tables(const struct batch *batch)
{
    return (struct plan_tables){NULL, poisoned(32 * (size_t)batch->partitions),
                                poisoned(4 * ((size_t)batch->requests + 1)), (int32_t)batch->partitions, 0};
}

static inline void check_own(const struct batch *batch, struct plan_tables tables, const void *rows,
                             const void *splits)
{
    const size_t rows_bytes = 32 * (size_t)batch->partitions,
                 splits_bytes = 4 * ((size_t)batch->requests + 1);
    check_guards((const uint8_t *)tables.partitions, rows_bytes);
    check_guards((const uint8_t *)tables.num_splits, splits_bytes);
    CHECK(!memcmp(tables.partitions, rows, rows_bytes) && !memcmp(tables.num_splits, splits, splits_bytes),
          "%s: other tables than those of the plan", which);
    release(tables.partitions), release(tables.num_splits);
}

static inline struct plan_header *build_inside(const struct batch *batch, const struct plan_costs *costs)
{
    const size_t bytes = size_of(batch);
    if (!costs) CHECK_EQ(plan_bytes(batch->requests, (int32_t)batch->partitions), bytes);
    struct plan_header *plan = poisoned(bytes);
    build(plan_tables_of(plan, (int32_t)batch->partitions), batch, costs);
    check_guards((const uint8_t *)plan, bytes);
    if (!costs) return plan;
    const struct plan_tables tables = own_tables(batch);
    build(tables, batch, costs);
    check_own(batch, tables, plan_partitions(plan), plan_num_splits(plan));
    return plan;
}

static inline void *build_public(const struct batch *batch, fmla_plan_view *view)
{
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = TENSOR_OF((void *)(uintptr_t)batch->seqlens, i32, batch->requests);
    args.s_q = 1, args.h_q = 128, args.h_kv = 1;
    args.capacity = batch->capacity, args.num_partitions = (int32_t)batch->partitions;
    size_t bytes = 0;
    fmla_status status = fmla_decode_plan_size(&args, &bytes);
    CHECK(status == FMLA_OK, "%s: size: %s", which, fmla_last_error());
    if (status) return NULL;
    CHECK_EQ(bytes, size_of(batch));
    void *const plan = args.plan = poisoned(bytes);
    args.plan_size = bytes;
    status = fmla_decode_plan(&args);
    CHECK(status == FMLA_OK, "%s: plan: %s", which, fmla_last_error());
    check_guards(plan, bytes);
    *view = FMLA_INIT(fmla_plan_view);
    if (!status) status = fmla_plan_describe(plan, bytes, view);
    CHECK(status == FMLA_OK, "%s: describe: %s", which, fmla_last_error());
    if (status) {
        release(plan);
        return NULL;
    }
    const struct plan_tables tables = own_tables(batch);
    args.plan = NULL, args.plan_size = 0;
    args.partitions = TENSOR_OF(tables.partitions, i32, batch->partitions, FMLA_PARTITION_FIELDS);
    args.num_splits = TENSOR_OF(tables.num_splits, i32, batch->requests + 1);
    CHECK(fmla_decode_plan(&args) == FMLA_OK, "%s: tables: %s", which, fmla_last_error());
    check_own(batch, tables, view->partitions, view->num_splits);
    return plan;
}

static inline fmla_plan_view view_of(const struct plan_header *plan)
{
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    view.batch = plan->batch, view.num_partitions = plan->num_partitions, view.payload = plan->payload;
    view.partitions = (const int32_t *)plan_partitions(plan), view.num_splits = plan_num_splits(plan);
    return view;
}

/* ---- The walk ---------------------------------------------------------------------------------------- */

/* Follows the partitions through the batch block by block and compares every field of a row with the walk. */
enum { NO_PAYLOAD = -1 /* any sufficient payload */ };

static inline void walk(const struct batch *batch, const fmla_plan_view *view, int64_t payload)
{
    const int b = (int)batch->requests, p = (int)batch->partitions;
    CHECK(view->batch == b && view->num_partitions == p, "%s: described as %d requests in %d", which,
          (int)view->batch, (int)view->num_partitions);
    const bool in_step = payload == NO_PAYLOAD;
    if (in_step) payload = view->payload;
    CHECK(view->payload == payload, "%s: payload is %" PRId64 ", expected %" PRId64, which, view->payload,
          payload);

    int32_t *parts = calloc((size_t)b + 1, sizeof *parts);
    if (!parts) abort();
    int request = 0, block = 0, used = 0, light = -1, broken = 0;
    for (int i = 0; i < p && !broken; i++) {
        const int32_t *row = view->partitions + 8 * i;
        CHECK(row[7] == 0, "%s: row %d ends with %d", which, i, row[7]);
        if (row[1] < row[0]) {
            const int32_t idle[] = {b, b - 1, 0, b ? (int32_t)blocks_of(batch, b - 1) : 0, 0, 0, 0};
            CHECK(request == b && !memcmp(row, idle, sizeof idle),
                  "%s: idle row %d is %d %d %d %d %d %d %d, at request %d", which, i, row[0], row[1], row[2],
                  row[3], row[4], row[5], row[6], request);
            continue;
        }
        CHECK(used == i && light < 0, "%s: row %d works behind %d used ones, %d too light", which, i, used,
              light);
        used++;
        CHECK(row[4] == parts[request], "%s: row %d begins with split %d of request %d, expected %d", which,
              i, row[4], request, parts[request]);
        int64_t load = 0;
        for (int r = row[0]; r <= row[1] && !broken; r++) {
            const int from = r == row[0] ? row[2] : 0, blocks = r < b ? (int)blocks_of(batch, r) : 0;
            const int to = r == row[1] ? row[3] : blocks;
            broken = r != request || from != block || to <= from || to > blocks;
            CHECK(!broken, "%s: row %d takes blocks %d … %d of request %d, next is block %d of request %d",
                  which, i, from, to, r, block, request);
            if (broken) break;
            parts[r]++;
            load += to - from + OVERHEAD;
            block = to;
            if (to == blocks) request++, block = 0;
        }
        CHECK(load <= payload, "%s: row %d has load %" PRId64 " of %" PRId64, which, i, load, payload);
        if (!in_step && load < payload - OVERHEAD) light = i;
    }
    CHECK(request == b && block == 0, "%s: ends at block %d of request %d", which, block, request);
    /* With the splits known: check a row's fields for its first and last request, and the prefix sum. */
    for (int i = 0; i < used && !broken; i++) {
        const int32_t *row = view->partitions + 8 * i;
        CHECK(row[5] == (parts[row[0]] > 1) && row[6] == (parts[row[1]] > 1),
              "%s: row %d has flags %d %d, its requests %d and %d parts", which, i, row[5], row[6],
              parts[row[0]], parts[row[1]]);
    }
    int sum = 0, wrong = -1;
    for (int r = 0; r <= b; r++) {
        if (view->num_splits[r] != sum && wrong < 0) wrong = r;
        if (r < b) sum += parts[r];
    }
    CHECK(wrong < 0, "%s: num_splits[%d] is %d", which, wrong, view->num_splits[wrong < 0 ? 0 : wrong]);
    free(parts);
}

/* Plans both ways, compares, walks; hands the public plan to `then` if there is one. */
static inline void run(const struct batch *batch, void (*then)(const struct batch *, const fmla_plan_view *))
{
    snprintf(which, sizeof which, "%s: b %" PRId64 ", p %" PRId64 ", capacity %" PRId64, batch->name,
             batch->requests, batch->partitions, batch->capacity);
    struct plan_header *inside = build_inside(batch, NULL);
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

#endif
