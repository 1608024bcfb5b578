/* SPDX-License-Identifier: MIT
 *
 * Who runs the work of the CPU back end: the built-in OpenMP loop, or the caller's threads.
 */
#ifndef FMLA_THREADS_H
#define FMLA_THREADS_H

#include "flashmla/flashmla.h"

/* How the calls that start now run their work; taken once at the start of a call. */
struct thread_pool {
    fmla_parallel_for run;
    void *pool;
    int32_t workers;
};

struct thread_pool threads_now(void);
void threads_set_loop(fmla_parallel_for run, void *pool, int32_t workers); /* run = NULL: the built-in loop */
void threads_set_count(int32_t n); /* of the built-in loop; 0 = OpenMP's choice */

#endif
