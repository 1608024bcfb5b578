/* SPDX-License-Identifier: MIT
 *
 * Tests every operation with the driver refusing each step, including launches after successful ones: the
 * result is FMLA_DEVICE_ERROR with the operation and the driver's message, contexts and capture mode are
 * unchanged, and the next call works.
 */
#include "fake_cuda/launches.h"

static const char *name_of(enum operation operation)
{
    return descriptors[operation].name;
}

/* A refused entry: the driver's message and, if the operation makes its first call there, the object of
 * that call. */
static const struct step {
    int entry;
    const char *words;
    enum operation operation;
    const char *of;
} steps[] = {
    {CALL_cuCtxGetCurrent, "cuCtxGetCurrent", 0, ""},
    {CALL_cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 0, ""},
    {CALL_cuCtxPushCurrent_v2, "cuCtxPushCurrent", 0, ""},
    {CALL_cuDevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState", 0, ""},
    {CALL_cuCtxGetId, "cuCtxGetId", 0, ""},
    /* Loading comes first, if not yet loaded. */
    {CALL_cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", 0, ""},
    {CALL_cuLibraryLoadData, "cuLibraryLoadData of ", OP_DECODE_PLAN, "|any/"},
    {CALL_cuLibraryGetKernel, "cuLibraryGetKernel of ", OP_DECODE_PLAN, "|decode_plan"},
    {CALL_cuKernelGetFunction, "cuKernelGetFunction of ", OP_DECODE_PLAN, "|decode_plan"},
    {CALL_cuKernelSetAttribute, "cuKernelSetAttribute of ", OP_DENSE_DECODE, "|sm90_dense_decode_bf16_576"},
    {CALL_cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled of ", OP_DENSE_DECODE, "|kv_cache"},
    {CALL_cuLaunchKernelEx, "launch of ", OP_DECODE_PLAN, "|decode_plan"},
};

/* Makes the n-th call of an entry within an operation fail, for every n; returns how many there are. */
static int fails_at_each(enum operation operation, const struct step *step)
{
    const int entry = step->entry;
    for (int n = 0;; n++) {
        fake->launches = 0;
        fake->passes[entry] = fake->calls[entry] + n;
        fake->fails[entry] = FAKE_LAUNCH_FAILED, fake->once[entry] = 1;
        const fmla_status status = small_call(operation, 0);
        fake->fails[entry] = CU_SUCCESS, fake->once[entry] = 0;
        CHECK_ALL({fake_depth(), 0}, {fake_capture_mode(), 0});
        if (!status) {
            CHECK(fake->launches == small_of(operation).launches, "%s: %d launches", name_of(operation),
                  fake->launches);
            return n;
        }
        char label[64], words[160];
        const bool first = !n && step->operation == operation;
        snprintf(label, sizeof label, "%s, entry %d, call %d", name_of(operation), entry, n);
        snprintf(words, sizeof words, "%s%s|CUDA_ERROR_LAUNCH_FAILED 719 (unspecified launch failure)",
                 step->words, first ? step->of : "");
        check_rejected(label, status, FMLA_DEVICE_ERROR, name_of(operation), "cuda:0", words);
        if (entry == CALL_cuLaunchKernelEx) CHECK_EQ(fake->launches, n);
        /* The restoring exchange is not refused: the mode would stay changed. */
        if (n == 100 || entry == CALL_cuThreadExchangeStreamCaptureMode) return -1;
    }
}

static void each_step(void)
{
    for (enum operation i = 0; i < OPERATIONS; i++)
        for (const struct step *step = steps; step < steps + sizeof steps / sizeof steps[0]; step++) {
            const int times = fails_at_each(i, step);
            if (step->entry == CALL_cuLaunchKernelEx) CHECK_EQ(times, small_of(i).launches);
            if (step->entry == CALL_cuCtxGetId) CHECK_EQ(times, 1);
        }
    for (enum operation i = 0; i < OPERATIONS; i++)
        CHECK(small_call(i, 0) == FMLA_OK, "%s: %s", name_of(i), fmla_last_error());
    CHECK_EQ(fake->retained[0], 1);
}

/* Calls whose CTAs would wait for each other use several launches where not all fit at once. */
static void check_several_launches(void)
{
    fake->launches = 0;
    CHECK_OK(decode_small(0));
    CHECK_ALL({fake->launches, 3}, {fake_depth(), 0});
    CHECK(!joins_in_kernel(launched(1)) && !strncmp(launched(0)->kernel, "join", 4), "%s",
          launched(1)->kernel);
}

/* In a context with fewer SMs than its device. */
static void no_room_for_all_ctas(void)
{
    CHECK_OK(decode_small(0));
    CHECK(joins_in_kernel(launched(0)), "%s", launched(0)->kernel);
    fake->fails[CALL_cuLaunchKernelEx] = CU_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
    fake->once[CALL_cuLaunchKernelEx] = 1;
    check_several_launches();
}

/* The same in a green context, without asking the driver to launch: a captured launch would not be refused. */
static void green_context(void)
{
    fake->context_sms = 16;
    check_several_launches();
}

/* After a kernel error, an entry that only queries reports it, and so do all later entries. */
static void an_error_that_stays(void)
{
    CHECK_OK(decode_small(0));
    for (int entry = 0; entry < CALLS; entry++)
        if (entry != CALL_cuGetErrorName && entry != CALL_cuGetErrorString)
            fake->fails[entry] = FAKE_LAUNCH_FAILED;
    for (enum operation i = 0; i < OPERATIONS; i++)
        check_rejected(name_of(i), small_call(i, 0), FMLA_DEVICE_ERROR, name_of(i), "cuda:0",
                       "CUDA_ERROR_LAUNCH_FAILED");
    CHECK_EQ(fake_depth(), 0);
}

int main(int argc, char **argv)
{
    return RUN_SCENARIOS(argc, argv, "test_cuda_failures", each_step, no_room_for_all_ctas, green_context,
                         an_error_that_stays);
}
