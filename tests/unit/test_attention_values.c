/* SPDX-License-Identifier: MIT
 *
 * Tests attention, by every kernel and the oracle, against its definition in double (docs/semantics.md):
 * comparisons between kernels cannot detect errors in what they share (the default scale, bases,
 * conventions, the sink, which keys a row sees). Here the keys that a row sees are listed one by one.
 *
 * What a call must not write stays as it was.
 */
#include "attention_calls.h"
#include "head_sizes.h"

/* All keys of the call, decoded, and their values; of caches these are the first d_v numbers of a key. */
static double keys[MOST_KEYS][WIDEST], values[MOST_KEYS][MOST_V];

/* Decodes all vectors of a tensor, page by page and head by head, or only token by token; returns their
 * number. */
static int64_t decode(const struct held *t, enum kv_format format, double *to, int64_t stride)
{
    const bool flat = t->tensor.ndim == 3, bytes = t->tensor.dtype.bits == 8;
    const int64_t pages = flat ? 1 : t->shape[0], slots = t->shape[1 - flat], heads = t->shape[2 - flat];
    const struct kv_layout l = kv_layout_of(format, 0);
    for (int64_t i = 0; i < pages * slots * heads; i++, to += stride) {
        const int64_t page = i / heads / slots, slot = i / heads % slots,
                      at = offset_of(t, page, slot, i % heads);
        const uint8_t *const data = t->tensor.data;
        for (int32_t d = 0; d < (bytes ? kv_width(&l) : (int32_t)t->shape[3 - flat]); d++)
            to[d] = !bytes ? element(t, at + d)
                    : l.scale_bytes
                        ? (double)kv_load(&l, data + page * t->strides[0], slots, slot, d, cache_scale)
                        : (double)kv_load(&l, data + at, 1, 0, d, cache_scale);
    }
    return pages * slots * heads;
}

/* ---- The definition -------------------------------------------------------------------------- */

/* A row, and the keys that it sees, as places in `keys`. */
static struct row {
    int64_t request, token, head; /* token: of all if requests are concatenated */
    int64_t count;
    int16_t seen[MOST_KEYS];
    double lse, most, out[MOST_V], magnitude[MOST_V]; /* magnitude: of the terms of out */
} rows[MOST_ROWS];
static int64_t row_count;

static struct row *add_row(int64_t request, int64_t token, int64_t head)
{
    struct row *const row = &rows[row_count++];
    if (row_count > MOST_ROWS) abort();
    row->request = request, row->token = token, row->head = head, row->count = 0;
    return row;
}

static void see(struct row *row, int64_t key)
{
    if (row->count == MOST_KEYS) abort();
    row->seen[row->count++] = (int16_t)key;
}

static void attend(struct row *row)
{
    const struct held *const q = tensor("q"), *const sink = tensor("attn_sink");
    const int64_t at = offset_of(q, row->request, row->token, row->head), d_qk = call.layout.d_qk;
    const double scale = call.options.scale != 0.0f ? (double)call.options.scale : 1.0 / sqrt((double)d_qk);
    double query[WIDEST], total = 0.0;
    row->most = -INFINITY;
    memset(row->out, 0, sizeof row->out), memset(row->magnitude, 0, sizeof row->magnitude);
    for (int64_t d = 0; d < d_qk; d++) query[d] = element(q, at + d);
    for (int64_t i = 0; i < row->count; i++) {
        const double *const key = keys[row->seen[i]], *const value = values[row->seen[i]];
        double score = 0.0;
        for (int64_t d = 0; d < d_qk; d++) score += scale * query[d] * key[d];
        const double weight = exp(score);
        row->most = fmax(row->most, score), total += weight;
        for (int64_t d = 0; d < call.layout.d_v; d++)
            row->out[d] += weight * value[d], row->magnitude[d] += weight * fabs(value[d]);
    }
    const double base = call.options.base_2 ? log2_e : 1.0;
    const double factor = sink && row->count ? 1.0 / (1.0 + exp(element(sink, row->head)) / total) : 1.0;
    for (int64_t d = 0; row->count && d < call.layout.d_v; d++)
        row->out[d] *= factor / total, row->magnitude[d] *= factor / total;
    row->lse = row->count ? log(total) * base : call.options.minus ? -INFINITY : INFINITY, row->most *= base;
}

/* ---- Comparing ------------------------------------------------------------------------------- */

static bool close_to(double came, double expected)
{
    return near(came, expected, 1e-5) || fabs(came - expected) <= 1e-5;
}

static void check_number(const char *kernel, const struct row *row, const char *name, double expected)
{
    const struct held *const t = tensor(name);
    const bool by_token = call.operation == OP_SPARSE_PREFILL; /* [s_q, h_q]; else [b, h_q, s_q], or flat */
    if (!t) return;
    const int64_t *s = t->strides;
    const double came = element(t, by_token              ? row->token * s[0] + row->head
                                   : t->tensor.ndim == 3 ? row->request * s[0] + row->head * s[1] + row->token
                                                         : row->head * s[0] + row->token);
    CHECK(close_to(came, expected), "%s, call %u, request %d, token %d, head %d: %s %g, expected %g", kernel,
          number, (int)row->request, (int)row->token, (int)row->head, name, came, expected);
}

static void check_row(const char *kernel, const struct row *row)
{
    const struct held *const out = tensor("out");
    const int64_t at = offset_of(out, row->request, row->token, row->head);
    const double least = out->tensor.dtype.code == FMLA_TYPE_FLOAT ? 0x1p-23 : 0.0; /* twice fp16's least */
    check_number(kernel, row, "lse", row->lse), check_number(kernel, row, "max_logits", row->most);
    for (int64_t d = 0; d < call.layout.d_v; d++) {
        const double came = element(out, at + d);
        CHECK(fabs(came - row->out[d]) <= row->magnitude[d] / 128 + least,
              "%s, call %u, request %d, token %d, head %d: out[%d] %g, expected %g", kernel, number,
              (int)row->request, (int)row->token, (int)row->head, (int)d, came, row->out[d]);
    }
}

/* Checks that exactly the rows' elements of an output were written: no result has all bits set. */
static void check_written(const char *kernel, int which, const struct member *m)
{
    const size_t width = call.held[which].tensor.dtype.bits / 8;
    const bool is_out = !strcmp(m->name, "out");
    int64_t written = 0;
    for (const char *at = memory[which]; at < call.end[which]; at += width)
        written += memcmp(at, &(uint32_t){UINT32_MAX}, width) != 0;
    CHECK(written == row_count * (is_out ? call.layout.d_v : 1),
          "%s, call %u: %" PRId64 " elements of %s of %d rows", kernel, number, written, m->name,
          (int)row_count);
}

/* Runs the call and compares it with the rows. */
static void run(const char *kernel)
{
    const struct member *m;
    run_call(kernel);
    for (int64_t i = 0; i < row_count; i++) check_row(kernel, &rows[i]);
    for (int which = 0; (m = described_tensor(call.operation, which)); which++)
        if ((m->allowed & IS_OUTPUT) && layout_has(&call.layout, m)) check_written(kernel, which, m);
}

/* Returns true if the kernel takes the call; a row without sizes takes all. */
static bool takes(const fmla_capability *row)
{
    const unsigned type = call.layout.type.code == FMLA_TYPE_BFLOAT ? FMLA_TAKES_BF16 : FMLA_TAKES_FP16;
    const bool cached = described_member(call.operation, "kv_format");
    return ((unsigned)row->types & type) && (!cached || row->kv_formats >> call.layout.format & 1);
}

static void check_kernel(const fmla_capability *row)
{
    if (takes(row)) run(row->kernel);
}

/* Works out all rows, then runs every kernel. */
static void check_call(void)
{
    for (int64_t i = 0; i < row_count; i++) attend(&rows[i]);
    for_kernels(call.operation, check_kernel);
    row_count = 0;
}

/* ---- Decode ---------------------------------------------------------------------------------- */

static int64_t clamp(int64_t length, int64_t most)
{
    return length < 0 ? 0 : length > most ? most : length;
}

/* Formats that all three operations over caches take, then those of FP8_576, which only dense decode takes.
 * Without a name a cache has the queries' type. */
static const struct cached {
    int32_t format;
    int64_t d_qk;
} formats[] = {{0, 512},
               {FMLA_KV_BF16, 576},
               {FMLA_KV_FP16, 576},
               {FMLA_KV_FP8_656, 576},
               {FMLA_KV_FP8_584, 512},
               {FMLA_KV_FP8_528, 512},
               {FMLA_KV_FP8_528_SPLIT, 512},
               {FMLA_KV_FP4_288, 512},
               {FMLA_KV_FP4_288_SPLIT, 512},
               {FMLA_KV_FP8_528_F32, 512}};
enum { FORMATS = sizeof formats / sizeof formats[0] };

static bool of_bytes(int32_t format)
{
    return format >= FMLA_KV_FP8_656;
}

/* Sets a format; queries over bytes may have either type. */
static void set_format(struct layout *l, const struct cached *f)
{
    l->format = f->format, l->d_qk = f->d_qk;
    l->type = f->format == FMLA_KV_FP16 || (f->format != FMLA_KV_BF16 && number % 3 == 2) ? fp16 : bf16;
}

static void decode_caches(const struct held *cache, const struct held *extra)
{
    const struct layout *const l = &call.layout;
    const enum kv_format first = cache_formats[l->format].format,
                         second = l->extra_format ? cache_formats[l->extra_format].format : first;
    const int64_t count = decode(cache, first, keys[0], WIDEST);
    if (extra) decode(extra, second, keys[count], WIDEST);
    for (int i = 0; i < MOST_KEYS; i++) memcpy(values[i], keys[i], sizeof values[i]);
}

/* A length may lie outside the cache, and pages behind it may not exist. */
static void check_dense(const struct layout *l)
{
    const int64_t capacity = (l->has & HAS_TABLE ? l->max_pages : 1) * l->page_size;
    const int32_t lengths[B] = {(int32_t)capacity + 9, -3, (int32_t)capacity / 2};
    make(OP_DENSE_DECODE, l);
    put_integers("seqlens", lengths, B);
    if (tensor("kv_scale")) memcpy(tensor("kv_scale")->tensor.data, &cache_scale, sizeof cache_scale);
    const struct held *const cache = tensor("kv_cache"), *const table = tensor("block_table");
    for (int64_t r = 0; table && r < B; r++)
        for (int64_t i = 0; i < l->max_pages; i++) {
            int32_t *const entry = (int32_t *)table->tensor.data + r * table->strides[0] + i;
            if (i * l->page_size >= clamp(lengths[r], capacity)) *entry = r % 2 ? INT32_MIN : INT32_MAX;
        }
    decode_caches(cache, NULL);
    for (int i = 0; i < B * S_Q * H_Q; i++) {
        const int64_t r = i / H_Q / S_Q, token = i / H_Q % S_Q, head = i % H_Q,
                      length = clamp(lengths[r], capacity);
        struct row *const row = add_row(r, token, head);
        for (int64_t t = 0; t < (l->causal ? length - S_Q + token + 1 : length); t++) {
            const int64_t page = table ? integer(table, r * table->strides[0] + t / l->page_size) : r;
            see(row, (page * l->page_size + t % l->page_size) * l->h_kv + head / (H_Q / l->h_kv));
        }
    }
    check_call();
}

static void test_dense(void)
{
    for (int way = 0; way < 2 * 2 * 2 * 2 * FORMATS; way++) {
        struct layout l = DESIGNATED(DECODE, .h_kv = 1 + way % 2, .causal = way / 2 % 2, .pages = 9,
                                     .page_size = 7, .max_pages = 4, .has = HAS_LSE);
        const struct cached fp8_576 = {FMLA_KV_FP8_576, 576}, *f = &formats[way / 16];
        set_format(&l, f->format > FMLA_KV_FP8_584 ? &fp8_576 : f);
        if (of_bytes(l.format)) l.h_kv = 1;
        if (way / 4 % 2) l.has |= HAS_TABLE;
        if (way / 8 % 2) l.has |= HAS_SINK;
        check_dense(&l);
    }
}

/* ---- Sparse decode --------------------------------------------------------------------------- */

/* Adds the keys of a list: entries that name no key are skipped. first: the cache's first key. */
static void see_list(struct row *row, const struct held *list, int64_t at, int64_t length, int64_t slots,
                     int64_t first)
{
    for (int64_t i = 0; i < length; i++) {
        const int32_t index = integer(list, at + i);
        if (index >= 0 && index < slots) see(row, first + index);
    }
}

/* Makes every seventh entry one that is beyond all keys or far below 0; one key occurs again and again. */
static void spoil_list(const struct held *list, int64_t slots)
{
    const int64_t topk = list->shape[2];
    for (int64_t i = 0; i < list->shape[0] * list->shape[1] * topk; i += 7) {
        const int32_t entries[] = {INT32_MAX, (int32_t)slots, INT32_MIN, 2, (int32_t)slots - 1};
        const int64_t row = i / topk;
        ((int32_t *)list->tensor.data)[row / list->shape[1] * list->strides[0] +
                                       row % list->shape[1] * list->strides[1] + i % topk] =
            entries[i / 7 % 5];
    }
}

static void check_sparse(const struct layout *l)
{
    const int32_t lengths[B] = {(int32_t)l->topk + 9, -3, 23},
                  extra_lengths[B] = {0, (int32_t)l->extra_topk, 5};
    const int64_t slots = l->pages * l->page_size, extra_slots = l->extra_pages * l->extra_page_size;
    make(OP_SPARSE_DECODE, l);
    put_integers("topk_length", lengths, B), put_integers("extra_topk_length", extra_lengths, B);
    const struct held *const list = tensor("indices"), *const extra_list = tensor("extra_indices");
    spoil_list(list, slots);
    if (extra_list) spoil_list(extra_list, extra_slots);
    decode_caches(tensor("kv_cache"), tensor("extra_kv_cache"));
    for (int i = 0; i < B * S_Q * H_Q; i++) {
        const int64_t r = i / H_Q / S_Q, token = i / H_Q % S_Q;
        struct row *const row = add_row(r, token, i % H_Q);
        see_list(row, list, r * list->strides[0] + token * list->strides[1],
                 l->has & HAS_LENGTHS ? clamp(lengths[r], l->topk) : l->topk, slots, 0);
        if (extra_list)
            see_list(row, extra_list, r * extra_list->strides[0] + token * extra_list->strides[1],
                     l->has & HAS_EXTRA_LENGTHS ? clamp(extra_lengths[r], l->extra_topk) : l->extra_topk,
                     extra_slots, slots);
    }
    check_call();
}

/* Every format alone, and with every format of a second cache that may be beside it. */
static void test_sparse(void)
{
    for (int way = 0; way < FORMATS * (FORMATS + 1) * 4; way++) {
        struct layout l =
            DESIGNATED(DECODE, .h_kv = 1, .pages = 5, .page_size = 7, .topk = 40, .extra_pages = 4,
                       .extra_page_size = 3, .extra_topk = 17, .has = HAS_LSE);
        const struct cached *const f = &formats[way / 4 % FORMATS], *const extra =
                                                                        &formats[way / 4 / FORMATS % FORMATS];
        const bool alone = way / 4 / FORMATS == FORMATS;
        if (!alone && (extra->d_qk != f->d_qk || !(of_bytes(extra->format) || extra == f))) continue;
        set_format(&l, f);
        if (!alone) l.extra_format = extra == f ? 0 : extra->format, l.has |= HAS_EXTRA;
        if (way % 2) l.has |= alone ? HAS_LENGTHS : HAS_LENGTHS | HAS_EXTRA_LENGTHS;
        if (way / 2 % 2) l.has |= HAS_SINK;
        check_sparse(&l);
    }
}

/* ---- Sparse prefill -------------------------------------------------------------------------- */

static void make_prefill(const struct layout *l)
{
    static const int32_t lengths[] = {49, -5, 4, INT32_MAX, INT32_MIN, 23};
    const int64_t slots = l->flat ? l->s_kv : l->pages * l->page_size, h_kv = l->flat ? l->h_kv : 1;
    make(OP_SPARSE_PREFILL, l);
    put_integers("topk_length", lengths, (size_t)l->s_q);
    const struct held *const list = tensor("indices");
    spoil_list(list, slots);
    decode_caches(tensor("kv"), NULL);
    for (int64_t i = 0; i < l->s_q * l->h_q; i++) {
        const int64_t token = i / l->h_q, head = i % l->h_q, key_head = head / (l->h_q / h_kv);
        struct row *const row = add_row(0, token, head);
        see_list(row, list, token * list->strides[0] + key_head * list->strides[1],
                 l->has & HAS_LENGTHS ? clamp(lengths[token], l->topk) : l->topk, slots, 0);
        for (int64_t k = 0; k < row->count; k++) row->seen[k] = (int16_t)(row->seen[k] * h_kv + key_head);
    }
}

/* Few tokens, whose lists are split among any number of threads; the second time has the same bits. */
static void check_split(const fmla_capability *row)
{
    static const int32_t threads[] = {1, 2, 5, 16};
    static char once[MAX_TENSORS][MEMORY];
    for (int i = 0; i < 4; i++) {
        CHECK_OK(fmla_set_num_threads(threads[i]));
        run(row->kernel), memcpy(once, memory, sizeof once), run(row->kernel);
        CHECK(!memcmp(once, memory, sizeof once), "%s, %d threads: other bits the second time", row->kernel,
              threads[i]);
    }
    CHECK_OK(fmla_set_num_threads(0));
}

static void test_prefill(void)
{
    for (int way = 0; way < 8 * (FORMATS + 2); way++) {
        struct layout l = DESIGNATED(.s_q = 6, .h_q = 4, .h_kv = 1, .one_head = 1, .d_v = 512, .pages = 5,
                                     .page_size = 7, .s_kv = 35, .topk = 40, .has = HAS_LSE);
        const int source = way / 8;
        set_format(&l, &formats[source % FORMATS]);
        l.flat = source >= FORMATS, l.type = bf16; /* the queries' only type */
        if (l.format == FMLA_KV_FP16) continue;
        if (l.flat) l.h_kv = 1 + way / 4 % 2;
        if (way % 2) l.has |= HAS_LENGTHS;
        if (way / 2 % 2) l.has |= HAS_SINK;
        make_prefill(&l), check_call();
    }
    const struct layout few =
        DESIGNATED(.s_q = 1, .h_q = 3, .h_kv = 1, .d_qk = 576, .d_v = 512, .s_kv = 300, .topk = 700,
                   .flat = true, .type = {FMLA_TYPE_BFLOAT, 16, 1}, .has = HAS_LSE);
    make_prefill(&few);
    for (int i = 64; i < 500; i++) /* whole chunks without a key */
        ((int32_t *)tensor("indices")->tensor.data)[i] = -1;
    rows[0].count = 0;
    for (int64_t h = 0; h < few.h_q; h++) {
        rows[h].count = 0;
        see_list(&rows[h], tensor("indices"), 0, few.topk, few.s_kv, 0), attend(&rows[h]);
    }
    for_kernels(OP_SPARSE_PREFILL, check_split);
    row_count = 0;
}

/* ---- Dense MHA ------------------------------------------------------------------------------- */

enum { MOST_REQUESTS = 4 };

/* Separate requests of q tokens and k keys; or this many in all with these starts, which mean these spans. */
static const struct problem {
    bool flat;
    int64_t b, q, k;
    int32_t starts[2][MOST_REQUESTS + 1];
    struct {
        int64_t first_q, tokens, first_k, keys;
    } spans[MOST_REQUESTS];
} problems[] = {
    {.b = 1, .q = 1, .k = 1},
    {.b = 2, .q = 1, .k = 130},
    {.b = 2, .q = 5, .k = 9},
    {.b = 2, .q = 7, .k = 3},
    {.b = 1, .q = 70, .k = 130}, /* over tiles and blocks */
    {.b = 2, .q = 33, .k = 33},
    {.b = 2, .q = 3, .k = 0},
#define FLAT(b, q, k) true, b, q, k
    {FLAT(3, 20, 150), {{0, 3, 3, 20}, {0, 70, 75, 150}}, {{0, 3, 0, 70}, {3, 0, 70, 5}, {3, 17, 75, 75}}},
    {FLAT(3, 40, 40), {{0, 3, 30, 40}, {0, 20, 25, 40}}, {{0, 3, 0, 20}, {3, 27, 20, 5}, {30, 10, 25, 15}}},
    /* Starts that fall, are negative, or lie beyond the tokens. */
    {FLAT(3, 20, 150),
     {{0, 10, 4, 20}, {0, 100, 40, 150}},
     {{0, 10, 0, 100}, {10, 0, 100, 0}, {10, 10, 100, 50}}},
    {FLAT(4, 20, 150),
     {{-5, 6, -1, INT32_MIN, 20}, {INT32_MIN, -1, 7, -2, 9}},
     {{0, 6, 0, 0}, {6, 0, 0, 7}, {6, 0, 7, 0}, {6, 14, 7, 2}}},
    {FLAT(3, 20, 150),
     {{0, 15, 25, INT32_MAX}, {0, 140, 151, 152}},
     {{0, 15, 0, 140}, {15, 5, 140, 10}, {20, 0, 150, 0}}},
    /* Tokens of no request, before and behind all; and only such tokens before. */
    {FLAT(2, 20, 150), {{2, 5, 18}, {10, 10, 90}}, {{2, 3, 10, 0}, {5, 13, 10, 80}}},
    {FLAT(2, 20, 150), {{INT32_MAX, 0, 5}, {0, 80, 150}}, {{20, 0, 0, 80}, {20, 0, 80, 70}}},
#undef FLAT
};
enum { PROBLEMS = sizeof problems / sizeof problems[0] };

/* Puts the length in use of request r, if the call has such lengths, and returns what it means. */
static int64_t put_used(const char *name, int64_t r, int64_t extent)
{
    const struct held *const t = tensor(name);
    const int32_t all = (int32_t)extent, some[] = {all - all / 3, 0, all + 3, -2, all, all / 2, INT32_MAX};
    const int32_t used = some[(number + r + (name[8] == 'k' ? 2 : 0)) % 7];
    if (!t) return extent;
    ((int32_t *)t->tensor.data)[r] = used;
    return used < 0 ? 0 : used < all ? used : all;
}

static void check_problem(const struct problem *p, const struct layout *l)
{
    const int64_t group = l->h_q / l->h_kv;
    make(OP_MHA_FORWARD, l);
    put_integers("cu_seqlens_q", p->starts[0], (size_t)p->b + 1);
    put_integers("cu_seqlens_k", p->starts[1], (size_t)p->b + 1);
    decode(tensor("k"), KV_BF16, keys[0], WIDEST), decode(tensor("v"), KV_BF16, values[0], MOST_V);
    for (int64_t r = 0; r < p->b; r++) {
        const int64_t extent = p->flat ? p->spans[r].tokens : p->q,
                      first = p->flat ? p->spans[r].first_k : r * p->k,
                      tokens = put_used("seqused_q", r, extent),
                      of_request = put_used("seqused_k", r, p->flat ? p->spans[r].keys : p->k);
        for (int64_t i = 0; i < extent * l->h_q; i++) {
            const int64_t j = i / l->h_q, head = i % l->h_q;
            struct row *const row = add_row(r, p->flat ? p->spans[r].first_q + j : j, head);
            if (j >= tokens) continue; /* padding */
            for (int64_t t = 0; t < (l->causal ? of_request - tokens + j + 1 : of_request); t++)
                see(row, (first + t) * l->h_kv + head / group);
        }
    }
    check_call();
}

static void test_mha(void)
{
    static const int64_t heads[][2] = {{6, 2}, {3, 3}, {5, 1}};
    static const int32_t splits[] = {0, 1, 2, 7, 64};
    for (int i = 0; i < PROBLEMS; i++)
        for (int way = 0; way < 2 * HEAD_SIZES; way++) {
            const struct problem *const p = &problems[i];
            const struct layout l =
                DESIGNATED(.b = p->b, .splits = p->b + 1, .s_q = p->q, .tokens_q = p->q, .s_k = p->k,
                           .tokens_k = p->k, .d_qk = head_d_qk[way / 2 % HEAD_D_QKS],
                           .d_v = head_d_v[way / 2 / HEAD_D_QKS], .causal = way % 2,
                           .h_q = heads[number % 3][0], .h_kv = heads[number % 3][1], .flat = p->flat,
                           .type = number % 7 < 3 ? fp16 : bf16, .num_splits = splits[number % 5],
                           .batch_dependent = number / 5 % 2,
                           .has = HAS_LSE | (number % 4 > 1 ? HAS_SINK : 0) | (number % 3 ? 0 : HAS_USED));
            check_problem(p, &l);
        }
}

int main(void)
{
    unsetenv("FLASHMLA_KERNEL");
    test_dense();
    test_sparse();
    test_prefill();
    test_mha();
    return check_done("test_attention_values");
}
