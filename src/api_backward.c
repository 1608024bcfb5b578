/* SPDX-License-Identifier: MIT
 *
 * The public functions of the gradients of dense MHA. They check what the descriptor cannot express and build
 * the problem for the back ends.
 */
#include "api.h"

#include <string.h>

struct call {
    fmla_mha_backward_args args;
    struct checked_call checked;
    struct backward_problem problem;
    struct taken taken;
};

#define OF(member) (&c->checked.tensors[TENSOR_mha_backward_##member])

static struct token_view view_of(const struct call *c, const struct checked_tensor *tensor)
{
    const bool flat = c->checked.flat;
    return (struct token_view){tensor->data, flat ? 0 : tensor->stride[0], tensor->stride[1 - flat],
                               tensor->stride[2 - flat]};
}

/* Returns the most tokens of a request: the caller's bound if given, at most `all`. */
static int64_t most_of(int64_t said, int64_t all)
{
    return said && said < all ? said : all;
}

static void fill(struct call *c)
{
    const fmla_mha_backward_args *args = &c->args;
    const bool flat = c->checked.flat;
    const int64_t *size = c->checked.size, *of_lse = OF(lse)->stride, *of_dlse = OF(dlse)->stride;
    c->problem = (struct backward_problem){
        .b = flat ? size[DIM_splits] - 1 : size[DIM_b],
        .s_q = flat ? most_of(args->max_s_q, size[DIM_tokens_q]) : size[DIM_s_q],
        .s_k = flat ? most_of(args->max_s_k, size[DIM_tokens_k]) : size[DIM_s_k],
        .max_s_q = args->max_s_q,
        .h_q = size[DIM_h_q],
        .h_kv = size[DIM_h_kv],
        .d_qk = size[DIM_d_qk],
        .d_v = size[DIM_d_v],
        .is_ragged = flat,
        .ragged_q = {OF(cu_seqlens_q)->data, size[DIM_tokens_q], OF(seqused_q)->data},
        .ragged_k = {OF(cu_seqlens_k)->data, size[DIM_tokens_k], OF(seqused_k)->data},
        .element = OF(q)->element,
        .device = OF(q)->device,
        .q = view_of(c, OF(q)),
        .k = view_of(c, OF(k)),
        .v = view_of(c, OF(v)),
        .out = view_of(c, OF(out)),
        .dout = view_of(c, OF(dout)),
        .dq = view_of(c, OF(dq)),
        .dk = view_of(c, OF(dk)),
        .dv = view_of(c, OF(dv)),
        .lse = OF(lse)->data,
        .dlse = OF(dlse)->data,
        .lse_stride = {flat ? 0 : of_lse[0], of_lse[1 - flat]},
        .dlse_stride = {flat ? 0 : of_dlse[0], of_dlse[1 - flat]},
        .d_attn_sink = OF(d_attn_sink)->data,
        .causal = args->causal,
        .deterministic = args->deterministic,
        .stream = args->stream,
    };
    c->taken = (struct taken){.operation = c->checked.operation,
                              .problem.backward = &c->problem,
                              .workspace_of_problem = &c->problem.workspace,
                              .workspace = args->workspace,
                              .workspace_size = args->workspace_size};
}

/* Checks a call and fills everything except the workspace. */
static fmla_status prepare(enum operation operation, const void *caller, bool shape_only, struct call *c)
{
    struct backward_problem *p = &c->problem;
    TRY(check_call(operation, caller, &c->args, shape_only, &c->checked));
    const char *op = c->checked.operation;
    TRY(check_starts(&c->checked, "cu_seqlens_q", OF(cu_seqlens_q)));
    TRY(check_starts(&c->checked, "cu_seqlens_k", OF(cu_seqlens_k)));
    TRY(check_used(&c->checked, OF(seqused_q)));
    TRY(check_used(&c->checked, OF(seqused_k)));
    fill(c);
    TRY(check_result_rules(op, OF(attn_sink), 0, c->args.log_base, &p->rules));
    if (OF(d_attn_sink)->name && !OF(attn_sink)->name)
        return fail(FMLA_INVALID_ARGUMENT, "%s: d_attn_sink: is a tensor, must be NULL without attn_sink",
                    op);
    TRY(check_scale(op, c->args.softmax_scale, p->d_qk, &p->scale));
    TRY(check_heads(op, "q", p->h_q, p->h_kv));
    const struct wanted wanted = {.operation = operation,
                                  .device = p->device,
                                  .argument = "q",
                                  .values = "v",
                                  .elements = 1u << p->element,
                                  .d_qk = p->d_qk,
                                  .d_v = p->d_v,
                                  .problem.backward = p};
    return dispatch(&wanted, c->args.kernel, &c->taken.kernel);
}

static void bound(struct call *c)
{
    c->problem.bound = true;
}

PUBLIC_FUNCTIONS(mha_backward, OP_MHA_BACKWARD)
