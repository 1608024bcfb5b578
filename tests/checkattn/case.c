/* SPDX-License-Identifier: MIT */
#include "case.h"

#include "num.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Making it -------------------------------------------------------------------------------- */

void case_values(const struct subject *op, const char *text, int64_t v[GRID_AXES])
{
    for (int i = 0; i < op->axes; i++) v[i] = op->axis[i].values[0];
    if (op->defaults) axes_read(op->axis, op->axes, op->defaults, v);
    axes_read(op->axis, op->axes, text, v);
}

/* Takes an axis: one named after a dimension sets its size, one named after an option its value. */
static void take_axis(struct test_case *c, const char *name, int64_t value)
{
    const struct member *member = descriptors[c->op->of].members;
    const int32_t number = (int32_t)value;
    int i = 1;
    while (i < DIMENSIONS && strcmp(dimension_words[i], name) != 0) i++;
    if (i < DIMENSIONS) c->size[i] = value;
    for (; member->name; member++)
        if (member->kind == MEMBER_INTEGER && !strcmp(member->name, name))
            memcpy((char *)&c->args + member->offset, &number, sizeof number);
}

struct test_case *case_make(const struct subject *op, const struct run *run, struct tally *tally,
                            const int64_t *v, uint64_t seed)
{
    struct test_case *c = calloc(1, op->maker->size);
    if (!c) exit(1);
    c->op = op, c->run = run, c->tally = tally;
    if (tally) tally->cases++;
    memcpy(c->v, v, (size_t)op->axes * sizeof *v);
    c->random.state = seed, c->device = run->device;
    axes_write(op->axis, op->axes, v, c->name, sizeof c->name);
    for (int i = 0; i < DIMENSIONS; i++) c->size[i] = 1;
    memcpy(&c->args, &descriptors[op->of].size, sizeof descriptors[op->of].size); /* struct_size */
    for (int i = 0; i < op->axes; i++) take_axis(c, op->axis[i].name, v[i]);
    op->maker->make(c);
    set_pointer(op, &c->args, "kernel", run->by_default ? NULL : run->kernel);
    return c;
}

void failed(const struct test_case *c, const char *format, ...)
{
    char what[420];
    va_list values;
    va_start(values, format);
    vsnprintf(what, sizeof what, format, values);
    va_end(values);
    report(c->tally, c->run, c->name, what);
}

void must(const struct test_case *c, fmla_status status)
{
    if (status) failed(c, "%s", fmla_last_error());
}

void case_free(struct test_case *c)
{
    device_drop(&c->blocks, 0);
    for (int i = 0; i < MAX_TENSORS; i++) guarded_free(&c->tensor[i]);
    free(c->plan), free(c->owned[0]), free(c->owned[1]), free(c);
}

void case_name(struct test_case *c, int i)
{
    set_tensor(c->op, &c->args, i, &c->view[i]);
}

bool case_names(const struct test_case *c, int i)
{
    return i >= 0 && tensor_at(c->op, &c->args, i);
}

void case_tensor(struct test_case *c, int i, enum layout layout, bool wanted)
{
    const struct member *member = c->op->tensor[i];
    const unsigned types = member->allowed & (ALLOW_FLOATS | ALLOW_SAME | ALLOW_I32 | ALLOW_I64);
    const struct form form = form_of(member, c->flat);
    int64_t shape[MAX_DIMENSIONS];
    for (int d = 0; d < form.rank; d++) shape[d] = c->size[form.dimensions[d]];
    /* Tokens without a batch dimension are swapped with their heads. */
    const bool tokens = form.dimensions[0] == DIM_s_q || form.dimensions[0] == DIM_tokens_q ||
                        form.dimensions[0] == DIM_tokens_k;
    if (layout == LAYOUT_SWAPPED && form.rank == 3 && tokens) layout = LAYOUT_SWAPPED_FIRST;
    guarded_make(&c->tensor[i],
                 types == ALLOW_F32   ? dtype_f32
                 : types == ALLOW_I32 ? dtype_i32
                 : types == ALLOW_I64 ? dtype_i64
                 : types & ALLOW_I64  ? (c->wide ? dtype_i64 : dtype_i32)
                                      : c->dtype,
                 form.rank, shape, layout);
    c->view[i] = c->tensor[i].tensor;
    if (wanted) case_name(c, i);
}

void case_spread(struct test_case *c, int i, size_t front, size_t between)
{
    struct guarded *g = &c->tensor[i];
    fmla_tensor *view = &c->view[i];
    const size_t page_bytes = (size_t)g->strides[0] * (g->tensor.dtype.bits / 8);
    guarded_spread(g, g->shape[0], page_bytes, front, between, is_result(c->op, i));
    memcpy(c->far_strides[i], view->strides ? view->strides : g->strides, sizeof c->far_strides[i]);
    c->strides[i] = c->far_strides[i][0];
    c->far_strides[i][0] = (int64_t)between / (view->dtype.bits / 8);
    view->data = g->far + front, view->byte_offset = 0, view->strides = c->far_strides[i];
}

void case_sinks(struct test_case *c, int64_t kind)
{
    if (kind == SINK_NONE) return;
    case_tensor(c, c->op->sink, LAYOUT_CONTIGUOUS, true);
    for (int64_t h = 0; h < c->h_q; h++) {
        float sink = random_normal(&c->random) * 3.0f;
        if (kind == SINK_INFINITE && h % 3 < 2) sink = h % 3 ? INFINITY : -INFINITY;
        if (kind == SINK_HIGH && h % 3) sink += h % 3 > 1 ? 60.0f : 12.0f;
        *(float *)guarded_at(&c->tensor[c->op->sink], h, 0, 0, 0) = sink;
    }
}

void draw_numbers(struct random_state *random, float mean, float deviation, int count, uint16_t *bf16,
                  uint16_t *fp16)
{
    for (int i = 0; i < count; i++) {
        const float x = random_input(random, mean, deviation);
        bf16[i] = num_to_bf16(x), fp16[i] = num_to_fp16(x);
    }
}

void case_spike(uint8_t *end, bool fp16)
{
    const uint16_t half = fp16 ? 0x3800 : 0x3f00;
    for (int i = 1; i <= SPIKE; i++) memcpy(end - 2 * i, &half, sizeof half);
}

void case_infinite(uint8_t *end, bool fp16, bool of_key, bool special)
{
    const uint16_t large = fp16 ? 0x7c00 : 0x7f80, small = fp16 ? 0x3800 : 0x3f00;
    const uint16_t last = of_key    ? small
                          : special ? large
                                    : 0,
                   before = !of_key   ? small
                            : special ? large
                                      : 0;
    memcpy(end - 2, &last, sizeof last), memcpy(end - 4, &before, sizeof before);
}

/* ---- Its memory ------------------------------------------------------------------------------- */

static const struct guarded *case_result(const struct test_case *c, int k)
{
    return &c->tensor[c->op->result[k]];
}

static void move_pages(const struct test_case *c, const struct guarded *g, bool up)
{
    for (int64_t page = 0; page < g->pages; page++)
        device_part(&c->blocks, g->far + g->far_front + (size_t)page * g->far_between, g->page_bytes, up);
}

void case_to_device(struct test_case *c, const struct test_case *like)
{
    if (!is_apart(c->device)) return;
    for (int i = 0; i < c->op->tensors; i++) {
        const struct guarded *g = &c->tensor[i];
        if (!g->memory || is_table(c->op, i)) continue; /* tables are already there */
        if (like)
            device_add_in_place(&c->blocks, g->memory, g->whole, &like->blocks);
        else
            device_add_guarded(&c->blocks, g);
        if (!g->far) continue;
        device_add_zeros(&c->blocks, g->far, g->far_bytes);
        move_pages(c, g, true);
    }
}

void case_move_result(const struct test_case *c, int k, const fmla_tensor *result, bool up)
{
    const struct guarded *g = case_result(c, k);
    const unsigned char *data = result->data;
    if (g->far && data >= g->far && data < g->far + g->far_bytes)
        move_pages(c, g, up);
    else
        device_move(&c->blocks, data, up);
    if (!up) guarded_move(g, false);
}

/* case_move_result moves only the pages of far memory and leaves near results as they are: their copy on
 * the device was not written. */
static bool is_far(const struct test_case *c, const unsigned char *host)
{
    for (int i = 0; i < c->op->tensors; i++) {
        const struct guarded *g = &c->tensor[i];
        if (g->far && (host == g->far || (host >= g->memory && host < g->memory + g->whole))) return true;
    }
    return false;
}

void case_from_device(struct test_case *c)
{
    for (int i = 0; i < c->blocks.count; i++)
        if (!is_far(c, c->blocks.block[i].host)) device_move(&c->blocks, c->blocks.block[i].host, false);
}

uint64_t case_hash_inputs(const struct test_case *c)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (int i = 0; i < c->op->tensors; i++)
        for (size_t at = 0; !is_result(c->op, i) && at < c->tensor[i].whole;
             at += sizeof hash) { /* `whole` is a multiple of 64 */
            uint64_t word;
            memcpy(&word, c->tensor[i].memory + at, sizeof word);
            hash = (hash ^ word) * 0x100000001b3u;
        }
    return hash;
}

unsigned char *case_results_copy(const struct test_case *c)
{
    size_t bytes = 0;
    for (int k = 0; k < c->op->results; k++) bytes += case_result(c, k)->whole;
    unsigned char *copy = must_alloc(bytes), *at = copy;
    for (int k = 0; k < c->op->results; at += case_result(c, k++)->whole)
        if (case_result(c, k)->whole) memcpy(at, case_result(c, k)->memory, case_result(c, k)->whole);
    return copy;
}

bool case_results_same(const struct test_case *c, const unsigned char *copy)
{
    bool same = true;
    for (int k = 0; k < c->op->results; copy += case_result(c, k++)->whole)
        same &= (!k && c->unordered) || !case_result(c, k)->whole ||
                !memcmp(copy, case_result(c, k)->memory, case_result(c, k)->whole);
    return same;
}

void case_results_reset(struct test_case *c)
{
    for (int k = 0; k < c->op->results; k++) guarded_reset(&c->tensor[c->op->result[k]]);
}

void case_results_intact(const struct test_case *c)
{
    for (int k = 0; k < c->op->results; k++)
        if (!guarded_intact(case_result(c, k)))
            failed(c, "%s: bytes outside the tensor's elements were written",
                   c->op->tensor[c->op->result[k]]->name);
}

void *case_row(const struct test_case *c, int i, int64_t request, int64_t token, int64_t head)
{
    return row_in(c, &c->tensor[i], i, request, token, head);
}

void *row_in(const struct test_case *c, const struct guarded *g, int i, int64_t request, int64_t token,
             int64_t head)
{
    const struct form form = form_of(c->op->tensor[i], c->flat);
    int64_t at[MAX_DIMENSIONS] = {0};
    for (int d = 0; d < form.rank; d++) {
        const enum dimension dim = form.dimensions[d];
        const bool tokens = dim == DIM_s_q || dim == DIM_tokens_q || dim == DIM_s_k || dim == DIM_tokens_k;
        at[d] = dim == DIM_b ? request : tokens ? token : dim == DIM_h_q || dim == DIM_h_kv ? head : 0;
    }
    return guarded_at(g, at[0], at[1], at[2], at[3]);
}

/* ---- Plans ------------------------------------------------------------------------------------ */

void case_plan_args(const struct test_case *c, const union call_args *args, struct plan_call *plan)
{
    const struct subject *op = c->op;
    const bool sparse = op->of == OP_SPARSE_DECODE;
    *plan =
        (struct plan_call){.sparse = sparse,
                           .b = c->b,
                           .s_q = c->s_q,
                           .h_q = c->h_q,
                           .h_kv = c->h_kv,
                           .topk = c->topk,
                           .extra_topk = c->extra_topk,
                           .target = c->device,
                           .num_partitions = *(const int32_t *)op_option(op->of, &c->args, "num_partitions")};
    if (!sparse) {
        plan->seqlens = args->dense_decode.seqlens;
        return;
    }
    plan->topk_length = args->sparse_decode.topk_length;
    plan->extra_topk_length = args->sparse_decode.extra_topk_length;
}

static bool holds(const struct guarded *guarded, const void *bytes)
{
    return !memcmp(guarded->memory + GUARDED_FRONT, bytes, guarded->bytes) && guarded_intact(guarded);
}

/* Makes the plan's tables separately, on the host; returns what is wrong. */
static const char *make_tables(struct test_case *c, struct plan_call args)
{
    const int first = c->op->tables;
    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    if (fmla_plan_describe(args.plan, args.plan_size, &view)) return fmla_last_error();
    c->rows = view.num_partitions, c->fields = FMLA_PARTITION_FIELDS, c->splits = c->b + 1;
    for (int i = 0; i < 2; i++) case_tensor(c, first + i, LAYOUT_CONTIGUOUS, false);
    args.plan = NULL, args.plan_size = 0;
    args.partitions = &c->view[first], args.num_splits = &c->view[first + 1];
    if (plan_call_run(&args)) return fmla_last_error();
    return holds(&c->tensor[first], view.partitions) && holds(&c->tensor[first + 1], view.num_splits)
               ? NULL
               : "plans of the same lengths have different bits";
}

void case_plan_on_host(struct plan_call *plan, struct guarded *full)
{
    if (!plan->sparse || plan->topk_length || plan->extra_topk_length) return;
    guarded_make(full, dtype_i32, 1, &plan->b, LAYOUT_CONTIGUOUS);
    for (int64_t r = 0; r < plan->b; r++) *(int32_t *)guarded_at(full, r, 0, 0, 0) = (int32_t)plan->topk;
    plan->topk_length = &full->tensor;
}

bool case_plan(struct test_case *c)
{
    struct guarded lengths[2] = {0}, full = {0};
    struct plan_call args, there;
    const bool apart = is_apart(c->device), stale = c->v[c->op->plan] == PLAN_STALE;
    case_plan_args(c, &c->args, &args);
    for (int k = 0; k < 2; k++) {
        struct guarded *g = &lengths[k];
        guarded_make(g, dtype_i32, 1, &c->b, LAYOUT_CONTIGUOUS);
        const bool given = c->op->maker->plan_lengths(c, k, stale, guarded_at(g, 0, 0, 0, 0));
        if (!given) guarded_free(g);
        *plan_call_length(&args, k) = given ? &g->tensor : NULL;
    }
    there = args;
    if (apart) case_plan_on_host(&args, &full);
    const fmla_status status = plan_call_size(&args, &args.plan_size);
    c->plan = args.plan = must_alloc(args.plan_size);
    const char *wrong = status || plan_call_run(&args) ? fmla_last_error() : make_tables(c, args);
    if (!wrong && apart) wrong = plan_differs(&there, lengths, c->plan, args.plan_size);
    if (apart) device_add(&c->blocks, c->plan, args.plan_size, 16);
    for (int i = 0; apart && i < 2; i++) device_add_guarded(&c->blocks, &c->tensor[c->op->tables + i]);
    set_pointer(c->op, &c->args, "plan", c->plan);
    set_size(c->op, &c->args, "plan_size", args.plan_size);
    for (int k = 0; k < 2; k++) guarded_free(&lengths[k]);
    guarded_free(&full);
    if (wrong) failed(c, "%s", wrong);
    return !wrong;
}

void case_use_tables(struct test_case *c)
{
    if (!c->plan) return;
    set_pointer(c->op, &c->args, "plan", NULL);
    case_name(c, c->op->tables), case_name(c, c->op->tables + 1);
}

/* ---- Parts ------------------------------------------------------------------------------------ */

void view_make(const struct test_case *c, struct view *v, bool near)
{
    const struct subject *op = c->op;
    v->args = c->args;
    for (int i = 0; i < op->tensors; i++) {
        const fmla_tensor *from = tensor_at(op, &c->args, i);
        if (!from) continue;
        fmla_tensor *tensor = &v->tensor[i];
        *tensor = *from;
        int64_t span = 1;
        for (int d = tensor->ndim - 1; d >= 0; d--) {
            v->shape[i][d] = from->shape[d];
            v->strides[i][d] = from->strides ? from->strides[d] : span;
            span *= from->shape[d];
        }
        if (near && c->tensor[i].far) {
            tensor->data = c->tensor[i].tensor.data, tensor->byte_offset = c->tensor[i].tensor.byte_offset;
            v->strides[i][0] = c->strides[i];
        }
        tensor->shape = v->shape[i], tensor->strides = v->strides[i];
        set_tensor(op, &v->args, i, tensor);
    }
    if (!op->tables) return;
    set_pointer(op, &v->args, "plan", NULL);
    for (int i = 0; i < 2; i++) set_tensor(op, &v->args, op->tables + i, NULL);
}

void view_narrow(struct view *v, int i, int dim, int64_t first, int64_t count)
{
    fmla_tensor *tensor = &v->tensor[i];
    tensor->data =
        (char *)tensor->data + tensor->byte_offset + first * v->strides[i][dim] * (tensor->dtype.bits / 8);
    tensor->byte_offset = 0;
    v->shape[i][dim] = count;
}

void view_narrow_all(const struct test_case *c, struct view *v, enum dimension dimension, int64_t first,
                     int64_t count)
{
    for (int i = 0; i < c->op->tensors; i++) {
        if (is_result(c->op, i) || is_table(c->op, i) || !tensor_at(c->op, &v->args, i)) continue;
        const struct form form = form_of(c->op->tensor[i], v->tensor[i].ndim != c->op->tensor[i]->rank);
        bool empty = !count; /* then only its own address belongs to the tensor */
        for (int d = 0; d < v->tensor[i].ndim; d++) empty |= !v->shape[i][d];
        for (int d = 0; d < v->tensor[i].ndim; d++)
            if (form.dimensions[d] == dimension) view_narrow(v, i, d, empty ? 0 : first, count);
    }
}

void view_rows(const struct test_case *c, struct view *v, const struct rows *rows)
{
    const int sink = c->op->sink;
    view_narrow_all(c, v, DIM_b, rows->request, 1);
    view_narrow_all(c, v, c->flat ? DIM_tokens_q : DIM_s_q, rows->token, 1);
    view_narrow_all(c, v, DIM_h_q, rows->head, rows->heads);
    view_narrow_all(c, v, DIM_h_kv, rows->head / (c->h_q / c->h_kv), 1);
    for (int i = 0; i < c->op->tensors; i++)
        for (int d = 0; case_names(c, i) && d < v->tensor[i].ndim; d++)
            if (form_of(c->op->tensor[i], c->flat).dimensions[d] == DIM_h_q) v->strides[i][d] *= rows->step;
    if (!case_names(c, sink)) return;
    for (int64_t h = 0; h < rows->heads; h++)
        v->sinks[h] = *(const float *)guarded_at(&c->tensor[sink], rows->head + h * rows->step, 0, 0, 0);
    v->tensor[sink].data = v->sinks, v->tensor[sink].byte_offset = 0, v->strides[sink][0] = 1;
}
