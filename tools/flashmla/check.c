/* SPDX-License-Identifier: MIT
 *
 * A row depends on its query, its request's keys and nothing else. So the oracle can be asked for single rows of dense
 * decode, and for single tokens of the sparse operations, by views.
 */
#include "check.h"

#include "elements.h"
#include "progress.h"
#include "random.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { SAMPLED_ROWS = 64 };

static int64_t rows_of(const struct call *call)
{
    const enum dimension *dimensions = policies[call->op].rows;
    int64_t rows = 1;
    for (int i = 0; i < ROW_DIMENSIONS && dimensions[i]; i++) rows *= call_size(call, dimensions[i]);
    return rows;
}

/* Runs the call as it is, but for workspace, plan and kernel. */
static bool ask_oracle(struct call *call, struct fault *fault)
{
    const void **plan = call_option(call, "plan");
    struct fault why = {""};
    fmla_status status;
    *(const char **)call_option(call, "kernel") = "ref";
    if (plan) *plan = NULL;
    if (call_workspace(call, &status, &why) && !call_refused(&status, call_run(call), &why)) return true;
    return fault_set(fault, "oracle: %s", why.text);
}

/* Where element i, counted without gaps, lies in the tensor. */
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

/* The results of a call, or of a part of one, with the oracle's, which have no gaps. */
static void compare(const struct call *done, const struct call *oracle, struct check_result *result)
{
    const struct policy *policy = &policies[done->op];
    for (int k = 0; k < RESULTS && policy->results[k].name; k++) {
        const struct tolerance *tolerance = policy->results[k].tolerance;
        const fmla_tensor *mine = call_tensor(done, policy->results[k].name);
        const fmla_tensor *theirs = call_tensor(oracle, policy->results[k].name);
        if (!mine) continue;
        const int64_t count = (int64_t)call_bytes(theirs) / element_bytes(theirs->dtype);
        for (int64_t i = 0; tolerance && i < count; i++)
            compare_add(&result->of[k], tolerance, element_load(mine->data, mine->dtype, place_of(mine, i)),
                        element_load(theirs->data, theirs->dtype, i));
        if (!tolerance) result->wrong_bytes += bytes_that_differ(mine, theirs);
    }
    result->rows += rows_of(oracle);
}

static bool passed(const struct call *call, const struct check_result *result)
{
    const struct policy *policy = &policies[call->op];
    bool good = !result->wrong_bytes;
    for (int k = 0; k < RESULTS && policy->results[k].tolerance; k++)
        good = good && compare_passed(&result->of[k], policy->results[k].tolerance);
    return good;
}

bool check_against_fresh(const struct call *call, struct call *fresh, struct check_result *result,
                         struct fault *fault)
{
    const struct member *member;
    *result = (struct check_result){.all_rows = rows_of(call)};
    if (!ask_oracle(fresh, fault)) return false;
    compare(call, fresh, result);
    for (int i = 0; (member = call_member(call->op, i)); i++)
        if (call->tensor[i].shape && !(member->allowed & IS_OUTPUT))
            result->wrong_bytes += bytes_that_differ(&call->tensor[i], &fresh->tensor[i]);
    result->passed = passed(call, result);
    return true;
}

/* The part at place i of those that the oracle can be asked for; whole where `sliced` is 0. */
static bool check_part(const struct call *call, int64_t i, int sliced, double *products,
                       struct check_result *result, struct fault *fault)
{
    const struct policy *policy = &policies[call->op];
    const struct member *member;
    struct call done, oracle;
    int64_t at[ROW_DIMENSIONS] = {0};
    int32_t room;
    for (int d = sliced - 1; d >= 0; d--)
        at[d] = i % call_size(call, policy->rows[d]), i /= call_size(call, policy->rows[d]);
    call_slice(&done, call, policy->rows, at, sliced);
    call_slice(&oracle, call, policy->rows, at, sliced);
    if (sliced && policy->narrow) policy->narrow(&oracle, call, at, &room);
    for (int k = 0; (member = call_member(call->op, k)); k++) /* results of its own */
        if (member->allowed & IS_OUTPUT) oracle.tensor[k].data = NULL, oracle.tensor[k].strides = NULL;
    *products += 0.5 * call_work(&oracle).flop;
    const bool good = call_make_results(&oracle, fault) && ask_oracle(&oracle, fault);
    if (good) compare(&done, &oracle, result);
    call_close(&oracle);
    return good;
}

bool check_against_oracle(const struct call *call, struct check_result *result, struct fault *fault)
{
    const struct policy *policy = &policies[call->op];
    const bool whole = 0.5 * call_work(call).flop <= policy->budget;
    struct random_state random = {2025};
    struct progress progress;
    int64_t parts = 1;
    double products = 0.0;
    bool good = true;
    *result = (struct check_result){.all_rows = rows_of(call)};
    progress_begin(&progress, "comparing with the oracle");
    for (int d = 0; d < policy->sliced; d++) parts *= call_size(call, policy->rows[d]);
    if (whole) good = check_part(call, 0, 0, &products, result, fault);
    for (int64_t i = 0;
         good && !whole && (i < 2 || (result->rows < SAMPLED_ROWS && products < policy->budget)); i++) {
        const int64_t part = i == 0 ? 0 : i == 1 ? parts - 1 : random_between(&random, 0, parts - 1);
        good = check_part(call, part, policy->sliced, &products, result, fault);
        progress_update(&progress, result->rows, SAMPLED_ROWS);
    }
    progress_wipe(&progress);
    result->passed = good && passed(call, result);
    return good;
}

void check_words(const struct check_result *result, char *text, size_t room)
{
    if (result->wrong_bytes)
        snprintf(text, room, "%" PRId64 " bytes differ from the oracle's", result->wrong_bytes);
    else if (result->of[2].wrong)
        snprintf(text, room, "%" PRId64 " values of max_logits differ", result->of[2].wrong);
    else
        snprintf(text, room, "%" PRId64 " values of out and %" PRId64 " of lse differ", result->of[0].wrong,
                 result->of[1].wrong);
}
