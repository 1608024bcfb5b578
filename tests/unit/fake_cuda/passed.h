/* SPDX-License-Identifier: MIT
 *
 * What kernels are passed of a call's tensors: addresses, strides, sizes and alignment, compared with the call.
 */
#ifndef FMLA_FAKE_PASSED_H
#define FMLA_FAKE_PASSED_H

#include "launches.h"

#include <math.h>
#include <strings.h>

/* A call, and the label of its failures. */
struct passed {
    enum operation operation;
    void *args;
    struct held *held;
    const char *label;
};

#define PASSED(condition) CHECK(condition, "%s: %s", passed->label, fmla_last_error())

/* Returns a tensor of the call; NULL: it has none of that name. */
static inline const struct held *passed_tensor(const struct passed *passed, const char *name)
{
    const int which = described_index(passed->operation, name);
    return which >= 0 && *(fmla_tensor **)option_at(passed->operation, passed->args, name)
               ? &passed->held[which]
               : NULL;
}

/* Returns the address of an element of a tensor, NULL if there is no tensor. */
static inline const char *passed_at(const struct passed *passed, const char *name, int64_t element)
{
    const struct held *const t = passed_tensor(passed, name);
    return t && t->tensor.data
               ? (const char *)t->tensor.data + t->tensor.byte_offset + element * t->tensor.dtype.bits / 8
               : NULL;
}

/* Checks a tensor's address and first strides, as far as these are used. element: where the launch begins. */
static inline void check_passed(const struct passed *passed, const char *name, const void *at,
                                int64_t element, const int64_t *strides, int count)
{
    const struct held *const t = passed_tensor(passed, name);
    CHECK((const char *)at == passed_at(passed, name, element), "%s: %s is at %p, not %p", passed->label,
          name, at, (const void *)passed_at(passed, name, element));
    for (int i = 0; t && t->tensor.data && i < count; i++)
        CHECK(t->shape[i] < 2 || strides[i] == t->strides[i],
              "%s: stride %d of %s is %" PRId64 ", not %" PRId64, passed->label, i, name, strides[i],
              t->strides[i]);
}

/* Returns true if rows of a tensor begin at multiples of so many bytes. */
static inline bool passed_aligned(const struct passed *passed, const char *name, int64_t bytes)
{
    const struct held *const t = passed_tensor(passed, name);
    bool aligned = (uintptr_t)passed_at(passed, name, 0) % (uintptr_t)bytes == 0;
    for (int i = 0; t->tensor.data && i < t->tensor.ndim - 1; i++)
        aligned &= t->shape[i] < 2 || t->strides[i] * t->tensor.dtype.bits / 8 % bytes == 0;
    return aligned;
}

/* Checks the results of decode, of MHA and of sparse prefill that decodes: out's strides are those of request,
 * token and head, and lse's of request and head. */
static inline void check_passed_rules(const struct passed *passed, const struct result_params *rules,
                                      int64_t head)
{
    check_passed(passed, "attn_sink", rules->attn_sink, head, NULL, 0);
    const int32_t base = *(int32_t *)option_at(passed->operation, passed->args, "log_base"),
                  empty = *(int32_t *)option_at(passed->operation, passed->args, "lse_empty");
    PASSED(rules->lse_of_empty == (empty == FMLA_LSE_EMPTY_POSITIVE_INFINITY ? INFINITY : -INFINITY));
    PASSED(fabsf(rules->lse_factor - (base == FMLA_LOG_BASE_2 ? 1.442695041f : 1.0f)) < 1e-7f);
}

static inline void check_passed_output(const struct passed *passed, const struct output_params *output)
{
    check_passed(passed, "out", output->out, 0, output->out_stride, 3);
    check_passed(passed, "lse", output->lse, 0, output->lse_stride, 2);
    check_passed_rules(passed, &output->rules, 0);
    PASSED(output->pairs_aligned == passed_aligned(passed, "out", 4));
}

static inline void check_passed_scale(const struct passed *passed, float scale, float scale_log2,
                                      int64_t d_qk)
{
    const float given = *(float *)option_at(passed->operation, passed->args, "softmax_scale"),
                expected = given != 0.0f ? given : 1.0f / sqrtf((float)d_qk);
    PASSED(fabsf(scale - expected) < 1e-6f * expected &&
           fabsf(scale_log2 - expected * 1.442695041f) < 1e-6f * expected);
}

/* Checks a cache or flat keys, and the lists that name them. `element`, `entry`: where the launch's begin. */
static inline void check_passed_cache(const struct passed *passed, const struct sparse_cache_params *cache,
                                      const char *name, const char *list, int64_t element, int64_t entry,
                                      enum kv_format format)
{
    const struct held *const t = passed_tensor(passed, name);
    const bool flat = t->tensor.ndim == 3;
    const int64_t bytes = t->tensor.dtype.bits / 8, pages = t->shape[0], page_size = flat ? 1 : t->shape[1];
    const struct kv_layout l = kv_layout_of(format, (int32_t)t->shape[t->tensor.ndim - 1]);
    check_passed(passed, name, cache->data, element, NULL, 0);
    check_passed(passed, list, cache->indices, entry, cache->indices_stride, 1);
    PASSED(cache->slots ==
           (uint64_t)(pages * page_size > INT64_C(1) << 31 ? INT64_C(1) << 31 : pages * page_size));
    PASSED(cache->page_size == page_size && divides(cache->page_divisor, page_size));
    PASSED(pages < 2 || cache->page_bytes == t->strides[0] * bytes);
    PASSED(page_size < 2 || cache->slot_bytes == (l.scale_bytes ? l.token_bytes : t->strides[1] * bytes));
    PASSED(cache->format == (int32_t)format);
    if (bytes > 1 || page_size < 2) return;
    PASSED(cache->scale_base == (l.scale_bytes ? page_size * l.token_bytes : l.scale_offset));
    PASSED(cache->scale_step == (l.scale_bytes ? l.scale_bytes : cache->slot_bytes));
}

/* ---- By operation ----------------------------------------------------------------------------- */

/* Returns the format of a cache, which may be that of the queries. */
static inline enum kv_format passed_format(const struct passed *passed, const char *option,
                                           const struct held *q)
{
    const int32_t format = *(int32_t *)option_at(passed->operation, passed->args, option);
    if (format) return cache_formats[format].format;
    return q->tensor.dtype.code == FMLA_TYPE_BFLOAT ? KV_BF16 : KV_FP16;
}

/* Checks what a kernel of sparse decode is passed: a token is one of its requests. */
static inline void check_passed_of_decode(const struct passed *passed, const struct sparse_prefill_call *c,
                                          const struct sparse_decode_params *p, const float *max_logits,
                                          int64_t max_stride, int64_t first, int64_t key_head)
{
    const int64_t head = key_head * p->h_q, *q = c->q.strides, *out = c->out.strides;
    const bool flat = c->kv.tensor.ndim == 3;
    check_passed(passed, "q", p->q, first * q[0] + head * q[1], (int64_t[]){p->q_stride[0], p->q_stride[2]},
                 2);
    check_passed(passed, "out", p->output.out, first * out[0] + head * out[1],
                 (int64_t[]){p->output.out_stride[0], p->output.out_stride[2]}, 2);
    check_passed(passed, "lse", p->output.lse, first * c->lse.strides[0] + head, p->output.lse_stride, 2);
    check_passed(passed, "max_logits", max_logits, first * c->max_logits.strides[0] + head, &max_stride, 1);
    check_passed(passed, "topk_length", p->topk.length, first, NULL, 0);
    check_passed_cache(passed, &p->cache[0], "kv", "indices", flat ? key_head * c->kv.strides[1] : 0,
                       first * c->indices.strides[0] + key_head * c->indices.strides[1],
                       passed_format(passed, "kv_format", &c->q));
    check_passed_rules(passed, &p->output.rules, head),
        check_passed_scale(passed, p->scale, p->scale_log2, p->d_qk);
    PASSED(p->d_qk == c->q.shape[2] && p->topk.topk == c->indices.shape[2] && !p->topk.extra_topk);
}

/* Checks what a launch of sparse prefill is passed: of the tokens from `first` on and one key head. */
static inline void check_passed_of_prefill(const struct passed *passed, const struct sparse_prefill_call *c,
                                           const struct sparse_prefill_params *p, int64_t first,
                                           int64_t key_head)
{
    const int64_t head = key_head * p->h_q;
    const bool flat = c->kv.tensor.ndim == 3;
    check_passed(passed, "q", p->q, first * c->q.strides[0] + head * c->q.strides[1], p->q_stride, 2);
    check_passed(passed, "out", p->out, first * c->out.strides[0] + head * c->out.strides[1], p->out_stride,
                 2);
    check_passed(passed, "topk_length", p->topk_length, first, NULL, 0);
    check_passed(passed, "max_logits", p->max_logits, first * c->max_logits.strides[0] + head, &p->max_stride,
                 1);
    check_passed(passed, "lse", p->lse, first * c->lse.strides[0] + head, &p->lse_stride, 1);
    check_passed_cache(passed, &p->kv, "kv", "indices", flat ? key_head * c->kv.strides[1] : 0,
                       first * c->indices.strides[0] + key_head * c->indices.strides[1],
                       passed_format(passed, "kv_format", &c->q));
    check_passed_rules(passed, &p->rules, head), check_passed_scale(passed, p->scale, p->scale_log2, p->d_qk);
    PASSED(p->d_qk == c->q.shape[2] && p->topk == c->indices.shape[2]);
    PASSED(p->pairs_aligned == ((uintptr_t)p->out % 4 == 0 && (p->s_q < 2 || p->out_stride[0] % 2 == 0) &&
                                (p->h_q < 2 || p->out_stride[1] % 2 == 0)));
}

/* Checks what every kernel is passed first. */
static inline void check_passed_of_mha(const struct passed *passed, const struct mha_forward_call *c,
                                       const struct mha_forward_params *p, int64_t b, int64_t h_q,
                                       int64_t h_kv)
{
    const int flat = c->q.tensor.ndim == 3;
    check_passed(passed, "q", p->q, 0, p->q_stride + flat, 3 - flat);
    check_passed(passed, "k", p->k, 0, p->k_stride + flat, 3 - flat);
    check_passed(passed, "v", p->v, 0, p->v_stride + flat, 3 - flat);
    check_passed(passed, "cu_seqlens_q", p->starts_q, 0, NULL, 0);
    check_passed(passed, "cu_seqlens_k", p->starts_k, 0, NULL, 0);
    check_passed(passed, "seqused_q", p->used_q, 0, NULL, 0);
    check_passed(passed, "seqused_k", p->used_k, 0, NULL, 0);
    check_passed(passed, "out", p->output.out, 0, p->output.out_stride + flat, 3 - flat);
    check_passed(passed, "lse", p->output.lse, 0, p->output.lse_stride + flat, 2 - flat);
    check_passed_rules(passed, &p->output.rules, 0),
        check_passed_scale(passed, p->scale, p->scale_log2, p->d_qk);
    PASSED(p->b == b && p->h_q == h_q && p->h_kv == h_kv && p->group == h_q / h_kv);
    PASSED(p->d_qk == c->q.shape[3 - flat] && p->d_v == c->v.shape[3 - flat] && p->causal == c->args.causal);
    PASSED(flat ? p->tokens_q == c->q.shape[0] && p->tokens_k == c->k.shape[0]
                : p->s_q == c->q.shape[1] && p->s_k == c->k.shape[1]);
    PASSED(!flat || (!p->q_stride[0] && !p->output.out_stride[0] && !p->output.lse_stride[0]));
}

/* Checks the TMA map of vectors of 64 elements: their heads then tokens, or tokens then heads, then the rest of
 * a row, whose last 64 elements overlap where the row is no multiple of them, then requests. Strides of single elements are not used. */
static inline void check_passed_map(const struct passed *passed, const struct tensor_map *map,
                                    const char *name, bool heads_first)
{
    const struct fake_tensor *const t = passed_of(map);
    const struct held *const h = passed_tensor(passed, name);
    const int flat = h->tensor.ndim == 3, token = 1 - flat, head = 2 - flat;
    const int dimension[] = {heads_first ? head : token, heads_first ? token : head};
    const int64_t d = h->shape[3 - flat], rest = d % 64;
    const int64_t sizes[] = {64, h->shape[dimension[0]], h->shape[dimension[1]], d / 64 + (rest > 0),
                             flat ? 1 : h->shape[0]},
                  strides[] = {h->strides[dimension[0]], h->strides[dimension[1]], rest ? rest : 64,
                               h->strides[0]};
    if (!h->tensor.data) return; /* no keys */
    PASSED((const char *)t->base == passed_at(passed, name, 0));
    for (int i = 0; i < 5; i++) PASSED((int64_t)t->sizes[i] == sizes[i]);
    for (int i = 0; i < 4; i++) PASSED(sizes[i + 1] < 2 || (int64_t)t->strides[i] == 2 * strides[i]);
}

/* Checks the name of the kernel of a cache operation: each format and type has its own. */
static inline void check_passed_kernel(const struct passed *passed, int32_t format, fmla_dtype type)
{
    char kernel[64];
    snprintf(kernel, sizeof kernel, "%s_%s_%s", descriptors[passed->operation].name,
             cache_formats[format].name + strlen("FMLA_KV_"),
             type.bits == 32                 ? "fp32"
             : type.code == FMLA_TYPE_BFLOAT ? "bf16"
                                             : "fp16");
    CHECK(!strcasecmp(launched(0)->kernel, kernel), "%s: %s", passed->label, launched(0)->kernel);
}

/* Checks what append and gather are passed. */
static inline void check_passed_of_tokens(const struct passed *passed)
{
    const struct cache_params p = PARAMS(cache_params, launched(0));
    const struct held *const cache = passed_tensor(passed, "kv_cache");
    const bool appends = passed->operation == OP_CACHE_APPEND;
    const int64_t bytes = cache->tensor.dtype.bits / 8, slots = cache->shape[0] * cache->shape[1];
    const struct kv_layout l = kv_layout_of((enum kv_format)p.format, (int32_t)cache->shape[3]);
    if (appends) check_passed(passed, "latent", p.latent, 0, &p.latent_stride, 1);
    if (!appends) check_passed(passed, "out", p.out, 0, &p.out_stride, 1);
    check_passed(passed, appends ? "slot_mapping" : "slots", p.slots, 0, NULL, 0);
    check_passed_kernel(passed, p.format + 1,
                        passed_tensor(passed, appends ? "latent" : "out")->tensor.dtype);
    PASSED(p.d_qk == cache->shape[3] || cache->tensor.dtype.bits == 8);
    check_passed(passed, "kv_cache", p.cache, 0, NULL, 0);
    PASSED(p.format == *(int32_t *)option_at(passed->operation, passed->args, "kv_format") - 1 &&
           p.page_size == cache->shape[1]);
    PASSED(p.slots_of_cache == slots && p.few_slots == (slots <= INT32_MAX));
    PASSED(!p.few_slots || divides(p.page_divisor, p.page_size));
    PASSED(cache->shape[0] < 2 || p.page_stride == cache->strides[0] * bytes);
    PASSED(!slots || p.page_size < 2 ||
           p.slot_stride == (l.scale_bytes ? l.token_bytes : cache->strides[1] * bytes));
    PASSED(launched(0)->config.block_x == 32 * CACHE_WARPS);
}

#endif
