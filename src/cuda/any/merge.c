/* SPDX-License-Identifier: MIT */
#include "../attention.h"

#include <string.h>

static int64_t bytes_of(enum element element)
{
    return element == ELEMENT_F32 ? 4 : 2;
}

/* Returns whether rows allow 16-byte accesses. */
static bool vectors_aligned(const struct merge_problem *p)
{
    const int64_t shape[] = {p->out_count - (p->last >= 0), p->b, p->s_q, p->h_q};
    const int64_t bytes = bytes_of(p->part_element);
    return cuda_rows_aligned(p->out_parts, shape, p->out_parts_stride, 4, bytes, 16) &&
           (p->last < 0 || cuda_rows_aligned(p->out_last, shape + 1, p->out_last_stride, 3, bytes, 16)) &&
           cuda_rows_aligned(p->out, shape + 1, p->out_stride, 3, bytes_of(p->out_element), 16);
}

static fmla_status run(const struct kernel_driver *driver, union problem problem,
                       const struct prepared *prepared)
{
    static const char op[] = "merge";
    const struct merge_problem *p = problem.merge;
    (void)driver, (void)prepared;
    if (!p->b || !p->s_q || !p->h_q || (!p->d_v && !p->lse)) return FMLA_OK; /* nothing to write */
    struct merge_params params = {
        .n = p->n,
        .b = p->b,
        .s_q = p->s_q,
        .h_q = p->h_q,
        .d_v = p->d_v,
        .out_first = p->out_first,
        .out_count = p->out_count,
        .last = p->last,
        .out_last = p->out_last,
        .lse_last = p->lse_last,
        .out_parts = p->out_parts,
        .lse_parts = p->lse_parts,
        .out = p->out,
        .lse = p->lse,
        .rules = cuda_result_params(&p->rules),
        .part_element = (int32_t)p->part_element,
        .out_element = (int32_t)p->out_element,
        .vectors_aligned = vectors_aligned(p),
    };
    memcpy(params.out_parts_stride, p->out_parts_stride, sizeof params.out_parts_stride);
    memcpy(params.lse_parts_stride, p->lse_parts_stride, sizeof params.lse_parts_stride);
    memcpy(params.out_last_stride, p->out_last_stride, sizeof params.out_last_stride);
    memcpy(params.lse_last_stride, p->lse_last_stride, sizeof params.lse_last_stride);
    memcpy(params.out_stride, p->out_stride, sizeof params.out_stride);
    memcpy(params.lse_stride, p->lse_stride, sizeof params.lse_stride);

    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of((struct cuda_key){.schedule = CUDA_MERGE}),
        .blocks = p->b * p->s_q * p->h_q, /* fits: the rows of an output have 63-bit addresses */
        .stream = p->stream,
    };
    return cuda_launch_alone(op, "out_parts", p->device.id, &launch, (void *[]){&params});
}

const struct kernel_driver cuda_merge_driver = {.run = run};
