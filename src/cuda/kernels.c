/* SPDX-License-Identifier: MIT */
#include "kernels.h"

#include "cache_params.h"
#include "cuda.h"
#include "images.h"
#include "sm80/dense_decode/shape.h"
#include "sm90/dense_decode/choice.h"
#include "sm90/sparse_decode/choice.h"
#include "sm90/sparse_prefill/choice.h"

enum { BY_DEVICE = -1 };

#define KERNEL(schedule, element, format, variant, cc, of_block, shared, file, function)                     \
    {.image = file, .name = function, .capability = cc, .threads = of_block, .dynamic_bytes = shared},
static struct cuda_kernel kernels[] = {
#include "kernels.def"
};
#undef KERNEL
enum { KERNELS = sizeof kernels / sizeof kernels[0] };

/* Apart from the table, whose rows are long. */
#define KEY(schedule, element, format, variant)                                                              \
    ((uint32_t)(schedule) << 24 | (uint32_t)(element) << 16 | (uint32_t)(format) << 8 | (uint32_t)(variant))
#define KERNEL(schedule, element, format, variant, cc, of_block, shared, file, function)                     \
    KEY(schedule, element, format, variant),
static const uint32_t keys[KERNELS] = {
#include "kernels.def"
};
#undef KERNEL

struct cuda_kernel *cuda_kernel_of(struct cuda_key key)
{
    const uint32_t wanted = KEY(key.schedule, key.element, key.format, key.variant);
    for (int i = 0; i < KERNELS; i++)
        if (keys[i] == wanted) return &kernels[i];
    return NULL;
}

struct cuda_kernel *cuda_kernel_at(int index)
{
    return index >= 0 && index < KERNELS ? &kernels[index] : NULL;
}

static bool can_have(const struct cuda_device *device, const struct cuda_kernel *kernel)
{
    return kernel->capability != 90 ||
           (device->capability == 90 && cuda_build_has(&cuda_build, kernel->image));
}

bool cuda_has_hoppers(const struct cuda_device *device, enum cuda_schedule schedule)
{
    for (int i = 0; i < KERNELS; i++)
        if (keys[i] >> 24 == (uint32_t)schedule) return can_have(device, &kernels[i]);
    return false;
}

/* What launches give the kernel: of sm80's shapes, of which not all fit every GPU, 0 where it does not. */
static int32_t dynamic_bytes_of(int index, const struct cuda_device *device)
{
    if (kernels[index].dynamic_bytes != BY_DEVICE) return kernels[index].dynamic_bytes;
    const struct dense_decode_shape *shape = &dense_decode_shapes[keys[index] & 255];
    const int32_t stages = dense_decode_stages(shape, device->shared_bytes);
    return stages ? dense_decode_shared_bytes(shape, stages) : 0;
}

fmla_status cuda_prepare(int32_t id)
{
    static const char op[] = "prepare";
    struct cuda_scope scope;
    fmla_status status = cuda_enter(op, "device", id, &scope);
    if (status) return status;
    for (int i = 0; i < KERNELS && !status; i++) {
        const int32_t bytes = dynamic_bytes_of(i, scope.device);
        if (!can_have(scope.device, &kernels[i]) || (!bytes && kernels[i].dynamic_bytes)) continue;
        status = cuda_load(op, &scope, &kernels[i], bytes);
    }
    cuda_leave(&scope);
    return status;
}
