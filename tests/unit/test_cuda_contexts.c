/* SPDX-License-Identifier: MIT
 *
 * Tests contexts that end while the library uses them, and slow first uses, with the fake driver
 * (fake_cuda/).
 */
#include "fake_cuda/calls.h"

#include <pthread.h>
#include <time.h>

static cu_result (*reset)(cu_device device);
static cu_result (*retain)(cu_context *context, cu_device device);

static void open_both(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    fake_find(library, "cuDevicePrimaryCtxReset_v2", &reset);
    fake_find(library, "cuDevicePrimaryCtxRetain", &retain);
    fake->devices = 2;
}

static void decodes(const char *when)
{
    CHECK(decode_small(0) == FMLA_OK, "%s: %s", when, fmla_last_error());
}

/* ---- Contexts that end -------------------------------------------------------------------------------- */

/* Loaded kernels are made ready again, once; images are not loaded again. */
static void check_made_ready_again(const char *when, int functions)
{
    int before[CALLS];
    memcpy(before, fake->calls, sizeof before);
    decodes(when);
    CHECK(fake->calls[CALL_cuKernelGetFunction] == before[CALL_cuKernelGetFunction] + functions &&
              fake->calls[CALL_cuLibraryLoadData] == before[CALL_cuLibraryLoadData] &&
              fake->calls[CALL_cuKernelSetAttribute] > before[CALL_cuKernelSetAttribute],
          "%s: %d functions, %d images, %d attributes", when, fake->calls[CALL_cuKernelGetFunction],
          fake->calls[CALL_cuLibraryLoadData], fake->calls[CALL_cuKernelSetAttribute]);
}

/* The application resets the primary context that the library keeps; nobody retains it again, or another
 * user does. */
static void primary_is_reset(void)
{
    open_both();
    decodes("first");
    const int functions = fake->calls[CALL_cuKernelGetFunction];
    for (int i = 0; i < 4; i++) {
        const int by_another = i % 2;
        char when[64];
        cu_context context;
        fake->resets_move = i / 2;
        CHECK_EQ(reset(FAKE_HANDLE), CU_SUCCESS);
        if (by_another) CHECK_EQ(retain(&context, FAKE_HANDLE), CU_SUCCESS);
        snprintf(when, sizeof when, "reset%s%s", by_another ? ", retained by another" : "",
                 fake->resets_move ? ", the handle has moved" : "");
        check_made_ready_again(when, functions);
        CHECK_EQ(fake_depth(), 0);
        int before[CALLS];
        memcpy(before, fake->calls, sizeof before);
        decodes(when);
        CHECK_ALL({fake->calls[CALL_cuKernelGetFunction], before[CALL_cuKernelGetFunction]},
                  {fake->calls[CALL_cuDevicePrimaryCtxRetain], before[CALL_cuDevicePrimaryCtxRetain]});
    }
}

/* As before, on a thread where it is the current context, which the driver leaves current. */
static void current_is_reset(void)
{
    open_both();
    cu_context context;
    CHECK_EQ(retain(&context, FAKE_HANDLE), CU_SUCCESS);
    CHECK_EQ(fake_entries.context_push(context), CU_SUCCESS);
    decodes("first");
    const int functions = fake->calls[CALL_cuKernelGetFunction];
    CHECK_EQ(reset(FAKE_HANDLE), CU_SUCCESS);
    check_rejected("a context that is gone", decode_small(0), FMLA_DEVICE_ERROR, "dense_decode", "cuda:0",
                   "cuCtxGetId|CUDA_ERROR_CONTEXT_IS_DESTROYED 709");
    CHECK_EQ(fake_depth(), 1);
    CHECK_EQ(retain(&context, FAKE_HANDLE), CU_SUCCESS);
    check_made_ready_again("retained again", functions);
    CHECK_EQ(fake_depth(), 1);
}

/* A later context of the application may get the handle of a destroyed one. */
static void handle_used_again(void)
{
    open_both();
    fake_context(&fake->context[0], 0);
    CHECK_EQ(fake_entries.context_push(&fake->context[0]), CU_SUCCESS);
    decodes("first");
    const int functions = fake->calls[CALL_cuKernelGetFunction];
    fake_context(&fake->context[0], 0);
    check_made_ready_again("the same handle", functions);
}

/* ---- First uses that take long ------------------------------------------------------------------------- */

/* A first use on its own thread, and a flag for its end. */
struct use {
    fmla_status (*call)(int32_t device);
    int32_t device;
    pthread_t thread;
    _Atomic int over;
    fmla_status status;
};

static void *use(void *data)
{
    struct use *u = data;
    u->status = u->call(u->device);
    u->over = 1;
    return NULL;
}

static void begin(struct use *u, fmla_status (*call)(int32_t device), int32_t device)
{
    *u = (struct use){.call = call, .device = device};
    if (pthread_create(&u->thread, NULL, use, u)) abort();
}

/* Like begin() on the first GPU; returns when that use blocks in a driver entry. */
static void begin_held(struct use *u, fmla_status (*call)(int32_t device), int entry)
{
    const struct timespec pause = {0, 1000000};
    fake->held_call = entry, fake->held_device = 0, fake->hold = 1;
    begin(u, call, 0);
    for (int i = 0; i < 10000 && !fake->held; i++) nanosleep(&pause, NULL);
}

static void end(const char *name, struct use *u)
{
    pthread_join(u->thread, NULL);
    CHECK(u->status == FMLA_OK, "%s: status %d", name, (int)u->status);
}

/* While one thread blocks in a driver entry on the first GPU, only threads that need the same thing wait
 * for it. */
static void nobody_waits(int call, const char *name)
{
    struct use slow, same, elsewhere, other;
    CHECK_OK(merge_small(0));
    begin_held(&slow, plan_small, call);
    CHECK(fake->held, "%s: nobody is held", name);
    begin(&same, plan_small, 0);
    if (call != CALL_cuLibraryLoadData) {
        begin(&elsewhere, plan_small, 1); /* the same kernel; images are per process */
        end(name, &elsewhere);
    }
    begin(&elsewhere, gather_small, 1);
    end(name, &elsewhere);
    begin(&other, merge_small, 0); /* already loaded */
    end(name, &other);
    CHECK(fake->held && !slow.over && !same.over, "%s: the others waited", name);
    const int calls = fake->calls[call];
    fake->hold = 0;
    end(name, &slow);
    end(name, &same);
    CHECK(fake->calls[call] == calls, "%s: done twice", name);
}

static void slow_image(void)
{
    open_both();
    nobody_waits(CALL_cuLibraryLoadData, "cuLibraryLoadData");
}

static void slow_function(void)
{
    open_both();
    nobody_waits(CALL_cuKernelGetFunction, "cuKernelGetFunction");
}

/* Makes a context on one GPU while another GPU has its first use. */
static void slow_context(void)
{
    struct use slow, same, elsewhere;
    open_both();
    begin_held(&slow, merge_small, CALL_cuDevicePrimaryCtxRetain);
    begin(&same, merge_small, 0);
    begin(&elsewhere, merge_small, 1);
    end("elsewhere", &elsewhere);
    CHECK(fake->held && !slow.over && !same.over, "%s", "the other GPU waited");
    fake->hold = 0;
    end("slow", &slow);
    end("same", &same);
    CHECK_EQ(fake->retained[0], 1);
}

/* If loading fails, it fails for waiting threads too, or they load it themselves. */
static void slow_and_refused(void)
{
    struct use slow, same;
    open_both();
    fake->fails[CALL_cuKernelGetFunction] = FAKE_LAUNCH_FAILED;
    begin_held(&slow, merge_small, CALL_cuKernelGetFunction);
    begin(&same, merge_small, 0);
    fake->hold = 0;
    pthread_join(slow.thread, NULL), pthread_join(same.thread, NULL);
    CHECK_ALL({slow.status, FMLA_DEVICE_ERROR}, {same.status, FMLA_DEVICE_ERROR});
    fake->fails[CALL_cuKernelGetFunction] = CU_SUCCESS;
    CHECK_OK(merge_small(0));
}

int main(int argc, char **argv)
{
    return RUN_SCENARIOS(argc, argv, "test_cuda_contexts", primary_is_reset, current_is_reset,
                         handle_used_again, slow_image, slow_function, slow_context, slow_and_refused);
}
