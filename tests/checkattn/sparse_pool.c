/* SPDX-License-Identifier: MIT */
#include "sparse_pool.h"

#include "num.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Drawn values ---------------------------------------------------------------------------- */

/* Drawn once and copied from random offsets. */
enum { DRAWN = 1 << 16, TOKENS = 256, OF_BYTES = KV_FORMATS - KV_FP8_656 /* formats */, CODES = 4 };
static uint16_t drawn_keys[2][DRAWN]; /* [bf16, fp16] */
static struct token {
    uint8_t bytes[656], scales[32]; /* if scales are stored after all tokens */
} drawn_tokens[OF_BYTES][CODES][TOKENS];

/* Codes are written with this scale of the cache or, for extreme ones, with 1. Other scales from half of
 * it on give values of similar size. */
static const float scale_of_codes = 0x1p-8f;

float sparse_pool_scale(struct random_state *random, int64_t codes)
{
    if (codes == S_CODES_EXTREME) return 1.0f;
    if (codes == S_CODES_SCALES) return scale_of_codes * (float)(0.5 + 0.5 * random_unit(random));
    return random_between(random, 0, 1) ? scale_of_codes : scale_of_codes / 2.0f;
}

static uint8_t *scales_of(const struct kv_layout *layout, struct token *token)
{
    return layout->scale_bytes ? token->scales : token->bytes + layout->scale_offset;
}

static size_t bytes_of_scale(const struct kv_layout *layout)
{
    return layout->scale == KV_SCALE_F32 ? sizeof(float) : 1;
}

/* Stores a scale that the format can represent. */
static void put_scale(const struct kv_layout *layout, uint8_t *scales, int group, float scale)
{
    if (layout->scale == KV_SCALE_F32) memcpy(scales + 4 * group, &scale, sizeof scale);
    if (layout->scale == KV_SCALE_UE8M0) scales[group] = (uint8_t)(127 + ilogbf(scale));
    if (layout->scale == KV_SCALE_E4M3) scales[group] = num_to_e4m3(scale);
}

static void put_code(uint8_t *token, int i, uint8_t code)
{
    const int shift = 4 * (i % 2);
    token[i / 2] = (uint8_t)((token[i / 2] & (0xf0 >> shift)) | code << shift);
}

/* Like draw_scales, for FP4: extreme scales are the subnormal ones, zero, and those with which 6 becomes
 * at most 1; codes are random. */
static void draw_fp4(struct random_state *random, bool extreme, const struct kv_layout *layout,
                     struct token *token)
{
    enum { LARGEST = 0x22 /* 0.15625 */ };
    uint8_t *scales = scales_of(layout, token);
    for (int g = 0; g < layout->scales; g++) {
        const float amax = (float)(0.05 + 0.3 * random_unit(random));
        scales[g] = num_to_e4m3((float)(0.5 + random_unit(random)) * amax / 6.0f);
        if (extreme)
            scales[g] = (uint8_t)random_between(random, 0, random_between(random, 0, 1) ? 8 : LARGEST);
        const float scale = num_from_e4m3(scales[g]);
        for (int i = g * layout->group; i < (g + 1) * layout->group; i++) {
            const float x = random_input(random, 0.0f, amax / 3.0f);
            put_code(token->bytes, i,
                     extreme ? (uint8_t)random_between(random, 0, 15) : num_to_e2m1(x / scale));
        }
    }
}

/* Draws a token whose groups have scales of any kind. Values stay within ±1. */
static void draw_scales(struct random_state *random, bool extreme, const struct kv_layout *layout,
                        struct token *token)
{
    const int span = layout->group ? layout->group : layout->nope;
    if (layout->element == KV_ELEMENT_E2M1) {
        draw_fp4(random, extreme, layout, token);
        return;
    }
    for (int g = 0; g * span < layout->nope; g++) {
        const float amax = (float)(0.05 + 0.3 * random_unit(random));
        float scale = amax / 448.0f;
        if (layout->scale == KV_SCALE_UE8M0 || extreme)
            scale = ldexpf(1.0f, (int)random_between(random, extreme ? -14 : -12, extreme ? -2 : -9));
        if (layout->scale == KV_SCALE_OF_CACHE) scale = sparse_pool_scale(random, S_CODES_EXTREME);
        put_scale(layout, scales_of(layout, token), g, scale);
        for (int i = g * span; i < (g + 1) * span; i++) {
            uint8_t code = num_to_e4m3(random_input(random, 0.0f, amax / 3.0f) / scale);
            if (extreme) {
                const bool small = scale * 448.0f > 1.0f; /* then only small codes are within ±1 */
                const int64_t kind = random_between(random, 0, 2);
                code = (uint8_t)(kind == 0   ? random_between(random, 0, 1) * 0x80
                                 : kind == 1 ? random_between(random, 1, 7) /* subnormal */
                                 : small     ? random_between(random, 8, 0x38)
                                             : 0x7e);
                if (random_between(random, 0, 1)) code ^= 0x80;
            }
            token->bytes[i] = code;
        }
    }
}

/* Indices of random tokens with values beyond fp16 (1e5 in bf16), so few that most blocks of 64 keys
 * have none. If queries and scales exceed fp16, all keys and codes are 0, so a kernel that takes them
 * for infinite gives NaN. */
enum { BEYOND_LARGE = 17, BEYOND_SMALL = 33, BEYOND_ROPE = 101 };

static void draw_beyond(int t, const struct kv_layout *layout, struct token *token)
{
    const bool large = t == BEYOND_LARGE, fp4 = layout->element == KV_ELEMENT_E2M1;
    const int group = fp4 ? layout->group / 2 : layout->group; /* bytes */
    const float least = layout->rope ? 0x1p-40f : fp4 ? 0.0f : 0x1p-127f;
    token->bytes[0] = 0;
    if (large) memset(token->bytes + group, 0, (size_t)group);
    if (large || t == BEYOND_SMALL) /* in the second group */
        put_scale(layout, scales_of(layout, token), 1, !large ? least : fp4 ? 448.0f : 0x1p127f);
    if (t == BEYOND_ROPE && layout->rope)
        memcpy(token->bytes + layout->rope_offset, &(uint16_t){SPARSE_LARGE_BF16}, sizeof(uint16_t));
}

void sparse_pool_draw(struct random_state *random, float mean)
{
    float values[SPARSE_WIDEST] = {0};
    draw_numbers(random, mean, 0.1f, DRAWN, drawn_keys[0], drawn_keys[1]);
    for (int f = 0; f < OF_BYTES; f++)
        for (int codes = 0; codes < CODES; codes++)
            for (int t = 0; t < TOKENS; t++) {
                const struct kv_layout layout = kv_layout_of((enum kv_format)(KV_FP8_656 + f), 0);
                struct token *token = &drawn_tokens[f][codes][t];
                uint8_t page[656];
                for (int d = 0; d < SPARSE_WIDEST; d++) values[d] = random_input(random, mean, 0.1f);
                /* A page of one token, followed by its scales. */
                kv_store_token(&layout, page, 1, 0, values, scale_of_codes);
                memcpy(token->bytes, page, (size_t)layout.token_bytes);
                memcpy(token->scales, page + layout.token_bytes, (size_t)layout.scale_bytes);
                if (layout.scales < layout.scale_bytes)
                    token->scales[layout.scales] = 0xff; /* the pad byte is random */
                if (layout.scale == KV_SCALE_OF_CACHE && codes != S_CODES_EXTREME) continue;
                if (codes == S_CODES_BEYOND)
                    draw_beyond(t, &layout, token);
                else if (codes != S_CODES_WRITTEN)
                    draw_scales(random, codes == S_CODES_EXTREME, &layout, token);
            }
}

/* ---- Memory ---------------------------------------------------------------------------------- */

int64_t sparse_pool_slots(const struct sparse_pool *pool)
{
    return pool->pages * pool->page_size;
}

bool sparse_pool_is_key(const struct sparse_pool *pool, int32_t index)
{
    return index >= 0 && index < sparse_pool_slots(pool);
}

uint8_t *sparse_pool_token(const struct sparse_pool *pool, int64_t slot)
{
    const int64_t at = slot % pool->page_size;
    uint8_t *page = (uint8_t *)pool->memory->tensor.data + pool->memory->tensor.byte_offset +
                    slot / pool->page_size * pool->page_bytes;
    return page +
           (pool->layout.scale_bytes ? (int64_t)kv_token_at(&pool->layout, at) : at * pool->slot_bytes);
}

uint8_t *sparse_pool_scales(const struct sparse_pool *pool, int64_t slot)
{
    const int64_t at = slot % pool->page_size;
    uint8_t *token = sparse_pool_token(pool, slot);
    if (!pool->layout.scale_bytes) return token + pool->layout.scale_offset;
    return token - kv_token_at(&pool->layout, at) + kv_scales_at(&pool->layout, pool->page_size, at);
}

void sparse_pool_values(const struct sparse_pool *pool, const uint8_t *token, int64_t slot, float *values)
{
    const int64_t at = slot % pool->page_size;
    const bool in_page = pool->layout.scale_bytes != 0; /* otherwise a token is like a page of one slot */
    const uint8_t *page = in_page ? token - kv_token_at(&pool->layout, at) : token;
    for (int64_t d = 0; d < pool->d_qk; d++)
        values[d] = kv_load(&pool->layout, page, in_page ? pool->page_size : 1, in_page ? at : 0, (int32_t)d,
                            pool->scale);
}

/* Bytes are in units of the required alignment, except that unaligned tokens may begin at any byte. */
void sparse_pool_make(struct sparse_pool *pool, struct random_state *random, enum layout layout)
{
    static const fmla_dtype bytes[] = {
        {FMLA_TYPE_UINT, 8, 1}, {FMLA_TYPE_INT, 8, 1}, {10 /* DLPack's e4m3fn */, 8, 1}};
    struct guarded *g = pool->memory;
    const bool codes = kv_is_quantised(&pool->layout),
               together = pool->layout.scale_bytes != 0; /* tokens of a page are contiguous */
    const int64_t of_token = codes ? pool->layout.page_bytes_a_slot : pool->d_qk, /* bytes, or values */
        aligned = cache_formats[pool->format + 1].unit, size = codes ? 1 : 2;
    const fmla_dtype type = pool->format == KV_FP16                         ? dtype_fp16
                            : aligned == 4                                  ? dtype_i32
                            : codes && aligned == 1 && layout == LAYOUT_ODD ? bytes[0]
                                                                            : dtype_bf16;
    const int64_t width = type.bits / 8, last = of_token * size / width;
    const int64_t shape[] = {pool->pages, together ? pool->page_size * last : pool->page_size,
                             codes ? last : 1, last};
    guarded_make(g, type, together ? 2 : codes ? 3 : 4, shape, layout);
    pool->page_bytes = width * g->strides[0];
    pool->slot_bytes = together ? of_token : width * g->strides[1];
    *pool->view = g->tensor;
    if (codes) pool->view->dtype = bytes[random_between(random, 0, 2)];
    pool->view->ndim = 4, pool->view->shape = pool->shape, pool->view->strides = pool->strides;
    pool->shape[0] = pool->pages, pool->shape[1] = pool->page_size, pool->shape[2] = 1;
    pool->shape[3] = pool->strides[2] = of_token;
    pool->strides[0] = pool->page_bytes / size, pool->strides[1] = pool->slot_bytes / size;
    pool->strides[3] = 1;
}

uint8_t *sparse_pool_end(const struct sparse_pool *pool, uint8_t *token)
{
    const struct kv_layout *l = &pool->layout;
    return token + (l->rope ? l->rope_offset + 2 * l->rope : l->token_bytes);
}

void sparse_pool_put(const struct sparse_pool *pool, struct random_state *random, int64_t codes, int64_t slot,
                     int64_t key_head, bool spike)
{
    uint8_t *to = sparse_pool_token(pool, slot) + key_head * pool->head_bytes;
    const int of_bytes = (int)pool->format - (int)KV_FP8_656;
    const bool fp16 = pool->format == KV_FP16;
    if (!kv_is_quantised(&pool->layout)) {
        memcpy(to, drawn_keys[fp16] + random_between(random, 0, DRAWN - pool->d_qk),
               (size_t)pool->layout.token_bytes);
        if (spike) case_spike(sparse_pool_end(pool, to), fp16);
        return;
    }
    _Static_assert((int)S_CODES_NAN == (int)CODES, "the others are drawn");
    const struct token *token = &drawn_tokens[of_bytes][codes == S_CODES_NAN ? S_CODES_WRITTEN : codes]
                                             [random_between(random, 0, TOKENS - 1)];
    memcpy(to, token->bytes, (size_t)pool->layout.token_bytes);
    if (pool->layout.scale_bytes)
        memcpy(sparse_pool_scales(pool, slot), token->scales, (size_t)pool->layout.scale_bytes);
    if (spike && !pool->layout.rope && pool->layout.scales) {
        float values[SPIKE];
        for (int i = 0; i < SPIKE; i++) values[i] = 0.5f;
        sparse_pool_put_end(pool, slot, values, SPIKE);
    } else if (spike && pool->layout.scale == KV_SCALE_OF_CACHE)
        memset(sparse_pool_end(pool, to) - SPIKE, num_to_e4m3(0.5f / pool->scale), SPIKE);
    else if (spike)
        case_spike(sparse_pool_end(pool, to), false);
}

void sparse_pool_put_end(const struct sparse_pool *pool, int64_t slot, const float *last, int count)
{
    const struct kv_layout *l = &pool->layout;
    float values[SPARSE_WIDEST] = {0}, written[SPARSE_WIDEST] = {0};
    uint8_t *to = sparse_pool_token(pool, slot), *scales = sparse_pool_scales(pool, slot);
    uint8_t page[656];
    const int first = (l->nope - count) / l->group; /* first of the rewritten groups */
    const size_t codes = (size_t)(l->element == KV_ELEMENT_E2M1 ? first * l->group / 2 : first * l->group),
                 all = (size_t)(l->element == KV_ELEMENT_E2M1 ? l->nope / 2 : l->nope),
                 of_scale = bytes_of_scale(l);
    sparse_pool_values(pool, to, slot, values);
    for (int i = 0; i < l->nope; i++)
        written[i] = i < l->nope - count ? values[i] : last[i - (l->nope - count)];
    kv_store_token(l, page, 1, 0, written, 1.0f);
    const size_t from = kv_scales_at(l, 1, 0);
    memcpy(to + codes, page + codes, all - codes);
    memcpy(scales + of_scale * (size_t)first, page + from + of_scale * (size_t)first,
           of_scale * (size_t)(l->scales - first));
}

void sparse_pool_put_alone(const struct sparse_pool *pool, int64_t slot, int column, float value)
{
    const struct kv_layout *l = &pool->layout;
    const bool fp4 = l->element == KV_ELEMENT_E2M1;
    uint8_t *to = sparse_pool_token(pool, slot), code = 0;
    const int group = column / l->group, bytes = fp4 ? l->group / 2 : l->group;
    const float size = fabsf(value);
    memset(to + group * bytes, 0, (size_t)bytes);
    if (size == 0.0f) return;
    const float scale = fp4 ? num_from_e4m3(num_to_e4m3(size)) : ldexpf(1.0f, ilogbf(size));
    put_scale(l, sparse_pool_scales(pool, slot), group, scale);
    code = fp4 ? num_to_e2m1(value / scale) : num_to_e4m3(value / scale);
    if (fp4)
        put_code(to, column, code);
    else
        to[column] = code;
}

void sparse_pool_put_nan(const struct sparse_pool *pool, struct random_state *random, uint8_t *token,
                         uint8_t *scales)
{
    static const uint16_t nan16 = 0x7fff; /* all differ from the fill of outputs */
    static const uint32_t nan32 = 0x7fc00000;
    const struct kv_layout *l = &pool->layout;
    if (!kv_is_quantised(l)) {
        memcpy(token + 100, &nan16, sizeof nan16);
        return;
    }
    const bool has_nan = l->element == KV_ELEMENT_E4M3; /* among its codes */
    if (has_nan && (!l->scales || random_between(random, 0, 1))) {
        token[random_between(random, 0, l->nope - 1)] = 0x7f;
        return;
    }
    scales += (int64_t)bytes_of_scale(l) * random_between(random, 0, l->scales - 1);
    switch (l->scale) {
    case KV_SCALE_UE8M0: *scales = 0xff; break;
    case KV_SCALE_E4M3: *scales = random_between(random, 0, 1) ? 0xff : 0x7f; break;
    default: memcpy(scales, &nan32, sizeof nan32);
    }
}

void sparse_pool_put_nans(const struct sparse_pool *pool, uint8_t *token)
{
    static const uint16_t nan16 = 0x7fff; /* NaN in both types; differs from the fill of outputs */
    const struct kv_layout *l = &pool->layout;
    const int32_t bytes = kv_is_quantised(l) ? l->nope : 0; /* of the formats in tables */
    memset(token, 0x7f, (size_t)bytes);
    for (uint8_t *at = token + (l->rope ? l->rope_offset : bytes); at < sparse_pool_end(pool, token);
         at += sizeof nan16)
        memcpy(at, &nan16, sizeof nan16);
}

/* ---- Lists ----------------------------------------------------------------------------------- */

static bool plant_index(struct patch *patch, int32_t *entry, int64_t index)
{
    const int32_t value = (int32_t)index;
    return plant(patch, entry, &value, sizeof value);
}

bool sparse_pool_plant(const struct sparse_pool *pool, enum defect fault, int32_t *list, int64_t i,
                       int64_t count, int32_t *length, struct patch *patch)
{
    int32_t *entry = &list[i];
    const bool counted = i < count, key = sparse_pool_is_key(pool, *entry);
    switch (fault) {
    case FAULT_DROPPED_KEY: return counted && key && plant_index(patch, entry, -1);
    case FAULT_SWAPPED_PAGE:
        return counted && key &&
               plant_index(patch, entry, (*entry + pool->page_size) % sparse_pool_slots(pool));
    case FAULT_INVALID_KEY: return counted && !key && plant_index(patch, entry, 0);
    case FAULT_LATE_KEY:
        return i == count && pool->has_length && key && plant_index(patch, length, count + 1);
    case FAULT_WRONG_SCALE: {
        if (!counted || !key || !pool->layout.scales) return false;
        uint8_t *scales = sparse_pool_scales(pool, *entry);
        const size_t size = bytes_of_scale(&pool->layout);
        return plant(patch, scales, scales + size, size); /* the next group */
    }
    default: return false;
    }
}
