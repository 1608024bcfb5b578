/* SPDX-License-Identifier: MIT
 *
 * A row depends only on its query and its request's keys. So the oracle can compute single rows of dense
 * decode and single tokens of the sparse operations, through views.
 */
#include "check.h"

#include "elements.h"
#include "magnitude.h"
#include "progress.h"
#include "random.h"
#include "tokens.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { SAMPLED_ROWS = 64, WIDEST_KEY = 576, KEYS_AT_ONCE = 16 };

/* Allowances beside the tolerances. */
struct beside {
    bool other;     /* the inputs are not those of the table */
    bool by_codes;  /* e4m3 codes may have been multiplied */
    double rounded; /* bound of lse if scales may have been rounded */
};

/* If products are FP8, a GPU kernel may multiply codes; its sums then lack the rounding of values to bf16. */
static bool may_be_by_codes(const struct call *call, bool by_gpu)
{
    const int32_t *products = call_option(call, "products");
    return by_gpu && products && *products == FMLA_PRODUCTS_FP8;
}

/* A GPU kernel may skip the rounding of codes times the scale of their group to bf16, or round scales first,
 * which matters if a scale is not a power of two. */
static bool may_round_scales(const struct call *call, bool by_gpu)
{
    const int32_t formats[] = {call_format(call), call_format_of(call, "extra_kv_cache")};
    bool any_scale = false;
    for (int k = 0; k < 2; k++) {
        const enum kv_scale scale = kv_layout_of(cache_formats[formats[k]].format, 0).scale;
        any_scale |= scale == KV_SCALE_F32 || scale == KV_SCALE_E4M3;
    }
    return by_gpu && (any_scale || may_be_by_codes(call, by_gpu));
}

static const struct tolerance *tolerance_of(const struct call *call, const struct beside *beside, int k)
{
    const struct tolerance *usual = policies[call->op].results[k].tolerance;
    if (strcmp(policies[call->op].results[k].name, "out") != 0) return usual;
    if (beside->by_codes) return &tolerance_fp8_products_out;
    return beside->rounded > 0.0 && call->op == OP_DENSE_DECODE ? &tolerance_dense_unrounded_out : usual;
}

static int64_t rows_of(const struct call *call)
{
    const enum dimension *dimensions = call_rows(call);
    int64_t rows = 1;
    for (int i = 0; i < ROW_DIMENSIONS && dimensions[i]; i++) rows *= call_size(call, dimensions[i]);
    return rows;
}

/* Runs the call with its own workspace, plan and kernel replaced. */
bool check_ask(struct call *call, struct reason *reason)
{
    const void **plan = call_option(call, "plan");
    struct reason why = {""};
    fmla_status status;
    *(const char **)call_option(call, "kernel") = "ref";
    if (plan) *plan = NULL;
    if (call_workspace(call, &status, &why) && !call_refused(&status, call_run(call), &why)) return true;
    return reason_set(reason, "oracle: %s", why.text);
}

/* Returns the offset in the tensor of element i in contiguous order. */
static int64_t place_of(const fmla_tensor *tensor, int64_t i)
{
    int64_t place = 0;
    if (!tensor->strides) return i;
    for (int d = tensor->ndim - 1; d >= 0; d--)
        place += i % tensor->shape[d] * tensor->strides[d], i /= tensor->shape[d];
    return place;
}

static int64_t bytes_that_differ(const fmla_tensor *mine, const fmla_tensor *theirs)
{
    const size_t bytes = call_bytes(theirs);
    int64_t count = 0;
    for (size_t i = 0; i < bytes; i++)
        count += ((const char *)mine->data)[i] != ((const char *)theirs->data)[i];
    return count;
}

/* ---- What rounding is relative to ------------------------------------------------------------ */

/* Reads these slots of a cache of the row, `width` numbers each; keys without pages count as pages of one. */
static bool gather(const struct call *row, const fmla_tensor *cache, int32_t format, int64_t width,
                   int64_t slots[KEYS_AT_ONCE], int64_t count, float keys[KEYS_AT_ONCE * WIDEST_KEY])
{
    const fmla_tensor *of_cache = call_tensor(row, "kv_scale");
    const int64_t *strides = cache->strides;
    const int64_t flat[] = {cache->shape[0], 1, 1, width},
                  flat_strides[] = {strides[0], strides[0], width, 1};
    fmla_tensor pages = *cache, named = {.data = slots, .device = row->device, .ndim = 1, .shape = &count};
    named.dtype = dtype_of(FMLA_TYPE_INT, 64);
    fmla_tensor values = named;
    values.data = keys, values.ndim = 2, values.shape = (int64_t[]){count, width};
    values.dtype = dtype_of(FMLA_TYPE_FLOAT, 32);
    if (cache->ndim == 3) pages.ndim = 4, pages.shape = flat, pages.strides = flat_strides;
    fmla_cache_gather_args args = FMLA_INIT(fmla_cache_gather_args);
    args.kv_cache = &pages, args.slots = &named, args.out = &values;
    args.kv_format = format, args.kernel = "ref";
    if (of_cache) args.cache_scale = *(const float *)of_cache->data;
    return fmla_cache_gather(&args) == FMLA_OK;
}

/* Measures the magnitudes of a call of one row. */
static void measure(const struct call *row, struct magnitude *magnitude)
{
    const struct key_source *from = policies[row->op].keys;
    const int64_t d_qk = call_size(row, DIM_d_qk), d_v = call_size(row, DIM_d_v);
    const double given = (double)*(const float *)call_option(row, "softmax_scale");
    const double scale = given != 0.0 ? given : 1.0 / sqrt((double)d_qk);
    float q[WIDEST_KEY], keys[KEYS_AT_ONCE * WIDEST_KEY], apart[KEYS_AT_ONCE * WIDEST_KEY];
    if (d_qk > WIDEST_KEY || d_v > MAGNITUDE_MOST) return; /* only the oracle takes these */
    const fmla_tensor *of_q = call_tensor(row, "q_scale");
    const int32_t *products = call_option(row, "products");
    const float q_scale = of_q ? *(const float *)of_q->data : 1.0f;
    for (int64_t d = 0; d < d_qk; d++)
        q[d] = element_load(row->tensor[0].data, row->tensor[0].dtype, d) * q_scale;
    if (products && *products && row->tensor[0].dtype.bits != 8) tokens_quantise_query(call_format(row), q);
    for (int k = 0; k < KEY_SOURCES && from[k].cache; k++) {
        const fmla_tensor *cache = call_tensor(row, from[k].cache),
                          *v = from[k].values ? call_tensor(row, from[k].values) : NULL;
        const float *values = v ? apart : keys;
        const int64_t width = v ? d_v : d_qk;
        const int64_t count = call_row_keys(row, &from[k]);
        const int64_t all = !cache ? 0 : cache->shape[0] * (cache->ndim == 4 ? cache->shape[1] : 1);
        int64_t slots[KEYS_AT_ONCE], now = 0;
        for (int64_t i = 0; i < count; i++) {
            slots[now] = call_row_slot(row, &from[k], i);
            now += slots[now] >= 0 && slots[now] < all;
            if (!now || (now < KEYS_AT_ONCE && i + 1 < count)) continue;
            const int32_t format = call_format_of(row, from[k].cache);
            if (!gather(row, cache, format, d_qk, slots, now, keys)) return;
            if (v && !gather(row, v, format, d_v, slots, now, apart)) return;
            for (int64_t j = 0; j < now; j++)
                magnitude_add(magnitude, scale, q, keys + j * d_qk, d_qk, values + j * width, d_v);
            now = 0;
        }
    }
}

/* Returns the error allowed to element i of a result, in contiguous order, beside its tolerance
 * (docs/semantics.md, "Tolerances"). `magnitude` is that of the row at `at`; elements come in row order. */
static double bound(const struct call *call, const char *name, int64_t i, const struct beside *beside,
                    int64_t at[ROW_DIMENSIONS], struct magnitude *magnitude)
{
    const struct policy *policy = &policies[call->op];
    const enum dimension *rows = call_rows(call);
    const struct member *member;
    const bool is_out = !strcmp(name, "out");
    int64_t place[DIMENSIONS] = {0}, row_at[ROW_DIMENSIONS], element = i;
    struct call row;
    int32_t room[NARROWED];
    int k = 0;
    if (!policy->keys[0].cache || (is_out && !beside->other)) return 0.0;
    while ((member = call_member(call->op, k)) && strcmp(member->name, name) != 0) k++;
    const struct form form = call_form(member, call->tensor[k].ndim);
    for (int d = form.rank - 1; d >= 0; d--)
        place[form.dimensions[d]] = i % call->tensor[k].shape[d], i /= call->tensor[k].shape[d];
    for (int d = 0; d < ROW_DIMENSIONS; d++) row_at[d] = place[rows[d]];
    call_slice(&row, call, rows, row_at, ROW_DIMENSIONS);
    if (!magnitude->any || memcmp(at, row_at, sizeof row_at) != 0) {
        *magnitude = (struct magnitude){0};
        memcpy(at, row_at, sizeof row_at);
        if (policy->narrow) policy->narrow(&row, call, at, room);
        measure(&row, magnitude);
    }
    if (!is_out)
        return fmax(beside->rounded,
                    magnitude_bound(magnitude, *(const int32_t *)call_option(call, "log_base")));
    const fmla_tensor *sink = call_tensor(&row, "attn_sink");
    return magnitude_out_bound(magnitude, sink ? (double)*(const float *)sink->data : -INFINITY,
                               (int)(element % call_size(&row, DIM_d_v)));
}

/* ---- Comparing ------------------------------------------------------------------------------- */

/* Compares the results of a call, or of a slice, with the oracle's, which are contiguous. */
static void compare(const struct call *done, const struct call *oracle, const struct beside *beside,
                    struct check_result *result)
{
    const struct policy *policy = &policies[done->op];
    struct magnitude magnitude = {0};
    int64_t at[ROW_DIMENSIONS] = {0};
    for (int k = 0; k < RESULTS && policy->results[k].name; k++) {
        const struct tolerance *tolerance = tolerance_of(done, beside, k);
        const char *name = policy->results[k].name;
        const fmla_tensor *mine = call_tensor(done, name), *theirs = call_tensor(oracle, name);
        if (!mine) continue;
        const int64_t count = (int64_t)call_bytes(theirs) / element_bytes(theirs->dtype);
        for (int64_t i = 0; tolerance && i < count; i++) {
            const double value = element_load(mine->data, mine->dtype, place_of(mine, i));
            const double reference = element_load(theirs->data, theirs->dtype, i);
            const bool misses = compare_misses(tolerance, value, reference);
            compare_add_within(&result->of[k], tolerance, value, reference,
                               misses ? bound(oracle, name, i, beside, at, &magnitude) : 0.0);
        }
        if (!tolerance) result->wrong_bytes += bytes_that_differ(mine, theirs);
    }
    result->rows += rows_of(oracle);
}

static bool passed(const struct call *call, const struct beside *beside, const struct check_result *result)
{
    const struct policy *policy = &policies[call->op];
    bool good = !result->wrong_bytes;
    for (int k = 0; k < RESULTS && policy->results[k].tolerance; k++)
        good = good && (k == 0 && beside->other ? compare_passed_other : compare_passed)(
                           &result->of[k], tolerance_of(call, beside, k));
    return good;
}

void check_against_asked(const struct call *call, const struct call *asked, bool by_gpu,
                         struct check_result *result)
{
    const bool by_codes = may_be_by_codes(call, by_gpu); /* scales of groups were made as powers of two */
    const struct beside beside = {.by_codes = by_codes, .rounded = by_codes ? rounded_scale_lse : 0.0};
    const struct member *member;
    *result = (struct check_result){.op = call->op, .all_rows = rows_of(call)};
    compare(call, asked, &beside, result);
    for (int i = 0; (member = call_member(call->op, i)); i++)
        if (call->tensor[i].shape && !(member->allowed & IS_OUTPUT))
            result->wrong_bytes += bytes_that_differ(&call->tensor[i], &asked->tensor[i]);
    result->passed = passed(call, &beside, result);
}

/* Checks slice i of those that the oracle can compute; the whole call if `sliced` is 0. */
static bool check_part(const struct call *call, const struct beside *beside, int64_t i, int sliced,
                       double *products, struct check_result *result, struct reason *reason)
{
    const struct policy *policy = &policies[call->op];
    const enum dimension *rows = call_rows(call);
    const struct member *member;
    struct call done, oracle;
    int64_t at[ROW_DIMENSIONS] = {0};
    int32_t room[NARROWED];
    for (int d = sliced - 1; d >= 0; d--) at[d] = i % call_size(call, rows[d]), i /= call_size(call, rows[d]);
    call_slice(&done, call, rows, at, sliced);
    call_slice(&oracle, call, rows, at, sliced);
    if (sliced && policy->narrow) policy->narrow(&oracle, call, at, room);
    for (int k = 0; (member = call_member(call->op, k)); k++) /* the oracle gets its own results */
        if (member->allowed & IS_OUTPUT) oracle.tensor[k].data = NULL, oracle.tensor[k].strides = NULL;
    *products += 0.5 * call_work(&oracle).flop;
    const bool good = call_make_results(&oracle, reason) && check_ask(&oracle, reason);
    if (good) compare(&done, &oracle, beside, result);
    call_close(&oracle);
    return good;
}

bool check_against_oracle(const struct call *call, bool by_gpu, struct check_result *result,
                          struct reason *reason)
{
    const struct policy *policy = &policies[call->op];
    const struct beside beside = {.other = true,
                                  .by_codes = may_be_by_codes(call, by_gpu),
                                  .rounded = may_round_scales(call, by_gpu) ? rounded_scale_lse : 0.0};
    const bool whole = 0.5 * call_work(call).flop <= policy->budget;
    struct random_state random = {2025};
    const enum dimension *rows = call_rows(call);
    struct progress progress;
    int64_t parts = 1;
    int sliced = 0;
    double products = 0.0;
    bool good = true;
    *result = (struct check_result){.op = call->op, .all_rows = rows_of(call)};
    progress_begin(&progress, "comparing with the oracle");
    while (sliced < policy->sliced && rows[sliced]) parts *= call_size(call, rows[sliced++]);
    if (whole) good = check_part(call, &beside, 0, 0, &products, result, reason);
    for (int64_t i = 0;
         good && !whole && (i < 2 || (result->rows < SAMPLED_ROWS && products < policy->budget)); i++) {
        const int64_t part = i == 0 ? 0 : i == 1 ? parts - 1 : random_between(&random, 0, parts - 1);
        good = check_part(call, &beside, part, sliced, &products, result, reason);
        progress_update(&progress, result->rows, SAMPLED_ROWS);
    }
    progress_wipe(&progress);
    result->passed = good && passed(call, &beside, result);
    return good;
}

void check_words(const struct check_result *result, char *text, size_t room)
{
    if (result->op == OP_MHA_BACKWARD && result->of[3].wrong)
        snprintf(text, room, "%" PRId64 " values of d_attn_sink differ", result->of[3].wrong);
    else if (result->op == OP_MHA_BACKWARD)
        snprintf(text, room, "%" PRId64 " values of dq, %" PRId64 " of dk and %" PRId64 " of dv differ",
                 result->of[0].wrong, result->of[1].wrong, result->of[2].wrong);
    else if (result->wrong_bytes)
        snprintf(text, room, "%" PRId64 " bytes differ from the oracle's", result->wrong_bytes);
    else if (result->of[2].wrong)
        snprintf(text, room, "%" PRId64 " values of max_logits differ", result->of[2].wrong);
    else if (result->of[0].wrong || result->of[1].wrong)
        snprintf(text, room, "%" PRId64 " values of out and %" PRId64 " of lse differ", result->of[0].wrong,
                 result->of[1].wrong);
    else
        snprintf(text, room, "cosine difference %.2g of out and %.2g of lse", compare_cosine(&result->of[0]),
                 compare_cosine(&result->of[1]));
}
