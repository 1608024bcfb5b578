/* SPDX-License-Identifier: MIT */
#include "../cache_params.h"
#include "../cuda.h"
#include "../kernels.h"

#include "../../num_fast.h"

static bool pages_aligned(const struct cache_pages *cache)
{
    return cuda_rows_aligned(cache->data,
                             (const int64_t[]){cache->slots / cache->page_size, cache->page_size},
                             (const int64_t[]){cache->page_stride, cache->slot_stride}, 2, 1, 16);
}

/* Returns whether all accesses may be 16 bytes wide. A unit of a vector must be whole in one of its two
 * tensors; as 16-bit values in the cache it has at least 8 bytes. */
static bool aligned(const struct cache_problem *p)
{
    const int64_t bytes = p->element == ELEMENT_F32 ? 4 : 2, values = 16 / bytes;
    return p->d_qk % values == 0 && p->latent_width % values == 0 &&
           cuda_rows_aligned(p->latent, &p->tokens, &p->latent_stride, 1, bytes, 16) &&
           cuda_rows_aligned(p->rope, &p->tokens, &p->rope_stride, 1, bytes, 16) &&
           cuda_rows_aligned(p->out, &p->tokens, &p->out_stride, 1, bytes, 16) && pages_aligned(&p->cache) &&
           (p->operation != OP_CACHE_CONVERT || pages_aligned(&p->source)) &&
           cuda_rows_aligned(p->norm_weight, NULL, NULL, 0, bytes, 16) &&
           cuda_rows_aligned(p->rope_table, &p->table_rows, &p->table_stride, 1, 4, 16);
}

/* Returns whether all counts and strides fit 31 bits, which the fast path of the fused append requires. */
static bool small(const struct cache_problem *p)
{
    const int64_t all[] = {p->tokens,      p->cache.slots,       p->latent_stride,
                           p->rope_stride, p->cache.page_stride, p->cache.slot_stride,
                           p->table_rows,  p->table_stride};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] < 0 || all[i] > INT32_MAX) return false;
    return true;
}

static void source_of(const struct cache_problem *p, struct cache_params *params)
{
    const struct cache_pages *source = &p->source;
    params->source_slots = p->source_slots, params->source = source->data;
    params->source_page_size = source->page_size, params->source_slots_of_cache = source->slots;
    params->source_page_stride = source->page_stride, params->source_slot_stride = source->slot_stride;
    params->source_layout = source->layout, params->source_scale = source->scale;
    params->source_page_divisor = divisor_of((uint32_t)source->page_size);
    params->few_source_slots = source->slots <= INT32_MAX;
    while (source->layout.group >> params->source_group_shift > 1) params->source_group_shift++;
}

static fmla_status run(const struct kernel_driver *driver, union problem problem,
                       const struct prepared *prepared)
{
    const struct cache_problem *p = problem.cache;
    const bool append = p->operation == OP_CACHE_APPEND, convert = p->operation == OP_CACHE_CONVERT;
    const char *operation = operation_name(p->operation);
    (void)driver, (void)prepared;
    if (!p->tokens) return FMLA_OK; /* nothing to write */
    const float prescale = append || convert ? fast_prescale(p->cache.scale) : 1.0f;
    const bool few_slots = p->cache.slots <= INT32_MAX;
    struct cache_params params = {
        .slots = p->slots,
        .latent = p->latent,
        .rope = p->rope,
        .out = p->out,
        .cache = p->cache.data,
        .tokens = p->tokens,
        .page_size = p->cache.page_size,
        .slots_of_cache = p->cache.slots,
        .latent_stride = p->latent_stride,
        .rope_stride = p->rope_stride,
        .out_stride = p->out_stride,
        .page_stride = p->cache.page_stride,
        .slot_stride = p->cache.slot_stride,
        .d_qk = (int32_t)p->d_qk,
        .latent_width = (int32_t)p->latent_width,
        .page_divisor = divisor_of((uint32_t)p->cache.page_size),
        .few_slots = few_slots,
        .aligned = aligned(p) && (!cache_append_is_fused(p) || small(p)),
        .format = (int32_t)p->cache.format,
        .cache_scale = p->cache.scale * prescale,
        .prescale = prescale,
        .inverse = 1.0f / (p->cache.scale * prescale),
        .norm_weight = p->norm_weight,
        .positions = p->positions,
        .rope_table = p->rope_table,
        .table_rows = p->table_rows,
        .table_stride = p->table_stride,
        .norm_eps = p->norm_eps,
        .rotates = p->rope_pairs != FMLA_ROPE_NONE,
        .halves = p->rope_pairs == FMLA_ROPE_HALVES,
        .wide_positions = p->position_bytes == 8,
    };
    const bool fused = cache_append_is_fused(p);
    struct cuda_scope scope;
    fmla_status status = cuda_enter(operation, "kv_cache", p->device.id, &scope);
    if (status) return status;
    const int64_t at_once = (int64_t)scope.device->sms * FUSED_BLOCKS;
    params.many = fused && params.aligned && p->element != ELEMENT_F32 && p->tokens > at_once * CACHE_WARPS;
    const int64_t of_block = params.many ? CACHE_WARPS * (32 / MANY_LANES) : CACHE_WARPS;
    const int64_t blocks = (p->tokens - 1) / of_block + 1; /* any number of CTAs covers all tokens */
    if (convert) source_of(p, &params);
    const bool any = fused && !params.aligned;
    const struct cuda_key key = {.schedule = append    ? CUDA_CACHE_APPEND
                                             : convert ? CUDA_CACHE_CONVERT
                                                       : CUDA_CACHE_GATHER,
                                 .element = p->element,
                                 .format = any ? KV_BF16 : p->cache.format,
                                 .variant = any     ? CUDA_APPEND_FUSED_ANY
                                            : fused ? CUDA_APPEND_FUSED
                                                    : CUDA_APPEND};
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of(key),
        .blocks = fused && blocks > at_once ? at_once : blocks,
        .stream = p->stream,
    };
    status = cuda_launch(operation, &scope, &launch, (void *[]){&params});
    cuda_leave(&scope);
    return status;
}

const struct kernel_driver cuda_cache_driver = {.run = run};
