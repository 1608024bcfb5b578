/* SPDX-License-Identifier: MIT
 *
 * Kernels of the embedded images: loaded at first use, launched on the caller's stream.
 */
#ifndef FMLA_CUDA_LAUNCH_H
#define FMLA_CUDA_LAUNCH_H

#include "device.h"

#include <stdatomic.h>

/* A kernel by its name. There is one object per kernel for the life of the process; `handle` and the members
 * after it belong to launch.c. */
struct cuda_kernel {
    const char *image; /* a name of images.h */
    const char *name;
    int32_t capability, threads, dynamic_bytes; /* from kernels.def */
    bool built;                                 /* its image is in this build; read by cuda_can_have */
    cu_kernel handle;                           /* valid in every context; NULL: not loaded */
    /* Per device: the last context in which the kernel was made ready, and the dynamic shared memory that a
     * launch may use. */
    _Atomic uint64_t ready_in[CUDA_DEVICES];
    _Atomic int32_t shared_bytes[CUDA_DEVICES];
};

enum {
    /* The kernel may begin before the one in front of it has ended; it waits itself for the data that it
     * reads. No effect below compute capability 9.0. */
    LAUNCH_OVERLAP = 1 << 0,
    /* All CTAs run at the same time and may wait for each other; they must fit together. */
    LAUNCH_COOPERATIVE = 1 << 1
};

struct cuda_launch {
    struct cuda_kernel *kernel;
    int64_t blocks;       /* ≥ 1 */
    int32_t threads;      /* 0: from the kernel's row */
    int32_t shared_bytes; /* dynamic; 0: from the kernel's row */
    int32_t cluster;      /* CTAs of a cluster; 0: no clusters */
    unsigned flags;       /* LAUNCH_… */
    void *stream;
};

/* Loads the kernel for a launch with this much shared memory in the scope's context, unless that is done
 * already. May be called while a stream is being captured. */
fmla_status cuda_load(const char *operation, const struct cuda_scope *scope, struct cuda_kernel *kernel,
                      int32_t shared_bytes);

/* Returns a number that no other launch has had, and that memory is unlikely to hold by chance. */
uint64_t cuda_ticket(void);

static inline int64_t cuda_ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

/* Returns whether every row begins at a multiple of `bytes`. `bytes` and element_bytes are powers of two.
 * Strides of dimensions of size 1 are ignored. */
static inline bool cuda_rows_aligned(const void *data, const int64_t *shape, const int64_t *stride, int dims,
                                     int64_t element_bytes, int64_t bytes)
{
    if ((uintptr_t)data % (uintptr_t)bytes) return false;
    for (int i = 0; i < dims; i++)
        if (shape[i] > 1 && stride[i] & (bytes / element_bytes - 1)) return false;
    return true;
}

/* An additional status of cuda_launch with LAUNCH_COOPERATIVE: not all CTAs fit at once, because the context
 * has fewer SMs than the device (e.g. a green context). Nothing was launched and no message was set. */
#define CUDA_NO_ROOM ((fmla_status)-1)

/* Returns the SMs of the current context, which are fewer than the device's in a green context. */
int32_t cuda_sms_of_context(const struct cuda_scope *scope);

/* `parameters` has a pointer to each kernel parameter; they are read before the function returns. */
fmla_status cuda_launch(const char *operation, const struct cuda_scope *scope,
                        const struct cuda_launch *launch, void **parameters);

/* Makes a call that consists of one launch; `argument` as in cuda_enter. */
fmla_status cuda_launch_alone(const char *operation, const char *argument, int32_t id,
                              const struct cuda_launch *launch, void **parameters);

#endif
