/* SPDX-License-Identifier: MIT
 *
 * Work on threads of our own, and a parallel loop that a host could have (fmla_set_parallel_for): threads
 * that take one index after the other.
 */
#ifndef FMLA_SUPPORT_PTHREAD_LOOP_H
#define FMLA_SUPPORT_PTHREAD_LOOP_H

#include "flashmla/flashmla.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

struct pthread_share {
    pthread_t thread;
    void (*work)(void *data, int index);
    void *data;
    int index;
};

static inline void *pthread_share_run(void *data)
{
    const struct pthread_share *share = data;
    share->work(share->data, share->index);
    return NULL;
}

/* Runs work(data, i) for i in [0, threads), each on its own thread; the caller runs the first, and those for
 * which no thread could be started. */
static inline void pthread_each(int threads, void (*work)(void *data, int index), void *data)
{
    struct pthread_share *shares = calloc((size_t)threads, sizeof *shares);
    int begun = 1;
    for (; shares && begun < threads; begun++) {
        shares[begun] = (struct pthread_share){.work = work, .data = data, .index = begun};
        if (pthread_create(&shares[begun].thread, NULL, pthread_share_run, &shares[begun])) break;
    }
    work(data, 0);
    for (int i = begun; i < threads; i++) work(data, i);
    for (int i = 1; i < begun; i++) pthread_join(shares[i].thread, NULL);
    free(shares);
}

struct pthread_loop {
    int64_t count;
    _Atomic int64_t next;
    fmla_task task;
    void *task_data;
};

static inline void pthread_loop_work(void *data, int worker)
{
    struct pthread_loop *loop = data;
    for (int64_t i; (i = atomic_fetch_add(&loop->next, 1)) < loop->count;)
        loop->task(loop->task_data, i, worker);
}

/* Runs the loop on so many workers, of which the caller is one, or on those that could be started. */
static inline void pthread_loop_run(int count_of_workers, int64_t count, fmla_task task, void *task_data)
{
    struct pthread_loop loop = {.count = count, .task = task, .task_data = task_data};
    pthread_each(count_of_workers, pthread_loop_work, &loop);
}

#endif
