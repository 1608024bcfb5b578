/* SPDX-License-Identifier: MIT */
#include "../cache_params.h"
#include "../cuda.h"
#include "../kernels.h"

#include "../../num_fast.h"

/* May everything be read and written 16 bytes at a time? Units of a vector are whole in one of its two tensors, and as
 * 16-bit values in the cache, 8 bytes at least. */
static bool aligned(const struct cache_problem *p)
{
    const int64_t bytes = p->element == ELEMENT_F32 ? 4 : 2, values = 16 / bytes;
    const int64_t pages = p->slots_of_cache / p->page_size;
    return p->d_qk % values == 0 && p->latent_width % values == 0 &&
           cuda_rows_aligned(p->latent, &p->tokens, &p->latent_stride, 1, bytes, 16) &&
           cuda_rows_aligned(p->rope, &p->tokens, &p->rope_stride, 1, bytes, 16) &&
           cuda_rows_aligned(p->out, &p->tokens, &p->out_stride, 1, bytes, 16) &&
           cuda_rows_aligned(p->cache, (const int64_t[]){pages, p->page_size},
                             (const int64_t[]){p->page_stride, p->slot_stride}, 2, 1, 16);
}

static fmla_status run(const struct kernel *kernel, union problem problem, const struct prepared *prepared)
{
    const struct cache_problem *p = problem.cache;
    const bool append = p->operation == OP_CACHE_APPEND;
    const char *operation = operation_name(p->operation);
    (void)kernel, (void)prepared;
    if (!p->tokens) return FMLA_OK; /* nothing to write */
    const float prescale = append ? fast_prescale(p->cache_scale) : 1.0f;
    const bool few_slots = p->slots_of_cache <= INT32_MAX;
    struct cache_params params = {
        .slots = p->slots,
        .latent = p->latent,
        .rope = p->rope,
        .out = p->out,
        .cache = p->cache,
        .tokens = p->tokens,
        .page_size = p->page_size,
        .slots_of_cache = p->slots_of_cache,
        .latent_stride = p->latent_stride,
        .rope_stride = p->rope_stride,
        .out_stride = p->out_stride,
        .page_stride = p->page_stride,
        .slot_stride = p->slot_stride,
        .d_qk = (int32_t)p->d_qk,
        .latent_width = (int32_t)p->latent_width,
        .page_divisor = divisor_of((uint32_t)p->page_size),
        .few_slots = few_slots,
        .aligned = aligned(p),
        .cache_scale = p->cache_scale * prescale,
        .prescale = prescale,
        .inverse = 1.0f / (p->cache_scale * prescale),
    };
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of(
            (struct cuda_key){append ? CUDA_CACHE_APPEND : CUDA_CACHE_GATHER, p->element, p->format, 0}),
        .blocks = (p->tokens - 1) / CACHE_WARPS + 1, /* any number of them walks through all tokens */
        .stream = p->stream,
    };
    return cuda_launch_alone(operation, "kv_cache", p->device.id, &launch, (void *[]){&params});
}

const struct kernel_driver cuda_cache_driver = {.run = run};
