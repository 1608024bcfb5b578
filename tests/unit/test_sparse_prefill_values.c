/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill: results worked out by hand, for every kernel and the oracle, in every cache format; the oracle held against
 * that of sparse decode, a key head at a time; and few tokens, whose lists are cut, with any number of threads.
 *
 * By hand: rows q = (a, 0, 0, …), and two keys k0 = (0, …, 1 at 130, …), k1 = (24, 0, …). The scores are 0 and
 * s = 24 a / sqrt(d_qk). Where a list names k0 z times and k1 t times, lse = ln(z + t e^s), max_logits = s, or 0 without k1,
 * out[130] = z / (z + t e^s) and out[0] = 24 t e^s / (z + t e^s). All else in kv is NaN, scales too.
 */
#include "check.h"

#include "flashmla/flashmla.h"
#include "kvformat.h"
#include "random.h"

#include <math.h>
#include <stdlib.h>

enum {
    D_V = 512,
    WIDEST = 576,
    AT = 130, /* of another group of values than 0, in both formats of bytes */
    GAP = 3   /* between rows of max_logits and lse */
};

static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
static const fmla_dtype bf16 = {FMLA_TYPE_BFLOAT, 16, 1}, f32 = {FMLA_TYPE_FLOAT, 32, 1},
                        i32 = {FMLA_TYPE_INT, 32, 1}, byte = {FMLA_TYPE_UINT, 8, 1};

static const struct format {
    const char *name;
    int32_t public_name;
    enum kv_format format;
    int64_t d_qk, last; /* last: of the tensor's dimensions */
    int flat;
} formats[] = {
    {"flat", FMLA_KV_BF16, KV_BF16, 576, 576, 1},
    {"flat", 0, KV_BF16, 512, 512, 1},
    {"BF16", 0, KV_BF16, 576, 576, 0},
    {"BF16", FMLA_KV_BF16, KV_BF16, 512, 512, 0},
    {"FP8_656", FMLA_KV_FP8_656, KV_FP8_656, 576, 656, 0},
    {"FP8_584", FMLA_KV_FP8_584, KV_FP8_584, 512, 584, 0},
};
enum { FORMATS = sizeof formats / sizeof formats[0] };

/* A tensor, without strides unless some are set. */
struct held {
    int64_t shape[4], strides[4];
    fmla_tensor tensor;
};

static const fmla_tensor *hold(struct held *held, void *data, fmla_dtype dtype, int ndim, int64_t a,
                               int64_t b, int64_t c, int64_t d)
{
    *held = (struct held){{a, b, c, d}, {0}, {data, cpu, ndim, dtype, NULL, NULL, 0}};
    held->tensor.shape = held->shape;
    return &held->tensor;
}

/* A result of a number a row, GAP numbers between the tokens. */
static const fmla_tensor *hold_rows(struct held *held, float *data, int64_t s_q, int64_t h_q)
{
    hold(held, data, f32, 2, s_q, h_q, 0, 0);
    held->strides[0] = h_q + GAP, held->strides[1] = 1;
    held->tensor.strides = held->strides;
    return &held->tensor;
}

static fmla_status run(fmla_sparse_prefill_args *args)
{
    size_t alignment = 0;
    fmla_status status = fmla_sparse_prefill_workspace_size(args, &args->workspace_size, &alignment);
    if (status) return status;
    args->workspace = aligned_alloc(64, (args->workspace_size + 63) / 64 * 64 + 64);
    if (!args->workspace) abort();
    memset(args->workspace, 0xff, args->workspace_size);
    status = fmla_sparse_prefill(args);
    free(args->workspace);
    return status;
}

/* ---- By hand --------------------------------------------------------------------------------- */

enum { S_Q = 6, H_Q = 4, S_KV = 4, PAGE = 2, TOPK = 8, HEADS = 2 };

/* What lists hold, of key head 0: k0 is its key 3, k1 its key 2. Of key head 1 they are its keys 1 and 0. */
enum { K0 = 3, K1 = 2 };

static const int32_t lists[][TOPK] = {
    {INT32_MIN, K0, 2147483647, K1, S_KV, -1, S_KV, -1},
    {-1, -1, K1, K0, -1, -1, -1, -1},
    {K0, K0, K1, K0, INT32_MIN, -7, K1, K0},
    {K1, K1, K1, K1, K1, K1, K1, K1},
    {S_KV, -1, INT32_MIN, 2147483647, S_KV + 1, -2, -3, -4},
    {K0, -1, -1, -1, -1, -1, -1, K1},
    {K1, K0, -1, S_KV, K0, K0, -1, INT32_MAX},
    {-1, -1, -1, -1, -1, -1, -1, K0},
};
enum { LISTS = sizeof lists / sizeof lists[0] };

static const int32_t lengths[S_Q] = {TOPK, TOPK + 12, -5, 4, INT32_MAX, INT32_MIN};

/* A byte, a scale or a value, spelled out; nothing here goes through kvformat.h but where a token is. */
static void put16(uint8_t *at, uint16_t value)
{
    memcpy(at, &value, sizeof value);
}

/* One token: `value` at `d`, 0 elsewhere. Quantised it is code · scale, with that group's scale and others elsewhere. */
static void put_token(uint8_t *page, int64_t page_size, int64_t slot, const struct format *f, int64_t d,
                      int twenty_four)
{
    static const float scales[4] = {2.0f, 0.25f, 8.0f, 1.0f};
    static const uint8_t exponents[7] = {128, 131, 125, 127, 120, 140, 127}; /* 2, 16, 1/4, … */
    if (f->last == 656) {
        uint8_t *token = page + slot * 656;
        memset(token, 0, 656);
        memcpy(token + 512, scales, sizeof scales);
        token[d] = twenty_four ? 0x54 /* 12 · 2 */ : 0x48 /* 4 · 0.25 */;
    } else if (f->last == 584) {
        uint8_t *token = page + slot * 576;
        memset(token, 0, 576);
        memcpy(page + page_size * 576 + slot * 8, exponents, 7); /* and not the pad byte */
        token[d] = twenty_four ? 0x54 /* 12 · 2 */ : 0x48 /* 4 · 1/4 */;
    } else {
        uint8_t *token = page + slot * f->d_qk * 2;
        memset(token, 0, (size_t)f->d_qk * 2);
        put16(token + 2 * d, twenty_four ? 0x41c0 : 0x3f80);
    }
}

static int near(double value, double expected, double relative)
{
    return value == expected || fabs(value - expected) <= relative * fmax(fabs(expected), 1e-3);
}

struct by_hand {
    const char *kernel;
    const struct format *f;
    int first_list, with_lengths, with_sink, base_2, minus;
};

/* The list of a token and key head. */
static int list_of(const struct by_hand *c, int token, int key_head)
{
    return (c->first_list + HEADS * token + key_head) % LISTS;
}

static void check_row(const struct by_hand *c, int token, int head, int key_head, const uint16_t *out,
                      float max_logit, float lse, float sink)
{
    const int32_t *list = lists[list_of(c, token, key_head)];
    const int64_t length = c->with_lengths ? lengths[token] : TOPK;
    const double s = 24.0 * (head % 2 + 1) / sqrt((double)c->f->d_qk);
    const double factor = c->base_2 ? 1.4426950408889634 : 1.0;
    int zeros = 0, tops = 0, wrong = 0;
    for (int i = 0; i < TOPK && i < length; i++) zeros += list[i] == K0, tops += list[i] == K1;
    const double sum = zeros + tops * exp(s), natural = log(sum);
    const double scale = c->with_sink && zeros + tops ? 1.0 / (1.0 + exp((double)sink - natural)) : 1.0;
    const double of_0 = tops ? 24.0 * tops * exp(s) / sum * scale : 0.0,
                 of_at = zeros ? zeros / sum * scale : 0;
    const double expected_max = tops ? s * factor : zeros ? 0.0 : -INFINITY;
    const double expected_lse = zeros + tops ? natural * factor : c->minus ? -INFINITY : INFINITY;
    char which[160];
    snprintf(which, sizeof which,
             "%s, %s, d_qk %d, list %d, token %d, head %d, lengths %d, sink %d, base 2 %d", c->kernel,
             c->f->name, (int)c->f->d_qk, c->first_list, token, head, c->with_lengths, c->with_sink,
             c->base_2);
    CHECK(near((double)max_logit, expected_max, 1e-5), "%s: max_logits %g, expected %g", which,
          (double)max_logit, expected_max);
    CHECK(near((double)lse, expected_lse, 1e-5), "%s: lse %g, expected %g", which, (double)lse, expected_lse);
    CHECK(near((double)num_from_bf16(out[0]), of_0, 1.0 / 128), "%s: out[0] %g, expected %g", which,
          (double)num_from_bf16(out[0]), of_0);
    CHECK(near((double)num_from_bf16(out[AT]), of_at, 1.0 / 128), "%s: out[%d] %g, expected %g", which, AT,
          (double)num_from_bf16(out[AT]), of_at);
    for (int d = 1; d < D_V; d++) wrong += d != AT && num_from_bf16(out[d]) != 0.0f;
    CHECK(wrong == 0, "%s: %d values of out are not 0", which, wrong);
}

/* A case over flat keys has two key heads, one over pages has one. */
static void check_by_hand(const struct by_hand *c)
{
    static _Alignas(64) uint8_t kv[S_KV * HEADS * 2 * WIDEST];
    static uint16_t q[S_Q * H_Q * WIDEST], out[S_Q * H_Q * D_V];
    static float max_data[S_Q * (H_Q + GAP)], lse_data[S_Q * (H_Q + GAP)];
    static int32_t indices[S_Q * HEADS * TOPK], length_data[S_Q];
    float sinks[H_Q] = {0.5f, -INFINITY, -1.0f, 2.0f};
    const struct format *f = c->f;
    const int heads = f->flat ? HEADS : 1;
    const int64_t page_bytes = f->last > f->d_qk ? PAGE * f->last : PAGE * 2 * f->d_qk;
    memset(kv, 0xff, sizeof kv), memset(q, 0, sizeof q), memset(out, 0xff, sizeof out);
    memset(max_data, 0x55, sizeof max_data), memset(lse_data, 0x55, sizeof lse_data);
    if (f->flat) { /* a key of two heads is two tokens here */
        put_token(kv, 1, K0 * HEADS, f, AT, 0), put_token(kv, 1, K1 * HEADS, f, 0, 1);
        put_token(kv, 1, (K0 - 2) * HEADS + 1, f, AT, 0), put_token(kv, 1, (K1 - 2) * HEADS + 1, f, 0, 1);
    } else {
        put_token(kv + page_bytes, PAGE, 1, f, AT, 0), put_token(kv + page_bytes, PAGE, 0, f, 0, 1);
    }
    for (int j = 0; j < S_Q; j++) {
        length_data[j] = lengths[j];
        for (int h = 0; h < H_Q; h++) q[(j * H_Q + h) * f->d_qk] = h % 2 ? 0x4000 : 0x3f80; /* 2, 1 */
        for (int k = 0; k < heads; k++)
            for (int i = 0; i < TOPK; i++) {
                const int32_t index = lists[list_of(c, j, k)][i];
                indices[(j * heads + k) * TOPK + i] = k && (index == K0 || index == K1) ? index - 2 : index;
            }
    }
    struct held hq, hkv, hidx, hlen, hout, hmax, hlse, hsink;
    fmla_sparse_prefill_args args = FMLA_INIT(fmla_sparse_prefill_args);
    args.q = hold(&hq, q, bf16, 3, S_Q, H_Q, f->d_qk, 0);
    args.kv = f->flat ? hold(&hkv, kv, bf16, 3, S_KV, HEADS, f->d_qk, 0)
                      : hold(&hkv, kv, f->last > f->d_qk ? byte : bf16, 4, S_KV / PAGE, PAGE, 1, f->last);
    args.indices = hold(&hidx, indices, i32, 3, S_Q, heads, TOPK, 0);
    args.topk_length = c->with_lengths ? hold(&hlen, length_data, i32, 1, S_Q, 0, 0, 0) : NULL;
    args.attn_sink = c->with_sink ? hold(&hsink, sinks, f32, 1, H_Q, 0, 0, 0) : NULL;
    args.out = hold(&hout, out, bf16, 3, S_Q, H_Q, D_V, 0);
    args.max_logits = hold_rows(&hmax, max_data, S_Q, H_Q), args.lse = hold_rows(&hlse, lse_data, S_Q, H_Q);
    args.kv_format = f->public_name, args.kernel = c->kernel;
    args.log_base = c->base_2 ? FMLA_LOG_BASE_2 : FMLA_LOG_NATURAL;
    args.lse_empty = c->minus ? FMLA_LSE_EMPTY_NEGATIVE_INFINITY : FMLA_LSE_EMPTY_POSITIVE_INFINITY;
    CHECK(run(&args) == FMLA_OK, "%s, %s: %s", c->kernel, f->name, fmla_last_error());
    for (int j = 0; j < S_Q; j++) {
        const int at = j * (H_Q + GAP);
        for (int h = 0; h < H_Q; h++)
            check_row(c, j, h, h / (H_Q / heads), out + (j * H_Q + h) * D_V, max_data[at + h],
                      lse_data[at + h], sinks[h]);
        uint8_t gap[GAP * sizeof(float)];
        memset(gap, 0x55, sizeof gap);
        CHECK(!memcmp(gap, &max_data[at + H_Q], sizeof gap) && !memcmp(gap, &lse_data[at + H_Q], sizeof gap),
              "%s, %s: written between the rows", c->kernel, f->name);
    }
}

/* ---- The oracle against that of sparse decode ------------------------------------------------ */

enum {
    MOST_KEYS = 50,
    ROWS_OF_HEAD = 3,
    TOKENS = 4,
    LIST = 40,
    KEY_HEADS = 2,
    GROUPS = KEY_HEADS * ROWS_OF_HEAD
};

/* Key head by key head, over pages of one key. */
static void check_oracle(int64_t d_qk, struct random_state *random)
{
    static uint16_t q[TOKENS * GROUPS * WIDEST], kv[MOST_KEYS * KEY_HEADS * WIDEST],
        out[TOKENS * GROUPS * D_V], expected[TOKENS * GROUPS * D_V];
    static int32_t indices[TOKENS * KEY_HEADS * LIST];
    static float lse[TOKENS * (GROUPS + GAP)], expected_lse[TOKENS * GROUPS], sinks[GROUPS];
    int32_t length_data[TOKENS] = {LIST + 9, -3, 23, 1};
    for (size_t i = 0; i < sizeof q / 2; i++) q[i] = num_to_bf16(random_input(random, 0.0f, 1.0f));
    for (size_t i = 0; i < sizeof kv / 2; i++) kv[i] = num_to_bf16(random_input(random, 0.0f, 0.3f));
    for (int i = 0; i < TOKENS * KEY_HEADS * LIST; i++)
        indices[i] = (int32_t)random_between(random, -5, MOST_KEYS + 5);
    for (int h = 0; h < GROUPS; h++) sinks[h] = random_input(random, 0.0f, 1.0f);

    struct held hq, hkv, hidx, hlen, hout, hlse, hsink;
    fmla_sparse_prefill_args args = FMLA_INIT(fmla_sparse_prefill_args);
    args.q = hold(&hq, q, bf16, 3, TOKENS, GROUPS, d_qk, 0);
    args.kv = hold(&hkv, kv, bf16, 3, MOST_KEYS, KEY_HEADS, d_qk, 0);
    args.indices = hold(&hidx, indices, i32, 3, TOKENS, KEY_HEADS, LIST, 0);
    args.topk_length = hold(&hlen, length_data, i32, 1, TOKENS, 0, 0, 0);
    args.attn_sink = hold(&hsink, sinks, f32, 1, GROUPS, 0, 0, 0);
    args.out = hold(&hout, out, bf16, 3, TOKENS, GROUPS, D_V, 0);
    args.lse = hold_rows(&hlse, lse, TOKENS, GROUPS);
    args.kernel = "ref", args.softmax_scale = 0.05f;
    CHECK_OK(run(&args));

    for (int k = 0; k < KEY_HEADS; k++) {
        const int first = k * ROWS_OF_HEAD;
        static double workspace[LIST * (WIDEST + 1) + 2 * WIDEST];
        struct held sq, skv, sidx, sout, slse, ssink;
        fmla_sparse_decode_args decode = FMLA_INIT(fmla_sparse_decode_args);
        hold(&sq, q + first * d_qk, bf16, 4, TOKENS, 1, ROWS_OF_HEAD, d_qk);
        sq.strides[0] = GROUPS * d_qk, sq.strides[2] = d_qk, sq.strides[3] = 1;
        hold(&skv, kv + k * d_qk, bf16, 4, MOST_KEYS, 1, 1, d_qk);
        skv.strides[0] = KEY_HEADS * d_qk, skv.strides[3] = 1;
        hold(&sidx, indices + k * LIST, i32, 3, TOKENS, 1, LIST, 0);
        sidx.strides[0] = KEY_HEADS * LIST, sidx.strides[2] = 1;
        hold(&sout, expected + first * D_V, bf16, 4, TOKENS, 1, ROWS_OF_HEAD, D_V);
        sout.strides[0] = GROUPS * D_V, sout.strides[2] = D_V, sout.strides[3] = 1;
        hold(&slse, expected_lse + first, f32, 3, TOKENS, ROWS_OF_HEAD, 1, 0);
        slse.strides[0] = GROUPS, slse.strides[1] = 1, slse.strides[2] = 1;
        struct held *const strided[] = {&sq, &skv, &sidx, &sout, &slse};
        for (int i = 0; i < 5; i++) strided[i]->tensor.strides = strided[i]->strides;
        decode.q = &sq.tensor, decode.kv_cache = &skv.tensor, decode.indices = &sidx.tensor;
        decode.topk_length = args.topk_length, decode.out = &sout.tensor, decode.lse = &slse.tensor;
        decode.attn_sink = hold(&ssink, sinks + first, f32, 1, ROWS_OF_HEAD, 0, 0, 0);
        decode.kernel = "ref", decode.softmax_scale = args.softmax_scale;
        decode.workspace = workspace, decode.workspace_size = sizeof workspace;
        CHECK_OK(fmla_sparse_decode(&decode));
    }
    CHECK(!memcmp(out, expected, sizeof out), "d_qk %d: out differs from that of sparse decode", (int)d_qk);
    for (int j = 0; j < TOKENS; j++)
        CHECK(!memcmp(lse + j * (GROUPS + GAP), expected_lse + j * GROUPS, GROUPS * sizeof(float)),
              "d_qk %d: lse of token %d differs from that of sparse decode", (int)d_qk, j);
}

/* ---- Few tokens, whose lists are cut --------------------------------------------------------- */

enum { LONG = 700, HEADS_OF_LONG = 3, KEYS_OF_LONG = 300 };

struct result {
    uint16_t out[HEADS_OF_LONG * D_V];
    float max_logits[HEADS_OF_LONG], lse[HEADS_OF_LONG];
};

static void check_threads(const char *kernel, struct random_state *random)
{
    static uint16_t q[HEADS_OF_LONG * WIDEST], kv[KEYS_OF_LONG * WIDEST];
    static int32_t indices[LONG];
    static struct result oracle, first, again;
    for (size_t i = 0; i < sizeof q / 2; i++) q[i] = num_to_bf16(random_input(random, 0.0f, 0.3f));
    for (size_t i = 0; i < sizeof kv / 2; i++) kv[i] = num_to_bf16(random_input(random, 0.0f, 0.3f));
    for (int i = 0; i < LONG; i++) indices[i] = (int32_t)random_between(random, -50, KEYS_OF_LONG - 1);
    for (int i = 64; i < 640; i++) indices[i] = i < 500 ? -1 : indices[i]; /* whole chunks without a key */
    struct held hq, hkv, hidx, hout, hmax, hlse;
    fmla_sparse_prefill_args args = FMLA_INIT(fmla_sparse_prefill_args);
    args.q = hold(&hq, q, bf16, 3, 1, HEADS_OF_LONG, WIDEST, 0);
    args.kv = hold(&hkv, kv, bf16, 3, KEYS_OF_LONG, 1, WIDEST, 0);
    args.indices = hold(&hidx, indices, i32, 3, 1, 1, LONG, 0);
    args.softmax_scale = 0.5f;
    static const int32_t threads[] = {1, 2, 5, 16};
    for (int i = -1; i < 4; i++) {
        struct result *const into = i < 0 ? &oracle : &first;
        CHECK_OK(fmla_set_num_threads(i < 0 ? 1 : threads[i]));
        args.kernel = i < 0 ? "ref" : kernel;
        for (int time = 0; time < 2; time++) {
            struct result *const r = time ? &again : into;
            memset(r, 0xff, sizeof *r);
            args.out = hold(&hout, r->out, bf16, 3, 1, HEADS_OF_LONG, D_V, 0);
            args.max_logits = hold(&hmax, r->max_logits, f32, 2, 1, HEADS_OF_LONG, 0, 0);
            args.lse = hold(&hlse, r->lse, f32, 2, 1, HEADS_OF_LONG, 0, 0);
            CHECK(run(&args) == FMLA_OK, "%s: %s", kernel, fmla_last_error());
        }
        CHECK(!memcmp(into, &again, sizeof again), "%s, threads %d: other bits the second time", kernel, i);
        if (i < 0) continue;
        for (int h = 0; h < HEADS_OF_LONG; h++) {
            CHECK(near((double)first.max_logits[h], (double)oracle.max_logits[h], 1e-5),
                  "%s, %d threads: max_logits %g, expected %g", kernel, threads[i],
                  (double)first.max_logits[h], (double)oracle.max_logits[h]);
            CHECK(near((double)first.lse[h], (double)oracle.lse[h], 1e-5),
                  "%s, %d threads: lse %g, expected %g", kernel, threads[i], (double)first.lse[h],
                  (double)oracle.lse[h]);
        }
        int wrong = 0;
        for (int d = 0; d < HEADS_OF_LONG * D_V; d++)
            wrong += !(fabsf(num_from_bf16(first.out[d]) - num_from_bf16(oracle.out[d])) < 4e-3f);
        CHECK(wrong == 0, "%s, %d threads: %d values of out are off", kernel, threads[i], wrong);
    }
    CHECK_OK(fmla_set_num_threads(0));
}

int main(void)
{
    struct random_state random = {11};
    int kernels = 0;
    fmla_capability row = FMLA_INIT(fmla_capability);
    unsetenv("FLASHMLA_KERNEL");
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++) {
        if (strcmp(row.operation, "sparse_prefill") != 0 || !row.available) continue;
        kernels++;
        for (int f = 0; f < FORMATS; f++)
            for (int list = 0; list < LISTS; list++)
                for (int options = 0; options < 8; options++)
                    check_by_hand(&(struct by_hand){row.kernel, &formats[f], list, options & 1,
                                                    options >> 1 & 1, options >> 2 & 1, list & 1});
        check_threads(row.kernel, &random);
    }
    CHECK(kernels >= 2, "%d kernels, and the oracle must be one", kernels);
    check_oracle(576, &random);
    check_oracle(512, &random);
    return check_done("test_sparse_prefill_values");
}
