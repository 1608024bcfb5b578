/* SPDX-License-Identifier: MIT
 *
 * Tests the oracle's gradients of dense MHA against finite differences of attention in double, which is
 * first compared with the forward oracle. Calls with a planted defect must be detected. checkattn compares
 * every kernel with the oracle, and the oracle's requests and masks with single rows and keys.
 */
#include "values.h"

enum { MOST_REQUESTS = 3, TOKENS = 8, KEYS = 10, HEADS = 4, KEY_HEADS = 2, D_QK = 6, DV = 5 };
enum {
    NQ = TOKENS * HEADS * D_QK,
    NK = KEYS * KEY_HEADS * D_QK,
    NV = KEYS * KEY_HEADS * DV,
    NO = TOKENS * HEADS * DV,
    ROWS = TOKENS * HEADS
};

/* Requests apart, and concatenated: of these the second has more tokens than keys, so its first rows see
 * nothing with a mask. */
static const struct requests {
    bool flat;
    int count;
    int32_t starts[2][MOST_REQUESTS + 1];
} forms[] = {{false, 2, {{0, 4, 8}, {0, 5, 10}}}, {true, 3, {{0, 3, 7, 8}, {0, 5, 7, 10}}}};

/* A call, and its inputs in double. */
static struct {
    const struct requests *form;
    bool causal, half; /* half: fp16 */
    double scale, q[NQ], k[NK], v[NV], dout[NO];
} n;

/* The 16-bit tensors of the call. */
static struct {
    uint16_t q[NQ], k[NK], v[NV], dout[NO], out[NO], dq[NQ], dk[NK], dv[NV];
    float lse[ROWS];
} s;

static double value_of(uint16_t code)
{
    return (double)(n.half ? num_from_fp16(code) : num_from_bf16(code));
}

static uint16_t code_of(float x)
{
    return n.half ? num_to_fp16(x) : num_to_bf16(x);
}

/* Returns Σ out · dout, and optionally out and the natural lse. */
static double attend(double *out, double *lse)
{
    double loss = 0.0;
    for (int r = 0; r < n.form->count; r++) {
        const int32_t *const q = n.form->starts[0] + r, *const k = n.form->starts[1] + r;
        for (int row = q[0] * HEADS; row < q[1] * HEADS; row++) {
            const int i = row / HEADS, h = row % HEADS, g = h / (HEADS / KEY_HEADS);
            const int seen = n.causal ? k[1] - q[1] + i + 1 : k[1];
            double weight[KEYS] = {0}, total = 0.0, value[DV] = {0};
            for (int t = k[0]; t < seen; t++) {
                double score = 0.0;
                for (int d = 0; d < D_QK; d++)
                    score += n.q[row * D_QK + d] * n.k[(t * KEY_HEADS + g) * D_QK + d];
                total += weight[t] = exp(n.scale * score);
            }
            for (int t = k[0]; t < seen; t++)
                for (int d = 0; d < DV; d++)
                    value[d] += weight[t] / total * n.v[(t * KEY_HEADS + g) * DV + d];
            for (int d = 0; d < DV; d++) {
                loss += value[d] * n.dout[row * DV + d];
                if (out) out[row * DV + d] = value[d];
            }
            const int of_request =
                n.form->flat ? h * TOKENS + i : (q[0] * HEADS + h * (q[1] - q[0]) + i - q[0]);
            if (lse) lse[of_request] = seen > k[0] ? log(total) : INFINITY;
        }
    }
    return loss;
}

static void draw(double *x, uint16_t *code, int count, struct random_state *random)
{
    for (int i = 0; i < count; i++)
        code[i] = code_of(random_input(random, 0.0f, 0.7f)), x[i] = value_of(code[i]);
}

/* Compares gradients with the loss's; returns how many differ if that is expected, else checks each. */
static int compare(double *x, const uint16_t *gradient, int count, const char *name, bool expected_to)
{
    const double step = 1e-4;
    double most = 0.0, differences[NQ];
    int wrong = 0;
    for (int i = 0; i < count; i++) {
        const double was = x[i];
        x[i] = was + step;
        const double above = attend(NULL, NULL);
        x[i] = was - step;
        differences[i] = (above - attend(NULL, NULL)) / (2 * step);
        x[i] = was;
        most = fmax(most, fabs(differences[i]));
    }
    for (int i = 0; i < count; i++) {
        const double came = value_of(gradient[i]);
        const bool good = fabs(differences[i] - came) <= most / (n.half ? 512 : 64);
        wrong += !good;
        if (!expected_to)
            CHECK(good, "flat %d, causal %d, fp16 %d: %s[%d] is %g, expected %g", n.form->flat, n.causal,
                  n.half, name, i, came, differences[i]);
    }
    return wrong;
}

/* Returns a tensor of that many tokens, or keys, in the call's form. */
static const fmla_tensor *tensor(struct held *held, uint16_t *data, int64_t tokens, int64_t heads,
                                 int64_t width)
{
    const bool flat = n.form->flat;
    const int64_t b = n.form->count, shape[] = {b, flat ? tokens : tokens / b, heads, width};
    held_set(held, data, n.half ? fp16 : bf16, 4 - flat, shape + flat);
    return &held->tensor;
}

enum planted { NOTHING, SCALE, MASK, BASE, OUT, DOUT, KEY, LSE, VALUES, PLANTED };

static void add(uint16_t *code, float x)
{
    *code = code_of((float)value_of(*code) + x);
}

static int run(enum planted planted)
{
    struct held held[8], lse, of_starts[2];
    int32_t starts[2][MOST_REQUESTS + 1];
    struct random_state random = {29};
    double out[NO], natural[ROWS];
    const int64_t b = n.form->count, lse_shape[] = {b, HEADS, TOKENS / b}, flat_shape[] = {HEADS, TOKENS};
    draw(n.q, s.q, NQ, &random), draw(n.k, s.k, NK, &random), draw(n.v, s.v, NV, &random);
    draw(n.dout, s.dout, NO, &random);
    attend(out, natural);
    memcpy(starts, n.form->starts, sizeof starts);
    for (int i = 0; i < 2; i++) HELD(&of_starts[i], starts[i], i32, 1, b + 1);
    held_set(&lse, s.lse, f32, n.form->flat ? 2 : 3, n.form->flat ? flat_shape : lse_shape);
    fmla_mha_forward_args forward = FMLA_INIT(fmla_mha_forward_args);
    fmla_mha_backward_args args = FMLA_INIT(fmla_mha_backward_args);
    args.q = forward.q = tensor(&held[0], s.q, TOKENS, HEADS, D_QK);
    args.k = forward.k = tensor(&held[1], s.k, KEYS, KEY_HEADS, D_QK);
    args.v = forward.v = tensor(&held[2], s.v, KEYS, KEY_HEADS, DV);
    if (n.form->flat) {
        args.cu_seqlens_q = forward.cu_seqlens_q = &of_starts[0].tensor;
        args.cu_seqlens_k = forward.cu_seqlens_k = &of_starts[1].tensor;
    }
    args.out = forward.out = tensor(&held[3], s.out, TOKENS, HEADS, DV);
    args.lse = forward.lse = &lse.tensor;
    args.dout = tensor(&held[4], s.dout, TOKENS, HEADS, DV);
    args.dq = tensor(&held[5], s.dq, TOKENS, HEADS, D_QK);
    args.dk = tensor(&held[6], s.dk, KEYS, KEY_HEADS, D_QK);
    args.dv = tensor(&held[7], s.dv, KEYS, KEY_HEADS, DV);
    args.causal = forward.causal = n.causal;
    args.softmax_scale = forward.softmax_scale = (float)n.scale;
    args.log_base = forward.log_base = n.causal ? FMLA_LOG_BASE_2 : FMLA_LOG_NATURAL;
    args.kernel = forward.kernel = "ref";
    CHECK_OK(run_in_room(OP_MHA_FORWARD, &forward));
    for (int i = 0; i < NO; i++)
        CHECK(fabs(out[i] - value_of(s.out[i])) < (n.half ? 1e-3 : 8e-3), "out[%d]: %g, not the oracle's %g",
              i, out[i], value_of(s.out[i]));
    for (int i = 0; i < ROWS; i++)
        CHECK(near((double)s.lse[i], natural[i] * (n.causal ? log2_e : 1.0), 1e-5),
              "lse[%d]: %g, not the oracle's %g", i, natural[i], (double)s.lse[i]);
    if (planted == SCALE) args.softmax_scale = 0.5f;
    if (planted == MASK) args.causal = !n.causal;
    if (planted == BASE) args.log_base = n.causal ? FMLA_LOG_NATURAL : FMLA_LOG_BASE_2;
    if (planted == OUT) add(&s.out[NO - 1], 0.3f);
    if (planted == DOUT) add(&s.dout[3], 0.3f);
    if (planted == KEY) starts[1][1]--;
    if (planted == LSE) s.lse[ROWS - 1] += n.half ? 0.05f : 0.2f;
    if (planted == VALUES) add(&s.v[7], 0.3f);
    CHECK_OK(run_in_room(OP_MHA_BACKWARD, &args));
    return compare(n.q, s.dq, NQ, "dq", planted) + compare(n.k, s.dk, NK, "dk", planted) +
           compare(n.v, s.dv, NV, "dv", planted);
}

int main(void)
{
    unsetenv("FLASHMLA_KERNEL");
    n.scale = 0.6;
    for (int way = 0; way < 8; way++)
        for (enum planted planted = NOTHING; planted < PLANTED; planted++) {
            n.form = &forms[way & 1], n.causal = way >> 1 & 1, n.half = way >> 2 & 1;
            if (planted == KEY && !n.form->flat) continue;
            const int wrong = run(planted);
            CHECK(!wrong == !planted, "flat %d, causal %d, fp16 %d, defect %d: %d gradients differ",
                  n.form->flat, n.causal, n.half, planted, wrong);
        }
    return check_done("test_mha_gradients");
}
