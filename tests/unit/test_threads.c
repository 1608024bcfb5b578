/* SPDX-License-Identifier: MIT
 *
 * Tests the library's parallel loop, including helpers: every item runs once, and no worker runs two at a
 * time. The child of a process that used several threads, its child, and one forked during other threads'
 * calls compute the same bits as the parent, on threads of their own; so does a process that can start no
 * thread. An alarm ends a hanging test.
 */
#include "calls.h"

#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SECONDS = 20, FORKS = 40, CALLERS = 3, WORKERS = 4 };

static struct result plans;
static struct way way;

/* Runs all operations, with the number of threads that their bits depend on. */
static int compute(struct result *result)
{
    if (call_all(result, &way)) return 0;
    return fmla_num_threads() == WORKERS;
}

/* ---- The loop itself ------------------------------------------------------------------------- */

/* Every item runs once, and no worker is in two at a time. */
enum { ITEMS = 500 };
struct items {
    atomic_int runs[ITEMS], inside[WORKERS];
    atomic_int wrong, by_helpers;
};

/* If set, items sometimes sleep, so that a helper finds the loop that it was woken for even if it is
 * late. */
static atomic_int patient;

static void run_item(void *data, int64_t index, int32_t worker)
{
    struct items *items = data;
    if (worker < 0 || worker >= WORKERS || atomic_fetch_add(&items->inside[worker], 1))
        atomic_store(&items->wrong, 1);
    atomic_fetch_add(&items->runs[index], 1);
    if (worker) atomic_fetch_add(&items->by_helpers, 1);
    if (index % 50 == 49) {
        if (atomic_load(&patient))
            nanosleep(&(struct timespec){0, 1000000}, NULL);
        else
            sched_yield(); /* lets other threads run */
    }
    atomic_fetch_sub(&items->inside[worker], 1);
}

/* Runs one loop with enough work for all threads, however busy the machine is. Returns the number of
 * items that helpers ran; -1 on an error. */
static int run_loop(void)
{
    const double second = 1e9;
    struct items items = {0};
    const struct thread_pool pool = threads_now();
    if (pool.run || pool.workers != WORKERS) return -1;
    threads_run(&pool, ITEMS, second, run_item, &items);
    for (int i = 0; i < ITEMS; i++)
        if (atomic_load(&items.runs[i]) != 1) return -1;
    return atomic_load(&items.wrong) ? -1 : atomic_load(&items.by_helpers);
}

/* Runs loops until helpers took part: they may be late. */
static int run_loops_with_helpers(void)
{
    int by_helpers = 0;
    for (int i = 0; i < 1000 && !by_helpers; i++) {
        atomic_store(&patient, i >= 500);
        by_helpers = run_loop();
    }
    atomic_store(&patient, 0);
    return by_helpers > 0;
}

/* ---- Starts of threads --------------------------------------------------------------------------- */

/* The linker redirects pthread_create here, for the library's calls and this file's. */
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *data);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *data);
enum { MOST_STARTS = 100 };
static struct start {
    void *(*run)(void *);
    void *data;
} starts[MOST_STARTS]; /* of this process and its ancestors */
static atomic_int refuse, refused, started, begun;

static void *begin(void *data)
{
    const struct start *start = data;
    atomic_fetch_add(&begun, 1);
    return start->run(start->data);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *data)
{
    if (atomic_load(&refuse)) {
        atomic_fetch_add(&refused, 1);
        return 11; /* EAGAIN */
    }
    const int number = atomic_fetch_add(&started, 1);
    if (number >= MOST_STARTS) abort();
    starts[number] = (struct start){run, data};
    return __real_pthread_create(thread, attributes, begin, &starts[number]);
}

/* AddressSanitizer's runtime takes its own locks when a thread starts (gcc 12's does not release them for
 * fork), and a child forked meanwhile finds them locked forever: none of its threads can start. With it a
 * process forks only when all its threads have started; without it, at any time. */
static pid_t fork_any_time(void)
{
#if defined(__SANITIZE_ADDRESS__)
    while (atomic_load(&begun) < atomic_load(&started)) nanosleep(&(struct timespec){0, 1000000}, NULL);
#endif
    return fork();
}

/* ---- fork --------------------------------------------------------------------------------------- */

static struct result expected;

static int as_expected(void)
{
    static struct result result;
    return compute(&result) && !memcmp(&result, &expected, sizeof result);
}

/* Ends this process as a child: 0 if all is well in it and in its descendants. */
static void be_child(int generations)
{
    alarm(SECONDS);
    int well = run_loop() >= 0 && as_expected() && run_loops_with_helpers();
    while (--generations > 0) {
        const pid_t pid = fork_any_time();
        int status = -1;
        if (pid) {
            well &= pid > 0 && waitpid(pid, &status, 0) == pid && !status;
            break;
        }
        alarm(SECONDS);
        well = as_expected() && run_loops_with_helpers();
    }
    _exit(well ? 0 : 1);
}

static void fork_once(const char *when, int generations)
{
    const pid_t pid = fork_any_time();
    if (!pid) be_child(generations);
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && !status, "%s: the child ended with %x", when,
          (unsigned)status);
}

/* ---- Calls of other threads meanwhile ----------------------------------------------------------- */

static atomic_int calling;

static void *keep_calling(void *data)
{
    int *well = data;
    while (atomic_load(&calling)) *well &= run_loop() >= 0;
    return NULL;
}

static void fork_among_calls(void)
{
    int well[CALLERS];
    pthread_t callers[CALLERS];
    atomic_store(&calling, 1);
    for (int i = 0; i < CALLERS; i++) {
        well[i] = 1;
        if (pthread_create(&callers[i], NULL, keep_calling, &well[i])) abort();
    }
    for (int i = 0; i < FORKS; i++) fork_once("among calls", 1);
    atomic_store(&calling, 0);
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(callers[i], NULL);
        CHECK(well[i], "caller %d: items were run twice, or not, or two at once by one worker", i);
    }
}

/* ---- No threads to be had ------------------------------------------------------------------------ */

static void without_threads(void)
{
    const pid_t pid = fork_any_time(); /* no thread has been started */
    if (!pid) {
        atomic_store(&refuse, 1);
        alarm(SECONDS);
        _exit(!run_loop() && as_expected() && atomic_load(&refused) ? 0 : 1);
    }
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && !status, "without threads: ended with %x",
          (unsigned)status);
}

int main(void)
{
    unsetenv("FLASHMLA_KERNEL");
    alarm(10 * SECONDS);
    draw();
    CHECK_OK(fmla_set_num_threads(WORKERS));
    CHECK_OK(make_plans(&plans));
    way = way_of_all(&plans);

    CHECK(compute(&expected), "%s", fmla_last_error());
    CHECK(run_loops_with_helpers(), "%s", "no helper ever took part, or something was wrong");
    CHECK_EQ(atomic_load(&started), WORKERS - 1);
    CHECK(as_expected(), "%s", "the parent's second call has other bits");
    fork_once("after calls", 3);
    CHECK(as_expected(), "%s", "the parent has other bits after a fork");
    fork_among_calls();
    without_threads();
    free(way.workspace);
    return check_done("test_threads");
}
