/* SPDX-License-Identifier: MIT */
#include "operations.h"

#include <stddef.h>

const char *const dimension_words[DIMENSIONS] = {
#define DIMENSION(name, words) [DIM_##name] = (words),
#include "operations.def"
};

struct form form_of(const struct member *member, bool flat)
{
    static const enum dimension instead[DIMENSIONS] = {[DIM_pages] = DIM_s_kv,
                                                       [DIM_one_head] = DIM_h_kv,
                                                       [DIM_s_q] = DIM_tokens_q,
                                                       [DIM_s_k] = DIM_tokens_k};
    struct form form = {0};
    for (int i = 0; i < member->rank; i++) {
        const enum dimension name = member->dimensions[i];
        const bool changes = flat && (member->allowed & OR_FLAT);
        if (changes && (name == DIM_b || name == DIM_page_size)) continue;
        form.dimensions[form.rank++] = changes && instead[name] != DIM__ ? instead[name] : name;
    }
    return form;
}

#define IS_THERE(dimension) (DIM_##dimension != DIM__)
#define OPERATION(op, OP)                                                                                    \
    [OP_##OP] = {.name = #op, .size = sizeof(fmla_##op##_args), .members = (const struct member[]) {
#define TENSOR(op, member, allow, d0, d1, d2, d3, d4)                                                        \
    {.name = #member,                                                                                        \
     .kind = MEMBER_TENSOR,                                                                                  \
     .offset = offsetof(fmla_##op##_args, member),                                                           \
     .allowed = (allow),                                                                                     \
     .rank = IS_THERE(d0) + IS_THERE(d1) + IS_THERE(d2) + IS_THERE(d3) + IS_THERE(d4),                       \
     .dimensions = {DIM_##d0, DIM_##d1, DIM_##d2, DIM_##d3, DIM_##d4}},
#define OPTION(op, member, which, least, most)                                                               \
    {.name = #member,                                                                                        \
     .kind = MEMBER_##which,                                                                                 \
     .offset = offsetof(fmla_##op##_args, member),                                                           \
     .low = (least),                                                                                         \
     .high = (most)},
#define RANGES(op)                                                                                           \
    {                                                                                                        \
        0                                                                                                    \
    }                                                                                                        \
    }                                                                                                        \
    , .ranges = {[DIM__] = {0},
#define RANGE(op, which, least, most) [DIM_##which] = {(least), (most)},
#define END(op)                                                                                              \
    }                                                                                                        \
    }                                                                                                        \
    ,
/* clang-format off */
const struct descriptor descriptors[OPERATIONS] = {
#include "operations.def"
};
/* clang-format on */

_Static_assert(FMLA_KV_BF16 == KV_BF16 + 1 && FMLA_KV_FP16 == KV_FP16 + 1 &&
                   FMLA_KV_FP8_656 == KV_FP8_656 + 1 && FMLA_KV_FP8_584 == KV_FP8_584 + 1 &&
                   FMLA_KV_FP8_576 == KV_FP8_576 + 1 && FMLA_KV_FP8_528 == KV_FP8_528 + 1 &&
                   FMLA_KV_FP8_528_SPLIT == KV_FP8_528_SPLIT + 1 && FMLA_KV_FP4_288 == KV_FP4_288 + 1 &&
                   FMLA_KV_FP4_288_SPLIT == KV_FP4_288_SPLIT + 1 &&
                   FMLA_KV_FP8_528_F32 == KV_FP8_528_F32 + 1 && FMLA_KV_FP8_528_F32 == (int)KV_FORMATS,
               "the public formats are those of kvformat.h, behind FMLA_KV_NONE");

const struct cache_format cache_formats[KV_FORMATS + 1] = {
    {"not named", KV_BF16, 0, 0, 0, 1},
    {"FMLA_KV_BF16", KV_BF16, ALLOW_BF16, 0, 0, 1},
    {"FMLA_KV_FP16", KV_FP16, ALLOW_FP16, 0, 0, 1},
    {"FMLA_KV_FP8_656", KV_FP8_656, ALLOW_BYTES, 576, 656, 4},
    {"FMLA_KV_FP8_584", KV_FP8_584, ALLOW_BYTES, 512, 584, 2},
    {"FMLA_KV_FP8_576", KV_FP8_576, ALLOW_BYTES, 576, 576, 1},
    {"FMLA_KV_FP8_528", KV_FP8_528, ALLOW_BYTES, 512, 528, 1},
    {"FMLA_KV_FP8_528_SPLIT", KV_FP8_528_SPLIT, ALLOW_BYTES, 512, 528, 1},
    {"FMLA_KV_FP4_288", KV_FP4_288, ALLOW_BYTES, 512, 288, 1},
    {"FMLA_KV_FP4_288_SPLIT", KV_FP4_288_SPLIT, ALLOW_BYTES, 512, 288, 1},
    {"FMLA_KV_FP8_528_F32", KV_FP8_528_F32, ALLOW_BYTES, 512, 528, 4},
};
