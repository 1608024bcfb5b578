/* SPDX-License-Identifier: MIT
 *
 * The cache layouts (docs/semantics.md, "Cache formats"), byte by byte, defined once for C and CUDA.
 * A page is a run of bytes; all offsets count from its start.
 *
 *   FP8_656   token: 512 e4m3 (NoPE) | 4 f32 scales, one per 128 | 64 bf16 (RoPE)
 *   FP8_584   token: 448 e4m3 (NoPE) | 64 bf16 (RoPE)
 *             after the page_size tokens of the page: page_size × (7 ue8m0 scales, one per 64 | 1 pad byte)
 *   FP8_576   token: 576 e4m3; one f32 scale for the whole cache, passed separately, which multiplies exactly
 *   FP8_528   token: 512 e4m3 | 16 ue8m0 scales, one per 32; the RoPE values are the last 64, quantised like
 *             the rest
 *   FP4_288   token: 256 bytes of 512 e2m1, value 2 i in the low half of byte i | 32 e4m3 scales, one per 16
 *   FP8_528_SPLIT, FP4_288_SPLIT
 *             the same, with the scales of a page after its page_size tokens
 *   FP8_528_F32
 *             token: 512 e4m3 | 4 f32 scales, one per 128
 *   BF16      token: d_qk bf16
 *   FP16      token: d_qk fp16
 */
#ifndef FMLA_KVFORMAT_H
#define FMLA_KVFORMAT_H

#include "num.h"

#include <stddef.h>

enum kv_format {
    KV_BF16,
    KV_FP16,
    KV_FP8_656,
    KV_FP8_584,
    KV_FP8_576,
    KV_FP8_528,
    KV_FP8_528_SPLIT,
    KV_FP4_288,
    KV_FP4_288_SPLIT,
    KV_FP8_528_F32,
    KV_FORMATS
};

enum kv_element { KV_ELEMENT_BF16, KV_ELEMENT_FP16, KV_ELEMENT_E4M3, KV_ELEMENT_E2M1 };
enum kv_scale { KV_SCALE_NONE, KV_SCALE_F32, KV_SCALE_UE8M0, KV_SCALE_OF_CACHE, KV_SCALE_E4M3 };

/* The fields of a layout. Lengths count elements unless they say bytes. */
struct kv_layout {
    enum kv_element element; /* type of the first `nope` values of a token */
    enum kv_scale scale;
    int32_t nope;              /* values of type `element`; the rest, up to d_qk, are `rope` bf16 values */
    int32_t rope;              /* 0 if the whole token has one type */
    int32_t group;             /* values that share a scale; 0 = no scale in the page */
    int32_t scales;            /* per token */
    int32_t token_bytes;       /* from one token to the next */
    int32_t rope_offset;       /* bytes from the token */
    int32_t scale_bytes;       /* per token, with padding, if scales follow all tokens; else 0 */
    int32_t scale_offset;      /* bytes from the token, if scales are inside it; else 0 */
    int32_t page_bytes_a_slot; /* token_bytes + scale_bytes; the least page stride is page_size times this */
};

/* Returns the layout of a format. d_qk is read only for KV_BF16 and KV_FP16; FP8_656 and FP8_576 are 576
 * wide, the other byte layouts 512. */
NUM_FN struct kv_layout kv_layout_of(enum kv_format format, int32_t d_qk)
{
    struct kv_layout l;
    memset(&l, 0, sizeof l);
    switch (format) {
    case KV_FP8_656:
        l.element = KV_ELEMENT_E4M3, l.scale = KV_SCALE_F32;
        l.nope = 512, l.rope = 64, l.group = 128, l.scales = 4;
        l.token_bytes = 656, l.scale_offset = 512, l.rope_offset = 528;
        break;
    case KV_FP8_584:
        l.element = KV_ELEMENT_E4M3, l.scale = KV_SCALE_UE8M0;
        l.nope = 448, l.rope = 64, l.group = 64, l.scales = 7;
        l.token_bytes = 576, l.rope_offset = 448, l.scale_bytes = 8;
        break;
    case KV_FP8_576:
        l.element = KV_ELEMENT_E4M3, l.scale = KV_SCALE_OF_CACHE;
        l.nope = 576, l.token_bytes = 576;
        break;
    case KV_FP8_528:
    case KV_FP8_528_SPLIT:
        l.element = KV_ELEMENT_E4M3, l.scale = KV_SCALE_UE8M0;
        l.nope = 512, l.group = 32, l.scales = 16;
        if (format == KV_FP8_528)
            l.token_bytes = 528, l.scale_offset = 512;
        else
            l.token_bytes = 512, l.scale_bytes = 16;
        break;
    case KV_FP4_288:
    case KV_FP4_288_SPLIT:
        l.element = KV_ELEMENT_E2M1, l.scale = KV_SCALE_E4M3;
        l.nope = 512, l.group = 16, l.scales = 32;
        if (format == KV_FP4_288)
            l.token_bytes = 288, l.scale_offset = 256;
        else
            l.token_bytes = 256, l.scale_bytes = 32;
        break;
    case KV_FP8_528_F32:
        l.element = KV_ELEMENT_E4M3, l.scale = KV_SCALE_F32;
        l.nope = 512, l.group = 128, l.scales = 4;
        l.token_bytes = 528, l.scale_offset = 512;
        break;
    case KV_FP16:
    case KV_BF16:
    default:
        l.element = format == KV_FP16 ? KV_ELEMENT_FP16 : KV_ELEMENT_BF16;
        l.nope = d_qk, l.token_bytes = 2 * d_qk;
        break;
    }
    l.page_bytes_a_slot = l.token_bytes + l.scale_bytes;
    return l;
}

/* Returns whether values are codes of a byte or less, with scales. */
NUM_FN int kv_is_quantised(const struct kv_layout *l)
{
    return l->element == KV_ELEMENT_E4M3 || l->element == KV_ELEMENT_E2M1;
}

/* Returns the format with contiguous tokens that corresponds to a format whose scales follow the tokens of a
 * page. */
NUM_FN enum kv_format kv_unsplit(enum kv_format format)
{
    return format == KV_FP8_528_SPLIT ? KV_FP8_528 : format == KV_FP4_288_SPLIT ? KV_FP4_288 : format;
}

NUM_FN int32_t kv_width(const struct kv_layout *l)
{
    return l->nope + l->rope;
}

/* Return the offset of a slot's token in its page, and of its scales. */
NUM_FN size_t kv_token_at(const struct kv_layout *l, int64_t slot)
{
    return (size_t)slot * (size_t)l->token_bytes;
}

NUM_FN size_t kv_scales_at(const struct kv_layout *l, int64_t page_size, int64_t slot)
{
    return l->scale_bytes ? (size_t)page_size * (size_t)l->token_bytes + (size_t)slot * (size_t)l->scale_bytes
                          : kv_token_at(l, slot) + (size_t)l->scale_offset;
}

NUM_FN uint16_t kv_get16(const uint8_t *at)
{
    uint16_t v;
    memcpy(&v, at, sizeof v);
    return v;
}

/* Returns the scale of value i of a token. */
NUM_FN float kv_scale_of(const struct kv_layout *l, const uint8_t *page, int64_t page_size, int64_t slot,
                         int32_t i, float cache_scale)
{
    const uint8_t *scales = page + kv_scales_at(l, page_size, slot);
    float scale = 1.0f;
    switch (l->scale) {
    case KV_SCALE_F32: memcpy(&scale, scales + 4 * (i / l->group), sizeof scale); break;
    case KV_SCALE_UE8M0: scale = num_from_ue8m0(scales[i / l->group]); break;
    case KV_SCALE_E4M3: scale = num_from_e4m3(scales[i / l->group]); break;
    case KV_SCALE_OF_CACHE: scale = cache_scale; break;
    case KV_SCALE_NONE: break;
    }
    return scale;
}

/* Returns the value of code i of a token, without its scale. */
NUM_FN float kv_code_value(const struct kv_layout *l, const uint8_t *token, int32_t i)
{
    if (l->element == KV_ELEMENT_E2M1) return num_from_e2m1((uint8_t)(token[i / 2] >> 4 * (i % 2) & 15));
    return num_from_e4m3(token[i]);
}

/* Returns whether the values of a cache are codes times its one scale, without a rounding to bf16. Attention
 * then multiplies scores and results by the scale instead of each value. */
NUM_FN int kv_is_exact(const struct kv_layout *l)
{
    return l->scale == KV_SCALE_OF_CACHE;
}

/* Returns value i of a token, in every kernel and in the oracle. An FP8 element decodes to bf16(e4m3 ×
 * scale), one of FP8_576 to e4m3 × scale; e2m1 × scale is exact in bf16. cache_scale is read only for
 * FP8_576. */
NUM_FN float kv_load(const struct kv_layout *l, const uint8_t *page, int64_t page_size, int64_t slot,
                     int32_t i, float cache_scale)
{
    const uint8_t *token = page + kv_token_at(l, slot);
    if (i >= l->nope) return num_from_bf16(kv_get16(token + l->rope_offset + 2 * (i - l->nope)));
    switch (l->element) {
    case KV_ELEMENT_BF16: return num_from_bf16(kv_get16(token + 2 * i));
    case KV_ELEMENT_FP16: return num_from_fp16(kv_get16(token + 2 * i));
    case KV_ELEMENT_E4M3:
    case KV_ELEMENT_E2M1: break;
    }
    const float scale = kv_scale_of(l, page, page_size, slot, i, cache_scale);
    const float value = kv_code_value(l, token, i) * scale;
    return kv_is_exact(l) ? value : num_from_bf16(num_to_bf16(value));
}

/* Returns value i of a token as it is written to another cache: a NaN from a code becomes the bf16 NaN with
 * all bits set except the sign, as GPUs convert it. */
NUM_FN float kv_convert(const struct kv_layout *l, int32_t i, float value)
{
    return kv_is_quantised(l) && i < l->nope && value != value ? num_from_bf16(0x7fff) : value;
}

/* Writes 16 values as FP4. A group with a NaN gets a NaN scale and codes of 0. */
NUM_FN void kv_store_fp4(uint8_t *codes, uint8_t *scale, const float *values)
{
    float amax = 0.0f;
    int32_t nan = 0;
    for (int32_t i = 0; i < 16; i++) {
        const float a = values[i] < 0.0f ? -values[i] : values[i];
        if (a > amax) amax = a;
        nan |= a != a;
    }
    *scale = (uint8_t)(nan ? 0x7f : num_e4m3_scale(amax));
    const float by = num_from_e4m3(*scale);
    for (int32_t i = 0; i < 16; i += 2)
        codes[i / 2] = (uint8_t)(num_to_e2m1(values[i] / by) | num_to_e2m1(values[i + 1] / by) << 4);
}

/* Writes the kv_width(l) values of one token. Layouts with groups are quantised group by group with the scale
 * of num_ue8m0_scale (as f32 in FP8_656 and FP8_528_F32), FP8_576 with cache_scale. The pad byte of FP8_584
 * is written as 0. */
NUM_FN void kv_store_token(const struct kv_layout *l, uint8_t *page, int64_t page_size, int64_t slot,
                           const float *values, float cache_scale)
{
    uint8_t *token = page + kv_token_at(l, slot);
    uint8_t *scales = page + kv_scales_at(l, page_size, slot);
    for (int32_t i = 0; i < l->rope; i++) {
        const uint16_t v = num_to_bf16(values[l->nope + i]);
        memcpy(token + l->rope_offset + 2 * i, &v, sizeof v);
    }
    if (l->element == KV_ELEMENT_E2M1) {
        for (int32_t first = 0; first < l->nope; first += 16)
            kv_store_fp4(token + first / 2, scales + first / 16, values + first);
        return;
    }
    if (l->element != KV_ELEMENT_E4M3) {
        for (int32_t i = 0; i < l->nope; i++) {
            const uint16_t v =
                l->element == KV_ELEMENT_FP16 ? num_to_fp16(values[i]) : num_to_bf16(values[i]);
            memcpy(token + 2 * i, &v, sizeof v);
        }
        return;
    }
    if (l->scale_bytes) memset(scales, 0, (size_t)l->scale_bytes);
    const int32_t group = l->group ? l->group : l->nope;
    for (int32_t first = 0; first < l->nope; first += group) {
        float scale = cache_scale;
        if (l->scale != KV_SCALE_OF_CACHE) {
            float amax = 0.0f;
            for (int32_t i = first; i < first + group; i++) {
                const float a = values[i] < 0.0f ? -values[i] : values[i];
                if (a > amax) amax = a;
            }
            const uint8_t code = num_ue8m0_scale(amax);
            scale = num_from_ue8m0(code);
            if (l->scale == KV_SCALE_F32)
                memcpy(scales + 4 * (first / group), &scale, sizeof scale);
            else
                scales[first / group] = code;
        }
        for (int32_t i = first; i < first + group; i++) token[i] = num_to_e4m3(values[i] / scale);
    }
}

#endif
