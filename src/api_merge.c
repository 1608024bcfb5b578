/* SPDX-License-Identifier: MIT
 *
 * The public function of merge.
 */
#include "api.h"

#include <string.h>

#define OF(member) (&c->tensors[TENSOR_merge_##member])

/* Checks which parts are given: all with their out, the last one perhaps apart; or the out of one alone. */
static fmla_status check_parts(const struct checked_call *c, int64_t part)
{
    const char *op = c->operation;
    const struct checked_tensor *out_last = OF(out_last), *lse_last = OF(lse_last);
    if (!out_last->name != !lse_last->name)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is NULL, must be given with %s", op,
                    out_last->name ? "lse_last" : "out_last", out_last->name ? "out_last" : "lse_last");
    if (!part) return check_size(op, OF(lse_parts), 0, "n", c->size[DIM_n_out], "out_parts");
    TRY(check_range(op, "part", part, 0, c->size[DIM_n]));
    if (out_last->name)
        return fail(FMLA_INVALID_ARGUMENT, "%s: out_last: is given, must be NULL with part", op);
    return check_size(op, OF(out_parts), 0, "n", 1, "a call with part");
}

/* Returns whether an output begins and strides as one of the n parts of `parts` does: each of its elements is then
 * that of the part, and of no other part if these share no memory with each other. */
static bool is_one_part(const struct checked_tensor *output, const struct checked_tensor *parts, int64_t n,
                        int64_t part_stride, const int64_t *stride, int ndim)
{
    if (!output->name || output->element != parts->element) return false;
    for (int i = 0; i < ndim; i++)
        if (output->shape[i] > 1 && output->stride[i] != stride[i]) return false;
    const uintptr_t first = (uintptr_t)parts->data, at = (uintptr_t)output->data;
    if (at == first) return n > 0;
    if (at < first || n < 2 || !part_stride) return false; /* one part may have any stride */
    const uint64_t bytes = (uint64_t)(part_stride * output->element_bytes);
    return (at - first) % bytes == 0 && (at - first) / bytes < (uint64_t)n;
}

/* Checks that an output is apart from the parts, or exactly one of them. ndim: the output's dimensions. */
static fmla_status check_in_place(const struct checked_call *c, const struct checked_tensor *output,
                                  const struct checked_tensor *parts, const struct checked_tensor *last,
                                  int ndim)
{
    static const char except[] = " or exactly one part (the same type, address and strides)";
    if (!is_one_part(output, parts, parts->shape[0], parts->stride[0], parts->stride + 1, ndim) ||
        !elements_are_distinct(parts, ndim + 1))
        TRY(check_apart(c->operation, output, parts, except));
    if (!is_one_part(output, last, 1, 0, last->stride, ndim))
        TRY(check_apart(c->operation, output, last, except));
    return FMLA_OK;
}

static fmla_status check_memory(const struct checked_call *c)
{
    const struct checked_tensor *out = OF(out), *lse = OF(lse);
    TRY(check_in_place(c, out, OF(out_parts), OF(out_last), 4));
    TRY(check_in_place(c, lse, OF(lse_parts), OF(lse_last), 3));
    for (int i = 0; i < 3; i++) {
        const struct checked_tensor *const others[] = {OF(lse_parts), OF(lse_last), OF(attn_sink)};
        TRY(check_apart(c->operation, out, others[i], ""));
    }
    for (int i = 0; i < 4; i++) {
        const struct checked_tensor *const others[] = {OF(out_parts), OF(out_last), OF(attn_sink), out};
        TRY(check_apart(c->operation, lse, others[i], ""));
    }
    return FMLA_OK;
}

fmla_status fmla_merge(const fmla_merge_args *caller)
{
    fmla_merge_args args;
    struct checked_call checked;
    const struct checked_call *const c = &checked;
    TRY(check_call(OP_MERGE, caller, &args, false, &checked));
    TRY(check_parts(c, args.part));
    TRY(check_memory(c));
    const bool has_last = OF(out_last)->name;
    struct merge_problem p = {.n = c->size[DIM_n] + has_last,
                              .b = c->size[DIM_b],
                              .s_q = c->size[DIM_s_q],
                              .h_q = c->size[DIM_h_q],
                              .d_v = c->size[DIM_d_v],
                              .out_first = args.part ? args.part - 1 : 0,
                              .out_count = c->size[DIM_n_out] + has_last,
                              .last = has_last ? c->size[DIM_n] : -1,
                              .device = OF(out_parts)->device,
                              .part_element = OF(out_parts)->element,
                              .out_element = OF(out)->element,
                              .out_parts = OF(out_parts)->data,
                              .lse_parts = OF(lse_parts)->data,
                              .out_last = OF(out_last)->data,
                              .lse_last = OF(lse_last)->data,
                              .out = OF(out)->data,
                              .lse = OF(lse)->data,
                              .stream = args.stream};
    TRY(check_result_rules(c->operation, OF(attn_sink), args.lse_empty, args.log_base, &p.rules));
    memcpy(p.out_parts_stride, OF(out_parts)->stride, sizeof p.out_parts_stride);
    memcpy(p.lse_parts_stride, OF(lse_parts)->stride, sizeof p.lse_parts_stride);
    memcpy(p.out_last_stride, OF(out_last)->stride, sizeof p.out_last_stride);
    memcpy(p.lse_last_stride, OF(lse_last)->stride, sizeof p.lse_last_stride);
    memcpy(p.out_stride, OF(out)->stride, sizeof p.out_stride);
    memcpy(p.lse_stride, OF(lse)->stride, sizeof p.lse_stride);
    const struct wanted wanted = {.operation = OP_MERGE,
                                  .device = p.device,
                                  .argument = "out_parts",
                                  .elements = (1u << p.part_element) | (1u << p.out_element)};
    const struct kernel *kernel;
    TRY(dispatch(&wanted, args.kernel, &kernel));
    return kernel->driver->run(kernel->driver, (union problem){.merge = &p}, NULL);
}
