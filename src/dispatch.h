/* SPDX-License-Identifier: MIT
 *
 * Chooses kernels from one table (kernels.def). The same query decides whether a call is accepted and which
 * kernel runs it.
 */
#ifndef FMLA_DISPATCH_H
#define FMLA_DISPATCH_H

#include "kernel.h"

/* What a call requires of a kernel. `argument` is named in a refusal. */
struct wanted {
    enum operation operation;
    fmla_device device;
    const char *argument;
    const char *values;     /* the argument that has d_v; NULL: `argument` */
    unsigned elements;      /* the kernel must accept all of these; 0 = not checked */
    int64_t d_qk, d_v;      /* 0 = not checked */
    unsigned formats;       /* FORMATS_… of the cache; 0 = not checked */
    unsigned extra_formats; /* the same for a second cache */
    unsigned products;      /* PRODUCTS_…; 0 = not checked */
    union problem problem;  /* NULL = not checked */
};

/* Returns the best kernel for `wanted`, or the one that `forced` (may be NULL) or the environment names. */
fmla_status dispatch(const struct wanted *wanted, const char *forced, const struct kernel **kernel);

/* Lets the kernel's driver decide about the problem. prepared->bytes and alignment are then those of the
 * workspace. */
fmla_status dispatch_decide(const struct kernel *kernel, union problem problem, struct prepared *prepared);

/* The processor properties that affect the choice of a kernel. */
struct processor {
    unsigned meets; /* NEEDS_… */
    bool intel;
};

/* For tests: chooses as on another processor from now on; NULL: as on this one. No other thread may be in a
 * call. */
void dispatch_pretend(const struct processor *processor);

/* Fills row `index` of fmla_capabilities; returns false past the end. */
bool dispatch_capability(fmla_device device, int64_t index, fmla_capability *capability);

/* Returns the threads of the CPU, or the SMs of the GPU; 0 if the device cannot be used. */
int32_t dispatch_workers(fmla_device device);

/* Returns whether the costs of plan_costs.h apply to the device. */
bool dispatch_has_plan_costs(fmla_device device);

/* Return the number of partitions that share a sparse decode batch, and the number of rows of a plan for any
 * batch, on a usable GPU if the caller names neither partitions nor workers. */
int32_t dispatch_sparse_partitions(fmla_device device, int64_t b, int64_t s_q, int64_t h_q, int64_t topk,
                                   int64_t extra_topk);
int32_t dispatch_sparse_rows(fmla_device device, int64_t s_q, int64_t h_q, int64_t topk, int64_t extra_topk);

/* Returns why no kernel of this build runs on the device; "" if one does. Static. */
const char *dispatch_device_reason(fmla_device device);

/* Fills all members of a description except struct_size. */
void dispatch_describe(fmla_device device, fmla_device_info *info);

/* Does the one-time work of the first call; the device must be usable. */
fmla_status dispatch_prepare(fmla_device device);

/* Returns "cpu" or "cuda:0". */
const char *device_name(fmla_device device, char buffer[32]);

#endif
