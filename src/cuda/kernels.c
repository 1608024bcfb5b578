/* SPDX-License-Identifier: MIT */
#include "kernels.h"

#include "cache_params.h"
#include "cuda.h"
#include "images.h"
#include "sm80/latent/shape.h"
#include "sm80/mha_backward/shape.h"
#include "sm80/mha_forward/shape.h"

#include <pthread.h>

enum { BY_DEVICE = -1 };

static struct {
    struct cuda_key key;
    struct cuda_kernel kernel;
} rows[] = {
#define KERNEL(schedule, element, format, variant, cc, of_block, shared, file, function)                     \
    {{schedule, element, format, variant},                                                                   \
     {.image = (file),                                                                                       \
      .name = (function),                                                                                    \
      .capability = (cc),                                                                                    \
      .threads = (of_block),                                                                                 \
      .dynamic_bytes = (shared)}},
#include "kernels.def"
#undef KERNEL
};
enum { KERNELS = sizeof rows / sizeof rows[0] };

/* The row number + 1 of each key. This index, and which kernels were built, are computed once: a launch does
 * not search rows and images. */
enum { VARIANTS = 12 };
static uint16_t row_of[CUDA_SCHEDULES][ELEMENT_F32 + 1][KV_FORMATS][VARIANTS];
static pthread_once_t indexed = PTHREAD_ONCE_INIT;
_Static_assert(KERNELS < UINT16_MAX && LATENT_SHAPE_COUNT <= (int)VARIANTS, "there is room for all rows");
#define KERNEL(schedule, element, format, variant, ...)                                                      \
    _Static_assert((int)(variant) >= 0 && (int)(variant) < VARIANTS, "a variant has a place");
#include "kernels.def"
#undef KERNEL

static uint16_t *place_of(struct cuda_key key)
{
    return &row_of[key.schedule][key.element][key.format][key.variant];
}

static void index_rows(void)
{
    for (int i = 0; i < KERNELS; i++) {
        *place_of(rows[i].key) = (uint16_t)(i + 1);
        rows[i].kernel.built = cuda_build_has(&cuda_build, rows[i].kernel.image);
    }
}

struct cuda_kernel *cuda_kernel_of(struct cuda_key key)
{
    pthread_once(&indexed, index_rows);
    const int row = *place_of(key);
    return row ? &rows[row - 1].kernel : NULL;
}

struct cuda_kernel *cuda_kernel_at(int index)
{
    return index >= 0 && index < KERNELS ? &rows[index].kernel : NULL;
}

bool cuda_can_have(const struct cuda_device *device, const struct cuda_kernel *kernel)
{
    pthread_once(&indexed, index_rows);
    return kernel->capability != 90 || (device->capability == 90 && kernel->built);
}

/* Returns the dynamic shared memory of the kernel's launches; < 0 if the device has less, in which case
 * nothing launches it. */
static int32_t dynamic_bytes_of(int index, const struct cuda_device *device)
{
    const int32_t bytes = rows[index].kernel.dynamic_bytes;
    if (bytes != BY_DEVICE) return bytes <= device->shared_bytes ? bytes : -1;
    const struct latent_shape *shape = &latent_shapes[rows[index].key.variant];
    const enum kv_format format = rows[index].key.format;
    const bool of_bytes = format != KV_BF16 && format != KV_FP16;
    const enum latent_source source = rows[index].key.schedule == CUDA_SM80_SPARSE_DECODE
                                          ? (of_bytes ? LATENT_LIST_OF_BYTES : LATENT_LIST)
                                          : (of_bytes ? LATENT_TABLE_OF_BYTES : LATENT_TABLE);
    const int32_t stages = latent_stages(shape, source, latent_bytes(device->shared_bytes, device->code));
    return stages ? latent_shared_bytes(shape, source, stages) : -1;
}

fmla_status cuda_prepare(int32_t id)
{
    static const char op[] = "prepare";
    struct cuda_scope scope;
    fmla_status status = cuda_enter(op, "device", id, &scope);
    if (status) return status;
    for (int i = 0; i < KERNELS && !status; i++) {
        struct cuda_kernel *kernel = &rows[i].kernel;
        const int32_t bytes = dynamic_bytes_of(i, scope.device);
        if (!cuda_can_have(scope.device, kernel) || bytes < 0) continue;
        status = cuda_load(op, &scope, kernel, bytes);
    }
    cuda_leave(&scope);
    return status;
}
