/* SPDX-License-Identifier: MIT
 *
 * Context parallelism on a small scale: machines hold different keys of one request, each computes (out, lse) over its
 * own keys, and fmla_merge joins the results. Two machines have one key each and the third has none, so the program can
 * check the result: out = (e^a x + e^b y) / (e^a + e^b).
 */
#include <flashmla/flashmla.h>

#include <math.h>
#include <stdio.h>

int main(void)
{
    enum { PARTS = 3, D_V = 4 };
    float out_parts[PARTS][D_V] = {{1, 2, 3, 4}, {5, 6, 7, 8}, {NAN, NAN, NAN, NAN}};
    float lse_parts[PARTS] = {0.0f, 1.0f,
                              -INFINITY}; /* the third machine has no key, so its out is not read */
    float out[D_V], lse;

    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    const fmla_dtype f32 = {FMLA_TYPE_FLOAT, 32, 1};
    const int64_t out_parts_shape[] = {PARTS, 1, 1, 1, D_V}, lse_parts_shape[] = {PARTS, 1, 1, 1};
    const fmla_tensor out_parts_tensor = {out_parts, cpu, 5, f32, out_parts_shape, NULL, 0};
    const fmla_tensor lse_parts_tensor = {lse_parts, cpu, 4, f32, lse_parts_shape, NULL, 0};
    const fmla_tensor out_tensor = {out, cpu, 4, f32, out_parts_shape + 1, NULL, 0};
    const fmla_tensor lse_tensor = {&lse, cpu, 3, f32, lse_parts_shape + 1, NULL, 0};

    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    args.out_parts = &out_parts_tensor, args.lse_parts = &lse_parts_tensor;
    args.out = &out_tensor, args.lse = &lse_tensor;
    args.lse_empty = FMLA_LSE_EMPTY_NEGATIVE_INFINITY; /* as another merge takes it */
    if (fmla_merge(&args) != FMLA_OK) {
        fprintf(stderr, "%s\n", fmla_last_error());
        return 1;
    }
    int wrong = 0;
    for (int d = 0; d < D_V; d++) {
        const float expected = (out_parts[0][d] + expf(1.0f) * out_parts[1][d]) / (1.0f + expf(1.0f));
        printf("out[%d] = %.6f, expected %.6f\n", d, (double)out[d], (double)expected);
        wrong += fabsf(out[d] - expected) > 1e-5f;
    }
    printf("lse = %.6f, expected %.6f\n", (double)lse, (double)logf(1.0f + expf(1.0f)));
    return wrong != 0;
}
