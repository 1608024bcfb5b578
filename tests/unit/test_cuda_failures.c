/* SPDX-License-Identifier: MIT
 *
 * Every step of every operation refused by the driver, launches behind others that went well too: FMLA_DEVICE_ERROR with the
 * operation and the driver's words, contexts and the mode of captures as before, and the next call works.
 */
#include "fake_cuda/launches.h"

static const char *name_of(int call)
{
    return descriptors[small_calls[call].operation].name;
}

/* An entry that is refused: the driver's words, and, where the first call of an operation is, what it was of. */
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
    /* Loading comes first, of what is not loaded yet. */
    {CALL_cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", 0, ""},
    {CALL_cuLibraryLoadData, "cuLibraryLoadData of ", OP_DECODE_PLAN, "|any/"},
    {CALL_cuLibraryGetKernel, "cuLibraryGetKernel of ", OP_DECODE_PLAN, "|decode_plan"},
    {CALL_cuKernelGetFunction, "cuKernelGetFunction of ", OP_DECODE_PLAN, "|decode_plan"},
    {CALL_cuKernelSetAttribute, "cuKernelSetAttribute of ", OP_DENSE_DECODE, "|sm90_dense_decode_bf16_576"},
    {CALL_cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled of ", OP_DENSE_DECODE, "|kv_cache"},
    {CALL_cuLaunchKernelEx, "launch of ", OP_DECODE_PLAN, "|decode_plan"},
};

/* The n-th call of an entry within an operation fails, for every n; how many there are. */
static int fails_at_each(int operation, const struct step *step)
{
    const int entry = step->entry;
    for (int n = 0;; n++) {
        fake->launches = 0;
        fake->passes[entry] = fake->calls[entry] + n;
        fake->fails[entry] = FAKE_LAUNCH_FAILED, fake->once[entry] = 1;
        const fmla_status status = small_call(&small_calls[operation], 0);
        fake->fails[entry] = CU_SUCCESS, fake->once[entry] = 0;
        CHECK_ALL({fake_depth(), 0}, {fake_capture_mode(), 0});
        if (!status) {
            CHECK(fake->launches == small_calls[operation].launches, "%s: %d launches", name_of(operation),
                  fake->launches);
            return n;
        }
        char label[64], words[160];
        const bool first = !n && step->operation == small_calls[operation].operation;
        snprintf(label, sizeof label, "%s, entry %d, call %d", name_of(operation), entry, n);
        snprintf(words, sizeof words, "%s%s|CUDA_ERROR_LAUNCH_FAILED 719 (unspecified launch failure)",
                 step->words, first ? step->of : "");
        check_rejected(label, status, FMLA_DEVICE_ERROR, name_of(operation), "cuda:0", words);
        if (entry == CALL_cuLaunchKernelEx) CHECK_EQ(fake->launches, n);
        /* What puts the mode back is not refused: it would stay. */
        if (n == 100 || entry == CALL_cuThreadExchangeStreamCaptureMode) return -1;
    }
}

static void each_step(void)
{
    for (int i = 0; i < SMALL_CALLS; i++)
        for (const struct step *step = steps; step < steps + sizeof steps / sizeof steps[0]; step++) {
            const int times = fails_at_each(i, step);
            if (step->entry == CALL_cuLaunchKernelEx) CHECK_EQ(times, small_calls[i].launches);
            if (step->entry == CALL_cuCtxGetId) CHECK_EQ(times, 1);
        }
    for (int i = 0; i < SMALL_CALLS; i++)
        CHECK(small_call(&small_calls[i], 0) == FMLA_OK, "%s: %s", name_of(i), fmla_last_error());
    CHECK_EQ(fake->retained[0], 1);
}

/* A context with fewer SMs than its device: where blocks of threads would wait for each other, the call is made of several launches. */
static void no_room_together(void)
{
    for (int i = 0; i < SMALL_CALLS; i++) {
        if (small_calls[i].operation != OP_DENSE_DECODE) continue;
        CHECK_OK(small_call(&small_calls[i], 0));
        CHECK(joins_itself(launched(0)), "%s", launched(0)->kernel);
        fake->launches = 0;
        fake->fails[CALL_cuLaunchKernelEx] = CU_ERROR_NO_ROOM_TOGETHER, fake->once[CALL_cuLaunchKernelEx] = 1;
        CHECK_OK(small_call(&small_calls[i], 0));
        CHECK_ALL({fake->launches, 3}, {fake_depth(), 0});
        CHECK(!joins_itself(launched(1)) && !strncmp(launched(0)->kernel, "join", 4), "%s",
              launched(1)->kernel);
    }
}

/* A kernel that is in error: an entry that only looks is told of it, and so are all later ones. */
static void an_error_that_stays(void)
{
    CHECK_OK(decode_small(0));
    for (int entry = 0; entry < CALLS; entry++)
        if (entry != CALL_cuGetErrorName && entry != CALL_cuGetErrorString)
            fake->fails[entry] = FAKE_LAUNCH_FAILED;
    for (int i = 0; i < SMALL_CALLS; i++)
        check_rejected(name_of(i), small_call(&small_calls[i], 0), FMLA_DEVICE_ERROR, name_of(i), "cuda:0",
                       "CUDA_ERROR_LAUNCH_FAILED");
    CHECK_EQ(fake_depth(), 0);
}

int main(int argc, char **argv)
{
    return RUN_SCENARIOS(argc, argv, "test_cuda_failures", each_step, no_room_together, an_error_that_stays);
}
