/* SPDX-License-Identifier: MIT */
#include "check.h"

#include "dispatch.h"

#include <stdio.h>
#include <string.h>

/* ---- One tensor ------------------------------------------------------------------------------ */

/* The index of a type is the number of its ALLOW_… bit. */
static const struct {
    fmla_dtype dtype;
    const char *name;
} dtypes[] = {
    {{FMLA_TYPE_BFLOAT, 16, 1}, "bfloat16"},
    {{FMLA_TYPE_FLOAT, 16, 1}, "float16"},
    {{FMLA_TYPE_FLOAT, 32, 1}, "float32"},
    {{FMLA_TYPE_INT, 32, 1}, "int32"},
    {{FMLA_TYPE_INT, 64, 1}, "int64"},
    {{FMLA_TYPE_UINT, 8, 1}, "a type of one byte (int8, uint8, float8_e4m3fn)"},
};
enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };
_Static_assert(ALLOW_FLOATS == 7 && ALLOW_I32 == 8 && ALLOW_I64 == 16 && ALLOW_BYTES == 1 << (DTYPES - 1),
               "the types are in the order of their bits");

/* Returns whether a type of one byte may stand for bytes: raw ones, or e4m3 codes. The codes of others would
 * be read as e4m3. */
static bool is_of_bytes(fmla_dtype dtype)
{
    return dtype.code == FMLA_TYPE_INT || dtype.code == FMLA_TYPE_UINT ||
           dtype.code == FMLA_TYPE_FLOAT8_E4M3FN;
}

static const char *name_of_dtype(fmla_dtype dtype, char buffer[48])
{
    /* Indexed by DLPack's type code. */
    static const struct {
        const char *name;
        int bits; /* that the name implies; 0: the message appends the number of bits */
    } codes[] = {{"int", 0},           {"uint", 0},
                 {"float", 0},         {NULL, 0},
                 {"bfloat", 0},        {"complex", 0},
                 {"bool", 8},          {"float8_e3m4", 8},
                 {"float8_e4m3", 8},   {"float8_e4m3b11fnuz", 8},
                 {"float8_e4m3fn", 8}, {"float8_e4m3fnuz", 8},
                 {"float8_e5m2", 8},   {"float8_e5m2fnuz", 8},
                 {"float8_e8m0fnu", 8}};
    const bool known = dtype.code < sizeof codes / sizeof *codes && codes[dtype.code].name &&
                       (!codes[dtype.code].bits || codes[dtype.code].bits == dtype.bits);
    int used;
    if (!known)
        used = snprintf(buffer, 48, "type code %d with %d bits", dtype.code, dtype.bits);
    else if (codes[dtype.code].bits)
        used = snprintf(buffer, 48, "%s", codes[dtype.code].name);
    else
        used = snprintf(buffer, 48, "%s%d", codes[dtype.code].name, dtype.bits);
    if (dtype.lanes != 1) snprintf(buffer + used, 48 - (size_t)used, " with %d lanes", dtype.lanes);
    return buffer;
}

/* Returns the index of the type, or DTYPES if it is not allowed. */
static int number_of_dtype(fmla_dtype dtype, unsigned allow)
{
    for (unsigned left = allow & ((1u << DTYPES) - 1); left; left &= left - 1) {
        const int i = __builtin_ctz(left);
        if (dtype.bits == dtypes[i].dtype.bits && dtype.lanes == 1 &&
            (1 << i == ALLOW_BYTES ? is_of_bytes(dtype) : dtype.code == dtypes[i].dtype.code))
            return i;
    }
    return DTYPES;
}

__attribute__((cold)) static fmla_status refuse_dtype(const char *operation, const char *name,
                                                      fmla_dtype dtype, unsigned allow)
{
    char allowed[128] = "", came[48];
    for (int i = 0; i < DTYPES; i++)
        if (allow & 1u << i)
            text_append(allowed, sizeof allowed, "%s%s", *allowed ? " or " : "", dtypes[i].name);
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

/* Properties that check_layout finds in passing. */
struct layout_found {
    bool empty;    /* the tensor has no element */
    bool in_order; /* every dimension strides over those after it, so no two elements share memory */
};

/* Fills shape and stride, which are all 0 on entry. Checks that every element's offset in bytes fits 63
 * bits. */
static fmla_status check_layout(const char *operation, const struct fmla_tensor *tensor,
                                int64_t element_bytes, struct checked_tensor *checked,
                                struct layout_found *found)
{
    const char *name = checked->name;
    const int ndim = tensor->ndim;
    bool empty = false;
    for (int i = 0; i < ndim; i++) {
        checked->shape[i] = tensor->shape[i];
        if (tensor->shape[i] < 0)
            return fail(FMLA_INVALID_ARGUMENT, "%s: %s: size of dimension %d is %lld, must be ≥ 0", operation,
                        name, i, (long long)tensor->shape[i]);
        empty |= tensor->shape[i] == 0;
    }
    *found = (struct layout_found){empty, true};
    if (empty) {
        /* Any stride is allowed but not stored: it may be multiplied by an index of another tensor and must
         * not overflow. */
        checked->stride[ndim - 1] = checked->shape[ndim - 1] == 1;
        return FMLA_OK;
    }
    /* Elements from the first to one past the last; also the next stride of a contiguous tensor. */
    int64_t span = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        const int64_t size = checked->shape[i], stride = tensor->strides ? tensor->strides[i] : span;
        checked->stride[i] = stride;
        if (size == 1) { /* Any stride is allowed: it is only multiplied by 0. */
            if (i == ndim - 1) checked->stride[i] = 1;
            continue;
        }
        if (i == ndim - 1 && stride != 1)
            return fail(FMLA_INVALID_ARGUMENT,
                        "%s: %s: stride of the innermost dimension %d is %lld, must be 1", operation, name, i,
                        (long long)stride);
        if (stride < 0)
            return fail(FMLA_INVALID_ARGUMENT, "%s: %s: stride of dimension %d is %lld, must be ≥ 0",
                        operation, name, i, (long long)stride);
        found->in_order &= stride >= span;
        int64_t reach, bytes;
        if (__builtin_mul_overflow(size - 1, stride, &reach) || __builtin_add_overflow(span, reach, &span) ||
            __builtin_mul_overflow(span, element_bytes, &bytes))
            return fail(FMLA_INVALID_ARGUMENT,
                        "%s: %s: sizes and strides overflow at dimension %d: the tensor must span "
                        "less than 2^63 bytes",
                        operation, name, i);
    }
    return FMLA_OK;
}

bool elements_are_distinct(const struct checked_tensor *tensor, int ndim)
{
    bool used[MAX_DIMENSIONS] = {false};
    int64_t covered = 1; /* extent of the dimensions so far, in elements */
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

/* Checks one tensor. `allow` has all of its types; `checked` is all zero on entry. */
static fmla_status check_tensor(const char *operation, const char *name, const fmla_tensor *tensor, int ndim,
                                unsigned allow, bool shape_only, struct checked_tensor *checked)
{
    if (!tensor) {
        if (allow & ALLOW_NULL) return FMLA_OK;
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is NULL, must be a tensor", operation, name);
    }
    checked->name = name;
    if (tensor->ndim != ndim)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: has %d dimensions, must have %d", operation, name,
                    tensor->ndim, ndim);
    if (!tensor->shape)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: shape is NULL, must point to %d sizes", operation, name,
                    ndim);
    const int which = number_of_dtype(tensor->dtype, allow);
    if (which == DTYPES) return refuse_dtype(operation, name, tensor->dtype, allow);
    TRY(check_device(operation, name, tensor->device, &checked->device));
    checked->of_bytes = 1u << which == ALLOW_BYTES;
    checked->element = checked->of_bytes ? ELEMENT_BF16 : (enum element)which; /* not used for integers */

    const int64_t element_bytes = dtypes[which].dtype.bits / 8;
    checked->element_bytes = (int32_t)element_bytes;
    struct layout_found found = {0};
    TRY(check_layout(operation, tensor, element_bytes, checked, &found));
    if (tensor->byte_offset > PTRDIFF_MAX)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: byte_offset is %llu, must be below 2^63", operation, name,
                    (unsigned long long)tensor->byte_offset);
    checked->data = tensor->data ? (void *)((uintptr_t)tensor->data + tensor->byte_offset) : NULL;
    checked->empty = found.empty;
    if (found.empty) return FMLA_OK;
    if ((allow & IS_OUTPUT) && !found.in_order && !elements_are_distinct(checked, ndim))
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: %s: strides let elements of this output share memory, must keep them apart",
                    operation, name);
    if (shape_only) return FMLA_OK;
    if (!tensor->data)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: data is NULL, but the tensor has elements", operation,
                    name);
    if ((uintptr_t)checked->data & (uintptr_t)(element_bytes - 1)) /* a power of 2 */
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: %s: data + byte_offset must be a multiple of %lld bytes, the size of an element",
                    operation, name, (long long)element_bytes);
    return FMLA_OK;
}

fmla_status check_size(const char *operation, const struct checked_tensor *tensor, int dimension,
                       const char *words, int64_t size, const char *other)
{
    if (tensor->shape[dimension] == size) return FMLA_OK;
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: %s (dimension %d) is %lld, must be %lld as in %s", operation,
                tensor->name, words, dimension, (long long)tensor->shape[dimension], (long long)size, other);
}

static fmla_status check_same_device(const char *operation, const struct checked_tensor *tensor,
                                     const struct checked_tensor *other)
{
    char mine[32], theirs[32];
    if (!tensor->name ||
        (tensor->device.device_type == other->device.device_type && tensor->device.id == other->device.id))
        return FMLA_OK;
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: device is %s, must be %s as in %s", operation, tensor->name,
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
        /* The caller has a later header, which is fine if it uses nothing unknown here. A size more than a
         * page larger cannot be intended. */
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

/* ---- A call ---------------------------------------------------------------------------------- */

static fmla_status check_options(const struct descriptor *descriptor, const char *args,
                                 struct checked_call *call)
{
    for (const struct member *m = descriptor->members; m->name; m++) {
        if (m->kind > MEMBER_LAST_INTEGER) continue;
        const void *const at = args + m->offset;
        const int64_t value = m->kind == MEMBER_WIDE ? *(const int64_t *)at : *(const int32_t *)at;
        if (m->kind == MEMBER_FORMAT) call->kv_format = (int32_t)value;
        if (m->kind == MEMBER_SECOND_FORMAT) call->second_format = (int32_t)value;
        if (m->kind == MEMBER_PRODUCTS) call->products = (int32_t)value;
        if (value < m->low || value > m->high)
            return check_range(descriptor->name, m->name, value, m->low, m->high);
    }
    return FMLA_OK;
}

/* Returns the option that names the format of a cache. */
static const struct member *format_option(const struct descriptor *descriptor, const struct member *cache)
{
    const enum member_kind kind = cache->allowed & IS_SECOND ? MEMBER_SECOND_FORMAT : MEMBER_FORMAT;
    const struct member *option = descriptor->members;
    while (option->kind != kind) option++;
    return option;
}

/* Returns where the checked format of a cache is stored. */
static const struct cache_format **format_of(const struct member *cache, struct checked_call *call)
{
    return cache->allowed & IS_SECOND ? &call->second : &call->format;
}

/* Returns whether an operation takes the scale of a whole cache as a tensor. */
static bool takes_cache_scale(const struct descriptor *descriptor)
{
    const struct member *m = descriptor->members;
    while (m->name && strcmp(m->name, "kv_scale")) m++;
    return m->name;
}

/* Fails for a cache of bytes whose format is not named; names those that the operation takes. */
__attribute__((cold)) static fmla_status refuse_bytes(const struct descriptor *descriptor,
                                                      const struct member *m)
{
    const struct member *option = format_option(descriptor, m);
    char formats[256] = "";
    for (int f = FMLA_KV_FP8_656; f <= option->high; f++) {
        const struct kv_layout layout = kv_layout_of(cache_formats[f].format, 0);
        if (layout.scale == KV_SCALE_OF_CACHE && !takes_cache_scale(descriptor)) continue;
        text_append(formats, sizeof formats, "%s%s (%d)", *formats ? " or " : "", cache_formats[f].name, f);
    }
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is 0, must name the format of the bytes in %s: %s",
                descriptor->name, option->name, m->name, formats);
}

/* Sets the format that a cache's option names. 0 means, for a second cache, the format of the first;
 * otherwise that of the first tensor's type, unless the cache has bytes. */
static fmla_status check_format(const struct descriptor *descriptor, const struct member *m,
                                const fmla_tensor *cache, struct checked_call *call)
{
    const enum element element = call->tensors[0].element;
    const bool is_second = m->allowed & IS_SECOND;
    int32_t which = is_second ? call->second_format : call->kv_format;
    const struct cache_format **format = format_of(m, call);
    if (!which && is_second) which = (int32_t)(call->format - cache_formats);
    if (!which) {
        if (cache && cache->dtype.bits == 8) return refuse_bytes(descriptor, m);
        which = element == ELEMENT_BF16 ? FMLA_KV_BF16 : FMLA_KV_FP16;
    }
    *format = &cache_formats[which];
    if ((m->allowed & ALLOW_SAME) && !((*format)->allowed & (ALLOW_BYTES | 1u << element)))
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is %s, must be a format with values of q's type, %s",
                    call->operation, format_option(descriptor, m)->name, (*format)->name,
                    dtypes[call->tensors[0].of_bytes ? DTYPES - 1 : (int)element].name);
    return FMLA_OK;
}

/* Sets call->flat from the first tensor that may be flat, and refuses one with neither number of dimensions.
 * Byte caches are always pages. */
static fmla_status check_flat(const struct member *m, const fmla_tensor *tensor, struct checked_call *call)
{
    const bool cache = m->allowed & IS_CACHE;
    if (!tensor || (cache && call->format->token)) return FMLA_OK;
    call->flat = tensor->ndim == form_of(m, true).rank;
    if (call->flat || tensor->ndim == m->rank) return FMLA_OK;
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: has %d dimensions, must have 3 (%s) or 4 (%s)",
                call->operation, m->name, tensor->ndim, cache ? "[s_kv, h_kv, d_qk]" : "[tokens, h_q, d_qk]",
                cache ? "[pages, page_size, 1, d_qk]" : "[b, s_q, h_q, d_qk]");
}

__attribute__((cold)) static fmla_status refuse_dimension(const char *operation,
                                                          const struct checked_tensor *tensor, int dimension,
                                                          const char *words, const struct range *range)
{
    char about[64];
    snprintf(about, sizeof about, "%s: %s (dimension %d)", tensor->name, words, dimension);
    return check_range(operation, about, tensor->shape[dimension], range->low, range->high);
}

/* Checks a named dimension of a tensor: the first tensor binds the name, later ones must agree. */
static fmla_status bind(const struct descriptor *descriptor, const struct checked_tensor *tensor,
                        int dimension, enum dimension name, struct checked_call *call)
{
    const int64_t size = tensor->shape[dimension];
    const struct range *range = &descriptor->ranges[name];
    const struct checked_tensor *bound = call->bound_by[name];
    if (bound) {
        if (size == call->size[name]) return FMLA_OK;
        return check_size(descriptor->name, tensor, dimension, dimension_words[name], call->size[name],
                          bound->name);
    }
    if (range->high && (size < range->low || size > range->high))
        return refuse_dimension(descriptor->name, tensor, dimension, dimension_words[name], range);
    call->size[name] = size, call->bound_by[name] = tensor, call->bound_at[name] = dimension;
    return FMLA_OK;
}

/* Checks the last dimension of a byte cache, which is the bytes of a token, and binds d_qk to that of the
 * format. */
static fmla_status bind_token(const struct descriptor *descriptor, const struct member *m,
                              const struct cache_format *format, const struct checked_tensor *cache,
                              struct checked_call *call)
{
    const struct checked_tensor *bound = call->bound_by[DIM_d_qk];
    TRY(check_size(descriptor->name, cache, 3, "bytes of a token", format->token, format->name));
    if ((m->allowed & IS_SECOND) && bound && call->size[DIM_d_qk] != format->d_qk)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: %s: is %s with d_qk %lld, must be a format with d_qk %lld as in %s",
                    descriptor->name, format_option(descriptor, m)->name, format->name,
                    (long long)format->d_qk, (long long)call->size[DIM_d_qk], bound->name);
    if (bound && (m->allowed & IS_SECOND)) return FMLA_OK; /* may be bound by a byte cache itself */
    if (bound)
        return check_size(descriptor->name, bound, call->bound_at[DIM_d_qk], "d_qk", format->d_qk,
                          format->name);
    call->size[DIM_d_qk] = format->d_qk, call->bound_by[DIM_d_qk] = cache, call->bound_at[DIM_d_qk] = 3;
    return FMLA_OK;
}

static fmla_status check_cache_layout(const struct member *m, const struct cache_format *format,
                                      const struct checked_tensor *cache, const struct checked_call *call)
{
    const bool contiguous_pages =
        kv_layout_of(format->format, 0).scale_bytes; /* the tokens of a page, then their scales */
    if (!cache->shape[0]) return FMLA_OK;
    for (int i = 0; (m->allowed & IN_UNITS) && i < 2; i++)
        if (cache->shape[i] > 1 && (cache->stride[i] & (format->unit - 1)))
            return fail(FMLA_INVALID_ARGUMENT,
                        "%s: %s: stride of dimension %d is %lld, must be a multiple of %lld in %s",
                        call->operation, cache->name, i, (long long)cache->stride[i], (long long)format->unit,
                        format->name);
    if (contiguous_pages && cache->shape[1] > 1 && cache->stride[1] != format->token)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: %s: stride of dimension 1 is %lld, must be %lld: a page of %s is contiguous",
                    call->operation, cache->name, (long long)cache->stride[1], (long long)format->token,
                    format->name);
    if (!call->shape_only && (m->allowed & IN_UNITS) &&
        ((uintptr_t)cache->data & (uintptr_t)(format->unit - 1)))
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: %s: data + byte_offset must be a multiple of %lld bytes in %s", call->operation,
                    cache->name, (long long)format->unit, format->name);
    return FMLA_OK;
}

void cache_steps(const struct cache_format *format, const struct checked_tensor *cache, int64_t *page_bytes,
                 int64_t *slot_bytes)
{
    /* The stride of a dimension of one element may be anything and is not multiplied. For the others,
     * check_tensor has checked that no offset overflows. */
    const int64_t bytes = format->token ? 1 : 2;
    const struct kv_layout layout = kv_layout_of(format->format, 0);
    *page_bytes = cache->shape[0] > 1 ? cache->stride[0] * bytes : 0;
    *slot_bytes = cache->shape[1] <= 1 ? 0
                  : layout.scale_bytes ? layout.token_bytes
                                       : cache->stride[1] * bytes;
}

static fmla_status check_rows(const struct checked_tensor *table, const struct checked_call *call)
{
    enum { ALIGNMENT = 16 };
    if (table->shape[0] > 1 && table->stride[0] != table->shape[1])
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: stride of dimension 0 is %lld, must be %lld",
                    call->operation, table->name, (long long)table->stride[0], (long long)table->shape[1]);
    if (!call->shape_only && (uintptr_t)table->data % ALIGNMENT)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: data + byte_offset is not aligned to %d bytes",
                    call->operation, table->name, ALIGNMENT);
    return FMLA_OK;
}

static fmla_status check_member(const struct descriptor *descriptor, const struct member *m,
                                const fmla_tensor *tensor, struct checked_tensor *checked,
                                struct checked_call *call)
{
    const struct cache_format *format = NULL; /* of a cache */
    unsigned allowed = m->allowed;
    if (allowed & IS_CACHE) {
        TRY(check_format(descriptor, m, tensor, call));
        format = *format_of(m, call), allowed |= format->allowed;
    } else if (allowed & ALLOW_SAME) {
        allowed |= 1u << call->tensors[0].element;
    } else if ((allowed & ALLOW_CODES) && call->products == FMLA_PRODUCTS_FP8) {
        allowed = (allowed & ~(unsigned)ALLOW_FP16) | ALLOW_BYTES;
    }
    if ((allowed & OR_FLAT) && (checked == call->tensors || (allowed & IS_CACHE)))
        TRY(check_flat(m, tensor, call));
    struct form flat;
    int rank = m->rank;
    const enum dimension *dimensions = m->dimensions;
    if (call->flat && (allowed & OR_FLAT))
        flat = form_of(m, true), rank = flat.rank, dimensions = flat.dimensions;
    TRY(check_tensor(descriptor->name, m->name, tensor, rank, allowed, call->shape_only, checked));
    if (!checked->name) return FMLA_OK;
    if (!call->first) call->first = checked;
    TRY(check_same_device(descriptor->name, checked, call->first));
    const bool token = format && format->token;
    for (int i = 0; i < rank - token; i++) TRY(bind(descriptor, checked, i, dimensions[i], call));
    if (token) TRY(bind_token(descriptor, m, format, checked, call));
    if (format && !call->flat) {
        if (allowed & OR_FLAT) /* pages have one key head */
            call->size[DIM_h_kv] = 1, call->bound_by[DIM_h_kv] = checked, call->bound_at[DIM_h_kv] = 2;
        TRY(check_cache_layout(m, format, checked, call));
    }
    if (allowed & IN_ROWS) TRY(check_rows(checked, call));
    return FMLA_OK;
}

fmla_status check_call(enum operation operation, const void *caller, void *args, bool shape_only,
                       struct checked_call *call)
{
    const struct descriptor *descriptor = &descriptors[operation];
    const size_t sizes[] = {descriptor->size, 0};
    clear_struct(call, sizeof *call);
    struct checked_tensor *checked = call->tensors;
    call->operation = descriptor->name, call->args = args, call->shape_only = shape_only;
    TRY(check_struct(descriptor->name, "args", caller, args, descriptor->size, sizes));
    TRY(check_options(descriptor, args, call));
    for (const struct member *m = descriptor->members; m->name; m++) {
        if (m->kind != MEMBER_TENSOR) continue;
        const fmla_tensor *tensor;
        memcpy(&tensor, (const char *)args + m->offset, sizeof(fmla_tensor *));
        if (!(shape_only && (m->allowed & IN_CALLS))) TRY(check_member(descriptor, m, tensor, checked, call));
        checked++;
    }
    return FMLA_OK;
}
