/* SPDX-License-Identifier: MIT
 *
 * Checks that fmla_tensor is DLPack's DLTensor, field for field: as numbers on every machine with 64-bit
 * pointers, and against DLPack's own header if it is installed. Nothing runs here: it compiles or it does
 * not.
 */
#include <flashmla/flashmla.h>

#include <stddef.h>

/* FIELD(our name, DLPack's name, offset) */
#define FIELDS(FIELD)                                                                                        \
    FIELD(data, data, 0)                                                                                     \
    FIELD(device, device, 8)                                                                                 \
    FIELD(device.device_type, device.device_type, 8)                                                         \
    FIELD(device.id, device.device_id, 12)                                                                   \
    FIELD(ndim, ndim, 16)                                                                                    \
    FIELD(dtype, dtype, 20)                                                                                  \
    FIELD(dtype.code, dtype.code, 20)                                                                        \
    FIELD(dtype.bits, dtype.bits, 21)                                                                        \
    FIELD(dtype.lanes, dtype.lanes, 22)                                                                      \
    FIELD(shape, shape, 24)                                                                                  \
    FIELD(strides, strides, 32)                                                                              \
    FIELD(byte_offset, byte_offset, 40)

#define AT(ours, theirs, offset) _Static_assert(offsetof(fmla_tensor, ours) == (offset), #ours " moved");
_Static_assert(sizeof(void *) == 8, "these numbers are for 64-bit pointers");
FIELDS(AT)
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

#define SAME(ours, theirs, offset)                                                                           \
    _Static_assert(offsetof(DLTensor, theirs) == (offset), #ours " is not at " #theirs);                     \
    _Static_assert(sizeof(((fmla_tensor *)0)->ours) == sizeof(((DLTensor *)0)->theirs),                      \
                   #ours " is not as long as " #theirs);
FIELDS(SAME)
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
