/* SPDX-License-Identifier: MIT
 *
 * Cache append, gather and convert, token by token, with the scalar formats of kvformat.h.
 */
#include "ref.h"

#include "../new_token.h"

#include <string.h>

/* A slot as kvformat.h addresses it. Where the slots of a page may not be contiguous, each is a page of one
 * slot. */
struct place {
    uint8_t *page;
    int64_t page_size, slot;
};

static struct place place_of(const struct cache_pages *cache, int64_t slot)
{
    uint8_t *page = cache->data + slot / cache->page_size * cache->page_stride;
    const int64_t in_page = slot % cache->page_size;
    if (cache->layout.scale_bytes) return (struct place){page, cache->page_size, in_page};
    return (struct place){page + in_page * cache->slot_stride, 1, 0};
}

/* ---- Append --------------------------------------------------------------------------------- */

static float value_of(const struct cache_problem *p, int64_t token, int64_t i)
{
    return i < p->latent_width ? ref_load(p->latent, p->element, token * p->latent_stride + i)
                               : ref_load(p->rope, p->element, token * p->rope_stride + i - p->latent_width);
}

static float round_to(enum element element, float x)
{
    float rounded = 0.0f;
    ref_store(&rounded, element, 0, x);
    return ref_load(&rounded, element, 0);
}

/* Step 1: RMS norm of the first NORM_WIDTH values. */
static void norm(const struct cache_problem *p, float *values)
{
    const float factor = norm_factor(norm_sum_of_squares(values), p->norm_eps);
    for (int i = 0; i < NORM_WIDTH; i++)
        values[i] =
            round_to(p->element, norm_value(values[i], factor, ref_load(p->norm_weight, p->element, i)));
}

/* Step 2: RoPE of the last ROPE_WIDTH values. */
static void rope(const struct cache_problem *p, int64_t token, float *values)
{
    const float *row = p->rope_table + cache_position(p, token) * p->table_stride;
    const bool halves = p->rope_pairs == FMLA_ROPE_HALVES;
    for (int i = 0; i < ROPE_PAIRS; i++) {
        float *a = values + (halves ? i : 2 * i), *b = halves ? a + ROPE_PAIRS : a + 1;
        const float first = *a, second = *b, cosine = row[i], sine = row[ROPE_PAIRS + i];
        *a = round_to(p->element, rope_value(first, second, cosine, -sine));
        *b = round_to(p->element, rope_value(second, first, cosine, sine));
    }
}

static fmla_status append(const struct cache_problem *p)
{
    const struct cache_pages *cache = &p->cache;
    for (int64_t t = 0; t < p->tokens; t++) {
        if (p->slots[t] == -1) continue;
        if (!cache_has(cache, p->slots[t]))
            return fail(FMLA_INVALID_ARGUMENT,
                        "cache_append: slot_mapping: entry %lld is %lld, must be -1 or in [0, %lld)",
                        (long long)t, (long long)p->slots[t], (long long)cache->slots);
        if (p->rope_pairs && (cache_position(p, t) < 0 || cache_position(p, t) >= p->table_rows))
            return fail(FMLA_INVALID_ARGUMENT,
                        "cache_append: positions: entry %lld is %lld, must be in [0, %lld), the rows "
                        "of rope_table",
                        (long long)t, (long long)cache_position(p, t), (long long)p->table_rows);
    }
    for (int64_t t = 0; t < p->tokens; t++) {
        if (p->slots[t] == -1) continue;
        const struct place at = place_of(cache, p->slots[t]);
        float values[576] = {0};
        const bool at_once = kv_is_quantised(&cache->layout) || cache_append_is_fused(p);
        for (int64_t i = 0; at_once && i < p->d_qk; i++) values[i] = value_of(p, t, i);
        if (p->norm_weight) norm(p, values);
        if (p->rope_pairs) rope(p, t, values + p->d_qk - ROPE_WIDTH);
        if (at_once) {
            kv_store_token(&cache->layout, at.page, at.page_size, at.slot, values, cache->scale);
        } else { /* any number of values: stores each by itself */
            const struct kv_layout one = kv_layout_of(cache->format, 1);
            for (int64_t i = 0; i < p->d_qk; i++) {
                values[0] = value_of(p, t, i);
                kv_store_token(&one, at.page, 1, i, values, cache->scale);
            }
        }
    }
    return FMLA_OK;
}

/* ---- Gather --------------------------------------------------------------------------------- */

static fmla_status gather(const struct cache_problem *p)
{
    const struct cache_pages *cache = &p->cache;
    for (int64_t t = 0; t < p->tokens; t++) {
        const bool some = cache_has(cache, p->slots[t]);
        const struct place at = place_of(cache, some ? p->slots[t] : 0);
        for (int64_t i = 0; i < p->d_qk; i++)
            ref_store(p->out, p->element, t * p->out_stride + i,
                      some ? kv_load(&cache->layout, at.page, at.page_size, at.slot, (int32_t)i, cache->scale)
                           : 0.0f);
    }
    return FMLA_OK;
}

/* ---- Convert -------------------------------------------------------------------------------- */

static fmla_status check_slots(const char *name, const int64_t *slots, const int64_t *others, int64_t tokens,
                               const struct cache_pages *cache)
{
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] != -1 && others[t] != -1 && !cache_has(cache, slots[t]))
            return fail(FMLA_INVALID_ARGUMENT,
                        "cache_convert: %s: entry %lld is %lld, must be -1 or in [0, %lld)", name,
                        (long long)t, (long long)slots[t], (long long)cache->slots);
    return FMLA_OK;
}

static fmla_status convert(const struct cache_problem *p)
{
    const struct cache_pages *source = &p->source, *cache = &p->cache;
    fmla_status status = check_slots("src_slots", p->source_slots, p->slots, p->tokens, source);
    if (!status) status = check_slots("dst_slots", p->slots, p->source_slots, p->tokens, cache);
    const bool at_once = kv_is_quantised(&cache->layout);
    const struct kv_layout one = kv_layout_of(cache->format, 1);
    for (int64_t t = 0; !status && t < p->tokens; t++) {
        if (p->slots[t] == -1 || p->source_slots[t] == -1) continue;
        const struct place from = place_of(source, p->source_slots[t]), to = place_of(cache, p->slots[t]);
        float values[576] = {0};
        for (int64_t i = 0; i < p->d_qk; i++) {
            float *value = &values[at_once ? i : 0];
            *value =
                kv_load(&source->layout, from.page, from.page_size, from.slot, (int32_t)i, source->scale);
            *value = kv_convert(&source->layout, (int32_t)i, *value);
            if (!at_once) kv_store_token(&one, to.page, 1, i, value, cache->scale);
        }
        if (at_once) kv_store_token(&cache->layout, to.page, to.page_size, to.slot, values, cache->scale);
    }
    return status;
}

static fmla_status run(const struct kernel_driver *driver, union problem problem,
                       const struct prepared *prepared)
{
    (void)driver, (void)prepared;
    const enum operation operation = problem.cache->operation;
    return operation == OP_CACHE_APPEND   ? append(problem.cache)
           : operation == OP_CACHE_GATHER ? gather(problem.cache)
                                          : convert(problem.cache);
}

const struct kernel_driver ref_cache_driver = {.run = run};
