/* SPDX-License-Identifier: MIT
 *
 * Stores one token in a cache, or loads it, in loops that compilers vectorize: the code of the kernels
 * cpu-generic, cpu-avx2 and cpu-avx512. The including file defines CACHE_NAME, the struct cpu_cache to
 * define, and is compiled with the flags of its instruction set.
 *
 * A token is handled in spans of values that share a scale, or of SPAN where there are no scales. Bytes of
 * FP8 formats may lie at any address, so 16-bit values and scales are copied by memcpy.
 */
#include "cpu.h"

#include "../new_token.h"
#include "../num_fast.h"

#include <string.h>

enum { SPAN = 128, MOST = 576 /* maximum values of a token that has scales, or gets norm or RoPE */ };

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- The caller's vectors ------------------------------------------------------------------- */

static void load_elements(const void *data, enum element element, int64_t at, int64_t count,
                          float *restrict values)
{
    const uint16_t *narrow = (const uint16_t *)data + at;
    switch (element) {
    case ELEMENT_BF16:
        for (int64_t i = 0; i < count; i++) values[i] = num_from_bf16(narrow[i]);
        break;
    case ELEMENT_FP16:
        for (int64_t i = 0; i < count; i++) values[i] = num_from_fp16(narrow[i]);
        break;
    case ELEMENT_F32: memcpy(values, (const float *)data + at, (size_t)count * sizeof *values); break;
    }
}

static void store_elements(void *data, enum element element, int64_t at, int64_t count,
                           const float *restrict values)
{
    uint16_t *restrict narrow = (uint16_t *)data + at;
    switch (element) {
    case ELEMENT_BF16:
        for (int64_t i = 0; i < count; i++) narrow[i] = fast_to_bf16(values[i]);
        break;
    case ELEMENT_FP16:
        for (int64_t i = 0; i < count; i++) narrow[i] = fast_to_fp16(values[i]);
        break;
    case ELEMENT_F32: memcpy((float *)data + at, values, (size_t)count * sizeof *values); break;
    }
}

/* A token to store: the caller's vector, or one that was computed from it. */
struct token_source {
    const struct cache_problem *problem;
    int64_t token;
    const float *made; /* NULL: the caller's vector */
};

/* Loads values first … first + count - 1 of a token: those of latent, then those of rope. */
static void load_vector(const struct token_source *source, int64_t first, int64_t count, float *values)
{
    const struct cache_problem *p = source->problem;
    const int64_t token = source->token;
    if (source->made) {
        memcpy(values, source->made + first, (size_t)count * sizeof *values);
        return;
    }
    int64_t of_latent = least(count, p->latent_width - first);
    if (of_latent < 0) of_latent = 0;
    if (of_latent) load_elements(p->latent, p->element, token * p->latent_stride + first, of_latent, values);
    if (of_latent < count)
        load_elements(p->rope, p->element, token * p->rope_stride + first + of_latent - p->latent_width,
                      count - of_latent, values + of_latent);
}

/* ---- Norm and RoPE --------------------------------------------------------------------------- */

static void round_values(enum element element, int64_t count, float *values)
{
    if (element == ELEMENT_BF16)
        for (int64_t i = 0; i < count; i++) values[i] = num_from_bf16(fast_to_bf16(values[i]));
    if (element == ELEMENT_FP16)
        for (int64_t i = 0; i < count; i++) values[i] = num_from_fp16(fast_to_fp16(values[i]));
}

static void norm_values(const struct cache_problem *p, float *values)
{
    const float factor = norm_factor(norm_sum_of_squares(values), p->norm_eps);
    float weight[NORM_WIDTH];
    load_elements(p->norm_weight, p->element, 0, NORM_WIDTH, weight);
    for (int i = 0; i < NORM_WIDTH; i++) values[i] = norm_value(values[i], factor, weight[i]);
    round_values(p->element, NORM_WIDTH, values);
}

/* Applies RoPE; `values` begins with its first value. */
static void turn_values(const struct cache_problem *p, int64_t token, float *values)
{
    const float *cosine = p->rope_table + cache_position(p, token) * p->table_stride,
                *sine = cosine + ROPE_PAIRS;
    const bool halves = p->rope_pairs == FMLA_ROPE_HALVES;
    const int step = halves ? 1 : 2, apart = halves ? ROPE_PAIRS : 1;
    for (int i = 0; i < ROPE_PAIRS; i++) {
        const float a = values[step * i], b = values[step * i + apart];
        values[step * i] = rope_value(a, b, cosine[i], -sine[i]);
        values[step * i + apart] = rope_value(b, a, cosine[i], sine[i]);
    }
    round_values(p->element, ROPE_WIDTH, values);
}

/* ---- Addresses of a token ------------------------------------------------------------------- */

struct token_place {
    uint8_t *values, *scales;
};

static struct token_place place_of(const struct cache_pages *cache, int64_t slot)
{
    uint8_t *page = cache->data + slot / cache->page_size * cache->page_stride;
    const int64_t in_page = slot % cache->page_size;
    uint8_t *values = page + in_page * cache->slot_stride;
    return (struct token_place){values, cache->layout.scale_bytes
                                            ? page + kv_scales_at(&cache->layout, cache->page_size, in_page)
                                            : values + cache->layout.scale_offset};
}

/* ---- Append --------------------------------------------------------------------------------- */

static void store_e4m3(const struct token_source *source, const struct cache_pages *cache,
                       struct token_place at)
{
    const struct kv_layout *l = &cache->layout;
    const int32_t span = l->group ? l->group : 64;
    if (l->scale_bytes) memset(at.scales, 0, (size_t)l->scale_bytes);
    for (int32_t first = 0; first < l->nope; first += span) {
        float values[SPAN];
        uint8_t bytes[SPAN];
        load_vector(source, first, span, values);
        if (l->scale == KV_SCALE_OF_CACHE) {
            for (int32_t i = 0; i < span; i++) bytes[i] = fast_to_e4m3(values[i] / cache->scale);
        } else {
            const uint8_t code = fast_ue8m0_scale(num_amax(values, span));
            const float scale = num_from_ue8m0(code), inverse = fast_ue8m0_inverse(code);
            if (l->scale == KV_SCALE_F32)
                memcpy(at.scales + first / span * 4, &scale, sizeof scale);
            else
                at.scales[first / span] = code;
            for (int32_t i = 0; i < span; i++) bytes[i] = fast_to_e4m3(values[i] * inverse);
        }
        memcpy(at.values + first, bytes, (size_t)span);
    }
}

/* Stores FP4 values. A group with a NaN, whose bits are the largest, gets NaN as its scale and codes 0. */
static void store_e2m1(const struct token_source *source, int32_t nope, struct token_place at)
{
    enum { GROUP = 16 };
    for (int32_t first = 0; first < nope; first += SPAN) {
        float values[SPAN];
        uint8_t codes[SPAN] = {0}, bytes[SPAN / 2]; /* all are written; cppcheck does not see it */
        load_vector(source, first, SPAN, values);
        for (int32_t g = 0; g < SPAN; g += GROUP) {
            int32_t most = 0;
            for (int32_t i = g; i < g + GROUP; i++) {
                const int32_t a = (int32_t)(num_bits(values[i]) & 0x7fffffffu);
                most = a > most ? a : most;
            }
            const uint8_t scale =
                (uint8_t)(most > 0x7f800000 ? 0x7f : num_e4m3_scale(num_float((uint32_t)most)));
            const float by = num_from_e4m3(scale);
            at.scales[(first + g) / GROUP] = scale;
            for (int32_t i = g; i < g + GROUP; i++) codes[i] = fast_to_e2m1(values[i] / by);
        }
        for (int32_t i = 0; i < SPAN / 2; i++) bytes[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
        memcpy(at.values + first / 2, bytes, sizeof bytes);
    }
}

static void store(const struct token_source *source, const struct cache_pages *cache, int64_t slot)
{
    const struct kv_layout *l = &cache->layout;
    const struct token_place at = place_of(cache, slot);
    const int64_t d_qk = source->problem->d_qk;
    float values[SPAN];
    uint16_t rope[64];
    if (kv_is_quantised(l)) {
        if (l->element == KV_ELEMENT_E2M1)
            store_e2m1(source, l->nope, at);
        else
            store_e4m3(source, cache, at);
        if (!l->rope) return;
        load_vector(source, l->nope, l->rope, values);
        store_elements(rope, ELEMENT_BF16, 0, l->rope, values);
        memcpy(at.values + l->rope_offset, rope, sizeof rope);
        return;
    }
    const enum element element = l->element == KV_ELEMENT_BF16 ? ELEMENT_BF16 : ELEMENT_FP16;
    for (int64_t first = 0; first < d_qk; first += SPAN) {
        const int64_t count = least(d_qk - first, SPAN);
        load_vector(source, first, count, values);
        store_elements(at.values, element, first, count, values);
    }
}

static void store_token(const struct cache_problem *p, int64_t token, int64_t slot)
{
    struct token_source source = {p, token, NULL};
    float values[MOST];
    if (cache_append_is_fused(p)) {
        load_vector(&source, 0, p->d_qk, values);
        if (p->norm_weight) norm_values(p, values);
        if (p->rope_pairs) turn_values(p, token, values + p->d_qk - ROPE_WIDTH);
        source.made = values;
    }
    store(&source, &p->cache, slot);
}

/* ---- Gather --------------------------------------------------------------------------------- */

static void load_codes(const struct kv_layout *l, struct token_place at, float cache_scale, int32_t first,
                       int32_t span, float *restrict values)
{
    float scale = cache_scale;
    if (l->scale == KV_SCALE_F32) memcpy(&scale, at.scales + first / span * 4, sizeof scale);
    if (l->scale == KV_SCALE_UE8M0) scale = num_from_ue8m0(at.scales[first / span]);
    if (l->scale == KV_SCALE_E4M3) scale = num_from_e4m3(at.scales[first / span]);
    if (l->element == KV_ELEMENT_E2M1)
        for (int32_t i = 0; i < span; i += 2) {
            const uint8_t two = at.values[(first + i) / 2];
            values[i] = num_from_e2m1((uint8_t)(two & 15)) * scale,
            values[i + 1] = num_from_e2m1((uint8_t)(two >> 4)) * scale;
        }
    else
        for (int32_t i = 0; i < span; i++) values[i] = num_from_e4m3(at.values[first + i]) * scale;
    if (l->element == KV_ELEMENT_E4M3 && !kv_is_exact(l)) round_values(ELEMENT_BF16, span, values);
}

/* Loads a token; slot -1 gives zeros. */
static void load_token(const struct cache_problem *p, int64_t token, int64_t slot)
{
    const struct kv_layout *l = &p->cache.layout;
    const int64_t to = token * p->out_stride;
    float values[SPAN];
    uint16_t rope[64];
    if (slot < 0) {
        const int64_t bytes = p->element == ELEMENT_F32 ? 4 : 2;
        memset((char *)p->out + to * bytes, 0, (size_t)(p->d_qk * bytes));
        return;
    }
    const struct token_place at = place_of(&p->cache, slot);
    if (kv_is_quantised(l)) {
        const int32_t span = l->group ? l->group : 64;
        for (int32_t first = 0; first < l->nope; first += span) {
            load_codes(l, at, p->cache.scale, first, span, values);
            store_elements(p->out, p->element, to + first, span, values);
        }
        if (!l->rope) return;
        memcpy(rope, at.values + l->rope_offset, sizeof rope);
        load_elements(rope, ELEMENT_BF16, 0, l->rope, values);
        store_elements(p->out, p->element, to + l->nope, l->rope, values);
        return;
    }
    const enum element element = l->element == KV_ELEMENT_BF16 ? ELEMENT_BF16 : ELEMENT_FP16;
    for (int64_t first = 0; first < p->d_qk; first += SPAN) {
        const int64_t count = least(p->d_qk - first, SPAN);
        load_elements(at.values, element, first, count, values);
        store_elements(p->out, p->element, to + first, count, values);
    }
}

/* ---- Convert -------------------------------------------------------------------------------- */

/* Loads all values of a token that has scales. A NaN keeps its bits where it is not a code. */
static void load_scaled(const struct cache_pages *cache, struct token_place at, float *values)
{
    const struct kv_layout *l = &cache->layout;
    const int32_t span = l->group ? l->group : 64;
    uint16_t rope[64];
    for (int32_t first = 0; first < l->nope; first += span)
        load_codes(l, at, cache->scale, first, span, values + first);
    for (int32_t i = 0; i < l->nope; i++) values[i] = kv_convert(l, i, values[i]);
    if (!l->rope) return;
    memcpy(rope, at.values + l->rope_offset, sizeof rope);
    load_elements(rope, ELEMENT_BF16, 0, l->rope, values + l->nope);
}

static void convert_token(const struct cache_problem *p, int64_t token, int64_t slot)
{
    const struct cache_pages *from = &p->source;
    const struct token_place at = place_of(from, p->source_slots[token]);
    float values[MOST];
    const struct token_source source = {p, token, values};
    if (kv_is_quantised(&from->layout)) {
        load_scaled(from, at, values);
        store(&source, &p->cache, slot);
    } else if (kv_is_quantised(&p->cache.layout)) {
        load_elements(at.values, p->element, 0, p->d_qk, values);
        store(&source, &p->cache, slot);
    } else { /* d_qk may exceed MOST */
        const struct token_place to = place_of(&p->cache, slot);
        const enum element element = p->cache.format == KV_BF16 ? ELEMENT_BF16 : ELEMENT_FP16;
        for (int64_t first = 0; first < p->d_qk; first += SPAN) {
            const int64_t count = least(p->d_qk - first, SPAN);
            load_elements(at.values, p->element, first, count, values);
            store_elements(to.values, element, first, count, values);
        }
    }
}

const struct cpu_cache CACHE_NAME = {CPU_CACHE_DRIVER, store_token, load_token, convert_token};
