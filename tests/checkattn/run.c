/* SPDX-License-Identifier: MIT
 *
 * Shared by all checks: command-line words, reports, and the threads of calls.
 */
#include "case.h"
#include "pthread_loop.h"

#include <errno.h>
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

/* ---- Threads --------------------------------------------------------------------------------- */

void pthread_for(void *pool, int64_t count, fmla_task task, void *task_data)
{
    (void)pool;
    pthread_loop_run(PTHREAD_WORKERS, count, task, task_data);
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
    pthread_loop_run((int)(processors < count ? processors : count), count, task, task_data);
}
