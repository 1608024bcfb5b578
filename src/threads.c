/* SPDX-License-Identifier: MIT */
#include "threads.h"

#include <omp.h>
#include <pthread.h>

static struct {
    pthread_mutex_t mutex;
    struct thread_pool custom; /* run = NULL: none */
    int32_t threads;           /* of the built-in loop; 0 = OpenMP's choice */
} setting = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* Pieces differ in length, so they are handed out as threads come free: each writes to places of its own, and
 * who runs a piece does not show in the result. `pool` carries the number of threads. */
static void openmp_for(void *pool, int64_t count, fmla_task task, void *task_data)
{
    const int threads = (int)(intptr_t)pool;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < count; i++) task(task_data, i, omp_get_thread_num());
}

struct thread_pool threads_now(void)
{
    pthread_mutex_lock(&setting.mutex);
    const struct thread_pool custom = setting.custom;
    int32_t threads = setting.threads;
    pthread_mutex_unlock(&setting.mutex);
    if (custom.run) return custom;
    if (!threads) threads = omp_get_max_threads();
    return (struct thread_pool){openmp_for, (void *)(intptr_t)threads, threads};
}

void threads_set_loop(fmla_parallel_for run, void *pool, int32_t workers)
{
    pthread_mutex_lock(&setting.mutex);
    setting.custom = (struct thread_pool){run, pool, workers};
    pthread_mutex_unlock(&setting.mutex);
}

void threads_set_count(int32_t n)
{
    pthread_mutex_lock(&setting.mutex);
    setting.threads = n;
    pthread_mutex_unlock(&setting.mutex);
}
