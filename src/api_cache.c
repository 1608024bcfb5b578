/* SPDX-License-Identifier: MIT
 *
 * The public functions of caches: append, gather, convert, and the RoPE table.
 */
#include "api.h"

#include "new_token.h"

#include <math.h>

/* Fills `pages` from a cache and its options. `name` is the option that has the scale. */
static fmla_status fill_pages(const struct checked_call *c, const struct cache_format *format,
                              const struct checked_tensor *cache, const char *name, float scale,
                              struct cache_pages *pages)
{
    pages->format = format->format;
    if (pages->format == KV_FP8_576 && !(scale >= 0.0f && isfinite(scale)))
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is %g, must be finite and > 0 (0 = 1)", c->operation,
                    name, (double)scale);
    if (pages->format != KV_FP8_576 && scale != 0.0f)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is %g, must be 0: %s has no cache scale", c->operation,
                    name, (double)scale, format->name);
    pages->scale = scale == 0.0f ? 1.0f : scale;
    pages->layout = kv_layout_of(pages->format, (int32_t)c->size[DIM_d_qk]);
    pages->page_size = cache->shape[1], pages->slots = cache->shape[0] * cache->shape[1];
    cache_steps(format, cache, &pages->page_stride, &pages->slot_stride);
    pages->data = cache->data;
    return FMLA_OK;
}

static fmla_status fill(const struct checked_call *c, enum operation operation,
                        const struct checked_tensor *cache, float cache_scale, struct cache_problem *p)
{
    p->operation = operation;
    p->tokens = c->size[DIM_tokens], p->d_qk = c->size[DIM_d_qk], p->device = cache->device;
    return fill_pages(c, c->format, cache, "cache_scale", cache_scale, &p->cache);
}

static fmla_status run(const char *kernel_name, const struct cache_problem *p)
{
    const struct wanted wanted = {.operation = p->operation,
                                  .device = p->device,
                                  .argument = p->operation == OP_CACHE_CONVERT ? "dst_cache" : "kv_cache",
                                  .elements = 1u << p->element};
    const struct kernel *kernel;
    TRY(dispatch(&wanted, kernel_name, &kernel));
    return kernel->driver->run(kernel->driver, (union problem){.cache = p}, NULL);
}

/* ---- Append --------------------------------------------------------------------------------- */

/* Fills the RMS norm. */
static fmla_status fill_norm(const struct checked_call *c, const fmla_cache_append_args *args,
                             struct cache_problem *p)
{
    const struct checked_tensor *weight = &c->tensors[TENSOR_cache_append_norm_weight];
    if (!weight->name && args->norm_eps != 0.0f)
        return fail(FMLA_INVALID_ARGUMENT, "%s: norm_eps: is %g, must be 0 without norm_weight", c->operation,
                    (double)args->norm_eps);
    if (!(args->norm_eps >= 0.0f && isfinite(args->norm_eps)))
        return fail(FMLA_INVALID_ARGUMENT, "%s: norm_eps: is %g, must be finite and ≥ 0", c->operation,
                    (double)args->norm_eps);
    p->norm_weight = weight->data, p->norm_eps = args->norm_eps;
    return FMLA_OK;
}

static fmla_status fill_rope(const struct checked_call *c, const fmla_cache_append_args *args,
                             struct cache_problem *p)
{
    const struct checked_tensor *positions = &c->tensors[TENSOR_cache_append_positions],
                                *table = &c->tensors[TENSOR_cache_append_rope_table];
    if (!positions->name != !table->name)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is NULL, must be given with %s", c->operation,
                    positions->name ? "rope_table" : "positions",
                    positions->name ? "positions" : "rope_table");
    if (table->name && !args->rope_pairs)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: rope_pairs: is 0, must be 1 (interleaved) or 2 (halves) with rope_table",
                    c->operation);
    if (!table->name && args->rope_pairs)
        return fail(FMLA_INVALID_ARGUMENT, "%s: rope_pairs: is %d, must be 0 without rope_table",
                    c->operation, args->rope_pairs);
    p->rope_pairs = args->rope_pairs;
    p->positions = positions->data, p->position_bytes = positions->element_bytes;
    p->rope_table = table->data, p->table_rows = table->shape[0], p->table_stride = table->stride[0];
    return FMLA_OK;
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
    const int64_t rope_width = c.size[DIM_rope]; /* 0 without rope */
    if (rope->name && p.d_qk <= rope_width)
        return fail(
            FMLA_INVALID_ARGUMENT,
            "%s: rope: is given, must be NULL: kv_cache has d_qk %lld, must have more than 64 with rope",
            c.operation, (long long)p.d_qk);
    p.latent_width = p.d_qk - rope_width;
    TRY(check_size(c.operation, latent, 1, rope->name ? "d_qk - 64" : "d_qk", p.latent_width, "kv_cache"));
    p.element = latent->element;
    p.latent = latent->data, p.latent_stride = latent->stride[0];
    p.rope = rope->name ? rope->data : NULL, p.rope_stride = rope->stride[0];
    p.slots = c.tensors[TENSOR_cache_append_slot_mapping].data;
    TRY(fill_norm(&c, &args, &p));
    TRY(fill_rope(&c, &args, &p));
    if (cache_append_is_fused(&p) && p.d_qk != 512 && p.d_qk != 576)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: %s: is given, must be NULL: a token of kv_cache has %lld values, not 512 or 576",
                    c.operation, p.norm_weight ? "norm_weight" : "rope_table", (long long)p.d_qk);
    p.stream = args.stream;
    return run(args.kernel, &p);
}

fmla_status fmla_rope_table(float *table, int64_t positions, double base)
{
    static const char op[] = "rope_table";
    if (positions < 0)
        return fail(FMLA_INVALID_ARGUMENT, "%s: positions: is %lld, must be ≥ 0", op, (long long)positions);
    if (!(base > 0.0 && isfinite(base)))
        return fail(FMLA_INVALID_ARGUMENT, "%s: base: is %g, must be finite and > 0", op, base);
    if (!table && positions)
        return fail(FMLA_INVALID_ARGUMENT, "%s: table: is NULL, must have room for %lld rows", op,
                    (long long)positions);
    for (int i = 0; i < ROPE_PAIRS; i++) {
        const double frequency = pow(base, -(double)i / ROPE_PAIRS);
        for (int64_t t = 0; t < positions; t++) {
            table[t * ROPE_WIDTH + i] = (float)cos((double)t * frequency);
            table[t * ROPE_WIDTH + ROPE_PAIRS + i] = (float)sin((double)t * frequency);
        }
    }
    return FMLA_OK;
}

/* ---- Gather --------------------------------------------------------------------------------- */

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

/* ---- Convert -------------------------------------------------------------------------------- */

fmla_status fmla_cache_convert(const fmla_cache_convert_args *caller)
{
    fmla_cache_convert_args args;
    struct checked_call c;
    struct cache_problem p = {.operation = OP_CACHE_CONVERT};
    TRY(check_call(OP_CACHE_CONVERT, caller, &args, false, &c));
    const struct checked_tensor *source = &c.tensors[TENSOR_cache_convert_src_cache],
                                *cache = &c.tensors[TENSOR_cache_convert_dst_cache];
    TRY(fill_pages(&c, c.format, source, "src_scale", args.src_scale, &p.source));
    TRY(fill_pages(&c, c.second, cache, "dst_scale", args.dst_scale, &p.cache));
    p.tokens = c.size[DIM_tokens], p.d_qk = c.size[DIM_d_qk], p.device = cache->device;
    p.element = p.source.format == KV_FP16      ? ELEMENT_FP16
                : kv_is_exact(&p.source.layout) ? ELEMENT_F32
                                                : ELEMENT_BF16;
    p.source_slots = c.tensors[TENSOR_cache_convert_src_slots].data;
    p.slots = c.tensors[TENSOR_cache_convert_dst_slots].data;
    p.stream = args.stream;
    return run(args.kernel, &p);
}
