/* SPDX-License-Identifier: MIT
 *
 * The loop over threads. The caller of a loop takes part in it and waits for nothing but pieces that were begun: a helper
 * that the system gives no processor to begins none, so on a busy machine a call takes no longer than on one thread. A loop
 * that ends with a barrier of all threads, as OpenMP's do, has to wait there for each of them, and turns a call of 50 us
 * into one of many milliseconds.
 *
 * Two cases are left: a helper that loses its processor in the middle of a piece, and one that is put on the caller's
 * processor, which both then share with what else runs there. Where helpers come late or are waited for, small loops run
 * alone for a while.
 *
 * Helpers belong to the process; loops of several host threads share them. They are started when a loop first wants them,
 * and stay. Where one cannot be started, the loop does without.
 */
#define _GNU_SOURCE /* sched_getaffinity, sched_setaffinity */
#include "threads.h"

#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { MOST_THREADS = 4096 };

/* What pays for one more: to wake a helper takes some 10 us of the caller's time, and 40 us until the helper begins. */
enum { NANOSECONDS_OF_A_THREAD = 50000 };

/* How often a waiting thread looks before it sleeps: some 20 us. A call has up to two loops, and layers follow each other. */
enum { LOOKS = 400 };

/* In nanoseconds. The machine is busy where no helper came in that much of the callers' work, in one loop or several: a
 * processor that slept is there in less. Or where a caller waited so long for helpers, and longer than it had worked. */
enum { LATE = 250000, LONG_WAIT = 1000000 };

/* Which loops then run alone, by what they take one thread, and how long. A helper that shares the processor of its caller
 * costs it about a turn of the scheduler, 4 ms or so. */
enum { SMALL_LOOP = 10000000, ALONE = 100000000 };

/* A loop that runs, on the stack of its caller. */
struct loop {
    struct loop *next;
    fmla_task task;
    void *task_data;
    int64_t count;
    int32_t wanted;        /* helpers that may still join */
    int32_t joined;        /* the last worker number given; the caller has 0 */
    _Atomic int64_t came;  /* when the first helper joined; 0: none has */
    atomic_int inside;     /* helpers that work on it; after the last one left, `loop` is gone */
    _Atomic int64_t begun; /* pieces */
    fenv_t environment;    /* the caller's rounding, which helpers take over */
};

/* One mutex guards all of this, so that fork has one to take. */
static struct {
    pthread_mutex_t mutex;
    pthread_cond_t wanted;      /* helpers wait for a loop */
    pthread_cond_t left;        /* callers wait until the helpers have left */
    struct loop *loops;         /* that want helpers, the oldest first */
    _Atomic(int32_t) queued;    /* how many they are */
    int32_t helpers;            /* threads that were started */
    bool forks;                 /* what fork needs is arranged */
    struct thread_pool custom;  /* run = NULL: none */
    int32_t threads;            /* of the built-in loop; 0 = `automatic` */
    _Atomic(int32_t) automatic; /* 0: not known yet */
} state = {
    .mutex = PTHREAD_MUTEX_INITIALIZER, .wanted = PTHREAD_COND_INITIALIZER, .left = PTHREAD_COND_INITIALIZER};

/* What is known of the machine's other load. */
static struct {
    _Atomic int64_t
        missed; /* nanoseconds of work since a helper came last; loops that ran alone do not count */
    _Atomic int64_t until; /* when small loops may have helpers again; 0: now */
} busy;

/* ---- fork ----------------------------------------------------------------------------------- */

/* A child has the thread that forked and no other: no helper, and no loop but what the forking thread may be running with
 * a loop of the caller's, which is not here. Its calls start helpers of its own. As fork takes the mutex, no other thread
 * is at work on this state meanwhile; condition variables remember who waits, so they are made anew. The number of threads
 * stays, and with it the bits of results. */
static void before_fork(void)
{
    pthread_mutex_lock(&state.mutex);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&state.mutex);
}

static void after_fork_in_child(void)
{
    state.loops = NULL;
    atomic_store(&state.queued, 0);
    state.helpers = 0;
    state.wanted = state.left = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pthread_mutex_unlock(&state.mutex);
}

/* When the library is loaded: later, a fork could find the mutex taken. */
__attribute__((constructor)) static void arrange_forks(void)
{
    state.forks = !pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* ---- Settings ------------------------------------------------------------------------------- */

/* How many processors the process may run on, by the mask of its first thread: that of the calling one may be narrower, as
 * engines pin their threads. With `take` the calling thread takes that mask. 0: it is not known. */
static int32_t processors_of_process(bool take)
{
    /* Helpers in a child of fork had better not ask for memory: not every malloc survives a fork. */
    cpu_set_t usual;
    CPU_ZERO(&usual);
    for (int most = CPU_SETSIZE; most <= 1 << 20; most *= 2) {
        cpu_set_t *set = most == CPU_SETSIZE ? &usual : CPU_ALLOC(most);
        if (!set) break;
        const size_t size = CPU_ALLOC_SIZE(most);
        const int failed = sched_getaffinity(getpid(), size, set);
        const int why = errno, count = failed ? 0 : CPU_COUNT_S(size, set);
        if (count > 0 && take) sched_setaffinity(0, size, set);
        if (set != &usual) CPU_FREE(set);
        if (count > 0) return count;
        if (why != EINVAL) break; /* EINVAL: the machine may have more */
    }
    return 0;
}

static int32_t processors(void)
{
    const int32_t count = processors_of_process(false);
    if (count > 0) return count < MOST_THREADS ? count : MOST_THREADS;
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online < 1 ? 1 : online < MOST_THREADS ? (int32_t)online : MOST_THREADS;
}

/* OMP_NUM_THREADS is what users of numerical libraries set. It may be a list, whose first number is that of the outer
 * level. */
static int32_t automatic_threads(void)
{
    const char *text = getenv("OMP_NUM_THREADS");
    if (text) {
        char *end;
        const long number = strtol(text, &end, 10);
        while (*end == ' ' || *end == '\t') end++;
        if (end != text && number > 0 && (!*end || *end == ','))
            return number < MOST_THREADS ? (int32_t)number : MOST_THREADS;
    }
    return processors();
}

struct thread_pool threads_now(void)
{
    if (!atomic_load(&state.automatic)) atomic_store(&state.automatic, automatic_threads());
    pthread_mutex_lock(&state.mutex);
    const int32_t threads = state.threads ? state.threads : atomic_load(&state.automatic);
    const struct thread_pool now =
        state.custom.run ? state.custom : (struct thread_pool){NULL, NULL, threads};
    pthread_mutex_unlock(&state.mutex);
    return now;
}

void threads_set_loop(fmla_parallel_for run, void *pool, int32_t workers)
{
    pthread_mutex_lock(&state.mutex);
    state.custom = (struct thread_pool){run, pool, workers};
    pthread_mutex_unlock(&state.mutex);
}

void threads_set_count(int32_t n)
{
    pthread_mutex_lock(&state.mutex);
    state.threads = n;
    pthread_mutex_unlock(&state.mutex);
}

/* ---- Helpers -------------------------------------------------------------------------------- */

static int64_t nanoseconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void look_again_soon(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Pieces differ in length, so they are handed out as threads come free: each writes to places of its own, and who runs a
 * piece does not show in the result. */
static void run_pieces(struct loop *loop, int32_t worker)
{
    for (int64_t i; (i = atomic_fetch_add(&loop->begun, 1)) < loop->count;)
        loop->task(loop->task_data, i, worker);
}

/* With the mutex. */
static void leave_queue(struct loop *loop)
{
    for (struct loop **at = &state.loops; *at; at = &(*at)->next)
        if (*at == loop) {
            *at = loop->next;
            atomic_fetch_sub(&state.queued, 1);
            return;
        }
}

/* Who joins wakes two more, so that no thread has to wake many. */
static void wake(int32_t wanted)
{
    if (wanted > 0) pthread_cond_signal(&state.wanted);
    if (wanted > 1) pthread_cond_signal(&state.wanted);
}

static void *help(void *unused)
{
    (void)unused;
    processors_of_process(true);
    pthread_mutex_lock(&state.mutex);
    for (;;) {
        struct loop *loop = state.loops;
        if (!loop) {
            pthread_mutex_unlock(&state.mutex);
            for (int i = 0; i < LOOKS && !atomic_load(&state.queued); i++) look_again_soon();
            pthread_mutex_lock(&state.mutex);
            if (!state.loops) pthread_cond_wait(&state.wanted, &state.mutex);
            continue;
        }
        const int32_t worker = ++loop->joined, wanted = --loop->wanted;
        if (worker == 1) atomic_store(&loop->came, nanoseconds_now());
        if (!wanted) leave_queue(loop);
        atomic_fetch_add(&loop->inside, 1);
        pthread_mutex_unlock(&state.mutex);
        wake(wanted);
        fesetenv(&loop->environment);
        run_pieces(loop, worker);
        pthread_mutex_lock(&state.mutex);
        if (atomic_fetch_sub(&loop->inside, 1) == 1) pthread_cond_broadcast(&state.left);
    }
    return NULL;
}

/* With the mutex. Signals are left to the host's own threads, but for those of a fault, which come where it is made: blocked,
 * they would kill the process in place of reaching the host's handler. */
static void start_helpers(int32_t helpers)
{
    if (state.helpers >= helpers || !state.forks) return;
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigset_t all, before;
    pthread_attr_t detached;
    if (pthread_attr_init(&detached)) return;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&all, faults[i]);
    if (!pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED) &&
        !pthread_sigmask(SIG_SETMASK, &all, &before)) {
        pthread_t thread;
        while (state.helpers < helpers && !pthread_create(&thread, &detached, help, NULL)) state.helpers++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_attr_destroy(&detached);
}

void threads_prepare(void)
{
    const struct thread_pool now = threads_now();
    if (now.run) return;
    pthread_mutex_lock(&state.mutex);
    start_helpers(now.workers - 1);
    pthread_mutex_unlock(&state.mutex);
}

/* ---- The loop ------------------------------------------------------------------------------- */

static bool better_alone(double nanoseconds)
{
    const int64_t until = atomic_load(&busy.until);
    if (!until || nanoseconds >= SMALL_LOOP) return false;
    if (nanoseconds_now() < until) return true;
    atomic_store(&busy.until, 0);
    return false;
}

/* The caller of a loop worked on it from `begin` to `end`, and then waited for helpers. */
static void note_load(const struct loop *loop, int64_t begin, int64_t end, int64_t waited)
{
    const int64_t came = atomic_load(&loop->came);
    /* A helper takes a while to come to on an idle machine, too. */
    const int64_t without = (came && came < end ? came : end) - begin - NANOSECONDS_OF_A_THREAD;
    const int64_t missed = atomic_load(&busy.missed) + (without > 0 ? without : 0);
    const bool late = missed >= LATE;
    atomic_store(&busy.missed, came || late ? 0 : missed);
    if (late || (waited >= LONG_WAIT && waited >= end - begin))
        atomic_store(&busy.until, nanoseconds_now() + ALONE);
}

int32_t threads_worth(const struct thread_pool *pool, double nanoseconds)
{
    const double threads = nanoseconds / NANOSECONDS_OF_A_THREAD;
    if (pool->run) return pool->workers;
    if (threads < 2 || better_alone(nanoseconds)) return 1;
    return threads < pool->workers ? (int32_t)threads : pool->workers;
}

static void run_with_helpers(int32_t helpers, int64_t count, fmla_task task, void *task_data)
{
    struct loop loop = {.task = task, .task_data = task_data, .count = count, .wanted = helpers};
    fegetenv(&loop.environment);
    const int64_t begin = nanoseconds_now();
    pthread_mutex_lock(&state.mutex);
    start_helpers(helpers);
    struct loop **last = &state.loops;
    while (*last) last = &(*last)->next;
    *last = &loop;
    atomic_fetch_add(&state.queued, 1);
    pthread_mutex_unlock(&state.mutex);
    wake(helpers);
    run_pieces(&loop, 0);
    const int64_t end = nanoseconds_now();

    pthread_mutex_lock(&state.mutex);
    leave_queue(&loop);
    pthread_mutex_unlock(&state.mutex);
    for (int i = 0; i < LOOKS && atomic_load(&loop.inside); i++) look_again_soon();
    int64_t waited = 0;
    if (atomic_load(&loop.inside)) {
        pthread_mutex_lock(&state.mutex);
        while (atomic_load(&loop.inside)) pthread_cond_wait(&state.left, &state.mutex);
        pthread_mutex_unlock(&state.mutex);
        waited = nanoseconds_now() - end;
    }
    note_load(&loop, begin, end, waited);
}

void threads_run(const struct thread_pool *pool, int64_t count, double nanoseconds, fmla_task task,
                 void *task_data)
{
    if (pool->run) {
        pool->run(pool->pool, count, task, task_data);
        return;
    }
    int64_t threads = threads_worth(pool, nanoseconds);
    if (threads > count) threads = count;
    if (threads > 1)
        run_with_helpers((int32_t)threads - 1, count, task, task_data);
    else
        for (int64_t i = 0; i < count; i++) task(task_data, i, 0);
}
