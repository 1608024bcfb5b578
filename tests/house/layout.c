/* SPDX-License-Identifier: MIT
 *
 * Checks that fmla_tensor is DLPack's DLTensor, field for field: as numbers on every machine with 64-bit
 * pointers, and against DLPack's own header if it is installed. Nothing runs here: it compiles or it does
 * not.
 */
#include <flashmla/flashmla.h>

#include <stddef.h>

#define AT(field, offset) _Static_assert(offsetof(fmla_tensor, field) == (offset), #field " moved")

_Static_assert(sizeof(void *) == 8, "these numbers are for 64-bit pointers");
AT(data, 0);
AT(device, 8);
AT(device.device_type, 8);
AT(device.id, 12);
AT(ndim, 16);
AT(dtype, 20);
AT(dtype.code, 20);
AT(dtype.bits, 21);
AT(dtype.lanes, 22);
AT(shape, 24);
AT(strides, 32);
AT(byte_offset, 40);
_Static_assert(sizeof(fmla_tensor) == 48, "size of fmla_tensor");
_Static_assert(_Alignof(fmla_tensor) == 8, "alignment of fmla_tensor");
_Static_assert(FMLA_DEVICE_CPU == 1 && FMLA_DEVICE_CUDA == 2 && FMLA_DEVICE_CUDA_HOST == 3, "device types");
_Static_assert(FMLA_TYPE_INT == 0 && FMLA_TYPE_UINT == 1 && FMLA_TYPE_FLOAT == 2 && FMLA_TYPE_BFLOAT == 4,
               "type codes");

/* Structs end with their last member: a later version could not distinguish padding bytes from zeros. */
#define ENDS_WITH(type, member)                                                                              \
    _Static_assert(sizeof(type) == offsetof(type, member) + sizeof(((type *)0)->member), #type " is padded")
ENDS_WITH(fmla_capability, reserved);
ENDS_WITH(fmla_device_info, workers_from);
ENDS_WITH(fmla_error, other);
ENDS_WITH(fmla_plan_view, num_splits);

/* Argument structs have exactly the members of their descriptors, without gaps. */
#define OPERATION(op, OP)              _Static_assert(sizeof(fmla_##op##_args) == sizeof(size_t)
#define MEMBER(op, member)             +sizeof(((fmla_##op##_args *)0)->member)
#define TENSOR(op, member, ...)        MEMBER(op, member)
#define OPTION(op, member, kind, a, b) MEMBER(op, member)
#define END(op)                        , #op);
#include "operations.def"

#ifdef COMPARE_WITH_DLPACK
#include <dlpack/dlpack.h>

#define SAME(ours, theirs)                                                                                   \
    _Static_assert(offsetof(fmla_tensor, ours) == offsetof(DLTensor, theirs), #ours " is not at " #theirs);  \
    _Static_assert(sizeof(((fmla_tensor *)0)->ours) == sizeof(((DLTensor *)0)->theirs),                      \
                   #ours " is not as long as " #theirs)

SAME(data, data);
SAME(device, device);
SAME(device.device_type, device.device_type);
SAME(device.id, device.device_id);
SAME(ndim, ndim);
SAME(dtype, dtype);
SAME(dtype.code, dtype.code);
SAME(dtype.bits, dtype.bits);
SAME(dtype.lanes, dtype.lanes);
SAME(shape, shape);
SAME(strides, strides);
SAME(byte_offset, byte_offset);
_Static_assert(sizeof(fmla_tensor) == sizeof(DLTensor), "size of DLTensor");
_Static_assert(_Alignof(fmla_tensor) == _Alignof(DLTensor), "alignment of DLTensor");
/* Enumerations are compared as numbers, because compilers warn otherwise. */
_Static_assert(FMLA_DEVICE_CPU == (int)kDLCPU, "kDLCPU");
_Static_assert(FMLA_DEVICE_CUDA_HOST == (int)kDLCUDAHost, "kDLCUDAHost");
_Static_assert(FMLA_DEVICE_CUDA == (int)kDLCUDA, "kDLCUDA");
_Static_assert(FMLA_TYPE_INT == (int)kDLInt, "kDLInt");
_Static_assert(FMLA_TYPE_UINT == (int)kDLUInt, "kDLUInt");
_Static_assert(FMLA_TYPE_FLOAT == (int)kDLFloat, "kDLFloat");
_Static_assert(FMLA_TYPE_BFLOAT == (int)kDLBfloat, "kDLBfloat");
#endif
