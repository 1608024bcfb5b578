/* SPDX-License-Identifier: MIT */
#include "tokens.h"

#include "kvformat.h"
#include "queries.h"

#include "flashmla/flashmla.h"

#include <string.h>

static struct kv_layout layout_of(int32_t format)
{
    return kv_layout_of((enum kv_format)(format - FMLA_KV_BF16), 0);
}

void tokens_store(int32_t format, void *page, int64_t page_size, int64_t slot, const float *values,
                  float of_cache)
{
    const struct kv_layout layout = layout_of(format);
    kv_store_token(&layout, page, page_size, slot, values, of_cache);
}

void tokens_copy(int32_t format, void *page, int64_t page_size, int64_t slot, const void *one)
{
    const struct kv_layout layout = layout_of(format);
    uint8_t *to = page;
    const uint8_t *from = one;
    memcpy(to + kv_token_at(&layout, slot), from, (size_t)layout.token_bytes);
    if (layout.scale_bytes)
        memcpy(to + kv_scales_at(&layout, page_size, slot), from + kv_scales_at(&layout, 1, 0),
               (size_t)layout.scale_bytes);
}

void tokens_quantise_query(int32_t format, float values[TOKENS_WIDTH])
{
    const struct kv_layout layout = layout_of(format);
    uint16_t narrow[TOKENS_WIDTH];
    for (int i = 0; i < kv_width(&layout); i++) narrow[i] = num_to_bf16(values[i]);
    query_quantise(narrow, narrow, layout.nope, layout.nope);
    for (int i = 0; i < kv_width(&layout); i++) values[i] = num_from_bf16(narrow[i]);
}
