/* SPDX-License-Identifier: MIT
 *
 * Runs the work of the CPU back end, on the library's own threads or on the caller's.
 */
#ifndef FMLA_THREADS_H
#define FMLA_THREADS_H

#include "flashmla/flashmla.h"

/* How a call runs its work; read once at the start of the call. */
struct thread_pool {
    fmla_parallel_for run; /* the caller's loop; NULL: the built-in one */
    void *pool;
    int32_t workers;
};

struct thread_pool threads_now(void);
const char *threads_from(void); /* how the number of workers was chosen; static */
void threads_set_loop(fmla_parallel_for run, void *pool, int32_t workers); /* run = NULL: built-in loop */
void threads_set_count(int32_t n); /* built-in loop; 0 = OMP_NUM_THREADS, else all processors */

/* Starts the threads that the next call may use. */
void threads_prepare(void);

/* Returns how many threads are worth using for work that takes one thread that many nanoseconds: 1 to
 * pool->workers. A caller's loop always gets pool->workers. */
int32_t threads_worth(const struct thread_pool *pool, double nanoseconds);

/* Runs task(task_data, i, worker) for every i in [0, count), on as many threads as the total work is
 * worth. */
void threads_run(const struct thread_pool *pool, int64_t count, double nanoseconds, fmla_task task,
                 void *task_data);

#endif
