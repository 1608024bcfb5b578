/* SPDX-License-Identifier: MIT
 *
 * On a real GPU: checks the products that `flashmla bench` runs between calls against sums in double, on
 * random data. Exit 77 if there is no GPU of compute capability 8.0 or later.
 */
#include "check.h"

#include "gpu_products.h"
#include "num.h"
#include "random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SKIPPED = 77, DRAWN = 200 };

static double bf16(uint16_t bits)
{
    return (double)num_from_bf16(bits);
}

static void *downloaded(const void *memory, size_t bytes)
{
    struct reason reason = {""};
    void *to = malloc(bytes);
    if (!to || !gpu_download(to, memory, bytes, &reason)) {
        CHECK(false, "%zu bytes: %s", bytes, reason.text);
        exit(1);
    }
    return to;
}

static void check_product(const struct gpu_product *product, struct random_state *random)
{
    const uint16_t *inputs = downloaded(product->inputs, gpu_product_inputs_bytes(product)),
                   *weights = downloaded(product->weights, gpu_product_weights_bytes(product));
    const float *results = downloaded(product->results, gpu_product_results_bytes(product));
    const int64_t parts = product->columns / GPU_PRODUCT_PART;
    for (int i = 0; i < DRAWN; i++) {
        const int64_t part = random_between(random, 0, parts - 1),
                      token = random_between(random, 0, GPU_PRODUCT_TOKENS - 1),
                      row = random_between(random, 0, product->rows - 1);
        const uint16_t *x = inputs + token * product->columns + part * GPU_PRODUCT_PART,
                       *w = weights + row * product->columns + part * GPU_PRODUCT_PART;
        const double got = (double)results[(part * GPU_PRODUCT_TOKENS + token) * product->rows + row];
        double sum = 0.0, terms = 0.0;
        for (int c = 0; c < GPU_PRODUCT_PART; c++)
            sum += bf16(x[c]) * bf16(w[c]), terms += fabs(bf16(x[c]) * bf16(w[c]));
        CHECK(fabs(got - sum) <= 0x1p-14 * terms && terms > 1.0, "part %d, token %d, row %d: %g, expected %g",
              (int)part, (int)token, (int)row, got, sum);
    }
    free((void *)(uintptr_t)inputs), free((void *)(uintptr_t)weights), free((void *)(uintptr_t)results);
}

int main(void)
{
    struct gpu_products products = {0};
    struct gpu_description gpu;
    struct reason reason = {""};
    struct random_state random = {1};
    if (!gpu_open(0, &reason) || !gpu_describe(0, &gpu, &reason) || gpu.major < 8) {
        printf("%s\nneeds a GPU\n", reason.text);
        return SKIPPED;
    }
    bool good = gpu_products_open(&products, &reason);
    for (int i = 0; good && i < GPU_PRODUCTS; i++)
        good = gpu_fill(products.of[i].results, 0xff, gpu_product_results_bytes(&products.of[i]), &reason);
    good = good && gpu_products_send(&products, NULL, &reason) && gpu_stream_wait(NULL, &reason);
    CHECK(good, "%s", reason.text);
    for (int i = 0; good && i < GPU_PRODUCTS; i++) check_product(&products.of[i], &random);
    gpu_products_close(&products);
    return check_done("test_gpu_products");
}
