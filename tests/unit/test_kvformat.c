/* SPDX-License-Identifier: MIT
 *
 * Tests src/kvformat.h against the layouts in docs/semantics.md ("Cache formats"): every offset below is
 * from that page, none from struct kv_layout. Pages are at odd addresses between poisoned bytes, so that a
 * byte written next to a token is detected, and sanitizers detect accesses that assume alignment.
 */
#include "check.h"
#include "kvformat.h"
#include "random.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

enum { GUARD = 63, POISON = 0xa5, MAX_PAGE = 64 * 1152 };

static uint8_t memory[GUARD + MAX_PAGE + GUARD], expected[sizeof memory];
static uint8_t *const page = memory + GUARD, *const expected_page = expected + GUARD;

static const int64_t page_sizes[] = {1, 2, 61, 64};
enum { PAGE_SIZES = sizeof page_sizes / sizeof page_sizes[0] };

enum scales { NONE, OF_CACHE, F32, UE8M0, E4M3 /* of e2m1 codes, two a byte */ };

/* A token is at token · slot; its scales, one for every `group` values, at scales + step · slot or, if split,
 * scales · page_size + step · slot. The 64 values behind the quantised ones are bf16, at `rope` in the token. */
static const struct format {
    const char *name;
    enum kv_format format;
    int32_t d_qk, slot_bytes, token;
    enum scales kind;
    int32_t group, scales, step;
    bool split;
    int32_t rope;
} layouts[] = {
    {"BF16", KV_BF16, 576, 1152, 1152, NONE, 0, 0, 0, false, 0},
    {"BF16 512 wide", KV_BF16, 512, 1024, 1024, NONE, 0, 0, 0, false, 0},
    {"FP16", KV_FP16, 576, 1152, 1152, NONE, 0, 0, 0, false, 0},
    {"FP16 64 wide", KV_FP16, 64, 128, 128, NONE, 0, 0, 0, false, 0},
    {"FP8_656", KV_FP8_656, 576, 656, 656, F32, 128, 512, 656, false, 528},
    {"FP8_584", KV_FP8_584, 512, 584, 576, UE8M0, 64, 576, 8, true, 448},
    {"FP8_576", KV_FP8_576, 576, 576, 576, OF_CACHE, 576, 0, 0, false, 0},
    {"FP8_528", KV_FP8_528, 512, 528, 528, UE8M0, 32, 512, 528, false, 0},
    {"FP8_528_SPLIT", KV_FP8_528_SPLIT, 512, 528, 512, UE8M0, 32, 512, 16, true, 0},
    {"FP4_288", KV_FP4_288, 512, 288, 288, E4M3, 16, 256, 288, false, 0},
    {"FP4_288_SPLIT", KV_FP4_288_SPLIT, 512, 288, 256, E4M3, 16, 256, 32, true, 0},
    {"FP8_528_F32", KV_FP8_528_F32, 512, 528, 528, F32, 128, 512, 528, false, 0},
};
enum { LAYOUTS = sizeof layouts / sizeof layouts[0] };

static int64_t scales_at(const struct format *f, int64_t page_size, int64_t slot)
{
    return f->scales * (f->split ? page_size : 1) + f->step * slot;
}

static int32_t quantised(const struct format *f)
{
    return f->rope ? f->d_qk - 64 : f->d_qk;
}

static void poison(void)
{
    memset(memory, POISON, sizeof memory);
    memset(expected, POISON, sizeof expected);
}

static void check_memory(const char *name, int64_t page_size, int64_t slot)
{
    size_t at = 0;
    while (at < sizeof memory && memory[at] == expected[at]) at++;
    CHECK(at == sizeof memory, "%s, page of %" PRId64 ", slot %" PRId64 ": byte %td is %02x, expected %02x",
          name, page_size, slot, (ptrdiff_t)at - GUARD, memory[at], expected[at]);
}

static void put16(uint8_t *at, uint16_t v)
{
    at[0] = (uint8_t)v, at[1] = (uint8_t)(v >> 8);
}

static void put_f32(uint8_t *at, float x)
{
    const uint32_t u = num_bits(x);
    for (int k = 0; k < 4; k++) at[k] = (uint8_t)(u >> 8 * k);
}

/* ---- Constants --------------------------------------------------------------------------------------- */

static void test_constants(void)
{
    for (int f = 0; f < LAYOUTS; f++) {
        const struct kv_layout l = kv_layout_of(layouts[f].format, layouts[f].d_qk);
        CHECK_ALL({kv_width(&l), layouts[f].d_qk}, {l.page_bytes_a_slot, layouts[f].slot_bytes});
        for (int k = 0; k < 2 * PAGE_SIZES; k++) {
            const int64_t size = page_sizes[k / 2], slot = k % 2 ? size - 1 : 0;
            CHECK_EQ(kv_token_at(&l, slot), layouts[f].token * slot);
            if (layouts[f].scales) CHECK_EQ(kv_scales_at(&l, size, slot), scales_at(&layouts[f], size, slot));
        }
    }
    /* 64-bit offsets: a slot more than 4 GiB into a page. */
    const struct kv_layout l = kv_layout_of(KV_FP8_584, 0);
    CHECK_ALL({kv_token_at(&l, INT64_C(10000000)), INT64_C(5760000000)},
              {kv_scales_at(&l, INT64_C(10000001), INT64_C(10000000)), INT64_C(5760000576) + 80000000});
}

/* ---- Writing ----------------------------------------------------------------------------------------- */

/* Integers that e4m3 represents, with their codes. */
static const struct {
    int8_t value;
    uint8_t code;
} exact_values[] = {
    {0, 0x00}, {1, 0x38},  {2, 0x40},  {3, 0x44},  {4, 0x48},  {5, 0x4a},   {6, 0x4c},  {7, 0x4e},
    {8, 0x50}, {-1, 0xb8}, {-3, 0xc4}, {-5, 0xca}, {12, 0x54}, {-14, 0xd6}, {15, 0x57}, {-8, 0xd0},
};

/* Fills one group: the first value is 448 · 2^k and fixes the scale 2^k; then exact values times 2^k. */
static void fill_group(float *values, uint8_t *codes, int32_t count, int k, int turn)
{
    const float scale = ldexpf(1.0f, k);
    values[0] = (turn & 1 ? -448.0f : 448.0f) * scale;
    codes[0] = turn & 1 ? 0xfe : 0x7e;
    for (int32_t i = 1; i < count; i++) {
        const int pick = (i * 7 + turn) & 15;
        values[i] = (float)exact_values[pick].value * scale;
        codes[i] = exact_values[pick].code;
    }
}

static void fill_rope(float *values, uint8_t *bytes)
{
    for (int32_t i = 0; i < 64; i++) {
        values[i] = (float)(i - 31) * 0.0625f;
        put16(bytes + 2 * i, (uint16_t)(num_bits(values[i]) >> 16)); /* six bits: nothing is lost */
    }
}

/* Sixteen e2m1 values times an e4m3 scale, s · 2^k / 8; the first is ±6, which fixes the scale. */
static void fill_fp4(float *values, uint8_t *codes, uint8_t *scale, int k, int turn)
{
    static const float e2m1[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const int s = 8 + turn % 8;
    uint8_t nibbles[16];
    *scale = (uint8_t)((k + 7) << 3 | (s - 8));
    for (int i = 0; i < 16; i++) {
        const int pick = i ? (i * 5 + turn) & 15 : 7 | (turn & 1) << 3;
        nibbles[i] = (uint8_t)pick;
        values[i] = (pick & 8 ? -1.0f : 1.0f) * e2m1[pick & 7] * ldexpf((float)s, k - 3);
    }
    for (int i = 0; i < 8; i++) codes[i] = (uint8_t)(nibbles[2 * i] | nibbles[2 * i + 1] << 4);
}

/* Puts the code of an integer below 128, which has an exponent and at most six bits of mantissa in both
 * 16-bit types. */
static void put_small(uint8_t *at, float x, bool half)
{
    const uint32_t u = num_bits(x),
                   of_half = (u >> 31) << 15 | ((u >> 23 & 255u) - 112u) << 10 | (u >> 13 & 1023u);
    put16(at, (uint16_t)(half && x != 0.0f ? of_half : u >> 16));
}

/* Puts one token's expected bytes where the format's description has them. */
static void assemble(const struct format *f, int64_t size, int64_t slot, float *values)
{
    uint8_t *const token = expected_page + f->token * slot, *const scales =
                                                                expected_page + scales_at(f, size, slot);
    for (int32_t i = 0; f->kind == NONE && i < f->d_qk; i++) {
        values[i] = (float)((i + slot) % 127 - 63);
        put_small(token + 2 * i, values[i], f->format == KV_FP16);
    }
    for (int g = 0; f->kind != NONE && g < quantised(f) / f->group; g++) {
        const int k = f->kind == OF_CACHE ? -4 : 3 * g % 31 - 9 + (int)(slot % 4), turn = g + (int)slot;
        if (f->kind == E4M3) {
            fill_fp4(values + 16 * g, token + 8 * g, scales + g, g % 12 - 6 + (int)(slot % 3), turn);
            continue;
        }
        fill_group(values + f->group * g, token + f->group * g, f->group, k, turn);
        if (f->kind == F32) put_f32(scales + 4 * g, ldexpf(1.0f, k));
        if (f->kind == UE8M0) scales[g] = (uint8_t)(127 + k);
    }
    if (f->format == KV_FP8_584) scales[7] = 0; /* a pad byte */
    if (f->rope) fill_rope(values + quantised(f), token + f->rope);
}

static void test_store(void)
{
    static float values[576];
    for (int f = 0; f < LAYOUTS; f++) {
        const struct kv_layout l = kv_layout_of(layouts[f].format, layouts[f].d_qk);
        for (int k = 0; k < PAGE_SIZES; k++) {
            const int64_t size = page_sizes[k];
            /* One token alone: the rest of the page stays poisoned. */
            const int64_t slots[] = {0, size / 2, size - 1};
            for (int n = 0; n < 3; n++) {
                poison();
                assemble(&layouts[f], size, slots[n], values);
                kv_store_token(&l, page, size, slots[n], values, 0.0625f);
                check_memory(layouts[f].name, size, slots[n]);
            }
            /* All tokens, backwards: no neighbour changes, and every byte of the page is written. */
            poison();
            for (int64_t slot = size; slot-- > 0;) {
                assemble(&layouts[f], size, slot, values);
                kv_store_token(&l, page, size, slot, values, 0.0625f);
            }
            check_memory(layouts[f].name, size, -1);
        }
    }
}

static void test_store_special(void)
{
    static float values[576];
    struct kv_layout l = kv_layout_of(KV_FP8_584, 0);
    /* Zeros get the smallest scale, 2^-13, and keep their signs; nothing of an old token remains. */
    poison();
    for (int i = 0; i < 512; i++) values[i] = i & 1 ? -0.0f : 0.0f;
    kv_store_token(&l, page, 1, 0, values, 1.0f);
    for (int i = 0; i < 448; i++) CHECK(page[i] == (i & 1 ? 0x80 : 0), "zero %d is %02x", i, page[i]);
    for (int g = 0; g < 7; g++) CHECK_EQ(page[576 + g], 114);
    CHECK_EQ(page[576 + 7], 0);
    /* Infinity: the largest scale, and ±448. NaN stays NaN and does not affect the scale. */
    for (int i = 0; i < 512; i++) values[i] = 1.0f;
    values[3] = INFINITY, values[64] = NAN, values[65] = -448.0f, values[511] = NAN;
    kv_store_token(&l, page, 1, 0, values, 1.0f);
    CHECK_ALL({page[3], 0x7e}, {page[4], 0}, {page[576], 254}, {page[64] & 0x7f, 0x7f}, {page[65], 0xfe},
              {page[66], 0x38}, {page[577], 127});
    CHECK(isnan(kv_load(&l, page, 1, 0, 511, 1.0f)), "a NaN of the RoPE part is %a",
          (double)kv_load(&l, page, 1, 0, 511, 1.0f));
    /* FP4: zeros get the smallest scale, 2^-9; infinity the largest, and ±6; a group with a NaN has a NaN
     * scale. */
    l = kv_layout_of(KV_FP4_288, 0);
    for (int i = 0; i < 512; i++) values[i] = 0.0f;
    values[16] = -INFINITY, values[17] = 1e30f, values[32] = NAN, values[33] = 6.0f, values[48] = 2700.0f;
    values[49] = -2016.0f, values[64] = 1.0f, values[65] = 0.25f, values[66] = 0.125f;
    kv_store_token(&l, page, 1, 0, values, 1.0f);
    CHECK_ALL({page[256], 1}, {page[0], 0}, {page[257], 0x7e}, {page[8], 0x7f}, {page[258], 0x7f},
              {page[16], 0}, {page[259], 0x7e}, {page[24], 0xe7}, {page[260], 0x23}, {page[32], 0x37},
              {page[33], 1});
    for (int i = 32; i < 48; i++) CHECK(isnan(kv_load(&l, page, 1, 0, i, 1.0f)), "value %d is no NaN", i);
    /* A cache-wide scale is given, not derived: larger values saturate. */
    l = kv_layout_of(KV_FP8_576, 0);
    for (int i = 0; i < 576; i++) values[i] = i & 1 ? -1000.0f : 1.0f;
    kv_store_token(&l, page, 1, 0, values, 0.5f);
    CHECK_ALL({page[0], 0x40}, {page[575], 0xfe});
}

/* ---- Reading ----------------------------------------------------------------------------------------- */

/* Returns e4m3 × scale, rounded to fp32 (through double, where it is exact). */
static uint32_t exact_product(uint8_t code, float scale)
{
    return num_bits((float)((double)num_from_e4m3(code) * (double)scale));
}

/* Returns bf16(e4m3 × scale). */
static uint32_t product(uint8_t code, float scale)
{
    return num_bits(num_from_bf16(num_to_bf16(num_float(exact_product(code, scale)))));
}

static void check_load(const struct kv_layout *l, const char *name, int64_t size, int64_t slot, int32_t i,
                       float cache_scale, uint32_t bits)
{
    const float came = kv_load(l, page, size, slot, i, cache_scale);
    const int same = num_bits(came) == bits || (isnan(came) && (bits & 0x7fffffffu) > 0x7f800000u);
    CHECK(same, "%s, page of %" PRId64 ", slot %" PRId64 ", value %d: %a, expected %a", name, size, slot, i,
          (double)came, (double)num_float(bits));
}

/* Returns the expected bits of value i of a slot, from the page's bytes. */
static uint32_t expected_load(const struct format *f, int64_t size, int64_t slot, int32_t i,
                              float cache_scale)
{
    static const float e2m1[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const uint8_t *const token = page + f->token * slot, *const scales = page + scales_at(f, size, slot);
    if (f->kind == OF_CACHE) return exact_product(token[i], cache_scale);
    if (f->kind == E4M3) {
        const int nibble = i % 2 ? token[i / 2] >> 4 : token[i / 2] & 15;
        const double value = (double)(nibble & 8 ? -e2m1[nibble & 7] : e2m1[nibble & 7]);
        return num_bits((float)(value * (double)num_from_e4m3(scales[i / 16]))); /* exact */
    }
    if (f->kind != NONE && i < quantised(f)) {
        float scale = num_from_ue8m0(scales[i / f->group]);
        if (f->kind == F32) memcpy(&scale, scales + 4 * (i / f->group), sizeof scale);
        return product(token[i], scale);
    }
    const uint8_t *const at = token + (f->rope ? f->rope + 2 * (i - quantised(f)) : 2 * i);
    const uint32_t code = at[0] | (uint32_t)at[1] << 8;
    return f->format == KV_FP16 ? num_bits(num_from_fp16((uint16_t)code)) : code << 16;
}

/* Fills in random bytes, then checks every value of every slot: a wrong offset, group or scale cannot
 * match. */
static void test_load(void)
{
    struct random_state random = {584656};
    for (int f = 0; f < LAYOUTS; f++) {
        const struct kv_layout l = kv_layout_of(layouts[f].format, layouts[f].d_qk);
        for (int k = 0; k < PAGE_SIZES; k++) {
            const int64_t size = page_sizes[k];
            for (size_t n = 0; n < sizeof memory; n++) memory[n] = (uint8_t)random_u64(&random);
            for (int64_t slot = 0; l.scale == KV_SCALE_F32 && slot < size; slot++)
                for (int g = 0; g < 4; g++) /* not powers of two, and all different */
                    put_f32(page + layouts[f].slot_bytes * slot + 512 + 4 * g,
                            (float)(0.001 + random_unit(&random)) * ldexpf(1.0f, 5 * g - 8));
            for (int64_t slot = 0; slot < size; slot++)
                for (int32_t i = 0; i < layouts[f].d_qk; i++)
                    check_load(&l, layouts[f].name, size, slot, i, 0.3f,
                               expected_load(&layouts[f], size, slot, i, 0.3f));
        }
    }
}

/* Checks every e4m3 code with every ue8m0 scale, the value computed in double. */
static void test_all_products(void)
{
    const struct kv_layout l = kv_layout_of(KV_FP8_584, 0);
    for (int v = 0; v < 256; v++) {
        memset(page + 576, 1, 8);
        page[576 + 3] = (uint8_t)v;
        for (int code = 0; code < 256; code++) {
            page[3 * 64] = (uint8_t)code;
            const float came = kv_load(&l, page, 1, 0, 3 * 64, 1.0f);
            const int magnitude = code & 127;
            if (v == 255 || magnitude == 127) {
                CHECK(isnan(came), "code %02x, scale %d: %a", code, v, (double)came);
                continue;
            }
            const double e4m3 =
                magnitude < 8 ? ldexp(magnitude, -9) : ldexp(8 + magnitude % 8, magnitude / 8 - 10);
            double value = ldexp(e4m3, v - 127);
            /* Four bits fit bf16 until the exponent is out of range: below 2^-133 round to even, at 2^128
             * infinity. */
            value = value >= 0x1p128   ? INFINITY
                    : value < 0x1p-126 ? ldexp(nearbyint(ldexp(value, 133)), -133)
                                       : value;
            CHECK((double)came == (code & 128 ? -value : value) && !signbit(came) == !(code & 128),
                  "code %02x, scale %d: %a, expected %a", code, v, (double)came, value);
        }
    }
}

/* ---- The golden pages -------------------------------------------------------------------------------- */

/* Draws values as golden/kvformat.py does. */
static float golden_value(int slot, int i)
{
    const uint32_t h = (uint32_t)(slot * 576 + i + 1) * 2654435761u;
    return ldexpf((float)((int32_t)(h >> 8 & 0xffffu) - 32768), (i / 64 * 5 + slot * 3) % 17 - 8 - 15);
}

static void test_golden(void)
{
    static const struct {
        const char *name;
        enum kv_format format;
        int bytes;
        uint64_t digest; /* as printed by kvformat.py, which prints the expected bytes with --bytes */
    } pages[KV_FORMATS] = {{"BF16", KV_BF16, 2304, 0xa8f67c6162fe6a08},
                           {"FP16", KV_FP16, 2304, 0x7d4db5fc4d512382},
                           {"FP8_656", KV_FP8_656, 1312, 0xc52ece23d5a5c955},
                           {"FP8_584", KV_FP8_584, 1168, 0xd12565ef5dce77d1},
                           {"FP8_576", KV_FP8_576, 1152, 0xd431f5a4c5518b87},
                           {"FP8_528", KV_FP8_528, 1056, 0xc80f596701341e85},
                           {"FP8_528_SPLIT", KV_FP8_528_SPLIT, 1056, 0x9bd1eeee38aeb2b5},
                           {"FP4_288", KV_FP4_288, 576, 0xf3f1eaae6190f18c},
                           {"FP4_288_SPLIT", KV_FP4_288_SPLIT, 576, 0x68ac2cceda49b4b4},
                           {"FP8_528_F32", KV_FP8_528_F32, 1056, 0x4780c716d5e63110}};
    static float values[576];
    for (int f = 0; f < KV_FORMATS; f++) {
        const struct kv_layout l = kv_layout_of(pages[f].format, 576);
        uint64_t digest = 0xcbf29ce484222325;
        poison();
        for (int slot = 0; slot < 2; slot++) {
            for (int i = 0; i < 576; i++) values[i] = golden_value(slot, i);
            kv_store_token(&l, page, 2, slot, values, 0.125f);
        }
        CHECK_EQ(2 * l.page_bytes_a_slot, pages[f].bytes);
        for (int n = 0; n < pages[f].bytes; n++) digest = (digest ^ page[n]) * 0x100000001b3;
        CHECK(digest == pages[f].digest, "%s: the page's digest is %" PRIx64, pages[f].name, digest);
        memcpy(expected_page, page, (size_t)pages[f].bytes);
        check_memory(pages[f].name, 2, -1); /* nothing else was written */
    }
}

int main(void)
{
    test_constants();
    test_store();
    test_store_special();
    test_load();
    test_all_products();
    test_golden();
    return check_done("test_kvformat");
}
