/* SPDX-License-Identifier: MIT
 *
 * Who runs the work of the CPU back end: the library's own threads, or the caller's.
 */
#ifndef FMLA_THREADS_H
#define FMLA_THREADS_H

#include "flashmla/flashmla.h"

/* How the calls that start now run their work; taken once at the start of a call. */
struct thread_pool {
    fmla_parallel_for run; /* the caller's loop; NULL: the built-in one */
    void *pool;
    int32_t workers;
};

struct thread_pool threads_now(void);
void threads_set_loop(fmla_parallel_for run, void *pool, int32_t workers); /* run = NULL: the built-in loop */
void threads_set_count(int32_t n); /* of the built-in loop; 0 = OMP_NUM_THREADS, else all processors */

/* Starts ahead the threads that the next call may use. */
void threads_prepare(void);

/* How many threads work pays for that takes one of them so many nanoseconds: 1 to pool->workers. A caller's loop is given
 * all of it, whatever it is. */
int32_t threads_worth(const struct thread_pool *pool, double nanoseconds);

/* Runs task(task_data, i, worker) for every i in [0, count), on as many threads as all of it together pays for. */
void threads_run(const struct thread_pool *pool, int64_t count, double nanoseconds, fmla_task task,
                 void *task_data);

#endif
