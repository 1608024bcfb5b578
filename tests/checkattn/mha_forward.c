/* SPDX-License-Identifier: MIT
 *
 * Tests dense MHA, forward: rows by the oracle, its faults and its promises on a GPU.
 */
#include "mha_case.h"

#include <stdio.h>
#include <string.h>

enum { SPLITS_OF_BATCH = 1 };

/* ---- A case ----------------------------------------------------------------------------------- */

static void make(struct test_case *c)
{
    static const int32_t splits[] = {0, 0, 1, 2, 7, 64};
    const enum layout layout = near_layout(c->v[H_LAYOUT]);
    mha_make(c);
    c->args.mha_forward.batch_dependent = c->of_batch = c->v[H_SPLITS] == SPLITS_OF_BATCH;
    c->args.mha_forward.num_splits = splits[c->v[H_SPLITS]];
    case_tensor(c, MHA(out), layout, true);
    case_tensor(c, MHA(lse), layout, c->v[H_LSE] != 0);
    case_sinks(c, c->v[H_SINK]);
    mha_spread(c);
    c->tolerance[0] = tolerance_mha_out, c->tolerance[1] = tolerance_prefill_lse;
}

/* ---- Rows of it ------------------------------------------------------------------------------- */

/* Makes a row a separate problem over the first keys of its request, without a mask. */
static bool narrow(const struct test_case *c, const struct rows *rows, int64_t change, struct view *view)
{
    fmla_mha_forward_args *args = &view->args.mha_forward;
    const int64_t r = mha_request_of(c, rows->request, rows->token),
                  keys = mha_seen(c, rows->request, rows->token, 0) + change;
    if (change && (keys < 1 || keys > mha_length(c, true, r))) return false;
    for (int i = MHA(k); i <= MHA(v); i++) view_narrow(view, i, c->flat ? 0 : 1, mha_begin(c, true, r), keys);
    for (int i = MHA(q); c->flat && i <= MHA(v); i++) mha_set_apart(view, i);
    mha_whole(c, view), args->causal = 0;
    return true;
}

static void magnitude_of(const struct test_case *c, int64_t request, int64_t token, int64_t head,
                         struct magnitude *magnitude)
{
    const struct guarded *g = &c->tensor[MHA(q)];
    const int64_t first_key = mha_begin(c, true, mha_request_of(c, request, token)),
                  key_head = head / (c->h_q / c->h_kv);
    const uint16_t *row = case_row(c, MHA(q), request, token, head);
    float q[MHA_WIDEST], key[MHA_WIDEST], value[MHA_WIDEST];
    for (int64_t d = 0; d < c->d_qk; d++) q[d] = (float)guarded_value(g, row + d);
    for (int64_t t = first_key; t < first_key + mha_seen(c, request, token, head); t++) {
        const uint16_t *k = case_row(c, MHA(k), request, t, key_head),
                       *v = case_row(c, MHA(v), request, t, key_head);
        for (int64_t d = 0; d < c->d_qk; d++) key[d] = (float)guarded_value(g, k + d);
        for (int64_t d = 0; d < c->d_v; d++) value[d] = (float)guarded_value(g, v + d);
        magnitude_add(magnitude, (double)c->args.mha_forward.softmax_scale, q, key, c->d_qk, value, c->d_v);
    }
}

/* Chooses every row of a small case; of a large one those at both ends of requests, and random ones. */
static int64_t choose_rows(struct test_case *c, struct rows *rows)
{
    int64_t count = 0;
    if (all_are_compared(c, c->s_k)) return all_rows(c, rows, c->h_q / c->h_kv);
    for (int64_t r = 0; r < case_requests(c) && count < CHOSEN_ROWS - DRAWN_ROWS - 2; r++) {
        const int64_t first = mha_begin(c, false, r), tokens = mha_length(c, false, r);
        if (tokens < mha_extent(c, false, r))
            rows[count++] = (struct rows){c->flat ? 0 : r, first + tokens, r % c->h_q, 1, 1};
        if (!tokens) continue;
        rows[count++] = (struct rows){c->flat ? 0 : r, first, r % c->h_q, 1, 1};
        rows[count++] = (struct rows){c->flat ? 0 : r, first + tokens - 1, c->h_q - 1 - r % c->h_q, 1, 1};
    }
    return draw_rows(c, rows, count);
}

/* ---- Faults ----------------------------------------------------------------------------------- */

/* Cases that suit every fault: requests without keys or tokens, gaps, causal. An lse is small if a key is
 * alone. */
static void fault_cases(struct suite *suite)
{
    const struct run *run = &suite->run[0];
    for (uint64_t i = 0; i < 8; i++)
        suite_case(suite, run->seed + i, false, "b 7, heads 5_5, causal 1, layout padded, %s, %s",
                   i % 2 ? "requests varied" : "requests apart",
                   run->fault == FAULT_LSE_CANCELLED ? "shape one, inputs steep" : "shape few");
}

static const struct maker maker = {ROWS_BY_NAME,     .size = sizeof(struct mha_case),
                                   .draw = mha_draw, .make = make,
                                   .seen = mha_seen, .part = mha_part};

/* Begins cases of a single request, which is split by the batch. Some have at most 64 rows of a key head, some more. */
#define ALONE "b 1, splits batch"

struct subject mha_forward = {
    MHA_SUBJECT,
    .of = OP_MHA_FORWARD,
    .values = MHA_AXES(AXIS_TEXT),
    .plant_after = plant_key,
    .special = {MHA_SPECIAL, MHA_OWN_THREADS,
                "b 2, shape long, heads 32_4, requests ragged, splits most, sink infinite",
                "b 7, shape wide, heads 2_1, requests varied, causal 1, splits batch",
                "b 7, shape wide, heads 16_1, requests hostile, causal 1, splits seven, sink finite",
                "b 3, shape wide, heads 5_5, sizes 64_64, requests ragged, causal 1, inputs spiked",
                "b 7, shape wide, heads 16_1, causal 1, used both",
                "b 7, shape wide, heads 2_1, causal 1, splits batch, sink finite, used both",
                "b 7, shape wide, heads 32_4, requests varied, splits seven, used both",
                /* The CPU splits only so many keys by itself. */
                "b 3, shape deep, heads 2_1, requests ragged, causal 1, used both",
                "b 3, shape deep, heads 2_1, requests varied, causal 1, threads own",
                "b 3, shape deep, heads 16_1, requests varied, causal 1, splits batch, sink high",
                "b 2, shape deep, heads 5_5, sizes 96_64, splits batch, inputs spiked",
                ALONE ", shape deep, heads 32_4, sizes 192_128, requests ragged, sink finite, used k",
                ALONE ", shape deep, heads 2_1, sizes 128_128, requests ragged, causal 1, sink high, used k",
                ALONE ", shape deep, heads 32_4, sizes 64_64, requests ragged, causal 1, sink finite, used k",
                ALONE ", shape deep, heads 5_5, sizes 96_64, requests ragged, sink finite, used k",
                ALONE ", shape deep, heads 2_1, sizes 256_256, requests ragged, sink finite",
                ALONE ", shape deep, heads 16_1, sizes 192_128, requests cut, causal 1, sink finite",
                ALONE ", shape deep, heads 16_1, sizes 128_128, requests ragged, sink finite",
                ALONE ", shape wide, heads 2_1, sizes 64_64, requests ragged, causal 1, sink high, used both",
                ALONE ", shape deep, heads 16_1, sizes 256_256, requests ragged, causal 1, used both",
                ALONE ", shape wide, heads 2_1, sizes 96_64, requests ragged, causal 1, sink finite, used k"},
    .by_oracle = {MHA_BY_ORACLE},
    .faults = ((FAULT(MERGE_BASE) - 1) & ~FAULT(SWAPPED_PAGE)) | FAULT(BATCH),
    .gpu = {MHA_GPU(NULL),
            .repeats = {MHA_REPEATS, "b 2, shape long",
                        "b 1, shape wide, requests ragged, causal 1, splits batch, sink finite"},
            .positions = {"b 7, shape even, causal 1", "b 100, shape few, inputs spiked",
                          "b 3, shape square, causal 1, inputs spiked"}},
};
