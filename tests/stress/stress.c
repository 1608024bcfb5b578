/* SPDX-License-Identifier: MIT
 *
 * stress: random calls of every operation, from several host threads at once, through the cases of checkattn.
 * Each call has its memory between guard pages (device.h; on a GPU between canaries), is made with workspaces
 * that must be refused and twice with one of exactly the queried size, and is compared with the oracle.
 *
 * Call N of a seed does not depend on earlier calls, so a failed call can be repeated alone.
 */
#include "stress.h"

#include "pthread_loop.h"
#include "timing.h"

#include <getopt.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    MOST_THREADS = 32,
    MOST_KERNELS = 32,
    ROUND = 64 /* calls with the same settings of the library's threads */
};

/* A kernel of an operation that can be forced. */
struct tested {
    enum operation operation;
    const char *kernel;
    int32_t types;
};

static struct {
    uint64_t seed;
    fmla_device device; /* type 0: the CPU, between guard pages */
    double end;
    int64_t calls; /* 0: until the end */
    enum defect defect;
    int only; /* set by a fault */
    int kernels;
    struct tested kernel[MOST_KERNELS];
    int32_t types[OPERATIONS]; /* types of the kernels that dispatch chooses from */
    _Atomic int64_t next, made, rows, failed, of_operation[OPERATIONS];
    char named_seed[32], under_way[MOST_THREADS][32]; /* " --seed N", and " --call N" of each host thread */
} stress = {.seed = 1};

/* ---- What went wrong ------------------------------------------------------------------------- */

static _Thread_local struct {
    const struct run *run;
    struct tally *tally;
} now;

static void wrong(const char *what)
{
    report(now.tally, now.run, "beside the call", what);
}

static void say(const char *text)
{
    if (write(STDERR_FILENO, text, strlen(text)) < 0) _exit(3);
}

/* A kernel accessed memory outside its call. Its threads may be the library's own, so all current calls
 * are named. */
static void bad_access(int signal)
{
    say(signal == SIGBUS ? "stress: SIGBUS" : "stress: SIGSEGV");
    say(": memory beside a buffer was touched; again, one of:"), say(stress.named_seed);
    for (int i = 0; i < MOST_THREADS; i++) say(stress.under_way[i]);
    say("\n");
    _exit(1);
}

/* ---- Kernels --------------------------------------------------------------------------------- */

/* Returns true for kernels that take every call. A GPU's tuned kernels refuse some: they run when dispatch
 * chooses them, and only portable ones are forced. */
static bool takes_everything(const char *kernel)
{
    return strncmp(kernel, "cuda", 4) != 0 || !strcmp(kernel, "cuda") || !strcmp(kernel, "cuda-sm80");
}

static bool find_kernels(fmla_device device)
{
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(device, i, &row) == FMLA_OK; i++) {
        int operation = 0;
        while (operation < OPERATIONS &&
               (!subjects[operation] || strcmp(row.operation, descriptors[operation].name) != 0))
            operation++;
        if (operation == OPERATIONS || !row.kernel || !row.available || row.forced_only) continue;
        stress.types[operation] |= row.types;
        if (takes_everything(row.kernel) && stress.kernels < MOST_KERNELS)
            stress.kernel[stress.kernels++] =
                (struct tested){(enum operation)operation, row.kernel, row.types};
    }
    for (int operation = 0; operation < OPERATIONS; operation++)
        if (subjects[operation] && !stress.types[operation]) {
            fprintf(stderr, "stress: there is no kernel of %s on that device\n", descriptors[operation].name);
            return false;
        }
    return true;
}

/* ---- Calls ----------------------------------------------------------------------------------- */

/* Sets the threads of the library's calls. The host's own loop is one of the settings. */
static void set_threads(int64_t call)
{
    static const int32_t threads[] = {0, 1, 3};
    const int64_t setting = call / ROUND % 4;
    fmla_set_parallel_for(setting == 3 ? pthread_for : NULL, NULL, PTHREAD_WORKERS);
    fmla_set_num_threads(setting == 3 ? 0 : threads[setting]);
}

/* Draws an operation, with more weight on attention: operations that are cheap to set up have small cases. */
static enum operation draw_operation(struct random_state *random)
{
    static const enum operation of[] = {
        OP_DENSE_DECODE,   OP_DENSE_DECODE,   OP_SPARSE_DECODE, OP_SPARSE_DECODE,
        OP_SPARSE_PREFILL, OP_SPARSE_PREFILL, OP_MHA_FORWARD,   OP_MHA_FORWARD,
#define OPERATION(op, OP) OP_##OP,
#include "operations.def"
    };
    for (;;) {
        const enum operation drawn = of[random_between(random, 0, (int64_t)(sizeof of / sizeof of[0]) - 1)];
        if (subjects[drawn]) return drawn;
    }
}

static void make_call(int64_t call)
{
    struct random_state random = {stress.seed * 0x9e3779b97f4a7c15u + (uint64_t)call * 0xd1342543de82ef95u};
    int64_t v[GRID_AXES];
    struct tally tally = {.number = call};
    struct run run = {.device = stress.device,
                      .seed = stress.seed,
                      .keep_threads = true,
                      .verbose = true,
                      .fault = stress.defect};
    random_u64(&random);
    const enum operation drawn = draw_operation(&random),
                         operation = stress.only ? (enum operation)(stress.only - 1) : drawn;
    int of[MOST_KERNELS] = {0}, count = 0;
    for (int i = 0; i < stress.kernels; i++)
        if (stress.kernel[i].operation == operation) of[count++] = i;
    const int64_t chosen = random_between(&random, 0, count); /* the last one: dispatch chooses */
    run.by_default = chosen == count;
    run.kernel = run.by_default ? "(the best)" : stress.kernel[of[chosen]].kernel;
    run.types = run.by_default ? stress.types[operation] : stress.kernel[of[chosen]].types;
    const bool gpu = on_gpu(&run);
    draw_case(&random, operation, run.types, gpu, v);
    now.run = &run, now.tally = &tally;
    device_draw_pages(random_u64(&random));
    case_check(subjects[operation], &run, v, random_u64(&random), &tally, NULL);
    atomic_fetch_add(&stress.made, 1);
    atomic_fetch_add(&stress.of_operation[operation], 1);
    atomic_fetch_add(&stress.rows, tally.rows);
    if (!tally.failed) return;
    atomic_fetch_add(&stress.failed, 1);
    fprintf(stderr, "stress: call %lld of %s by %s failed; again: --seed %llu --call %lld\n", (long long)call,
            descriptors[operation].name, run.kernel, (unsigned long long)stress.seed, (long long)call);
}

static void host_thread(void *last_of_round, int number)
{
    enum { ENOUGH = 10 };
    char *under_way = stress.under_way[number];
    device_enter();
    for (int64_t call; (call = atomic_fetch_add(&stress.next, 1)) <= *(const int64_t *)last_of_round;) {
        snprintf(under_way, sizeof stress.under_way[0], " --call %lld", (long long)call);
        if (timing_now() < stress.end && atomic_load(&stress.failed) < ENOUGH) make_call(call);
        *under_way = '\0';
    }
}

/* Runs rounds of calls, each with one setting of the library's threads, until time or calls are used up. */
static void make_calls(int threads)
{
    for (int64_t first = 1; timing_now() < stress.end && !(stress.calls && first > stress.calls);) {
        int64_t last = first / ROUND * ROUND + ROUND - 1;
        if (stress.calls && last > stress.calls) last = stress.calls;
        set_threads(first);
        atomic_store(&stress.next, first);
        pthread_each(threads, host_thread, &last);
        first = last + 1;
    }
}

/* ---- The command line ------------------------------------------------------------------------ */

static int usage(FILE *to, int status)
{
    fputs("usage: stress [--seconds N] [--calls N] [--seed N] [--threads N] [--device cpu|cuda:N]\n"
          "       stress --call N [--seed N] [--device cpu|cuda:N]\n"
          "       stress --faults [--seed N]\n"
          "Random calls of every operation and kernel, from N host threads at once (1 to 32, default 3), "
          "between\n"
          "guard pages, compared with the oracle: for N seconds (default 60), or N calls of a seed (default "
          "1).\n"
          "--call N: that call alone. --faults: planted defects must be seen, and name their call.\n"
          "Exit: 0 all passed, 1 something failed, 2 wrong usage, 3 the GPU failed.\n",
          to);
    return status;
}

static int summary(double start)
{
    const int64_t made = atomic_load(&stress.made), failed = atomic_load(&stress.failed);
    printf("stress: seed %llu: %lld calls in %.0f s: ", (unsigned long long)stress.seed, (long long)made,
           timing_now() - start);
    for (int i = 0; i < OPERATIONS; i++)
        if (subjects[i])
            printf("%s %lld, ", descriptors[i].name, (long long)atomic_load(&stress.of_operation[i]));
    printf("%lld rows against the oracle, %lld calls failed\n", (long long)atomic_load(&stress.rows),
           (long long)failed);
    return failed || !made;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"seconds", required_argument, NULL, 's'},
        {"calls", required_argument, NULL, 'n'},
        {"call", required_argument, NULL, 'c'},
        {"seed", required_argument, NULL, 'S'},
        {"threads", required_argument, NULL, 't'},
        {"device", required_argument, NULL, 'd'},
        {"faults", no_argument, NULL, 'F'},
        {"fault", required_argument, NULL, 'f'}, /* one fault, in this process */
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0}};
    uint64_t seconds = 0, threads = 3, calls = 0, only = 0;
    const struct fault_kind *fault = NULL;
    bool faults = false;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        bool good = true;
        switch (option) {
        case 's': good = read_number(optarg, 1, 1000000, &seconds); break;
        case 'n': good = read_number(optarg, 1, INT64_MAX, &calls); break;
        case 'c': good = read_number(optarg, 1, INT64_MAX, &only); break;
        case 'S': good = read_number(optarg, 0, UINT64_MAX, &stress.seed); break;
        case 't': good = read_number(optarg, 1, MOST_THREADS, &threads); break;
        case 'd': good = read_device(optarg, &stress.device); break;
        case 'f': good = (fault = fault_of(optarg)) != NULL; break;
        case 'F': faults = true; break;
        case 'h': return usage(stdout, 0);
        default: good = false;
        }
        if (!good) return usage(stderr, 2);
    }
    if (optind < argc) return usage(stderr, 2);
    if (faults) return faults_check(argv[0], stress.seed);

    const bool gpu = stress.device.device_type == FMLA_DEVICE_CUDA;
    if (gpu)
        device_open(stress.device);
    else
        stress.device = device_pages;
    if (!find_kernels(gpu ? stress.device : (fmla_device){FMLA_DEVICE_CPU, 0})) return 3;
    snprintf(stress.named_seed, sizeof stress.named_seed, " --seed %llu", (unsigned long long)stress.seed);
    const struct sigaction action = {.sa_handler = bad_access};
    if (!gpu) sigaction(SIGSEGV, &action, NULL), sigaction(SIGBUS, &action, NULL);
    struct device_stress watch = {0};
    if (fault) watch = fault->hooks, stress.defect = fault->defect, stress.only = fault->only;
    watch.wrong = wrong, device_stress = &watch;
    for (int i = OPERATIONS - 1; i >= 0;
         i--) /* sparse decode and prefill share their random keys: the last draw stays */
        if (subjects[i]) operation_begin(subjects[i], stress.seed);
    const double start = timing_now();
    if (!seconds) seconds = calls ? 1000000 : 60;
    stress.end = start + (only ? 1e9 : (double)seconds);
    stress.calls = (int64_t)calls;
    if (only) {
        int64_t last = (int64_t)only;
        set_threads(last), atomic_store(&stress.next, last);
        host_thread(&last, 0);
    } else {
        make_calls((int)threads);
    }
    return summary(start);
}
