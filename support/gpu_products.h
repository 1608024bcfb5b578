/* SPDX-License-Identifier: MIT
 *
 * Stands for the work of an engine's layer between two attention calls: two matrix products of 128 tokens
 * with weights of 268 MB each, read once. Afterwards neither the L2 nor the instruction caches hold what a
 * call left there: the code of the two kernels exceeds the instruction caches of an SM. bf16 with fp32
 * accumulation (PTX, compiled by the driver), on compute capability 8.0 and later.
 */
#ifndef FMLA_SUPPORT_GPU_PRODUCTS_H
#define FMLA_SUPPORT_GPU_PRODUCTS_H

#include "gpu.h"

enum { GPU_PRODUCTS = 2, GPU_PRODUCT_TOKENS = 128, GPU_PRODUCT_PART = 4096 /* columns that a CTA sums */ };

/* results[part][token][row] = Σ over a part's columns of inputs[token][column] · weights[row][column] */
struct gpu_product {
    int columns, rows; /* of weights */
    void *module, *kernel;
    void *inputs, *weights, *results; /* on the device: bf16, bf16, fp32 */
};

/* Zero-initialised. */
struct gpu_products {
    struct gpu_product of[GPU_PRODUCTS];
};

/* Allocates 575 MB and fills inputs and weights with random values of ±(2^-5 … 2^-3). */
bool gpu_products_open(struct gpu_products *products, struct reason *reason);
void gpu_products_close(struct gpu_products *products);

/* Enqueues both products. */
bool gpu_products_send(const struct gpu_products *products, void *stream, struct reason *reason);

size_t gpu_product_inputs_bytes(const struct gpu_product *product);
size_t gpu_product_weights_bytes(const struct gpu_product *product);
size_t gpu_product_results_bytes(const struct gpu_product *product);

#endif
