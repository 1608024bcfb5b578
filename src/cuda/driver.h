/* SPDX-License-Identifier: MIT
 *
 * The part of the NVIDIA driver's interface that the library uses, declared here so that neither building nor loading
 * the library takes anything of CUDA: libcuda.so.1 is opened at the first use of a GPU. Entry points of CUDA 12.0 only.
 * tests/house/driver.c compares every number and layout with cuda.h where that is installed.
 */
#ifndef FMLA_CUDA_DRIVER_H
#define FMLA_CUDA_DRIVER_H

#include <stdint.h>

/* Handles carry the driver's own tags, so that these types are its types. */
typedef unsigned cu_result; /* enumerations of the driver have no negative value: unsigned */
typedef int cu_device;
typedef struct CUctx_st *cu_context;
typedef struct CUlib_st *cu_library;
typedef struct CUkern_st *cu_kernel;
typedef struct CUfunc_st *cu_function;
typedef struct CUstream_st *cu_stream;
typedef struct CUtensorMap_st *cu_tensor_map; /* 128 bytes, at a multiple of 128 */

enum {
    CU_SUCCESS = 0,
    CU_ERROR_NO_DEVICE = 100,
    CU_ERROR_INVALID_CONTEXT = 201,
    CU_ERROR_CONTEXT_IS_DESTROYED = 709
};

enum {
    CU_ATTRIBUTE_SM_COUNT = 16,
    CU_ATTRIBUTE_CAPABILITY_MAJOR = 75,
    CU_ATTRIBUTE_CAPABILITY_MINOR = 76,
    CU_ATTRIBUTE_SHARED_BYTES = 97 /* that a block may have when it asks for them */
};

enum { CU_KERNEL_MAX_DYNAMIC_SHARED_BYTES = 8 };
enum { CU_CAPTURE_RELAXED = 2 };

enum {
    CU_TENSOR_FLOAT16 = 6,
    CU_TENSOR_BFLOAT16 = 9,
    CU_TENSOR_INTERLEAVE_NONE = 0,
    CU_TENSOR_SWIZZLE_128B = 3,
    CU_TENSOR_PROMOTION_128B = 2,
    CU_TENSOR_FILL_ZERO = 0
};

enum { CU_LAUNCH_CLUSTER = 4, CU_LAUNCH_OVERLAP = 6 /* programmatic stream serialization */ };

struct cu_launch_attribute {
    unsigned id;
    char pad[4];
    union {
        char pad[64];
        struct {
            unsigned x, y, z;
        } cluster;
        int overlap;
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

/* The entries. */
struct driver {
    cu_result (*init)(unsigned flags);
    cu_result (*device_get_count)(int *count);
    cu_result (*device_get)(cu_device *device, int ordinal);
    cu_result (*device_get_attribute)(int *value, unsigned attribute, cu_device device);
    cu_result (*device_get_name)(char *name, int size, cu_device device);
    cu_result (*primary_retain)(cu_context *context, cu_device device);
    cu_result (*primary_state)(cu_device device, unsigned *flags, int *active);
    cu_result (*context_get)(cu_context *context);
    cu_result (*context_push)(cu_context context);
    cu_result (*context_pop)(cu_context *context);
    cu_result (*context_device)(cu_device *device);
    cu_result (*context_id)(cu_context context, unsigned long long *id);
    cu_result (*library_load)(cu_library *library, const void *image, unsigned *jit_options,
                              void **jit_values, unsigned num_jit, unsigned *options, void **values,
                              unsigned num_options);
    cu_result (*library_kernel)(cu_kernel *kernel, cu_library library, const char *name);
    cu_result (*kernel_function)(cu_function *function, cu_kernel kernel);
    cu_result (*kernel_set_attribute)(unsigned attribute, int value, cu_kernel kernel, cu_device device);
    cu_result (*launch)(const struct cu_launch_config *config, cu_function function, void **parameters,
                        void **extra);
    cu_result (*error_name)(cu_result error, const char **text);
    cu_result (*error_string)(cu_result error, const char **text);
    cu_result (*exchange_capture_mode)(unsigned *mode);
    cu_result (*tensor_map_encode)(cu_tensor_map map, unsigned type, uint32_t rank, void *base,
                                   const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                                   const uint32_t *steps, unsigned interleave, unsigned swizzle,
                                   unsigned promotion, unsigned fill);
    int version; /* of CUDA, 1000 · major + 10 · minor */
};

/* ENTRY(member, name in libcuda) for each; where the driver has several versions of an entry, the name says which. */
#define CUDA_DRIVER_ENTRIES(ENTRY)                                                                           \
    ENTRY(init, cuInit)                                                                                      \
    ENTRY(device_get_count, cuDeviceGetCount)                                                                \
    ENTRY(device_get, cuDeviceGet)                                                                           \
    ENTRY(device_get_attribute, cuDeviceGetAttribute)                                                        \
    ENTRY(device_get_name, cuDeviceGetName)                                                                  \
    ENTRY(primary_retain, cuDevicePrimaryCtxRetain)                                                          \
    ENTRY(primary_state, cuDevicePrimaryCtxGetState)                                                         \
    ENTRY(context_get, cuCtxGetCurrent)                                                                      \
    ENTRY(context_push, cuCtxPushCurrent_v2)                                                                 \
    ENTRY(context_pop, cuCtxPopCurrent_v2)                                                                   \
    ENTRY(context_device, cuCtxGetDevice)                                                                    \
    ENTRY(context_id, cuCtxGetId)                                                                            \
    ENTRY(library_load, cuLibraryLoadData)                                                                   \
    ENTRY(library_kernel, cuLibraryGetKernel)                                                                \
    ENTRY(kernel_function, cuKernelGetFunction)                                                              \
    ENTRY(kernel_set_attribute, cuKernelSetAttribute)                                                        \
    ENTRY(launch, cuLaunchKernelEx)                                                                          \
    ENTRY(error_name, cuGetErrorName)                                                                        \
    ENTRY(error_string, cuGetErrorString)                                                                    \
    ENTRY(exchange_capture_mode, cuThreadExchangeStreamCaptureMode)                                          \
    ENTRY(tensor_map_encode, cuTensorMapEncodeTiled)

/* The driver, initialised: opened by the first call, whichever thread that is. NULL if there is none that this build can
 * use; then *why (static) says why. */
const struct driver *driver_open(const char **why);

/* The CUDA version of the driver that driver_open found, usable or not; 0 if there is none. */
int driver_version(void);

/* "CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)" */
const char *driver_words(const struct driver *driver, cu_result error, char buffer[160]);

/* "CUDA 13.0 (driver 580)": a version with the driver release that first had it, where that is known. */
const char *driver_version_words(int version, char buffer[48]);

#endif
