/* SPDX-License-Identifier: MIT */
#include "make.h"

#include "policy.h"

#include "elements.h"
#include "tokens.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    fmla_dtype dtype;
} elements[] = {[ELEMENT_BF16] = {"bf16", {FMLA_TYPE_BFLOAT, 16, 1}},
                [ELEMENT_FP16] = {"fp16", {FMLA_TYPE_FLOAT, 16, 1}},
                [ELEMENT_F32] = {"f32", {FMLA_TYPE_FLOAT, 32, 1}}};

const float made_cache_scale = 0.037f, made_q_scale = 0.0021f;

const char *products_name(int32_t products)
{
    static const char *const names[MADE_PRODUCTS] = {"bf16", "fp8", "codes"};
    return names[products];
}

bool products_fit(int32_t products, int32_t format, enum element type)
{
    if (products == MADE_BF16) return true;
    return type == ELEMENT_BF16 &&
           (format == FMLA_KV_FP8_576 || (format == FMLA_KV_FP8_656 && products == MADE_FP8));
}

const char *element_name(enum element type)
{
    return elements[type].name;
}

void make_fixed_lengths(const int32_t *lengths, int64_t b, int32_t *fixed)
{
    int64_t keys = 0;
    for (int64_t r = 0; r < b; r++) keys += lengths[r];
    for (int64_t r = 0; r < b; r++) fixed[r] = (int32_t)(keys / b + (r < keys % b));
}

/* ---- Sizes and types ------------------------------------------------------------------------- */

static int64_t pages_for(int64_t keys, int64_t page_size)
{
    return page_size ? (keys + page_size - 1) / page_size : 0;
}

static int64_t extra_keys(const struct shape *s)
{
    return s->extra_s_k ? s->extra_s_k : s->s_k;
}

static void sizes_of(const struct shape *s, int64_t size[DIMENSIONS])
{
    const bool dense = s->op == OP_DENSE_DECODE;
    const int64_t requests = s->op == OP_SPARSE_PREFILL ? 1 : s->b;
    const int64_t keys = operation_is_of_caches(s->op) ? s->tokens : s->s_k;
    const int64_t of_request = pages_for(keys, s->page_size);
    const int64_t s_q = operation_is_mha(s->op) && !s->s_q ? s->s_k : s->s_q;
    memset(size, 0, DIMENSIONS * sizeof *size);
    size[DIM_b] = s->b, size[DIM_s_q] = s_q, size[DIM_h_q] = s->h_q, size[DIM_h_kv] = s->h_kv;
    size[DIM_d_qk] = s->d_qk, size[DIM_d_v] = s->d_v ? s->d_v : CALL_D_V;
    size[DIM_s_k] = size[DIM_s_kv] = s->s_k, size[DIM_splits] = s->b + 1;
    size[DIM_tokens_q] = s->b * s_q, size[DIM_tokens_k] = s->b * s->s_k;
    size[DIM_pages] = s->tokens ? of_request : dense && !s->page_size ? s->b : requests * of_request;
    size[DIM_page_size] = dense && !s->page_size ? s->s_k : s->page_size, size[DIM_max_pages] = of_request;
    size[DIM_extra_pages] = s->op == OP_CACHE_CONVERT ? pages_for(keys, s->extra_page_size)
                                                      : s->b * pages_for(extra_keys(s), s->extra_page_size);
    size[DIM_extra_page_size] = s->extra_page_size;
    size[DIM_topk] = s->topk, size[DIM_extra_topk] = s->extra_topk, size[DIM_n] = s->parts;
    size[DIM_n_out] = s->part ? 1 : s->parts;
    size[DIM_tokens] = s->tokens, size[DIM_rope] = 64, size[DIM_width] = s->d_qk - 64;
    size[DIM_normed] = 512, size[DIM_max_positions] = s->tokens, size[DIM_turned] = 64;
    for (int i = 0; i < DIMENSIONS; i++) {
        const struct range range = descriptors[s->op].ranges[i];
        if (range.high && range.low == range.high) size[i] = range.low;
    }
}

/* Returns true if an optional tensor is present; tensors made inside a call are absent. */
static bool is_there(const struct shape *s, const struct member *member)
{
    const char *name = member->name;
    if (call_of_plan(member)) return false;
    if (!(member->allowed & ALLOW_NULL)) return true;
    if (!strcmp(name, "attn_sink") || !strcmp(name, "d_attn_sink")) return s->sink;
    if (!strcmp(name, "dlse")) return s->dlse;
    if (!strncmp(name, "seqused", 7)) return s->used;
    if (!strcmp(name, "out_last") || !strcmp(name, "lse_last")) return s->last;
    if (!strcmp(name, "kv_scale")) return s->format == FMLA_KV_FP8_576;
    if (!strcmp(name, "q_scale")) return s->products == MADE_CODES;
    if (!strcmp(name, "norm_weight")) return s->norm;
    if (!strcmp(name, "positions") || !strcmp(name, "rope_table")) return s->turns != FMLA_ROPE_NONE;
    if (!strcmp(name, "block_table")) return s->page_size > 0;
    if (!strcmp(name, "topk_length") || !strncmp(name, "cu_seqlens", 10)) return s->varlen;
    if (!strcmp(name, "extra_topk_length")) return s->extra_topk && (s->varlen || s->extra_varlen);
    if (!strncmp(name, "extra_", 6)) return s->extra_topk > 0;
    return strcmp(name, "lse") != 0 || !s->no_lse;
}

/* Returns the format FMLA_KV_… of a cache. */
static int32_t format_of(const struct shape *s, const struct member *cache)
{
    return cache->allowed & IS_SECOND && s->extra_format ? s->extra_format : s->format;
}

static fmla_dtype type_of(const struct shape *s, const struct member *member)
{
    const unsigned allowed = member->allowed & IS_CACHE ? cache_formats[format_of(s, member)].allowed
                                                        : member->allowed & ~(unsigned)ALLOW_SAME;
    if (!strcmp(member->name, "out_parts") || !strcmp(member->name, "out_last"))
        return elements[ELEMENT_F32].dtype;
    if (allowed & ALLOW_BYTES || (allowed & ALLOW_CODES && s->products == MADE_CODES))
        return dtype_of(FMLA_TYPE_UINT, 8);
    if (allowed & ALLOW_I32) return dtype_of(FMLA_TYPE_INT, 32);
    if (allowed & ALLOW_I64) return dtype_of(FMLA_TYPE_INT, 64);
    if (allowed & ALLOW_FLOATS && member->allowed & IS_CACHE) /* no format: the type of q */
        return elements[allowed & ALLOW_FP16 ? ELEMENT_FP16 : ELEMENT_BF16].dtype;
    const unsigned floats = allowed & ALLOW_FLOATS;
    return elements[floats == ALLOW_F32 ? ELEMENT_F32 : s->type].dtype;
}

/* Sets the shape of a present tensor and returns its rank. */
static int32_t shape_of(const struct shape *s, const int64_t size[DIMENSIONS], const struct member *member,
                        int64_t shape[MAX_DIMENSIONS])
{
    const struct form form = form_of(member, operation_is_mha(s->op) ? s->varlen : !s->page_size);
    for (int32_t d = 0; d < form.rank; d++) shape[d] = size[form.dimensions[d]];
    if (member->allowed & IS_CACHE && cache_formats[format_of(s, member)].token)
        shape[form.rank - 1] = cache_formats[format_of(s, member)].token;
    return form.rank;
}

double shape_bytes(const struct shape *s)
{
    const struct member *member;
    int64_t size[DIMENSIONS], shape[MAX_DIMENSIONS];
    double all = 0.0;
    sizes_of(s, size);
    for (int i = 0; (member = call_member(s->op, i)); i++) {
        if (!is_there(s, member)) continue;
        double bytes = element_bytes(type_of(s, member));
        for (int32_t d = shape_of(s, size, member, shape) - 1; d >= 0; d--) bytes *= (double)shape[d];
        all += bytes;
    }
    return all;
}

/* ---- Values ---------------------------------------------------------------------------------- */

static fmla_tensor *tensor_of(const struct making *m, const char *name)
{
    return (fmla_tensor *)call_tensor(m->call, name);
}

/* Returns the memory of a tensor; NULL if it is absent. */
static void *data_of(const struct making *m, const char *name)
{
    const fmla_tensor *tensor = tensor_of(m, name);
    return tensor ? tensor->data : NULL;
}

/* Draws sample i of a pool whose samples follow each other from `pool` on. */
static float pool_input(struct random_state pool, int64_t i, float mean)
{
    random_skip(&pool, RANDOM_NORMAL * i);
    return random_input(&pool, mean, 0.1f);
}

/* Fills with N(mean, 0.1²), clamped to [-1, 1], times `scale`: whole vectors are copied from random places
 * of a pool, because sampling each value would take longer than the computation. Blocks of the pool are drawn
 * when they are needed. */
static void fill_scaled(struct making *m, const char *name, float mean, float scale)
{
    enum { POOL = 1 << 15, LONGEST = 4096, BLOCK = 64 };
    static float pool[POOL]; /* sized for the widest type */
    bool drawn[POOL / BLOCK] = {false};
    const fmla_tensor *tensor = tensor_of(m, name);
    if (!tensor) return;
    const int64_t bytes = element_bytes(tensor->dtype), count = (int64_t)call_bytes(tensor) / bytes;
    const int64_t length = tensor->ndim > 1 ? tensor->shape[tensor->ndim - 1] : LONGEST;
    const struct random_state first = m->random;
    random_skip(&m->random, RANDOM_NORMAL * POOL);
    for (int64_t done = 0; done < count; done += length) {
        const int64_t now = count - done < length ? count - done : length;
        const int64_t from = random_between(&m->random, 0, POOL - LONGEST);
        for (int64_t block = from / BLOCK; block * BLOCK < from + now; block++) {
            for (int64_t i = block * BLOCK; !drawn[block] && i < (block + 1) * BLOCK; i++)
                element_store(pool, tensor->dtype, i, pool_input(first, i, mean) / scale);
            drawn[block] = true;
        }
        memcpy((char *)tensor->data + done * bytes, (const char *)pool + from * bytes, (size_t)(now * bytes));
    }
}

static void fill(struct making *m, const char *name, float mean)
{
    fill_scaled(m, name, mean, 1.0f);
}

static void fill_normal(struct making *m, const char *name, float deviation)
{
    const fmla_tensor *tensor = tensor_of(m, name);
    const int64_t count = tensor ? (int64_t)call_bytes(tensor) / 4 : 0;
    for (int64_t i = 0; i < count; i++) ((float *)tensor->data)[i] = deviation * random_normal(&m->random);
}

/* Fills the keys in pages. Quantised tokens, too, are copied from a pool. */
static void fill_cache(struct making *m, const char *name, float mean)
{
    enum { TOKENS = 512 };
    static uint8_t tokens[TOKENS][TOKENS_BYTES];
    bool drawn[TOKENS] = {false};
    const fmla_tensor *cache = tensor_of(m, name);
    const bool second = !strcmp(name, "extra_kv_cache") && m->shape->extra_format;
    const int32_t format = second ? m->shape->extra_format : m->shape->format;
    if (cache->dtype.bits != 8) {
        fill(m, name, mean);
        return;
    }
    const int64_t slots = cache->shape[0] * cache->shape[1], page_size = cache->shape[1];
    float values[TOKENS_WIDTH] = {0};
    const struct random_state first = m->random;
    random_skip(&m->random, RANDOM_NORMAL * TOKENS * TOKENS_WIDTH);
    for (int64_t i = 0; i < slots; i++) {
        const int64_t t = random_between(&m->random, 0, TOKENS - 1);
        for (int d = 0; !drawn[t] && d < TOKENS_WIDTH; d++)
            values[d] = pool_input(first, t * TOKENS_WIDTH + d, mean);
        if (!drawn[t]) tokens_store(format, tokens[t], 1, 0, values, made_cache_scale);
        drawn[t] = true;
        tokens_copy(format, (uint8_t *)cache->data + i / page_size * page_size * cache->shape[3], page_size,
                    i % page_size, tokens[t]);
    }
}

/* ---- Dense decode ---------------------------------------------------------------------------- */

static bool make_lengths(struct making *m, struct reason *reason)
{
    m->lengths = malloc((size_t)(m->shape->b + 1) * sizeof *m->lengths);
    return m->lengths || reason_set(reason, "no memory for the lengths");
}

static bool begin_dense(struct making *m, struct reason *reason)
{
    const struct shape *s = m->shape;
    if (!make_lengths(m, reason)) return false;
    for (int64_t r = 0; r < s->b; r++) {
        double length = (double)s->s_k;
        if (s->varlen) length += 0.5 * length * (double)random_normal(&m->random);
        if (length < (double)s->s_q) length = (double)s->s_q;
        if (length > 2.0 * (double)s->s_k) length = 2.0 * (double)s->s_k;
        m->lengths[r] = s->lengths ? s->lengths[r] : (int32_t)(s->varlen ? length : (double)s->s_k);
    }
    if (!s->page_size) return true;
    m->pages.page_size = s->page_size;
    if (!pages_deal(&m->pages, m->lengths, s->b, &m->random, reason)) return false;
    m->size[DIM_pages] = m->pages.count, m->size[DIM_max_pages] = m->pages.max_pages;
    return true;
}

static bool dense_values(struct making *m, struct reason *reason)
{
    (void)reason;
    const size_t entries = (size_t)(m->shape->b * m->pages.max_pages);
    memcpy(data_of(m, "seqlens"), m->lengths, (size_t)m->shape->b * sizeof *m->lengths);
    if (m->shape->page_size)
        memcpy(data_of(m, "block_table"), m->pages.block_table, entries * sizeof *m->pages.block_table);
    float *of_cache = data_of(m, "kv_scale"), *of_q = data_of(m, "q_scale");
    fill_scaled(m, "q", 0.0f, of_q ? made_q_scale : 1.0f);
    fill_cache(m, "kv_cache", 0.0f), fill(m, "attn_sink", 0.0f);
    if (of_cache) *of_cache = made_cache_scale;
    if (of_q) *of_q = made_q_scale;
    return true;
}

/* ---- The sparse operations ------------------------------------------------------------------- */

static bool begin_sparse(struct making *m, struct reason *reason)
{
    const double page_sizes[] = {(double)m->size[DIM_page_size], (double)m->size[DIM_extra_page_size]};
    const double pages[] = {(double)m->size[DIM_pages], (double)m->size[DIM_extra_pages]};
    for (int k = 0; k < 2; k++)
        if (pages[k] * page_sizes[k] > INT32_MAX)
            return reason_set(reason, "a cache of %.0f slots exceeds the range of int32 indices",
                              pages[k] * page_sizes[k]);
    return true;
}

/* The keys that a token may name: their number, the place of a request's keys, and the number of slots. */
struct named {
    int64_t keys, page_size, slots;
    const int32_t *table; /* NULL: in order */
    int32_t *order;       /* [keys] */
};

/* Draws a token's list: distinct keys in any order; entries beyond their number are invalid. */
static void draw_list(struct making *m, const struct named *from, int64_t topk, int32_t *list)
{
    const int32_t none[] = {-1, (int32_t)from->slots, 2147480000};
    for (int64_t i = 0; i < topk; i++) {
        list[i] = none[i % 3];
        if (i >= from->keys || (m->shape->holes && !random_between(&m->random, 0, 7))) continue;
        const int64_t j = random_between(&m->random, i, from->keys - 1);
        const int32_t key = from->order[j];
        from->order[j] = from->order[i], from->order[i] = key;
        list[i] =
            from->table
                ? (int32_t)(from->table[key / from->page_size] * from->page_size + key % from->page_size)
                : key;
    }
}

/* Draws the lists of all tokens and their lengths; `a_request` tokens share a row of `pages`, if given. */
static bool draw_lists(struct making *m, const char *const names[2], const struct pages *pages,
                       int64_t a_request, int64_t lengths, struct named *from, struct reason *reason)
{
    const fmla_tensor *indices = tensor_of(m, names[0]);
    const int64_t topk = indices->shape[2], lists = indices->shape[0] * indices->shape[1];
    int32_t *length = data_of(m, names[1]);
    from->order = malloc((size_t)(from->keys + 1) * sizeof *from->order);
    if (!from->order) return reason_set(reason, "no memory for the lists");
    for (int64_t i = 0; i < from->keys; i++) from->order[i] = (int32_t)i;
    for (int64_t l = 0; l < lists; l++) {
        if (pages) from->table = pages->block_table + l / a_request * pages->max_pages;
        draw_list(m, from, topk, (int32_t *)indices->data + l * topk);
    }
    for (int64_t r = 0; r < lengths; r++) { /* always drawn, so that later random values stay the same */
        const int32_t count = (int32_t)random_between(&m->random, 0, topk);
        if (length) length[r] = count;
    }
    free(from->order);
    return true;
}

static bool fill_pages(struct making *m, const char *cache, const char *const lists[2], int64_t keys,
                       struct reason *reason)
{
    const fmla_tensor *tensor = tensor_of(m, cache);
    if (!tensor) return true;
    const int64_t b = m->shape->b, page_size = tensor->shape[1];
    struct pages pages = {.page_size = page_size};
    struct named from = {.keys = keys, .page_size = page_size, .slots = tensor->shape[0] * page_size};
    int32_t *lengths = malloc((size_t)(b + 1) * sizeof *lengths);
    if (!lengths) return reason_set(reason, "no memory for the lengths");
    for (int64_t r = 0; r < b; r++) lengths[r] = (int32_t)keys;
    const bool good = pages_deal(&pages, lengths, b, &m->random, reason) &&
                      draw_lists(m, lists, &pages, m->shape->s_q, b, &from, reason);
    free(lengths), pages_free(&pages);
    if (good) fill_cache(m, cache, 0.0f);
    return good;
}

static bool sparse_values(struct making *m, struct reason *reason)
{
    static const char *const lists[] = {"indices", "topk_length"}, *const extra[] = {"extra_indices",
                                                                                     "extra_topk_length"};
    if (!fill_pages(m, "kv_cache", lists, m->shape->s_k, reason) ||
        !fill_pages(m, "extra_kv_cache", extra, extra_keys(m->shape), reason))
        return false;
    const fmla_tensor *q = tensor_of(m, "q");
    const int64_t count = (int64_t)call_bytes(q) / 2;
    for (int64_t i = 0; i < count; i++)
        element_store(q->data, q->dtype, i, random_input(&m->random, 0.0f, 1.0f));
    fill_normal(m, "attn_sink", 1.0f);
    return true;
}

/* Draws the inputs that docs/semantics.md ("Tolerances") defines: values around means in [-0.05, 0.05]. */
static bool prefill_values(struct making *m, struct reason *reason)
{
    static const char *const lists[] = {"indices", "topk_length"};
    const struct shape *s = m->shape;
    const int64_t paged = m->size[DIM_pages] * s->page_size;
    struct named from = {.keys = s->s_k, .slots = s->page_size ? paged : s->s_k};
    if (!draw_lists(m, lists, NULL, 1, s->s_q, &from, reason)) return false;
    const float of_q = (float)random_unit(&m->random) * 0.1f - 0.05f,
                of_kv = (float)random_unit(&m->random) * 0.1f - 0.05f;
    fill(m, "q", of_q), fill_cache(m, "kv", of_kv), fill_normal(m, "attn_sink", 1.0f);
    *(float *)call_option(m->call, "softmax_scale") = 0.5f;
    return true;
}

/* ---- Dense MHA ------------------------------------------------------------------------------- */

static bool begin_mha(struct making *m, struct reason *reason)
{
    const struct shape *s = m->shape;
    int64_t keys = 0;
    if (!s->varlen) return true;
    if (!make_lengths(m, reason)) return false;
    for (int64_t r = 0; r < s->b; r++) {
        m->lengths[r] = s->lengths ? s->lengths[r] : (int32_t)random_between(&m->random, s->s_k / 80, s->s_k);
        keys += m->lengths[r];
    }
    m->size[DIM_tokens_q] = s->s_q ? s->b * s->s_q : keys, m->size[DIM_tokens_k] = keys;
    if (keys > INT32_MAX || m->size[DIM_tokens_q] > INT32_MAX)
        return reason_set(reason,
                          "%" PRId64 " tokens and %" PRId64 " keys exceed the range of int32 cu_seqlens",
                          m->size[DIM_tokens_q], keys);
    return true;
}

/* Draws lengths in use. */
static void draw_used(struct making *m)
{
    int32_t *of_q = data_of(m, "seqused_q"), *of_k = data_of(m, "seqused_k");
    const struct shape *s = m->shape;
    for (int64_t r = 0; of_q && r < s->b; r++) {
        of_k[r] = (int32_t)random_between(&m->random, 0, s->varlen ? m->lengths[r] : s->s_k);
        of_q[r] = s->s_q ? (int32_t)random_between(&m->random, 0, s->s_q) : of_k[r];
    }
}

/* Sets tokens or keys that are not in use to NaN. */
static void fill_padding(struct making *m, const char *name, const char *of_starts, const char *of_used)
{
    const fmla_tensor *tensor = tensor_of(m, name);
    const int32_t *starts = data_of(m, of_starts), *used = data_of(m, of_used);
    if (!used || !tensor->shape[0]) return;
    const int64_t row = tensor->shape[tensor->ndim - 2] * tensor->shape[tensor->ndim - 1];
    for (int64_t r = 0; r < m->shape->b; r++) {
        const int64_t begin = starts ? starts[r] : r * tensor->shape[1];
        const int64_t end = starts ? starts[r + 1] : begin + tensor->shape[1];
        for (int64_t i = (begin + used[r]) * row; i < end * row; i++)
            element_store(tensor->data, tensor->dtype, i, NAN);
    }
}

static bool mha_values(struct making *m, struct reason *reason)
{
    (void)reason;
    int32_t *of_q = data_of(m, "cu_seqlens_q"), *of_k = data_of(m, "cu_seqlens_k");
    if (of_q) *of_q = *of_k = 0;
    for (int64_t r = 0; of_q && r < m->shape->b; r++) {
        of_q[r + 1] = of_q[r] + (m->shape->s_q ? (int32_t)m->shape->s_q : m->lengths[r]);
        of_k[r + 1] = of_k[r] + m->lengths[r];
    }
    draw_used(m);
    call_set_longest(m->call);
    fill(m, "q", 0.0f), fill(m, "k", 0.0f), fill(m, "v", 0.0f), fill_normal(m, "attn_sink", 1.0f);
    fill_padding(m, "q", "cu_seqlens_q", "seqused_q");
    fill_padding(m, "k", "cu_seqlens_k", "seqused_k"), fill_padding(m, "v", "cu_seqlens_k", "seqused_k");
    *(float *)call_option(m->call, "softmax_scale") = 1.0f / sqrtf((float)m->shape->d_qk + 100.0f);
    return true;
}

bool make_forward(const struct call *of, fmla_status *status, struct reason *reason)
{
    struct call forward;
    const struct member *member;
    call_begin(&forward, OP_MHA_FORWARD);
    forward.device = of->device;
    for (int i = 0; (member = call_member(OP_MHA_FORWARD, i)); i++) {
        const fmla_tensor *tensor = call_tensor(of, member->name);
        if (tensor) call_set(&forward, i, tensor->dtype, tensor->ndim, tensor->shape, tensor->data);
    }
    fmla_mha_forward_args *args = &forward.args.mha_forward;
    args->causal = *(int32_t *)call_option(of, "causal");
    args->softmax_scale = *(float *)call_option(of, "softmax_scale");
    args->max_s_q = *(int64_t *)call_option(of, "max_s_q");
    args->max_s_k = *(int64_t *)call_option(of, "max_s_k");
    args->stream = *(void **)call_option(of, "stream");
    const bool good = call_workspace(&forward, status, reason) &&
                      !call_refused(status, call_run(&forward), reason) &&
                      (!device_is_gpu(of->device) || call_wait(&forward, reason));
    args->stream = NULL; /* it belongs to the other call */
    call_close(&forward);
    return good;
}

static bool backward_values(struct making *m, struct reason *reason)
{
    fmla_status status;
    if (!mha_values(m, reason)) return false;
    fill(m, "dout", 0.0f), fill(m, "dlse", 0.0f);
    fill_padding(m, "dout", "cu_seqlens_q", "seqused_q");
    return m->shape->no_forward || make_forward(m->call, &status, reason);
}

/* ---- Merge and the cache operations ---------------------------------------------------------- */

static bool merge_values(struct making *m, struct reason *reason)
{
    (void)reason;
    const struct shape *s = m->shape;
    const int64_t rows = s->b * s->s_q * s->h_q;
    float *lse = data_of(m, "lse_parts");
    fill(m, "out_parts", 0.0f), fill_normal(m, "lse_parts", 2.0f), fill_normal(m, "attn_sink", 1.0f);
    fill(m, "out_last", 0.0f), fill_normal(m, "lse_last", 2.0f);
    *(int64_t *)call_option(m->call, "part") = s->part;
    for (int64_t i = 0; s->holes && i < s->parts * rows;
         i++) /* rows without keys in all parts, and in some */
        if (i % rows % 4 == 3 || !random_between(&m->random, 0, 7)) lse[i] = INFINITY;
    return true;
}

/* Tokens are consecutive within a page and pages are shuffled, as in an engine. The cache's bytes are from
 * 0x38 to 0x3f: e4m3, scales and 16-bit values are then ordinary numbers. */
static bool pages_values(struct making *m, const char *name, const char *of_slots, struct reason *reason)
{
    const fmla_tensor *cache = tensor_of(m, name);
    const int64_t pages = cache->shape[0], page_size = cache->shape[1];
    int64_t *slots = data_of(m, of_slots);
    int32_t *order = calloc((size_t)pages + 1, sizeof *order);
    if (!order) return reason_set(reason, "no memory for the pages");
    for (int64_t i = 0; i < pages; i++) order[i] = (int32_t)i;
    random_shuffle(&m->random, order, pages);
    for (int64_t t = 0; t < m->shape->tokens; t++)
        slots[t] = m->shape->holes && t % 7 == 3 ? -1 : order[t / page_size] * page_size + t % page_size;
    free(order);
    for (size_t i = 0; i < call_bytes(cache) / 8; i++)
        ((uint64_t *)cache->data)[i] = 0x3838383838383838u | (random_u64(&m->random) & 0x0707070707070707u);
    return true;
}

static bool convert_values(struct making *m, struct reason *reason)
{
    const struct shape *s = m->shape;
    if (s->format == FMLA_KV_FP8_576) *(float *)call_option(m->call, "src_scale") = made_cache_scale;
    if (s->extra_format == FMLA_KV_FP8_576) *(float *)call_option(m->call, "dst_scale") = made_cache_scale;
    return pages_values(m, "src_cache", "src_slots", reason) &&
           pages_values(m, "dst_cache", "dst_slots", reason);
}

static bool cache_values(struct making *m, struct reason *reason)
{
    const bool gather = m->shape->op == OP_CACHE_GATHER;
    if (!pages_values(m, "kv_cache", gather ? "slots" : "slot_mapping", reason)) return false;
    fill(m, "latent", 0.0f), fill(m, "rope", 0.0f);
    if (m->shape->norm) fill(m, "norm_weight", 1.0f), *(float *)call_option(m->call, "norm_eps") = 1e-6f;
    if (m->shape->turns) {
        int32_t *positions = data_of(m, "positions");
        for (int64_t t = 0; t < m->shape->tokens; t++) positions[t] = (int32_t)t;
        fmla_rope_table(data_of(m, "rope_table"), m->shape->tokens, 1e4);
        *(int32_t *)call_option(m->call, "rope_pairs") = m->shape->turns;
    }
    if (m->shape->format == FMLA_KV_FP8_576) *(float *)call_option(m->call, "cache_scale") = made_cache_scale;
    return true;
}

/* Numbers around 0, and factors other than 1. */
static bool plain_values(struct making *m, struct reason *reason)
{
    (void)reason;
    for (const struct member *member = descriptors[m->call->op].members; member->name; member++) {
        if (member->kind == MEMBER_REAL) *(float *)call_option(m->call, member->name) = 0.75f;
        if (member->kind == MEMBER_TENSOR && !(member->allowed & IS_OUTPUT)) fill(m, member->name, 0.0f);
    }
    return true;
}

/* ---- The call -------------------------------------------------------------------------------- */

static const struct maker {
    bool (*begin)(struct making *making, struct reason *reason); /* draws the values that sizes depend on */
    bool (*values)(struct making *making, struct reason *reason);
} makers[OPERATIONS + 1] = {
    [OP_DENSE_DECODE] = {begin_dense, dense_values},
    [OP_SPARSE_DECODE] = {begin_sparse, sparse_values},
    [OP_SPARSE_PREFILL] = {begin_sparse, prefill_values},
    [OP_MHA_FORWARD] = {begin_mha, mha_values},
    [OP_MHA_BACKWARD] = {begin_mha, backward_values},
    [OP_MERGE] = {NULL, merge_values},
    [OP_CACHE_APPEND] = {NULL, cache_values},
    [OP_CACHE_GATHER] = {NULL, cache_values},
    [OP_CACHE_CONVERT] = {NULL, convert_values},
    [OPERATIONS] = {NULL, plain_values},
};

/* Other operations read the keys of requests of some lengths, as dense decode does, or only numbers. */
static const struct maker *maker_of(enum operation op)
{
    const enum operation like = takes_lengths(op) ? OP_DENSE_DECODE : OPERATIONS;
    return &makers[makers[op].values ? op : like];
}

bool make_begin(struct making *m, struct call *call, const struct shape *s, struct reason *reason)
{
    const struct member *member;
    *m = (struct making){.call = call, .shape = s, .random = {s->seed + 2025}};
    call_begin(call, s->op);
    sizes_of(s, m->size);
    const struct maker *maker = maker_of(s->op);
    if (maker->begin && !maker->begin(m, reason)) return false;
    for (int i = 0; (member = call_member(s->op, i)); i++) {
        int64_t shape[MAX_DIMENSIONS];
        if (!is_there(s, member)) continue;
        const int32_t rank = shape_of(s, m->size, member, shape);
        call_set(call, i, type_of(s, member), rank, shape, NULL);
    }
    int32_t *causal = call_option(call, "causal"), *format = call_option_of(call, MEMBER_FORMAT),
            *second = call_option_of(call, MEMBER_SECOND_FORMAT), *products = call_option(call, "products");
    if (products) *products = s->products ? FMLA_PRODUCTS_FP8 : FMLA_PRODUCTS_BF16;
    if (causal) *causal = s->causal;
    if (format) *format = s->format;
    if (second && (s->extra_topk || s->op == OP_CACHE_CONVERT)) *second = s->extra_format;
    return true;
}

bool make_memory(struct making *m, struct reason *reason)
{
    const struct member *member;
    for (int i = 0; (member = call_member(m->call->op, i)); i++)
        if (m->call->tensor[i].shape && !(member->allowed & IS_OUTPUT && !(member->allowed & IS_CACHE)) &&
            !call_allocate(m->call, i, reason))
            return false;
    return true;
}

bool make_values(struct making *m, struct reason *reason)
{
    return maker_of(m->call->op)->values(m, reason);
}

void make_end(struct making *m)
{
    free(m->lengths), pages_free(&m->pages);
    m->lengths = NULL;
}

bool make_call(struct call *call, const struct shape *shape, struct reason *reason)
{
    struct making making;
    const bool good = make_begin(&making, call, shape, reason) && make_memory(&making, reason) &&
                      make_values(&making, reason) && call_make_results(call, reason);
    make_end(&making);
    return good;
}
