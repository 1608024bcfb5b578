/* SPDX-License-Identifier: MIT
 *
 * Kernels of the embedded images: loaded at first use, launched on the caller's stream.
 */
#ifndef FMLA_CUDA_LAUNCH_H
#define FMLA_CUDA_LAUNCH_H

#include "device.h"

#include <stdatomic.h>

/* A kernel by its name. One object a kernel for the life of the process; from the handle on it is launch.c's. */
struct cuda_kernel {
    const char *image; /* of images.h */
    const char *name;
    int32_t capability, threads, dynamic_bytes; /* as kernels.def has them */
    bool built;                                 /* its image is in this build: cuda_can_have asks */
    cu_kernel handle;                           /* valid in every context; NULL: not loaded */
    /* The last context that it was made ready in, and the dynamic shared memory that it may be launched with. */
    _Atomic uint64_t ready_in[CUDA_DEVICES];
    _Atomic int32_t shared_bytes[CUDA_DEVICES];
};

enum {
    /* May begin before the kernel in front of it has ended: it waits itself for what it reads. Without effect before compute
     * capability 9.0. */
    LAUNCH_OVERLAP = 1 << 0,
    /* All blocks of threads are at work at the same time, and may wait for each other; there must be room for them. */
    LAUNCH_TOGETHER = 1 << 1
};

struct cuda_launch {
    struct cuda_kernel *kernel;
    int64_t blocks;       /* ≥ 1 */
    int32_t threads;      /* 0: as the kernel's row says */
    int32_t shared_bytes; /* dynamic; 0: as the kernel's row says */
    int32_t cluster;      /* blocks of a cluster; 0: none */
    unsigned flags;       /* LAUNCH_… */
    void *stream;
};

/* Loads the kernel for a launch with this much shared memory in the scope's context, unless that is done already. Also
 * right while a stream is being captured. */
fmla_status cuda_load(const char *operation, const struct cuda_scope *scope, struct cuda_kernel *kernel,
                      int32_t shared_bytes);

/* A number that no other launch has had, and that memory hardly holds by chance. */
uint64_t cuda_ticket(void);

static inline int64_t cuda_ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

/* Does every row begin at a multiple of `bytes`, where an element has element_bytes, powers of two both? Strides of dimensions
 * with one element are never used. */
static inline bool cuda_rows_aligned(const void *data, const int64_t *shape, const int64_t *stride, int dims,
                                     int64_t element_bytes, int64_t bytes)
{
    if ((uintptr_t)data % (uintptr_t)bytes) return false;
    for (int i = 0; i < dims; i++)
        if (shape[i] > 1 && stride[i] & (bytes / element_bytes - 1)) return false;
    return true;
}

/* What cuda_launch answers of LAUNCH_TOGETHER, besides, with nothing launched and no words: there is no room for all blocks of threads at
 * once, for the context has fewer SMs than the device (a green context, say). */
#define CUDA_NO_ROOM ((fmla_status)-1)

/* parameters: a pointer to each of the kernel's, read before this returns. */
fmla_status cuda_launch(const char *operation, const struct cuda_scope *scope,
                        const struct cuda_launch *launch, void **parameters);

/* A call of one launch; `argument` as in cuda_enter. */
fmla_status cuda_launch_alone(const char *operation, const char *argument, int32_t id,
                              const struct cuda_launch *launch, void **parameters);

#endif
