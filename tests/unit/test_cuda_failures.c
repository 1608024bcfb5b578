/* SPDX-License-Identifier: MIT
 *
 * Every step of every operation refused by the driver, launches behind others that went well too: FMLA_DEVICE_ERROR with the
 * operation and the driver's words, contexts and the mode of captures as before, and the next call works.
 */
#include "fake_cuda/calls.h"
#include "fake_cuda/drawn_calls.h"

/* By a plan that is made inside: planned, decoded, joined. */
static fmla_status sparse_small(int32_t device)
{
    static struct drawn_sparse c;
    const struct sparse_shape shape =
        SHAPE_OF(sparse_shape, .b = 5, .s_q = 2, .h_q = 96, .topk = 2000, .page_size = 64,
                 .format = FMLA_KV_FP8_656, .lengths = true, .wide = true);
    sparse_of_shape(&c, &shape, (fmla_device){FMLA_DEVICE_CUDA, device});
    const fmla_status status = fmla_sparse_decode_workspace_size(&c.args, &c.args.workspace_size, NULL);
    c.args.workspace = region(20);
    return status ? status : fmla_sparse_decode(&c.args);
}

/* A launch for each of two key heads, and of bf16 keys on Hopper the join of each. */
static fmla_status prefill_two(int32_t device)
{
    static struct drawn_prefill c;
    const struct prefill_shape shape = SHAPE_OF(prefill_shape, .s_q = 5, .h_q = 128, .h_kv = 2, .topk = 2048,
                                                .page_size = 64, .format = FMLA_KV_BF16, .wide = true);
    prefill_of_shape(&c, &shape, (fmla_device){FMLA_DEVICE_CUDA, device});
    const fmla_status status = fmla_sparse_prefill_workspace_size(&c.args, &c.args.workspace_size, NULL);
    c.args.workspace = region(20);
    return status ? status : fmla_sparse_prefill(&c.args);
}

static const struct {
    const char *name;
    fmla_status (*call)(int32_t device);
    int launches; /* on Hopper */
} operations[] = {{"decode_plan", plan_small, 1},     {"dense_decode", decode_small, 3},
                  {"sparse_decode", sparse_small, 3}, {"sparse_prefill", prefill_two, 4},
                  {"merge", merge_small, 1},          {"cache_append", append_small, 1},
                  {"cache_gather", gather_small, 1}};
enum { OPERATIONS = sizeof operations / sizeof operations[0] };

/* The n-th call of an entry within an operation fails, for every n; how many there are. */
static int fails_at_each(int operation, int entry)
{
    for (int n = 0;; n++) {
        fake->launches = 0;
        fake->passes[entry] = fake->calls[entry] + n;
        fake->fails[entry] = FAKE_LAUNCH_FAILED, fake->once[entry] = 1;
        const fmla_status status = operations[operation].call(0);
        fake->fails[entry] = CU_SUCCESS, fake->once[entry] = 0;
        CHECK_ALL({fake_depth(), 0}, {fake_capture_mode(), 0});
        if (!status) {
            CHECK(fake->launches == operations[operation].launches, "%s: %d launches",
                  operations[operation].name, fake->launches);
            return n;
        }
        char label[64];
        snprintf(label, sizeof label, "%s, entry %d, call %d", operations[operation].name, entry, n);
        check_rejected(label, status, FMLA_DEVICE_ERROR, operations[operation].name, "cuda:0",
                       "CUDA_ERROR_LAUNCH_FAILED 719 (unspecified launch failure)");
        if (entry == CALL_cuLaunchKernelEx) CHECK_EQ(fake->launches, n);
        if (n == 100) return -1;
    }
}

static void each_step(void)
{
    /* Loading comes first, of what is not loaded yet. */
    static const int entries[] = {CALL_cuCtxGetCurrent,      CALL_cuDevicePrimaryCtxRetain,
                                  CALL_cuCtxPushCurrent_v2,  CALL_cuDevicePrimaryCtxGetState,
                                  CALL_cuCtxGetId,           CALL_cuLibraryLoadData,
                                  CALL_cuLibraryGetKernel,   CALL_cuKernelGetFunction,
                                  CALL_cuKernelSetAttribute, CALL_cuTensorMapEncodeTiled,
                                  CALL_cuLaunchKernelEx};
    for (int i = 0; i < OPERATIONS; i++)
        for (size_t e = 0; e < sizeof entries / sizeof entries[0]; e++) {
            const int times = fails_at_each(i, entries[e]);
            if (entries[e] == CALL_cuLaunchKernelEx) CHECK_EQ(times, operations[i].launches);
            if (entries[e] == CALL_cuCtxGetId) CHECK_EQ(times, 1);
        }
    for (int i = 0; i < OPERATIONS; i++)
        CHECK(operations[i].call(0) == FMLA_OK, "%s: %s", operations[i].name, fmla_last_error());
}

/* A kernel that is in error: an entry that only looks is told of it, and so are all later ones. */
static void an_error_that_stays(void)
{
    CHECK_OK(decode_small(0));
    for (int entry = 0; entry < CALLS; entry++)
        if (entry != CALL_cuGetErrorName && entry != CALL_cuGetErrorString)
            fake->fails[entry] = FAKE_LAUNCH_FAILED;
    for (int i = 0; i < OPERATIONS; i++)
        check_rejected(operations[i].name, operations[i].call(0), FMLA_DEVICE_ERROR, operations[i].name,
                       "cuda:0", "CUDA_ERROR_LAUNCH_FAILED");
    CHECK_EQ(fake_depth(), 0);
}

int main(int argc, char **argv)
{
    return RUN_SCENARIOS(argc, argv, "test_cuda_failures", each_step, an_error_that_stays);
}
