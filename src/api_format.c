/* SPDX-License-Identifier: MIT
 *
 * Caches as the sparse operations are given them: which format it is, and whether its pages are laid out as it says.
 */
#include "api.h"

#include <stdio.h>

/* In the order of FMLA_KV_…, as far as these operations take them. */
static const struct api_format formats[] = {
    {"not named", KV_BF16, 0, 0, 0, 1},
    {"FMLA_KV_BF16", KV_BF16, ALLOW_BF16, 0, 0, 1},
    {"FMLA_KV_FP16", KV_FP16, ALLOW_FP16, 0, 0, 1},
    {"FMLA_KV_FP8_656", KV_FP8_656, ALLOW_BYTES, 576, 656, 4},
    {"FMLA_KV_FP8_584", KV_FP8_584, ALLOW_BYTES, 512, 584, 2},
};
enum { FORMATS = sizeof formats / sizeof formats[0] };

fmla_status check_kv_format(const char *op, int32_t kv_format, const char *name, const fmla_tensor *kv,
                            const struct checked_tensor *q, const struct api_format **format)
{
    TRY(check_range(op, "kv_format", kv_format, 0, FORMATS - 1));
    int which = kv_format;
    if (!which) {
        if (kv && kv->dtype.bits == 8)
            return fail(FMLA_INVALID_ARGUMENT,
                        "%s: kv_format: is 0, must name the format of the bytes in %s: %s (%d) or %s (%d)",
                        op, name, formats[FMLA_KV_FP8_656].name, FMLA_KV_FP8_656,
                        formats[FMLA_KV_FP8_584].name, FMLA_KV_FP8_584);
        which = q->element == ELEMENT_BF16 ? FMLA_KV_BF16 : FMLA_KV_FP16;
    }
    *format = &formats[which];
    if ((*format)->allow != ALLOW_BYTES && (*format)->allow != 1u << q->element)
        return fail(FMLA_INVALID_ARGUMENT, "%s: kv_format: is %s, whose values must have the type of q, %s",
                    op, (*format)->name, q->element == ELEMENT_BF16 ? "bfloat16" : "float16");
    return FMLA_OK;
}

fmla_status check_kv_pages(const char *op, const struct checked_tensor *kv, const struct api_format *format,
                           int64_t d_qk, unsigned extra, struct key_source *keys)
{
    const int64_t bytes = format->allow == ALLOW_BYTES ? 1 : 2;
    const bool in_pieces = format->format == KV_FP8_584; /* tokens of a page, then their scales */
    char about[64];
    snprintf(about, sizeof about, "%s: pages (dimension 0)", kv->name);
    TRY(check_range(op, about, kv->shape[0], 0, INT32_MAX));
    snprintf(about, sizeof about, "%s: page_size (dimension 1)", kv->name);
    TRY(check_range(op, about, kv->shape[1], 1, INT32_MAX));
    TRY(check_size(op, kv, 2, "h_kv", 1, "pages of a sparse cache"));
    if (format->token)
        TRY(check_size(op, kv, 3, "bytes of a token", format->token, format->name));
    else
        TRY(check_size(op, kv, 3, "d_qk", d_qk, "q"));
    for (int i = 0; i < 2; i++)
        if (kv->shape[0] && kv->shape[i] > 1 && kv->stride[i] % format->unit)
            return fail(FMLA_INVALID_ARGUMENT,
                        "%s: %s: stride of dimension %d is %lld, must be a multiple of %lld in %s", op,
                        kv->name, i, (long long)kv->stride[i], (long long)format->unit, format->name);
    if (in_pieces && kv->shape[0] && kv->shape[1] > 1 && kv->stride[1] != format->token)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: %s: stride of dimension 1 is %lld, must be %lld: a page of %s is in one piece", op,
                    kv->name, (long long)kv->stride[1], (long long)format->token, format->name);
    if (!(extra & CHECK_SHAPE_ONLY) && kv->shape[0] && (uintptr_t)kv->data % (uintptr_t)format->unit)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: %s: data + byte_offset is not a multiple of %lld bytes as %s wants", op, kv->name,
                    (long long)format->unit, format->name);
    keys->pages = kv->shape[0], keys->page_size = kv->shape[1];
    keys->k.data = (const uint8_t *)(const void *)kv->data;
    /* The stride of a dimension of one element may be anything, and is not multiplied. Of others check_tensor has seen
     * that no offset overflows. */
    if (keys->pages > 1) keys->k.page_bytes = kv->stride[0] * bytes;
    if (keys->page_size > 1)
        keys->k.slot_bytes = in_pieces ? kv_layout_of(format->format, 0).token_bytes : kv->stride[1] * bytes;
    keys->v = keys->k;
    return FMLA_OK;
}

void fill_lists(const struct checked_tensor *indices, const struct checked_tensor *lengths, int64_t topk,
                struct key_source *keys)
{
    keys->kind = KEYS_LISTED;
    keys->table = (const int32_t *)(const void *)indices->data;
    keys->table_stride[0] = indices->stride[0], keys->table_stride[1] = indices->stride[1];
    keys->lengths = (const int32_t *)(const void *)lengths->data;
    keys->capacity = topk;
}
