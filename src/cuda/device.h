/* SPDX-License-Identifier: MIT
 *
 * The GPUs of this machine: their properties, why one cannot be used, and the context of a call.
 */
#ifndef FMLA_CUDA_DEVICE_H
#define FMLA_CUDA_DEVICE_H

#include "../error.h"
#include "driver.h"

#include <stdbool.h>

enum {
    CUDA_DEVICES = 64,          /* most devices that the library uses */
    CUDA_LEAST_CAPABILITY = 80, /* Ampere: mma of 16-bit types, cp.async */
};

struct cuda_device {
    int32_t id;
    cu_device handle;
    int32_t capability; /* 10 · major + minor: 90 */
    int32_t code;       /* cuda_build_code; kernels of sm90/ have code of their own */
    int32_t sms;
    int32_t shared_bytes; /* most shared memory per CTA */
    char name[96];
    char unusable[400]; /* why this GPU cannot be used; "" if it can */
};

/* Returns the device, never NULL; the pointer stays the same for the life of the process. The first call
 * looks at all GPUs. */
const struct cuda_device *cuda_device(int32_t id);

/* Returns whether the costs of plan_costs.h were measured on this kind of GPU. */
static inline bool cuda_has_plan_costs(const struct cuda_device *device)
{
    return device->capability == 90;
}

/* Returns the number of GPUs of this machine; 0 without a usable driver. */
int32_t cuda_device_count(void);

/* Returns the compute capability for which the code that such a GPU runs was compiled; 0: the build has none.
 * Machine code serves its own and later minor versions, except that "90a" serves only itself; PTX serves every
 * later GPU. */
struct cuda_build;
int32_t cuda_build_code(const struct cuda_build *build, int32_t capability);

/* Returns whether the build has this image (images.h). */
bool cuda_build_has(const struct cuda_build *build, const char *image);

/* ---- The context of a call ------------------------------------------------------------------ */

/* Between cuda_enter and cuda_leave a context of the device is current: the caller's, or, if the thread has
 * none, the device's primary context, pushed for the call. */
struct cuda_scope {
    const struct driver *driver;
    const struct cuda_device *device;
    uint64_t context_id; /* of the current context; never reused, unlike handles */
    bool pushed;
};

/* `argument` is named in the error if the device or the current context is wrong. */
fmla_status cuda_enter(const char *operation, const char *argument, int32_t id, struct cuda_scope *scope);
void cuda_leave(const struct cuda_scope *scope);

/* Returns FMLA_DEVICE_ERROR with the message "operation: cuda:0: what: words", where the words are the
 * driver's. */
fmla_status cuda_failed(const char *operation, const struct cuda_scope *scope, const char *what,
                        cu_result error);

#endif
