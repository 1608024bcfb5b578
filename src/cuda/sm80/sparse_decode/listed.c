/* SPDX-License-Identifier: MIT */
#include "listed.h"

static bool of_values(enum kv_format format)
{
    return format == KV_BF16 || format == KV_FP16;
}

/* Returns whether some cache holds bytes. */
static bool of_bytes(const struct attention_problem *p)
{
    for (int i = 0; i < KEY_SOURCES; i++)
        if (p->keys[i].kind != KEYS_NONE && !of_values(p->keys[i].format)) return true;
    return false;
}

const char *sm80_listed_refuses(const struct attention_problem *p, const char **argument)
{
    enum { MOST_KEYS = INT32_MAX - INVARIANT_SPLIT_KEYS };
    *argument = "q";
    if (of_bytes(p) && p->element != ELEMENT_BF16) return "takes bf16 queries with caches of bytes";
    *argument = "indices";
    return p->capacity > MOST_KEYS ? "takes fewer than 2^31 - 2048 indices per token" : NULL;
}

struct latent_choice sm80_listed_choose(const struct attention_problem *p, int64_t heads,
                                        int32_t shared_bytes)
{
    return latent_choose(heads, INT32_MAX, of_bytes(p) ? LATENT_LIST_OF_BYTES : LATENT_LIST, shared_bytes);
}

/* Returns the format that represents all formats of a kernel (kernels.def). */
static enum kv_format kind_of(enum kv_format format)
{
    return format == KV_FP8_656 ? KV_FP8_528_F32 : kv_unsplit(format);
}

struct cuda_kernel *sm80_listed_kernel(const struct attention_problem *p, const struct latent_choice *choice)
{
    enum kv_format format = kind_of(p->format);
    for (int i = 0; i < KEY_SOURCES; i++)
        if (p->keys[i].kind != KEYS_NONE && kind_of(p->keys[i].format) != format) format = CUDA_BYTES;
    return cuda_kernel_of((struct cuda_key){CUDA_SM80_SPARSE_DECODE, p->element, format, choice->shape});
}

/* ---- Alignment ------------------------------------------------------------------------------- */

/* Returns whether every token begins at a multiple of `bytes`. */
static bool keys_aligned(const struct key_source *keys, int64_t bytes)
{
    const struct kv_layout layout = kv_layout_of(keys->format, 0);
    if (keys->kind == KEYS_NONE) return true;
    if ((uintptr_t)keys->k.data % (uintptr_t)bytes) return false;
    if (keys->pages > 1 && keys->k.page_bytes % bytes) return false;
    if (layout.scale_bytes && keys->page_size * layout.token_bytes % bytes) return false;
    return keys->page_size <= 1 || keys->k.slot_bytes % bytes == 0;
}

static bool queries_aligned(const struct attention_problem *p)
{
    const int64_t shape[] = {p->b, p->s_q, p->h_q};
    return cuda_rows_aligned(p->q, shape, p->q_stride, 3, sizeof *p->q, 16);
}

/* ---- Parameters ------------------------------------------------------------------------------ */

static int32_t log2_of(int32_t power)
{
    int32_t log = 0;
    while (power >> log > 1) log++;
    return log;
}

static struct listed_layout layout_of(const struct key_source *keys)
{
    enum { GROUP = 64 };
    const struct kv_layout l = kv_layout_of(keys->format, 0);
    struct listed_layout layout = {.copied_bytes = keys_aligned(keys, 16)  ? 16
                                                   : keys_aligned(keys, 8) ? 8
                                                                           : 1};
    if (keys->kind == KEYS_NONE || !kv_is_quantised(&l)) return layout;
    layout.code_bytes = l.element == KV_ELEMENT_E2M1 ? l.nope / 2 : l.nope;
    layout.code_groups = l.nope / GROUP;
    layout.values_at = l.rope_offset;
    layout.scale_bytes = l.scale_bytes             ? l.scale_bytes
                         : l.scale == KV_SCALE_F32 ? l.scales * (int32_t)sizeof(float)
                                                   : l.scales;
    layout.scale_kind = (int32_t)l.scale;
    layout.scale_shift = log2_of(l.group);
    layout.scale_place = keys->format == KV_FP8_584 ? LISTED_584_SCALES : LISTED_SCALES;
    return layout;
}

struct sparse_sm80_params sm80_listed_params(const struct attention_problem *p, int32_t stages)
{
    struct sparse_sm80_params params = {.stages = stages, .vectors_aligned = queries_aligned(p)};
    for (int i = 0; i < KEY_SOURCES; i++) {
        params.layout[i] = layout_of(&p->keys[i]);
        if (!of_bytes(p)) params.vectors_aligned &= keys_aligned(&p->keys[i], 16);
    }
    return params;
}
