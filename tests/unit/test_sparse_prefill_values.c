/* SPDX-License-Identifier: MIT
 *
 * Tests sparse prefill: results computed by hand, for every kernel and the oracle, in every cache format;
 * the oracle against that of sparse decode, one key head at a time; and few tokens, whose lists are split,
 * with any number of threads.
 */
#include "values.h"

enum { GAP = 3 /* between rows of max_logits and lse */ };

static const struct format formats[] = {
    {"flat", FMLA_KV_BF16, KV_BF16, 576, 576, 1},
    {"flat", 0, KV_BF16, 512, 512, 1},
    {"BF16", 0, KV_BF16, 576, 576, 0},
    {"BF16", FMLA_KV_BF16, KV_BF16, 512, 512, 0},
    FORMATS_OF_BYTES,
};
enum { FORMATS = sizeof formats / sizeof formats[0] };

/* A result with one number per row and GAP numbers between tokens. */
static const fmla_tensor *hold_rows(struct held *held, float *data, int64_t s_q, int64_t h_q)
{
    HELD(held, data, f32, 2, s_q, h_q);
    held->strides[0] = h_q + GAP;
    return &held->tensor;
}

/* ---- By hand --------------------------------------------------------------------------------- */

enum { S_Q = 6, H_Q = 4, S_KV = 4, PAGE = 2, TOPK = 8, HEADS = 2 };

/* Contents of lists: for key head 0, k0 is key 3 and k1 key 2. For key head 1 they are keys 1 and 0. */
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

/* Like near(), except for values near 0. */
static int close_to(double value, double expected, double relative)
{
    return near(value, expected, relative) || fabs(value - expected) <= relative * 1e-3;
}

struct way {
    const char *kernel;
    const struct format *f;
    int first_list, with_lengths, with_sink, base_2, minus;
};

/* Returns the list of a token and key head. */
static int list_of(const struct way *c, int token, int key_head)
{
    return (c->first_list + HEADS * token + key_head) % LISTS;
}

static void check_token(const struct way *c, int token, int head, int key_head, const uint16_t *out,
                        float max_logit, float lse, float sink)
{
    const int32_t *list = lists[list_of(c, token, key_head)];
    const int64_t length = c->with_lengths ? lengths[token] : TOPK;
    const double factor = c->base_2 ? 1.4426950408889634 : 1.0;
    int zeros = 0, tops = 0;
    for (int i = 0; i < TOPK && i < length; i++) zeros += list[i] == K0, tops += list[i] == K1;
    struct by_hand e = work_out(zeros, tops, head % 2 + 1, c->f->d_qk, c->with_sink ? &sink : NULL);
    e.most *= factor, e.lse = !zeros && !tops && c->minus ? -INFINITY : e.lse * factor;
    char which[160];
    snprintf(which, sizeof which,
             "%s, %s, d_qk %d, list %d, token %d, head %d, lengths %d, sink %d, base 2 %d", c->kernel,
             c->f->name, (int)c->f->d_qk, c->first_list, token, head, c->with_lengths, c->with_sink,
             c->base_2);
    CHECK(near((double)max_logit, e.most, 1e-5), "%s: max_logits %g, expected %g", which, (double)max_logit,
          e.most);
    check_row(which, out, (double)lse, c->f, e);
}

/* A case over flat keys has two key heads, one over pages has one. */
static void check_by_hand(const struct way *c)
{
    static _Alignas(64) uint8_t kv[S_KV * HEADS * 2 * WIDEST];
    static uint16_t q[S_Q * H_Q * WIDEST], out[S_Q * H_Q * D_V];
    static float max_data[S_Q * (H_Q + GAP)], lse_data[S_Q * (H_Q + GAP)];
    static int32_t indices[S_Q * HEADS * TOPK], length_data[S_Q];
    float sinks[H_Q] = {0.5f, -INFINITY, -1.0f, 2.0f};
    const struct format *f = c->f;
    const int heads = f->flat ? HEADS : 1;
    const int64_t page_bytes = bytes_of_page(f, PAGE);
    memset(kv, 0xff, sizeof kv), memset(q, 0, sizeof q), memset(out, 0xff, sizeof out);
    memset(max_data, 0x55, sizeof max_data), memset(lse_data, 0x55, sizeof lse_data);
    if (f->flat) { /* a key of two heads counts as two tokens here */
        put_keys(kv, 1, K0 * HEADS, K1 * HEADS, f);
        put_keys(kv, 1, (K0 - 2) * HEADS + 1, (K1 - 2) * HEADS + 1, f);
    } else {
        put_keys(kv + page_bytes, PAGE, 1, 0, f);
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
    fmla_sparse_prefill_args args = FMLA_INIT(fmla_sparse_prefill_args);
    args.q = TENSOR_OF(q, bf16, S_Q, H_Q, f->d_qk);
    args.kv = f->flat ? TENSOR_OF(kv, bf16, S_KV, HEADS, f->d_qk)
                      : TENSOR_OF(kv, cache_type_of(f), S_KV / PAGE, PAGE, 1, f->last);
    args.indices = TENSOR_OF(indices, i32, S_Q, heads, TOPK);
    args.topk_length = c->with_lengths ? TENSOR_OF(length_data, i32, S_Q) : NULL;
    args.attn_sink = c->with_sink ? TENSOR_OF(sinks, f32, H_Q) : NULL;
    args.out = TENSOR_OF(out, bf16, S_Q, H_Q, D_V);
    args.max_logits = hold_rows(&(struct held){0}, max_data, S_Q, H_Q);
    args.lse = hold_rows(&(struct held){0}, lse_data, S_Q, H_Q);
    args.kv_format = f->public_name, args.kernel = c->kernel;
    args.log_base = c->base_2 ? FMLA_LOG_BASE_2 : FMLA_LOG_NATURAL;
    args.lse_empty = c->minus ? FMLA_LSE_EMPTY_NEGATIVE_INFINITY : FMLA_LSE_EMPTY_POSITIVE_INFINITY;
    CHECK(run_in_room(OP_SPARSE_PREFILL, &args) == FMLA_OK, "%s, %s: %s", c->kernel, f->name,
          fmla_last_error());
    for (int j = 0; j < S_Q; j++) {
        const int at = j * (H_Q + GAP);
        for (int h = 0; h < H_Q; h++)
            check_token(c, j, h, h / (H_Q / heads), out + (j * H_Q + h) * D_V, max_data[at + h],
                        lse_data[at + h], sinks[h]);
        uint8_t gap[GAP * sizeof(float)];
        memset(gap, 0x55, sizeof gap);
        CHECK(!memcmp(gap, &max_data[at + H_Q], sizeof gap) && !memcmp(gap, &lse_data[at + H_Q], sizeof gap),
              "%s, %s: written between the rows", c->kernel, f->name);
    }
}

/* ---- The oracle against that of sparse decode ------------------------------------------------ */

enum { MOST_KEYS = 50, ROWS_OF_HEAD = 3, TOKENS = 4, LIST = 40, KEY_HEADS = 2, GROUPS = 6 };

/* Compares key head by key head, over pages of one key. */
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

    fmla_sparse_prefill_args args = FMLA_INIT(fmla_sparse_prefill_args);
    args.q = TENSOR_OF(q, bf16, TOKENS, GROUPS, d_qk),
    args.kv = TENSOR_OF(kv, bf16, MOST_KEYS, KEY_HEADS, d_qk);
    args.indices = TENSOR_OF(indices, i32, TOKENS, KEY_HEADS, LIST);
    args.topk_length = TENSOR_OF(length_data, i32, TOKENS), args.attn_sink = TENSOR_OF(sinks, f32, GROUPS);
    args.out = TENSOR_OF(out, bf16, TOKENS, GROUPS, D_V);
    args.lse = hold_rows(&(struct held){0}, lse, TOKENS, GROUPS);
    args.kernel = "ref", args.softmax_scale = 0.05f;
    CHECK_OK(run_in_room(OP_SPARSE_PREFILL, &args));

    for (int k = 0; k < KEY_HEADS; k++) {
        const int first = k * ROWS_OF_HEAD;
        struct held sq, skv, sidx, sout, slse;
        fmla_sparse_decode_args decode = FMLA_INIT(fmla_sparse_decode_args);
        HELD(&sq, q + first * d_qk, bf16, 4, TOKENS, 1, ROWS_OF_HEAD, d_qk);
        HELD(&skv, kv + k * d_qk, bf16, 4, MOST_KEYS, 1, 1, d_qk);
        HELD(&sidx, indices + k * LIST, i32, 3, TOKENS, 1, LIST);
        HELD(&sout, expected + first * D_V, bf16, 4, TOKENS, 1, ROWS_OF_HEAD, D_V);
        HELD(&slse, expected_lse + first, f32, 3, TOKENS, ROWS_OF_HEAD, 1);
        sq.strides[0] = GROUPS * d_qk, skv.strides[0] = KEY_HEADS * d_qk, sidx.strides[0] = KEY_HEADS * LIST;
        sout.strides[0] = GROUPS * D_V, slse.strides[0] = GROUPS;
        decode.q = &sq.tensor, decode.kv_cache = &skv.tensor, decode.indices = &sidx.tensor;
        decode.topk_length = args.topk_length, decode.out = &sout.tensor, decode.lse = &slse.tensor;
        decode.attn_sink = TENSOR_OF(sinks + first, f32, ROWS_OF_HEAD);
        decode.kernel = "ref", decode.softmax_scale = args.softmax_scale;
        CHECK_OK(run_in_room(OP_SPARSE_DECODE, &decode));
    }
    CHECK(!memcmp(out, expected, sizeof out), "d_qk %d: out differs from that of sparse decode", (int)d_qk);
    for (int j = 0; j < TOKENS; j++)
        CHECK(!memcmp(lse + j * (GROUPS + GAP), expected_lse + j * GROUPS, GROUPS * sizeof(float)),
              "d_qk %d: lse of token %d differs from that of sparse decode", (int)d_qk, j);
}

/* ---- Few tokens, whose lists are split --------------------------------------------------------- */

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
    fmla_sparse_prefill_args args = FMLA_INIT(fmla_sparse_prefill_args);
    args.q = TENSOR_OF(q, bf16, 1, HEADS_OF_LONG, WIDEST);
    args.kv = TENSOR_OF(kv, bf16, KEYS_OF_LONG, 1, WIDEST);
    args.indices = TENSOR_OF(indices, i32, 1, 1, LONG);
    args.softmax_scale = 0.5f;
    static const int32_t threads[] = {1, 2, 5, 16};
    for (int i = -1; i < 4; i++) {
        struct result *const into = i < 0 ? &oracle : &first;
        CHECK_OK(fmla_set_num_threads(i < 0 ? 1 : threads[i]));
        args.kernel = i < 0 ? "ref" : kernel;
        for (int time = 0; time < 2; time++) {
            struct result *const r = time ? &again : into;
            memset(r, 0xff, sizeof *r);
            args.out = TENSOR_OF(r->out, bf16, 1, HEADS_OF_LONG, D_V);
            args.max_logits = TENSOR_OF(r->max_logits, f32, 1, HEADS_OF_LONG);
            args.lse = TENSOR_OF(r->lse, f32, 1, HEADS_OF_LONG);
            CHECK(run_in_room(OP_SPARSE_PREFILL, &args) == FMLA_OK, "%s: %s", kernel, fmla_last_error());
        }
        CHECK(!memcmp(into, &again, sizeof again), "%s, threads %d: other bits the second time", kernel, i);
        if (i < 0) continue;
        for (int h = 0; h < HEADS_OF_LONG; h++) {
            CHECK(close_to((double)first.max_logits[h], (double)oracle.max_logits[h], 1e-5),
                  "%s, %d threads: max_logits %g, expected %g", kernel, threads[i],
                  (double)first.max_logits[h], (double)oracle.max_logits[h]);
            CHECK(close_to((double)first.lse[h], (double)oracle.lse[h], 1e-5),
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

static void check_kernel(const fmla_capability *row)
{
    struct random_state random = {11};
    for (int f = 0; f < FORMATS; f++)
        for (int list = 0; list < LISTS; list++)
            for (int options = 0; options < 8; options++)
                check_by_hand(&(struct way){row->kernel, &formats[f], list, options & 1, options >> 1 & 1,
                                            options >> 2 & 1, list & 1});
    check_threads(row->kernel, &random);
}

int main(void)
{
    struct random_state random = {11};
    unsetenv("FLASHMLA_KERNEL");
    for_kernels(OP_SPARSE_PREFILL, check_kernel);
    check_oracle(576, &random);
    check_oracle(512, &random);
    return check_done("test_sparse_prefill_values");
}
