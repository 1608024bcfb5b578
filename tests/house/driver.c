/* SPDX-License-Identifier: MIT
 *
 * Checks that src/cuda/driver.h matches cuda.h: numbers, layouts, and every entry with its parameters.
 * Nothing runs here: it compiles or it does not.
 */
#include <cuda.h>

#include "../../src/cuda/driver.h"

#include <stddef.h>

#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #ours " is not " #theirs)
SAME(CU_SUCCESS, CUDA_SUCCESS);
SAME(CU_ERROR_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME(CU_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
SAME(CU_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_CONTEXT_IS_DESTROYED);
SAME(CU_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
SAME(CU_ATTRIBUTE_SM_COUNT, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(CU_ATTRIBUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(CU_ATTRIBUTE_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(CU_ATTRIBUTE_SHARED_BYTES, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME(CU_KERNEL_MAX_DYNAMIC_SHARED_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(CU_CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(CU_TENSOR_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
SAME(CU_TENSOR_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
SAME(CU_TENSOR_INTERLEAVE_NONE, CU_TENSOR_MAP_INTERLEAVE_NONE);
SAME(CU_TENSOR_SWIZZLE_128B, CU_TENSOR_MAP_SWIZZLE_128B);
SAME(CU_TENSOR_PROMOTION_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
SAME(CU_TENSOR_FILL_ZERO, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
SAME(CU_LAUNCH_COOPERATIVE, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
SAME(CU_LAUNCH_CLUSTER, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(CU_LAUNCH_OVERLAP, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);

#define MEMBER(ours, member, theirs, their_member)                                                           \
    _Static_assert(offsetof(struct ours, member) == offsetof(theirs, their_member), #member " moved");       \
    _Static_assert(sizeof(((struct ours *)0)->member) == sizeof(((theirs *)0)->their_member),                \
                   #member " is not as long as " #their_member)
#define ATTRIBUTE(member, their_member) MEMBER(cu_launch_attribute, member, CUlaunchAttribute, their_member)
ATTRIBUTE(id, id);
ATTRIBUTE(value, value);
ATTRIBUTE(value.cluster, value.clusterDim);
ATTRIBUTE(value.cluster.x, value.clusterDim.x);
ATTRIBUTE(value.cluster.y, value.clusterDim.y);
ATTRIBUTE(value.cluster.z, value.clusterDim.z);
ATTRIBUTE(value.overlap, value.programmaticStreamSerializationAllowed);
ATTRIBUTE(value.cooperative, value.cooperative);
_Static_assert(sizeof(struct cu_launch_attribute) == sizeof(CUlaunchAttribute), "size of CUlaunchAttribute");

#if CUDA_VERSION >= 12040
SAME(CU_RESOURCE_SM, CU_DEV_RESOURCE_TYPE_SM);
MEMBER(cu_resource, type, CUdevResource, type);
MEMBER(cu_resource, sm_count, CUdevResource, sm.smCount);
_Static_assert(sizeof(struct cu_resource) >= 2 * sizeof(CUdevResource), "room for more than CUdevResource");
#endif

#define CONFIG(member, their_member) MEMBER(cu_launch_config, member, CUlaunchConfig, their_member)
CONFIG(grid_x, gridDimX);
CONFIG(grid_y, gridDimY);
CONFIG(grid_z, gridDimZ);
CONFIG(block_x, blockDimX);
CONFIG(block_y, blockDimY);
CONFIG(block_z, blockDimZ);
CONFIG(shared_bytes, sharedMemBytes);
CONFIG(stream, hStream);
CONFIG(attributes, attrs);
CONFIG(num_attributes, numAttrs);
_Static_assert(sizeof(struct cu_launch_config) == sizeof(CUlaunchConfig), "size of CUlaunchConfig");

/* Handles have the driver's own types, and its enumerations are unsigned, so the types of the entries are
 * equal, except for the launch, whose configuration is compared above. cuda.h's macros make `name` the
 * current version. */
typedef CUresult launch_entry(const CUlaunchConfig *, CUfunction, void **, void **);
#define ENTRY(member, name, ...)                                                                             \
    _Static_assert(                                                                                          \
        __builtin_types_compatible_p(__typeof__(*((struct driver *)0)->member), __typeof__(name)) ||         \
            __builtin_types_compatible_p(launch_entry, __typeof__(name)),                                    \
        #member " has other parameters");
CUDA_DRIVER_ENTRIES(ENTRY)
#undef ENTRY

/* The name must be the one that is looked up: a later version would have another name. */
#define TEXT(name)           #name
#define VALUE(name)          TEXT(name)
#define CURRENT(name, asked) _Static_assert(sizeof(VALUE(name)) == sizeof(asked), VALUE(name) " is current")
CURRENT(cuCtxPushCurrent, "cuCtxPushCurrent_v2");
CURRENT(cuCtxPopCurrent, "cuCtxPopCurrent_v2");
