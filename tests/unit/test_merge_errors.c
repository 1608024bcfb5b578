/* SPDX-License-Identifier: MIT
 *
 * Tests every argument that fmla_merge must reject, and unusual ones that it must accept; and, in brief,
 * the same for every operation without workspace and plan for which its descriptor suffices, as it does not for
 * those of caches alone.
 */
#include "refusals.h"

enum { H_Q = 3, D_V = 40, LSE = 2 * H_Q * 2, OUT = LSE * D_V };

static void set_up(void);
static struct good_call call = {.operation = OP_MERGE, .elsewhere = "out_parts", .set_up = set_up};

#define ARGS     (*(fmla_merge_args *)call.args)
#define T(name)  (call.held[TENSOR_merge_##name])
#define AT(name) ((float *)T(name).tensor.data)

static void set_up(void)
{
    struct layout layout = good_layout;
    layout.h_q = H_Q, layout.d_v = D_V, layout.type = f32;
    begin(&call, &layout, 0);
}

static void nothing(void)
{
    set_up();
    resize(&call, DIM_h_q, 0), resize(&call, DIM_d_v, 0);
    resize(&call, DIM_b, INT32_MAX), resize(&call, DIM_s_q, INT32_MAX);
}

static void no_parts(void)
{
    set_up();
    resize(&call, DIM_n, 0), resize(&call, DIM_n_out, 0);
    ARGS.out_last = ARGS.lse_last = NULL;
}

/* The call has the out of one part alone. */
static void of_part(int64_t part)
{
    set_up();
    resize(&call, DIM_n_out, 1);
    ARGS.out_last = ARGS.lse_last = NULL, ARGS.part = part;
}

static void test_parts(void)
{
    REFUSED(call, "lse_parts", "n (dimension 0) is 4, must be 3 as in out_parts", resize(&call, DIM_n, 4));
    REFUSED(call, "lse_last", "is NULL, must be given with out_last", ARGS.lse_last = NULL);
    REFUSED(call, "out_last", "is NULL, must be given with lse_last", ARGS.out_last = NULL);
    REFUSED(call, "part", "is 4, must be in [0, 3]", of_part(4));
    REFUSED(call, "out_parts", "n (dimension 0) is 3, must be 1", (of_part(1), resize(&call, DIM_n_out, 3)),
            ARGS.out_last = ARGS.lse_last = NULL);
    REFUSED(call, "out_last", "is given, must be NULL with part",
            (of_part(1), ARGS.out_last = &T(out_last).tensor, ARGS.lse_last = &T(lse_last).tensor));
    TAKEN(call, "the first part alone", of_part(1));
    TAKEN(call, "the last part alone", of_part(3));
    TAKEN(call, "all parts in one tensor", ARGS.out_last = ARGS.lse_last = NULL);
}

static void test_taken(void)
{
    take_by_descriptor(&call);
    TAKEN(call, "strides of one element", one_of_each(&call));
    TAKEN(call, "no sink, no lse", ARGS.attn_sink = ARGS.lse = NULL);
    /* Without parts there is no key. */
    TAKEN(call, "n = 0", no_parts());
    CHECK(AT(out)[0] == 0.0f && AT(lse)[0] == INFINITY, "n = 0 gives %a, lse %a", (double)AT(out)[0],
          (double)AT(lse)[0]);
    TAKEN(call, "b = 0", resize(&call, DIM_b, 0));
    /* The out of a part without keys is not read, whatever its contents; either infinity as lse marks it. */
    set_up();
    for (int i = 0; i < OUT; i++)
        AT(out_parts)[i] = AT(out_parts)[2 * OUT + i] = NAN, AT(out_parts)[OUT + i] = 1.5f;
    for (int i = 0; i < LSE; i++) {
        AT(lse_parts)[i] = INFINITY, AT(lse_parts)[2 * LSE + i] = -INFINITY;
        AT(lse_parts)[LSE + i] = 0.25f;
    }
    ARGS.attn_sink = ARGS.out_last = ARGS.lse_last = NULL;
    check_taken(&call, "parts without keys");
    int64_t wrong = 0;
    for (int i = 0; i < OUT; i++) wrong += AT(out)[i] != 1.5f;
    for (int i = 0; i < LSE; i++) wrong += AT(lse)[i] != 0.25f;
    CHECK(wrong == 0, "parts without keys: %" PRId64 " elements differ from the one part with keys", wrong);
    /* With nothing to write the call returns at once, however large the other sizes are. */
    TAKEN(call, "no heads, many tokens", nothing());
}

static void set_up_any(void);
static struct good_call any = {.set_up = set_up_any};

static void set_up_any(void)
{
    struct layout layout = {.type = {FMLA_TYPE_BFLOAT, 16, 1}};
    const struct member *const named = described_kind(any.operation, MEMBER_FORMAT);
    for (int i = 0; i < DIMENSIONS; i++) layout.size[i] = 2 + i % 3;
    described_fit(any.operation, &layout);
    begin(&any, &layout, 0);
    if (named) *(int32_t *)option_of(&any, named) = layout.format;
}

/* Returns the number of such operations. */
static int test_any(void)
{
    int count = 0;
    for (enum operation op = 0; op < OPERATIONS; op++) {
        if (described_asks(op) || operation_is_of_caches(op)) continue;
        free(any.args);
        any.args = NULL, any.operation = op, any.elsewhere = described_tensor(op, 0)->name;
        refuse_by_descriptor(&any), take_by_descriptor(&any);
        count++;
    }
    return count;
}

int main(void)
{
    CHECK(test_any() > 0, "%s", "no operation is without a workspace, a plan and a cache");
    refuse_by_descriptor(&call);
    REFUSED(call, "log_base", "is 1|0|2", ARGS.log_base = 1);
    test_parts(), test_taken();
    return check_done("test_merge_errors");
}
