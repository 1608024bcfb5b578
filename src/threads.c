/* SPDX-License-Identifier: MIT
 *
 * The parallel loop of the CPU back end. The caller of a loop takes part in it and waits only for items that
 * have begun. A helper thread that gets no processor begins no item, so on a busy machine a call takes no
 * longer than on one thread. A loop that ends with a barrier of all threads, as in OpenMP, must wait for each
 * of them, which turns a call of 50 us into one of many milliseconds.
 *
 * Two cases remain: a helper that is preempted in the middle of an item, and a helper that is scheduled on
 * the caller's processor. If helpers come late or are waited for, small loops run alone for a while.
 *
 * Helpers belong to the process and are shared by the loops of all host threads. They are started when a loop
 * first needs them, and stay. If one cannot be started, the loop runs without it.
 */
#define _GNU_SOURCE /* sched_getaffinity, sched_setaffinity */
#include "threads.h"

#include "quota.h"

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

/* The work that justifies one more thread, in nanoseconds: waking a helper takes about 10 us of the caller's
 * time, and the helper begins after 40 us. */
enum { NANOSECONDS_OF_A_THREAD = 50000 };

/* Polls of a waiting thread before it sleeps, about 20 us: a call has up to two loops, and layers follow each
 * other. */
enum { LOOKS = 400 };

/* In nanoseconds. The machine counts as busy if no helper joined during LATE of the callers' work, in one
 * loop or several (a sleeping processor wakes up sooner), or if a caller waited LONG_WAIT for helpers and
 * longer than it had worked. */
enum { LATE = 250000, LONG_WAIT = 1000000 };

/* In nanoseconds. On a busy machine, loops whose work takes one thread less than SMALL_LOOP run alone for
 * ALONE. A helper that shares its caller's processor costs the caller about one scheduler turn, about 4
 * ms. */
enum { SMALL_LOOP = 10000000, ALONE = 100000000 };

/* A loop in progress, on the stack of its caller. */
struct loop {
    struct loop *next;
    fmla_task task;
    void *task_data;
    int64_t count;
    int32_t wanted;        /* helpers that may still join */
    int32_t joined;        /* the last worker number given out; the caller has 0 */
    _Atomic int64_t came;  /* when the first helper joined; 0: none joined */
    atomic_int inside;     /* helpers in the loop; once the last one left, the struct may be gone */
    _Atomic int64_t begun; /* items */
    fenv_t environment;    /* the caller's rounding mode, which helpers adopt */
};

/* One mutex guards all of this, so that fork takes only one. */
static struct {
    pthread_mutex_t mutex;
    pthread_cond_t wanted;      /* helpers wait for a loop */
    pthread_cond_t left;        /* callers wait until helpers have left */
    struct loop *loops;         /* loops that want helpers, the oldest first */
    _Atomic(int32_t) queued;    /* number of loops in the list */
    int32_t helpers;            /* threads started */
    bool forks;                 /* the fork handlers are installed */
    struct thread_pool custom;  /* run = NULL: none */
    int32_t threads;            /* for the built-in loop; 0 = `automatic` */
    _Atomic(int32_t) automatic; /* 0: not known yet */
    _Atomic(const char *) from; /* how `automatic` was chosen */
} state = {
    .mutex = PTHREAD_MUTEX_INITIALIZER, .wanted = PTHREAD_COND_INITIALIZER, .left = PTHREAD_COND_INITIALIZER};

/* An estimate of the machine's other load. */
static struct {
    /* Nanoseconds of work since a helper last joined, without loops that ran alone. */
    _Atomic int64_t missed;
    _Atomic int64_t until; /* when small loops may have helpers again; 0: now */
} busy;

/* ---- fork ----------------------------------------------------------------------------------- */

/* A child process has only the thread that forked: no helpers and no loop in progress, except one that this
 * thread runs on the caller's own loop, which is not recorded here. Its calls start new helpers. fork takes
 * the mutex, so no other thread is changing this state meanwhile. Condition variables remember their waiters,
 * so they are initialised again. The number of threads stays the same, and so do the bits of results. */
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

/* Runs when the library is loaded: later, a fork could find the mutex locked. */
__attribute__((constructor)) static void arrange_forks(void)
{
    state.forks = !pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* ---- Settings ------------------------------------------------------------------------------- */

/* Returns how many processors the process may run on, by the affinity mask of its first thread: the calling
 * thread's mask may be narrower, because engines pin their threads. With `take` the calling thread adopts
 * that mask. Returns 0 if it is unknown. */
static int32_t processors_of_process(bool take)
{
    /* In the usual case this does not allocate: helpers in a forked child call it, and not every malloc
     * survives a fork. */
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

/* Returns the number in OMP_NUM_THREADS, which users of numerical libraries set; of a list it is the first
 * number, that of the outer level. Returns 0 if it is no number from 1 on. */
static int32_t number_in(const char *text)
{
    char *end;
    const long number = strtol(text, &end, 10);
    while (*end == ' ' || *end == '\t') end++;
    if (end == text || number <= 0 || (*end && *end != ',')) return 0;
    return number < MOST_THREADS ? (int32_t)number : MOST_THREADS;
}

/* Returns the default number of threads, and how it was chosen. */
static int32_t automatic_threads(const char **from)
{
#define IGNORED "; OMP_NUM_THREADS is ignored, because it is no number from 1 on"
    static const char *const words[2][2] = {
        {"processors of the process", "processors of the process" IGNORED},
        {"CPU quota of the control group", "CPU quota of the control group" IGNORED}};
    const char *const text = getenv("OMP_NUM_THREADS");
    const int32_t asked = text ? number_in(text) : 0;
    if (asked) {
        *from = "OMP_NUM_THREADS";
        return asked;
    }
    const int32_t all = processors(), quota = quota_processors("");
    const bool bounded = quota && quota < all;
    *from = words[bounded][text && *text];
    return bounded ? quota : all;
}

struct thread_pool threads_now(void)
{
    if (!atomic_load(&state.automatic)) {
        const char *from;
        const int32_t threads = automatic_threads(&from);
        atomic_store(&state.from, from);
        atomic_store(&state.automatic, threads);
    }
    pthread_mutex_lock(&state.mutex);
    const int32_t threads = state.threads ? state.threads : atomic_load(&state.automatic);
    const struct thread_pool now =
        state.custom.run ? state.custom : (struct thread_pool){NULL, NULL, threads};
    pthread_mutex_unlock(&state.mutex);
    return now;
}

const char *threads_from(void)
{
    const bool custom = threads_now().run;
    pthread_mutex_lock(&state.mutex);
    const char *const from = custom          ? "fmla_set_parallel_for"
                             : state.threads ? "fmla_set_num_threads"
                                             : atomic_load(&state.from);
    pthread_mutex_unlock(&state.mutex);
    return from;
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

/* Items differ in length, so threads take the next one whenever they are free. Each item writes only to its
 * own memory, so the result does not depend on which thread runs it. */
static void run_items(struct loop *loop, int32_t worker)
{
    for (int64_t i; (i = atomic_fetch_add(&loop->begun, 1)) < loop->count;)
        loop->task(loop->task_data, i, worker);
}

/* Requires the mutex. */
static void leave_queue(struct loop *loop)
{
    for (struct loop **at = &state.loops; *at; at = &(*at)->next)
        if (*at == loop) {
            *at = loop->next;
            atomic_fetch_sub(&state.queued, 1);
            return;
        }
}

/* Each helper that joins wakes two more, so that no thread has to wake many. */
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
        run_items(loop, worker);
        pthread_mutex_lock(&state.mutex);
        if (atomic_fetch_sub(&loop->inside, 1) == 1) pthread_cond_broadcast(&state.left);
    }
    return NULL;
}

/* Requires the mutex. Helpers block all signals, so that the host's own threads receive them, except fault
 * signals, which are delivered to the faulting thread: if blocked, they would kill the process before the
 * host's handler could run. */
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

/* Updates the load estimate. The caller of a loop worked on it from `begin` to `end`, then waited for
 * helpers. */
static void note_load(const struct loop *loop, int64_t begin, int64_t end, int64_t waited)
{
    const int64_t came = atomic_load(&loop->came);
    /* A helper needs this long to start on an idle machine, too. */
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
    run_items(&loop, 0);
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
