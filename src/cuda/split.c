/* SPDX-License-Identifier: MIT */
#include "attention.h"

#include <string.h>

enum {
    WORKERS_PER_SM = 16,   /* batch-invariant: splits in flight; more than SMs, because lengths differ */
    JOIN_BLOCKS_PER_SM = 2 /* enough to saturate memory; they take turns at the rows */
};

/* A plan in device memory is not read here. Only its size is checked, for the number of partitions that the
 * caller gives or that the planner takes for this device. */
static fmla_status check_plan(const struct attention_problem *p, const struct cuda_work *w)
{
    const char *operation = operation_name(p->operation);
    const size_t needed = plan_bytes(p->b, w->split.num_partitions);
    if (p->plan_size < needed)
        return fail(FMLA_BUFFER_TOO_SMALL,
                    "%s: plan_size: is %zu, must be at least %zu bytes for %d partitions of %lld requests",
                    operation, p->plan_size, needed, w->split.num_partitions, (long long)p->b);
    if ((uintptr_t)p->plan % 16)
        return fail(FMLA_INVALID_ARGUMENT, "%s: plan: is not aligned to 16 bytes", operation);
    return FMLA_OK;
}

fmla_status cuda_place_parts(const struct attention_problem *p, int64_t rows, size_t at, struct cuda_work *w)
{
    int64_t floats, bytes;
    w->split.part_out_offset = at;
    if (rows < 0 || __builtin_mul_overflow(rows, p->d_v + 2, &floats) ||
        __builtin_mul_overflow(floats, (int64_t)sizeof(float), &bytes) || bytes > INT64_MAX / 4)
        return fail(FMLA_UNSUPPORTED,
                    "%s: q: the partial results of %lld requests of up to %lld keys exceed the address space",
                    operation_name(p->operation), (long long)p->b, (long long)p->capacity);
    at += cuda_line_up((size_t)rows * (size_t)p->d_v * sizeof(float));
    w->split.part_ends_offset = at;
    w->bytes = at + cuda_line_up((size_t)rows * sizeof(struct part_end));
    return FMLA_OK;
}

fmla_status cuda_lay_out(const struct attention_problem *p, struct cuda_work *w)
{
    size_t at = 0;
    if (p->plan) {
        const fmla_status status = check_plan(p, w);
        if (status) return status;
    }
    w->split.makes_plan = !w->split.keys && !p->plan && !p->plan_in_tables;
    w->split.parts = 0;
    if (w->split.keys) {
        /* The assignment of splits to workers changes no bit. In batch-invariant mode the number of splits
         * depends on the capacity alone. */
        w->split.even_splits = p->capacity > w->split.keys ? cuda_ceil_div(p->capacity, w->split.keys) : 1;
        const int64_t wanted = w->split.at_once ? w->split.even_splits
                                                : cuda_ceil_div((int64_t)WORKERS_PER_SM * w->device->sms,
                                                                (p->b ? p->b : 1) * w->launch.tiles);
        w->split.lanes = wanted < 1 ? 1 : wanted < w->split.even_splits ? wanted : w->split.even_splits;
        if (w->split.even_splits > 1) w->split.parts = p->b * w->split.even_splits; /* < 2^31 · 2^20 */
    } else {
        if (w->split.makes_plan) at += cuda_line_up(plan_bytes(p->b, w->split.num_partitions));
        if (w->split.num_partitions > 1) w->split.parts = 2 * (int64_t)w->split.num_partitions;
    }
    w->split.join = w->split.parts ? JOIN_BY_LAUNCH : JOIN_NONE;
    int64_t rows;
    if (__builtin_mul_overflow(w->split.parts, p->h_q * p->s_q, &rows)) rows = -1;
    return cuda_place_parts(p, rows, at, w);
}

fmla_status cuda_lay_out_most(const struct attention_problem *p, const struct cuda_most *most,
                              struct cuda_work *w)
{
    return cuda_place_parts(p, most->part_rows, cuda_line_up(plan_bytes(p->b, most->partitions)), w);
}

void cuda_most_add(struct cuda_most *most, int32_t partitions, int64_t rows)
{
    if (partitions > most->partitions) most->partitions = partitions;
    if (partitions > 1 && 2 * (int64_t)partitions * rows > most->part_rows)
        most->part_rows = 2 * (int64_t)partitions * rows;
}

void cuda_place_cta_group_barriers(struct cuda_work *w)
{
    w->split.cta_group_barriers_offset = w->bytes;
    w->bytes += cuda_line_up((size_t)w->device->sms * sizeof(uint64_t));
}

uint64_t *cuda_cta_group_barriers(const struct attention_problem *p, const struct cuda_work *w)
{
    return (uint64_t *)(void *)((char *)p->workspace + w->split.cta_group_barriers_offset);
}

int64_t cuda_blocks(const struct attention_problem *p, const struct cuda_work *w)
{
    return (w->split.keys ? p->b * w->split.lanes : w->split.num_partitions) * w->launch.tiles;
}

struct split_params cuda_split_params(const struct attention_problem *p, const struct cuda_work *w)
{
    char *at = p->workspace;
    struct split_params params = {.num_partitions = w->split.keys ? 0 : w->split.num_partitions,
                                  .even_splits = (int32_t)w->split.even_splits,
                                  .split_lanes = (int32_t)w->split.lanes,
                                  .split_keys = w->split.keys,
                                  .parts_in_halves = w->split.parts_in_halves};
    if (w->split.parts) {
        params.part_out = (float *)(void *)(at + w->split.part_out_offset);
        params.part_ends = (struct part_end *)(void *)(at + w->split.part_ends_offset);
    }
    if (w->dense.ready_tiles) {
        params.ready_flags = (uint32_t *)(void *)(at + w->dense.ready_flags_offset);
        params.tiles = (int32_t)w->dense.ready_tiles,
        params.tiles_of_head = (int32_t)(w->dense.ready_tiles / p->h_kv);
    }
    if (w->split.keys) return params;
    if (p->plan_in_tables) {
        params.partitions = p->partitions, params.num_splits = p->num_splits;
    } else {
        const struct plan_header *plan = p->plan ? p->plan : p->workspace;
        params.header = plan, params.partitions = plan_partitions(plan);
        params.num_splits = (const int32_t *)(params.partitions + w->split.num_partitions);
    }
    return params;
}

/* Returns the parts of a split request, estimated from what the host knows. */
static int64_t parts_of_request(const struct attention_problem *p, const struct cuda_work *w)
{
    if (w->split.keys) return w->split.even_splits;
    if (p->keys[0].kind == KEYS_PAGED) return w->split.num_partitions / p->b;
    const int64_t blocks = cuda_ceil_div(p->capacity, PLAN_BLOCK);
    return cuda_ceil_div(blocks, cuda_ceil_div(p->b * (blocks + PLAN_OVERHEAD), w->split.num_partitions));
}

fmla_status cuda_launch_join(const struct cuda_scope *scope, const struct attention_problem *p,
                             const struct cuda_work *w)
{
    const bool evenly = w->split.keys != 0, paged = p->keys[0].kind == KEYS_PAGED;
    const int64_t group = p->h_q / p->h_kv;
    struct join_params params = {
        .b = (int32_t)p->b,
        .s_q = (int32_t)p->s_q,
        .h_q = (int32_t)p->h_q,
        .group = (int32_t)group,
        .rows = (int32_t)(p->s_q * group),
        .group_divisor = divisor_of((uint32_t)group),
        .split = cuda_split_params(p, w),
        .output = cuda_output_params(p),
    };
    if (paged)
        params.seqlens = p->keys[0].lengths, params.capacity = (int32_t)p->capacity;
    else
        params.topk = attention_lists(p);
    /* A partition splits at most one request. */
    const int64_t requests = evenly || p->b < w->split.num_partitions ? p->b : w->split.num_partitions;
    const int64_t many = w->split.parts_in_halves ? MANY_PARTS_IN_HALVES : MANY_PARTS;
    int32_t rows_per_block = parts_of_request(p, w) > many ? 1 : JOIN_WARPS;
    const int64_t row_blocks = cuda_ceil_div(p->h_q * p->s_q, rows_per_block);
    const int64_t most = (int64_t)JOIN_BLOCKS_PER_SM * scope->device->sms;
    /* Rows are divided by columns into 1, 2 or 4 shares, as long as there are threads for them. */
    int halvings = 0;
    while (halvings < 2 && (requests * row_blocks) << (halvings + 1) <= most) halvings++;
    const int64_t most_rows = most >> halvings;
    int32_t row_lanes = (int32_t)(row_blocks < most_rows ? row_blocks : most_rows);
    const int64_t request_lanes = requests < most_rows / row_lanes ? requests : most_rows / row_lanes;
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of(
            (struct cuda_key){.schedule = w->split.parts_in_halves ? CUDA_SM90_JOIN_HALF_ROWS : CUDA_JOIN,
                              .element = p->element,
                              .variant = halvings}),
        .blocks = (request_lanes * row_lanes) << halvings,
        .flags = w->launch.flags,
        .stream = p->stream,
    };
    return cuda_launch(operation_name(p->operation), scope, &launch,
                       (void *[]){&params, &rows_per_block, &row_lanes});
}
