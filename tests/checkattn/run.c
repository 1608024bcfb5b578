/* SPDX-License-Identifier: MIT
 *
 * Shared by all checks: command-line words, reports, and the threads of calls.
 */
#include "case.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define FAULT_TEXT(name, text) text,
const char *const fault_names[FAULTS] = {FAULTS_OF(FAULT_TEXT)};

/* Defined in the file of the operation's cases; without that file its address is NULL. */
#define OPERATION(op, OP) extern struct subject op __attribute__((weak));
#include "operations.def"

struct subject *const subjects[OPERATIONS] = {
#define OPERATION(op, OP) &(op),
#include "operations.def"
};

void report(struct tally *tally, const struct run *run, const char *where, const char *what)
{
    enum { SHOWN = 10 };
    tally->failed++;
    if (run->fault != FAULT_NONE && !run->verbose) return;
    char number[32] = "";
    if (tally->number) snprintf(number, sizeof number, "case %lld: ", (long long)tally->number);
    if (tally->failed <= SHOWN)
        fprintf(stderr, "FAILED %s: %s%s\n       %s\n", run->kernel, number, where, what);
    if (tally->failed == SHOWN) fprintf(stderr, "       (further failures are counted, not shown)\n");
}

bool read_number(const char *text, uint64_t least, uint64_t most, uint64_t *number)
{
    char *end;
    errno = 0;
    *number = strtoull(text, &end, 10);
    return !errno && !*end && end != text && *number >= least && *number <= most && *text != '-';
}

bool read_device(const char *text, fmla_device *device)
{
    uint64_t id = 0;
    const bool cuda = !strncmp(text, "cuda:", 5);
    if (!cuda && strcmp(text, "cpu") != 0) return false;
    if (cuda && !read_number(text + 5, 0, INT32_MAX, &id)) return false;
    *device = (fmla_device){cuda ? FMLA_DEVICE_CUDA : FMLA_DEVICE_CPU, (int32_t)id};
    return true;
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

enum { MOST_WORKERS = 64 };

static void run_loop(int count_of_workers, int64_t count, fmla_task task, void *task_data)
{
    struct loop loop = {.count = count, .task = task, .task_data = task_data};
    struct loop_worker workers[MOST_WORKERS] = {{&loop, 0}};
    pthread_t threads[MOST_WORKERS];
    int started = 0;
    for (int i = 1; i < count_of_workers; i++) workers[i] = (struct loop_worker){&loop, i};
    for (int i = 1; i < count_of_workers && !pthread_create(&threads[i], NULL, loop_thread, &workers[i]); i++)
        started = i;
    loop_thread(&workers[0]);
    for (int i = 1; i <= started; i++) pthread_join(threads[i], NULL);
}

void pthread_for(void *pool, int64_t count, fmla_task task, void *task_data)
{
    (void)pool;
    run_loop(PTHREAD_WORKERS, count, task, task_data);
}

void use_threads(const struct run *run, int64_t threads)
{
    if (run->keep_threads) return;
    fmla_set_parallel_for(run->own_threads || threads == THREADS_OWN ? pthread_for : NULL, NULL,
                          PTHREAD_WORKERS);
    fmla_set_num_threads(threads == THREADS_ONE ? 1 : 0);
}

void for_rows(const struct run *run, int64_t count, fmla_task task, void *task_data)
{
    if (run->keep_threads) {
        for (int64_t i = 0; i < count; i++) task(task_data, i, 0);
        return;
    }
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    const int64_t workers = processors < 1 ? 1 : processors < MOST_WORKERS ? processors : MOST_WORKERS;
    run_loop((int)(workers < count ? workers : count > 0 ? count : 1), count, task, task_data);
}
