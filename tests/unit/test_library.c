/* SPDX-License-Identifier: MIT
 *
 * Tests library-wide functions: versions, capabilities, threads, the last error, and the environment
 * variable that forces kernels (in child processes, because it is read once, at first use).
 */
#include "filled.h"
#include "head_sizes.h"
#include "tensors.h"

#include <math.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static const fmla_device cuda = {FMLA_DEVICE_CUDA, 0};

#define INVALID(status, operation, argument, words)                                                          \
    check_rejected(#status, status, FMLA_INVALID_ARGUMENT, operation, argument, words)

/* ---- Small calls that work --------------------------------------------------------------------------- */

/* A call of one row; d_qk selects: 576, in MHA 192, has a kernel; in decode 64 has only the oracle. For a
 * plan, queries its size. */
static fmla_status small(enum operation operation, int64_t d_qk, const char *kernel)
{
    const struct layout layout = DESIGNATED(.b = 1, .s_q = 1, .h_q = 1, .h_kv = 1, .d_qk = d_qk, .s_k = 4,
                                            .d_v = d_qk == 192   ? 128
                                                   : d_qk == 576 ? 512
                                                                 : d_qk,
                                            .pages = 1, .page_size = 4, .max_pages = 1, .n = 2, .n_out = 2,
                                            .type = {FMLA_TYPE_BFLOAT, 16, 1});
    static struct held held[MAX_TENSORS];
    _Alignas(16) char args[512];
    struct answer answer;
    named_make(operation, args, held, &layout, place_filled);
    const char **const at = option_at(operation, args, "kernel");
    if (at) *at = kernel;
    const fmla_status status = described_is_plan(operation)
                                   ? described_ask(operation, ASK_BYTES, args, &answer)
                                   : run_in_room(operation, args);
    for (int i = 0; described_tensor(operation, i); i++) free(held[i].tensor.data);
    return status;
}

static fmla_status decode(int64_t d_qk, const char *kernel)
{
    return small(OP_DENSE_DECODE, d_qk, kernel);
}

/* ---- Capabilities and prepare ------------------------------------------------------------------------ */

static void test_capabilities(void)
{
    static const char *const operations[] = {
#define OPERATION(op, OP) #op,
#include "operations.def"
        "none"};
    enum { LAST = sizeof operations / sizeof operations[0] - 2 };
    int64_t rows = 0, runnable = 0;
    int operation = 0;
    for (;; rows++) {
        fmla_capability row = FMLA_INIT(fmla_capability);
        if (fmla_capabilities(cpu, rows, &row) != FMLA_OK) break;
        CHECK(row.operation && row.kernel && row.reason, "row %" PRId64, rows);
        if (!row.operation || !row.kernel || !row.reason) break;
        CHECK(row.available == !*row.reason, "%s %s: available %d, reason \"%s\"", row.operation, row.kernel,
              row.available, row.reason);
        CHECK(row.forced_only == !strcmp(row.kernel, "ref") && !*row.part_of,
              "%s %s: forced_only %d, part of \"%s\"", row.operation, row.kernel, row.forced_only,
              row.part_of);
        runnable += row.available && !row.forced_only;
        operation += operation < LAST && !strcmp(row.operation, operations[operation + 1]);
        CHECK(!strcmp(row.operation, operations[operation]), "row %" PRId64 " is of %s, after %s", rows,
              row.operation, operations[operation]);
        /* Attention kernels other than the oracle take latents of 512 and 576 with values of 512; those of
         * MHA the sizes of head_sizes.h. Plans, merge and operations of caches alone take any. */
        static const int32_t any[2][8], latent[2][8] = {{512, 576}, {512}};
        static int32_t all[2][8];
        memcpy(all[0], head_d_qk, sizeof head_d_qk), memcpy(all[1], head_d_v, sizeof head_d_v);
        const int32_t(*const heads)[8] = (const int32_t(*)[8])all;
        const bool plan = described_is_plan(operation), mha = operation_is_mha(operation),
                   dense = operation == OP_DENSE_DECODE, attention = described_member(operation, "workspace"),
                   named = described_kind(operation, MEMBER_FORMAT) && !operation_is_of_caches(operation),
                   own_sizes = named && !attention;
        const int32_t(*sizes)[8] = !strcmp(row.kernel, "ref") ? any : mha ? heads : attention ? latent : any;
        CHECK((own_sizes || (!memcmp(row.d_qk, sizes[0], sizeof row.d_qk) &&
                             !memcmp(row.d_v, sizes[1], sizeof row.d_v))) &&
                  (row.types == 0) == plan && (row.kv_formats != 0) == named,
              "%s %s: d_qk %d %d %d, d_v %d %d, types %d, formats %d", row.operation, row.kernel, row.d_qk[0],
              row.d_qk[1], row.d_qk[2], row.d_v[0], row.d_v[1], row.types, row.kv_formats);
        /* An available row's kernel must run when named. */
        if ((dense || mha) && row.available)
            CHECK(small(operation, mha ? 192 : 576, row.kernel) == FMLA_OK, "%s %s: %s", row.operation,
                  row.kernel, fmla_last_error());
    }
    CHECK(runnable > LAST && operation == LAST, "%" PRId64 " rows, %" PRId64 " of them run", rows, runnable);

    fmla_capability row;
    memset(&row, 0x55, sizeof row);
    row.struct_size = sizeof row;
    const fmla_capability before = row;
    char number[32];
    snprintf(number, sizeof number, "%" PRId64, rows);
    INVALID(fmla_capabilities(cpu, rows, &row), "capabilities", "index", number);
    INVALID(fmla_capabilities(cpu, INT64_MAX, &row), "capabilities", "index", "9223372036854775807");
    INVALID(fmla_capabilities(cpu, -1, &row), "capabilities", "index", "-1");
    const fmla_device unknown = {99, 0}, negative = {FMLA_DEVICE_CPU, -1}, zero = {0, 0};
    INVALID(fmla_capabilities(unknown, 0, &row), "capabilities", "device", "99");
    INVALID(fmla_capabilities(zero, 0, &row), "capabilities", "device", "0");
    INVALID(fmla_capabilities(negative, 0, &row), "capabilities", "device", "-1");
    INVALID(fmla_capabilities(cpu, 0, NULL), "capabilities", "capability", "NULL");
    CHECK(!memcmp(&row, &before, sizeof row), "%s", "a failed call wrote a row");
    row.struct_size = 8;
    INVALID(fmla_capabilities(cpu, 0, &row), "capabilities", "struct_size", "8");

    CHECK_OK(fmla_prepare(cpu));
    CHECK_OK(fmla_prepare((fmla_device){FMLA_DEVICE_CUDA_HOST, 0}));
    INVALID(fmla_prepare(unknown), "prepare", "device", "99");
    INVALID(fmla_prepare(negative), "prepare", "device", "-1");
    /* Rows of an unusable GPU give the reason, and prepare then fails. */
    row = FMLA_INIT(fmla_capability);
    CHECK_OK(fmla_capabilities(cuda, 0, &row));
    int gpu = 0;
    for (int64_t i = 0; fmla_capabilities(cuda, i, &row) == FMLA_OK; i++) {
        gpu |= row.available;
        CHECK(row.available || (row.reason && *row.reason), "%s on a GPU: no reason", row.operation);
        CHECK(row.kernel || !(row.types | row.kv_formats | row.d_qk[0] | row.d_v[0] | row.forced_only),
              "%s on a GPU: half a row", row.operation);
    }
    if (!gpu)
        check_rejected("no GPU", fmla_prepare(cuda), FMLA_UNSUPPORTED, "prepare", "device", "cuda:0|: ");
}

/* One message of each form; check_rejected compares the parts of all others with their message. */
static void test_error_parts(void)
{
    fmla_error error = FMLA_INIT(fmla_error);
    INVALID(fmla_last_error_describe(NULL), "last_error_describe", "error", "NULL");
    CHECK(fmla_set_num_threads(-1) == FMLA_INVALID_ARGUMENT, "%s", fmla_last_error());
    CHECK_OK(fmla_last_error_describe(&error));
    CHECK(!strcmp(error.operation, "set_num_threads") && !strcmp(error.argument, "n") &&
              !strcmp(error.actual, "is -1") && !strncmp(error.allowed, "must be in [0, ", 15) &&
              !*error.other,
          "%s|%s|%s|%s|%s", error.operation, error.argument, error.actual, error.allowed, error.other);
    const float values[2] = {0};
    struct held out_parts, lse_parts, out, lse;
    HELD(&out_parts, (void *)(uintptr_t)values, f32, 5, 1, 1, 1, 1, 1);
    HELD(&lse_parts, (void *)(uintptr_t)values, f32, 4, 1, 1, 2, 1);
    HELD(&out, (void *)(uintptr_t)values, f32, 4, 1, 1, 1, 1);
    HELD(&lse, (void *)(uintptr_t)values, f32, 3, 1, 1, 1);
    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    args.out_parts = &out_parts.tensor, args.lse_parts = &lse_parts.tensor;
    args.out = &out.tensor, args.lse = &lse.tensor;
    CHECK(fmla_merge(&args) == FMLA_INVALID_ARGUMENT, "%s", fmla_last_error());
    CHECK_OK(fmla_last_error_describe(&error));
    CHECK(!strcmp(error.argument, "lse_parts") && !strcmp(error.other, "out_parts"), "%s: %s, as in %s",
          fmla_last_error(), error.argument, error.other);
}

static void test_describe(void)
{
    fmla_device_info info = FMLA_INIT(fmla_device_info);
    CHECK_OK(fmla_device_describe(cpu, &info));
    CHECK(!*info.name && !*info.reason && !*info.needs && !*info.built_for, "\"%s\", \"%s\"", info.name,
          info.reason);
    CHECK(info.count == 1 && info.workers == fmla_num_threads() && !info.compute_capability && !info.driver,
          "%d devices, %d workers", info.count, info.workers);
    CHECK_OK(fmla_device_describe((fmla_device){FMLA_DEVICE_CUDA, 99}, &info));
    CHECK(*info.reason && info.name && info.needs && info.built_for && !info.compute_capability, "\"%s\"",
          info.reason);
    CHECK(!info.built_with == !info.driver_needed && !info.built_with == !*info.built_for, "built with %d",
          info.built_with);

    memset(&info, 0x55, sizeof info);
    info.struct_size = sizeof info;
    const fmla_device_info before = info;
    INVALID(fmla_device_describe(cpu, NULL), "device_describe", "info", "NULL");
    INVALID(fmla_device_describe((fmla_device){99, 0}, &info), "device_describe", "device", "99");
    check_rejected("device id", fmla_device_describe((fmla_device){FMLA_DEVICE_CUDA, -1}, &info),
                   FMLA_INVALID_ARGUMENT, "device_describe", "device", "-1");
    CHECK(!memcmp(&info, &before, sizeof info), "%s", "a failed call wrote a description");
    info.struct_size = 8;
    INVALID(fmla_device_describe(cpu, &info), "device_describe", "struct_size", "8");
}

/* ---- Threads ----------------------------------------------------------------------------------------- */

struct counted {
    int64_t calls, items;
    int32_t workers;
};

/* Backwards, with a different worker number for each item: any order and any worker is allowed. */
static void count_for(void *pool, int64_t count, fmla_task task, void *task_data)
{
    struct counted *counted = pool;
    counted->calls++;
    for (int64_t i = count; i-- > 0;) {
        task(task_data, i, (int32_t)(i % counted->workers));
        counted->items++;
    }
}

static void test_threads(void)
{
    const int32_t all = fmla_num_threads();
    CHECK(all >= 1, "%d threads", all);
    CHECK_OK(fmla_set_num_threads(3));
    static const int32_t bad[] = {-1, 4097, INT32_MAX, INT32_MIN};
    char number[16];
    for (int k = 0; k < 4; k++) {
        snprintf(number, sizeof number, "%d", bad[k]);
        INVALID(fmla_set_num_threads(bad[k]), "set_num_threads", "n", number);
    }
    CHECK_EQ(fmla_num_threads(), 3);
    CHECK(fmla_set_num_threads(4096) == FMLA_OK && fmla_num_threads() == 4096, "%d", fmla_num_threads());
    CHECK(fmla_set_num_threads(0) == FMLA_OK && fmla_num_threads() == all, "%d", fmla_num_threads());

    struct counted counted = {0, 0, 5};
    static const int32_t workers[] = {0, -1, 4097};
    for (int k = 0; k < 3; k++) {
        snprintf(number, sizeof number, "%d", workers[k]);
        check_rejected("workers", fmla_set_parallel_for(count_for, &counted, workers[k]),
                       FMLA_INVALID_ARGUMENT, "set_parallel_for", "workers", number);
    }
    CHECK_EQ(fmla_num_threads(), all);
    CHECK_OK(fmla_set_parallel_for(count_for, &counted, 5));
    CHECK_EQ(fmla_num_threads(), 5);
    CHECK(decode(576, NULL) == FMLA_OK && counted.calls > 0 && counted.items > 0,
          "%" PRId64 " calls of %" PRId64 " items: %s", counted.calls, counted.items, fmla_last_error());
    CHECK_OK(fmla_set_parallel_for(NULL, NULL, -77));
    CHECK_EQ(fmla_num_threads(), all);
    const int64_t calls = counted.calls;
    CHECK(decode(576, NULL) == FMLA_OK && counted.calls == calls, "%" PRId64 " calls", counted.calls - calls);
}

/* ---- The last error ---------------------------------------------------------------------------------- */

static pthread_barrier_t barrier;

static void *other_thread(void *seen)
{
    char *message = seen;
    const int empty = !*fmla_last_error();
    pthread_barrier_wait(&barrier); /* 1: the first thread fails */
    pthread_barrier_wait(&barrier); /* 2 */
    const int still_empty = !*fmla_last_error();
    (void)fmla_set_num_threads(-5);
    pthread_barrier_wait(&barrier); /* 3: the first thread checks */
    snprintf(message, 256, "%s%s%s", empty ? "" : "!", still_empty ? "" : "!", fmla_last_error());
    return NULL;
}

static void test_last_error(void)
{
    char seen[256] = "", mine[256];
    pthread_t thread;
    pthread_barrier_init(&barrier, NULL, 2);
    (void)fmla_set_num_threads(-4);
    if (pthread_create(&thread, NULL, other_thread, seen)) abort();
    pthread_barrier_wait(&barrier);
    (void)fmla_merge(NULL);
    snprintf(mine, sizeof mine, "%s", fmla_last_error());
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    CHECK(!strcmp(mine, fmla_last_error()) && !strncmp(mine, "merge: args: ", 13), "%s, then %s", mine,
          fmla_last_error());
    pthread_join(thread, NULL);
    pthread_barrier_destroy(&barrier);
    CHECK(!strncmp(seen, "set_num_threads: n: ", 20) && strstr(seen, "-5"), "the other thread saw %s", seen);
    CHECK(fmla_set_num_threads(0) == FMLA_OK && !strcmp(mine, fmla_last_error()),
          "a success changed it to %s", fmla_last_error());

    static const char *const names[] = {"FMLA_OK", "FMLA_INVALID_ARGUMENT", "FMLA_UNSUPPORTED",
                                        "FMLA_BUFFER_TOO_SMALL", "FMLA_DEVICE_ERROR"};
    for (int s = 0; s < 5; s++)
        CHECK(!strcmp(fmla_status_name((fmla_status)s), names[s]), "%s", fmla_status_name((fmla_status)s));
    CHECK(fmla_status_name((fmla_status)6) && fmla_status_name((fmla_status)255), "%s", "NULL");

    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", FMLA_VERSION_MAJOR, FMLA_VERSION_MINOR, FMLA_VERSION_PATCH);
    CHECK(!strcmp(fmla_version_string(), version), "%s", fmla_version_string());
    CHECK_EQ(FMLA_VERSION, FMLA_VERSION_MAJOR * 10000 + FMLA_VERSION_MINOR * 100 + FMLA_VERSION_PATCH);
    CHECK_EQ(fmla_version(), FMLA_VERSION);
}

/* ---- The environment --------------------------------------------------------------------------------- */

/* The child's call under the variable, and the expected result. Only the oracle takes d_qk = 64, so a
 * successful call shows that it was chosen. */
#define DECODE_64         OP_DENSE_DECODE, 64, NULL
#define DECODE_576        OP_DENSE_DECODE, 576, NULL
#define DECODE_64_BY_NAME OP_DENSE_DECODE, 64, "ref"
#define MERGE             OP_MERGE, 64, NULL
#define PLAN              OP_DECODE_PLAN, 64, NULL

static const struct {
    const char *value; /* NULL: not set */
    enum operation operation;
    int64_t d_qk;
    const char *kernel;
    fmla_status status;
    const char *words;
} environment[] = {
    {NULL, DECODE_64, FMLA_UNSUPPORTED, "d_qk is 64"},
    {"", DECODE_64, FMLA_UNSUPPORTED, "d_qk is 64"},
    {"ref", DECODE_64, FMLA_OK, ""},
    {"ref", DECODE_576, FMLA_OK, ""},
    {"ref", MERGE, FMLA_OK, ""},
    {"ref", PLAN, FMLA_OK, ""}, /* has no such kernel, so the name does not apply */
    {"cpu-generic", DECODE_64, FMLA_UNSUPPORTED, "d_qk is 64|cpu-generic"},
    {"cpu-generic", DECODE_64_BY_NAME, FMLA_OK, ""}, /* the call's own choice has priority */
    {"dense_decode=ref", DECODE_64, FMLA_OK, ""},
    {"dense_decode=ref,merge=cpu-generic", DECODE_64, FMLA_OK, ""},
    {"merge=cpu-generic,dense_decode=ref", DECODE_64, FMLA_OK, ""},
    {"merge=ref", DECODE_64, FMLA_UNSUPPORTED, "d_qk is 64"},
    {"nosuch", DECODE_576, FMLA_INVALID_ARGUMENT, "dense_decode: |FLASHMLA_KERNEL|nosuch|cpu-generic|ref"},
    {"nosuch", MERGE, FMLA_INVALID_ARGUMENT, "merge: |FLASHMLA_KERNEL|nosuch"},
    {"dense_decode=nosuch", DECODE_576, FMLA_INVALID_ARGUMENT, "FLASHMLA_KERNEL|nosuch|cpu-generic"},
    {"dense_decode=nosuch", DECODE_64_BY_NAME, FMLA_OK, ""},
    {"dense_decod=ref", DECODE_576, FMLA_INVALID_ARGUMENT,
     "FLASHMLA_KERNEL|operation|\"dense_decod\"|must be one of"},
    {"=ref", MERGE, FMLA_INVALID_ARGUMENT, "FLASHMLA_KERNEL|operation"},
    {"dense_decode=", DECODE_576, FMLA_INVALID_ARGUMENT, "FLASHMLA_KERNEL|cpu-generic"},
    {"dense_decode=nosuch", MERGE, FMLA_OK, ""},
};
enum { ENVIRONMENTS = sizeof environment / sizeof environment[0] };

static int child(int k)
{
    const fmla_status status = small(environment[k].operation, environment[k].d_qk, environment[k].kernel);
    if (status == environment[k].status && has_words(status ? fmla_last_error() : "", environment[k].words))
        return 0;
    fprintf(stderr, "under FLASHMLA_KERNEL=\"%s\": %s, expected %s with \"%s\": %s\n",
            environment[k].value ? environment[k].value : "", fmla_status_name(status),
            fmla_status_name(environment[k].status), environment[k].words, fmla_last_error());
    return 1;
}

/* Child processes without exec, which an emulator of another machine could not follow: this process must
 * not have used the library before. */
static void test_environment(void)
{
    for (int k = 0; k < ENVIRONMENTS; k++) {
        const pid_t pid = fork();
        if (pid == 0) {
            if (environment[k].value)
                setenv("FLASHMLA_KERNEL", environment[k].value, 1);
            else
                unsetenv("FLASHMLA_KERNEL");
            exit(child(k));
        }
        int status = -1;
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0,
              "case %d ended with %x", k, (unsigned)status);
    }
}

int main(void)
{
    test_environment();
    CHECK(!*fmla_last_error(), "before any failure: %s", fmla_last_error());
    unsetenv("FLASHMLA_KERNEL");
    test_capabilities();
    test_describe();
    test_error_parts();
    test_threads();
    test_last_error();
    return check_done("test_library");
}
