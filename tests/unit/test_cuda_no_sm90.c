/* SPDX-License-Identifier: MIT
 *
 * Tests a build only for 8.0, whose PTX runs on Hopper: the portable dense decode runs there, and the
 * omitted kernel is reported as missing, not launched.
 */
#include "fake_cuda/calls.h"

#include "cuda/images.h"

static const fmla_device gpu = {FMLA_DEVICE_CUDA, 0};

static void left_out(void)
{
    int rows = 0;
    for (int64_t i = 0;; i++) {
        fmla_capability row = FMLA_INIT(fmla_capability);
        if (fmla_capabilities(gpu, i, &row) != FMLA_OK) break;
        if (strcmp(row.operation, "dense_decode") != 0) continue;
        const int missing = !strncmp(row.kernel, "cuda-sm90", 9);
        rows += 1 + 100 * missing;
        CHECK(
            row.available == !missing &&
                !strcmp(row.reason, missing ? "this build has no machine code for it (FMLA_CUDA_ARCHS)" : ""),
            "%s: %s", row.kernel, row.reason);
    }
    CHECK_EQ(rows, 203); /* three kernels, two of them missing */
    SMALL_CALL(c);
    const char *name = "";
    CHECK(fmla_dense_decode_kernel(&c.args, &name) == FMLA_OK && !strcmp(name, "cuda-sm80"), "%s: %s", name,
          fmla_last_error());
    CHECK_OK(dense_decode_run(&c));
    CHECK_EQ(fake->tensors, 0);
    c.args.kernel = "cuda-sm90";
    check_rejected("forced", dense_decode_run(&c), FMLA_UNSUPPORTED, "dense_decode", "q",
                   "kernel cuda-sm90|no machine code|FMLA_CUDA_ARCHS");
}

static void prepared(void)
{
    CHECK_OK(fmla_prepare(gpu));
    CHECK_EQ(fake->calls[CALL_cuLibraryLoadData], (int64_t)cuda_build.count);
}

int main(int argc, char **argv)
{
    return RUN_SCENARIOS(argc, argv, "test_cuda_no_sm90", left_out, prepared);
}
