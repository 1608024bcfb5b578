/* SPDX-License-Identifier: MIT
 *
 * Tests decode_plan and sparse_plan on a GPU: they must write the same bytes as the host's planner for the
 * same lengths and partitions; decode_plan with the costs of the GPU and without, as for a plan that the
 * CPU will use. The host's planner is tested in tests/unit/test_plan.c.
 */
#include "case.h"
#include "checkattn.h"
#include "device.h"
#include "plan_call.h"
#include "random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};

enum lengths {
    LENGTHS_NONE,  /* 0 */
    LENGTHS_ONE,   /* 1 */
    LENGTHS_LONG,  /* 1 000 000 */
    LENGTHS_SAME,  /* 4096 */
    LENGTHS_DRAWN, /* 0 … 9000, some 0 */
    LENGTHS_WILD,  /* any 32 bits, clamped */
    LENGTHS_LAST,  /* 0 except the last: everything is in one request */
    LENGTHS_NEAR,  /* 8000 … 8192 */
    LENGTHS_VARY,  /* 2000 … 6000 */
    LENGTHS_KINDS
};

struct plan_case {
    struct plan_call call; /* 0 partitions: the device's suggestion; a target that is the CPU: no costs */
    enum lengths lengths;
    bool odd; /* lengths at an odd address */
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
    case LENGTHS_LAST: return request + 1 == c->call.b ? 1000000 : 0;
    default: return 0;
    }
}

/* Makes the plan's tables separately on the device; `args` are those of the plan there. */
static const char *tables_differ(struct plan_call args, const void *plan)
{
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    int32_t count = 0;
    if (fmla_plan_describe(plan, args.plan_size, &view) || plan_call_partitions(&args, &count) ||
        count != view.num_partitions)
        return "the number of partitions is another than the plan's";
    struct device_tables t;
    const char *wrong = NULL;
    device_tables_make(&t, count, args.b, 0xff);
    args.plan = NULL, args.plan_size = 0, args.partitions = &t.tensor[0], args.num_splits = &t.tensor[1];
    if (plan_call_run(&args)) wrong = fmla_last_error();
    device_wait(args.stream);
    if (!device_scratch_intact(&t.rows) || !device_scratch_intact(&t.splits))
        wrong = "bytes behind the tables were written";
    if (!wrong &&
        (!device_scratch_is(&t.rows, view.partitions) || !device_scratch_is(&t.splits, view.num_splits)))
        wrong = "the tables have other bits than those of the plan";
    device_scratch_free(&t.rows), device_scratch_free(&t.splits);
    return wrong;
}

/* The plan is made with different previous contents, also on the default stream. */
const char *plan_differs(const struct plan_call *call, struct guarded lengths[2], const void *plan,
                         size_t bytes)
{
    struct plan_call device = *call;
    struct device_blocks blocks = {0};
    struct device_scratch scratch;
    fmla_tensor there[2];
    const char *wrong = NULL;
    for (int k = 0; k < 2; k++) {
        if (!lengths[k].memory) continue;
        device_add_guarded(&blocks, &lengths[k]);
        *plan_call_length(&device, k) = device_tensor(&blocks, &lengths[k].tensor, &there[k]);
    }
    device_scratch_make(&scratch, bytes, 0xff);
    void *stream = device_stream_open();
    device.plan = scratch.memory, device.plan_size = bytes - 1;
    if (device_stress && plan_call_run(&device) != FMLA_BUFFER_TOO_SMALL)
        device_stress->wrong("memory for a plan that is too short by a byte was taken");
    if (plan_call_size(&device, &device.plan_size) || device.plan_size != bytes)
        wrong = "a plan on the device has another size than on the host";
    for (int fill = 0xff; !wrong && fill >= 0; fill -= 0xff) {
        device.stream = fill ? stream : NULL;
        device_scratch_fill(&scratch, fill);
        if (plan_call_run(&device)) {
            wrong = fmla_last_error();
            break;
        }
        device_wait(device.stream);
        if (!device_scratch_is(&scratch, plan)) wrong = "the device's plan has other bits than the host's";
    }
    if (!device_scratch_intact(&scratch)) wrong = "bytes behind the plan were written";
    device.stream = stream;
    if (!wrong) wrong = tables_differ(device, plan);
    gpu_stream_close(stream);
    device_scratch_free(&scratch);
    device_drop(&blocks, 0);
    return wrong;
}

/* Makes both plans of the lengths and frees the lengths; leaves the host's plan in *plan, freed by the
 * caller. */
static void run_call(const struct run *run, const struct plan_call *call, struct guarded lengths[2],
                     const char *name, struct tally *tally, void **plan, size_t *bytes)
{
    struct plan_call host = *call;
    struct guarded full = {0};
    tally->cases++;
    for (int k = 0; k < 2; k++)
        if (lengths[k].memory) *plan_call_length(&host, k) = &lengths[k].tensor;
    case_plan_on_host(&host, &full);
    const fmla_status status = plan_call_size(&host, &host.plan_size);
    *bytes = host.plan_size, *plan = host.plan = must_alloc(*bytes);
    const char *wrong =
        status || plan_call_run(&host) ? fmla_last_error() : plan_differs(call, lengths, *plan, *bytes);
    if (wrong) report(tally, run, name, wrong);
    tally->rows++;
    for (int k = 0; k < 2; k++) guarded_free(&lengths[k]);
    guarded_free(&full);
}

static void run_case(const struct run *run, const struct plan_case *c, uint64_t seed, struct tally *tally,
                     void **plan, size_t *bytes)
{
    const struct plan_call *call = &c->call;
    struct random_state random = {seed};
    struct guarded lengths[2] = {0};
    char name[160];
    snprintf(name, sizeof name, "b %lld, partitions %d, lengths %d, capacity %lld, rows %lld%s%s",
             (long long)call->b, call->num_partitions, (int)c->lengths, (long long)call->capacity,
             (long long)call->s_q * call->h_q, c->odd ? ", odd address" : "",
             call->target.device_type == FMLA_DEVICE_CPU ? ", for the CPU" : "");
    guarded_make(&lengths[0], dtype_i32, 1, &call->b, c->odd ? LAYOUT_ODD : LAYOUT_CONTIGUOUS);
    for (int64_t r = 0; r < call->b; r++)
        *(int32_t *)guarded_at(&lengths[0], r, 0, 0, 0) = length_of(c, r, &random);
    run_call(run, call, lengths, name, tally, plan, bytes);
}

/* Runs the case with the GPU's costs and without. Returns true if the two plans differ and have as many
 * partitions. */
static bool run_both(const struct run *run, struct plan_case *c, uint64_t seed, struct tally *tally)
{
    void *plan[2];
    size_t bytes[2];
    for (int i = 0; i < 2; i++) {
        c->call.target = i ? cpu : run->device;
        run_case(run, c, seed, tally, &plan[i], &bytes[i]);
    }
    const bool other = bytes[0] == bytes[1] && memcmp(plan[0], plan[1], bytes[0]);
    free(plan[0]), free(plan[1]);
    return other;
}

/* ---- For sparse decode ------------------------------------------------------------------------ */

/* Draws lengths between 0 and above `most`, some negative, since they are clamped. */
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

void check_sparse_plan(const struct run *run, struct tally *tally)
{
    static const int64_t batches[] = {0, 1, 2, 33, 128, 1024, 1025, 5000, 100000};
    static const int64_t topks[] = {0, 1, 63, 64, 65, 2048, 16384, INT32_MAX};
    static const int64_t extras[] = {0, 1, 64, 100, 1024, INT32_MAX};
    static const int32_t partitions[] = {0, 1, 3, 132, 1000};
    const int64_t all = 4 * COUNT_OF(batches) * COUNT_OF(topks) * COUNT_OF(extras),
                  most_cases = run->most_cases ? run->most_cases : all;
    for (int64_t n = 0; n < all && tally->cases < most_cases; n++) {
        const int64_t i = n / 4,
                      given = n % 4; /* bit mask: lengths given for the indices and for the extra ones */
        if (!wants_case(run, tally, (uint64_t)n + 1)) continue;
        const struct plan_call call = {.sparse = true,
                                       .b = batches[i % COUNT_OF(batches)],
                                       .s_q = 2,
                                       .h_q = 100,
                                       .topk = topks[i / COUNT_OF(batches) % COUNT_OF(topks)],
                                       .extra_topk = extras[i / COUNT_OF(batches) / COUNT_OF(topks)],
                                       .num_partitions = partitions[(i + given) % COUNT_OF(partitions)],
                                       .target = run->device};
        struct random_state random = {run->seed * 17 + (uint64_t)n};
        struct guarded lengths[2] = {0};
        char name[160];
        void *plan;
        size_t bytes;
        snprintf(name, sizeof name, "b %lld, topk %lld%s, extra %lld%s, partitions %d", (long long)call.b,
                 (long long)call.topk, given & 1 ? " at most" : "", (long long)call.extra_topk,
                 given & 2 ? " at most" : "", call.num_partitions);
        if (given & 1) draw_lengths(&lengths[0], call.b, call.topk, &random);
        if (given & 2) draw_lengths(&lengths[1], call.b, call.extra_topk, &random);
        run_call(run, &call, lengths, name, tally, &plan, &bytes);
        free(plan);
    }
}

void check_device_plan(const struct run *run, struct tally *tally)
{
    static const int64_t batches[] = {0,    1,    2,    3,    31,   32,    33,    128,   1000,
                                      1023, 1024, 1025, 2047, 4096, 10000, 65537, 100000};
    static const int32_t partitions[] = {0, 1, 3, 78, 132, 1000, 65536};
    enum { DRAWN = 400 };
    const int64_t grid = COUNT_OF(batches) * COUNT_OF(partitions) * LENGTHS_KINDS;
    struct random_state random = {run->seed};
    int64_t by_costs = 0;
    bool all = true;
    for (int64_t i = 0; i < grid + DRAWN; i++) {
        const bool wanted = wants_case(run, tally, (uint64_t)i + 1);
        struct plan_case c = {
            .call = {.b = batches[i % COUNT_OF(batches)], .h_kv = 1},
            .lengths = (enum lengths)(i / COUNT_OF(batches) / COUNT_OF(partitions) % LENGTHS_KINDS),
            .odd = i % 3 == 1};
        c.call.num_partitions = partitions[i / COUNT_OF(batches) % COUNT_OF(partitions)];
        if (i >= grid) {
            static const enum lengths drawn[] = {LENGTHS_DRAWN, LENGTHS_WILD, LENGTHS_SAME, LENGTHS_NEAR,
                                                 LENGTHS_VARY};
            static const int64_t most[] = {40, 300, 1024, 3000, 100000};
            c.call.b = random_between(&random, 0, most[random_between(&random, 0, 4)]);
            c.call.num_partitions =
                (int32_t)random_between(&random, 1, random_between(&random, 0, 1) ? 200 : 5000);
            c.lengths = drawn[random_between(&random, 0, 4)];
        }
        static const int64_t capacities[] = {0, 0, 4096, 70000}, heads[] = {16, 64, 128, 128};
        c.call.capacity = capacities[random_between(&random, 0, 3)];
        const int64_t rows = random_between(&random, 0, 3);
        c.call.h_q = heads[rows], c.call.s_q = rows == 3 ? 2 : 1;
        all = all && wanted;
        if (!wanted) continue; /* the random sequence stays the same */
        by_costs += run_both(run, &c, run->seed * 31 + (uint64_t)i, tally);
        if (run->most_cases && tally->cases >= run->most_cases) {
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
    tally->pairs = tally->covered = 0; /* every combination, unless limited */
}
