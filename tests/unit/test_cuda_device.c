/* SPDX-License-Identifier: MIT
 *
 * Tests which GPUs a machine has and which can be used, the context in which calls run, and the handling
 * of driver errors, with the fake driver (fake_cuda/).
 */
#include "fake_cuda/calls.h"

#include "cuda/device.h"
#include "cuda/images.h"

#include <pthread.h>

static const fmla_device gpu = {FMLA_DEVICE_CUDA, 0};

/* ---- Without a GPU that can be used ------------------------------------------------------------------- */

/* Here libcuda.so.1 is not a library; the test that runs only this scenario finds it before any real one. */
static void no_driver(void)
{
    check_unusable(0, "cuda:0|there is no NVIDIA driver: |libcuda.so.1");
    check_unusable(7, "cuda:7|there is no NVIDIA driver: |libcuda.so.1");
}

static void driver_too_old(void)
{
    fake->version = 12080;
    check_unusable(0, "cuda:0|driver is too old|CUDA 12.8|CUDA 13.0 (driver 580)");
    CHECK_EQ(fake->calls[CALL_cuInit], 0);
    fmla_device_info info = FMLA_INIT(fmla_device_info);
    CHECK_OK(fmla_device_describe(gpu, &info));
    CHECK_ALL({info.driver, 12080}, {info.driver_needed, 13000}, {info.count, 0});
}

static void no_gpu(void)
{
    fake->fails[CALL_cuInit] = CU_ERROR_NO_DEVICE;
    check_unusable(0, "cuda:0|there is no NVIDIA GPU");
    CHECK_EQ(fake->calls[CALL_cuInit], 1);
}

#define UNUSABLE(scenario, words, ...)                                                                       \
    static void scenario(void)                                                                               \
    {                                                                                                        \
        __VA_ARGS__;                                                                                         \
        check_unusable(0, words);                                                                            \
    }
UNUSABLE(no_gpu_counted, "cuda:0|there is no NVIDIA GPU", fake->devices = 0)
UNUSABLE(driver_does_not_start, "cuda:0|does not start|CUDA_ERROR_MISMATCH 803 (driver and library differ)",
         fake->fails[CALL_cuInit] = 803)
UNUSABLE(driver_without_words, "cuda:0|cuDeviceGetCount|unknown error 4321",
         fake->fails[CALL_cuDeviceGetCount] = 4321)

static void past_the_count(void)
{
    check_unusable(1, "cuda:1|this machine has one GPU, cuda:0");
    CHECK_OK(decode_small(0));
}

static void past_two(void)
{
    fake->devices = 2;
    check_unusable(2, "cuda:2|this machine has 2 GPUs, cuda:0 to cuda:1");
    check_unusable(INT32_MAX, "cuda:2147483647|2 GPUs");
    CHECK_OK(decode_small(1));
}

static void past_all_that_are_looked_at(void)
{
    fake->devices = FAKE_DEVICES;
    check_unusable(CUDA_DEVICES, "cuda:64|the first 64 GPUs|70");
    CHECK_OK(decode_small(CUDA_DEVICES - 1));
}

static void too_old_a_gpu(void)
{
    fake->capability = 75, fake->name = "Tesla T4";
    check_unusable(0, "cuda:0|Tesla T4|too old|7.5|8.0");
    fmla_device_info info = FMLA_INIT(fmla_device_info);
    CHECK_OK(fmla_device_describe(gpu, &info));
    CHECK(!strcmp(info.name, "Tesla T4") && info.compute_capability == 75 && info.workers == 132 &&
              info.count == 1,
          "%s, %d, %d SMs", info.name, info.compute_capability, info.workers);
}

static void stands_for_another(void)
{
    setenv("FLASHMLA_GPU_CAPABILITY", "86", 1);
    fake->capability = 90, fake->shared_bytes = 232448;
    fmla_device_info info = FMLA_INIT(fmla_device_info);
    CHECK_OK(fmla_device_describe(gpu, &info));
    CHECK_ALL({info.compute_capability, 86}, {info.shared_bytes, 101376});
    CHECK_OK(decode_small(0));
    CHECK_ALL({fake->launches, 3}); /* the planner, the kernel, the join */
    CHECK(!strncmp(fake->launch[1].kernel, "sm80_dense_decode", 17), "%s", fake->launch[1].kernel);
}

UNUSABLE(stands_for_none, "cuda:0|FLASHMLA_GPU_CAPABILITY is 8.6, must be 80, 86,",
         setenv("FLASHMLA_GPU_CAPABILITY", "8.6", 1))

UNUSABLE(a_gpu_that_does_not_answer, "cuda:0|cuDeviceGetAttribute|CUDA_ERROR_MISMATCH",
         fake->fails[CALL_cuDeviceGetAttribute] = 803)

/* ---- A GPU --------------------------------------------------------------------------------------------- */

static void described(void)
{
    fake->devices = 2, fake->capability = 121, fake->sms = 48, fake->shared_bytes = 101376;
    fmla_device_info info = FMLA_INIT(fmla_device_info);
    CHECK_OK(fmla_device_describe((fmla_device){FMLA_DEVICE_CUDA, 1}, &info));
    CHECK(!strcmp(info.name, "NVIDIA Imaginary") && !*info.reason && !strcmp(info.built_for, "80 90a"),
          "%s, %s, %s", info.name, info.reason, info.built_for);
    CHECK(!strcmp(info.needs, "CUDA 13.0 (driver 580)"), "needs %s", info.needs);
    CHECK_ALL({info.count, 2}, {info.workers, 48}, {info.compute_capability, 121},
              {info.shared_bytes, 101376}, {info.driver, 13000}, {info.driver_needed, 13000},
              {info.built_with, 13000}, {info.ptx, 80});
    int available = 0;
    for (int64_t i = 0;; i++) {
        fmla_capability row = FMLA_INIT(fmla_capability);
        if (fmla_capabilities((fmla_device){FMLA_DEVICE_CUDA, 1}, i, &row) != FMLA_OK) break;
        if (!row.kernel) continue; /* an operation without a GPU kernel */
        const int elsewhere = !strncmp(row.kernel, "cuda-sm90", 9),
                  part = elsewhere && row.kernel[9] && strcmp(row.kernel, "cuda-sm90-fp8") != 0;
        CHECK(row.forced_only == part && !strcmp(row.part_of, part ? "cuda-sm90" : ""), "%s: part of \"%s\"",
              row.kernel, row.part_of);
        CHECK(row.available == !elsewhere &&
                  !strcmp(row.reason, elsewhere ? "this GPU's compute capability is not 9.0" : ""),
              "%s %s: %s", row.operation, row.kernel, row.reason);
        available += row.available;
    }
    CHECK(available >= 3, "%d kernels", available);
    CHECK_ALL({fake->calls[CALL_cuDevicePrimaryCtxRetain], 0 /* a query must not allocate GPU memory */},
              {fake->calls[CALL_cuLibraryLoadData], 0});
}

static void build_serves(void)
{
    static const struct {
        const char *targets;
        int ptx, capability, code;
    } cases[] = {
        {"80 90a", 80, 80, 80},    {"80 90a", 80, 86, 80},  {"80 90a", 0, 90, 90},      {"80 90a", 0, 89, 80},
        {"80 90a", 80, 121, 80},   {"80 90a", 80, 100, 80}, {"80 90a", 0, 100, 0},      {"90a", 0, 80, 0},
        {"86 90", 86, 80, 0},      {"86 90", 86, 90, 90},   {"86 80", 86, 89, 86},      {"100a", 0, 103, 0},
        {"100", 0, 103, 100},      {"100", 0, 120, 0},      {"100", 100, 120, 100},     {"103", 103, 100, 0},
        {"120 80", 120, 121, 120}, {"120 80", 120, 90, 0},  {"120 121", 121, 130, 121}, {"", 0, 80, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct cuda_build build = {.targets = cases[i].targets, .ptx = cases[i].ptx};
        CHECK(cuda_build_code(&build, cases[i].capability) == cases[i].code,
              "built for \"%s\", PTX %d; capability %d", cases[i].targets, cases[i].ptx, cases[i].capability);
    }
}

/* ---- Contexts ------------------------------------------------------------------------------------------ */

static void no_context(void)
{
    for (int i = 0; i < 3; i++) {
        CHECK(decode_small(0) == FMLA_OK && merge_small(0) == FMLA_OK && plan_small(0) == FMLA_OK, "%s",
              fmla_last_error());
        CHECK_EQ(fake_depth(), 0);
    }
    CHECK_ALL({fake->retained[0], 1}, {fake->calls[CALL_cuCtxPushCurrent_v2], 9},
              {fake->calls[CALL_cuCtxPopCurrent_v2], 9});
    CHECK(fake->launches >= 9, "%d launches", fake->launches);
    for (int i = 0; i < fake->launches; i++)
        CHECK(fake->launch[i].context->primary && fake->launch[i].context->device == 0, "launch %d", i);
}

static void own_context(void)
{
    fake->devices = 2;
    fake_context(&fake->context[1], 1);
    CHECK_EQ(fake_entries.context_push(&fake->context[1]), 0);
    CHECK_OK(decode_small(1));
    CHECK_ALL({fake_depth(), 1}, {fake->calls[CALL_cuDevicePrimaryCtxRetain], 0});
    CHECK(fake->launches > 0, "%d launches", fake->launches);
    for (int i = 0; i < fake->launches; i++)
        CHECK(fake->launch[i].context == &fake->context[1], "launch %d", i);
    /* In another context of the same GPU nothing is loaded again; the kernels are made ready there. */
    const int loads = fake->calls[CALL_cuLibraryLoadData], ready = fake->calls[CALL_cuKernelGetFunction];
    fake_context(&fake->context[2], 1);
    CHECK_EQ(fake_entries.context_push(&fake->context[2]), 0);
    CHECK(decode_small(1) == FMLA_OK && decode_small(1) == FMLA_OK, "%s", fmla_last_error());
    CHECK_ALL({fake->calls[CALL_cuLibraryLoadData], loads},
              {fake->calls[CALL_cuKernelGetFunction], 2 * ready});
}

static void other_context(void)
{
    fake->devices = 3;
    fake_context(&fake->context[0], 2);
    CHECK_EQ(fake_entries.context_push(&fake->context[0]), 0);
    check_rejected("decode", decode_small(1), FMLA_INVALID_ARGUMENT, "dense_decode", "q", "cuda:1|cuda:2");
    check_rejected("merge", merge_small(0), FMLA_INVALID_ARGUMENT, "merge", "out_parts", "cuda:0|cuda:2");
    check_rejected("plan", plan_small(0), FMLA_INVALID_ARGUMENT, "decode_plan", "seqlens", "cuda:0|cuda:2");
    check_rejected("sparse plan", small_call(OP_SPARSE_PLAN, 0), FMLA_INVALID_ARGUMENT, "sparse_plan",
                   "topk_length", "cuda:0|cuda:2");
    check_rejected("prepare", fmla_prepare(gpu), FMLA_INVALID_ARGUMENT, "prepare", "device", "cuda:0|cuda:2");
    CHECK_ALL({fake->launches, 0}, {fake_depth(), 1});
    CHECK_OK(decode_small(2));
}

/* ---- Loading -------------------------------------------------------------------------------------------- */

static void during_a_capture(void)
{
    fake->capturing = 1;
    CHECK(decode_small(0) == FMLA_OK && merge_small(0) == FMLA_OK, "%s", fmla_last_error());
    CHECK_EQ(fake_capture_mode(), 0); /* unchanged */
    CHECK(fake->calls[CALL_cuThreadExchangeStreamCaptureMode] > 0, "%s", "loaded without relaxing the mode");
    /* A loaded kernel needs no exchange of the capture mode. */
    const int exchanges = fake->calls[CALL_cuThreadExchangeStreamCaptureMode];
    CHECK_OK(decode_small(0));
    CHECK_EQ(fake->calls[CALL_cuThreadExchangeStreamCaptureMode], exchanges);
}

/* Machine code only for 9.0 is not loaded for another GPU. */
static void prepared_elsewhere(void)
{
    fake->capability = 80, fake->shared_bytes = 166912;
    CHECK_OK(fmla_prepare(gpu));
    CHECK_EQ(fake->calls[CALL_cuLibraryLoadData], (int64_t)cuda_build.count - 18);
}

static void prepared(void)
{
    CHECK_OK(fmla_prepare(gpu));
    CHECK_ALL({fake->launches, 0}, {fake->calls[CALL_cuLibraryLoadData], (int64_t)cuda_build.count});
    const int before[] = {fake->calls[CALL_cuLibraryGetKernel], fake->calls[CALL_cuKernelGetFunction],
                          fake->calls[CALL_cuKernelSetAttribute]};
    CHECK(fmla_prepare(gpu) == FMLA_OK && decode_small(0) == FMLA_OK && merge_small(0) == FMLA_OK, "%s",
          fmla_last_error());
    CHECK_ALL({fake->calls[CALL_cuLibraryLoadData], (int64_t)cuda_build.count},
              {fake->calls[CALL_cuLibraryGetKernel], before[0]},
              {fake->calls[CALL_cuKernelGetFunction], before[1]},
              {fake->calls[CALL_cuKernelSetAttribute], before[2]});
}

/* Threads make their first calls at the same time, on two GPUs. */
enum { THREADS = 8, ROUNDS = 5 };
static pthread_barrier_t barrier;

static void *caller(void *device)
{
    int64_t failures = 0;
    pthread_barrier_wait(&barrier);
    for (int i = 0; i < ROUNDS; i++) failures += merge_small(*(int32_t *)device) != FMLA_OK;
    return failures ? device : NULL;
}

static void many_threads(void)
{
    fake->devices = 2;
    pthread_t threads[THREADS];
    int32_t device[THREADS];
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (int i = 0; i < THREADS; i++) {
        device[i] = i % 2;
        if (pthread_create(&threads[i], NULL, caller, &device[i])) abort();
    }
    for (int i = 0; i < THREADS; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        CHECK(!failed, "thread %d failed", i);
    }
    pthread_barrier_destroy(&barrier);
    CHECK_ALL({fake->launches, THREADS * ROUNDS}, {fake->calls[CALL_cuInit], 1},
              {fake->calls[CALL_cuLibraryLoadData], 1}, {fake->calls[CALL_cuLibraryGetKernel], 1},
              {fake->calls[CALL_cuKernelGetFunction], 2});
    CHECK(fake->retained[0] == 1 && fake->retained[1] == 1, "%d, %d", fake->retained[0], fake->retained[1]);
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "--no-driver")) {
        no_driver();
        return check_done("test_cuda_device --no-driver");
    }
    return RUN_SCENARIOS(argc, argv, "test_cuda_device", driver_too_old, no_gpu, no_gpu_counted,
                         driver_does_not_start, driver_without_words, past_the_count, past_two,
                         past_all_that_are_looked_at, too_old_a_gpu, stands_for_another, stands_for_none,
                         a_gpu_that_does_not_answer, described, build_serves, no_context, own_context,
                         other_context, during_a_capture, prepared, prepared_elsewhere, many_threads);
}
