/* SPDX-License-Identifier: MIT
 *
 * Cache append and gather, token after token, by kvformat.h alone.
 */
#include "ref.h"

#include <string.h>

static bool is_slot(const struct cache_problem *p, int64_t slot)
{
    return slot >= 0 && slot < p->slots_of_cache;
}

/* A slot as kvformat.h counts it: pages whose slots do not follow each other are pages of one slot to it. */
struct place {
    uint8_t *page;
    int64_t page_size, slot;
};

static struct place place_of(const struct cache_problem *p, int64_t slot)
{
    uint8_t *page = p->cache + slot / p->page_size * p->page_stride;
    const int64_t in_page = slot % p->page_size;
    if (p->layout.scale_bytes) return (struct place){page, p->page_size, in_page};
    return (struct place){page + in_page * p->slot_stride, 1, 0};
}

static float value_of(const struct cache_problem *p, int64_t token, int64_t i)
{
    return i < p->latent_width ? ref_load(p->latent, p->element, token * p->latent_stride + i)
                               : ref_load(p->rope, p->element, token * p->rope_stride + i - p->latent_width);
}

static fmla_status append(const struct cache_problem *p)
{
    for (int64_t t = 0; t < p->tokens; t++)
        if (p->slots[t] != -1 && !is_slot(p, p->slots[t]))
            return fail(FMLA_INVALID_ARGUMENT,
                        "cache_append: slot_mapping: entry %lld is %lld, must be -1 or in [0, %lld)",
                        (long long)t, (long long)p->slots[t], (long long)p->slots_of_cache);
    for (int64_t t = 0; t < p->tokens; t++) {
        if (p->slots[t] == -1) continue;
        const struct place at = place_of(p, p->slots[t]);
        float values[576] = {0};
        if (kv_is_quantised(&p->layout)) {
            for (int64_t i = 0; i < p->d_qk; i++) values[i] = value_of(p, t, i);
            kv_store_token(&p->layout, at.page, at.page_size, at.slot, values, p->cache_scale);
        } else { /* any number of values, each by itself */
            const struct kv_layout one = kv_layout_of(p->format, 1);
            for (int64_t i = 0; i < p->d_qk; i++) {
                values[0] = value_of(p, t, i);
                kv_store_token(&one, at.page, 1, i, values, p->cache_scale);
            }
        }
    }
    return FMLA_OK;
}

static fmla_status gather(const struct cache_problem *p)
{
    for (int64_t t = 0; t < p->tokens; t++) {
        const bool some = is_slot(p, p->slots[t]);
        const struct place at = place_of(p, some ? p->slots[t] : 0);
        for (int64_t i = 0; i < p->d_qk; i++)
            ref_store(p->out, p->element, t * p->out_stride + i,
                      some ? kv_load(&p->layout, at.page, at.page_size, at.slot, (int32_t)i, p->cache_scale)
                           : 0.0f);
    }
    return FMLA_OK;
}

static fmla_status run(const struct kernel *kernel, union problem problem, const struct prepared *prepared)
{
    (void)kernel, (void)prepared;
    return problem.cache->operation == OP_CACHE_APPEND ? append(problem.cache) : gather(problem.cache);
}

const struct kernel_driver ref_cache_driver = {.run = run};
