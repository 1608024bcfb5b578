/* SPDX-License-Identifier: MIT
 *
 * The runner: runs each case twice through the real dispatch, with different garbage in the workspace the
 * second time, and compares it with the oracle. Kernels with the same grid take turns at each case, so
 * that the oracle's rows are computed once; inputs, poison and outputs are made anew for each kernel.
 */
#include "case.h"
#include "timing.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Faults ---------------------------------------------------------------------------------- */

bool plant(struct patch *patch, void *at, const void *bytes, size_t size)
{
    patch->at = at, patch->size = size;
    memcpy(patch->before, at, size);
    memcpy(at, bytes, size);
    return memcmp(patch->before, bytes, size) != 0;
}

/* Plants an error into an lse that is smaller than its summands: four times the bound for the rounding of
 * products, where the tolerance alone rejects even one such bound. */
static bool plant_cancelled(struct test_case *c)
{
    const int lse = c->op->result[c->op->results - 1];
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++)
            for (int64_t h = 0; h < c->h_q; h++) {
                float *value = case_row(c, lse, r, j, h);
                const double bound = compare_bound(c, r, j, h);
                if (!compare_misses(&tolerance_decode_lse, (double)*value + bound, (double)*value)) continue;
                *value += (float)(4.0 * bound);
                return true;
            }
    return false;
}

static bool plant_lse(struct test_case *c)
{
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++) {
            if (c->op->maker->seen(c, r, j, 0)) continue;
            *(float *)case_row(c, c->op->result[c->op->results - 1], r, j, 0) *= -1.0f;
            return true;
        }
    return false;
}

/* Changes the results as a kernel with the defect would have. */
static bool plant_after(struct test_case *c, enum defect fault)
{
    static const uint16_t zero, nan = 0x7fff;
    const int of_out = c->op->result[0];
    const struct guarded *out = &c->tensor[of_out];
    if (c->op->maker->compare || !c->b || !c->s_q || !c->h_q)
        return c->op->plant_after && c->op->plant_after(c, fault);
    uint16_t *first = case_row(c, of_out, 0, 0, 0);
    const size_t row = (size_t)c->d_v * (out->tensor.dtype.bits / 8);
    switch (fault) {
    case FAULT_OUT_OF_BOUNDS: /* first byte of the canary after the tensor */
        out->memory[GUARDED_FRONT + out->bytes] = 0;
        return true;
    case FAULT_GAP:
        if (!out->tensor.strides) return false;
        memcpy((char *)first + row, &zero, sizeof zero);
        return true;
    case FAULT_UNWRITTEN:
        memset(case_row(c, of_out, c->b - 1, c->s_q - 1, c->h_q - 1), 0xff, row);
        return true;
    case FAULT_NAN: memcpy((char *)first + row - sizeof nan, &nan, sizeof nan); return true;
    case FAULT_UNSTABLE: return true; /* case_check plants it between the runs */
    case FAULT_LSE: return plant_lse(c);
    case FAULT_LSE_CANCELLED: return plant_cancelled(c);
    default: return c->op->plant_after && c->op->plant_after(c, fault);
    }
}

/* ---- A case ---------------------------------------------------------------------------------- */

/* Checks that every row of the requested results was written: none starts and ends with the fill bytes.
 * Results not requested must be unchanged. */
static void check_written(const struct test_case *c)
{
    static const uint32_t filled = 0xffffffff;
    bool written = true, left_alone = true;
    for (int k = 0; k < c->op->results; k++) {
        const int i = c->op->result[k];
        const struct guarded *g = &c->tensor[i];
        const bool vectors = !k || c->op->of == OP_MHA_BACKWARD; /* else rows are single numbers */
        const int64_t element = g->tensor.dtype.bits / 8, dims = g->tensor.ndim - vectors,
                      last = vectors ? (g->shape[dims] - 1) * element : 0;
        int64_t n[3] = {1, 1, 1};
        for (int64_t d = 0; d < dims; d++) n[d] = g->shape[d];
        for (int64_t at = 0; case_names(c, i) && at < n[0] * n[1] * n[2]; at++) {
            const char *row = guarded_at(g, at / n[2] / n[1], at / n[2] % n[1], at % n[2], 0);
            written &= memcmp(row, &filled, (size_t)element) || memcmp(row + last, &filled, (size_t)element);
        }
        for (size_t at = 0; !case_names(c, i) && at < g->bytes; at++)
            left_alone &= g->memory[GUARDED_FRONT + at] == 0xff;
    }
    if (!written) failed(c, "a row of a result was not written");
    if (!left_alone) failed(c, "a result that was not asked for was written");
}

/* Runs the case twice: with its plan, then with the plan's tables and different garbage. Returns the first
 * run's results. */
static unsigned char *run_twice(struct test_case *c, fmla_status *status)
{
    if (!*status) *status = case_run(c, &c->args, 0xff);
    unsigned char *before = case_results_copy(c);
    case_results_reset(c);
    case_use_tables(c);
    if (!*status) *status = case_run(c, &c->args, 0x00);
    case_from_device(c);
    return before;
}

/* Runs random requests alone if the case is batch-invariant; all requests if the operation always is. Only
 * FAULT_BATCH is planted for this check, because the oracle's comparison is already done. */
static void check_parts(struct test_case *c)
{
    const struct run *run = c->run;
    const int axis = c->op->invariant;
    const bool planted = run->fault == FAULT_BATCH;
    if (!c->op->maker->part || !c->b || (run->fault != FAULT_NONE && !planted) || (axis && !c->v[axis]) ||
        c->of_batch)
        return;
    const int64_t requests = case_requests(c), parts = axis           ? (on_gpu(run) ? 4 : 1)
                                                       : requests > 1 ? requests
                                                                      : 0;
    for (int64_t at = 0; planted && parts && at < c->b * c->s_q; at++) {
        c->tally->planted = true;
        *(unsigned char *)case_row(c, c->op->result[0], at / c->s_q, at % c->s_q, 0) ^= 1;
    }
    for (int64_t i = 0; i < parts; i++) compare_part(c, axis ? -1 : i);
}

static void run_and_compare(struct test_case *c, struct oracle *oracle)
{
    const struct run *run = c->run;
    const struct subject *op = c->op;
    const char *kernel = "";
    struct patch patch = {0};
    bool planted = false;
    fmla_status status = FMLA_OK;
    if (op->tables && c->v[op->plan] && !case_plan(c)) return;
    if (run->fault != FAULT_NONE && op->plant_before) planted = op->plant_before(c, run->fault, &patch);
    case_to_device(c, NULL);
    if (case_kernel(c, &kernel) || (!run->by_default && strcmp(kernel, run->kernel) != 0))
        failed(c, "the library says that another kernel would run");
    const uint64_t inputs = case_hash_inputs(c);
    unsigned char *before = run_twice(c, &status);
    if (case_hash_inputs(c) != inputs) failed(c, "the call changed its inputs");
    if (patch.at) memcpy(patch.at, patch.before, patch.size);
    must(c, status);
    if (run->fault == FAULT_UNSTABLE && c->b && c->s_q)
        *(unsigned char *)case_row(c, op->result[c->unordered ? 1 : 0], 0, 0, 0) ^= 1;
    if (!case_results_same(c, before))
        failed(c, "two runs of the same call, with other garbage in the workspace, differ in their bits");
    free(before);
    if (run->fault != FAULT_NONE) planted |= plant_after(c, run->fault);
    c->tally->planted |= planted;
    case_results_intact(c);
    if (status) return;
    if (!op->maker->compare || op->maker->seen) check_written(c);
    compare_oracle(c, inputs, oracle);
    check_parts(c);
}

bool case_left(struct test_case *c)
{
    bool required = false;
    const char *kernel;
    if (!c->op->leaves || !c->op->leaves(c, &required)) return false;
    case_to_device(c, NULL);
    const fmla_status status = case_kernel(c, &kernel);
    device_drop(&c->blocks, 0);
    if (!status && !required) return false;
    if (status != FMLA_UNSUPPORTED || !strstr(fmla_last_error(), c->run->kernel))
        failed(c, "the kernel should refuse this case, by its name");
    c->tally->refused++;
    return true;
}

void case_check(const struct subject *op, const struct run *run, const int64_t *v, uint64_t seed,
                struct tally *tally, struct oracle *oracle)
{
    struct test_case *c = case_make(op, run, tally, v, seed);
    if (!case_left(c)) {
        use_threads(run, v[op->threads]);
        run_and_compare(c, oracle);
        use_threads(run, THREADS_BUILT_IN);
    }
    case_free(c);
}

/* ---- Suites ---------------------------------------------------------------------------------- */

/* Runs a case on every kernel that wants it, one after the other. */
static void check_all(struct suite *s, const int64_t *v, uint64_t seed, uint64_t number, bool by_oracle)
{
    if (s->run[0].fault != FAULT_NONE && s->tally[0].planted) return;
    if (s->run[0].parts && s->asked++ % s->run[0].parts != s->run[0].part - 1) return;
    for (int k = 0; k < s->kernels; k++) {
        struct run run = s->run[k];
        if (number && !wants_case(&run, &s->tally[k], number)) continue;
        if (!number && !by_oracle && s->op->has && !s->op->has(&run, v)) continue;
        if (by_oracle) run.kernel = "ref", run.device = (fmla_device){FMLA_DEVICE_CPU, 0};
        const double start = timing_now();
        case_check(s->op, &run, v, seed, &s->tally[k], run.fault == FAULT_NONE ? &s->oracle : NULL);
        s->tally[k].seconds += timing_now() - start;
    }
    oracle_free(&s->oracle);
}

void suite_case(struct suite *s, uint64_t seed, bool by_oracle, const char *format, ...)
{
    int64_t v[GRID_AXES];
    char text[400];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    case_values(s->op, text, v);
    check_all(s, v, seed, 0, by_oracle);
}

bool has_far_memory(const struct run *run, size_t gib)
{
    if (!on_gpu(run) || device_memory() >= gib << 30) return true;
    printf("  not on this GPU: offsets of more than 32 bits, which take %zu GiB\n", gib);
    return false;
}

/* Keeps values already drawn from this seed: faults are planted into cases of one seed. */
static void draw(const struct maker *maker, uint64_t seed)
{
    static const struct maker *drawn_by;
    static uint64_t drawn_with;
    if (drawn_by == maker && drawn_with == seed) return;
    maker->draw(seed);
    drawn_by = maker, drawn_with = seed;
}

static void check_grid(struct suite *s, struct grid *grid)
{
    const struct subject *op = s->op;
    const struct run *run = &s->run[0];
    int64_t v[GRID_AXES];
    grid_begin(grid);
    for (uint64_t i = 1; grid_next(grid, v); i++) {
        const uint64_t seed = run->seed * 1000003 + i;
        if (op->maker->cases_of_a_draw && i % op->maker->cases_of_a_draw == 0) draw(op->maker, seed);
        check_all(s, v, seed, i, false);
        if (run->most_cases && (int64_t)i >= run->most_cases) break;
        if (run->fault != FAULT_NONE && s->tally[0].planted) break;
    }
    for (int k = 0; k < s->kernels; k++) {
        s->tally[k].pairs += grid->pairs, s->tally[k].covered += grid->covered;
        s->tally[k].number = 0;
    }
    free(grid->seen);
}

/* Sets the defaults of texts; those of functions stand where they are called. */
static void set_defaults(struct gpu_cases *gpu)
{
    if (!gpu->bases[0]) gpu->bases[0] = "";
    if (!gpu->busy) gpu->busy = gpu->repeats[0];
    if (!gpu->threads[0]) gpu->threads[0] = "h_q 128", gpu->threads[1] = "h_q 16";
    for (int i = 0; i < 3; i++)
        if (!gpu->next[i]) gpu->next[i] = "";
}

void operation_begin(struct subject *op, uint64_t seed)
{
    const struct descriptor *from = &descriptors[op->of];
    set_defaults(&op->gpu);
    op->axes = axes_define(op->axis, op->values);
    op->name = from->name, op->tensors = op->results = 0, op->sink = -1;
    for (const struct member *member = from->members; member->name; member++) {
        if (member->kind != MEMBER_TENSOR) continue;
        const int i = op->tensors++;
        op->tensor[i] = member;
        if (member->allowed & IS_OUTPUT) op->result[op->results++] = i;
        if (!strcmp(member->name, "attn_sink")) op->sink = i;
        if (!strcmp(member->name, "partitions")) op->tables = i;
    }
    for (int i = 0; i < op->axes; i++) {
        if (!strcmp(op->axis[i].name, "threads")) op->threads = i;
        if (!strcmp(op->axis[i].name, "plan")) op->plan = i;
        if (!strcmp(op->axis[i].name, "batch_invariant")) op->invariant = i;
        if (!strcmp(op->axis[i].name, "dtype")) op->dtype = i;
    }
    if (op->maker->draw) draw(op->maker, seed);
}

/* Leaves the kernel's types in the axis dtype, "bf16 fp16". */
static void choose_types(struct axis *dtype, const struct run *run)
{
    dtype->count = 0;
    if (run->types & FMLA_TAKES_BF16) dtype->values[dtype->count++] = 0;
    if (run->types & FMLA_TAKES_FP16) dtype->values[dtype->count++] = 1;
}

void suite_check(struct suite *s)
{
    struct subject *op = s->op;
    const struct run *run = &s->run[0];
    operation_begin(op, run->seed);
    if (run->fault == FAULT_COUNT) {
        s->tally[0].planted = true, s->tally[0].failed = time_cases(op, run);
        return;
    }
    if (on_gpu(run)) op->axis[op->threads].count = 1;
    if (op->dtype) choose_types(&op->axis[op->dtype], run);
    if (op->choose) op->choose(op, run);
    struct grid grid = op->grid;
    grid.axes = op->axes, grid.axis = op->axis, grid.random.state = run->seed;
    if (run->fault != FAULT_NONE && op->fault_cases) {
        op->fault_cases(s);
        return;
    }
    if (!run->only_case && run->fault == FAULT_NONE) {
        if (on_gpu(run)) gpu_check(op, run, &s->tally[0]);
        for (uint64_t i = 0; op->special[i]; i++) suite_case(s, run->seed + i, false, "%s", op->special[i]);
        for (int i = 0; op->by_oracle[i]; i++) suite_case(s, run->seed, true, "%s", op->by_oracle[i]);
        if (op->more) op->more(s);
    }
    check_grid(s, &grid);
}
