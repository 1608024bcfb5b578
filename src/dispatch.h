/* SPDX-License-Identifier: MIT
 *
 * One table of kernels (kernels.def). Whether a call is accepted and which kernel runs it are the same
 * question, asked once.
 */
#ifndef FMLA_DISPATCH_H
#define FMLA_DISPATCH_H

#include "kernel.h"

/* What a call asks of a kernel. `argument` is the one to name in a refusal. */
struct wanted {
    enum operation operation;
    fmla_device device;
    const char *argument;
    const char *values;     /* the one that has d_v; NULL: argument */
    unsigned elements;      /* all of these must be taken; 0 = not asked */
    int64_t d_qk, d_v;      /* 0 = not asked */
    unsigned formats;       /* FORMATS_… of the cache; 0 = not asked */
    unsigned extra_formats; /* … and of a second one */
    unsigned products;      /* PRODUCTS_…; 0 = not asked */
    union problem problem;  /* none = not asked */
};

/* The best kernel for `wanted`, or the one that `forced` (may be NULL) or the environment names. */
fmla_status dispatch(const struct wanted *wanted, const char *forced, const struct kernel **kernel);

/* Asks the kernel's driver what it decides; then `bytes` and `alignment` are those of the workspace that a call needs. */
fmla_status dispatch_decide(const struct kernel *kernel, union problem problem, struct prepared *prepared);

/* What of a processor the choice depends on. */
struct processor {
    unsigned meets; /* NEEDS_… */
    bool intel;
};

/* For tests: from now on the choice is that of another processor; NULL: of this one. No other thread is in a call. */
void dispatch_pretend(const struct processor *processor);

/* Row `index` of fmla_capabilities; false past the end. */
bool dispatch_capability(fmla_device device, int64_t index, fmla_capability *capability);

/* Threads of the CPU, or SMs of the GPU; 0 where the device cannot be used. */
int32_t dispatch_workers(fmla_device device);

/* Are the costs of plan_costs.h those of the device? */
bool dispatch_has_plan_costs(fmla_device device);

/* Of a plan for sparse decode on a GPU that can be used, where the caller names neither partitions nor workers: partitions that a
 * batch is shared among, and rows that a plan of any batch has. */
int32_t dispatch_sparse_partitions(fmla_device device, int64_t b, int64_t s_q, int64_t h_q, int64_t topk,
                                   int64_t extra_topk);
int32_t dispatch_sparse_rows(fmla_device device, int64_t s_q, int64_t h_q, int64_t topk, int64_t extra_topk);

/* Why nothing of this build runs on the device; "" if something does. Static. */
const char *dispatch_device_reason(fmla_device device);

/* Fills all but the size of a description. */
void dispatch_describe(fmla_device device, fmla_device_info *info);

/* Does ahead what a first call would do; the device can be used. */
fmla_status dispatch_prepare(fmla_device device);

/* "cpu" or "cuda:0". */
const char *device_name(fmla_device device, char buffer[32]);

#endif
