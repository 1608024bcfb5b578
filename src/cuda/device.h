/* SPDX-License-Identifier: MIT
 *
 * The GPUs of this machine: what each is, why it cannot be used, and whose context a call runs in.
 */
#ifndef FMLA_CUDA_DEVICE_H
#define FMLA_CUDA_DEVICE_H

#include "../error.h"
#include "driver.h"

#include <stdbool.h>

enum {
    CUDA_DEVICES = 64,          /* that the library looks at */
    CUDA_LEAST_CAPABILITY = 80, /* Ampere: mma of 16-bit types, cp.async */
};

struct cuda_device {
    int32_t id;
    cu_device handle;
    int32_t capability; /* 10 · major + minor: 90 */
    int32_t sms;
    int32_t shared_bytes; /* of shared memory that a block may have */
    char name[96];
    char unusable[400]; /* why this GPU cannot be used; "" if it can */
};

/* Never NULL; the same for the life of the process. The first call looks at all GPUs. */
const struct cuda_device *cuda_device(int32_t id);

/* Were the costs of plan_costs.h measured on such a GPU? */
static inline bool cuda_has_plan_costs(const struct cuda_device *device)
{
    return device->capability == 90;
}

/* GPUs of this machine; 0 where there is no usable driver. */
int32_t cuda_device_count(void);

/* Is there code for a GPU of this compute capability? Machine code serves its own and later minor versions, that for "90a"
 * only its own; PTX serves every later GPU. */
struct cuda_build;
bool cuda_build_serves(const struct cuda_build *build, int32_t capability);

/* Is there such an image (images.h)? */
bool cuda_build_has(const struct cuda_build *build, const char *image);

/* ---- The context of a call ------------------------------------------------------------------ */

/* Between enter and leave a context of the device is current: the caller's, or, where the thread has none, the
 * device's primary one, pushed for the call. */
struct cuda_scope {
    const struct driver *driver;
    const struct cuda_device *device;
    uint64_t context_id; /* of the current one; no later context has it again, as it may have the handle */
    bool pushed;
};

/* `argument` is the one to name where the device or the current context is wrong. */
fmla_status cuda_enter(const char *operation, const char *argument, int32_t id, struct cuda_scope *scope);
void cuda_leave(const struct cuda_scope *scope);

/* FMLA_DEVICE_ERROR with the driver's words: "operation: cuda:0: what: words". */
fmla_status cuda_failed(const char *operation, const struct cuda_scope *scope, const char *what,
                        cu_result error);

#endif
