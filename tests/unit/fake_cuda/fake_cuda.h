/* SPDX-License-Identifier: MIT
 *
 * A libcuda.so.1 without a GPU: it gives preset answers, checks arguments as the driver would, and records
 * them. Tests find it by LD_LIBRARY_PATH, as the library does, and set it up before their first call.
 */
#ifndef FMLA_FAKE_CUDA_H
#define FMLA_FAKE_CUDA_H

#include "cuda/driver.h"

#include <stdatomic.h>
#include <stdint.h>

enum {
#define ENTRY(member, name, ...) CALL_##name,
    CUDA_DRIVER_ENTRIES(ENTRY)
#undef ENTRY
        CALLS
};

/* Driver errors that it returns by itself; tests may set any. */
enum {
    FAKE_INVALID_VALUE = 1,
    FAKE_INVALID_DEVICE = 101,
    FAKE_INVALID_CONTEXT = CU_ERROR_INVALID_CONTEXT,
    FAKE_NOT_FOUND = 500,
    FAKE_CONTEXT_IS_DESTROYED = CU_ERROR_CONTEXT_IS_DESTROYED,
    FAKE_LAUNCH_FAILED = 719,
    FAKE_CAPTURE_UNSUPPORTED = 900
};

enum {
    FAKE_DEVICES = 70,
    FAKE_CONTEXTS = 4,
    FAKE_LAUNCHES = 4096,
    FAKE_TENSORS = 64, /* remembered: the last ones */
    FAKE_PARAMETERS = 1280,
    FAKE_HANDLE = 1000 /* device k has handle 1000 + k, since a handle is not an ordinal */
};

struct CUctx_st {
    int device; /* ordinal */
    int primary;
    unsigned long long id;
    int destroyed; /* a primary context: until it is retained again */
};

struct fake_launch {
    const char *kernel;
    struct CUctx_st *context;
    struct cu_launch_config config;
    struct cu_launch_attribute attributes[2];
    _Alignas(128) unsigned char parameters[FAKE_PARAMETERS]; /* concatenated */
};

/* Arguments of cuTensorMapEncodeTiled. */
struct fake_tensor {
    unsigned type;
    uint32_t rank;
    void *base;
    uint64_t sizes[5], strides[4];
    uint32_t box[5], steps[5];
    unsigned interleave, swizzle, promotion, fill;
};

struct fake_cuda {
    /* Set by tests. */
    int version, devices;
    const char *name;
    int capability, sms, shared_bytes;
    int context_sms;        /* of a green context; 0: all */
    cu_result fails[CALLS]; /* error that an entry returns instead of working */
    int passes[CALLS];      /* … after this many successful calls */
    int once[CALLS];        /* … and then works again */
    int resets_move;        /* a reset primary context gets another handle */
    /* An entry that blocks in contexts of a device until it is released; its callers stand still. */
    int held_call, held_device;
    _Atomic int hold, held; /* hold: set to block; held: set while a caller is blocked */
    int capturing; /* streams are being captured: loading is refused unless the thread relaxed the mode */
    struct CUctx_st context[FAKE_CONTEXTS]; /* for tests to make current with push, below */

    /* Recorded. */
    int calls[CALLS];
    int launches;
    struct fake_launch launch[FAKE_LAUNCHES];
    int tensors; /* maps made; map k (from 0) begins with k and is recorded */
    struct fake_tensor tensor[FAKE_TENSORS];
    int retained[FAKE_DEVICES];
};

/* Exported by the fake; found with dlsym. */
struct fake_cuda *fake_cuda_state(void);
int fake_cuda_depth(void);                                    /* contexts on this thread's stack */
unsigned fake_cuda_capture_mode(void);                        /* of this thread */
void fake_cuda_context(struct CUctx_st *context, int device); /* makes it a newly created context */
cu_result cuDevicePrimaryCtxReset_v2(cu_device device);       /* as an application calls it */

#endif
