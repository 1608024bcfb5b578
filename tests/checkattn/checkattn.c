/* SPDX-License-Identifier: MIT
 *
 * checkattn: every kernel that the library lists for this machine, forced through the real dispatch, against
 * the oracle; then timed. Red when a result is off, when a pair of values of a grid was missed, when nothing
 * was tested, or when a listed kernel was not reached. --faults plants defects and is red when one goes
 * unseen.
 */
#include "checkattn.h"
#include "timing.h"

#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const fault_names[FAULTS] = {"none",          "dropped-key", "mask",      "swapped-page",
                                         "out-of-bounds", "gap",         "unwritten", "nan",
                                         "lse",           "unstable",    "merge-base"};

void report(struct tally *tally, const struct run *run, const char *where, const char *what)
{
    enum { SHOWN = 10 };
    tally->failed++;
    if (run->fault != FAULT_NONE && !run->verbose) return;
    if (tally->failed <= SHOWN) fprintf(stderr, "FAILED %s: %s\n       %s\n", run->kernel, where, what);
    if (tally->failed == SHOWN) fprintf(stderr, "       (further failures are counted, not shown)\n");
}

/* ---- A loop over threads of our own --------------------------------------------------------- */

struct loop {
    int64_t count;
    _Atomic int64_t next;
    fmla_task task;
    void *task_data;
};

struct loop_worker {
    struct loop *loop;
    int32_t number;
};

static void *loop_thread(void *data)
{
    const struct loop_worker *worker = data;
    struct loop *loop = worker->loop;
    for (int64_t i; (i = atomic_fetch_add(&loop->next, 1)) < loop->count;)
        loop->task(loop->task_data, i, worker->number);
    return NULL;
}

void pthread_for(void *pool, int64_t count, fmla_task task, void *task_data)
{
    (void)pool;
    struct loop loop = {.count = count, .task = task, .task_data = task_data};
    struct loop_worker workers[PTHREAD_WORKERS];
    pthread_t threads[PTHREAD_WORKERS];
    int started = 0;
    for (int i = 0; i < PTHREAD_WORKERS; i++) workers[i] = (struct loop_worker){&loop, i};
    for (int i = 1; i < PTHREAD_WORKERS && !pthread_create(&threads[i], NULL, loop_thread, &workers[i]); i++)
        started = i;
    loop_thread(&workers[0]);
    for (int i = 1; i <= started; i++) pthread_join(threads[i], NULL);
}

/* ---- The operations ------------------------------------------------------------------------- */

static const struct operation {
    const char *name;
    void (*check)(const struct run *run, struct tally *tally);
    void (*time)(const struct run *run);
} operations[] = {
    {"dense_decode", check_dense_decode, time_dense_decode},
    {"merge", check_merge, NULL},
};
enum { OPERATIONS = sizeof operations / sizeof operations[0] };

static const struct operation *operation_of(const char *name)
{
    for (int i = 0; i < OPERATIONS; i++)
        if (!strcmp(operations[i].name, name)) return &operations[i];
    return NULL;
}

/* Checks every listed kernel; returns how many failed. */
static int check_all(const struct run *like, const char *only_operation, const char *only_kernel, bool timed)
{
    int failed = 0, reached = 0;
    fmla_capability row = FMLA_INIT(fmla_capability);
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++) {
        if (row.forced_only || !row.kernel) continue;
        const struct operation *operation = operation_of(row.operation);
        if (!operation && strcmp(row.operation, "decode_plan") != 0) { /* that one: tests/unit/test_plan.c */
            printf("FAILED %s %s: there is no check of this operation\n", row.operation, row.kernel);
            failed++;
        }
        if (!operation || (only_operation && strcmp(only_operation, row.operation) != 0) ||
            (only_kernel && strcmp(only_kernel, row.kernel) != 0))
            continue;
        if (!row.available) {
            printf("- %s %s: not on this machine: %s\n", row.operation, row.kernel, row.reason);
            continue;
        }
        struct run run = *like;
        run.kernel = row.kernel, run.dtypes = row.dtypes;
        struct tally tally = {0};
        const double start = timing_now();
        operation->check(&run, &tally);
        reached++;
        const bool partial = run.most_cases > 0;
        const bool passed = tally.cases > 0 && tally.rows > 0 && tally.failed == 0 &&
                            (partial || tally.covered == tally.pairs);
        printf("%s %s %s: %lld cases, %lld rows against the oracle, %lld of %lld pairs of values, %lld "
               "failures, %.1f s\n",
               !passed   ? "FAILED"
               : partial ? "partial"
                         : "ok",
               row.operation, row.kernel, (long long)tally.cases, (long long)tally.rows,
               (long long)tally.covered, (long long)tally.pairs, (long long)tally.failed,
               timing_now() - start);
        printf("  largest cosine difference of a case: out %.1e, lse %.1e\n", tally.cosine_out,
               tally.cosine_lse);
        failed += !passed;
        if (timed && operation->time) operation->time(&run);
        fflush(stdout);
    }
    if (!reached) {
        fprintf(stderr, "checkattn: nothing was tested\n");
        return 1;
    }
    return failed;
}

/* Every planted defect must go red, and the same cases without one stay green (check_all says so). */
static int check_faults(uint64_t seed, bool verbose)
{
    int unseen = 0;
    for (int fault = FAULT_NONE + 1; fault < FAULTS; fault++) {
        const struct run run = {.kernel = "cpu-generic",
                                .dtypes = "bf16 fp16",
                                .seed = seed,
                                .fault = (enum fault)fault,
                                .verbose = verbose};
        struct tally tally = {0};
        if (fault == FAULT_MERGE_BASE)
            check_merge(&run, &tally);
        else
            check_dense_decode(&run, &tally);
        const bool seen = tally.planted && tally.failed > 0;
        printf("%s fault %s: %s\n", seen ? "ok" : "FAILED", fault_names[fault],
               seen            ? "seen"
               : tally.planted ? "planted, and not seen"
                               : "found no place to be planted");
        unseen += !seen;
    }
    return unseen;
}

static int usage(FILE *to, int status)
{
    fputs("usage: checkattn [--seed N] [--op OPERATION] [--kernel NAME] [--no-time] [--threads own] [--cases "
          "N]\n"
          "       checkattn --faults [--seed N] [--verbose]\n"
          "Compares every kernel of this machine with the oracle. --faults: planted defects must go red.\n"
          "--threads own: no OpenMP, for tools that do not see into it. --cases N: at most N cases a kernel; "
          "that\n"
          "is no full test, and says so.\n"
          "Exit: 0 all passed, 1 something failed, 2 wrong usage.\n",
          to);
    return status;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"seed", required_argument, NULL, 's'},   {"op", required_argument, NULL, 'o'},
        {"kernel", required_argument, NULL, 'k'}, {"no-time", no_argument, NULL, 'n'},
        {"faults", no_argument, NULL, 'f'},       {"verbose", no_argument, NULL, 'v'},
        {"help", no_argument, NULL, 'h'},         {"threads", required_argument, NULL, 't'},
        {"cases", required_argument, NULL, 'c'},  {NULL, 0, NULL, 0}};
    struct run like = {.seed = 1};
    const char *operation = NULL, *kernel = NULL;
    bool timed = true, faults = false, verbose = false;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        char *end;
        switch (option) {
        case 's':
            errno = 0;
            like.seed = strtoull(optarg, &end, 10);
            if (errno || *end || end == optarg) return usage(stderr, 2);
            break;
        case 'c':
            errno = 0;
            like.most_cases = strtoll(optarg, &end, 10);
            if (errno || *end || end == optarg || like.most_cases < 1) return usage(stderr, 2);
            break;
        case 't':
            if (strcmp(optarg, "own") != 0) return usage(stderr, 2);
            like.own_threads = true;
            break;
        case 'o': operation = optarg; break;
        case 'k': kernel = optarg; break;
        case 'n': timed = false; break;
        case 'f': faults = true; break;
        case 'v': verbose = true; break;
        case 'h': return usage(stdout, 0);
        default: return usage(stderr, 2);
        }
    }
    if (optind < argc || (faults && (like.most_cases || like.own_threads))) return usage(stderr, 2);
    if (like.own_threads) {
        timed = false;
        fmla_set_parallel_for(pthread_for, NULL, PTHREAD_WORKERS);
    }
    printf("checkattn: flashmla %s, seed %llu, %d threads\n", fmla_version_string(),
           (unsigned long long)like.seed, fmla_num_threads());
    const int failed = faults ? check_faults(like.seed, verbose) : check_all(&like, operation, kernel, timed);
    printf("checkattn: %s\n", failed            ? "FAILED"
                              : like.most_cases ? "passed in part; not every pair of values was asked for"
                                                : "all passed");
    return failed ? 1 : 0;
}
