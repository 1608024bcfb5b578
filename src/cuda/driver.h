/* SPDX-License-Identifier: MIT
 *
 * The part of the NVIDIA driver API that the library uses, declared here so that neither building nor loading
 * the library needs CUDA: libcuda.so.1 is opened at the first use of a GPU. It needs entry points of CUDA 12.0
 * only.
 * tests/house/driver.c compares every number and layout with cuda.h where that is installed.
 */
#ifndef FMLA_CUDA_DRIVER_H
#define FMLA_CUDA_DRIVER_H

#include <stdint.h>

/* Handles carry the driver's own struct tags, so that these types are compatible with its types. */
typedef unsigned cu_result; /* unsigned: the driver's enumerations have no negative value */
typedef int cu_device;
typedef struct CUctx_st *cu_context;
typedef struct CUlib_st *cu_library;
typedef struct CUkern_st *cu_kernel;
typedef struct CUfunc_st *cu_function;
typedef struct CUstream_st *cu_stream;
typedef struct CUtensorMap_st *cu_tensor_map; /* 128 bytes, 128-byte aligned */

enum {
    CU_SUCCESS = 0,
    CU_ERROR_NO_DEVICE = 100,
    CU_ERROR_INVALID_CONTEXT = 201,
    CU_ERROR_CONTEXT_IS_DESTROYED = 709,
    CU_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720
};

enum {
    CU_ATTRIBUTE_SM_COUNT = 16,
    CU_ATTRIBUTE_CAPABILITY_MAJOR = 75,
    CU_ATTRIBUTE_CAPABILITY_MINOR = 76,
    CU_ATTRIBUTE_SHARED_BYTES = 97 /* most per CTA, with opt-in */
};

enum { CU_KERNEL_MAX_DYNAMIC_SHARED_BYTES = 8 };
enum { CU_CAPTURE_RELAXED = 2 };

enum {
    CU_TENSOR_FLOAT16 = 6,
    CU_TENSOR_BFLOAT16 = 9,
    CU_TENSOR_INTERLEAVE_NONE = 0,
    CU_TENSOR_SWIZZLE_NONE = 0,
    CU_TENSOR_SWIZZLE_64B = 2,
    CU_TENSOR_SWIZZLE_128B = 3,
    CU_TENSOR_PROMOTION_128B = 2,
    CU_TENSOR_FILL_ZERO = 0
};

enum {
    CU_LAUNCH_COOPERATIVE = 2,
    CU_LAUNCH_CLUSTER = 4,
    CU_LAUNCH_OVERLAP = 6 /* programmatic stream serialization */
};

struct cu_launch_attribute {
    unsigned id;
    char pad[4];
    union {
        char pad[64];
        struct {
            unsigned x, y, z;
        } cluster;
        int overlap;
        int cooperative;
    } value;
};

struct cu_launch_config {
    unsigned grid_x, grid_y, grid_z;
    unsigned block_x, block_y, block_z;
    unsigned shared_bytes;
    cu_stream stream;
    struct cu_launch_attribute *attributes;
    unsigned num_attributes;
};

/* A part of a GPU that a context may have; later drivers may write more. */
struct cu_resource {
    unsigned type; /* CU_RESOURCE_SM */
    char pad[92];
    unsigned sm_count;
    char more[416];
};
enum { CU_RESOURCE_SM = 1 };

/* Entry points of later versions; NULL if the driver has none. */
#define CUDA_DRIVER_LATER_ENTRIES(ENTRY)                                                                     \
    ENTRY(context_resource, cuCtxGetDevResource, cu_context context, struct cu_resource *resource,           \
          unsigned type) /* 12.4 */

/* ENTRY(member, name in libcuda, parameters). If the driver has several versions of an entry, the name has
 * the version suffix. */
#define CUDA_DRIVER_ENTRIES(ENTRY)                                                                           \
    ENTRY(init, cuInit, unsigned flags)                                                                      \
    ENTRY(device_get_count, cuDeviceGetCount, int *count)                                                    \
    ENTRY(device_get, cuDeviceGet, cu_device *device, int ordinal)                                           \
    ENTRY(device_get_attribute, cuDeviceGetAttribute, int *value, unsigned attribute, cu_device device)      \
    ENTRY(device_get_name, cuDeviceGetName, char *name, int size, cu_device device)                          \
    ENTRY(primary_retain, cuDevicePrimaryCtxRetain, cu_context *context, cu_device device)                   \
    ENTRY(primary_state, cuDevicePrimaryCtxGetState, cu_device device, unsigned *flags, int *active)         \
    ENTRY(context_get, cuCtxGetCurrent, cu_context *context)                                                 \
    ENTRY(context_push, cuCtxPushCurrent_v2, cu_context context)                                             \
    ENTRY(context_pop, cuCtxPopCurrent_v2, cu_context *context)                                              \
    ENTRY(context_device, cuCtxGetDevice, cu_device *device)                                                 \
    ENTRY(context_id, cuCtxGetId, cu_context context, unsigned long long *id)                                \
    ENTRY(library_load, cuLibraryLoadData, cu_library *library, const void *image, unsigned *jit_options,    \
          void **jit_values, unsigned num_jit, unsigned *options, void **values, unsigned num_options)       \
    ENTRY(library_kernel, cuLibraryGetKernel, cu_kernel *kernel, cu_library library, const char *name)       \
    ENTRY(kernel_function, cuKernelGetFunction, cu_function *function, cu_kernel kernel)                     \
    ENTRY(kernel_set_attribute, cuKernelSetAttribute, unsigned attribute, int value, cu_kernel kernel,       \
          cu_device device)                                                                                  \
    ENTRY(launch, cuLaunchKernelEx, const struct cu_launch_config *config, cu_function function,             \
          void **parameters, void **extra)                                                                   \
    ENTRY(error_name, cuGetErrorName, cu_result error, const char **text)                                    \
    ENTRY(error_string, cuGetErrorString, cu_result error, const char **text)                                \
    ENTRY(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, unsigned *mode)                          \
    ENTRY(tensor_map_encode, cuTensorMapEncodeTiled, cu_tensor_map map, unsigned type, uint32_t rank,        \
          void *base, const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,                   \
          const uint32_t *steps, unsigned interleave, unsigned swizzle, unsigned promotion, unsigned fill)

struct driver {
#define ENTRY(member, name, ...) cu_result (*member)(__VA_ARGS__);
    CUDA_DRIVER_ENTRIES(ENTRY)
    CUDA_DRIVER_LATER_ENTRIES(ENTRY)
#undef ENTRY
    int version; /* of CUDA, 1000 · major + 10 · minor */
};

/* Returns the initialised driver, opened by the first call from any thread; NULL if there is none that this
 * build can use. *why (static) then says why. */
const struct driver *driver_open(const char **why);

/* Returns the CUDA version of the driver that driver_open found, usable or not; 0 if there is none. */
int driver_version(void);

/* Returns a text such as "CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)". */
const char *driver_words(const struct driver *driver, cu_result error, char buffer[160]);

/* Returns a text such as "CUDA 13.0 (driver 580)": the version, and the first driver release with it, if
 * known. */
const char *driver_version_words(int version, char buffer[48]);

#endif
