/* SPDX-License-Identifier: MIT
 *
 * Tests the oracle's gradients of dense MHA against finite differences of attention in double. Calls with a
 * planted defect must be detected. checkattn compares every kernel with the oracle, and the oracle's requests
 * and masks with single rows and keys.
 */
#include "attention_calls.h"

enum { TOKENS = 8, KEYS = 10, HEADS = 4, KEY_HEADS = 2, D_QK = 6, DV = 5, MOST_ELEMENTS = 192 };

/* Requests apart, and concatenated: of these the second has more tokens than keys, so its first rows see
 * nothing with a mask. `used`: lengths in use, where the call gives them. */
static const struct requests {
    bool flat;
    int64_t b;
    int32_t starts[2][4], used[2][3];
} forms[] = {{false, 2, {{0, 4, 8}, {0, 5, 10}}, {{2, INT32_MAX}, {5, 3}}},
             {true, 3, {{0, 3, 7, 8}, {0, 5, 7, 10}}, {{2, 5, 1}, {3, 2, 2}}}};
static const struct requests *form;

/* A request's first token, or key, in its dimension; those in use, and those with padding. */
struct side {
    int64_t first, count, extent;
};

static struct side side_of(bool of_keys, int64_t r)
{
    const int32_t *const start = form->starts[of_keys] + r, extent = start[1] - start[0];
    const int32_t used = tensor("seqused_q") ? form->used[of_keys][r] : extent;
    return (struct side){form->flat ? start[0] : 0, used < extent ? used : extent, extent};
}

/* ---- Attention in double ----------------------------------------------------------------------- */

/* Returns the offset of element i, counted in order. */
static int64_t nth(const struct held *t, int64_t i)
{
    int64_t offset = 0;
    for (int k = t->tensor.ndim - 1; k >= 0; i /= t->shape[k--]) offset += i % t->shape[k] * t->strides[k];
    return offset;
}

static void put(const struct held *t, int64_t offset, double x)
{
    const float wide = (float)x;
    const uint16_t narrow = t->tensor.dtype.code == FMLA_TYPE_BFLOAT ? num_to_bf16(wide) : num_to_fp16(wide);
    const size_t width = t->tensor.dtype.bits / 8;
    memcpy((char *)t->tensor.data + (size_t)offset * width, width == 4 ? (const void *)&wide : &narrow,
           width);
}

/* An element of an input that is changed, and by how much. */
static struct {
    const struct held *tensor;
    int64_t offset;
    double by;
} nudged;

static double at(const struct held *t, int64_t offset)
{
    return element(t, offset) + (t == nudged.tensor && offset == nudged.offset ? nudged.by : 0.0);
}

static int64_t row_of(const struct held *t, int64_t r, int64_t token, int64_t h)
{
    const int64_t *s = t->strides;
    return form->flat ? h * s[0] + token : r * s[0] + h * s[1] + token;
}

/* Returns out · dout + lse · dlse of a row, and optionally puts its out and lse. */
static double attend(int64_t r, int64_t token, int64_t h, int64_t first, int64_t seen, bool puts)
{
    const struct held *const q = tensor("q"), *const k = tensor("k"), *const v = tensor("v"),
                             *const out = tensor("out"), *const dout = tensor("dout"),
                             *const lse = tensor("lse"), *const dlse = tensor("dlse"),
                             *const sink = tensor("attn_sink");
    const double scale = call.options.scale != 0.0f ? (double)call.options.scale : 1.0 / sqrt(D_QK);
    const int64_t g = h / (HEADS / KEY_HEADS);
    double weight[KEYS] = {0}, total = 0.0, loss = 0.0;
    for (int64_t t = first; t < first + seen; t++) {
        double score = 0.0;
        for (int d = 0; d < D_QK; d++)
            score += scale * at(q, offset_of(q, r, token, h) + d) * at(k, offset_of(k, r, t, g) + d);
        total += weight[t] = exp(score);
    }
    const double natural = seen > 0 ? log(total) : INFINITY,
                 shown = natural * (call.options.base_2 ? log2_e : 1.0),
                 kept = sink && seen > 0 ? 1.0 / (1.0 + exp(at(sink, h) - natural)) : 1.0;
    for (int d = 0; d < DV; d++) {
        double value = 0.0;
        for (int64_t t = first; t < first + seen; t++)
            value += weight[t] / total * kept * at(v, offset_of(v, r, t, g) + d);
        loss += value * element(dout, offset_of(dout, r, token, h) + d);
        if (puts) put(out, offset_of(out, r, token, h) + d, value);
    }
    if (puts) put(lse, row_of(lse, r, token, h), shown);
    if (dlse && seen > 0) loss += shown * element(dlse, row_of(dlse, r, token, h));
    return loss;
}

/* Returns Σ out · dout + Σ lse · dlse. */
static double attend_all(bool puts)
{
    double loss = 0.0;
    for (int64_t r = 0; r < form->b; r++) {
        const struct side q = side_of(false, r), k = side_of(true, r);
        for (int64_t i = 0; i < q.count * HEADS; i++) {
            const int64_t j = i / HEADS, seen = call.layout.causal ? k.count - q.count + j + 1 : k.count;
            loss += attend(r, q.first + j, i % HEADS, k.first, seen, puts);
        }
    }
    return loss;
}

/* ---- Gradients --------------------------------------------------------------------------------- */

enum planted { NOTHING, SCALE, MASK, BASE, OUT, DOUT, KEY, LSE, VALUES, SINK, DLSE, USED, PLANTED };

/* Compares the gradient of an input with the loss's; returns how many numbers differ. Each is checked if none
 * may. */
static int compare(const char *input, const char *gradient, bool may_differ)
{
    const double step = 1e-4;
    const struct held *const x = tensor(input), *const dx = tensor(gradient);
    double most = 0.0, differences[MOST_ELEMENTS];
    int wrong = 0;
    nudged.tensor = x;
    for (int i = 0; i < elements_of(x); i++) {
        nudged.offset = nth(x, i), nudged.by = step;
        const double above = attend_all(false);
        nudged.by = -step;
        differences[i] = (above - attend_all(false)) / (2 * step);
        most = fmax(most, fabs(differences[i]));
    }
    nudged.tensor = NULL;
    for (int i = 0; i < elements_of(x); i++) {
        const double came = element(dx, nth(dx, i));
        const bool good = fabs(differences[i] - came) <=
                          most / (tensor("out")->tensor.dtype.code == FMLA_TYPE_BFLOAT ? 64 : 512);
        wrong += !good;
        if (!may_differ)
            CHECK(good, "call %u: %s[%d] is %g, expected %g", number, gradient, i, came, differences[i]);
    }
    return wrong;
}

static void add(const char *name, int64_t i, double x)
{
    const struct held *const t = tensor(name);
    put(t, nth(t, i), element(t, nth(t, i)) + x);
}

static void plant(enum planted planted)
{
    if (planted == SCALE) *(float *)option_at(call.operation, call.args, "softmax_scale") = 0.3f;
    if (planted == MASK) put_number(call.operation, call.args, "causal", !call.layout.causal);
    if (planted == BASE)
        put_number(call.operation, call.args, "log_base",
                   call.options.base_2 ? FMLA_LOG_NATURAL : FMLA_LOG_BASE_2);
    if (planted == OUT) add("out", TOKENS * HEADS * DV - 1, 0.3);
    if (planted == DOUT) add("dout", 3, 0.3);
    if (planted == KEY) put_integers("cu_seqlens_k", (int32_t[]){0, 4}, 2);
    if (planted == USED) put_integers("seqused_k", (int32_t[]){4}, 1);
    if (planted == LSE) add("lse", TOKENS * HEADS - 1, 0.2);
    if (planted == VALUES) add("v", 7, 0.3);
    if (planted == SINK) add("attn_sink", HEADS - 1, 0.3);
    if (planted == DLSE) add("dlse", TOKENS * HEADS - 1, 0.3);
}

/* Rows without keys have no gradient, whatever dlse holds. */
static void put_nan_where_empty(bool causal)
{
    const struct held *const dlse = tensor("dlse");
    for (int64_t r = 0; dlse && causal && r < form->b; r++) {
        const struct side q = side_of(false, r), k = side_of(true, r);
        for (int64_t j = 0; j < q.count - k.count; j++)
            for (int64_t h = 0; h < HEADS; h++) put(dlse, row_of(dlse, r, q.first + j, h), NAN);
    }
}

/* Padding may hold anything. */
static void put_nan_in_padding(void)
{
    static const char *const names[] = {"q", "out", "dout", "k", "v"};
    const struct held *const lse = tensor("lse"), *const dlse = tensor("dlse");
    for (int64_t r = 0; r < form->b; r++) {
        for (int i = 0; i < 5; i++) {
            const struct side s = side_of(i > 2, r);
            const struct held *const t = tensor(names[i]);
            const int64_t heads = i > 2 ? KEY_HEADS : HEADS, width = t->shape[t->tensor.ndim - 1];
            for (int64_t at = s.count * heads * width; at < s.extent * heads * width; at++)
                put(t, offset_of(t, r, s.first + at / width / heads, at / width % heads) + at % width, NAN);
        }
        const struct side q = side_of(false, r);
        for (int64_t i = q.count * HEADS; i < q.extent * HEADS; i++) {
            put(lse, row_of(lse, r, q.first + i / HEADS, i % HEADS), NAN);
            if (dlse) put(dlse, row_of(dlse, r, q.first + i / HEADS, i % HEADS), NAN);
        }
    }
}

static void check(bool causal, bool half, unsigned has, enum planted planted)
{
    const int64_t b = form->b;
    const struct layout l =
        DESIGNATED(.b = b, .splits = b + 1, .s_q = TOKENS / b, .tokens_q = TOKENS, .s_k = KEYS / b,
                   .tokens_k = KEYS, .h_q = HEADS, .h_kv = KEY_HEADS, .d_qk = D_QK, .d_v = DV,
                   .causal = causal, .flat = form->flat, .type = half ? fp16 : bf16, .has = has);
    make(OP_MHA_BACKWARD, &l);
    put_integers("cu_seqlens_q", form->starts[0], (size_t)b + 1);
    put_integers("cu_seqlens_k", form->starts[1], (size_t)b + 1);
    put_integers("seqused_q", form->used[0], (size_t)b);
    put_integers("seqused_k", form->used[1], (size_t)b);
    put_nan_where_empty(causal);
    put_nan_in_padding();
    attend_all(true);
    plant(planted);
    run_call("ref");
    if (planted == DOUT) add("dout", 3, -0.3); /* the definition has the inputs as they were */
    if (planted == VALUES) add("v", 7, -0.3);
    if (planted == SINK) add("attn_sink", HEADS - 1, -0.3);
    if (planted == DLSE) add("dlse", TOKENS * HEADS - 1, -0.3);
    int wrong = compare("q", "dq", planted) + compare("k", "dk", planted) + compare("v", "dv", planted);
    if (has & HAS_SINK) wrong += compare("attn_sink", "d_attn_sink", planted);
    CHECK(!wrong == !planted, "call %u, defect %d: %d gradients differ", number, planted, wrong);
}

int main(void)
{
    for (int way = 0; way < 64; way++)
        for (enum planted planted = NOTHING; planted < PLANTED; planted++) {
            const unsigned has =
                (way & 8 ? HAS_SINK : 0) | (way & 16 ? HAS_DLSE : 0) | (way & 32 ? HAS_USED : 0);
            form = &forms[way & 1];
            if ((planted == KEY && !form->flat) || (planted == SINK && !(has & HAS_SINK)) ||
                (planted == DLSE && !(has & HAS_DLSE)) || (planted == USED && !(has & HAS_USED)))
                continue;
            check(way >> 1 & 1, way >> 2 & 1, has, planted);
        }
    return check_done("test_mha_gradients");
}
