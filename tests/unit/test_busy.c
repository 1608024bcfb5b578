/* SPDX-License-Identifier: MIT
 *
 * Small calls on a busy machine: beside as many endless loops as there are processors, the median of a call
 * that may use several threads is at most twice that of one thread, for every operation.
 *
 * test_busy [CALLS] [idle] - CALLS of each kind (default 101); idle: without the endless loops.
 */
#include "filled.h"

#include "timing.h"

#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LARGEST = 8, MOST_CALLS = 1001, TRIES = 5 };

/* ---- The calls --------------------------------------------------------------------------------------------- */

/* Returns the layout of `size` times the smallest call. */
static struct layout layout_of(enum operation operation, int64_t size)
{
    const unsigned types = described_tensor(operation, 0)->allowed & ALLOW_FLOATS;
    struct layout l = DESIGNATED(.b = 1, .s_q = 1, .h_q = 16, .h_kv = 1, .one_head = 1, .d_qk = 576,
                                 .d_v = 512, .type = types && !(types & ALLOW_F32) ? bf16 : f32,
                                 .pages = LARGEST, .page_size = 64, .max_pages = size, .s_kv = 64 * LARGEST,
                                 .topk = 64, .tokens = 128 * size, .width = 576, .has = HAS_TABLE);
    if (operation == OP_DECODE_PLAN || operation == OP_SPARSE_PLAN)
        l.b = 64 * size, l.max_pages = 0, l.topk = 2048, l.has = HAS_LENGTHS;
    if (operation == OP_SPARSE_DECODE) l.topk = 64 * size, l.format = FMLA_KV_FP8_656;
    if (operation == OP_SPARSE_PREFILL) l.s_q = 2 * size, l.flat = true;
    if (operation_is_mha(operation)) l.s_q = 16 * size, l.s_k = 64, l.h_kv = 4, l.d_qk = 192, l.d_v = 128;
    if (operation == OP_MERGE) l.n = l.n_out = 4, l.s_q = 8 * size;
    if (operation_is_of_caches(operation))
        l.pages = l.extra_pages = 2 * LARGEST, l.extra_page_size = 64, l.format = FMLA_KV_FP8_656;
    described_fit(operation, &l);
    return l;
}

struct call {
    enum operation operation;
    _Alignas(16) char args[512];
    struct held held[MAX_TENSORS];
    void *room; /* workspace or plan */
};

/* Makes the call with a workspace for `threads` threads. */
static void make(struct call *c, enum operation operation, int64_t size, int threads)
{
    const struct layout layout = layout_of(operation, size);
    struct answer answer = {0};
    *c = (struct call){.operation = operation};
    named_make(operation, c->args, c->held, &layout, place_filled);
    if (!described_asks(operation)) return;
    CHECK_OK(fmla_set_num_threads(threads));
    CHECK_OK(described_ask(operation, ASK_BYTES, c->args, &answer));
    c->room = room_for(answer.bytes);
    memset(c->room, 0, answer.bytes); /* touch all pages before the calls */
    void **const at = option_at(operation, c->args, described_is_plan(operation) ? "plan" : "workspace");
    *at = c->room, *(size_t *)(at + 1) = answer.bytes;
}

static void unmake(struct call *c)
{
    for (int i = 0; described_tensor(c->operation, i); i++) free(c->held[i].tensor.data);
    free(c->room);
}

/* ---- The load, and the measurement -------------------------------------------------------------------------- */

enum { MOST_LOADS = 256 };
static pid_t loads[MOST_LOADS];
static int loaded;

static void start_loads(void)
{
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    const pid_t parent = getpid();
    for (loaded = 0; loaded < processors && loaded < MOST_LOADS; loaded++) {
        loads[loaded] = fork();
        if (loads[loaded] < 0) break;
        if (loads[loaded]) continue;
        volatile uint64_t turns = 0;
        for (;;)
            if (!(++turns & 0xfffff) && getppid() != parent) _exit(0);
    }
    CHECK(loaded > 0, "no endless loop could be started: %s", strerror(errno));
}

static void end_loads(void)
{
    for (int i = 0; i < loaded; i++) kill(loads[i], SIGKILL), waitpid(loads[i], NULL, 0);
}

static double once(const struct call *c, int threads)
{
    CHECK_OK(fmla_set_num_threads(threads));
    const double start = timing_now();
    const fmla_status status = described_run(c->operation, c->args);
    const double seconds = timing_now() - start;
    CHECK(!status, "%s: %s", descriptors[c->operation].name, fmla_last_error());
    return seconds;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Both take turns, alternating which goes first, so that other load on the machine affects both alike. */
static double measure(const struct call *c, int size, int threads, int calls)
{
    static double seconds[2][MOST_CALLS];
    for (int i = 0; i < calls; i++)
        for (int turn = 0; turn < 2; turn++) {
            const int several = (i + turn) % 2;
            seconds[several][i] = once(c, several ? threads : 1);
        }
    for (int several = 0; several < 2; several++)
        qsort(seconds[several], (size_t)calls, sizeof(double), ascending);
    const double alone = seconds[0][calls / 2], together = seconds[1][calls / 2];
    printf("%-14s x%-2d  one thread %9.1f us  %d threads %9.1f us  %6.2f  (90%%: %.1f, %.1f)\n",
           descriptors[c->operation].name, size, 1e6 * alone, threads, 1e6 * together, together / alone,
           1e6 * seconds[0][calls * 9 / 10], 1e6 * seconds[1][calls * 9 / 10]);
    return together / alone;
}

int main(int argc, char **argv)
{
    const int calls = argc > 1 ? atoi(argv[1]) : 101, idle = argc > 2 && !strcmp(argv[2], "idle");
    if (calls < 1 || calls > MOST_CALLS) return 2;
    const int threads = fmla_num_threads() > 2 ? fmla_num_threads() : 2;
    if (!idle) start_loads();
    for (enum operation operation = 0; operation < OPERATIONS; operation++)
        for (int size = 1; size <= LARGEST; size *= 2) {
            static struct call call;
            double ratio = 0;
            make(&call, operation, size, threads);
            for (int n = 0; n < TRIES && !(n && ratio <= 2); n++)
                ratio = measure(&call, size, threads, calls);
            unmake(&call);
            CHECK(ratio <= 2, "%s x%d: %d threads take %.2f times as long as one",
                  descriptors[operation].name, size, threads, ratio);
        }
    end_loads();
    return check_done("test_busy");
}
