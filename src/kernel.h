/* SPDX-License-Identifier: MIT
 *
 * A row of the table of kernels (kernels.def) and the functions of its back end, shared by dispatch and the
 * back ends.
 */
#ifndef FMLA_KERNEL_H
#define FMLA_KERNEL_H

#include "error.h"
#include "problem.h"

/* What a CPU kernel needs from the machine, as bits. */
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
       /* The byte formats that sparse operations (LISTED) and dense decode (PAGED) read. */
       FORMATS_LISTED =
           FORMATS_FP8_656 | FORMATS_FP8_584 | FORMATS_FP8_528 | FORMATS_FP4_288 | FORMATS_FP8_528_F32,
       FORMATS_PAGED = FORMATS_FP8_656 | FORMATS_FP8_584 | FORMATS_FP8_576
};
enum { PRODUCTS_BF16 = 1 << FMLA_PRODUCTS_BF16, PRODUCTS_FP8 = 1 << FMLA_PRODUCTS_FP8 };
enum { KERNEL_SIZES = 8 };

/* The decisions of a back end about a problem. They are made once: a size query stops here, and a call
 * continues with them. */
struct prepared {
    size_t bytes, alignment;                  /* of workspace */
    _Alignas(16) unsigned char decision[480]; /* DECISION, DECIDED */
};

/* Return a driver's decisions in their own type: for writing in `prepare`, for reading in `run`. */
#define DECISION(type, prepared) ((type *)(void *)((prepared)->decision + DECISION_FITS(type, prepared)))
#define DECIDED(type, prepared)                                                                              \
    ((const type *)(const void *)((prepared)->decision + DECISION_FITS(type, prepared)))
#define DECISION_FITS(type, prepared)                                                                        \
    (0 * sizeof(struct {                                                                                     \
         _Static_assert(sizeof(type) <= sizeof(prepared)->decision, "struct prepared has room for it");      \
         char unused;                                                                                        \
     }))

struct kernel_driver;

/* Returns NULL if the kernel accepts the problem; otherwise text that says what it accepts, and sets *argument
 * to the argument that differs. */
typedef const char *driver_refuses(const struct kernel_driver *driver, union problem problem,
                                   const char **argument);
/* Returns whether the next kernel of the table, if it accepts the problem, is faster for it. Not called for a
 * forced kernel. */
typedef bool driver_leaves(const struct kernel_driver *driver, union problem problem);
/* Fills `prepared`, which is preset to 0 bytes with alignment 16; run does not change it. */
typedef fmla_status driver_prepare(const struct kernel_driver *driver, union problem problem,
                                   struct prepared *prepared);
typedef fmla_status driver_run(const struct kernel_driver *driver, union problem problem,
                               const struct prepared *prepared);

/* The functions of a back end for one family of operations. A family's implementations begin with their
 * driver and have their own functions after it, to which the driver casts itself back. */
struct kernel_driver {
    driver_refuses *refuses; /* NULL: the kernel accepts every problem */
    driver_leaves *leaves;   /* NULL: no other kernel is faster */
    driver_prepare *prepare; /* NULL: there is nothing to decide */
    driver_run *run;
};

struct kernel {
    unsigned operations; /* 1 << OP_… */
    const char *name;
    int32_t device_type;
    unsigned needs;       /* NEEDS_…, of the machine */
    int32_t capability;   /* the least compute capability of a GPU: 80 */
    bool this_capability; /* no other capability: the machine code runs on no later GPU */
    const char *image;    /* machine code that a build may omit; NULL: in every build with the back end */
    unsigned elements;    /* ELEMENTS_…; 0 = any */
    int32_t d_qk[KERNEL_SIZES]; /* allowed sizes, zero-terminated; empty = any */
    int32_t d_v[KERNEL_SIZES];
    unsigned formats;  /* FORMATS_… of a cache; 0 = not checked */
    unsigned products; /* PRODUCTS_… of dense decode, over the formats that have them; 0 = not checked */
    bool forced_only;
    const char *part_of; /* the kernel that runs this one for calls that suit it; NULL for all others */
    bool slow_on_intel;  /* on Intel processors the next row of the table is faster */
    const struct kernel_driver *driver;
};

/* The drivers of operations that are a family of their own. Those of larger families are declared in the
 * headers of the back ends. */
#define OPERATION(op, OP)                                                                                    \
    extern const struct kernel_driver ref_##op##_driver, cpu_##op##_driver, cuda_##op##_driver;
#include "operations.def"

#endif
