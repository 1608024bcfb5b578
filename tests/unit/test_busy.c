/* SPDX-License-Identifier: MIT
 *
 * Small calls on a busy machine: beside as many endless loops as there are processors, a call that may use several threads
 * takes at the median no more than twice as long as on one thread, whatever the operation.
 *
 * test_busy [CALLS] [idle] - CALLS of each kind (default 101); idle: without the endless loops.
 */
#include "tensors.h"

#include "num.h"
#include "timing.h"

#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LARGEST = 8, H_Q = 16, D_QK = 576, D_V = 512, PAGE = 64, TOKEN = 656 };
enum {
    KEYS = 64 * LARGEST,     /* of a request; entries of a list */
    REQUESTS = 64 * LARGEST, /* of a plan */
    ROWS = 8 * LARGEST,      /* of merge: query tokens */
    PARTS = 4,
    TOKENS = 128 * LARGEST, /* of the cache operations */
    PROMPT = 2 * LARGEST,   /* query tokens of sparse prefill */
    MOST_CALLS = 1001,
    TRIES = 5
};

static uint16_t queries[PROMPT * H_Q * D_QK], keys[KEYS * D_QK], outs[PROMPT * H_Q * D_V];
static uint8_t cache[TOKENS * TOKEN];
static int32_t indices[PROMPT * KEYS], lengths[REQUESTS], table[KEYS / PAGE];
static int64_t slots[TOKENS];
static float vectors[TOKENS * D_QK], parts[PARTS * ROWS * H_Q * D_V], lse_parts[PARTS * H_Q * ROWS],
    merged[ROWS * H_Q * D_V];
static void *workspace, *plan;
static size_t workspace_size, plan_size;

/* ---- The calls: `size` times the smallest one. Asked for a workspace, they answer its size instead. ------------ */

static fmla_status decode_plan(int size, size_t *wanted)
{
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = TENSOR_OF(lengths, i32, 64 * size), args.s_q = 1, args.h_q = H_Q, args.h_kv = 1;
    args.plan = plan, args.plan_size = plan_size;
    return wanted ? fmla_decode_plan_size(&args, &plan_size) : fmla_decode_plan(&args);
}

#define CALL_WITH_WORKSPACE(operation)                                                                       \
    args.workspace = workspace, args.workspace_size = workspace_size;                                        \
    return wanted ? fmla_##operation##_workspace_size(&args, wanted, NULL) : fmla_##operation(&args)

static fmla_status dense_decode(int size, size_t *wanted)
{
    int32_t length = PAGE * size;
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.q = TENSOR_OF(queries, bf16, 1, 1, H_Q, D_QK);
    args.kv_cache = TENSOR_OF(keys, bf16, KEYS / PAGE, PAGE, 1, D_QK);
    args.block_table = TENSOR_OF(table, i32, 1, size);
    args.seqlens = TENSOR_OF(&length, i32, 1), args.out = TENSOR_OF(outs, bf16, 1, 1, H_Q, D_V);
    CALL_WITH_WORKSPACE(dense_decode);
}

static fmla_status sparse_decode(int size, size_t *wanted)
{
    fmla_sparse_decode_args args = FMLA_INIT(fmla_sparse_decode_args);
    args.q = TENSOR_OF(queries, bf16, 1, 1, H_Q, D_QK);
    args.kv_cache = TENSOR_OF(cache, u8, KEYS / PAGE, PAGE, 1, TOKEN), args.kv_format = FMLA_KV_FP8_656;
    args.indices = TENSOR_OF(indices, i32, 1, 1, 64 * size), args.out = TENSOR_OF(outs, bf16, 1, 1, H_Q, D_V);
    CALL_WITH_WORKSPACE(sparse_decode);
}

static fmla_status sparse_prefill(int size, size_t *wanted)
{
    fmla_sparse_prefill_args args = FMLA_INIT(fmla_sparse_prefill_args);
    args.q = TENSOR_OF(queries, bf16, 2 * size, H_Q, D_QK), args.kv = TENSOR_OF(keys, bf16, KEYS, 1, D_QK);
    args.indices = TENSOR_OF(indices, i32, 2 * size, 1, 64),
    args.out = TENSOR_OF(outs, bf16, 2 * size, H_Q, D_V);
    CALL_WITH_WORKSPACE(sparse_prefill);
}

static fmla_status merge(int size, size_t *wanted)
{
    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    args.out_parts = TENSOR_OF(parts, f32, PARTS, 1, 8 * size, H_Q, D_V);
    args.lse_parts = TENSOR_OF(lse_parts, f32, PARTS, 1, H_Q, 8 * size);
    args.out = TENSOR_OF(merged, f32, 1, 8 * size, H_Q, D_V);
    return wanted ? FMLA_OK : fmla_merge(&args);
}

static fmla_status cache_append(int size, size_t *wanted)
{
    fmla_cache_append_args args = FMLA_INIT(fmla_cache_append_args);
    args.latent = TENSOR_OF(vectors, f32, 128 * size, D_QK),
    args.slot_mapping = TENSOR_OF(slots, i64, 128 * size);
    args.kv_cache = TENSOR_OF(cache, u8, TOKENS / PAGE, PAGE, 1, TOKEN), args.kv_format = FMLA_KV_FP8_656;
    return wanted ? FMLA_OK : fmla_cache_append(&args);
}

static fmla_status cache_gather(int size, size_t *wanted)
{
    fmla_cache_gather_args args = FMLA_INIT(fmla_cache_gather_args);
    args.out = TENSOR_OF(vectors, f32, 128 * size, D_QK), args.slots = TENSOR_OF(slots, i64, 128 * size);
    args.kv_cache = TENSOR_OF(cache, u8, TOKENS / PAGE, PAGE, 1, TOKEN), args.kv_format = FMLA_KV_FP8_656;
    return wanted ? FMLA_OK : fmla_cache_gather(&args);
}

static const struct operation {
    const char *name;
    fmla_status (*call)(int size, size_t *wanted);
} operations[] = {
    {"decode_plan", decode_plan},
    {"dense_decode", dense_decode},
    {"sparse_decode", sparse_decode},
    {"sparse_prefill", sparse_prefill},
    {"merge", merge},
    {"cache_append", cache_append},
    {"cache_gather", cache_gather},
};
enum { OPERATIONS = sizeof operations / sizeof operations[0] };

static void fill(void)
{
    for (int i = 0; i < PROMPT * H_Q * D_QK; i++) queries[i] = num_to_bf16((float)(i % 7) * 0.1f - 0.3f);
    for (int i = 0; i < KEYS * D_QK; i++) keys[i] = num_to_bf16((float)(i % 5) * 0.1f - 0.2f);
    for (int i = 0; i < TOKENS * D_QK; i++) vectors[i] = (float)(i % 11) - 5.0f;
    for (int i = 0; i < PROMPT * KEYS; i++) indices[i] = i % KEYS;
    for (int i = 0; i < REQUESTS; i++) lengths[i] = 1 + i * 37 % 5000;
    for (int i = 0; i < KEYS / PAGE; i++) table[i] = i;
    for (int i = 0; i < TOKENS; i++) slots[i] = i;
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

static double once(const struct operation *operation, int size, int threads)
{
    CHECK_OK(fmla_set_num_threads(threads));
    const double start = timing_now();
    const fmla_status status = operation->call(size, NULL);
    const double seconds = timing_now() - start;
    CHECK(!status, "%s: %s", operation->name, fmla_last_error());
    return seconds;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* In turns, and each of them first every other time, so that what else the machine does meets both alike. */
static double measure(const struct operation *operation, int size, int threads, int calls)
{
    static double seconds[2][MOST_CALLS];
    for (int i = 0; i < calls; i++)
        for (int turn = 0; turn < 2; turn++) {
            const int several = (i + turn) % 2;
            seconds[several][i] = once(operation, size, several ? threads : 1);
        }
    for (int several = 0; several < 2; several++)
        qsort(seconds[several], (size_t)calls, sizeof(double), ascending);
    const double alone = seconds[0][calls / 2], together = seconds[1][calls / 2];
    printf("%-14s x%-2d  one thread %9.1f us  %d threads %9.1f us  %6.2f  (90%%: %.1f, %.1f)\n",
           operation->name, size, 1e6 * alone, threads, 1e6 * together, together / alone,
           1e6 * seconds[0][calls * 9 / 10], 1e6 * seconds[1][calls * 9 / 10]);
    return together / alone;
}

int main(int argc, char **argv)
{
    const int calls = argc > 1 ? atoi(argv[1]) : 101, idle = argc > 2 && !strcmp(argv[2], "idle");
    if (calls < 1 || calls > MOST_CALLS) return 2;
    const int threads = fmla_num_threads() > 2 ? fmla_num_threads() : 2;
    fill();
    CHECK_OK(fmla_set_num_threads(threads));
    for (int i = 0; i < OPERATIONS; i++) {
        size_t bytes = 0;
        CHECK(!operations[i].call(LARGEST, &bytes), "%s: %s", operations[i].name, fmla_last_error());
        if (bytes > workspace_size) workspace_size = bytes;
    }
    workspace = aligned_alloc(64, (workspace_size + 63) / 64 * 64);
    plan = aligned_alloc(64, (plan_size + 63) / 64 * 64);
    if (!workspace || !plan) abort();
    memset(workspace, 0, workspace_size); /* no page is new to a call */
    if (!idle) start_loads();
    for (int i = 0; i < OPERATIONS; i++)
        for (int size = 1; size <= LARGEST; size *= 2) {
            double ratio = 0;
            for (int n = 0; n < TRIES && !(n && ratio <= 2); n++)
                ratio = measure(&operations[i], size, threads, calls);
            CHECK(ratio <= 2, "%s x%d: %d threads take %.2f times as long as one", operations[i].name, size,
                  threads, ratio);
        }
    end_loads();
    free(workspace), free(plan);
    return check_done("test_busy");
}
