/* SPDX-License-Identifier: MIT
 *
 * One table of kernels (kernels.def). Whether a call is accepted and which kernel runs it are the same
 * question, asked once.
 */
#ifndef FMLA_DISPATCH_H
#define FMLA_DISPATCH_H

#include "error.h"
#include "problem.h"

enum operation {
    OP_DECODE_PLAN,
    OP_DENSE_DECODE,
    OP_SPARSE_DECODE,
    OP_SPARSE_PREFILL,
    OP_MERGE,
    OP_CACHE_APPEND,
    OP_CACHE_GATHER,
    OPERATIONS
};

/* What a CPU kernel needs of the machine, as bits. */
enum { NEEDS_AVX2 = 1 << 0 /* with FMA and F16C */, NEEDS_AVX512 = 1 << 1, NEEDS_AVX512_BF16 = 1 << 2 };

enum {
    ELEMENTS_BF16 = 1 << ELEMENT_BF16,
    ELEMENTS_FP16 = 1 << ELEMENT_FP16,
    ELEMENTS_F32 = 1 << ELEMENT_F32
};
enum { /* of caches, as bits */
       FORMATS_BF16 = 1 << KV_BF16,
       FORMATS_FP16 = 1 << KV_FP16,
       FORMATS_FP8_656 = 1 << KV_FP8_656,
       FORMATS_FP8_584 = 1 << KV_FP8_584
};
enum { KERNEL_SIZES = 4 };

struct cpu_attention;
struct cpu_cache;

struct kernel {
    enum operation operation;
    const char *name;
    int32_t device_type;
    unsigned needs;       /* of the machine: NEEDS_… */
    int32_t capability;   /* compute capability that a GPU must have at least: 80 */
    bool this_capability; /* … and no other: its machine code serves no later GPU */
    const char
        *image; /* of machine code that a build may leave out; NULL: every build with a back end has it */
    unsigned elements;          /* ELEMENTS_…; 0 = any */
    int32_t d_qk[KERNEL_SIZES]; /* allowed sizes, zero-terminated; empty = any */
    int32_t d_v[KERNEL_SIZES];
    unsigned formats; /* FORMATS_… of a cache; 0 = not asked */
    bool forced_only;
    const char *part_of; /* the kernel that runs this one where it suits; NULL for all others */
    bool slow_on_intel;  /* another kernel is chosen on Intel processors */
    bool plans_sparse;   /* a planner for sparse decode too */

    fmla_status (*decode_plan)(const struct plan_problem *problem);
    /* NULL if it takes the problem; else what it takes, and which argument differs. NULL pointer: it takes all. The
     * workspace is as large as that of the device's other kernels. */
    const char *(*dense_decode_refuses)(const struct dense_decode_problem *problem, const char **argument);
    const char *(*sparse_decode_refuses)(const struct sparse_decode_problem *problem, const char **argument);
    const char *(*sparse_prefill_refuses)(const struct sparse_prefill_problem *problem,
                                          const char **argument);
    /* Bytes of workspace, or the most up to the problem's sizes; *bytes is preset to 0, *alignment to 16. NULL: none. */
    fmla_status (*dense_decode_size)(const struct kernel *kernel, const struct dense_decode_problem *problem,
                                     size_t *bytes, size_t *alignment);
    fmla_status (*dense_decode)(const struct kernel *kernel, const struct dense_decode_problem *problem);
    fmla_status (*sparse_decode_size)(const struct kernel *kernel,
                                      const struct sparse_decode_problem *problem, size_t *bytes,
                                      size_t *alignment);
    fmla_status (*sparse_decode)(const struct kernel *kernel, const struct sparse_decode_problem *problem);
    fmla_status (*sparse_prefill_size)(const struct kernel *kernel,
                                       const struct sparse_prefill_problem *problem, size_t *bytes,
                                       size_t *alignment);
    fmla_status (*sparse_prefill)(const struct kernel *kernel, const struct sparse_prefill_problem *problem);
    fmla_status (*merge)(const struct merge_problem *problem);
    fmla_status (*cache)(const struct kernel *kernel,
                         const struct cache_problem *problem); /* append or gather */
    const struct cpu_attention *cpu_attention;                 /* the inner part of a CPU kernel */
    const struct cpu_cache *cpu_cache;
};

/* What a call asks of a kernel. `argument` is the one to name in a refusal. */
struct wanted {
    enum operation operation;
    fmla_device device;
    const char *argument;
    unsigned elements;                               /* all of these must be taken; 0 = not asked */
    int64_t d_qk, d_v;                               /* 0 = not asked */
    const struct dense_decode_problem *dense_decode; /* NULL = not asked */
    const struct sparse_decode_problem *sparse_decode;
    const struct sparse_prefill_problem *sparse_prefill;
    unsigned formats; /* FORMATS_… of the cache; 0 = not asked */
    bool plan_sparse; /* of a planner */
};

const char *operation_name(enum operation operation);

/* The best kernel for `wanted`, or the one that `forced` (may be NULL) or the environment names. */
fmla_status dispatch(const struct wanted *wanted, const char *forced, const struct kernel **kernel);

/* Row `index` of fmla_capabilities; false past the end. */
bool dispatch_capability(fmla_device device, int64_t index, fmla_capability *capability);

/* Threads of the CPU, or SMs of the GPU; 0 where the device cannot be used. */
int32_t dispatch_workers(fmla_device device);

/* Are the costs of plan_costs.h those of the device? */
bool dispatch_has_plan_costs(fmla_device device);

/* Partitions of a plan for sparse decode on a GPU that can be used, where the caller names neither them nor workers. */
int32_t dispatch_sparse_partitions(fmla_device device, int64_t b, int64_t s_q, int64_t h_q, int64_t topk,
                                   int64_t extra_topk);

/* Why nothing of this build runs on the device; "" if something does. Static. */
const char *dispatch_device_reason(fmla_device device);

/* Fills all but the size of a description. */
void dispatch_describe(fmla_device device, fmla_device_info *info);

/* Does ahead what a first call would do; the device can be used. */
fmla_status dispatch_prepare(fmla_device device);

/* "cpu" or "cuda:0". */
const char *device_name(fmla_device device, char buffer[32]);

#endif
