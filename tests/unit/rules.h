/* SPDX-License-Identifier: MIT
 *
 * Tests what every attention operation must refuse and accept beyond its descriptor: head sizes, kernels
 * that support some of them, cache formats.
 */
#ifndef FMLA_RULES_H
#define FMLA_RULES_H

#include "refusals.h"

static inline void resize_heads(struct good_call *good, int64_t d_qk, int64_t d_v)
{
    good->layout.d_qk = d_qk, resize(good, DIM_d_v, d_v);
}

static inline void name_kernel(struct good_call *good, const char *name)
{
    *(const char **)option(good, "kernel") = name;
}

static inline void test_attention_rules(struct good_call *good)
{
    REFUSED(*good, "out", "d_v|0", resize(good, DIM_d_v, 0));
    /* The row has room for the write, so only the check prevents it. */
    REFUSED(*good, "out", "d_v|512|256", resize(good, DIM_d_qk, 256));
    REFUSED(*good, "log_base", "1|0|2", put_int(good, "log_base", 1));
    REFUSED_HERE(*good, "q", "d_qk is 320|512|576", resize_heads(good, 320, 256));
    REFUSED_HERE(*good, "q", "d_qk is 320|cpu-generic|512|576", resize_heads(good, 320, 256),
                 name_kernel(good, "cpu-generic"));
    REFUSED_HERE(*good, "q", "d_v is 128|512", resize(good, DIM_d_v, 128));
    TAKEN(*good, "the oracle takes any d_qk", resize_heads(good, 320, 256), name_kernel(good, "ref"));
}

/* The workspace of a batch-invariant call whose partial results exceed memory is not smaller than the
 * valid call's, or it is refused. */
static inline void test_huge(struct good_call *good, void (*enlarge)(void))
{
    static const char *const kernels[] = {"cpu-generic", "ref"};
    for (int way = 0; way < 4; way++) {
        struct answer few = {0}, many = {0};
        good->set_up();
        name_kernel(good, kernels[way % 2]), put_int(good, "batch_invariant", way / 2);
        CHECK_OK(described_ask(good->operation, ASK_BYTES, good->args, &few));
        enlarge();
        if (described_ask(good->operation, ASK_BYTES, good->args, &many) != FMLA_OK) continue;
        CHECK(many.bytes >= few.bytes, "%s, invariant %d: %zu bytes for too many keys, %zu for few",
              kernels[way % 2], way / 2, many.bytes, few.bytes);
    }
}

/* ---- Cache formats --------------------------------------------------------------------------- */

/* Returns the last format that a call of the operation may name. */
static inline int32_t last_of_bytes(const struct good_call *good)
{
    return (int32_t)described_member(good->operation, "kv_format")->high;
}

/* Tests invalid and valid variations of byte caches. */
static inline void test_cache_of_bytes(struct good_call *good, void (*set_up)(int32_t format), int which)
{
    const char *const name = described_tensor(good->operation, which)->name;
    struct held *const kv = &good->held[which];
#define AS_656 set_up(FMLA_KV_FP8_656)
#define AS_584 set_up(FMLA_KV_FP8_584)
    REFUSED(*good, name, "bfloat16|one byte", AS_656, kv->tensor.dtype = bf16);
    REFUSED(*good, name, "bytes|655|656|FP8_656", AS_656, kv->shape[3] = 655);
    REFUSED(*good, name, "stride|0|multiple of 4", AS_656, kv->strides[0] += 2);
    REFUSED(*good, name, "stride|1|658|multiple of 4", AS_656, kv->strides[1] += 2);
    REFUSED(*good, name, "stride|0|multiple of 2", AS_584, kv->strides[0] += 1);
    REFUSED(*good, name, "stride|1|586|584|contiguous", AS_584, kv->strides[1] += 2);
    REFUSED(*good, name, "stride|1|576|584|contiguous", AS_584, kv->strides[1] = 576);
    REFUSED_CALL(*good, name, "multiple of 4", AS_656, kv->tensor.byte_offset = 2);
    REFUSED_CALL(*good, name, "multiple of 2", AS_584, kv->tensor.byte_offset = 1);
    TAKEN(*good, "an integer of one byte", AS_656, kv->tensor.dtype.code = FMLA_TYPE_INT);
    TAKEN(*good, "e4m3 codes", AS_656, kv->tensor.dtype.code = FMLA_TYPE_FLOAT8_E4M3FN);
    static const char *const others[][2] = {{"2", "float8"},           {"6", "bool"},
                                            {"8", "float8_e4m3"},      {"9", "float8_e4m3b11fnuz"},
                                            {"11", "float8_e4m3fnuz"}, {"12", "float8_e5m2"},
                                            {"14", "float8_e8m0fnu"},  {"99", "type code 99"}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        char words[64];
        snprintf(words, sizeof words, "%s|int8, uint8, float8_e4m3fn", others[i][1]);
        REFUSED(*good, name, words, AS_656, kv->tensor.dtype.code = (uint8_t)atoi(others[i][0]));
    }
    TAKEN(*good, "tokens apart", AS_656, kv->shape[0] = 2, kv->strides[1] += 4, kv->strides[0] += 68,
          kv->tensor.byte_offset = 4);
    TAKEN(*good, "pages apart", AS_584, kv->shape[0] = 2, kv->strides[0] += 2, kv->tensor.byte_offset = 2);
    /* A cache without pages may begin at any address, as may every tensor without elements. */
    for (int32_t format = FMLA_KV_FP8_656; format <= last_of_bytes(good); format++)
        if (format != FMLA_KV_FP8_576)
            TAKEN(*good, "a cache of no bytes at an odd address", set_up(format), kv->shape[0] = 0,
                  kv->tensor.byte_offset = 1);
    if (last_of_bytes(good) < FMLA_KV_FP8_528) return;
    REFUSED(*good, name, "bytes|527|528|FP8_528", set_up(FMLA_KV_FP8_528), kv->shape[3] = 527);
    REFUSED(*good, name, "bytes|528|288|FP4_288", set_up(FMLA_KV_FP4_288), kv->shape[3] = 528);
    REFUSED(*good, name, "stride|1|529|528|contiguous", set_up(FMLA_KV_FP8_528_SPLIT), kv->strides[1] += 1);
    REFUSED(*good, name, "stride|1|256|288|contiguous", set_up(FMLA_KV_FP4_288_SPLIT), kv->strides[1] = 256);
    REFUSED(*good, name, "stride|1|530|multiple of 4", set_up(FMLA_KV_FP8_528_F32), kv->strides[1] += 2);
    REFUSED_CALL(*good, name, "multiple of 4", set_up(FMLA_KV_FP8_528_F32), kv->tensor.byte_offset = 2);
    for (int32_t format = FMLA_KV_FP8_528; format <= FMLA_KV_FP4_288_SPLIT; format++)
        TAKEN(*good, "pages at odd addresses", set_up(format), kv->shape[0] = 2, kv->strides[0] += 1,
              kv->tensor.byte_offset = 1);
    TAKEN(*good, "tokens at odd addresses", set_up(FMLA_KV_FP4_288), kv->shape[0] = 2, kv->strides[1] += 1,
          kv->strides[0] += 21, kv->tensor.byte_offset = 1);
}

/* set_up makes the valid call over pages of a format. */
static inline void test_formats(struct good_call *good, void (*set_up)(int32_t format))
{
    const struct member *m;
    const char *first = NULL;
    for (int which = 0; (m = described_tensor(good->operation, which)); which++) {
        if (!(m->allowed & IS_CACHE)) continue;
        if (!first) first = m->name;
        test_cache_of_bytes(good, set_up, which);
    }
    struct held *const q = &good->held[0];
    const int last = described_tensor(good->operation, 0)->rank - 1;
    REFUSED(*good, "kv_format", "FP16|q's type|bfloat16", put_int(good, "kv_format", FMLA_KV_FP16));
    REFUSED(*good, "kv_format", "0|FP8_656|FP8_584", AS_656, put_int(good, "kv_format", 0));
    REFUSED(*good, first, "uint8|bfloat16", AS_656, put_int(good, "kv_format", FMLA_KV_BF16));
    REFUSED(*good, first, "bfloat16|one byte", set_up(FMLA_KV_BF16),
            put_int(good, "kv_format", FMLA_KV_FP8_656));
    REFUSED(*good, first, "bytes|584|656|FP8_656", AS_584, put_int(good, "kv_format", FMLA_KV_FP8_656));
    REFUSED(*good, "q", "d_qk|576|512|FP8_584", AS_584, q->shape[last] = 576, q->tensor.strides = NULL);
    REFUSED(*good, "q", "d_qk|512|576|FP8_656", AS_656, q->shape[last] = 512);
    TAKEN(*good, "a format that is named", put_int(good, "kv_format", FMLA_KV_BF16));
    TAKEN(*good, "pages of a format that is named", set_up(FMLA_KV_BF16));
    TAKEN(*good, "FP8_656", AS_656);
    TAKEN(*good, "FP8_584", AS_584);
    if (last_of_bytes(good) >= FMLA_KV_FP8_528) {
        REFUSED(*good, "kv_format", "11|0|10", put_int(good, "kv_format", FMLA_KV_FP8_528_F32 + 1));
        REFUSED_HERE(*good, "kv_format", "FP8_576|FP8_656 FP8_584 FP8_528", set_up(FMLA_KV_FP8_576));
        for (int32_t format = FMLA_KV_FP8_528; format <= FMLA_KV_FP8_528_F32; format++)
            TAKEN(*good, "a newer format", set_up(format));
    }
#undef AS_656
#undef AS_584
}

#endif
