/* SPDX-License-Identifier: MIT
 *
 * Tests that the fp32 kernels of dense MHA on the CPU round their results as num.h does. With a query of zeros the
 * result is the mean of four values, exact in fp32: here a quarter, a half and three quarters of the way from each
 * number of the type to the next. The kernel of vdpbf16ps takes subnormals as 0 and is left out.
 */
#include "check.h"

#include "flashmla/flashmla.h"
#include "num.h"

#include <stdbool.h>
#include <stdlib.h>

enum { D_QK = 64, D_V = 256, KEYS = 4, MEANS = 3, REQUESTS = 65536 / D_V };

static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
static uint16_t q[MEANS][D_QK], k[KEYS][D_QK], v[MEANS][KEYS][D_V], out[MEANS][D_V];

/* Fills the values with numbers from `first` on and those after them. */
static void fill_values(uint32_t first)
{
    for (uint32_t mean = 0; mean < MEANS; mean++)
        for (uint32_t key = 0; key < KEYS; key++)
            for (uint32_t d = 0; d < D_V; d++) v[mean][key][d] = (uint16_t)(first + d + (key <= mean));
}

static void check_results(const char *kernel, bool is_bf16)
{
    for (int mean = 0; mean < MEANS; mean++)
        for (int d = 0; d < D_V; d++) {
            float sum = 0.0f;
            for (int key = 0; key < KEYS; key++)
                sum += is_bf16 ? num_from_bf16(v[mean][key][d]) : num_from_fp16(v[mean][key][d]);
            const float wanted = 0.25f * sum;
            const unsigned rounded = is_bf16 ? num_to_bf16(wanted) : num_to_fp16(wanted);
            if (wanted - wanted == 0.0f) /* neither infinite nor NaN */
                CHECK(out[mean][d] == rounded, "%s, %s: %a is %#x, not %#x", kernel,
                      is_bf16 ? "bf16" : "fp16", (double)wanted, out[mean][d], rounded);
        }
}

static void test_kernel(const char *kernel, bool is_bf16)
{
    const fmla_dtype type = {is_bf16 ? FMLA_TYPE_BFLOAT : FMLA_TYPE_FLOAT, 16, 1};
    const int64_t of_q[] = {MEANS, 1, 1, D_QK}, of_k[] = {MEANS, KEYS, 1, D_QK},
                  of_v[] = {MEANS, KEYS, 1, D_V}, of_out[] = {MEANS, 1, 1, D_V}, same[] = {0, D_QK, D_QK, 1};
    const fmla_tensor q_ = {q, cpu, 4, type, of_q, NULL, 0}, k_ = {k, cpu, 4, type, of_k, same, 0},
                      v_ = {v, cpu, 4, type, of_v, NULL, 0}, out_ = {out, cpu, 4, type, of_out, NULL, 0};
    fmla_mha_forward_args args = FMLA_INIT(fmla_mha_forward_args);
    const char *name;
    size_t alignment;
    args.q = &q_, args.k = &k_, args.v = &v_, args.out = &out_, args.kernel = kernel;
    if (fmla_mha_forward_kernel(&args, &name) == FMLA_UNSUPPORTED)
        return; /* by this processor, or the type */
    CHECK_OK(fmla_mha_forward_workspace_size(&args, &args.workspace_size, &alignment));
    args.workspace = aligned_alloc(alignment, (args.workspace_size + alignment - 1) / alignment * alignment);
    for (uint32_t request = 0; args.workspace && request < REQUESTS; request++) {
        fill_values(request * D_V);
        CHECK_OK(fmla_mha_forward(&args));
        check_results(kernel, is_bf16);
    }
    free(args.workspace);
}

int main(void)
{
    static const char *const kernels[] = {
        "cpu-generic",
#if defined(__x86_64__)
        "cpu-avx2",
        "cpu-avx512",
#endif
    };
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) test_kernel(kernels[i], is_bf16);
    return check_done("test_rounded_values");
}
