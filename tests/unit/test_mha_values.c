/* SPDX-License-Identifier: MIT
 *
 * Tests dense MHA against closed forms, for every kernel and the oracle: masks, starts of requests, heads,
 * strides, bases.
 *
 * Query head h is (h % 3, 0, 0, …); key t is (24, 0, …) if t is odd, else 0; element d of its value for
 * key head g is t % 61 + 4 g + d % 8 / 2. With s = 24 (h % 3) · scale an odd key has weight e^s and an
 * even one 1, so lse = ln(even + odd e^s) and out is the mean of the values with these weights: if h % 3 =
 * 0, the mean of the visible values. In separate requests the keys of request r count from 7 r on.
 * Everything outside keys and values is NaN.
 */
#include "values.h"

enum { ELEMENTS = 1 << 18, MOST_REQUESTS = 4, GAP = 3 /* between rows of lse */, UNWRITTEN = 0x5555 };

enum layout_of_heads {
    CONTIGUOUS,
    HEADS_FIRST,
    PACKED_KV,  /* each head's key, then its value */
    PACKED_QKV, /* a token's heads of queries, of keys, and of values */
    LAYOUTS
};

/* Tokens and keys of a request, and the first of each among all. */
struct span {
    int64_t first_q, tokens, first_k, keys;
};

/* Separate requests of q tokens and k keys; or this many in all with these starts, which mean these spans. */
static const struct problem {
    const char *name;
    bool flat;
    int64_t b, q, k;
    int32_t starts[2][MOST_REQUESTS + 1];
    struct span spans[MOST_REQUESTS];
} problems[] = {
#define FLAT(name, b, q, k) name, true, b, q, k
    {.name = "one row, one key", .b = 1, .q = 1, .k = 1},
    {.name = "one row, many keys", .b = 2, .q = 1, .k = 130},
    {.name = "more keys than tokens", .b = 2, .q = 5, .k = 9},
    {.name = "fewer keys than tokens", .b = 2, .q = 7, .k = 3},
    {.name = "over tiles and blocks", .b = 1, .q = 70, .k = 130},
    {.name = "as many keys as tokens", .b = 2, .q = 33, .k = 33},
    {.name = "no keys", .b = 2, .q = 3, .k = 0},
    {FLAT("starts in order", 3, 20, 150),
     {{0, 3, 3, 20}, {0, 70, 75, 150}},
     {{0, 3, 0, 70}, {3, 0, 70, 5}, {3, 17, 75, 75}}},
    {FLAT("few keys", 3, 40, 40),
     {{0, 3, 30, 40}, {0, 20, 25, 40}},
     {{0, 3, 0, 20}, {3, 27, 20, 5}, {30, 10, 25, 15}}},
    {FLAT("starts that fall", 3, 20, 150),
     {{0, 10, 4, 20}, {0, 100, 40, 150}},
     {{0, 10, 0, 100}, {10, 0, 100, 0}, {10, 10, 100, 50}}},
    {FLAT("negative starts", 4, 20, 150),
     {{-5, 6, -1, INT32_MIN, 20}, {INT32_MIN, -1, 7, -2, 9}},
     {{0, 6, 0, 0}, {6, 0, 0, 7}, {6, 0, 7, 0}, {6, 14, 7, 2}}},
    {FLAT("starts beyond the tokens", 3, 20, 150),
     {{0, 15, 25, INT32_MAX}, {0, 140, 151, 152}},
     {{0, 15, 0, 140}, {15, 5, 140, 10}, {20, 0, 150, 0}}},
    {FLAT("tokens of no request", 2, 20, 150), {{2, 5, 18}, {10, 10, 90}}, {{2, 3, 10, 0}, {5, 13, 10, 80}}},
    {FLAT("no request's tokens", 2, 20, 150),
     {{INT32_MAX, 0, 5}, {0, 80, 150}},
     {{20, 0, 0, 80}, {20, 0, 80, 70}}},
#undef FLAT
};
enum { PROBLEMS = sizeof problems / sizeof problems[0] };

struct way {
    const char *kernel;
    const struct problem *problem;
    enum layout_of_heads layout;
    int64_t d_qk, d_v, h_q, h_kv;
    float scale; /* 0: the default */
    int causal, base_2, minus;
    struct format f;
};

/* ---- Where things lie -------------------------------------------------------------------------- */

struct place {
    struct held held;
    int64_t request, token, head; /* strides */
};

static uint16_t memory[2][ELEMENTS], out_memory[ELEMENTS]; /* of q and of packed q, k and v; of k and v */
static float lse_memory[ELEMENTS];

/* Describes a tensor from `at` on, in elements: consecutive tokens, with heads inside them or around them. */
static void put_place(struct place *p, const struct way *w, uint16_t *at, int64_t tokens, int64_t heads,
                      int64_t width, int64_t token, int64_t head)
{
    const bool flat = w->problem->flat;
    const int64_t shape[] = {w->problem->b, tokens, heads, width};
    p->request = w->layout == HEADS_FIRST ? head * heads : token * tokens, p->token = token, p->head = head;
    held_set(&p->held, at, type_of(&w->f), 4 - flat, shape + flat);
    const int64_t strides[] = {p->request, token, head, 1};
    memcpy(p->held.strides, strides + flat, (size_t)(4 - flat) * sizeof *strides);
}

static void put_places(const struct way *w, struct place *q, struct place *k, struct place *v,
                       struct place *out)
{
    const int64_t s_q = w->problem->q, s_k = w->problem->k, h_q = w->h_q, h_kv = w->h_kv,
                  pair = w->d_qk + w->d_v, all = (h_q + 2 * h_kv) * w->d_qk;
    const int64_t b = w->problem->flat ? 1 : w->problem->b;
    if (b * s_k * h_kv * pair > ELEMENTS || b * s_q * all > ELEMENTS) abort();
    const bool first = w->layout == HEADS_FIRST, qkv = w->layout == PACKED_QKV;
    put_place(q, w, memory[0], s_q, h_q, w->d_qk,
              qkv     ? all
              : first ? w->d_qk
                      : h_q * w->d_qk,
              first ? s_q * w->d_qk : w->d_qk);
    put_place(out, w, out_memory, s_q, h_q, w->d_v, first ? w->d_v : h_q * w->d_v,
              first ? s_q * w->d_v : w->d_v);
    if (qkv) {
        put_place(k, w, memory[0] + h_q * w->d_qk, s_k, h_kv, w->d_qk, all, w->d_qk);
        put_place(v, w, memory[0] + (h_q + h_kv) * w->d_qk, s_k, h_kv, w->d_v, all, w->d_v);
    } else if (w->layout == PACKED_KV) {
        put_place(k, w, memory[1], s_k, h_kv, w->d_qk, h_kv * pair, pair);
        put_place(v, w, memory[1] + w->d_qk, s_k, h_kv, w->d_v, h_kv * pair, pair);
    } else {
        uint16_t *const behind = memory[1] + b * s_k * h_kv * w->d_qk;
        put_place(k, w, memory[1], s_k, h_kv, w->d_qk, first ? w->d_qk : h_kv * w->d_qk,
                  first ? s_k * w->d_qk : w->d_qk);
        put_place(v, w, behind, s_k, h_kv, w->d_v, first ? w->d_v : h_kv * w->d_v,
                  first ? s_k * w->d_v : w->d_v);
    }
}

static uint16_t *row_at(const struct place *p, int64_t request, int64_t token, int64_t head)
{
    return (uint16_t *)p->held.tensor.data + request * p->request + token * p->token + head * p->head;
}

static float value(int64_t key, int64_t key_head, int64_t d)
{
    return (float)(key % 61 + 4 * key_head) + (float)(d % 8) / 2.0f;
}

static void fill_inputs(const struct way *w, const struct place *q, const struct place *k,
                        const struct place *v)
{
    memset(memory, 0xff, sizeof memory);
    for (int64_t r = 0; r < (w->problem->flat ? 1 : w->problem->b); r++) {
        for (int64_t i = 0; i < w->problem->q * w->h_q; i++) {
            uint16_t *const row =
                memset(row_at(q, r, i / w->h_q, i % w->h_q), 0, (size_t)w->d_qk * sizeof *row);
            row[0] = code_of((float)(i % w->h_q % 3), &w->f);
        }
        for (int64_t i = 0; i < w->problem->k * w->h_kv; i++) {
            const int64_t t = i / w->h_kv, g = i % w->h_kv, key = 7 * r + t;
            uint16_t *const row = memset(row_at(k, r, t, g), 0, (size_t)w->d_qk * sizeof *row);
            row[0] = code_of(key % 2 ? 24.0f : 0.0f, &w->f);
            for (int64_t d = 0; d < w->d_v; d++) row_at(v, r, t, g)[d] = code_of(value(key, g, d), &w->f);
        }
    }
}

/* ---- Results ----------------------------------------------------------------------------------- */

static void check_result(const struct way *w, const char *name, int64_t first_key, int64_t seen, int64_t head,
                         const uint16_t *out, float lse)
{
    const double scale = w->scale != 0.0f ? (double)w->scale : 1.0 / sqrt((double)w->d_qk);
    const double odd = exp(24.0 * (double)(head % 3) * scale);
    double total = 0.0, sum = 0.0;
    for (int64_t key = first_key; key < first_key + seen; key++) {
        const double weight = key % 2 ? odd : 1.0;
        total += weight, sum += weight * (double)value(key, head / (w->h_q / w->h_kv), 0);
    }
    const double empty = w->minus ? -INFINITY : INFINITY,
                 expected = seen > 0 ? log(total) * (w->base_2 ? 1.4426950408889634 : 1.0) : empty;
    CHECK(near((double)lse, expected, 1e-5), "%s: lse %g, expected %g", name, (double)lse, expected);
    int wrong = 0;
    for (int64_t d = 0; d < w->d_v; d++)
        wrong += !near((double)value_of(out[d], &w->f), seen > 0 ? sum / total + (double)(d % 8) / 2.0 : 0.0,
                       1.0 / 128);
    CHECK(wrong == 0, "%s: %d values of out are off; the first is %g, expected %g", name, wrong,
          (double)value_of(out[0], &w->f), seen > 0 ? sum / total : 0.0);
}

static void check_way(const struct way *w)
{
    const struct problem *const p = w->problem;
    struct place q, k, v, out;
    struct held lse;
    char name[200];
    int64_t rows = 0, written = 0, written_lse = 0;
    put_places(w, &q, &k, &v, &out), fill_inputs(w, &q, &k, &v);
    memset(out_memory, UNWRITTEN & 0xff, sizeof out_memory),
        memset(lse_memory, UNWRITTEN & 0xff, sizeof lse_memory);
    HELD(&lse, lse_memory, f32, 3, p->b, w->h_q, p->q);
    lse.strides[1] = p->q + GAP, lse.strides[0] = w->h_q * lse.strides[1];
    if (p->flat) {
        HELD(&lse, lse_memory, f32, 2, w->h_q, p->q);
        lse.strides[0] = p->q + GAP;
    }
    fmla_mha_forward_args args = FMLA_INIT(fmla_mha_forward_args);
    args.q = &q.held.tensor, args.k = &k.held.tensor, args.v = &v.held.tensor, args.out = &out.held.tensor;
    args.lse = &lse.tensor, args.kernel = w->kernel, args.causal = w->causal, args.softmax_scale = w->scale;
    int32_t starts[2][MOST_REQUESTS + 1];
    memcpy(starts, p->starts, sizeof starts);
    struct held held_starts[2];
    for (int i = 0; i < 2; i++) HELD(&held_starts[i], starts[i], i32, 1, p->b + 1);
    if (p->flat) args.cu_seqlens_q = &held_starts[0].tensor, args.cu_seqlens_k = &held_starts[1].tensor;
    args.log_base = w->base_2 ? FMLA_LOG_BASE_2 : FMLA_LOG_NATURAL;
    args.lse_empty = w->minus ? FMLA_LSE_EMPTY_NEGATIVE_INFINITY : FMLA_LSE_EMPTY_POSITIVE_INFINITY;
    CHECK(run_in_room(OP_MHA_FORWARD, &args) == FMLA_OK, "%s, %s: %s", w->kernel, p->name, fmla_last_error());
    for (int64_t r = 0; r < p->b; r++) {
        const struct span span = p->flat ? p->spans[r] : (struct span){0, p->q, 0, p->k};
        for (int64_t j = 0; j < span.tokens; j++)
            for (int64_t h = 0; h < w->h_q; h++, rows++) {
                const int64_t seen = w->causal ? span.keys - span.tokens + j + 1 : span.keys,
                              token = span.first_q + j;
                snprintf(
                    name, sizeof name,
                    "%s, %s, layout %d, %d bits %d/%d, heads %d/%d, causal %d, request %d, token %d, head %d",
                    w->kernel, p->name, w->layout, w->f.format, (int)w->d_qk, (int)w->d_v, (int)w->h_q,
                    (int)w->h_kv, w->causal, (int)r, (int)j, (int)h);
                check_result(w, name, p->flat ? span.first_k : 7 * r, seen, h,
                             row_at(&out, p->flat ? 0 : r, token, h),
                             lse_memory[(p->flat ? 0 : r * lse.strides[0]) + h * (p->q + GAP) + token]);
            }
    }
    for (int i = 0; i < ELEMENTS; i++) {
        written += out_memory[i] != UNWRITTEN;
        written_lse += memcmp(&lse_memory[i], &(uint32_t){0x55555555}, sizeof(float)) != 0;
    }
    CHECK(written == rows * w->d_v && written_lse == rows,
          "%s, %s: %" PRId64 " values and %" PRId64 " lse of %" PRId64 " rows", w->kernel, p->name, written,
          written_lse, rows);
}

/* Checks all problems in all layouts, with and without a mask; other options rotate. */
static void check_closed_forms(const fmla_capability *row)
{
    static const int64_t sizes[][2] = {{192, 128}, {128, 128}, {64, 64}, {64, 128}, {128, 64}, {192, 64}},
                         heads[][2] = {{6, 2}, {3, 3}, {5, 1}};
    static const float scales[] = {0.0f, 0.125f, 0.0625f, 0.0f};
    unsigned n = 0;
    for (int i = 0; i < PROBLEMS; i++)
        for (int way = 0; way < LAYOUTS * 12; way++, n++) {
            struct way w = {
                .kernel = row->kernel, .problem = &problems[i], .layout = (enum layout_of_heads)(way / 12)};
            w.d_qk = sizes[way % 6][0], w.d_v = sizes[way % 6][1], w.causal = way / 6 % 2;
            w.h_q = heads[n % 3][0], w.h_kv = heads[n % 3][1], w.scale = scales[n / 3 % 4];
            w.base_2 = n / 2 % 2, w.minus = n / 5 % 2;
            w.f.format = n % 7 < 3 && row->types & FMLA_TAKES_FP16 ? KV_FP16 : KV_BF16;
            if (w.layout != PACKED_QKV || (w.d_qk == w.d_v && problems[i].q == problems[i].k)) check_way(&w);
        }
}

/* ---- Chunks of a long prefill ------------------------------------------------------------------ */

enum { TOKENS = 60, KEYS = 390, HEADS = 4, KEY_HEADS = 2, D_QK = 192, PARTS = 4 };

static void attend(fmla_mha_forward_args *args, const char *kernel, const uint16_t *q, const uint16_t *k,
                   const uint16_t *v, int64_t keys, const int32_t starts[2][3], uint16_t *out, float *lse)
{
    int32_t copy[2][3];
    memcpy(copy, starts, sizeof copy);
    args->q = TENSOR_OF((void *)(uintptr_t)q, bf16, TOKENS, HEADS, D_QK);
    args->k = TENSOR_OF((void *)(uintptr_t)k, bf16, keys, KEY_HEADS, D_QK);
    args->v = TENSOR_OF((void *)(uintptr_t)v, bf16, keys, KEY_HEADS, 128);
    args->cu_seqlens_q = TENSOR_OF(copy[0], i32, 3), args->cu_seqlens_k = TENSOR_OF(copy[1], i32, 3);
    args->out = TENSOR_OF(out, bf16, TOKENS, HEADS, 128), args->lse = TENSOR_OF(lse, f32, HEADS, TOKENS);
    args->kernel = kernel;
    CHECK(run_in_room(OP_MHA_FORWARD, args) == FMLA_OK, "%s: %s", kernel, fmla_last_error());
}

/* Two requests; the last tokens are computed over chunks of their keys, of which only the last has a mask
 * and one is empty: merged they equal the whole. */
static void check_chunks(const fmla_capability *row)
{
    static const int32_t whole[2][3] = {{0, 35, TOKENS}, {0, 300, KEYS}};
    static const int32_t ends[2][PARTS + 1] = {{0, 130, 265, 265, 300},
                                               {0, 1, 65, 65, 90}}; /* chunks of each request */
    static uint16_t q[TOKENS * HEADS * D_QK], k[KEYS * KEY_HEADS * D_QK], v[KEYS * KEY_HEADS * 128],
        key[sizeof k / 2], value_of_key[sizeof v / 2], out[2][TOKENS * HEADS * 128],
        parts[PARTS][TOKENS * HEADS * 128];
    static float lse[2][HEADS * TOKENS], lse_parts[PARTS][HEADS * TOKENS];
    struct random_state random = {17};
    for (size_t i = 0; i < sizeof q / 2; i++) q[i] = num_to_bf16(random_input(&random, 0.0f, 1.0f));
    for (size_t i = 0; i < sizeof k / 2; i++) k[i] = num_to_bf16(random_input(&random, 0.0f, 1.0f));
    for (size_t i = 0; i < sizeof v / 2; i++) v[i] = num_to_bf16(random_input(&random, 0.0f, 0.3f));
    for (int32_t base = 0; base <= FMLA_LOG_BASE_2; base += FMLA_LOG_BASE_2) {
        fmla_mha_forward_args args = FMLA_INIT(fmla_mha_forward_args);
        args.causal = 1, args.log_base = base, args.lse_empty = base ? 1 : 0;
        attend(&args, row->kernel, q, k, v, KEYS, whole, out[0], lse[0]);
        for (int part = 0; part < PARTS; part++) {
            int32_t starts[2][3] = {{0, 35, TOKENS}, {0}};
            for (int r = 0; r < 2; r++) {
                const int32_t first = ends[r][part], count = ends[r][part + 1] - first, at = starts[1][r];
                const int64_t from = (whole[1][r] + first) * KEY_HEADS, to = at * KEY_HEADS;
                memcpy(key + to * D_QK, k + from * D_QK, (size_t)(count * KEY_HEADS * D_QK) * sizeof *k);
                memcpy(value_of_key + to * 128, v + from * 128,
                       (size_t)(count * KEY_HEADS * 128) * sizeof *v);
                starts[1][r + 1] = at + count;
            }
            args.causal = part + 1 == PARTS;
            attend(&args, row->kernel, q, key, value_of_key, starts[1][2], starts, parts[part],
                   lse_parts[part]);
        }
        fmla_merge_args merge = FMLA_INIT(fmla_merge_args);
        merge.out_parts = TENSOR_OF(parts, bf16, PARTS, 1, TOKENS, HEADS, 128);
        merge.lse_parts = TENSOR_OF(lse_parts, f32, PARTS, 1, HEADS, TOKENS);
        merge.out = TENSOR_OF(out[1], bf16, 1, TOKENS, HEADS, 128),
        merge.lse = TENSOR_OF(lse[1], f32, 1, HEADS, TOKENS);
        merge.log_base = base;
        CHECK_OK(fmla_merge(&merge));
        int wrong = 0, wrong_lse = 0;
        for (int i = 0; i < TOKENS * HEADS * 128; i++)
            wrong += !(fabsf(num_from_bf16(out[0][i]) - num_from_bf16(out[1][i])) < 4e-3f);
        for (int i = 0; i < HEADS * TOKENS; i++)
            wrong_lse += !near((double)lse[1][i], (double)lse[0][i], 1e-5);
        CHECK(!wrong && !wrong_lse,
              "%s, base %d: of the merged chunks %d values and %d lse are not those of the whole",
              row->kernel, base, wrong, wrong_lse);
    }
}

static void check_kernel(const fmla_capability *row)
{
    check_closed_forms(row);
    check_chunks(row);
}

int main(void)
{
    unsetenv("FLASHMLA_KERNEL");
    for_kernels(OP_MHA_FORWARD, check_kernel);
    return check_done("test_mha_values");
}
