/* SPDX-License-Identifier: MIT
 *
 * Tests gradients of dense MHA: the oracle against finite differences, and every kernel against a closed
 * form.
 *
 * Finite differences are of attention in double, which is first compared with the forward oracle. Calls with
 * a planted defect must be detected.
 *
 * Closed form: all keys are 0, so a row gives equal weight to the n keys that it sees, lse = ln n. With
 * dout = c and v = 0 or 1 in all elements, dS = c d_v (v - out) / n, dq = 0, and dk and dv are sums of few
 * terms.
 */
#include "values.h"

/* ---- Finite differences ------------------------------------------------------------------------ */

enum { REQUESTS = 3, TOKENS = 8, KEYS = 9, HEADS = 4, KEY_HEADS = 2, D_QK = 6, DV = 5 };
enum {
    NQ = TOKENS * HEADS * D_QK,
    NK = KEYS * KEY_HEADS * D_QK,
    NV = KEYS * KEY_HEADS * DV,
    NO = TOKENS * HEADS * DV
};

/* The second to last request has more tokens than keys, so its first rows see nothing with a mask. */
static const int32_t starts[2][REQUESTS + 1] = {{0, 3, 7, 8}, {0, 5, 7, 9}};

struct numbers {
    double q[NQ], k[NK], v[NV], dout[NO];
    int causal;
    double scale;
};

/* Returns Σ out · dout, and optionally out and the natural lse. */
static double attend(const struct numbers *n, double *out, double *lse)
{
    double loss = 0.0;
    for (int r = 0; r < REQUESTS; r++)
        for (int i = starts[0][r]; i < starts[0][r + 1]; i++)
            for (int h = 0; h < HEADS; h++) {
                const int g = h / (HEADS / KEY_HEADS), first = starts[1][r],
                          seen = n->causal ? starts[1][r + 1] - starts[0][r + 1] + i + 1 : starts[1][r + 1];
                double weight[KEYS] = {0}, total = 0.0, value[DV] = {0};
                for (int t = first; t < seen; t++) {
                    double s = 0.0;
                    for (int d = 0; d < D_QK; d++)
                        s += n->q[(i * HEADS + h) * D_QK + d] * n->k[(t * KEY_HEADS + g) * D_QK + d];
                    total += weight[t] = exp(n->scale * s);
                }
                for (int t = first; t < seen; t++)
                    for (int d = 0; d < DV; d++)
                        value[d] += weight[t] / total * n->v[(t * KEY_HEADS + g) * DV + d];
                for (int d = 0; d < DV; d++) {
                    loss += value[d] * n->dout[(i * HEADS + h) * DV + d];
                    if (out) out[(i * HEADS + h) * DV + d] = value[d];
                }
                if (lse) lse[h * TOKENS + i] = seen > first ? log(total) : INFINITY;
            }
    return loss;
}

static void draw(double *x, uint16_t *code, int count, struct random_state *random)
{
    for (int i = 0; i < count; i++)
        code[i] = num_to_fp16(random_input(random, 0.0f, 0.7f)), x[i] = (double)num_from_fp16(code[i]);
}

struct sixteen {
    uint16_t q[NQ], k[NK], v[NV], dout[NO], out[NO], dq[NQ], dk[NK], dv[NV];
    float lse[HEADS * TOKENS];
};

/* Returns how many of `count` gradients differ from the loss's. */
static int differ(struct numbers *n, double *x, const uint16_t *gradient, int count)
{
    const double step = 1e-4;
    double most = 0.0, apart[NQ];
    int wrong = 0;
    for (int i = 0; i < count; i++) {
        const double was = x[i];
        x[i] = was + step;
        const double above = attend(n, NULL, NULL);
        x[i] = was - step;
        const double expected = (above - attend(n, NULL, NULL)) / (2 * step);
        x[i] = was;
        most = fmax(most, fabs(expected));
        apart[i] = fabs(expected - (double)num_from_fp16(gradient[i]));
    }
    for (int i = 0; i < count; i++) wrong += !(apart[i] <= most / 512);
    return wrong;
}

enum planted { NOTHING, SCALE, MASK, BASE, OUT, DOUT, KEY, LSE, VALUES, PLANTED };

static int count_wrong(int causal, enum planted planted)
{
    static struct numbers n;
    static struct sixteen s;
    int32_t own[2][REQUESTS + 1];
    struct random_state random = {29};
    double out[NO], lse[HEADS * TOKENS];
    int wrong = 0;
    n.causal = causal, n.scale = 0.6;
    draw(n.q, s.q, NQ, &random), draw(n.k, s.k, NK, &random), draw(n.v, s.v, NV, &random);
    draw(n.dout, s.dout, NO, &random);
    attend(&n, out, lse);
    memcpy(own, starts, sizeof own);
    fmla_mha_forward_args forward = FMLA_INIT(fmla_mha_forward_args);
    fmla_mha_backward_args args = FMLA_INIT(fmla_mha_backward_args);
    args.q = forward.q = TENSOR_OF(s.q, fp16, TOKENS, HEADS, D_QK);
    args.k = forward.k = TENSOR_OF(s.k, fp16, KEYS, KEY_HEADS, D_QK);
    args.v = forward.v = TENSOR_OF(s.v, fp16, KEYS, KEY_HEADS, DV);
    args.cu_seqlens_q = forward.cu_seqlens_q = TENSOR_OF(own[0], i32, REQUESTS + 1);
    args.cu_seqlens_k = forward.cu_seqlens_k = TENSOR_OF(own[1], i32, REQUESTS + 1);
    args.out = forward.out = TENSOR_OF(s.out, fp16, TOKENS, HEADS, DV);
    args.lse = forward.lse = TENSOR_OF(s.lse, f32, HEADS, TOKENS);
    args.dout = TENSOR_OF(s.dout, fp16, TOKENS, HEADS, DV);
    args.dq = TENSOR_OF(s.dq, fp16, TOKENS, HEADS, D_QK);
    args.dk = TENSOR_OF(s.dk, fp16, KEYS, KEY_HEADS, D_QK);
    args.dv = TENSOR_OF(s.dv, fp16, KEYS, KEY_HEADS, DV);
    args.causal = forward.causal = causal;
    args.softmax_scale = forward.softmax_scale = 0.6f;
    args.log_base = forward.log_base = causal ? FMLA_LOG_BASE_2 : FMLA_LOG_NATURAL;
    args.kernel = forward.kernel = "ref";
    CHECK(run_in_room(OP_MHA_FORWARD, &forward) == FMLA_OK, "%s", fmla_last_error());
    for (int i = 0; i < NO; i++) wrong += !(fabs(out[i] - (double)num_from_fp16(s.out[i])) < 1e-3);
    for (int i = 0; i < HEADS * TOKENS; i++)
        wrong +=
            !near((double)s.lse[i], lse[i] * (causal ? 1.4426950408889634 : 1.0), 1e-5) && !isinf(lse[i]);
    CHECK(!wrong, "attention in double is not the forward oracle's: %d numbers", wrong);
    if (planted == SCALE) args.softmax_scale = 0.5f;
    if (planted == MASK) args.causal = !causal;
    if (planted == BASE) args.log_base = causal ? FMLA_LOG_NATURAL : FMLA_LOG_BASE_2;
    if (planted == OUT) s.out[NO - 1] = num_to_fp16(num_from_fp16(s.out[NO - 1]) + 0.3f);
    if (planted == DOUT) s.dout[3] = num_to_fp16(num_from_fp16(s.dout[3]) + 0.3f);
    if (planted == KEY) own[1][1]--;
    if (planted == LSE) s.lse[HEADS * TOKENS - 1] += 0.05f;
    if (planted == VALUES) s.v[7] = num_to_fp16(num_from_fp16(s.v[7]) + 0.3f);
    CHECK(run_in_room(OP_MHA_BACKWARD, &args) == FMLA_OK, "%s", fmla_last_error());
    return differ(&n, n.q, s.dq, NQ) + differ(&n, n.k, s.dk, NK) + differ(&n, n.v, s.dv, NV);
}

static void check_differences(void)
{
    for (int causal = 0; causal < 2; causal++)
        for (int planted = NOTHING; planted < PLANTED; planted++) {
            const int wrong = count_wrong(causal, (enum planted)planted);
            CHECK(!wrong == !planted, "causal %d, defect %d: %d gradients differ", causal, planted, wrong);
        }
}

/* ---- The closed form --------------------------------------------------------------------------- */

enum { MOST = 3, ROOM = 1 << 19, UNWRITTEN = 0x5555 };

static const struct problem {
    const char *name;
    bool flat;
    int64_t b, q, k;
    int32_t starts[2][MOST + 1];
    struct {
        int64_t first_q, tokens, first_k, keys;
    } spans[MOST];
} problems[] = {
    {.name = "one row, one key", .b = 1, .q = 1, .k = 1},
    {.name = "more keys than tokens", .b = 2, .q = 5, .k = 9},
    {.name = "fewer keys than tokens", .b = 2, .q = 7, .k = 3},
    {.name = "over tiles and blocks", .b = 1, .q = 150, .k = 150},
    {.name = "no keys", .b = 2, .q = 3, .k = 0},
    {.name = "no tokens", .b = 2, .q = 0, .k = 3},
    {"requests of any length",
     true,
     3,
     90,
     150,
     {{0, 3, 3, 90}, {0, 70, 75, 150}},
     {{0, 3, 0, 70}, {3, 0, 70, 5}, {3, 87, 75, 75}}},
    {"tokens of no request", true, 2, 90, 90, {{2, 5, 80}, {10, 10, 90}}, {{2, 3, 10, 0}, {5, 75, 10, 80}}},
    {.name = "no request", .flat = true, .q = 90, .k = 150, .starts = {{70}, {3}}},
};

struct way {
    const char *kernel;
    const struct problem *problem;
    bool packed; /* a token's heads of q, k and v are adjacent, and so are their gradients */
    int64_t d_qk, d_v, h_q, h_kv;
    int causal, base_2, minus;
    struct format f;
};

enum { Q, K, V, OUTS, DOUTS, DQ, DK, DV_, PLACES };

struct place {
    struct held held;
    int64_t request, token, head, tokens, heads, width;
};

static uint16_t memory[PLACES][ROOM];
static float lse_memory[ROOM];

static void put_place(struct place *p, const struct way *w, uint16_t *at, bool of_keys, int64_t width,
                      int64_t token)
{
    const struct problem *const problem = w->problem;
    const int64_t tokens = of_keys ? problem->k : problem->q, heads = of_keys ? w->h_kv : w->h_q,
                  shape[] = {problem->b, tokens, heads, width}, strides[] = {token * tokens, token, width, 1};
    if (problem->b * tokens * token > ROOM) abort();
    *p = (struct place){.request = strides[0],
                        .token = token,
                        .head = width,
                        .tokens = tokens,
                        .heads = heads,
                        .width = width};
    held_set(&p->held, at, type_of(&w->f), 4 - problem->flat, shape + problem->flat);
    memcpy(p->held.strides, strides + problem->flat, (size_t)(4 - problem->flat) * sizeof *strides);
}

static uint16_t *row_at(const struct place *p, int64_t request, int64_t token, int64_t head)
{
    return (uint16_t *)p->held.tensor.data + request * p->request + token * p->token + head * p->head;
}

static float dout_of(int64_t token, int64_t head)
{
    return (float)(1 + (token + head) % 3) / 4.0f;
}

/* Checks the gradients of one request by their definition in double over the rows. */
static void check_request(const struct way *w, const struct place *places, int64_t r)
{
    const struct problem *const p = w->problem;
    const int64_t at = p->flat ? 0 : r, first_q = p->spans[r].first_q, first_k = p->spans[r].first_k,
                  tokens = p->flat ? p->spans[r].tokens : p->q, keys = p->flat ? p->spans[r].keys : p->k,
                  group = w->h_q / w->h_kv;
    const double scale = 0.25;
    int64_t wrong[3] = {0};
    for (int64_t j = 0; j < tokens; j++)
        for (int64_t h = 0; h < w->h_q; h++)
            for (int64_t d = 0; d < w->d_qk; d++)
                wrong[0] += value_of(row_at(&places[DQ], at, first_q + j, h)[d], &w->f) != 0.0f;
    for (int64_t t = 0; t < keys; t++)
        for (int64_t g = 0; g < w->h_kv; g++) {
            double dk = 0.0, dv = 0.0;
            for (int64_t j = 0; j < tokens; j++)
                for (int64_t h = g * group; h < (g + 1) * group; h++) {
                    const int64_t seen = w->causal ? keys - tokens + j + 1 : keys;
                    if (t >= seen) continue;
                    const double c = (double)dout_of(j, h), n = (double)seen,
                                 out = (double)value_of(*row_at(&places[OUTS], at, first_q + j, h), &w->f);
                    dk += scale * c * (double)w->d_v * ((double)(t % 2) - out) / n * 0.5;
                    dv += c / n;
                }
            const uint16_t *of_k = row_at(&places[DK], at, first_k + t, g),
                           *of_v = row_at(&places[DV_], at, first_k + t, g);
            wrong[1] += !(fabs((double)value_of(of_k[0], &w->f) - dk) <= 0.01 * fabs(dk) + 0.02);
            for (int64_t d = 1; d < w->d_qk; d++) wrong[1] += value_of(of_k[d], &w->f) != 0.0f;
            for (int64_t d = 0; d < w->d_v; d++)
                wrong[2] += !near((double)value_of(of_v[d], &w->f), dv, 1.0 / 100);
        }
    for (int i = 0; i < 3; i++)
        CHECK(!wrong[i],
              "%s, %s, %d/%d, heads %d/%d, causal %d, base 2 %d, request %d: %" PRId64 " of d%c differ",
              w->kernel, p->name, (int)w->d_qk, (int)w->d_v, (int)w->h_q, (int)w->h_kv, w->causal, w->base_2,
              (int)r, wrong[i], "qkv"[i]);
}

/* Returns true if the token, or key, of ragged requests belongs to a request. */
static bool is_of_request(const struct problem *p, bool of_keys, int64_t token)
{
    bool is = false;
    for (int64_t r = 0; r < p->b; r++) {
        const int64_t first = of_keys ? p->spans[r].first_k : p->spans[r].first_q;
        is |= token >= first && token < first + (of_keys ? p->spans[r].keys : p->spans[r].tokens);
    }
    return is;
}

/* Checks that tokens and keys outside all requests have gradient 0. */
static void check_outside(const struct way *w, const struct place *places)
{
    for (int i = DQ; i < PLACES; i++) {
        const struct place *p = &places[i];
        int64_t wrong = 0;
        for (int64_t t = 0; t < p->tokens; t++)
            for (int64_t at = 0; !is_of_request(w->problem, i != DQ, t) && at < p->heads * p->width; at++)
                wrong += row_at(p, 0, t, at / p->width)[at % p->width] != 0;
        CHECK(!wrong, "%s, %s: %" PRId64 " of d%c of no request are not 0", w->kernel, w->problem->name,
              wrong, "qkv"[i - DQ]);
    }
}

static void fill(const struct way *w, const struct place *places)
{
    const struct problem *const p = w->problem;
    const double empty = w->minus ? -INFINITY : INFINITY;
    for (int i = 0; i < DQ; i++) memset(memory[i], 0xff, sizeof memory[i]); /* NaN */
    for (int i = DQ; i < PLACES; i++) memset(memory[i], UNWRITTEN & 0xff, sizeof memory[i]);
    for (int i = 0; i < ROOM; i++) lse_memory[i] = NAN;
    for (int64_t r = 0; r < p->b; r++) {
        const int64_t at = p->flat ? 0 : r, first_q = p->spans[r].first_q, first_k = p->spans[r].first_k,
                      tokens = p->flat ? p->spans[r].tokens : p->q, keys = p->flat ? p->spans[r].keys : p->k;
        for (int64_t j = 0; j < tokens; j++)
            for (int64_t h = 0; h < w->h_q; h++) {
                int64_t seen = w->causal ? keys - tokens + j + 1 : keys;
                if (seen < 0) seen = 0;
                const int64_t half = seen / 2;
                uint16_t *q = memset(row_at(&places[Q], at, first_q + j, h), 0, (size_t)w->d_qk * sizeof *q);
                q[0] = code_of(0.5f, &w->f);
                uint16_t *out = row_at(&places[OUTS], at, first_q + j, h),
                         *dout = row_at(&places[DOUTS], at, first_q + j, h);
                for (int64_t d = 0; d < w->d_v; d++) {
                    out[d] = code_of(seen ? (float)half / (float)seen : 0.0f, &w->f);
                    dout[d] = code_of(dout_of(j, h), &w->f);
                }
                lse_memory[(at * w->h_q + h) * p->q + first_q + j] =
                    (float)(seen ? log((double)seen) * (w->base_2 ? 1.4426950408889634 : 1.0) : empty);
            }
        for (int64_t t = 0; t < keys; t++)
            for (int64_t g = 0; g < w->h_kv; g++) {
                uint16_t *k = row_at(&places[K], at, first_k + t, g),
                         *v = row_at(&places[V], at, first_k + t, g);
                memset(k, 0, (size_t)w->d_qk * sizeof *k);
                for (int64_t d = 0; d < w->d_v; d++) v[d] = code_of((float)(t % 2), &w->f);
            }
    }
}

static void check_way(const struct way *w)
{
    const struct problem *const p = w->problem;
    const int64_t all = (w->h_q + 2 * w->h_kv) * w->d_qk;
    struct place places[PLACES];
    for (int i = 0; i < PLACES; i += DQ) { /* q, k, v, and their gradients */
        if (w->packed) {
            put_place(&places[i + Q], w, memory[i], false, w->d_qk, all);
            put_place(&places[i + K], w, memory[i] + w->h_q * w->d_qk, true, w->d_qk, all);
            put_place(&places[i + V], w, memory[i] + (w->h_q + w->h_kv) * w->d_qk, true, w->d_v, all);
        } else {
            put_place(&places[i + Q], w, memory[i + Q], false, w->d_qk, w->h_q * w->d_qk);
            put_place(&places[i + K], w, memory[i + K], true, w->d_qk, w->h_kv * w->d_qk);
            put_place(&places[i + V], w, memory[i + V], true, w->d_v, w->h_kv * w->d_v);
        }
    }
    put_place(&places[OUTS], w, memory[OUTS], false, w->d_v, w->h_q * w->d_v);
    put_place(&places[DOUTS], w, memory[DOUTS], false, w->d_v, w->h_q * w->d_v);
    fill(w, places);
    struct held lse, held_starts[2];
    HELD(&lse, lse_memory, f32, 3, p->b, w->h_q, p->q);
    if (p->flat) HELD(&lse, lse_memory, f32, 2, w->h_q, p->q);
    int32_t own[2][MOST + 1];
    memcpy(own, p->starts, sizeof own);
    for (int i = 0; i < 2; i++) HELD(&held_starts[i], own[i], i32, 1, p->b + 1);
    fmla_mha_backward_args args = FMLA_INIT(fmla_mha_backward_args);
    args.q = &places[Q].held.tensor, args.k = &places[K].held.tensor, args.v = &places[V].held.tensor;
    args.out = &places[OUTS].held.tensor, args.dout = &places[DOUTS].held.tensor, args.lse = &lse.tensor;
    args.dq = &places[DQ].held.tensor, args.dk = &places[DK].held.tensor, args.dv = &places[DV_].held.tensor;
    if (p->flat) args.cu_seqlens_q = &held_starts[0].tensor, args.cu_seqlens_k = &held_starts[1].tensor;
    args.causal = w->causal, args.softmax_scale = 0.25f, args.kernel = w->kernel;
    args.log_base = w->base_2 ? FMLA_LOG_BASE_2 : FMLA_LOG_NATURAL;
    CHECK(run_in_room(OP_MHA_BACKWARD, &args) == FMLA_OK, "%s, %s: %s", w->kernel, p->name,
          fmla_last_error());
    int64_t expected = 0, written = 0;
    for (int64_t r = 0; r < p->b; r++) check_request(w, places, r);
    if (p->flat) check_outside(w, places);
    for (int i = DQ; i < PLACES; i++) {
        expected += (p->flat ? 1 : p->b) * places[i].tokens * places[i].heads * places[i].width;
        for (int at = 0; at < ROOM; at++) written += memory[i][at] != UNWRITTEN;
    }
    CHECK(written == expected, "%s, %s: %" PRId64 " numbers written of %" PRId64, w->kernel, p->name, written,
          expected);
}

static void check_kernel(const fmla_capability *row)
{
    static const int64_t sizes[][2] = {{192, 128}, {128, 128}, {64, 64}, {64, 128}},
                         heads[][2] = {{6, 2}, {3, 3}, {5, 1}};
    unsigned n = 0;
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        for (int way = 0; way < 16; way++, n++) {
            struct way w = {.kernel = row->kernel, .problem = &problems[i], .packed = way / 8};
            w.d_qk = sizes[way % 4][0], w.d_v = sizes[way % 4][1], w.causal = way / 4 % 2;
            w.h_q = heads[n % 3][0], w.h_kv = heads[n % 3][1];
            w.base_2 = n / 2 % 2, w.minus = n / 5 % 2;
            w.f.format = n % 7 < 3 && row->types & FMLA_TAKES_FP16 ? KV_FP16 : KV_BF16;
            if (!w.packed || (w.d_qk == w.d_v && problems[i].q == problems[i].k)) check_way(&w);
        }
}

int main(void)
{
    unsetenv("FLASHMLA_KERNEL");
    check_differences();
    for_kernels(OP_MHA_BACKWARD, check_kernel);
    return check_done("test_mha_gradients");
}
