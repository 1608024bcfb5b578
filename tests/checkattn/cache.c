/* SPDX-License-Identifier: MIT
 *
 * Cache append and gather against the oracle, byte by byte. The cache of a case is one block of memory, canaries and gaps
 * between pages included; the oracle has a copy of it, and afterwards both are compared whole, so that every byte that is
 * wrong, missing or not the call's to write shows. Of a NaN that was gathered only that it is one is compared.
 */
#include "cache.h"
#include "cache_far.h"
#include "device.h"
#include "grid.h"
#include "kvformat.h"
#include "num.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FRONT = 256 };

static const float cache_scales[CACHE_SCALES] = {0.0f, 0.25f, 0.037f, 3.1e-33f, 2.7e31f};

static struct axis axes[C_GATHER] = {
    {"format", 5, {FMLA_KV_BF16, FMLA_KV_FP16, FMLA_KV_FP8_656, FMLA_KV_FP8_584, FMLA_KV_FP8_576}},
    {"vectors", 3, {0 /* bf16 */, 1 /* fp16 */, 2 /* fp32 */}},
    {"tokens", 4, {0, 1, 128, 4097}},
    {"page_size", 5, {1, 2, 61, 64, 256}},
    {"cache", 4, {CACHE_DENSE, CACHE_PADDED, CACHE_ODD, CACHE_SPREAD}},
    {"layout", 3, {LAYOUT_CONTIGUOUS, LAYOUT_PADDED, LAYOUT_ODD}},
    {"rope apart", 2, {0, 1}},
    {"d_qk", 6, {512, 576, 1, 40, 130, 1040}}, /* of bf16 and fp16 */
    {"values", 3, {VALUES_NORMAL, VALUES_HOSTILE, VALUES_ALL}},
    {"scale", CACHE_SCALES, {0, 1, 2, 3, 4}}, /* of FP8_576 */
    {"slots", 3, {SLOTS_DISTINCT, SLOTS_SKIPPED, SLOTS_TWICE}},
    {"graph", 2, {0, 1}},
    {"own threads", 2, {0, 1}},
};

/* ---- The grid ------------------------------------------------------------------------------- */

static int64_t value_of(const int *choice, int axis)
{
    return choice[axis] < 0 ? -1 : axes[axis].values[choice[axis]];
}

static bool is_16_bit(int64_t format)
{
    return format == FMLA_KV_BF16 || format == FMLA_KV_FP16;
}

/* Sizes are bf16's and fp16's to choose, a scale FP8_576's; other formats have the first of the list. */
static bool possible(const int *choice)
{
    const int64_t format = value_of(choice, C_FORMAT), d_qk = value_of(choice, C_D_QK);
    const bool known = format >= 0, sized = choice[C_D_QK] > 0, scaled = choice[C_SCALE] > 0;
    if (sized && (scaled || (known && !is_16_bit(format)))) return false;
    if (scaled && known && format != FMLA_KV_FP8_576) return false;
    if (sized && d_qk <= 64 && value_of(choice, C_ROPE) == 1) return false;
    return !(format == FMLA_KV_FP8_584 && value_of(choice, C_CACHE) == CACHE_SPREAD);
}

static bool counts(const int *choice, int i, int j)
{
    return value_of(choice, C_TOKENS) || i == C_TOKENS || j == C_TOKENS;
}

static double cost(const int *choice)
{
    return (double)value_of(choice, C_TOKENS);
}

/* ---- A case --------------------------------------------------------------------------------- */

struct cache_case {
    bool gather; /* which of the two is checked */
    struct kv_layout layout;
    int64_t d_qk, pages, page_size, slots;
    int64_t shape[4], strides[4];
    fmla_tensor tensor;           /* the cache under test */
    unsigned char *memory, *copy; /* of the kernel, of the oracle */
    size_t bytes;
    struct guarded latent, rope, out, ref_out, slot_list;
};

static const fmla_dtype dtype_i64 = {FMLA_TYPE_INT, 64, 1}, dtype_u8 = {FMLA_TYPE_UINT, 8, 1};
static const fmla_dtype *const elements[] = {&dtype_bf16, &dtype_fp16, &dtype_f32};

static void *must_alloc(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory) return memory;
    fprintf(stderr, "checkattn: out of memory for %zu bytes\n", bytes);
    exit(1);
}

/* Random bytes everywhere; the scales that a reader may be given are positive and finite. */
static void make_cache(struct cache_case *c, const int64_t v[C_AXES], struct random_state *random)
{
    const bool wide = is_16_bit(v[C_FORMAT]);
    const int64_t element = wide ? 2 : 1, kind = v[C_CACHE];
    c->layout = kv_layout_of((enum kv_format)(v[C_FORMAT] - 1), (int32_t)v[C_D_QK]);
    c->d_qk = kv_width(&c->layout), c->page_size = v[C_PAGE_SIZE];
    c->pages = (v[C_TOKENS] + v[C_TOKENS] / 8 + c->page_size) / c->page_size + 1;
    c->slots = c->pages * c->page_size;
    const int64_t of_slot = c->layout.page_bytes_a_slot / element;
    const int64_t slot_stride = of_slot + (kind == CACHE_SPREAD ? 48 : 0);
    const int64_t gap = kind == CACHE_PADDED ? 64 : kind == CACHE_ODD ? 3 : kind == CACHE_SPREAD ? 16 : 0;
    const int64_t page_stride = c->page_size * slot_stride + gap;
    const int64_t shape[4] = {c->pages, c->page_size, 1, of_slot},
                  strides[4] = {page_stride, slot_stride, slot_stride, 1};
    memcpy(c->shape, shape, sizeof shape), memcpy(c->strides, strides, sizeof strides);
    c->bytes = (size_t)(c->pages * page_stride * element) + 2 * (size_t)FRONT;
    c->memory = must_alloc(c->bytes), c->copy = must_alloc(c->bytes);
    for (size_t i = 0; i < c->bytes; i++) c->memory[i] = (unsigned char)random_u64(random);
    const int64_t shift = kind == CACHE_ODD ? element : 0;
    c->tensor = (fmla_tensor){.data = c->memory + FRONT,
                              .device = {FMLA_DEVICE_CPU, 0},
                              .ndim = 4,
                              .dtype = !wide                         ? dtype_u8
                                       : v[C_FORMAT] == FMLA_KV_BF16 ? dtype_bf16
                                                                     : dtype_fp16,
                              .shape = c->shape,
                              .byte_offset = (uint64_t)shift,
                              .strides = c->strides};
    for (int64_t s = 0; c->layout.scale == KV_SCALE_F32 && s < c->slots; s++)
        for (int i = 0; i < c->layout.scales; i++) {
            const float scale = num_float((uint32_t)random_between(random, 1, 0x7f7fffff));
            memcpy(c->memory + FRONT + shift + s / c->page_size * page_stride +
                       s % c->page_size * slot_stride + c->layout.scale_offset + 4 * i,
                   &scale, sizeof scale);
        }
    memcpy(c->copy, c->memory, c->bytes);
}

static float hostile(struct random_state *random)
{
    static const uint32_t bits[] = {0x7fc00000, 0xffc00000, 0x7f810000, 0xffbfffff, 0x7f800000, 0xff800000,
                                    0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x7f7fffff, 0xff7f0000,
                                    0x477ff000, 0x477fefff, 0x33000000, 0x33000001, 0x38800000, 0x387fffff,
                                    0x43e80000, 0xc3e80001, 0x43e00000, 0x3f600000, 0x3f600001, 0x3a800000};
    const int64_t which = random_between(random, 0, 3 * (int64_t)(sizeof bits / sizeof bits[0]));
    return which < (int64_t)(sizeof bits / sizeof bits[0]) ? num_float(bits[which]) : random_normal(random);
}

/* Element `number` of all of a case. VALUES_ALL: every pattern of 16 bits after the other, so that those of a group have
 * about the same size. */
static void put_value(char *at, int64_t element, int64_t values, int64_t number, float size,
                      struct random_state *random)
{
    const uint16_t pattern = (uint16_t)number;
    const uint32_t wide = (uint32_t)pattern << 16 | (uint32_t)(random_u64(random) & 0xffff);
    float x = size * random_normal(random);
    uint16_t narrow;
    if (values == VALUES_HOSTILE) x = hostile(random);
    if (values == VALUES_ALL) x = num_float(wide);
    narrow = values == VALUES_ALL ? pattern : element == 0 ? num_to_bf16(x) : num_to_fp16(x);
    if (element == 2)
        memcpy(at, &x, sizeof x);
    else
        memcpy(at, &narrow, sizeof narrow);
}

static void fill_vectors(struct cache_case *c, const int64_t v[C_AXES], struct random_state *random)
{
    const int64_t bytes = v[C_ELEMENT] == 2 ? 4 : 2, of_latent = c->latent.shape[1];
    for (int64_t t = 0; t < v[C_TOKENS]; t++) {
        float size = 1.0f;
        for (int64_t i = 0; i < c->d_qk; i++) {
            if (i % 64 == 0) size = ldexpf(1.0f, (int)random_between(random, -20, 12));
            char *at = i < of_latent ? (char *)guarded_at(&c->latent, t, 0, 0, 0) + i * bytes
                                     : (char *)guarded_at(&c->rope, t, 0, 0, 0) + (i - of_latent) * bytes;
            put_value(at, v[C_ELEMENT], v[C_VALUES], t * c->d_qk + i, size, random);
        }
    }
}

static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b) {
        const int64_t rest = a % b;
        a = b, b = rest;
    }
    return a;
}

/* Distinct slots in a random order, by steps that share no divisor with their number. */
static void fill_slots(struct cache_case *c, const int64_t v[C_AXES], bool any, struct random_state *random)
{
    static const int64_t outside[] = {-2, INT64_MIN, INT64_MAX, INT64_C(1) << 32};
    int64_t step = random_between(random, 1, c->slots);
    while (common_divisor(step, c->slots) != 1) step++;
    const int64_t first = random_between(random, 0, c->slots - 1);
    int64_t *slot = guarded_at(&c->slot_list, 0, 0, 0, 0);
    for (int64_t t = 0; t < v[C_TOKENS]; t++) {
        slot[t] = (first + t * step) % c->slots;
        if (v[C_SLOTS] == SLOTS_SKIPPED && t % 3 == 1)
            slot[t] = any && t % 2 ? (t % 5 ? outside[t % 4] : c->slots) : -1;
        if (v[C_SLOTS] == SLOTS_TWICE && t % 2) slot[t] = slot[t / 2];
    }
}

static void case_make(struct cache_case *c, const int64_t v[C_AXES], bool any, struct random_state *random)
{
    const enum layout layout = (enum layout)v[C_VECTORS];
    const bool gather = c->gather;
    memset(c, 0, sizeof *c);
    c->gather = gather;
    make_cache(c, v, random);
    guarded_make(&c->slot_list, dtype_i64, 1, &v[C_TOKENS],
                 layout == LAYOUT_ODD ? LAYOUT_ODD : LAYOUT_CONTIGUOUS);
    fill_slots(c, v, any, random);
    if (c->gather) {
        const int64_t shape[] = {v[C_TOKENS], c->d_qk};
        guarded_make(&c->out, *elements[v[C_ELEMENT]], 2, shape, layout);
        guarded_make(&c->ref_out, *elements[v[C_ELEMENT]], 2, shape, LAYOUT_CONTIGUOUS);
        return;
    }
    const int64_t shape[] = {v[C_TOKENS], v[C_ROPE] ? c->d_qk - 64 : c->d_qk}, of_rope[] = {v[C_TOKENS], 64};
    guarded_make(&c->latent, *elements[v[C_ELEMENT]], 2, shape, layout);
    if (v[C_ROPE]) guarded_make(&c->rope, *elements[v[C_ELEMENT]], 2, of_rope, layout);
    fill_vectors(c, v, random);
}

static void case_free(struct cache_case *c)
{
    struct guarded *all[] = {&c->latent, &c->rope, &c->out, &c->ref_out, &c->slot_list};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) guarded_free(all[i]);
    free(c->memory), free(c->copy);
}

/* ---- Calls ---------------------------------------------------------------------------------- */

static fmla_cache_append_args append_args(const struct cache_case *c, const int64_t v[C_AXES])
{
    fmla_cache_append_args args = FMLA_INIT(fmla_cache_append_args);
    args.latent = &c->latent.tensor, args.rope = v[C_ROPE] ? &c->rope.tensor : NULL;
    args.kv_cache = &c->tensor, args.slot_mapping = &c->slot_list.tensor;
    args.kv_format = (int32_t)v[C_FORMAT];
    if (v[C_FORMAT] == FMLA_KV_FP8_576) args.cache_scale = cache_scales[v[C_SCALE]];
    return args;
}

static fmla_cache_gather_args gather_args(const struct cache_case *c, const int64_t v[C_AXES])
{
    fmla_cache_gather_args args = FMLA_INIT(fmla_cache_gather_args);
    args.kv_cache = &c->tensor, args.slots = &c->slot_list.tensor, args.out = &c->out.tensor;
    args.kv_format = (int32_t)v[C_FORMAT];
    if (v[C_FORMAT] == FMLA_KV_FP8_576) args.cache_scale = cache_scales[v[C_SCALE]];
    return args;
}

/* The oracle's result: in the copy of the cache, or in ref_out. On a GPU slots outside the cache are skipped; the oracle
 * is a kernel of the CPU, which refuses them. */
static fmla_status call_oracle(struct cache_case *c, const int64_t v[C_AXES])
{
    fmla_status status;
    if (c->gather) {
        fmla_cache_gather_args args = gather_args(c, v);
        args.out = &c->ref_out.tensor, args.kernel = "ref";
        return fmla_cache_gather(&args);
    }
    fmla_cache_append_args args = append_args(c, v);
    fmla_tensor cache = c->tensor, slots = c->slot_list.tensor;
    int64_t *all = malloc((size_t)(v[C_TOKENS] + 1) * sizeof *all),
            *given = guarded_at(&c->slot_list, 0, 0, 0, 0);
    for (int64_t t = 0; t < v[C_TOKENS]; t++) all[t] = given[t] < 0 || given[t] >= c->slots ? -1 : given[t];
    cache.data = c->copy + FRONT;
    slots.data = all, slots.byte_offset = 0;
    args.kv_cache = &cache, args.slot_mapping = &slots, args.kernel = "ref";
    status = fmla_cache_append(&args);
    free(all);
    return status;
}

static fmla_status call(const struct cache_case *c, const fmla_cache_append_args *append,
                        const fmla_cache_gather_args *gathered)
{
    return c->gather ? fmla_cache_gather(gathered) : fmla_cache_append(append);
}

/* Bytes from the first of the cache to behind its last token: what a call may touch. */
static size_t extent_of(const struct cache_case *c, const int64_t v[C_AXES])
{
    const int64_t element = is_16_bit(v[C_FORMAT]) ? 2 : 1;
    return (size_t)((int64_t)c->tensor.byte_offset +
                    element *
                        ((c->pages - 1) * c->strides[0] + (c->page_size - 1) * c->strides[1] + c->shape[3]));
}

static fmla_status call_on_device(struct cache_case *c, const int64_t v[C_AXES], bool gpu, const char *kernel)
{
    struct device_blocks blocks = {0};
    fmla_tensor tensor[4];
    if (gpu)
        device_add(&blocks, c->memory, c->bytes);
    else
        device_add(&blocks, c->memory + FRONT, extent_of(c, v));
    struct guarded *all[] = {&c->latent, &c->rope, &c->out, &c->slot_list};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) device_add_guarded(&blocks, all[i]);
    fmla_cache_append_args append = append_args(c, v);
    fmla_cache_gather_args gathered = gather_args(c, v);
    append.kernel = gathered.kernel = kernel;
    append.kv_cache = gathered.kv_cache = device_tensor(&blocks, &c->tensor, &tensor[0]);
    append.slot_mapping = gathered.slots = device_tensor(&blocks, &c->slot_list.tensor, &tensor[1]);
    if (c->gather)
        gathered.out = device_tensor(&blocks, gathered.out, &tensor[2]);
    else
        append.latent = device_tensor(&blocks, append.latent, &tensor[2]),
        append.rope = device_tensor(&blocks, append.rope, &tensor[3]);
    void *stream = append.stream = gathered.stream = device_stream_open(), *graph = NULL;
    const bool captured = v[C_GRAPH] && v[C_TOKENS]; /* else nothing is sent */
    if (captured) device_capture_begin(stream);
    const fmla_status status = call(c, &append, &gathered);
    if (captured) {
        graph = device_capture_end(stream);
        if (!status) device_launch(graph, stream);
    }
    if (!status) device_wait(stream);
    device_down(&blocks, NULL);
    device_graph_close(graph);
    device_stream_close(stream);
    device_free(&blocks);
    return status;
}

/* ---- Faults ---------------------------------------------------------------------------------- */

/* Where a token of the call lies in the cache; NULL without one. */
static unsigned char *some_token(struct cache_case *c, const int64_t v[C_AXES])
{
    const int64_t slot =
        v[C_TOKENS] ? ((const int64_t *)guarded_at(&c->slot_list, 0, 0, 0, 0))[v[C_TOKENS] / 2] : -1;
    if (slot < 0 || slot >= c->slots) return NULL;
    const int64_t element = is_16_bit(v[C_FORMAT]) ? 2 : 1;
    const int64_t in_page = c->layout.scale_bytes ? slot % c->page_size * c->layout.token_bytes
                                                  : slot % c->page_size * c->strides[1] * element;
    return c->memory + FRONT + c->tensor.byte_offset + slot / c->page_size * c->strides[0] * element +
           in_page;
}

static void plant(const struct run *run, struct cache_case *c, const int64_t v[C_AXES], struct tally *tally)
{
    unsigned char *token = some_token(c, v), *planted = NULL;
    const int64_t page = c->strides[0] * (is_16_bit(v[C_FORMAT]) ? 2 : 1);
    switch (run->fault) {
    case FAULT_CACHE_VALUE: planted = token; break;
    case FAULT_CACHE_SCALE:
        if (token && c->layout.scale == KV_SCALE_F32) planted = token + c->layout.scale_offset + 3;
        break;
    case FAULT_CACHE_GAP:
        if (v[C_CACHE] == CACHE_PADDED) planted = c->memory + FRONT + page - 1;
        break;
    case FAULT_GATHER_VALUE:
        if (v[C_TOKENS] > 1) planted = guarded_at(&c->out, v[C_TOKENS] / 2, c->d_qk / 2, 0, 0);
        break;
    case FAULT_GATHER_ZERO:
        if (v[C_TOKENS] > 1 && v[C_SLOTS] == SLOTS_SKIPPED) planted = guarded_at(&c->out, 1, 0, 0, 0);
        break;
    default: break;
    }
    if (!planted) return;
    *planted ^= 1;
    tally->planted = true;
}

/* Two tokens change places before the call. */
static void plant_slots(const struct run *run, struct cache_case *c, const int64_t v[C_AXES],
                        struct tally *tally)
{
    if (run->fault != FAULT_CACHE_SLOT || v[C_TOKENS] < 2 || v[C_SLOTS] != SLOTS_DISTINCT) return;
    if (v[C_VALUES] != VALUES_NORMAL) return; /* others may be the same */
    int64_t *slot = guarded_at(&c->slot_list, 0, 0, 0, 0);
    const int64_t first = slot[0];
    slot[0] = slot[1], slot[1] = first;
    tally->planted = true;
}

/* ---- Comparison ------------------------------------------------------------------------------ */

static bool is_nan(const char *at, int64_t element)
{
    uint16_t narrow;
    float wide = 0.0f;
    memcpy(&narrow, at, sizeof narrow);
    if (element == 2) memcpy(&wide, at, sizeof wide);
    return isnan(element == 0 ? num_from_bf16(narrow) : element == 1 ? num_from_fp16(narrow) : wide);
}

static void compare_out(const struct run *run, const struct cache_case *c, const int64_t v[C_AXES],
                        const char *name, struct tally *tally)
{
    const int64_t bytes = v[C_ELEMENT] == 2 ? 4 : 2;
    int64_t wrong = 0, token = 0, value = 0;
    for (int64_t t = 0; t < v[C_TOKENS]; t++, tally->rows++)
        for (int64_t i = 0; i < c->d_qk; i++) {
            const char *mine = (const char *)guarded_at(&c->out, t, 0, 0, 0) + i * bytes,
                       *theirs = (const char *)guarded_at(&c->ref_out, t, 0, 0, 0) + i * bytes;
            if (!memcmp(mine, theirs, (size_t)bytes)) continue;
            if (is_nan(mine, v[C_ELEMENT]) && is_nan(theirs, v[C_ELEMENT])) continue;
            if (!wrong++) token = t, value = i;
        }
    char what[160];
    snprintf(what, sizeof what, "%lld values differ from the oracle's, the first is value %lld of token %lld",
             (long long)wrong, (long long)value, (long long)token);
    if (wrong) report(tally, run, name, what);
    if (!guarded_intact(&c->out))
        report(tally, run, name, "bytes outside the tensor's elements were written");
}

static void compare_cache(const struct run *run, const struct cache_case *c, const char *name,
                          struct tally *tally)
{
    int64_t wrong = 0;
    size_t first = 0;
    for (size_t i = 0; i < c->bytes; i++)
        if (c->memory[i] != c->copy[i] && !wrong++) first = i;
    char what[200];
    snprintf(what, sizeof what,
             "%lld bytes of the cache and around it differ from the oracle's, the first is byte %lld: %#x, "
             "not %#x",
             (long long)wrong, (long long)first - FRONT, c->memory[first], c->copy[first]);
    if (wrong) report(tally, run, name, what);
}

void cache_check(const struct run *run, const int64_t v[C_AXES], uint64_t seed, struct tally *tally)
{
    struct random_state random = {seed};
    struct cache_case c = {.gather = v[C_GATHER]};
    char name[256];
    size_t used = 0;
    for (int i = 0; i < C_GATHER; i++)
        used += (size_t)snprintf(name + used, sizeof name - used, "%s%s %lld", i ? ", " : "", axes[i].name,
                                 (long long)v[i]);
    case_make(&c, v, c.gather || on_gpu(run), &random);
    if (call_oracle(&c, v)) report(tally, run, name, fmla_last_error());
    plant_slots(run, &c, v, tally);
    fmla_cache_append_args append = append_args(&c, v);
    fmla_cache_gather_args gathered = gather_args(&c, v);
    append.kernel = gathered.kernel = forced_kernel(run);
    use_threads(run, v[C_THREADS] ? THREADS_OWN : THREADS_BUILT_IN);
    if (is_apart(run->device) ? call_on_device(&c, v, on_gpu(run), forced_kernel(run))
                              : call(&c, &append, &gathered))
        report(tally, run, name, fmla_last_error());
    use_threads(run, THREADS_BUILT_IN);
    tally->cases++;
    plant(run, &c, v, tally);
    if (c.gather)
        compare_out(run, &c, v, name, tally);
    else
        tally->rows += v[C_TOKENS];
    compare_cache(run, &c, name, tally); /* gather leaves it as it was */
    case_free(&c);
}

/* Every pattern of bf16 and fp16, and as many of fp32, into (or out of) every format; then pages that are far apart. */
static void check_apart_from_grid(const struct run *run, bool gather, struct tally *tally)
{
    tally->number = 0;
    for (int format = FMLA_KV_BF16; format <= FMLA_KV_FP8_576; format++)
        for (int element = 0; element < 3; element++)
            for (int scale = 0; scale < (format == FMLA_KV_FP8_576 ? CACHE_SCALES : 1); scale++) {
                const int64_t v[C_AXES] = {[C_GATHER] = gather,    [C_FORMAT] = format,
                                           [C_ELEMENT] = element,  [C_TOKENS] = 129,
                                           [C_PAGE_SIZE] = 64,     [C_D_QK] = 576,
                                           [C_SCALE] = scale,      [C_ROPE] = !gather && element,
                                           [C_VALUES] = VALUES_ALL};
                cache_check(run, v, run->seed + (uint64_t)format, tally);
            }
    check_cache_far(run, gather, tally);
}

static void check_cache(const struct run *run, bool gather, struct tally *tally)
{
    axes[C_THREADS].count = on_gpu(run) ? 1 : 2;
    axes[C_GRAPH].count = on_gpu(run) ? 2 : 1;
    axes[C_ROPE].count = gather ? 1 : 2;
    /* Which of the tokens of one slot stays is not said of a GPU; reading one twice is. */
    axes[C_SLOTS].count = on_gpu(run) && !gather ? 2 : 3;
    struct grid grid = {.axes = C_GATHER,
                        .axis = axes,
                        .possible = possible,
                        .cost = cost,
                        .counts = counts,
                        .dear = 5000,
                        .random = {run->seed}};
    grid_begin(&grid);
    int choice[GRID_AXES];
    for (uint64_t i = 1; grid_next(&grid, choice); i++) {
        int64_t v[C_AXES] = {[C_GATHER] = gather};
        for (int a = 0; a < C_GATHER; a++) v[a] = value_of(choice, a);
        if (wants_case(run, tally, i)) cache_check(run, v, run->seed * 1000003 + i, tally);
        if (run->most_cases && (int64_t)i >= run->most_cases) break;
        if (run->fault != FAULT_NONE && tally->planted) break;
    }
    tally->pairs += grid.pairs, tally->covered += grid.covered;
    grid_end(&grid);
    if (!wants_grid_only(run) && run->fault == FAULT_NONE && !run->most_cases)
        check_apart_from_grid(run, gather, tally);
}

void check_cache_append(const struct run *run, struct tally *tally)
{
    check_cache(run, false, tally);
}

void check_cache_gather(const struct run *run, struct tally *tally)
{
    check_cache(run, true, tally);
}
