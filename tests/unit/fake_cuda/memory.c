/* SPDX-License-Identifier: MIT
 *
 * The driver functions that tools use beyond the library's (support/gpu.c): with fake_cuda.c a
 * libcuda.so.1 whose device memory is the host's. When the process ends it reports what was left open.
 */
#include "cuda/driver.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t device_pointer;

enum { OUT_OF_MEMORY = 2, INVALID_VALUE = 1, NOT_SUPPORTED = 801 };
static int memories, streams;

cu_result cuCtxGetCurrent(cu_context *context);
cu_result cuCtxPushCurrent_v2(cu_context context);
cu_result cuCtxPopCurrent_v2(cu_context *context);

/* Declares and defines an entry. */
#define ENTRY(name, ...)                                                                                     \
    cu_result name(__VA_ARGS__);                                                                             \
    cu_result name(__VA_ARGS__)

__attribute__((destructor)) static void tell(void)
{
    if (memories || streams)
        fprintf(stderr, "fake GPU: %d allocations and %d streams are left\n", memories, streams);
}

ENTRY(cuDeviceTotalMem_v2, size_t *bytes, cu_device device)
{
    (void)device;
    *bytes = (size_t)1 << 37;
    return CU_SUCCESS;
}

ENTRY(cuCtxSetCurrent, cu_context context)
{
    cu_context before;
    cu_result result = cuCtxGetCurrent(&before);
    if (!result && before) result = cuCtxPopCurrent_v2(&before);
    return result ? result : cuCtxPushCurrent_v2(context);
}

ENTRY(cuCtxSynchronize, void)
{
    return CU_SUCCESS;
}

/* ---- Memory --------------------------------------------------------------------------------- */

static void *place(device_pointer memory)
{
    void *at;
    memcpy(&at, &memory, sizeof at);
    return at;
}

ENTRY(cuMemAlloc_v2, device_pointer *memory, size_t bytes)
{
    void *at = bytes && bytes < SIZE_MAX - 256 ? aligned_alloc(256, (bytes + 255) / 256 * 256) : NULL;
    if (!at) return OUT_OF_MEMORY;
    memset(at, 0xff, bytes); /* makes reads of unwritten memory visible */
    memcpy(memory, &at, sizeof at);
    memories++;
    return CU_SUCCESS;
}

ENTRY(cuMemFree_v2, device_pointer memory)
{
    if (!memory) return INVALID_VALUE;
    free(place(memory));
    memories--;
    return CU_SUCCESS;
}

ENTRY(cuMemcpyHtoD_v2, device_pointer to, const void *from, size_t bytes)
{
    memcpy(place(to), from, bytes);
    return CU_SUCCESS;
}

ENTRY(cuMemcpyDtoH_v2, void *to, device_pointer from, size_t bytes)
{
    memcpy(to, place(from), bytes);
    return CU_SUCCESS;
}

ENTRY(cuMemsetD8_v2, device_pointer to, unsigned char byte, size_t bytes)
{
    memset(place(to), byte, bytes);
    return CU_SUCCESS;
}

/* ---- Streams -------------------------------------------------------------------------------- */

ENTRY(cuStreamCreate, cu_stream *stream, unsigned flags)
{
    static char handles[64];
    (void)flags;
    if (streams == sizeof handles) return OUT_OF_MEMORY;
    *stream = (cu_stream)(void *)&handles[streams++];
    return CU_SUCCESS;
}

ENTRY(cuStreamDestroy_v2, cu_stream stream)
{
    if (!stream) return INVALID_VALUE;
    streams--;
    return CU_SUCCESS;
}

ENTRY(cuStreamSynchronize, cu_stream stream)
{
    (void)stream;
    return CU_SUCCESS;
}

/* ---- What must be there and is not called ---------------------------------------------------- */

#define REFUSED(name)                                                                                        \
    ENTRY(name, void)                                                                                        \
    {                                                                                                        \
        return NOT_SUPPORTED;                                                                                \
    }
REFUSED(cuEventCreate)
REFUSED(cuEventDestroy_v2)
REFUSED(cuEventRecord)
REFUSED(cuEventSynchronize)
REFUSED(cuEventElapsedTime)
REFUSED(cuStreamBeginCapture_v2)
REFUSED(cuStreamEndCapture)
REFUSED(cuGraphInstantiateWithFlags)
REFUSED(cuGraphLaunch)
REFUSED(cuGraphDestroy)
REFUSED(cuGraphExecDestroy)
REFUSED(cuDeviceGetPCIBusId)
REFUSED(cuModuleLoadData)
REFUSED(cuModuleUnload)
REFUSED(cuModuleGetFunction)
REFUSED(cuFuncSetAttribute)
REFUSED(cuLaunchKernel)
