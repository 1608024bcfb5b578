/* SPDX-License-Identifier: MIT
 *
 * A row of the table of kernels (kernels.def), and what a back end does for it: what dispatch and the back ends share.
 */
#ifndef FMLA_KERNEL_H
#define FMLA_KERNEL_H

#include "error.h"
#include "problem.h"

/* What a CPU kernel needs of the machine, as bits. */
enum {
    NEEDS_AVX2 = 1 << 0, /* with FMA and F16C */
    NEEDS_AVX512 = 1 << 1,
    NEEDS_AVX512_BF16 = 1 << 2,
    NEEDS_AMX = 1 << 3 /* with BF16, and the system's permission */
};

enum {
    ELEMENTS_BF16 = 1 << ELEMENT_BF16,
    ELEMENTS_FP16 = 1 << ELEMENT_FP16,
    ELEMENTS_F32 = 1 << ELEMENT_F32
};
enum { /* of caches, as bits */
       FORMATS_BF16 = 1 << KV_BF16,
       FORMATS_FP16 = 1 << KV_FP16,
       FORMATS_FP8_656 = 1 << KV_FP8_656,
       FORMATS_FP8_584 = 1 << KV_FP8_584,
       FORMATS_FP8_576 = 1 << KV_FP8_576,
       FORMATS_FP8_528 = 1 << KV_FP8_528 | 1 << KV_FP8_528_SPLIT,
       FORMATS_FP4_288 = 1 << KV_FP4_288 | 1 << KV_FP4_288_SPLIT,
       FORMATS_FP8_528_F32 = 1 << KV_FP8_528_F32,
       /* … of the bytes that lists name, and of those that tables do. */
       FORMATS_LISTED =
           FORMATS_FP8_656 | FORMATS_FP8_584 | FORMATS_FP8_528 | FORMATS_FP4_288 | FORMATS_FP8_528_F32,
       FORMATS_PAGED = FORMATS_FP8_656 | FORMATS_FP8_584 | FORMATS_FP8_576
};
enum { PRODUCTS_BF16 = 1 << FMLA_PRODUCTS_BF16, PRODUCTS_FP8 = 1 << FMLA_PRODUCTS_FP8 };
enum { KERNEL_SIZES = 4 };

/* What a back end decides about a problem, once: the size query asks no more, and the call goes on with it. */
struct prepared {
    size_t bytes, alignment;                 /* of workspace */
    _Alignas(16) unsigned char decided[480]; /* the back end's */
};

struct kernel;

/* How the kernels of a family are called on a device. */
struct kernel_driver {
    /* NULL if the kernel takes the problem; else what it takes, and which argument differs. NULL pointer: it takes all. */
    const char *(*refuses)(const struct kernel *kernel, union problem problem, const char **argument);
    /* Is the next kernel of the table faster for the problem, if it takes it? Not asked where a kernel is forced. NULL: it never is. */
    bool (*leaves)(const struct kernel *kernel, union problem problem);
    /* `prepared` is preset to no bytes, aligned to 16; run leaves it as it is. NULL: there is nothing to decide. */
    fmla_status (*prepare)(const struct kernel *kernel, union problem problem, struct prepared *prepared);
    fmla_status (*run)(const struct kernel *kernel, union problem problem, const struct prepared *prepared);
};

struct kernel {
    unsigned operations; /* 1 << OP_… */
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
    unsigned formats;  /* FORMATS_… of a cache; 0 = not asked */
    unsigned products; /* PRODUCTS_… of dense decode, over the formats that have them; 0 = not asked */
    bool forced_only;
    const char *part_of; /* the kernel that runs this one where it suits; NULL for all others */
    bool slow_on_intel;  /* on Intel processors the next row of the table is the better one */
    const struct kernel_driver *driver;
    const void *
        inner; /* the driver's: the CPU's struct cpu_attention or cpu_cache, the GPU's struct cuda_attention */
};

/* Those of an operation that is a family of its own; of larger families each back end's header has them. */
#define OPERATION(op, OP)                                                                                    \
    extern const struct kernel_driver ref_##op##_driver, cpu_##op##_driver, cuda_##op##_driver;
#include "operations.def"

#endif
