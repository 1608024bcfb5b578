/* SPDX-License-Identifier: MIT
 *
 * What the files of `flashmla run` share: the options, and a call of sparse prefill made of a tensor file.
 */
#ifndef FLASHMLA_TOOL_RUN_H
#define FLASHMLA_TOOL_RUN_H

#include "gpu_prefill.h"
#include "input.h"

enum { RUN_D_V = 512 };

struct run_options {
    const char *out, *json, *kernel, *device;
    bool causal, no_causal, check, batch_invariant, scale_given;
    double softmax_scale;
    int lse_empty, log_base; /* indices of the choices */
    int64_t repeat, threads;
};

/* The product of the first `dimensions` of q's shape; false with a fault where no memory could hold results of so many rows. */
bool run_rows(const char *path, const int64_t *shape, int dimensions, int64_t *rows, struct fault *fault);

/* ---- Sparse prefill (run_prefill.c) ---------------------------------------------------------- */

/* Zero-initialised. */
struct run_prefill {
    struct prefill_input input;
    int64_t out_shape[3], row_shape[2];
    fmla_tensor out, max_logits, lse;
    fmla_sparse_prefill_args args; /* in host memory */
    struct gpu_prefill gpu;        /* the same on the GPU, if that is where it runs */
};

/* Prepares the call of an open file, whose name in messages is `path`; *refused is the library's where it refused that,
 * else FMLA_OK. */
bool run_prefill_open(struct run_prefill *run, const struct safetensors_file *file, const char *path,
                      const struct run_options *options, fmla_device device, fmla_status *refused,
                      struct fault *fault);
void run_prefill_close(struct run_prefill *run);

/* What is printed of the call before its kernel. */
void run_prefill_print(const struct run_prefill *run);

#endif
