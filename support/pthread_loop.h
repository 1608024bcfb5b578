/* SPDX-License-Identifier: MIT
 *
 * A parallel loop that a host could have (fmla_set_parallel_for): threads that take one index after the other.
 */
#ifndef FMLA_SUPPORT_PTHREAD_LOOP_H
#define FMLA_SUPPORT_PTHREAD_LOOP_H

#include "flashmla/flashmla.h"

#include <pthread.h>
#include <stdatomic.h>

enum { PTHREAD_LOOP_MOST = 64 /* workers */ };

struct pthread_loop {
    int64_t count;
    _Atomic int64_t next;
    fmla_task task;
    void *task_data;
};

struct pthread_loop_worker {
    struct pthread_loop *loop;
    int32_t number;
};

static inline void *pthread_loop_work(void *data)
{
    const struct pthread_loop_worker *worker = data;
    struct pthread_loop *loop = worker->loop;
    for (int64_t i; (i = atomic_fetch_add(&loop->next, 1)) < loop->count;)
        loop->task(loop->task_data, i, worker->number);
    return NULL;
}

/* Runs the loop on so many workers, of which the caller is one, or on those that could be started. */
static inline void pthread_loop_run(int count_of_workers, int64_t count, fmla_task task, void *task_data)
{
    struct pthread_loop loop = {.count = count, .task = task, .task_data = task_data};
    struct pthread_loop_worker workers[PTHREAD_LOOP_MOST] = {{&loop, 0}};
    pthread_t threads[PTHREAD_LOOP_MOST];
    int started = 0;
    for (int i = 1; i < count_of_workers; i++) workers[i] = (struct pthread_loop_worker){&loop, i};
    for (int i = 1; i < count_of_workers; i++, started++)
        if (pthread_create(&threads[i], NULL, pthread_loop_work, &workers[i])) break;
    pthread_loop_work(&workers[0]);
    for (int i = 1; i <= started; i++) pthread_join(threads[i], NULL);
}

#endif
