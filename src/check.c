/* SPDX-License-Identifier: MIT */
#include "check.h"

#include "dispatch.h"

#include <stdio.h>
#include <string.h>

static const struct {
    unsigned allowed_by; /* the first ones in the order of enum element */
    fmla_dtype dtype;
    const char *name;
} dtypes[] = {
    {ALLOW_BF16, {FMLA_TYPE_BFLOAT, 16, 1}, "bfloat16"},
    {ALLOW_FP16, {FMLA_TYPE_FLOAT, 16, 1}, "float16"},
    {ALLOW_F32, {FMLA_TYPE_FLOAT, 32, 1}, "float32"},
    {ALLOW_I32, {FMLA_TYPE_INT, 32, 1}, "int32"},
    {ALLOW_I64, {FMLA_TYPE_INT, 64, 1}, "int64"},
    {ALLOW_BYTES, {FMLA_TYPE_UINT, 8, 1}, "a type of one byte"}, /* of any code */
};
enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

static const char *name_of_dtype(fmla_dtype dtype, char buffer[48])
{
    const char *code = dtype.code == FMLA_TYPE_INT      ? "int"
                       : dtype.code == FMLA_TYPE_UINT   ? "uint"
                       : dtype.code == FMLA_TYPE_FLOAT  ? "float"
                       : dtype.code == FMLA_TYPE_BFLOAT ? "bfloat"
                                                        : NULL;
    const int used = code ? snprintf(buffer, 48, "%s%d", code, dtype.bits)
                          : snprintf(buffer, 48, "type code %d with %d bits", dtype.code, dtype.bits);
    if (dtype.lanes != 1) snprintf(buffer + used, 48 - (size_t)used, " with %d lanes", dtype.lanes);
    return buffer;
}

static fmla_status check_dtype(const char *operation, const char *name, fmla_dtype dtype, unsigned allow,
                               int *which)
{
    char allowed[64] = "", came[48];
    for (int i = 0; i < DTYPES; i++) {
        if (!(allow & dtypes[i].allowed_by)) continue;
        if ((dtype.code == dtypes[i].dtype.code || dtypes[i].allowed_by == ALLOW_BYTES) &&
            dtype.bits == dtypes[i].dtype.bits && dtype.lanes == 1) {
            *which = i;
            return FMLA_OK;
        }
        text_append(allowed, sizeof allowed, "%s%s", *allowed ? " or " : "", dtypes[i].name);
    }
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: dtype is %s, must be %s", operation, name,
                name_of_dtype(dtype, came), allowed);
}

static fmla_status check_device(const char *operation, const char *name, fmla_device device,
                                fmla_device *normal)
{
    char buffer[32];
    if (device.device_type != FMLA_DEVICE_CPU && device.device_type != FMLA_DEVICE_CUDA &&
        device.device_type != FMLA_DEVICE_CUDA_HOST)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: device is %s, must be cpu (1), cuda (2) or cuda_host (3)",
                    operation, name, device_name(device, buffer));
    if (device.id < 0)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: device id is %d, must be ≥ 0", operation, name,
                    device.id);
    *normal = device;
    if (device.device_type != FMLA_DEVICE_CUDA) *normal = (fmla_device){FMLA_DEVICE_CPU, 0};
    return FMLA_OK;
}

/* Fills shape and stride; *empty says that there is no element. Every offset of an element fits 63 bits in
 * bytes. */
static fmla_status check_layout(const char *operation, const struct fmla_tensor *tensor,
                                int64_t element_bytes, struct checked_tensor *checked, bool *empty)
{
    const char *name = checked->name;
    const int ndim = tensor->ndim;
    *empty = false;
    for (int i = 0; i < ndim; i++) {
        checked->shape[i] = tensor->shape[i];
        if (tensor->shape[i] < 0)
            return fail(FMLA_INVALID_ARGUMENT, "%s: %s: size of dimension %d is %lld, must be ≥ 0", operation,
                        name, i, (long long)tensor->shape[i]);
        *empty |= tensor->shape[i] == 0;
    }
    int64_t contiguous = 1;
    int64_t span = 1; /* elements from the first to one past the last */
    for (int i = ndim - 1; i >= 0; i--) {
        const int64_t size = checked->shape[i];
        const int64_t stride = tensor->strides ? tensor->strides[i] : contiguous;
        checked->stride[i] = stride;
        if (*empty || size == 1) {
            /* Any stride is allowed here. One of a single element is only multiplied by 0; one of a tensor without
             * elements may be multiplied by an index of another tensor, so it must not overflow. */
            checked->stride[i] = size == 1 && i == ndim - 1 ? 1 : *empty ? 0 : stride;
            continue;
        }
        if (i == ndim - 1 && stride != 1)
            return fail(FMLA_INVALID_ARGUMENT,
                        "%s: %s: stride of the innermost dimension %d is %lld, must be 1", operation, name, i,
                        (long long)stride);
        if (stride < 0)
            return fail(FMLA_INVALID_ARGUMENT, "%s: %s: stride of dimension %d is %lld, must be ≥ 0",
                        operation, name, i, (long long)stride);
        int64_t reach, bytes;
        if (__builtin_mul_overflow(size - 1, stride, &reach) || __builtin_add_overflow(span, reach, &span) ||
            __builtin_mul_overflow(span, element_bytes, &bytes) ||
            (!tensor->strides && __builtin_mul_overflow(contiguous, size, &contiguous)))
            return fail(FMLA_INVALID_ARGUMENT,
                        "%s: %s: sizes and strides overflow at dimension %d: the tensor must span "
                        "less than 2^63 bytes",
                        operation, name, i);
    }
    return FMLA_OK;
}

/* Sufficient for "no two elements share memory": with dimensions sorted by stride, each strides over all
 * before it. */
static bool elements_are_distinct(const struct checked_tensor *tensor, int ndim)
{
    bool used[CHECK_MAX_DIMS] = {false};
    int64_t covered = 1; /* elements that the dimensions so far reach over */
    for (int round = 0; round < ndim; round++) {
        int next = -1;
        for (int i = 0; i < ndim; i++)
            if (!used[i] && tensor->shape[i] > 1 && (next < 0 || tensor->stride[i] < tensor->stride[next]))
                next = i;
        if (next < 0) return true;
        if (tensor->stride[next] < covered) return false;
        covered += (tensor->shape[next] - 1) * tensor->stride[next];
        used[next] = true;
    }
    return true;
}

fmla_status check_tensor(const char *operation, const char *name, const fmla_tensor *tensor, int ndim,
                         unsigned allow, struct checked_tensor *checked)
{
    memset(checked, 0, sizeof *checked);
    if (!tensor) {
        if (allow & ALLOW_NULL) return FMLA_OK;
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is NULL, must be a tensor", operation, name);
    }
    checked->name = name;
    if (tensor->ndim != ndim)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: has %d dimensions, must have %d", operation, name,
                    tensor->ndim, ndim);
    if (!tensor->shape) return fail(FMLA_INVALID_ARGUMENT, "%s: %s: shape is NULL", operation, name);
    int which = 0;
    fmla_status status = check_dtype(operation, name, tensor->dtype, allow, &which);
    if (!status) status = check_device(operation, name, tensor->device, &checked->device);
    if (status) return status;
    checked->element = (enum element)which; /* not read for integers and bytes */

    const int64_t element_bytes = dtypes[which].dtype.bits / 8;
    bool empty;
    status = check_layout(operation, tensor, element_bytes, checked, &empty);
    if (status) return status;
    if (tensor->byte_offset > PTRDIFF_MAX)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: byte_offset is %llu, must be below 2^63", operation, name,
                    (unsigned long long)tensor->byte_offset);
    checked->data = tensor->data ? (char *)((uintptr_t)tensor->data + tensor->byte_offset) : NULL;
    if (empty) return FMLA_OK;
    if ((allow & CHECK_OUTPUT) && !elements_are_distinct(checked, ndim))
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: %s: strides let elements of this output share memory, must keep them apart",
                    operation, name);
    if (allow & CHECK_SHAPE_ONLY) return FMLA_OK;
    if (!tensor->data)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: data is NULL, but the tensor has elements", operation,
                    name);
    if ((uintptr_t)checked->data % (uintptr_t)element_bytes)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: %s: data + byte_offset is not a multiple of the %lld bytes of an element", operation,
                    name, (long long)element_bytes);
    return FMLA_OK;
}

fmla_status check_size(const char *operation, const struct checked_tensor *tensor, int dim,
                       const char *symbol, int64_t size, const char *other)
{
    if (tensor->shape[dim] == size) return FMLA_OK;
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: %s (dimension %d) is %lld, must be %lld as in %s", operation,
                tensor->name, symbol, dim, (long long)tensor->shape[dim], (long long)size, other);
}

fmla_status check_same_device(const char *operation, const struct checked_tensor *tensor,
                              const struct checked_tensor *other)
{
    char mine[32], theirs[32];
    if (!tensor->name ||
        (tensor->device.device_type == other->device.device_type && tensor->device.id == other->device.id))
        return FMLA_OK;
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: device is %s, must be %s as %s's", operation, tensor->name,
                device_name(tensor->device, mine), device_name(other->device, theirs), other->name);
}

fmla_status check_range(const char *operation, const char *name, int64_t value, int64_t low, int64_t high)
{
    if (value >= low && value <= high) return FMLA_OK;
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is %lld, must be in [%lld, %lld]", operation, name,
                (long long)value, (long long)low, (long long)high);
}

fmla_status check_struct(const char *operation, const char *name, const void *args, void *copy, size_t size,
                         const size_t *sizes)
{
    if (!args) return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is NULL, must point to a struct", operation, name);
    size_t came;
    memcpy(&came, args, sizeof came);
    bool published = false;
    for (const size_t *s = sizes; *s; s++) published |= came == *s;
    if (!published && came < size + 1)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: struct_size: is %zu, must be %zu; make the struct with FMLA_INIT", operation, came,
                    size);
    if (came > size) {
        /* A caller of a later header: fine as long as it uses nothing that is unknown here. Beyond a page the
         * size itself cannot be meant. */
        if (came > size + 4096)
            return fail(FMLA_INVALID_ARGUMENT,
                        "%s: struct_size: is %zu, must be %zu; make the struct with FMLA_INIT", operation,
                        came, size);
        for (size_t i = size; i < came; i++)
            if (((const char *)args)[i])
                return fail(FMLA_UNSUPPORTED,
                            "%s: struct_size: is %zu and byte %zu is set; this library (%s) knows the first "
                            "%zu bytes",
                            operation, came, i, fmla_version_string(), size);
    }
    memset(copy, 0, size);
    memcpy(copy, args, came < size ? came : size);
    return FMLA_OK;
}
