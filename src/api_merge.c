/* SPDX-License-Identifier: MIT
 *
 * The public function of merge.
 */
#include "api.h"

#include <string.h>

fmla_status fmla_merge(const fmla_merge_args *caller)
{
    fmla_merge_args args;
    struct checked_call c;
    TRY(check_call(OP_MERGE, caller, &args, false, &c));
    const struct checked_tensor *t = c.tensors, *out_parts = &t[TENSOR_merge_out_parts],
                                *lse_parts = &t[TENSOR_merge_lse_parts], *out = &t[TENSOR_merge_out],
                                *lse = &t[TENSOR_merge_lse];
    struct merge_problem p = {.n = c.size[DIM_n],
                              .b = c.size[DIM_b],
                              .s_q = c.size[DIM_s_q],
                              .h_q = c.size[DIM_h_q],
                              .d_v = c.size[DIM_d_v],
                              .device = out_parts->device,
                              .part_element = out_parts->element,
                              .out_element = out->element,
                              .out_parts = out_parts->data,
                              .lse_parts = lse_parts->data,
                              .out = out->data,
                              .lse = lse->data,
                              .stream = args.stream};
    TRY(check_result_rules(c.operation, &t[TENSOR_merge_attn_sink], args.lse_empty, args.log_base, &p.rules));
    memcpy(p.out_parts_stride, out_parts->stride, sizeof p.out_parts_stride);
    memcpy(p.lse_parts_stride, lse_parts->stride, sizeof p.lse_parts_stride);
    memcpy(p.out_stride, out->stride, sizeof p.out_stride);
    memcpy(p.lse_stride, lse->stride, sizeof p.lse_stride);
    const struct wanted wanted = {.operation = OP_MERGE,
                                  .device = p.device,
                                  .argument = "out_parts",
                                  .elements = (1u << p.part_element) | (1u << p.out_element)};
    const struct kernel *kernel;
    TRY(dispatch(&wanted, args.kernel, &kernel));
    return kernel->driver->run(kernel->driver, (union problem){.merge = &p}, NULL);
}
