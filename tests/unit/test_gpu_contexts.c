/* SPDX-License-Identifier: MIT
 *
 * On a real GPU: an application resets the primary context (cuDevicePrimaryCtxReset) or destroys its own
 * between calls, and two GPUs have their first use at the same time. Each scenario is a separate process.
 * Exit 77 if the library can use no GPU; scenarios that need two GPUs report it if there is one.
 */
#include "fake_cuda/scenarios.h"

#include "timing.h"

#include <pthread.h>

enum { SKIPPED = 77 };

/* ---- The driver, as an application calls it ----------------------------------------------------------- */

typedef void *handle;
typedef unsigned long long address;

#define ENTRIES(ENTRY)                                                                                       \
    ENTRY(init, cuInit, (unsigned flags))                                                                    \
    ENTRY(count, cuDeviceGetCount, (int *count))                                                             \
    ENTRY(retain, cuDevicePrimaryCtxRetain, (handle * context, int device))                                  \
    ENTRY(reset, cuDevicePrimaryCtxReset_v2, (int device))                                                   \
    ENTRY(state, cuDevicePrimaryCtxGetState, (int device, unsigned *flags, int *active))                     \
    ENTRY(create, cuCtxCreate_v2, (handle * context, unsigned flags, int device))                            \
    ENTRY(destroy, cuCtxDestroy_v2, (handle context))                                                        \
    ENTRY(push, cuCtxPushCurrent_v2, (handle context))                                                       \
    ENTRY(pop, cuCtxPopCurrent_v2, (handle * context))                                                       \
    ENTRY(id, cuCtxGetId, (handle context, unsigned long long *id))                                          \
    ENTRY(wait, cuCtxSynchronize, (void))                                                                    \
    ENTRY(alloc, cuMemAlloc_v2, (address * memory, size_t bytes))                                            \
    ENTRY(upload, cuMemcpyHtoD_v2, (address to, const void *from, size_t bytes))                             \
    ENTRY(download, cuMemcpyDtoH_v2, (void *to, address from, size_t bytes))

static struct {
#define MEMBER(member, name, parameters) int(*member) parameters; /* NOLINT(bugprone-macro-parentheses) */
    ENTRIES(MEMBER)
} driver;

static int open_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int count = 0;
    if (!library) return 0;
#define FIND(member, name, parameters)                                                                       \
    *(void **)&driver.member = dlsym(library, #name);                                                        \
    if (!driver.member) printf("libcuda.so.1 has no %s\n", #name), exit(SKIPPED);
    ENTRIES(FIND)
    return driver.init(0) || driver.count(&count) ? 0 : count;
}

#define WORKS(call) CHECK_EQ(call, 0)

/* ---- A decode of keys that are all 1: so is every result ----------------------------------------------- */

enum { B = 3, H_Q = 64, D_QK = 576, D_V = 512, PAGE = 64, MAX_PAGES = 64, PAGES = 8, ONE = 0x3f80 };

struct call {
    fmla_dense_decode_args args;
    fmla_tensor q, kv, table, lengths, out;
    size_t out_bytes;
    fmla_status status;
    char words[256];
};

static fmla_tensor tensor(int32_t device, fmla_dtype dtype, int ndim, const int64_t *shape, int32_t fill,
                          size_t *bytes)
{
    size_t count = 1;
    address at = 0;
    for (int i = 0; i < ndim; i++) count *= (size_t)shape[i];
    *bytes = count * dtype.bits / 8;
    char *host = malloc(*bytes);
    if (!host) abort();
    for (size_t i = 0; i < count; i++) memcpy(host + i * (dtype.bits / 8), &fill, dtype.bits / 8);
    WORKS(driver.alloc(&at, *bytes));
    WORKS(driver.upload(at, host, *bytes));
    free(host);
    return (fmla_tensor){(void *)(uintptr_t)at, {FMLA_DEVICE_CUDA, device}, ndim, dtype, shape, NULL, 0};
}

/* Makes the call's data in the current context. */
static void make(struct call *c, int32_t device)
{
    static const int64_t q[] = {B, 1, H_Q, D_QK}, kv[] = {PAGES, PAGE, 1, D_QK}, table[] = {B, MAX_PAGES},
                         lengths[] = {B}, out[] = {B, 1, H_Q, D_V};
    size_t bytes;
    memset(c, 0, sizeof *c);
    c->q = tensor(device, bf16, 4, q, ONE, &bytes), c->kv = tensor(device, bf16, 4, kv, ONE, &bytes);
    c->table = tensor(device, i32, 2, table, PAGES - 1, &bytes);
    c->lengths = tensor(device, i32, 1, lengths, MAX_PAGES * PAGE - 5, &bytes);
    c->out = tensor(device, bf16, 4, out, 0, &c->out_bytes);
    c->args = FMLA_INIT(fmla_dense_decode_args);
    c->args.q = &c->q, c->args.kv_cache = &c->kv, c->args.block_table = &c->table;
    c->args.seqlens = &c->lengths, c->args.out = &c->out;
    address workspace = 0;
    CHECK_OK(fmla_dense_decode_workspace_size(&c->args, &c->args.workspace_size, NULL));
    WORKS(driver.alloc(&workspace, c->args.workspace_size));
    c->args.workspace = (void *)(uintptr_t)workspace;
}

static void *decode(void *data)
{
    struct call *c = data;
    c->status = fmla_dense_decode(&c->args);
    snprintf(c->words, sizeof c->words, "%s", fmla_last_error());
    return NULL;
}

/* Runs the call in the current context or on a thread without one, then reads the results in the current
 * context. */
static void run(const char *when, int32_t device, bool on_a_thread)
{
    struct call c;
    pthread_t thread;
    unsigned long long id = 0;
    make(&c, device);
    WORKS(driver.id(NULL, &id));
    printf("%s: context id %llu\n", when, id);
    if (!on_a_thread)
        decode(&c);
    else if (pthread_create(&thread, NULL, decode, &c) || pthread_join(thread, NULL))
        abort();
    CHECK(c.status == FMLA_OK, "%s: %s", when, c.words);
    CHECK(driver.wait() == 0, "%s: the context has an error", when);
    uint16_t *out = calloc(1, c.out_bytes);
    if (!out) abort();
    WORKS(driver.download(out, (address)(uintptr_t)c.out.data, c.out_bytes));
    int64_t wrong = 0;
    for (size_t i = 0; i < c.out_bytes / 2; i++) wrong += out[i] != ONE;
    CHECK(!wrong, "%s: %" PRId64 " values are not 1", when, wrong);
    free(out);
}

static void *prepare(void *data)
{
    fmla_status *status = data;
    *status = fmla_prepare((fmla_device){FMLA_DEVICE_CUDA, 0});
    if (*status) printf("%s\n", fmla_last_error());
    return NULL;
}

/* Runs in the current primary context, which this test retains as another library would. */
static void run_in_primary(const char *when, bool on_a_thread)
{
    handle context;
    WORKS(driver.retain(&context, 0));
    WORKS(driver.push(context));
    run(when, 0, on_a_thread);
    WORKS(driver.pop(&context));
}

/* ---- Scenarios ----------------------------------------------------------------------------------------- */

static void primary_is_reset(void)
{
    int active = -1;
    unsigned flags;
    run_in_primary("first, from a thread without a context", true);
    for (int i = 0; i < 3; i++) {
        WORKS(driver.reset(0));
        WORKS(driver.state(0, &flags, &active));
        CHECK_EQ(active, 0);
        fmla_status status = FMLA_DEVICE_ERROR;
        pthread_t thread;
        /* Nobody has retained it since. */
        if (pthread_create(&thread, NULL, prepare, &status) || pthread_join(thread, NULL)) abort();
        CHECK_EQ(status, FMLA_OK);
        run_in_primary("reset, retained by the library", true);
        WORKS(driver.reset(0));
        run_in_primary("reset, retained by another", true);
    }
}

static void current_is_reset(void)
{
    handle context, again;
    WORKS(driver.retain(&context, 0));
    WORKS(driver.push(context));
    run("first, in the current context", 0, false);
    WORKS(driver.reset(0));
    WORKS(driver.retain(&again, 0));
    printf("the handle is %s\n", again == context ? "the same" : "another");
    if (again != context) WORKS(driver.push(again));
    run("reset, in the current context", 0, false);
}

static void own_contexts(void)
{
    handle context;
    for (int i = 0; i < 4; i++) {
        WORKS(driver.create(&context, 0, 0));
        printf("handle %p\n", context);
        run("in a context of the application", 0, false);
        WORKS(driver.destroy(context));
    }
}

struct use {
    int32_t device;
    double begin, end;
    fmla_status status;
};

static pthread_barrier_t barrier;

static void *first_use(void *data)
{
    struct use *u = data;
    pthread_barrier_wait(&barrier);
    u->begin = timing_now();
    u->status = fmla_prepare((fmla_device){FMLA_DEVICE_CUDA, u->device});
    u->end = timing_now();
    return NULL;
}

/* Loads all kernels of both GPUs, whose contexts already exist: one after the other in one process,
 * concurrently in another. */
static void first_uses(bool at_once)
{
    struct use use[2] = {{.device = 0}, {.device = 1}};
    pthread_t thread[2];
    handle context;
    for (int i = 0; i < 2; i++) WORKS(driver.retain(&context, i));
    pthread_barrier_init(&barrier, NULL, at_once ? 2 : 1);
    const double begin = timing_now();
    for (int i = 0; i < 2; i++) {
        if (pthread_create(&thread[i], NULL, first_use, &use[i])) abort();
        if (!at_once) pthread_join(thread[i], NULL);
    }
    for (int i = 0; i < 2 && at_once; i++) pthread_join(thread[i], NULL);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(use[i].status, FMLA_OK);
        printf("%s: cuda:%d from %.3f to %.3f s\n", at_once ? "at once" : "in turns", i, use[i].begin - begin,
               use[i].end - begin);
    }
    if (at_once) CHECK(use[0].begin < use[1].end && use[1].begin < use[0].end, "%s", "they did not overlap");
    for (int i = 0; i < 2; i++) {
        WORKS(driver.retain(&context, i));
        WORKS(driver.push(context));
        run("after both first uses", i, true);
        WORKS(driver.pop(&context));
    }
}

static void in_turns(void)
{
    first_uses(false);
}

static void together(void)
{
    first_uses(true);
}

/* Finds out whether there is a GPU that this build can use. */
static void probe(void)
{
    fmla_status status;
    prepare(&status);
    if (status == FMLA_UNSUPPORTED) exit(SKIPPED);
    CHECK_EQ(status, FMLA_OK);
}

static const struct {
    const char *name;
    void (*run)(void);
    int gpus;
} scenarios[] = {{"a GPU", probe, 1},
                 {"the primary context is reset", primary_is_reset, 1},
                 {"the current context is reset", current_is_reset, 1},
                 {"contexts of the application", own_contexts, 1},
                 {"first uses in turns", in_turns, 2},
                 {"first uses at once", together, 2}};
enum { SCENARIOS = sizeof scenarios / sizeof scenarios[0] };

static int run_one(int i)
{
    const int gpus = open_driver();
    if (!gpus || gpus < scenarios[i].gpus) {
        printf("%s: skipped: %d GPUs\n", scenarios[i].name, gpus);
        return SKIPPED;
    }
    printf("-- %s\n", scenarios[i].name);
    scenarios[i].run();
    fflush(stdout);
    return check_failures != 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "--scenario")) return run_one(atoi(argv[2]) % SCENARIOS);
    for (int i = 0; i < SCENARIOS; i++) { /* an initialised driver does not survive a fork */
        const int status = fake_again(argv, "--scenario", i);
        const bool skipped = status != -1 && WIFEXITED(status) && WEXITSTATUS(status) == SKIPPED;
        if (skipped && i == 0) return puts("needs a GPU"), SKIPPED;
        CHECK(!status || skipped, "scenario \"%s\" ended with %x", scenarios[i].name, (unsigned)status);
    }
    return check_done("test_gpu_contexts");
}
