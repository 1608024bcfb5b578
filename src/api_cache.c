/* SPDX-License-Identifier: MIT
 *
 * The public functions of the cache: new vectors into pages, and vectors out of them.
 */
#include "api.h"

#include <math.h>

static fmla_status fill(const struct checked_call *c, enum operation operation,
                        const struct checked_tensor *cache, float cache_scale, struct cache_problem *p)
{
    p->operation = operation;
    p->format = c->format->format;
    if (p->format == KV_FP8_576 && !(cache_scale >= 0.0f && isfinite(cache_scale)))
        return fail(FMLA_INVALID_ARGUMENT, "%s: cache_scale: is %g, must be finite and > 0 (0 = 1)",
                    c->operation, (double)cache_scale);
    if (p->format != KV_FP8_576 && cache_scale != 0.0f)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: cache_scale: is %g, must be 0: this kv_format has no scale of the cache",
                    c->operation, (double)cache_scale);
    p->cache_scale = cache_scale == 0.0f ? 1.0f : cache_scale;
    p->tokens = c->size[DIM_tokens], p->d_qk = c->size[DIM_d_qk];
    p->layout = kv_layout_of(p->format, (int32_t)p->d_qk);
    p->page_size = cache->shape[1], p->slots_of_cache = cache->shape[0] * cache->shape[1];
    cache_steps(c->format, cache, &p->page_stride, &p->slot_stride);
    p->cache = cache->data, p->device = cache->device;
    return FMLA_OK;
}

static fmla_status run(const char *kernel_name, const struct cache_problem *p)
{
    const struct wanted wanted = {
        .operation = p->operation, .device = p->device, .argument = "kv_cache", .elements = 1u << p->element};
    const struct kernel *kernel;
    TRY(dispatch(&wanted, kernel_name, &kernel));
    return kernel->driver->run(kernel, (union problem){.cache = p}, NULL);
}

fmla_status fmla_cache_append(const fmla_cache_append_args *caller)
{
    fmla_cache_append_args args;
    struct checked_call c;
    struct cache_problem p = {0};
    TRY(check_call(OP_CACHE_APPEND, caller, &args, false, &c));
    const struct checked_tensor *latent = &c.tensors[TENSOR_cache_append_latent],
                                *rope = &c.tensors[TENSOR_cache_append_rope];
    TRY(fill(&c, OP_CACHE_APPEND, &c.tensors[TENSOR_cache_append_kv_cache], args.cache_scale, &p));
    const int64_t rope_width = c.size[DIM_rope]; /* 0 without */
    if (rope->name && p.d_qk <= rope_width)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: rope: is given, must be NULL: a token of kv_cache has %lld values and no more",
                    c.operation, (long long)p.d_qk);
    p.latent_width = p.d_qk - rope_width;
    TRY(check_size(c.operation, latent, 1, rope->name ? "d_qk - 64" : "d_qk", p.latent_width, "kv_cache"));
    p.element = latent->element;
    p.latent = latent->data, p.latent_stride = latent->stride[0];
    p.rope = rope->name ? rope->data : NULL, p.rope_stride = rope->stride[0];
    p.slots = c.tensors[TENSOR_cache_append_slot_mapping].data;
    p.stream = args.stream;
    return run(args.kernel, &p);
}

fmla_status fmla_cache_gather(const fmla_cache_gather_args *caller)
{
    fmla_cache_gather_args args;
    struct checked_call c;
    struct cache_problem p = {0};
    TRY(check_call(OP_CACHE_GATHER, caller, &args, false, &c));
    const struct checked_tensor *out = &c.tensors[TENSOR_cache_gather_out];
    TRY(fill(&c, OP_CACHE_GATHER, &c.tensors[TENSOR_cache_gather_kv_cache], args.cache_scale, &p));
    p.element = out->element;
    p.slots = c.tensors[TENSOR_cache_gather_slots].data;
    p.out = out->data, p.out_stride = out->stride[0];
    p.stream = args.stream;
    return run(args.kernel, &p);
}
