/* SPDX-License-Identifier: MIT
 *
 * The public functions of the cache: new vectors into pages, and vectors out of them.
 */
#include "check.h"
#include "dispatch.h"

#include <math.h>
#include <string.h>

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        const fmla_status try_status = (call);                                                               \
        if (try_status) return try_status;                                                                   \
    } while (0)

_Static_assert(FMLA_KV_BF16 == KV_BF16 + 1 && FMLA_KV_FP16 == KV_FP16 + 1 &&
                   FMLA_KV_FP8_656 == KV_FP8_656 + 1 && FMLA_KV_FP8_584 == KV_FP8_584 + 1 &&
                   FMLA_KV_FP8_576 == KV_FP8_576 + 1,
               "the public formats are those of kvformat.h, behind FMLA_KV_NONE");

enum { ROPE = 64, FLOATS = ALLOW_BF16 | ALLOW_FP16 | ALLOW_F32 };

static fmla_status check_format(const char *op, int32_t kv_format, float cache_scale, struct cache_problem *p)
{
    if (kv_format == FMLA_KV_NONE)
        return fail(FMLA_INVALID_ARGUMENT, "%s: kv_format: is not given, must be one of FMLA_KV_…", op);
    TRY(check_range(op, "kv_format", kv_format, FMLA_KV_BF16, FMLA_KV_FP8_576));
    p->format = (enum kv_format)(kv_format - 1);
    if (p->format == KV_FP8_576 && !(cache_scale >= 0.0f && isfinite(cache_scale)))
        return fail(FMLA_INVALID_ARGUMENT, "%s: cache_scale: is %g, must be finite and > 0 (0 = 1)", op,
                    (double)cache_scale);
    if (p->format != KV_FP8_576 && cache_scale != 0.0f)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: cache_scale: is %g, must be 0: this kv_format has no scale of the cache", op,
                    (double)cache_scale);
    p->cache_scale = cache_scale == 0.0f ? 1.0f : cache_scale;
    return FMLA_OK;
}

/* The cache, of p->format. `extra`: CHECK_… */
static fmla_status check_cache(const char *op, const fmla_tensor *tensor, unsigned extra,
                               struct cache_problem *p, struct checked_tensor *cache)
{
    const bool bytes = p->format != KV_BF16 && p->format != KV_FP16;
    const unsigned type = bytes ? ALLOW_BYTES : p->format == KV_BF16 ? ALLOW_BF16 : ALLOW_FP16;
    TRY(check_tensor(op, "kv_cache", tensor, 4, type | extra, cache));
    TRY(check_range(op, "kv_cache: pages (dimension 0)", cache->shape[0], 0, INT32_MAX));
    TRY(check_range(op, "kv_cache: page_size (dimension 1)", cache->shape[1], 1, INT32_MAX));
    TRY(check_range(op, "kv_cache: h_kv (dimension 2)", cache->shape[2], 1, 1));
    if (!bytes) TRY(check_range(op, "kv_cache: d_qk (dimension 3)", cache->shape[3], 1, INT32_MAX / 4));
    p->layout = kv_layout_of(p->format, (int32_t)cache->shape[3]);
    const int64_t slot_bytes = p->layout.page_bytes_a_slot, element_bytes = bytes ? 1 : 2;
    if (bytes && cache->shape[3] != slot_bytes)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: kv_cache: bytes of a token (dimension 3) are %lld, must be the %lld of kv_format",
                    op, (long long)cache->shape[3], (long long)slot_bytes);
    p->d_qk = kv_width(&p->layout);
    p->page_size = cache->shape[1];
    p->slots_of_cache = cache->shape[0] * cache->shape[1];
    /* A single page or slot may have any stride, also one that cannot be multiplied. */
    p->page_stride = cache->shape[0] > 1 ? cache->stride[0] * element_bytes : 0;
    p->slot_stride = cache->shape[1] > 1 ? cache->stride[1] * element_bytes : 0;
    if (p->layout.scale_bytes) { /* tokens, then scales: slots are no rows of the tensor */
        if (p->page_size > 1 && p->slots_of_cache && p->slot_stride != slot_bytes)
            return fail(FMLA_INVALID_ARGUMENT,
                        "%s: kv_cache: stride of dimension 1 is %lld, must be %lld: a page of this kv_format "
                        "is one piece",
                        op, (long long)p->slot_stride, (long long)slot_bytes);
        p->slot_stride = p->layout.token_bytes;
    }
    p->cache = (uint8_t *)(void *)cache->data;
    p->device = cache->device;
    return FMLA_OK;
}

static fmla_status run(enum operation operation, const char *kernel_name, struct cache_problem *p)
{
    const struct wanted wanted = {
        .operation = operation, .device = p->device, .argument = "kv_cache", .elements = 1u << p->element};
    const struct kernel *kernel;
    TRY(dispatch(&wanted, kernel_name, &kernel));
    p->operation = operation;
    return kernel->driver->run(kernel, (union problem){.cache = p}, NULL);
}

fmla_status fmla_cache_append(const fmla_cache_append_args *caller)
{
    static const size_t sizes[] = {sizeof(fmla_cache_append_args), 0};
    static const char op[] = "cache_append";
    fmla_cache_append_args args;
    struct cache_problem p = {0};
    struct checked_tensor latent, rope, cache, slots;
    TRY(check_struct(op, "args", caller, &args, sizeof args, sizes));
    TRY(check_format(op, args.kv_format, args.cache_scale, &p));
    TRY(check_tensor(op, "latent", args.latent, 2, FLOATS, &latent));
    TRY(check_tensor(op, "rope", args.rope, 2, (1u << latent.element) | ALLOW_NULL, &rope));
    TRY(check_cache(op, args.kv_cache, CHECK_OUTPUT, &p, &cache));
    TRY(check_tensor(op, "slot_mapping", args.slot_mapping, 1, ALLOW_I64, &slots));
    const struct checked_tensor *others[] = {&latent, &rope, &slots};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        TRY(check_same_device(op, others[i], &cache));

    p.tokens = latent.shape[0];
    p.latent_width = p.d_qk;
    if (rope.name) {
        TRY(check_size(op, &rope, 0, "tokens", p.tokens, "latent"));
        TRY(check_size(op, &rope, 1, "values of RoPE", ROPE, "every format"));
        if (p.d_qk <= ROPE)
            return fail(FMLA_INVALID_ARGUMENT,
                        "%s: rope: is given, must be NULL: a token of kv_cache has %lld values and no more",
                        op, (long long)p.d_qk);
        p.latent_width = p.d_qk - ROPE;
    }
    TRY(check_size(op, &latent, 1, rope.name ? "d_qk - 64" : "d_qk", p.latent_width, "kv_cache"));
    TRY(check_size(op, &slots, 0, "tokens", p.tokens, "latent"));
    p.element = latent.element;
    p.latent = latent.data, p.latent_stride = latent.stride[0];
    p.rope = rope.name ? rope.data : NULL, p.rope_stride = rope.stride[0];
    p.slots = (const int64_t *)(const void *)slots.data;
    p.stream = args.stream;
    return run(OP_CACHE_APPEND, args.kernel, &p);
}

fmla_status fmla_cache_gather(const fmla_cache_gather_args *caller)
{
    static const size_t sizes[] = {sizeof(fmla_cache_gather_args), 0};
    static const char op[] = "cache_gather";
    fmla_cache_gather_args args;
    struct cache_problem p = {0};
    struct checked_tensor cache, slots, out;
    TRY(check_struct(op, "args", caller, &args, sizeof args, sizes));
    TRY(check_format(op, args.kv_format, args.cache_scale, &p));
    TRY(check_cache(op, args.kv_cache, 0, &p, &cache));
    TRY(check_tensor(op, "slots", args.slots, 1, ALLOW_I64, &slots));
    TRY(check_tensor(op, "out", args.out, 2, FLOATS | CHECK_OUTPUT, &out));
    TRY(check_same_device(op, &slots, &cache));
    TRY(check_same_device(op, &out, &cache));
    p.tokens = slots.shape[0];
    TRY(check_size(op, &out, 0, "tokens", p.tokens, "slots"));
    TRY(check_size(op, &out, 1, "d_qk", p.d_qk, "kv_cache"));
    p.element = out.element;
    p.slots = (const int64_t *)(const void *)slots.data;
    p.out = out.data, p.out_stride = out.stride[0];
    p.stream = args.stream;
    return run(OP_CACHE_GATHER, args.kernel, &p);
}
