/* SPDX-License-Identifier: MIT */
#include "split.h"

#include <string.h>

enum {
    WORKERS_PER_SM = 16,   /* batch-invariant: chunks in hand at a time; lengths differ, so more than SMs */
    JOIN_BLOCKS_PER_SM = 2 /* enough to keep the memory busy; they take turns at the rows */
};

/* A plan in device memory is not read here. What is known of it must do: how large it is, and the number of partitions
 * that the caller gives or that the planner takes for this device. */
static fmla_status check_plan(const struct cuda_cut *cut)
{
    const size_t needed = plan_bytes(cut->b, cut->num_partitions);
    if (cut->plan_size < needed)
        return fail(FMLA_BUFFER_TOO_SMALL,
                    "%s: plan_size: is %zu, must be at least %zu bytes for %d partitions of %lld requests",
                    cut->operation, cut->plan_size, needed, cut->num_partitions, (long long)cut->b);
    if ((uintptr_t)cut->plan % 16)
        return fail(FMLA_INVALID_ARGUMENT, "%s: plan: is not aligned to 16 bytes", cut->operation);
    return FMLA_OK;
}

/* Behind what is there already; `rows`: of all slots together, < 0 where they do not fit 63 bits. */
static fmla_status place_slots(const struct cuda_cut *cut, int64_t rows, size_t at, struct cuda_split *s)
{
    int64_t floats, bytes;
    s->slot_out_offset = at;
    if (rows < 0 || __builtin_mul_overflow(rows, cut->d_v + 1, &floats) ||
        __builtin_mul_overflow(floats, (int64_t)sizeof(float), &bytes) || bytes > INT64_MAX / 4)
        return fail(
            FMLA_UNSUPPORTED,
            "%s: q: the partial results of %lld requests of up to %lld keys would not fit into memory that "
            "can be addressed",
            cut->operation, (long long)cut->b, (long long)cut->capacity);
    at += cuda_line_up((size_t)rows * (size_t)cut->d_v * sizeof(float));
    s->slot_lse_offset = at;
    at += cuda_line_up((size_t)rows * sizeof(float));
    s->bytes = at;
    return FMLA_OK;
}

fmla_status cuda_split_lay_out(const struct cuda_cut *cut, struct cuda_split *s)
{
    memset(s, 0, sizeof *s);
    size_t at = 0;
    if (cut->plan) {
        const fmla_status status = check_plan(cut);
        if (status) return status;
    }
    if (cut->chunk_keys) {
        /* Who takes which chunk changes no bit; batch-invariant, how many there are depends on the capacity alone. */
        s->chunks = cut->capacity > cut->chunk_keys ? cuda_ceil_div(cut->capacity, cut->chunk_keys) : 1;
        const int64_t wanted = cut->chunks_at_once ? s->chunks
                                                   : cuda_ceil_div((int64_t)WORKERS_PER_SM * cut->sms,
                                                                   (cut->b ? cut->b : 1) * cut->tiles);
        s->chunk_lanes = wanted < 1 ? 1 : wanted < s->chunks ? wanted : s->chunks;
        if (s->chunks > 1) s->slots = cut->b * s->chunks; /* < 2^31 · 2^20 */
    } else {
        s->num_partitions = cut->num_partitions;
        if (!cut->plan && !cut->plan_in_tables) at += cuda_line_up(plan_bytes(cut->b, s->num_partitions));
        if (s->num_partitions > 1) s->slots = 2 * (int64_t)s->num_partitions;
    }
    int64_t rows;
    if (__builtin_mul_overflow(s->slots, cut->rows, &rows)) rows = -1;
    return place_slots(cut, rows, at, s);
}

fmla_status cuda_split_bound(const struct cuda_cut *cut, const struct cuda_most *most, struct cuda_split *s)
{
    memset(s, 0, sizeof *s);
    s->num_partitions = most->partitions;
    return place_slots(cut, most->slot_rows, cuda_line_up(plan_bytes(cut->b, most->partitions)), s);
}

void cuda_most_add(struct cuda_most *most, int32_t partitions, int64_t rows)
{
    if (partitions > most->partitions) most->partitions = partitions;
    if (partitions > 1 && 2 * (int64_t)partitions * rows > most->slot_rows)
        most->slot_rows = 2 * (int64_t)partitions * rows;
}

int64_t cuda_split_workers(const struct cuda_cut *cut, const struct cuda_split *split)
{
    return cut->chunk_keys ? cut->b * split->chunk_lanes : split->num_partitions;
}

struct split_params cuda_split_params(const struct cuda_cut *cut, const struct cuda_split *split,
                                      const struct plan_partition *partitions, const int32_t *num_splits,
                                      void *workspace)
{
    char *at = workspace;
    struct split_params params = {.num_partitions = split->num_partitions,
                                  .chunks = (int32_t)split->chunks,
                                  .chunk_lanes = (int32_t)split->chunk_lanes,
                                  .chunk_keys = cut->chunk_keys};
    if (split->slots) {
        params.slot_out = (float *)(void *)(at + split->slot_out_offset);
        params.slot_lse = (float *)(void *)(at + split->slot_lse_offset);
    }
    if (cut->chunk_keys) return params;
    if (cut->plan_in_tables) {
        params.partitions = partitions, params.num_splits = num_splits;
    } else {
        const struct plan_header *plan = cut->plan ? cut->plan : (const void *)(at + split->plan_offset);
        params.header = plan, params.partitions = plan_partitions(plan);
        params.num_splits = (const int32_t *)(params.partitions + split->num_partitions);
    }
    return params;
}

/* Parts of a request that is cut, as far as the host knows. */
static int64_t parts_of_request(const struct join_params *params)
{
    const struct split_params *split = &params->split;
    const struct plan_topk *topk = &params->topk;
    const int64_t b = params->b, partitions = split->num_partitions;
    if (!split->partitions) return split->chunks;
    if (params->seqlens) return partitions / b;
    const int64_t length = plan_topk_length(topk->topk, topk->extra_topk, topk->extra_topk),
                  blocks = cuda_ceil_div(length, PLAN_BLOCK);
    return cuda_ceil_div(blocks, cuda_ceil_div(b * (blocks + PLAN_OVERHEAD), partitions));
}

fmla_status cuda_launch_join(const char *operation, const struct cuda_scope *scope, enum element element,
                             const struct join_params *params, unsigned flags, void *stream)
{
    const struct split_params *split = &params->split;
    const bool in_chunks = !split->partitions;
    if (!split->slot_out) return FMLA_OK;
    /* Requests that may be cut: a partition cuts one at most. */
    const int64_t requests =
        in_chunks || params->b < split->num_partitions ? params->b : split->num_partitions;
    const int64_t many = split->slots_in_halves ? MANY_PARTS_IN_HALVES : MANY_PARTS;
    int32_t rows_per_block = parts_of_request(params) > many ? 1 : JOIN_WARPS;
    const int64_t row_blocks = cuda_ceil_div((int64_t)params->h_q * params->s_q, rows_per_block);
    const int64_t most = (int64_t)JOIN_BLOCKS_PER_SM * scope->device->sms;
    /* Rows are cut into columns, as long as there are threads for it: 1, 2 or 4 pieces. */
    int cuts = 0;
    while (cuts < 2 && (requests * row_blocks) << (cuts + 1) <= most) cuts++;
    const int64_t most_rows = most >> cuts;
    int32_t row_lanes = (int32_t)(row_blocks < most_rows ? row_blocks : most_rows);
    const int64_t request_lanes = requests < most_rows / row_lanes ? requests : most_rows / row_lanes;
    struct join_params copy = *params;
    const struct cuda_launch launch = {
        .kernel = &cuda_kernel_join[split->slots_in_halves][element][cuts],
        .blocks = (request_lanes * row_lanes) << cuts,
        .threads = 32 * JOIN_WARPS,
        .flags = flags,
        .stream = stream,
    };
    return cuda_launch(operation, scope, &launch, (void *[]){&copy, &rows_per_block, &row_lanes});
}
