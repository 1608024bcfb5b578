/* SPDX-License-Identifier: MIT
 *
 * A host program with 64 concurrent callers: dense and sparse decode with separate workspaces and shared
 * plans, sparse prefill, MHA, merge, failing calls and capabilities, while another thread changes the
 * number of threads and the parallel loop. Every result has the bits of the same call made alone.
 */
#include "calls.h"
#include "pthread_loop.h"

#include <stdatomic.h>

enum { THREADS = 64, ROUNDS = 6, MOST_WORKERS = 4 };

static void two_threads(void *pool, int64_t count, fmla_task task, void *task_data)
{
    (void)pool;
    pthread_loop_run(2, count, task, task_data);
}

/* ---- The host program ----------------------------------------------------------------------- */

static struct caller {
    pthread_t thread;
    int32_t number;
    struct result first, next;
    char wrong[600]; /* error text; CHECK is for one thread only */
} callers[THREADS];

static pthread_barrier_t barrier;
static struct result plans;
static struct way common; /* each thread adds its own workspace */
static int32_t one = 1;   /* one worker */
static atomic_int calling = THREADS;

#define WRONG(...) snprintf(caller->wrong, sizeof caller->wrong, __VA_ARGS__)

static void call_round(struct caller *caller, const struct way *way, struct result *result)
{
    fmla_capability row = FMLA_INIT(fmla_capability);
    char expected[96];
    const char *const failed = call_all(result, way);
    if (failed) WRONG("%s: %s", failed, fmla_last_error());
    if (fmla_capabilities(cpu, 0, &row) || !row.available) WRONG("capabilities: %s", fmla_last_error());
    /* A failure specific to this thread must give its own message. */
    snprintf(expected, sizeof expected, "set_num_threads: n: is %d, must", -1 - caller->number);
    if (fmla_set_num_threads(-1 - caller->number) != FMLA_INVALID_ARGUMENT ||
        strncmp(fmla_last_error(), expected, strlen(expected)) != 0)
        WRONG("last error: %.200s", fmla_last_error());
    if (fmla_num_threads() < 1) WRONG("%d threads", fmla_num_threads());
}

static void *call(void *data)
{
    struct caller *caller = data;
    fmla_capability row = FMLA_INIT(fmla_capability);
    pthread_barrier_wait(&barrier); /* all threads use the library first at the same time */
    if (fmla_capabilities(cpu, 0, &row) || strcmp(row.operation, "decode_plan") != 0) WRONG("the first row");
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier); /* the plan is made */
    struct way way = common;
    way.workspace = aligned_alloc(64, (way.workspace_size + 63) / 64 * 64);
    if (!way.workspace) abort();
    for (int round = 0; round < ROUNDS && !*caller->wrong; round++) {
        call_round(caller, &way, round ? &caller->next : &caller->first);
        if (round && memcmp(&caller->first, &caller->next, sizeof caller->first) != 0)
            WRONG("round %d has other bits than the first", round);
    }
    free(way.workspace);
    atomic_fetch_sub(&calling, 1);
    return NULL;
}

/* Never sets more workers than the workspaces allow. */
static void change_settings(void)
{
    while (atomic_load(&calling) > 0) {
        CHECK_OK(fmla_set_parallel_for(two_threads, NULL, 2));
        CHECK_OK(fmla_set_num_threads(1));
        CHECK_OK(fmla_set_parallel_for(in_order, &one, 1));
        CHECK_OK(fmla_set_num_threads(2));
        CHECK_OK(fmla_set_parallel_for(NULL, NULL, 0));
        sched_yield();
    }
}

int main(void)
{
    static struct result alone;
    unsetenv("FLASHMLA_KERNEL");
    draw();
    if (pthread_barrier_init(&barrier, NULL, THREADS + 1)) abort();
    for (int i = 0; i < THREADS; i++) {
        callers[i].number = i;
        if (pthread_create(&callers[i].thread, NULL, call, &callers[i])) abort();
    }
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    CHECK_OK(make_plans(&plans));
    CHECK_OK(fmla_set_parallel_for(in_order, &one, MOST_WORKERS));
    CHECK_OK(fmla_set_num_threads(2));
    common = way_of_all(&plans);
    pthread_barrier_wait(&barrier);
    change_settings();
    for (int i = 0; i < THREADS; i++) pthread_join(callers[i].thread, NULL);

    CHECK_OK(fmla_set_parallel_for(in_order, &one, 1));
    CHECK(!call_all(&alone, &common), "%s", fmla_last_error());
    int64_t nothing = 0; /* request 1 sees only the second cache */
    const uint16_t *const out =
        (const void *)(alone.bytes + made[SPARSE_DECODE].at[TENSOR_sparse_decode_out]);
    const int64_t values = elements_of(&made[SPARSE_DECODE].held[TENSOR_sparse_decode_out]);
    for (int64_t i = 0; i < values; i++) nothing += !(out[i] & 0x7fff);
    CHECK(nothing < values / 10, "%" PRId64 " values of sparse decode are 0", nothing);
    for (int i = 0; i < THREADS; i++) {
        CHECK(!*callers[i].wrong, "thread %d: %s", i, callers[i].wrong);
        CHECK(!memcmp(&alone, &callers[i].first, sizeof alone), "thread %d has other bits than alone", i);
    }
    free(common.workspace);
    return check_done("test_concurrent");
}
